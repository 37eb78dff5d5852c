"""Messages from rank to rank, and waiting for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_compile import torch_internals
from ddp_compile.runtime.comm import error_messages, streams


def objection_to_messages(name: str, process_group: dist.ProcessGroup, device: torch.device) -> str:
    """Why the ranks cannot send messages to each other, and the way out; empty if they can."""
    backend = torch_internals.backend_name(process_group, device)
    if backend == "gloo" and streams.has_streams(device):
        return (
            f"the {name} sends point-to-point messages, for which gloo takes CPU tensors only, but the parameters are"
            f" on {device}; use a process group of the device's own backend, or GradientAllReduce()"
        )
    return ""


def exchange(
    sent: Sequence[Tensor],
    received: Sequence[tuple[int, Sequence[Tensor]]],
    group: dist.ProcessGroup,
    tag: int,
    name: str,
) -> list[dist.Work]:
    """Start sending the same tensors to some ranks, and receiving from each of them.

    Args:
        sent: Goes to each of them.
        received: For each of them, its rank in the group and the tensors to receive into.
        tag: Has to be equal on both sides; NCCL ignores it.

    Raises:
        ReductionError: A rank is gone.
    """
    operations = [
        dist.P2POp(function, tensor, dist.get_global_rank(group, peer), group, tag)
        for peer, tensors in received
        for function, some in ((dist.isend, sent), (dist.irecv, tensors))
        for tensor in some
    ]
    try:
        with torch_internals.unprofiled_messages():
            return dist.batch_isend_irecv(operations)
    except RuntimeError as error:
        raise error_messages.exchange_failed(name, error) from error


def wait_for(works: Sequence[dist.Work | None], name: str) -> None:
    """Wait for all works; raises ReductionError if one of them has failed."""
    try:
        for work in works:
            if work is not None:
                work.wait()
    except RuntimeError as error:
        raise error_messages.exchange_failed(name, error) from error
