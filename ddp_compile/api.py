"""``ddp_compile``, the main function of the package."""

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Never, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ddp_compile.algorithms import AlgorithmConfig, GradientAllReduce, check_algorithm
from ddp_compile.compile.settings import CompileSettings
from ddp_compile.config import (
    CheckReplicas,
    EvaluationMode,
    RegionClasses,
    ReplicateConfig,
    SplitMode,
    caps_from_mib,
    refuse_positional_arguments,
    refuse_unknown_arguments,
)
from ddp_compile.errors import this_rank
from ddp_compile.features.compatibility import Feature, refuse_pairs
from ddp_compile.features.delayed_all_reduce import delayed_parameters
from ddp_compile.module.module_checks import check_devices, check_module, names_to_ignore, resolve_process_group
from ddp_compile.module.replicated_class import replicate
from ddp_compile.validation.torch_version import warn_of_newer_torch

ModuleT = TypeVar("ModuleT", bound=nn.Module)

GRADIENT_ALL_REDUCE = GradientAllReduce()


def ddp_compile(
    module: ModuleT,
    *positional: Never,
    process_group: dist.ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
    bucket_cap_mb: float | Sequence[float] | None = None,
    first_bucket_cap_mb: float = 1.0,
    bucket_plan: str | os.PathLike[str] | None = None,
    split: SplitMode = "auto",
    broadcast_buffers: bool = True,
    init_sync: bool = True,
    gradient_as_bucket_view: bool = True,
    lazy_bucket_allocation: bool = False,
    find_unused_parameters: bool = False,
    skip_all_reduce_unused_params: bool = False,
    static_graph: bool = False,
    parameters_to_ignore: Iterable[str] = (),
    delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
    param_to_hook_all_reduce: nn.Parameter | None = None,
    algorithm: AlgorithmConfig = GRADIENT_ALL_REDUCE,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
    compile_evaluation: EvaluationMode = "auto",
    regions: RegionClasses | None = None,
    reduce_dtype: torch.dtype | None = None,
    check_replicas: CheckReplicas = "raise",
    **unknown: Never,
) -> ModuleT:
    """Make ``module`` train data-parallel and compiled, in place.

    Replaces ``torch.compile(DistributedDataParallel(module))``. The module stays the same object, with the same
    parameter names and the same ``state_dict()`` keys. It gains ``no_sync()``, ``require_backward_grad_sync``,
    ``bucket_plan``, ``explain()``, ``register_comm_hook()``, ``unwrap()`` and others. Type checkers know them after
    ``assert is_replicated(model)``. The package has `is_replicated`, and `no_sync`, `explain` and `unwrap` as functions
    too; a module that already has one of these names keeps its own.

    After a backward, each ``.grad`` is the mean over the ranks, with the same bits on every rank.

    Args:
        module: The module, on its device, built in the same way on every rank.
        *positional: Refused: all other arguments are passed by name. For ``device_ids``, the second argument of
            DistributedDataParallel, the error says what to do.
        process_group: The ranks to average over; the default group if None.
        device_mesh: A one-dimensional mesh, instead of ``process_group``.
        bucket_cap_mb: Bucket capacity in MiB, any positive number, or a list with one capacity for each bucket in
            launch order. None means 5 on a CPU, and on a GPU 25 or, from 201 ranks on, an eighth of their number.
        first_bucket_cap_mb: Capacity in MiB of the bucket that is launched first; at most ``bucket_cap_mb``.
        bucket_plan: A file that ``model.bucket_plan.save(path)`` or ``python -m ddp_compile plan --save path`` has
            written, with a plan of the same model. It replaces the capacities; docs/planning.md.
        split: How buckets are launched while a compiled backward runs. "forward" cuts graphs at bucket boundaries;
            "backward" leaves them whole and launches buckets inside the compiled backward; "none" launches all of them
            after it. "auto" chooses for each graph: "forward" if that launches every bucket early, and "backward" if
            some buckets could not be cut apart, for example under one checkpoint. The log of ``ddp_compile`` says
            which.
        broadcast_buffers: Broadcast rank 0's buffers before each forward with gradients outside ``no_sync``.
        init_sync: Broadcast rank 0's parameters and buffers now.
        gradient_as_bucket_view: Make each ``.grad`` a view into the flat buffer of its bucket, which saves a copy,
            unless other code holds the gradient or an earlier view. False copies the mean into the gradients that
            autograd made.
        lazy_bucket_allocation: Allocate each flat buffer when its gradients are there, and free it after the backward.
            Forwards then have that much more memory if ``zero_grad()`` has freed the gradients.
        find_unused_parameters: Allow backwards that leave parameters without a gradient, which may differ each time and
            on each rank. The ranks exchange which ones. A parameter that no rank used keeps its ``.grad``.
        skip_all_reduce_unused_params: Do not send buckets that no rank uses in the first iteration. If one is used
            later, it is an error: on every rank with ``find_unused_parameters``, and on the rank that uses it with
            ``static_graph``. Without either of these, this setting has no effect.
        static_graph: Promise that every iteration brings the same gradients, each as often as the first one did. For
            reentrant checkpoints that use a weight several times, and for unused parameters that are always the same.
            The buckets of the first iteration are launched at its end. Replaces ``find_unused_parameters``.
        parameters_to_ignore: Names of parameters and buffers that are neither broadcast nor reduced. Those that
            DistributedDataParallel's ``_set_params_and_buffers_to_ignore_for_model`` has set are added.
        delay_all_reduce_named_params: Pairs of name and parameter. The reducer leaves out these parameters. Their
            gradients are averaged at the end of each backward that brings the gradient of ``param_to_hook_all_reduce``,
            inside ``no_sync`` too.
        param_to_hook_all_reduce: See ``delay_all_reduce_named_params``. It must not be used in a reentrant checkpoint.
        algorithm: How the ranks reduce a bucket, see `ddp_compile.algorithms`; the same on every rank.
        backend: As in ``torch.compile``; compiles each graph, or each part of a graph that is cut.
        mode: As in ``torch.compile``.
        fullgraph: As in ``torch.compile``.
        dynamic: As in ``torch.compile``.
        options: As in ``torch.compile``.
        compile_evaluation: Whether to compile forwards without gradients, such as those under ``torch.no_grad()``.
            "auto": all except those of the module's method ``generate``, each of which has another shape. True: these
            too. False: none.
        regions: Instead of the whole module, compile blocks that repeat, once for all blocks of a class, which takes
            much less time. "auto": children of a ModuleList, Sequential or ModuleDict that have submodules, if two or
            more are of one class. Or a list of module classes. Everything outside regions runs eagerly. Buckets begin
            and end at the boundaries of regions.
        reduce_dtype: ``torch.float32``: reduce the gradients of bfloat16 and float16 parameters in float32, from the
            flatten on. Each mean is rounded once, when it is copied to ``.grad``; a sharded optimizer with master
            weights gets it in float32. None: reduce in the parameter's dtype. Sparse gradients keep theirs.
        check_replicas: In iterations 1, 2, 4, 8, ... and every 128th, compare the bits of the reduced parameters of all
            ranks. If they differ: "raise" an error on every rank that names ranks and parameters; or "repair", for
            three ranks or more: the next forward broadcasts the parameters that most ranks have, and logs it. False
            compares nothing. Not compared where ranks may differ on purpose: with averages of parameters, with comm
            hooks, inside ``Join``, and after steps with gradients from ``no_sync``.
        **unknown: Refused. For an argument of DistributedDataParallel, the error says what to do.

    Returns:
        ``module`` itself.

    Raises:
        TypeError: Not a module, or an unknown argument.
        ValueError: A setting out of range.
        ReplicationError: The module cannot be replicated, settings exclude each other (docs/feature_compatibility.md),
            or no process group has been initialized. It is a RuntimeError, like those of DistributedDataParallel, and
            also a ValueError.
        RanksDifferError: The ranks were given different models.
    """
    refuse_positional_arguments(positional)
    refuse_unknown_arguments(unknown, argument_names())
    chosen = {
        Feature.SPLIT: f"split={split!r}" if split != "auto" else None,
        Feature.REGIONS: f"regions={regions!r}" if regions is not None else None,
        Feature.MODE: f"mode={mode!r}" if mode is not None else None,
        Feature.OPTIONS: f"options={options!r}" if options is not None else None,
        Feature.PROCESS_GROUP: "process_group" if process_group is not None else None,
        Feature.DEVICE_MESH: "device_mesh" if device_mesh is not None else None,
    }
    refuse_pairs({feature: said for feature, said in chosen.items() if said is not None})
    if bucket_cap_mb is not None and bucket_plan is not None:
        raise ValueError(
            f"{this_rank()}: bucket_cap_mb={bucket_cap_mb!r} and bucket_plan={os.fspath(bucket_plan)!r} each say what a"
            " bucket holds; pass one of them"
        )
    delayed = delayed_parameters(module, delay_all_reduce_named_params, param_to_hook_all_reduce)
    ignored = names_to_ignore(module, parameters_to_ignore) - delayed.named.keys()
    check_module(module, ignored | delayed.named.keys())
    check_algorithm(algorithm)
    group = resolve_process_group(process_group, device_mesh)
    device_type = next(module.parameters()).device.type
    caps_bytes = caps_from_mib(bucket_cap_mb, first_bucket_cap_mb, device_type, group.size())
    config = ReplicateConfig(
        caps_bytes=caps_bytes,
        split=split,
        broadcast_buffers=broadcast_buffers,
        init_sync=init_sync,
        gradient_as_bucket_view=gradient_as_bucket_view,
        lazy_bucket_allocation=lazy_bucket_allocation,
        find_unused_parameters=find_unused_parameters,
        skip_all_reduce_unused_params=skip_all_reduce_unused_params,
        static_graph=static_graph,
        parameters_to_ignore=ignored,
        delayed=delayed,
        device_mesh=device_mesh,
        compile_evaluation=compile_evaluation,
        regions=regions,
        bucket_plan=bucket_plan,
        reduce_dtype=reduce_dtype,
        check_replicas=check_replicas,
    )
    if group.rank() == 0 and find_unused_parameters and static_graph:
        warnings.warn(
            "find_unused_parameters=True has no effect with static_graph=True, which learns from the first iteration"
            " which parameters are unused; drop one of them",
            stacklevel=2,
        )
    if group.rank() == 0 and skip_all_reduce_unused_params and not (find_unused_parameters or static_graph):
        warnings.warn(
            "skip_all_reduce_unused_params=True has no effect without find_unused_parameters=True or"
            " static_graph=True, since every parameter must get a gradient; pass one of them, or drop it",
            stacklevel=2,
        )
    compile_settings = CompileSettings(backend, mode, fullgraph, dynamic, options)
    if check_replicas == "repair" and group.size() == 2:
        raise ValueError(
            f"{this_rank()}: check_replicas='repair' needs a majority of ranks, which has the right parameters, and the"
            " process group has 2 ranks; pass 'raise'"
        )
    check_devices(module, config, group)
    warn_of_newer_torch(group.rank())
    replicate(module, group, config, algorithm, compile_settings)
    return module


def argument_names() -> set[str]:
    """The names of the arguments of ``ddp_compile``."""
    parameters = inspect.signature(ddp_compile).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
