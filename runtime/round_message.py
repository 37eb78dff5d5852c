"""What the ranks tell each other when a round ends: one message for all who have something to say.

Note [Words on the host]
Who used which parameter, and whose gradient came late, is known to Python on each rank and asked for by Python on each
rank. Sent as a tensor on a GPU, behind the buckets, it would make the host wait until the device has done all of the
backward. So it travels over a process group of the CPU: the module's own where its gradients are on the CPU, and a gloo
group of the same ranks beside any other. The host then waits for the other hosts, and for no device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_compile import torch_internals


class RoundMessage:
    """Adds up flags over the ranks: each is set in the result where any rank has set it.

    Args:
        process_group: The ranks. All of them make one at the same time.
        device: Where the gradients are.
        is_needed: Whether anything will be sent; the same on every rank.
    """

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device, is_needed: bool) -> None:
        self._is_alone = process_group.size() == 1
        self._group, self._device = process_group, device
        if is_needed and not self._is_alone:
            self._group, self._device = _group_for_the_host(process_group, device)
        self._flags: Tensor | None = None
        self._lengths: list[int] = []
        self._work: dist.Work | None = None

    def send(self, parts: Sequence[bytearray]) -> None:
        """Start to tell the other ranks.

        Args:
            parts: Flags, 0 or 1; every rank sends as many parts of the same lengths. They are only read.
        """
        self._lengths = [len(part) for part in parts]
        self._flags = torch.frombuffer(bytearray().join(parts), dtype=torch.uint8)
        if not self._is_alone:
            self._flags = self._flags.to(self._device)
            self._work = dist.all_reduce(self._flags, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def wait(self) -> list[bytes]:
        """The parts that `send` was given, with the flags of all ranks.

        Raises:
            RuntimeError: The all-reduce failed or timed out.
        """
        assert self._flags is not None
        if self._work is not None:
            self._work.wait()
        flags, self._flags, self._work = bytes(self._flags.tolist()), None, None
        ends = itertools.accumulate(self._lengths)
        return [flags[end - length : end] for end, length in zip(ends, self._lengths, strict=True)]


def _group_for_the_host(
    process_group: dist.ProcessGroup, device: torch.device
) -> tuple[dist.ProcessGroup, torch.device]:
    """A process group of the same ranks, and the device of the tensors that it takes."""
    store: object = process_group.get_group_store()
    if device.type == "cpu" or store is None:  # None: it is written in Python, and has no peers that gloo could find
        return process_group, device
    timeout = torch_internals.group_timeout(process_group, device)
    ranks = dist.get_process_group_ranks(process_group)
    # Other ranks than these may know nothing of it.
    group = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)
    assert group is not None
    return group, torch.device("cpu")
