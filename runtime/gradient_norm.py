"""The norm of a module's gradients over whole flat buffers, and the multiplication that clips them.

Note [One read of the gradients]
``torch.nn.utils.clip_grad_norm_`` reads every gradient by itself, after the last bucket has been reduced. A bucket
whose ``.grad`` are all views of its flat buffer needs one operator instead, since the padding between gradients is
zero. From the step after the first call on, a bucket's norm is computed as soon as the bucket has been reduced, while
later buckets are still on the wire. It counts until something writes to the buffer or to a view of it, by the versions
of both. A write through ``.data`` has a version of its own and is not seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ddp_compile import torch_internals
from ddp_compile.errors import this_rank
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.bucket_set import BucketSet
from ddp_compile.runtime.comm import streams

#: Elements that are added up at once.
_ROW = 4096


class GradientNorm:
    """Clips the gradients of one module, which every rank has."""

    def __init__(self, bucket_set: BucketSet) -> None:
        self._set = bucket_set
        self._order: float | None = None  # of the last call; None if the last step was not clipped
        self._measured: dict[Bucket, tuple[int, Tensor]] = {}  # of this step, with the version that was read

    def backward_begins(self) -> None:
        """A backward that is reduced begins. Whoever has not clipped since the last one is measured no longer."""
        if self._measured:
            self._order = None
            self._measured = {}

    def bucket_is_reduced(self, bucket: Bucket) -> bool:
        """A bucket has been waited for, and its gradients are about to be handed over; returns whether it was read."""
        if self._order is None or not bucket.spec.num_bytes or (version := bucket.version) is None:
            return False
        self._measured[bucket] = version, _norm(bucket.flat, self._order)
        return True

    def explain(self) -> Iterator[str]:
        """Lines for ``model.explain()``."""
        if self._order is not None:
            yield "model.clip_grad_norm_() has the norm of a bucket computed while later buckets are on the wire"

    @torch.no_grad()
    def clip(self, rest: Sequence[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """See ``ReplicatedModule.clip_grad_norm_``. ``rest`` are the module's parameters that are in no bucket."""
        order, others = float(norm_type), list(rest)
        whole = []
        for bucket in self._set.buckets:
            if order in (2.0, math.inf) and bucket.spec.num_bytes and bucket.is_gradients():
                whole.append(bucket)
            else:
                others += bucket.parameters
        others = [parameter for parameter in others if parameter.grad is not None]
        if not whole or any(torch_internals.is_dtensor(parameter.grad) for parameter in others):
            parameters = [*self._set.parameters, *rest]
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        total = self._total(whole, others, order)
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(
                f"{this_rank()}: the total norm of order {order} of the gradients is {total.item()}, so they cannot be"
                " clipped; find what is not finite, or pass error_if_nonfinite=False"
            )
        self._order, self._measured = order, {}
        coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        if not streams.has_streams(total.device) and coefficient == 1:
            return total
        for bucket in whole:
            bucket.scale_gradients(coefficient)
        clip_grads_with_norm_(others, max_norm, total)
        return total

    def _total(self, whole: list[Bucket], others: list[Tensor], order: float) -> Tensor:
        norms = []
        for bucket in whole:
            version, norm = self._measured.get(bucket, (None, None))
            norms.append(norm if norm is not None and version == bucket.version else _norm(bucket.flat, order))
        if others:
            norms.append(get_total_norm([p.grad for p in others if p.grad is not None], order))
        return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), order)


def _norm(flat: Tensor, order: float) -> Tensor:
    """The norm of a flat buffer, shape (n,), of order 2 or infinity; shape ()."""
    if order == math.inf and not flat.is_complex():
        least, largest = torch.aminmax(flat)  # on a CPU a fifth of the time of vector_norm
        return torch.maximum(-least, largest)
    # torch adds up float32 in float32: over 23 million elements the error of one sum is 1e-3, and that of rows 1e-7.
    num_rows = flat.numel() // _ROW
    rows = torch.linalg.vector_norm(flat[: num_rows * _ROW].view(num_rows, _ROW), order, dim=1)
    rest = torch.linalg.vector_norm(flat[num_rows * _ROW :], order).view(1) if flat.numel() % _ROW else rows[:0]
    return torch.linalg.vector_norm(torch.cat([rows, rest]), order)
