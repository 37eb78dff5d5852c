"""Gradients that are infinite or NaN: found on the rank where they arose, and an error on every rank.

Note [Gradients that are not finite]
A reduction gives one rank's NaN to all ranks, and then nobody can tell whose it was. So with ``check_finite_gradients``
each bucket is looked at when it has been flattened, before it is launched. On a CPU the kernel that flattens finds
whether all values are finite, and each gradient is looked at only if they are not. On another device, where asking
would let the host wait for each bucket, a flag for each gradient is computed and stays there.

When all buckets of the iteration have been waited for, the host reads the flags, once, and the ranks tell each other by
one byte whether any has found something. They do not look at the reduced buckets instead: that would read all gradients
a second time, and after a comm hook or a reduction to shards the ranks need not see the same. Only if a rank has found
something, do all of them, who have heard so, exchange names.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ddp_compile.errors import NonFiniteGradientError
from ddp_compile.plan.spec import shorten_names
from ddp_compile.runtime import error_messages
from ddp_compile.runtime.bucket_set import BucketSet
from ddp_compile.runtime.collectives import gather_texts
from ddp_compile.runtime.flat_buffer import non_finite_flags
from ddp_compile.runtime.launch_queue import LaunchQueue
from ddp_compile.runtime.local_tensors import local_tensors

_NONE = torch.empty(0)  # a gradient that there is not


class FiniteCheck:
    """What this rank has found in an iteration, and what all have; see Note [Gradients that are not finite].

    Args:
        bucket_set: The buckets, which note what they flatten.
        queue: Launches them.
        process_group: The ranks.
        device: Where the gradients are.
    """

    def __init__(
        self, bucket_set: BucketSet, queue: LaunchQueue, process_group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._set = bucket_set
        self._queue = queue
        self._process_group = process_group
        self._device = device

    @property
    def has_message(self) -> bool:
        """Whether this iteration is checked: something has been reduced in it, or there is one rank alone."""
        return self._queue.has_launched or not self._queue.sends

    def found_here(self) -> str:
        """The buckets and gradients of this rank that were not finite, in words; empty if all were.

        The buckets must have been waited for: then what a device has to say of them comes before what it is asked now.
        """
        if not self._queue.sends:  # nothing has been flattened, and ``.grad`` is still this rank's own
            for bucket in self._set.buckets:
                gradients = [_NONE.to(p.device, p.dtype) if p.grad is None else p.grad for p in bucket.parameters]
                bucket.iteration.non_finite = non_finite_flags(local_tensors(gradients))
        looked_at = [(b.spec, b.iteration.non_finite) for b in self._set.buckets if b.iteration.non_finite is not None]
        if not looked_at:
            return ""
        flags = iter(torch.cat([flags for _, flags in looked_at]).tolist())  # one wait for the device
        found = []
        for spec, _ in looked_at:
            if names := [gradient.fqn for gradient in spec.gradients if next(flags)]:
                found.append(f"bucket {spec.index} ({shorten_names(names)})")
        return ", ".join(found)

    def error(self, found: str) -> NonFiniteGradientError:
        """What every rank raises when one has found something; called on every rank, which exchange names.

        Args:
            found: What `found_here` returned.
        """
        said = gather_texts(found, self._process_group, self._device)
        return error_messages.not_finite(self._process_group.rank(), said)
