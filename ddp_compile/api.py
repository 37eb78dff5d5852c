"""``ddp_compile``, the function that all begins with."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Never, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ddp_compile.algorithms import AlgorithmConfig, GradientAllReduce, check_algorithm
from ddp_compile.compile.settings import CompileSettings
from ddp_compile.config import (
    EvaluationMode,
    RegionClasses,
    ReplicateConfig,
    SplitMode,
    caps_from_mib,
    refuse_positional_arguments,
    refuse_unknown_arguments,
)
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
    split: SplitMode = "auto",
    broadcast_buffers: bool = True,
    init_sync: bool = True,
    gradient_as_bucket_view: bool = True,
    lazy_bucket_allocation: bool = False,
    find_unused_parameters: bool = False,
    skip_all_reduce_unused_params: bool = False,
    static_graph: bool = False,
    check_finite_gradients: bool = False,
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
    **unknown: Never,
) -> ModuleT:
    """Make ``module`` train data-parallel and compiled, in place.

    Takes the place of ``torch.compile(DistributedDataParallel(module))``. The module stays the same object, with the
    same parameter names and the same ``state_dict()`` keys; it gains ``no_sync()``,
    ``require_backward_grad_sync``, ``bucket_plan``, ``explain()``, ``register_comm_hook()`` and ``unwrap()``. Type
    checkers know of them where `ddp_compile.is_replicated` has been asked; `ddp_compile.no_sync`, `ddp_compile.explain`
    and `ddp_compile.unwrap` are functions as well, and a module that has such a name itself keeps its own.

    After a backward, each ``.grad`` is the mean over the ranks, on every rank the same bits.

    Args:
        module: The module, on its device, built alike on every rank.
        *positional: Nothing else is taken by position; ``device_ids``, DistributedDataParallel's second argument, is
            refused with what to write instead.
        process_group: Ranks to average over; the default group when None.
        device_mesh: A one-dimensional mesh, in place of ``process_group``.
        bucket_cap_mb: Bucket capacity in MiB, any positive number, or a list with one for each bucket in launch order.
            None means 5 for a module on a CPU and 25 for one on a GPU.
        first_bucket_cap_mb: Capacity in MiB of the first bucket to be launched; cut down to ``bucket_cap_mb``.
        split: How buckets come to be launched while a compiled backward goes on. "forward" cuts graphs at bucket
            boundaries, "backward" leaves them whole and launches each bucket inside the compiled backward, "none"
            launches all of them when it has ended. "auto" chooses for each graph: "forward" where every bucket is
            launched early so, and "backward" where some could not be cut apart, for example under one checkpoint; the
            log of ``ddp_compile`` says which.
        broadcast_buffers: Broadcast rank 0's buffers before each forward with gradients outside of ``no_sync``.
        init_sync: Broadcast rank 0's parameters and buffers now.
        gradient_as_bucket_view: ``.grad`` is a view into the flat buffer of its bucket, which saves a copy, unless
            somebody else holds the gradient, or a view of before. False copies the result into the gradients that
            autograd made.
        lazy_bucket_allocation: Allocate each flat buffer when its gradients are there, and let it go when the backward
            has ended: forwards have that much more memory, once ``zero_grad()`` has freed the gradients.
        find_unused_parameters: Backwards may leave parameters without a gradient, each time and on each rank others.
            The ranks tell each other which; a parameter that no rank used keeps the ``.grad`` it has, None for example.
        skip_all_reduce_unused_params: Do not send a bucket again that no rank uses in the first iteration. If one is
            used after all, every rank raises with ``find_unused_parameters``, and the rank that uses it with
            ``static_graph``; it has no effect without one of them.
        static_graph: The same gradients come in every iteration, as often as in the first one: for reentrant
            checkpoints that run over a weight several times, and for unused parameters that are always the same. The
            first iteration's gradients are launched at its end. Takes the place of ``find_unused_parameters``.
        check_finite_gradients: Look at every gradient before it is reduced. If one is infinite or NaN on any rank,
            every rank raises a NonFiniteGradientError at the end of the backward, which names rank, bucket and
            parameter. The ranks send one byte more in each iteration, and the host waits for the device once. Not with
            a ``GradScaler``, whose gradients may be infinite.
        parameters_to_ignore: Names of parameters and buffers that are neither broadcast nor reduced.
        delay_all_reduce_named_params: Names and parameters that the reducer leaves out: their gradients are averaged at
            the end of a backward in which that of ``param_to_hook_all_reduce`` comes, inside ``no_sync`` as well. That
            parameter must not be in a reentrant checkpoint.
        param_to_hook_all_reduce: See ``delay_all_reduce_named_params``.
        algorithm: How the ranks reduce a bucket, see `ddp_compile.algorithms`; the same on every rank.
        backend: As in ``torch.compile``; compiles each graph, or each part of a cut one.
        mode: As in ``torch.compile``.
        fullgraph: As in ``torch.compile``: raise at a graph break. And raise the compiler's error where it fails at a
            graph, which otherwise runs eagerly with a warning.
        dynamic: As in ``torch.compile``.
        options: As in ``torch.compile``.
        compile_evaluation: Whether forwards without gradients, as under ``torch.no_grad()``, are compiled. "auto": all
            but those inside of the module's method ``generate``, which gives each forward another shape; True: those as
            well; False: none.
        regions: Compile blocks that repeat by themselves, once for all that are alike, rather than the whole module,
            which takes much less time to compile. "auto": the children of a ModuleList, Sequential or ModuleDict of
            which two or more are of one class, and have submodules. Or a list of classes of modules. What is outside of
            them runs eagerly. Buckets begin and end where regions do; ``split`` stays "auto".
        **unknown: Nothing else is taken; an argument of DistributedDataParallel is refused with what to write instead.

    Returns:
        ``module`` itself.

    Raises:
        TypeError: Not a module, or an argument that is not taken.
        ValueError: A setting out of range.
        ReplicationError: A module that cannot be replicated, or no process group has been initialised; a RuntimeError,
            as DistributedDataParallel's, and a ValueError.
        RanksDifferError: The ranks were given different models.
    """
    refuse_positional_arguments(positional)
    refuse_unknown_arguments(unknown, argument_names())
    delayed = delayed_parameters(module, delay_all_reduce_named_params, param_to_hook_all_reduce)
    ignored = names_to_ignore(parameters_to_ignore) - delayed.named.keys()
    check_module(module, ignored | delayed.named.keys())
    check_algorithm(algorithm)
    config = ReplicateConfig(
        caps_bytes=caps_from_mib(bucket_cap_mb, first_bucket_cap_mb, next(module.parameters()).device.type),
        split=split,
        broadcast_buffers=broadcast_buffers,
        init_sync=init_sync,
        gradient_as_bucket_view=gradient_as_bucket_view,
        lazy_bucket_allocation=lazy_bucket_allocation,
        find_unused_parameters=find_unused_parameters,
        skip_all_reduce_unused_params=skip_all_reduce_unused_params,
        static_graph=static_graph,
        check_finite_gradients=check_finite_gradients,
        parameters_to_ignore=ignored,
        delayed=delayed,
        device_mesh=device_mesh,
        compile_evaluation=compile_evaluation,
        regions=regions,
    )
    if find_unused_parameters and static_graph:
        warnings.warn(
            "find_unused_parameters=True has no effect beside static_graph=True, which learns from the first iteration"
            " what is unused; drop one of them",
            stacklevel=2,
        )
    if skip_all_reduce_unused_params and not (find_unused_parameters or static_graph):
        warnings.warn(
            "skip_all_reduce_unused_params=True has no effect without find_unused_parameters=True or static_graph=True,"
            " since every parameter has to get a gradient; pass one of them, or drop it",
            stacklevel=2,
        )
    compile_settings = CompileSettings(backend, mode, fullgraph, dynamic, options)
    group = resolve_process_group(process_group, device_mesh)
    check_devices(module, config, group)
    warn_of_newer_torch(group.rank())
    replicate(module, group, config, algorithm, compile_settings)
    return module


def argument_names() -> set[str]:
    """The arguments that ``ddp_compile`` takes by name."""
    parameters = inspect.signature(ddp_compile).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
