"""Comm hooks: users' functions that reduce the buckets, with DistributedDataParallel's interface.

Note [What a comm hook is given]
A hook gets undivided gradients, as DistributedDataParallel's do: the hook decides how to average. With a hook, buckets
have the layout "ddp", without gaps between gradients. Padding would reach the arithmetic of hooks that look at the
buffer as a whole (batched PowerSGD makes it a matrix, quantization cuts it into channels), and their results would not
be DistributedDataParallel's, even if the padding were zeroed before and after each hook. A plan becomes gapless when
the hook is registered, so even a sealed plan can still be changed between steps.

Note [One hook at a time on the CPU]
gloo's futures run their callbacks on the process group's two threads, whenever a collective ends. A hook whose
callbacks start further collectives (PowerSGD: three rounds, each waiting for the next) then blocks both threads as soon
as two buckets are under way, and ranks start these collectives in different orders. Eager DistributedDataParallel hangs
there. So with such a group no other collective is started until the hook is done, unless the hook is known to start all
its communication before it returns. With NCCL, callbacks run at once, in the order of the launches.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_compile import torch_internals
from ddp_compile.errors import ReductionError, this_rank, with_article
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.comm_algorithm import CommAlgorithm, Pending, Traits
from ddp_compile.runtime.comm.streams import work_blocks_host
from ddp_compile.runtime.comm.transfers import Transfer

HookFunction = Callable[[Any, "GradBucket"], torch.futures.Future[Tensor]]


@functools.cache
def _hooks_of_torch_that_start() -> tuple[object, ...]:
    """The hooks that start all their communication before they return."""
    # Imported here: they also import torch's optimizers for many ranks, which takes a second.
    from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, post_localSGD_hook

    return (
        debugging_hooks.noop_hook,
        default_hooks.allreduce_hook,
        default_hooks.bf16_compress_hook,
        default_hooks.fp16_compress_hook,
        post_localSGD_hook.post_localSGD_hook,
    )


def builtin_hook(kind: object) -> HookFunction | None:
    """torch's hook for a ``BuiltinCommHookType``, which its own reducer has in C++; None for anything else."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    kinds: Any = dist.BuiltinCommHookType  # type: ignore[attr-defined]  # exported without saying so
    if not isinstance(kind, kinds):
        return None
    return default_hooks.allreduce_hook if kind == kinds.ALLREDUCE else default_hooks.fp16_compress_hook


#: torch exports it, but not in ``__all__``.
_TORCH_GRAD_BUCKET: Any = dist.GradBucket  # type: ignore[attr-defined]

_EXPECTED = "hook(state, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]"


class GradBucket:
    """One bucket as a comm hook sees it: the methods of ``torch.distributed.GradBucket``, which only C++ can make.

    The reducer owns ``buffer``. A hook may write to it until its future is done, from any stream that the future is
    bound to. This is not a tuple, since torch's hooks take a tuple for the bucket that Dynamo passes.

    Source: ``GradBucket`` of torch 2.13, csrc/distributed/c10d/comm.hpp.
    """

    def __init__(self, index: int, is_last: bool, buffer: Tensor, parameters: Sequence[Tensor]) -> None:
        self._index = index
        self._is_last = is_last
        self._buffer = buffer
        self._parameters = parameters

    def index(self) -> int:
        """Position in the plan, the same in every step; 0 is launched first."""
        return self._index

    def is_last(self) -> bool:
        """Whether it is the last bucket of the backward."""
        return self._is_last

    def buffer(self) -> Tensor:
        """All gradients of this rank in one tensor of shape (n,), without gaps; a sparse gradient as it is."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Let `buffer` and `gradients` return another tensor. The result is still the future's value."""
        self._buffer = tensor

    def gradients(self) -> list[Tensor]:
        """Views into the buffer, one for each parameter, contiguous and of its shape.

        As in torch, the elements of a channels_last gradient are in the order of memory.
        """
        if self._buffer.layout is not torch.strided:
            return [self._buffer]
        parts = self._buffer.split([parameter.numel() for parameter in self._parameters])
        return [part.view(parameter.shape) for part, parameter in zip(parts, self._parameters, strict=True)]

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of `gradients`."""
        return list(self._parameters)


class CommHook(CommAlgorithm):
    """Calls a user's hook for each bucket, as DistributedDataParallel does: ``ReplicatedModule.register_comm_hook``."""

    # A hook divides, may look at the whole buffer, and is called at world size 1 too. If it may keep state, it must not
    # be called again for a bucket in the same iteration. It may also return another result on each rank.
    traits = Traits(prescale=False, layout="ddp", replayable=False, on_one_rank=True, equal_gradients=False)

    def __init__(self, function: Callable[..., Any], state: object, process_group: dist.ProcessGroup) -> None:
        self._function_name = _name_of(function)
        _check_signature(function, self._function_name)
        self.name = f"comm hook {self._function_name}"
        self._function = function
        self._state = state
        self._process_group = process_group
        self._starts_at_once = any(function is hook for hook in _hooks_of_torch_that_start())
        if self._starts_at_once and self._function_name != "post_localSGD_hook":  # the others keep no state
            self.traits = replace(self.traits, replayable=True)
        self._running: Transfer | None = None

    def launch(self, bucket: Bucket, is_last: bool) -> Pending:
        """Call the hook with one bucket; on the CPU, errors of the previous bucket are raised here too."""
        self.drain()
        flat, described = bucket.flat, bucket.describe()
        # Hooks may resize their buffer, as batched PowerSGD does; the bucket's keeps its shape.
        handed_out = flat if bucket.spec.is_sparse else flat.view(-1)
        try:
            with torch.no_grad():
                given = GradBucket(
                    bucket.spec.index, is_last, handed_out, torch_internals.local_tensors(bucket.parameters)
                )
                future = self._function(self._state, given)
        except Exception as error:
            raise self._error(f"raised {error!r} on {described}") from error
        if not isinstance(future, torch.Future):
            raise self._error(f"returned {_describe(future)} for {described}; it must return a torch.futures.Future")
        work = Transfer(
            [future],
            then=lambda values: [self._result(values[0], flat, described)],
            failed=lambda error: self._error(f"failed on {described}: {str(error).strip()}"),
        )
        if not self._starts_at_once and work_blocks_host(self._process_group, flat.device):
            self._running = work
        return work

    def drain(self) -> None:
        """Wait for a hook that may start more collectives; see Note [One hook at a time on the CPU]."""
        running, self._running = self._running, None
        if running is not None:
            running.wait()

    def _result(self, value: object, own: Tensor, bucket: str) -> Tensor:
        """What a hook's future holds, in the bucket's own buffer unless it is sparse."""
        # The future of a work holds a list.
        reduced = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
        if (
            not isinstance(reduced, Tensor)
            or reduced.shape != own.shape
            or reduced.layout is not own.layout
            or reduced.device != own.device
            or not reduced.is_floating_point()
        ):
            raise self._error(
                f"gave {_describe(value)} for {bucket}; its future must hold one floating tensor of shape"
                f" {tuple(own.shape)}, {own.layout}, on {own.device}"
            )
        if own.layout is not torch.strided:
            return reduced.to(own.dtype)  # a sparse sum has other indices, so it cannot be written into the buffer
        if reduced.data_ptr() != own.data_ptr() or reduced.dtype != own.dtype or not reduced.is_contiguous():
            with torch.no_grad():
                own.copy_(reduced)
        return own

    def _error(self, what: str) -> ReductionError:
        return ReductionError(
            f"{this_rank()}: the {self.name} {what}. The gradients are not reduced and this rank may be"
            " out of step with the others; correct the hook, or look for the error of another rank that has raised or"
            " exited, and start again from a checkpoint"
        )


def _name_of(function: object) -> str:
    # The class of an object: ranks compare names, and a repr would contain an address.
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}, shape {tuple(value.shape)}, {value.layout}, on {value.device}"
    if isinstance(value, list | tuple):
        return f"{with_article(type(value).__name__)} of {len(value)} values"
    return f"an object of type {type(value).__qualname__}"


def _check_signature(function: object, name: str) -> None:
    if not callable(function):
        raise TypeError(f"the comm hook {function!r} is not callable; pass a function {_EXPECTED}")
    signature = _signature_of(function)
    if signature is None:
        return
    try:
        taken = list(signature.bind(None, None).arguments)
    except TypeError as error:
        raise TypeError(f"the comm hook {name}{signature} cannot be called with two arguments; {_EXPECTED}") from error
    if taken[0] == "bucket":
        raise TypeError(f"the comm hook {name}{signature} takes the bucket first; write {_EXPECTED}")
    bucket = signature.parameters.get("bucket") or signature.parameters[taken[-1]]
    if not _is_one_of(bucket.annotation, _TORCH_GRAD_BUCKET, GradBucket):
        raise ValueError(f"the comm hook {name} annotates {bucket.name} with {bucket.annotation!r}; write {_EXPECTED}")
    if not _is_one_of(signature.return_annotation, torch.futures.Future[Tensor], torch.futures.Future, torch.Future):
        raise ValueError(
            f"the comm hook {name} annotates its result with {signature.return_annotation!r}; write {_EXPECTED}"
        )


def _signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    for evaluate in (True, False):
        try:
            return inspect.signature(function, eval_str=evaluate)
        except (NameError, AttributeError, SyntaxError, TypeError, ValueError):
            continue  # a name that only type checkers know, or a built-in without a signature
    return None


def _is_one_of(annotation: object, *expected: object) -> bool:
    # An annotation that is still text cannot be compared: it names something that only type checkers know.
    return annotation in (inspect.Parameter.empty, Any, *expected) or isinstance(annotation, str)
