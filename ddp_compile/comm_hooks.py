"""Comm hooks for ``module.register_comm_hook(process_group, hook)``. Those of torch can be used too.

Unlike torch's hooks of the same names, these scale and cast in one pass over memory, and round once. torch casts before
it divides, so small values are rounded twice and large ones overflow before the division.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_compile.errors import ReplicationError
from ddp_compile.kernels import flatten_scale, unflatten
from ddp_compile.runtime.algorithms.comm_hook import GradBucket, starts_at_once


@starts_at_once
def allreduce_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average over the ranks, as without a hook.

    Args:
        process_group: The ranks; the default group if None.
        bucket: The bucket, from the reducer.

    Returns:
        A future that holds the averaged buffer, of the dtype and shape of ``bucket.buffer()``.

    Source: ``allreduce_hook`` of torch 2.13, distributed/algorithms/ddp_comm_hooks/default_hooks.py.
    """
    group = _group_of(process_group)
    buffer = bucket.buffer().div_(group.size())
    work: Any = dist.all_reduce(buffer, group=group, async_op=True)
    return work.get_future()


@starts_at_once
def fp16_compress_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average over the ranks in float16, half the bytes of float32.

    Arguments and result are those of `allreduce_hook`. Means beyond 65504 become infinite, which a GradScaler notices.

    Source: ``fp16_compress_hook`` of torch 2.13, but divided and rounded in one step.
    """
    return _average_in(torch.float16, process_group, bucket)


@starts_at_once
def bf16_compress_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average over the ranks in bfloat16, half the bytes of float32, on CPUs and GPUs.

    Arguments and result are those of `allreduce_hook`. bfloat16 has the range of float32, and about three digits.

    Source: ``bf16_compress_hook`` of torch 2.13, but divided and rounded in one step, and not bound to NCCL.
    """
    return _average_in(torch.bfloat16, process_group, bucket)


def builtin_hook(kind: object) -> Callable[..., torch.futures.Future[Tensor]] | None:
    """The hook for a ``BuiltinCommHookType``, which torch implements for its own reducer only.

    Returns:
        A hook of this file, whose state is a process group; None for anything but a ``BuiltinCommHookType``.
    """
    kinds: Any = dist.BuiltinCommHookType  # type: ignore[attr-defined]  # exported without saying so
    if not isinstance(kind, kinds):
        return None
    return {kinds.ALLREDUCE: allreduce_hook, kinds.FP16_COMPRESS: fp16_compress_hook}[kind]


def _average_in(
    dtype: torch.dtype, process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    if buffer.is_sparse:
        # The kernels take dense tensors; a sparse gradient is averaged in its own dtype.
        return allreduce_hook(process_group, bucket)
    group = _group_of(process_group)
    compressed = torch.empty_like(buffer, dtype=dtype)
    flatten_scale([buffer], compressed, 1.0 / group.size())

    def decompress(future: torch.futures.Future[Any]) -> Tensor:
        unflatten(future.value()[0], [buffer])
        return buffer

    work: Any = dist.all_reduce(compressed, group=group, async_op=True)
    return work.get_future().then(decompress)


def _group_of(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None:
        raise ReplicationError(
            "a comm hook of ddp_compile was called without a process group: call"
            " torch.distributed.init_process_group() first, or pass a process group as the hook's state"
        )
    return group
