"""What the ranks exchange before they reduce anything: model descriptions, parameters, and one bucket plan."""

import hashlib
import json
import logging
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_compile import torch_internals
from ddp_compile.errors import RanksDifferError, name_values, this_rank
from ddp_compile.plan.spec import BucketPlan
from ddp_compile.runtime.comm import error_messages

log = logging.getLogger(__name__)

# As DistributedDataParallel's broadcast_bucket_size (torch 2.13): large enough for bandwidth, small enough to stage.
_BROADCAST_CHUNK_BYTES = 250 * 1024 * 1024
# Limits on the texts of errors, so that the size of a message does not depend on the model.
_MOST_BYTES_OF_A_LINE = 2048
_MOST_BYTES_OF_A_NAME = 256


def verify_modules_agree(description: Sequence[str], process_group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise a RanksDifferError, which names the first difference, on every rank if modules or settings differ."""
    if difference := first_difference(description, process_group, device):
        raise RanksDifferError(
            f"{this_rank()}: the ranks were given different models. First difference: {difference}. Build the same"
            " model with the same settings on every rank before ddp_compile"
        )


def first_difference(description: Sequence[str], process_group: dist.ProcessGroup, device: torch.device) -> str:
    """Compare descriptions by one small all-reduce. Every rank calls it.

    Only if they differ, the ranks gather digests, rank 0 sends its description, and then one rank sends its first
    difference, which every rank returns; otherwise the text is empty.

    A description has one line for each thing that has to agree: ``"weight: float32[4, 4]"``. The messages are on
    ``device``, which the process group can reach.
    """
    different = ranks_unlike_rank_0(json.dumps(description).encode(), process_group, device)
    if not different:
        return ""
    # With a thousand ranks and layers, the descriptions of all ranks would be gigabytes.
    first, other = dist.get_global_rank(process_group, 0), different[0]
    text_of_first = _broadcast_bytes(json.dumps(description).encode(), process_group, device, first)
    difference = ""
    if dist.get_rank() == other:
        difference = _first_difference(json.loads(text_of_first), list(description), first)
        difference = _shorten(difference, _MOST_BYTES_OF_A_LINE)
    return f"{_broadcast_bytes(difference.encode(), process_group, device, other).decode()} on rank {other}"


def _first_difference(expected: list[str], found: list[str], first_rank: int) -> str:
    for theirs, own in zip(expected, found, strict=False):
        if theirs != own:
            return f"{theirs} on rank {first_rank} is {own}"
    if len(expected) > len(found):
        return f"{expected[len(found)]} of rank {first_rank} is missing"
    return f"{found[len(expected)]}, which rank {first_rank} does not have, exists"


def name_from_rank_0(process_group: dist.ProcessGroup, device: torch.device) -> str:
    """Sixteen random characters, drawn by the group's rank 0, the same on every rank and new in each call."""
    drawn = _to_tensor(os.urandom(8), device)
    if process_group.size() > 1:
        dist.broadcast(drawn, dist.get_global_rank(process_group, 0), group=process_group)
    return _to_bytes(drawn).hex()


def verify_algorithms_agree(algorithm: str, process_group: dist.ProcessGroup, device: torch.device, model: str) -> None:
    """Before anything is reduced, raise a RanksDifferError on every rank if one has another model or algorithm.

    ``model`` is this model's name among those that share the process group.
    """
    if process_group.size() == 1:
        return
    if ranks_unlike_rank_0(f"{model}\n{algorithm}".encode(), process_group, device):
        models = gather_texts(model, process_group, device, _MOST_BYTES_OF_A_NAME)
        if len(set(models.values())) > 1:
            raise RanksDifferError(
                f"{this_rank()}: the ranks have reached the first backwards of different models: {name_values(models)}."
                " Call the backwards of the models in one order on every rank, or give each model a process group of"
                " its own"
            )
        algorithms = gather_texts(algorithm, process_group, device, _MOST_BYTES_OF_A_NAME)
        raise error_messages.algorithms_differ(name_values(algorithms))


def gather_texts(
    text: str, process_group: dist.ProcessGroup, device: torch.device, most_bytes: int = _MOST_BYTES_OF_A_LINE
) -> dict[int, str]:
    """The texts of all ranks, by global rank, each truncated to ``most_bytes``. Every rank calls it."""
    line = _shorten(text, most_bytes).encode().ljust(most_bytes, b"\0")
    gathered = _all_gather(line, process_group, device)
    return {rank: theirs.rstrip(b"\0").decode() for rank, theirs in gathered.items()}


def plan_of_rank_0(plan: BucketPlan, process_group: dist.ProcessGroup, device: torch.device) -> BucketPlan:
    """Rank 0's plan, on every rank, sent as JSON bytes."""
    if process_group.size() == 1:
        return plan
    first = dist.get_global_rank(process_group, 0)
    return BucketPlan.from_json(_broadcast_bytes(plan.to_json().encode(), process_group, device, first).decode())


def broadcast_all(tensors: Sequence[Tensor], process_group: dist.ProcessGroup, source_in_group: int = 0) -> None:
    """Overwrite each tensor with that of one rank. Tensors of one dtype and device are sent together."""
    if process_group.size() == 1 or not tensors:
        return
    detached = [torch_internals.local_tensor(tensor.detach()) for tensor in tensors]
    torch_internals.broadcast_coalesced(process_group, detached, _BROADCAST_CHUNK_BYTES, source_in_group)


def _broadcast_bytes(payload: bytes, process_group: dist.ProcessGroup, device: torch.device, source: int) -> bytes:
    """The payload of a global rank."""
    length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    dist.broadcast(length, source, group=process_group)
    if dist.get_rank() != source:
        payload = bytes(int(length.item()))
    message = _to_tensor(payload, device)
    dist.broadcast(message, source, group=process_group)
    return _to_bytes(message)


def any_rank(flags: Sequence[bool], process_group: dist.ProcessGroup, device: torch.device) -> list[bool]:
    """For each flag whether it is set on any rank."""
    if process_group.size() == 1:
        return list(flags)
    message = _to_tensor(bytes(flags), device)
    dist.all_reduce(message, dist.ReduceOp.MAX, group=process_group)
    return list(map(bool, _to_bytes(message)))


def ranks_unlike_rank_0(payload: bytes, process_group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """The global ranks whose bytes differ from those of the group's rank 0."""
    digest = hashlib.sha256(payload).digest()
    if _are_equal(digest, process_group, device):
        return []
    digests = _all_gather(digest, process_group, device)
    expected = next(iter(digests.values()))
    return [rank for rank, digest in digests.items() if digest != expected]


def _are_equal(payload: bytes, process_group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks have the same bytes. Unlike an all-gather, it sends no more if there are more ranks."""
    own = payload + bytes(255 - each for each in payload)  # the largest 255 - b stands for the smallest b
    message = _to_tensor(own, device)
    dist.all_reduce(message, dist.ReduceOp.MAX, group=process_group)
    return _to_bytes(message) == own


def _all_gather(payload: bytes, process_group: dist.ProcessGroup, device: torch.device) -> dict[int, bytes]:
    """The bytes of each rank, all of one length, by global rank in the order of the group."""
    message = _to_tensor(payload, device)
    messages = [torch.empty_like(message) for _ in range(process_group.size())]
    dist.all_gather(messages, message, group=process_group)
    rows = map(bytes, torch.stack(messages).tolist())  # one copy from the device
    return dict(zip(dist.get_process_group_ranks(process_group), rows, strict=True))


def _shorten(text: str, most_bytes: int) -> str:
    """A text of at most this many bytes. A truncated text ends with a digest that tells it from others."""
    if len(text.encode()) <= most_bytes:
        return text
    end = f"... ({hashlib.sha256(text.encode()).hexdigest()[:8]})"
    return text.encode()[: most_bytes - len(end)].decode(errors="ignore") + end


def _to_tensor(payload: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)


def _to_bytes(message: Tensor) -> bytes:
    return bytes(message.tolist())
