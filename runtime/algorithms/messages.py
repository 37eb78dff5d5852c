"""What algorithms have in common that exchange parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_compile import torch_internals
from ddp_compile.errors import ReductionError
from ddp_compile.runtime.buckets.comm_algorithm import CommAlgorithm
from ddp_compile.runtime.comm import streams


def peer_of_shift_one(place: int, size: int, num_exchanges: int) -> int:
    """Who one of ``size`` exchanges with: each of one half with one of the other half, shifted by one every time.

    Args:
        place: 0 to ``size`` - 1.
        size: An even number.
        num_exchanges: Of those before.

    Source: the decentralised algorithm of Bagua (Gan et al. 2021, arXiv 2107.01499), peer selection "shift_one".
    """
    half = size // 2
    if place < half:
        return (num_exchanges + place) % half + half
    return (place - half - num_exchanges) % half


def objection_to_messages(name: str, process_group: dist.ProcessGroup, device: torch.device) -> str:
    """Why the ranks cannot send each other point-to-point messages, and the way out; empty if they can.

    Args:
        name: Of the algorithm.
        process_group: The ranks.
        device: Of the tensors that they send.
    """
    backend = torch_internals.backend_name(process_group, device)
    if backend == "gloo" and streams.has_streams(device):
        return (
            f"the {name} sends point-to-point messages, for which gloo takes CPU tensors only, and the parameters are"
            f" on {device}; use a process group of the device's own backend, or GradientAllReduce()"
        )
    return ""


def exchange(
    sent: Sequence[Tensor],
    received: Sequence[tuple[int, Sequence[Tensor]]],
    group: dist.ProcessGroup,
    tag: int,
    fail: Callable[[RuntimeError], ReductionError],
) -> list[dist.Work]:
    """Start to send the same tensors to some ranks, and to receive from each of them.

    Args:
        sent: What goes to each of them.
        received: Ranks in the group, and where what comes from each goes.
        group: The process group.
        tag: What has to be equal on both sides; NCCL does not look at it.
        fail: What to raise of the error of a rank that is gone.
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
        raise fail(error) from error


def wait_for(works: Sequence[dist.Work | None], fail: Callable[[RuntimeError], ReductionError]) -> None:
    """Wait for all; where one has failed, raise what ``fail`` makes of its error."""
    for work in works:
        try:
            if work is not None:
                work.wait()
        except RuntimeError as error:
            raise fail(error) from error


def refuse_state_of_another(algorithm: CommAlgorithm, state: Mapping[str, Any]) -> None:
    """Raise a ValueError unless a state is of an algorithm of this class; its settings may be others."""
    given = state.get("algorithm", "unknown algorithm")
    if given != type(algorithm).__name__:
        raise ValueError(
            f"the {algorithm.name} was given the state of {given}, and has that of {type(algorithm).__name__}; load it"
            " into the algorithm whose state_dict() it is"
        )


def refuse_interval(config: str, name: str, value: object, least: int = 1) -> None:
    """Raise a ValueError unless a number of steps is a whole number, and not too small."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{config}({name}={value!r}): pass a number of steps from {least} on")
