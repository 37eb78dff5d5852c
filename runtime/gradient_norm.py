"""The norm of a module's gradients over whole flat buffers, and what clips them.

``torch.nn.utils.clip_grad_norm_`` reads every gradient by itself. A bucket whose ``.grad`` are all views of its flat
buffer needs one operator instead, since the padding between gradients is zero.

Buckets are read when the user asks, and not as soon as they are reduced: nothing tells for sure that a gradient has
been written since. ``GradScaler.unscale_``, numpy and ``.data`` do so without a new version (torch 2.13).

A fused optimizer divides gradients by its attribute ``grad_scale`` as it reads them, and writes the quotient to
``.grad``. The attribute is of float32, which is too coarse for gradients of float64. A GradScaler multiplies what it
finds there by its own scale, and deletes the attribute after the step (torch 2.13, amp/grad_scaler.py).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

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
        self._dividing: _DividingOptimizer | None = None  # the latest

    def forget_step(self) -> None:
        """The optimizer's step that gradients were left to has been left out, if it has not come yet."""
        if self._dividing is not None:
            self._dividing.stop()

    @torch.no_grad()
    def clip(
        self,
        rest: Sequence[Tensor],
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
        optimizer: Optimizer | None,
    ) -> Tensor:
        """See ``ReplicatedModule.clip_grad_norm_``. ``rest`` are the module's parameters that are in no bucket."""
        if optimizer is not None:
            _check(optimizer, [*self._set.parameters, *rest])
        self.forget_step()  # an earlier call does not count
        order, others = float(norm_type), list(rest)
        whole = []
        for bucket in self._set.buckets:
            if order in (2.0, math.inf) and bucket.spec.num_bytes and bucket.buffer.is_gradients(bucket.gradients()):
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
        coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        if not streams.has_streams(total.device) and coefficient == 1:
            return total
        if optimizer is not None and total.dtype is not torch.float64:
            self._dividing = _DividingOptimizer(optimizer, 1 / coefficient.float())
            return total
        for bucket in whole:
            bucket.buffer.scale(coefficient)
        clip_grads_with_norm_(others, max_norm, total)
        return total

    def _total(self, whole: list[Bucket], others: list[Tensor], order: float) -> Tensor:
        norms = [_norm(bucket.flat, order) for bucket in whole]
        if others:
            norms.append(get_total_norm([p.grad for p in others if p.grad is not None], order))
        return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), order)


class _DividingOptimizer:
    """A fused optimizer whose next step divides gradients by ``divisor``, a float32 tensor of shape ()."""

    def __init__(self, optimizer: Any, divisor: Tensor) -> None:
        self._optimizer = optimizer
        optimizer.grad_scale = divisor
        self._hook = optimizer.register_step_post_hook(self._has_stepped)

    def _has_stepped(self, optimizer: Any, *_: object) -> None:
        if not hasattr(optimizer, "found_inf"):  # set while a GradScaler steps
            vars(optimizer).pop("grad_scale", None)

    def stop(self) -> None:
        """Divide no longer, for the step has been left out, and do not listen; not while torch goes through hooks."""
        self._hook.remove()
        vars(self._optimizer).pop("grad_scale", None)


def _check(optimizer: Any, parameters: Sequence[Tensor]) -> None:
    """Raise ValueError unless an optimizer takes ``grad_scale`` and steps all of a module's gradients alone."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    if not torch_internals.takes_grad_scale(optimizer):
        what = "is not fused, or takes no grad_scale"
    elif stepped != {id(p) for p in parameters if p.grad is not None}:
        what = "does not step all gradients of the model, and no others"
    else:
        return
    raise ValueError(
        f"{this_rank()}: model.clip_grad_norm_(optimizer=) has got an optimizer of class {type(optimizer).__name__}"
        f" that {what}; leave optimizer= out, then the gradients are multiplied at once"
    )


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
