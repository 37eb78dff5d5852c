"""The message that ranks exchange at the end of an iteration: one for all parts of the runtime that have flags to add.

Note [Words on the host]
Python knows which rank used which parameter and which gradient came late, and Python needs the answer. If the message
were a tensor on a GPU, sent after the buckets, the host would wait until the device has finished the backward. So it is
sent over a process group of the hosts: the module's own if its gradients are on the CPU, otherwise a gloo group of the
same ranks. Then the host waits for the other hosts, and for no device.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_compile.runtime.comm.process_groups import host_group


class IterationMessage:
    """Combines flags over the ranks: a flag is set in the result if any rank has set it.

    Args:
        process_group: The ranks. All of them construct this object at the same time.
        is_needed: Whether anything will be sent; the same on every rank.
        own: Whether gloo has to send it over a group of its own; see `host_group`.
        sender: Number of the model, to tell its messages from those of other models in the process group.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        device: torch.device,
        is_needed: bool,
        sender: int = 1,
        own: bool = False,
    ) -> None:
        self._is_alone = process_group.size() == 1
        # The reduction returns the maximum of each byte, so both come back unchanged only if all ranks sent the same.
        self._number = sender % 256
        self._sender = b""
        self.has_met_another = False  #: whether another rank sent another model's message, or another mark
        self._group, self._device = process_group, device
        if is_needed and not self._is_alone:
            self._group, self._device = host_group(process_group, device, own)
        self._flags: Tensor | None = None
        self._lengths: list[int] = []
        self._work: Any = None

    @property
    def is_under_way(self) -> bool:
        """Whether a message has been sent and has not been waited for."""
        return self._flags is not None

    def send(self, parts: Sequence[bytearray], mark: int = 0) -> None:
        """Start sending flags, 0 or 1, to the other ranks.

        Every rank sends equally many parts of the same lengths. They are only read. ``mark`` is a byte that is the same
        on every rank unless the ranks are out of step.
        """
        self._sender = bytes([self._number, 255 - self._number, mark, 255 - mark])
        self._lengths = [len(part) for part in parts]
        self._flags = torch.frombuffer(bytearray().join([*parts, self._sender]), dtype=torch.uint8)
        if not self._is_alone:
            self._flags = self._flags.to(self._device)
            options: Any = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX
            self._work = self._group.allreduce([self._flags], options)

    def wait(self) -> list[bytes]:
        """The parts that `send` was given, with the flags of all ranks; raises RuntimeError if that failed."""
        assert self._flags is not None
        if self._work is not None:
            self._work.wait()
        flags, self._flags, self._work = bytes(self._flags.tolist()), None, None
        self.has_met_another = flags[-len(self._sender) :] != self._sender
        ends = itertools.accumulate(self._lengths)
        return [flags[end - length : end] for end, length in zip(ends, self._lengths, strict=True)]
