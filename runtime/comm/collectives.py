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
from ddp_compile.errors import RanksDifferError, number_of, this_rank
from ddp_compile.plan.spec import BucketPlan
from ddp_compile.runtime.comm import error_messages
from ddp_compile.runtime.comm.rank_names import name_values

log = logging.getLogger(__name__)

# As DistributedDataParallel's broadcast_bucket_size (torch 2.13): large enough for bandwidth, small enough to stage.
_BROADCAST_CHUNK_BYTES = 250 * 1024 * 1024
# Of what is told in errors, so that the size of a message does not depend on the model.
_MOST_BYTES_OF_A_LINE = 2048
_MOST_BYTES_OF_A_NAME = 256


def verify_modules_agree(description: Sequence[str], process_group: dist.ProcessGroup, device: torch.device) -> None:
    """Check that every rank was given the same module and settings, with one small all-gather where they were.

    Where they were not, rank 0's description goes to all, and the first difference of one rank.

    Args:
        description: One line for each thing that has to agree: ``"weight: float32[4, 4]"``.
        process_group: The ranks to compare.
        device: Device for the messages, one that the process group can reach.

    Raises:
        RanksDifferError: On every rank, naming the first line that differs from rank 0's.
    """
    different = ranks_unlike_rank_0(json.dumps(description).encode(), process_group, device)
    if not different:
        return
    # Only the first of them speaks: descriptions from all ranks would be gigabytes, of a thousand ranks and layers.
    text_of_rank_0 = _broadcast_bytes(json.dumps(description).encode(), process_group, device)
    difference = ""
    if process_group.rank() == different[0]:
        difference = _shorten(_first_difference(json.loads(text_of_rank_0), list(description)), _MOST_BYTES_OF_A_LINE)
    difference = _broadcast_bytes(difference.encode(), process_group, device, different[0]).decode()
    raise RanksDifferError(
        f"{this_rank()}: the ranks were given different models. First difference: {difference}"
        f" on rank {different[0]}. Build the same model with the same settings on every rank before ddp_compile"
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


def verify_algorithms_agree(algorithm: str, process_group: dist.ProcessGroup, device: torch.device, model: str) -> None:
    """Check, before anything is reduced, that every rank reduces the same model in the same way.

    Args:
        algorithm: Name of this rank's way.
        process_group: The ranks to compare.
        device: Device for the messages.
        model: What this model is called among those that share the process group.

    Raises:
        RanksDifferError: On every rank, with what each of them does.
    """
    if process_group.size() == 1:
        return
    if ranks_unlike_rank_0(f"{model}\n{algorithm}".encode(), process_group, device):
        models = gather_texts(model, process_group, device, _MOST_BYTES_OF_A_NAME)
        if len(set(models)) > 1:
            raise error_messages.models_differ(name_values(models))
        algorithms = gather_texts(algorithm, process_group, device, _MOST_BYTES_OF_A_NAME)
        raise error_messages.algorithms_differ(name_values(algorithms))


def gather_texts(
    text: str, process_group: dist.ProcessGroup, device: torch.device, most_bytes: int = _MOST_BYTES_OF_A_LINE
) -> list[str]:
    """The texts of all ranks, by rank, each cut off after ``most_bytes``. Every rank calls it."""
    line = _shorten(text, most_bytes).encode().ljust(most_bytes, b"\0")
    return [theirs.rstrip(b"\0").decode() for theirs in _all_gather(line, process_group, device)]


def agree_on_plan(plan: BucketPlan, process_group: dist.ProcessGroup, device: torch.device) -> BucketPlan:
    """Rank 0's plan, on every rank; a rank whose own plan differed says so in its log and goes on.

    Splits that follow another plan cost overlap, never correctness.
    """
    agreed = plan_of_rank_0(plan, process_group, device)
    if agreed.digest != plan.digest:
        log.warning(
            "rank %d cut its graphs for bucket plan %s (%s) but reduces by rank 0's plan %s (%s):"
            " the gradients are the same, but some buckets are launched later than they could be",
            process_group.rank(),
            plan.digest,
            number_of(len(plan.buckets), "bucket"),
            agreed.digest,
            number_of(len(agreed.buckets), "bucket"),
        )
    return agreed


def plan_of_rank_0(plan: BucketPlan, process_group: dist.ProcessGroup, device: torch.device) -> BucketPlan:
    """Rank 0's plan, on every rank. It travels as JSON bytes."""
    if process_group.size() == 1:
        return plan
    return BucketPlan.from_json(_broadcast_bytes(plan.to_json().encode(), process_group, device).decode())


def broadcast_all(tensors: Sequence[Tensor], process_group: dist.ProcessGroup, source_in_group: int = 0) -> None:
    """Overwrite each tensor with that of one rank; tensors of one dtype and device travel together."""
    if process_group.size() == 1 or not tensors:
        return
    detached = [torch_internals.local_tensor(tensor.detach()) for tensor in tensors]
    torch_internals.broadcast_coalesced(process_group, detached, _BROADCAST_CHUNK_BYTES, source_in_group)


def _broadcast_bytes(
    payload: bytes, process_group: dist.ProcessGroup, device: torch.device, source_in_group: int = 0
) -> bytes:
    source = dist.get_global_rank(process_group, source_in_group)
    length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    dist.broadcast(length, source, group=process_group)
    if process_group.rank() != source_in_group:
        payload = bytes(int(length.item()))
    message = _to_tensor(payload, device)
    dist.broadcast(message, source, group=process_group)
    return _to_bytes(message)


def ranks_unlike_rank_0(payload: bytes, process_group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """The ranks, ascending, that hold other bytes than rank 0; asked with 32 bytes from each."""
    digests = _all_gather(hashlib.sha256(payload).digest(), process_group, device)
    return [rank for rank, digest in enumerate(digests) if digest != digests[0]]


def _all_gather(payload: bytes, process_group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    """What each rank gives, by rank; of the same length on all of them."""
    message = _to_tensor(payload, device)
    messages = [torch.empty_like(message) for _ in range(process_group.size())]
    dist.all_gather(messages, message, group=process_group)
    return [bytes(row) for row in torch.stack(messages).tolist()]  # one copy from the device


def _shorten(text: str, most_bytes: int) -> str:
    """A text of so many bytes at most; one that is cut off ends with a few digits that tell it from others."""
    if len(text.encode()) <= most_bytes:
        return text
    end = f"... ({hashlib.sha256(text.encode()).hexdigest()[:8]})"
    return text.encode()[: most_bytes - len(end)].decode(errors="ignore") + end


def _to_tensor(payload: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)


def _to_bytes(message: Tensor) -> bytes:
    return bytes(message.tolist())
