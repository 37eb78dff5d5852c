"""What the ranks tell each other before they reduce anything: their parameters, and one bucket plan."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_compile import torch_internals
from ddp_compile.bucket_plan import BucketPlan
from ddp_compile.errors import RanksDifferError
from ddp_compile.runtime import refusals

log = logging.getLogger(__name__)

# As DistributedDataParallel's broadcast_bucket_size (torch 2.13): large enough for bandwidth, small enough to stage.
_BROADCAST_CHUNK_BYTES = 250 * 1024 * 1024


def verify_modules_agree(description: Sequence[str], process_group: dist.ProcessGroup, device: torch.device) -> None:
    """Check that every rank was given the same module and settings, with one small all-gather where they were.

    Args:
        description: One line for each thing that has to agree: ``"weight: float32[4, 4]"``.
        process_group: The ranks to compare.
        device: Device for the messages, one that the process group can reach.

    Raises:
        RanksDifferError: On every rank, naming the first line that differs from rank 0's.
    """
    all_described = _all_gather_bytes_if_different(json.dumps(description).encode(), process_group, device)
    if all_described is None:
        return
    per_rank = [json.loads(text) for text in all_described]
    rank, difference = next(
        (rank, _first_difference(per_rank[0], theirs)) for rank, theirs in enumerate(per_rank) if theirs != per_rank[0]
    )
    raise RanksDifferError(
        f"rank {dist.get_rank(process_group)}: the ranks were given different models. First difference: {difference}"
        f" on rank {rank}. Build the same model with the same settings on every rank before ddp_compile"
    )


def _first_difference(ours: list[str], theirs: list[str]) -> str:
    for expected, found in zip(ours, theirs, strict=False):
        if expected != found:
            return f"{expected} on rank 0 is {found}"
    if len(ours) > len(theirs):
        return f"{ours[len(theirs)]} of rank 0 is missing"
    return f"{theirs[len(ours)]}, which rank 0 does not have, exists"


def name_from_rank_0(process_group: dist.ProcessGroup, device: torch.device) -> str:
    """Sixteen characters that rank 0 has drawn, the same on every rank and new in each call."""
    drawn = _to_tensor(os.urandom(8), device)
    if process_group.size() > 1:
        dist.broadcast(drawn, dist.get_global_rank(process_group, 0), group=process_group)
    return _to_bytes(drawn).hex()


def verify_comm_hooks_agree(comm_hook: str, process_group: dist.ProcessGroup, device: torch.device) -> None:
    """Check, before anything is reduced, that every rank has registered the same comm hook.

    Args:
        comm_hook: Its name, or "none".
        process_group: The ranks to compare.
        device: Device for the messages.

    Raises:
        RanksDifferError: On every rank, with what each of them registered.
    """
    if process_group.size() == 1:
        return
    names = _all_gather_bytes_if_different(comm_hook.encode(), process_group, device)
    if names is not None:
        raise refusals.comm_hooks_differ(process_group.rank(), [name.decode() for name in names])


def agree_on_plan(plan: BucketPlan, process_group: dist.ProcessGroup, device: torch.device) -> BucketPlan:
    """Rank 0's plan, on every rank; a rank whose own plan differed says so in its log and goes on.

    Splits that follow another plan cost overlap, never correctness.
    """
    agreed = plan_of_rank_0(plan, process_group, device)
    if agreed.digest != plan.digest:
        log.warning(
            "rank %d cut its graphs for bucket plan %s (%d buckets) but reduces by rank 0's plan %s (%d buckets):"
            " the gradients are the same, but some buckets leave later than they could",
            process_group.rank(),
            plan.digest,
            len(plan.buckets),
            agreed.digest,
            len(agreed.buckets),
        )
    return agreed


def plan_of_rank_0(plan: BucketPlan, process_group: dist.ProcessGroup, device: torch.device) -> BucketPlan:
    """Rank 0's plan, on every rank. It travels as JSON bytes."""
    if process_group.size() == 1:
        return plan
    return BucketPlan.from_json(_broadcast_bytes(plan.to_json().encode(), process_group, device).decode())


def broadcast_from_rank_0(tensors: Sequence[Tensor], process_group: dist.ProcessGroup) -> None:
    """Overwrite each tensor with rank 0's; tensors of one dtype and device travel together."""
    if process_group.size() == 1 or not tensors:
        return
    detached = [tensor.detach() for tensor in tensors]
    torch_internals.broadcast_coalesced(process_group, detached, _BROADCAST_CHUNK_BYTES, src_rank_in_group=0)


def _broadcast_bytes(payload: bytes, process_group: dist.ProcessGroup, device: torch.device) -> bytes:
    source = dist.get_global_rank(process_group, 0)
    length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    dist.broadcast(length, source, group=process_group)
    if process_group.rank() != 0:
        payload = bytes(int(length.item()))
    message = _to_tensor(payload, device)
    dist.broadcast(message, source, group=process_group)
    return _to_bytes(message)


def _all_gather_bytes_if_different(
    payload: bytes, process_group: dist.ProcessGroup, device: torch.device
) -> list[bytes] | None:
    """None where all ranks hold the same bytes, otherwise what each of them holds."""
    fingerprint = _to_tensor(hashlib.sha256(payload).digest(), device)
    fingerprints = [torch.empty_like(fingerprint) for _ in range(process_group.size())]
    dist.all_gather(fingerprints, fingerprint, group=process_group)
    if all(torch.equal(other, fingerprints[0]) for other in fingerprints):
        return None
    length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    lengths = [torch.empty_like(length) for _ in range(process_group.size())]
    dist.all_gather(lengths, length, group=process_group)
    longest = max(int(other.item()) for other in lengths)
    message = _to_tensor(payload.ljust(longest, b"\0"), device)
    messages = [torch.empty_like(message) for _ in range(process_group.size())]
    dist.all_gather(messages, message, group=process_group)
    return [_to_bytes(other)[: int(size.item())] for other, size in zip(messages, lengths, strict=True)]


def _to_tensor(payload: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)


def _to_bytes(message: Tensor) -> bytes:
    return bytes(message.tolist())
