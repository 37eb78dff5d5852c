"""Infinite and NaN gradients are found on the rank that computed them, and are an error on every rank.

Note [Gradients that are not finite]
A reduction spreads one rank's NaN to all ranks, and hides which rank it came from. So with
``check_finite_gradients`` each bucket is checked after it has been flattened and before it is launched. On a CPU the
kernel that flattens also finds whether all values are finite, and single gradients are checked only if some are not. On
another device the host would have to wait for that answer, bucket by bucket. So a flag for each gradient is computed
there, and stays there.

When all buckets of the iteration have been waited for, the host reads the flags once, and the ranks exchange one byte:
whether any of them has found something. The reduced buckets are not checked instead: that would read all gradients a
second time, and after a comm hook or a reduction to shards the ranks need not see the same values. The ranks exchange
names only if one of them has found something.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddp_compile import torch_internals
from ddp_compile.errors import NonFiniteGradientError, on_ranks, shorten_names, this_rank
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.bucket_set import BucketSet
from ddp_compile.runtime.buckets.flat_buffer import non_finite_flags
from ddp_compile.runtime.comm.collectives import gather_texts
from ddp_compile.runtime.launch_queue import LaunchQueue


class FiniteCheck:
    """Finds this rank's gradients that are not finite, and those of all; see Note [Gradients that are not finite]."""

    def __init__(self, bucket_set: BucketSet, queue: LaunchQueue) -> None:
        self._set = bucket_set
        self._queue = queue

    @property
    def is_due(self) -> bool:
        """Whether this iteration is checked: a bucket was launched in it, or there is only one rank."""
        return self._set.iteration.has_launched or not self._queue.sends

    def found_here(self) -> str:
        """The buckets and gradients of this rank that were not finite, in words; empty if all were.

        The buckets must have been waited for, so that the current stream comes after those that computed the flags.
        """
        flags_of = _flags_of_local_gradients if not self._queue.sends else _flags_before_the_reduction
        looked_at = [(b.spec, each) for b in self._set.buckets if (each := flags_of(b)) is not None]
        if not looked_at:
            return ""
        flags = iter(torch.cat([flags for _, flags in looked_at]).tolist())  # one wait for the device
        found = []
        for spec, _ in looked_at:
            if names := [gradient.fqn for gradient in spec.gradients if next(flags)]:
                found.append(f"bucket {spec.index} ({shorten_names(names)})")
        return ", ".join(found)

    def error(self, found: str) -> NonFiniteGradientError:
        """The error that every rank raises if one has found something; all ranks call this, and exchange names."""
        ranks_of: dict[str, list[int]] = {}
        for rank, text in gather_texts(found, self._set.process_group, self._set.parameters[0].device).items():
            ranks_of.setdefault(text, []).append(rank)
        described = "; ".join(f"{on_ranks(ranks)} in {text}" for text, ranks in ranks_of.items() if text)
        return NonFiniteGradientError(
            f"{this_rank()}: gradients were infinite or NaN before they were reduced, {described}. Every rank has"
            " raised this, and .grad holds means that are not finite either. Set the gradients to zero on every rank,"
            " and leave this step out or start again from a checkpoint; torch.autograd.set_detect_anomaly(True) tells"
            " which operation makes a NaN. With a GradScaler, which looks for infinities itself, drop"
            " check_finite_gradients=True"
        )


def _flags_before_the_reduction(bucket: Bucket) -> Tensor | None:
    return bucket.iteration.non_finite


def _flags_of_local_gradients(bucket: Bucket) -> Tensor:
    none = torch.empty(0, device=bucket.parameters[0].device)
    gradients = [none.to(p.dtype) if p.grad is None else p.grad for p in bucket.parameters]
    return non_finite_flags(torch_internals.local_tensors(gradients))
