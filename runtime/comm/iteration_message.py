"""What the ranks tell each other when an iteration ends: one message for all who have something to say.

Note [Words on the host]
Who used which parameter, and whose gradient came late, is known to Python on each rank and asked for by Python on each
rank. Sent as a tensor on a GPU, behind the buckets, it would make the host wait until the device has done all of the
backward. So it travels over a process group of the CPU: the module's own where its gradients are on the CPU, and a gloo
group of the same ranks beside any other. The host then waits for the other hosts, and for no device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_compile import torch_internals
from ddp_compile.runtime.comm import streams
from ddp_compile.runtime.comm.collectives import name_from_rank_0


class IterationMessage:
    """Adds up flags over the ranks: each is set in the result where any rank has set it.

    Args:
        process_group: The ranks. All of them make one at the same time.
        device: Where the gradients are.
        is_needed: Whether anything will be sent; the same on every rank.
        sender: Number of the model, which tells its messages from those of others in the process group.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, device: torch.device, is_needed: bool, sender: int = 1
    ) -> None:
        self._is_alone = process_group.size() == 1
        # The reduction returns the maximum of each byte: both come back as they were only if all ranks sent the same.
        self._sender = bytes([sender % 256, 255 - sender % 256])
        self.has_met_another = False  #: whether another rank sent another model's message
        self._group: Any = process_group
        self._device = device
        if is_needed and not self._is_alone and streams.has_streams(device):
            store: Any = process_group.get_group_store()
            if store is not None:  # else it is written in Python, and has no peers that gloo could find
                self._group, self._device = _group_of_hosts(process_group, store, device), torch.device("cpu")
        self._flags: Tensor | None = None
        self._lengths: list[int] = []
        self._work: Any = None

    @property
    def is_under_way(self) -> bool:
        """Whether it has been sent and not been waited for."""
        return self._flags is not None

    def send(self, parts: Sequence[bytearray]) -> None:
        """Start to tell the other ranks.

        Args:
            parts: Flags, 0 or 1; every rank sends as many parts of the same lengths. They are only read.
        """
        self._lengths = [len(part) for part in parts]
        self._flags = torch.frombuffer(bytearray().join([*parts, self._sender]), dtype=torch.uint8)
        if not self._is_alone:
            self._flags = self._flags.to(self._device)
            options: Any = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX
            self._work = self._group.allreduce([self._flags], options)

    def wait(self) -> list[bytes]:
        """The parts that `send` was given, with the flags of all ranks.

        Raises:
            RuntimeError: The all-reduce failed or timed out.
        """
        assert self._flags is not None
        if self._work is not None:
            self._work.wait()
        flags, self._flags, self._work = bytes(self._flags.tolist()), None, None
        self.has_met_another = flags[-len(self._sender) :] != self._sender
        ends = itertools.accumulate(self._lengths)
        return [flags[end - length : end] for end, length in zip(ends, self._lengths, strict=True)]


def _group_of_hosts(process_group: dist.ProcessGroup, store: Any, device: torch.device) -> Any:
    """A gloo group of the same ranks.

    It is not one of ``torch.distributed.new_group``: that keeps it until all groups are destroyed, and names it after
    how many groups a rank knows, which need not be as many on each.
    """
    name = f"ddp_compile/{name_from_rank_0(process_group, device)}/hosts"
    timeout = torch_internals.group_timeout(process_group, device)
    torch_distributed: Any = dist  # which exports these without saying so
    own_store = torch_distributed.PrefixStore(name, store)
    return torch_distributed.ProcessGroupGloo(own_store, process_group.rank(), process_group.size(), timeout)
