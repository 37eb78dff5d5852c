"""How far the monotonic clocks of the ranks' hosts are apart, and an exchange of bytes between the hosts.

Note [Aligned clocks]
An all-gather ends on no rank before it has begun on every rank. So with the clocks of rank 0 and rank r, whose
difference is sought, ``begun_0 <= ended_r + offset_r`` and ``begun_r + offset_r <= ended_0``. Each round of all-gathers
bounds every rank's offset from both sides; the intersection of some rounds is as wide as the fastest message there and
back, however late a rank came to a round. The number of rounds does not depend on the number of ranks.

Source: Cristian 1989, Probabilistic clock synchronization, with a collective in place of a message there and back.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

_ROUNDS = 16


class Offset(NamedTuple):
    """What to add to a rank's clock to get rank 0's, in ns."""

    ns: int
    error_ns: int  #: by which it may be wrong

    def and_later(self, later: Self) -> Self:
        """The mean of this one and another one, which was measured later; clocks may have drifted in between."""
        error_ns = max(self.error_ns, later.error_ns) + abs(self.ns - later.ns) // 2
        return self._replace(ns=(self.ns + later.ns) // 2, error_ns=error_ns)


def measure_offsets(group: Any, device: torch.device) -> list[Offset]:
    """The offset of each rank's `time.monotonic_ns`, in the order of a `host_group`; every rank calls this."""
    begun: list[list[int]] = []  # by round and rank
    ended: list[list[int]] = []
    last_ended = 0
    for _ in range(_ROUNDS + 1):
        own = torch.tensor([time.monotonic_ns(), last_ended], dtype=torch.int64, device=device)
        rows = _all_gather(own, group).tolist()
        last_ended = time.monotonic_ns()
        begun.append([row[0] for row in rows])
        ended.append([row[1] for row in rows])
    begun_of, ended_of = list(zip(*begun, strict=True)), list(zip(*ended, strict=True))  # by rank and round
    return [_offset(begun_of[0], ended_of[0], *times) for times in zip(begun_of, ended_of, strict=True)]


def _offset(begun_0: Sequence[int], ended_0: Sequence[int], begun: Sequence[int], ended: Sequence[int]) -> Offset:
    """From the times of all rounds; that at which a round ended comes with the round after it."""
    if begun_0 == begun and ended_0 == ended:
        return Offset(0, 0)  # it is rank 0
    least = max(b - e for b, e in zip(begun_0, ended[1:], strict=False))
    most = min(e - b for e, b in zip(ended_0[1:], begun, strict=False))
    return Offset((least + most) // 2, abs(most - least + 1) // 2)


def exchange_bytes(own: bytes, group: Any, device: torch.device) -> list[bytes]:
    """The bytes of every rank, in the order of the group; every rank calls this."""
    lengths = _all_gather(torch.tensor([len(own)], dtype=torch.int64, device=device), group).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    rows = _all_gather(padded.to(device), group).cpu()
    return [bytes(row[:length].tolist()) for row, length in zip(rows, lengths, strict=True)]


def _all_gather(own: Tensor, group: Any) -> Tensor:
    """The tensors of all ranks, stacked."""
    everyone = [torch.empty_like(own) for _ in range(group.size())]
    group.allgather([everyone], [own]).wait()
    return torch.stack(everyone)
