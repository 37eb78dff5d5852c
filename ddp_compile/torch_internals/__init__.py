"""Every private torch name that this package uses, in torch 2.11 to 2.15. docs/torch_facts.md says how they differ.

No other file of the package may use one: tests/unit/test_layers.py.
"""

from ddp_compile.torch_internals.autograd import (
    accumulator_of,
    are_going_to_run,
    current_graph_task_id,
    has_gradient_hooks,
    inside_distributed_autograd,
    is_accumulating_into,
    is_inside_backward,
    never_compile,
    num_hooks_of_others,
    post_accumulate_grad_hooks,
    profiled_range,
    queue_backward_callback,
    register_own,
    run_last,
    with_hooks_of_others,
)
from ddp_compile.torch_internals.backward_compile import (
    AcceptFailure,
    BackwardPass,
    GraphEdit,
    compile_with_eager_backward,
    editing_backend,
    inputs_of_gradients,
    positions_of_inputs,
    repeats_random_numbers,
)
from ddp_compile.torch_internals.compile_caches import right_cache_entries
from ddp_compile.torch_internals.dynamo import (
    InnerBackend,
    code_being_compiled,
    compile_isolated,
    compiled_autograd_is_on,
    copy_dynamo_metadata,
    forget_code,
    forget_compiled,
    graphs_log,
    has_isolated_recompiles,
    inner_backend,
    is_request_to_dynamo,
    is_traced,
    is_whole_frame,
    known_modes,
    leaves_calls_to_python,
    loses_gradients_of_collectives,
    partition_tracing_context,
    trace_artifact,
    traced_call_of,
    watch_compilations,
)
from ddp_compile.torch_internals.fake_training import (
    fake_process_group,
    fake_tensors,
    make_fake,
    num_contributions,
    own_error,
    quiet_fake_mode,
    traced_only,
)
from ddp_compile.torch_internals.fully_shard import (
    all_reduce_hook_of_fully_shard,
    parameters_of_fully_shard,
    ranks_of_fully_shard,
    remove_all_reduce_hook,
    state_of_fully_shard,
)
from ddp_compile.torch_internals.graph_breaks import GraphBreaks, in_python, leave_call_to_python
from ddp_compile.torch_internals.module_calls import (
    active_ddp,
    compiled_call_of,
    inside_optimizer_step,
    is_disabled_for_dynamo,
    is_module_call,
    only_stands_in,
    outside_transforms,
    set_compiled_call,
    swapped_in,
)
from ddp_compile.torch_internals.operator_times import OperatorTimes
from ddp_compile.torch_internals.process_groups import (
    all_gather_single,
    backend_name,
    broadcast_coalesced,
    device_types,
    disabled_join_config,
    group_timeout,
    groups_of_some_ranks,
    holds_server,
    is_registered,
    preserved_versions,
    reduce_scatter_single,
    shut_down_connection,
    started,
    unprofiled_messages,
)
from ddp_compile.torch_internals.tensors import (
    NO_TORCH_FUNCTION,
    SPARSE_FROM_PARTS,
    UNSCALE,
    allows_same_attention_kernels,
    as_plain_tensors,
    call_with_fakes,
    fake_like,
    fake_mode_of,
    free_symbols,
    has_equal_parts,
    is_dtensor,
    is_plain_tensor,
    key_of_storage,
    local_tensor,
    local_tensors,
    may_hide_tensors,
    num_bytes_hint,
    num_references,
    num_storage_uses,
    sparse_values,
    storage_key,
    symbol_bound_by,
    tensors_in,
    to_fake,
    wrapper_subclass,
)
from ddp_compile.torch_internals.user_code import UserLine, is_of_users, user_line_of
