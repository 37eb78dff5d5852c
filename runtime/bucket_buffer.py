"""One bucket while it is being reduced: its parameters, its flat buffer, its progress."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ddp_compile.bucket_plan import BucketSpec
from ddp_compile.kernels import FlattenPlan


class BucketState(Enum):
    """Where a bucket stands in one backward."""

    COLLECTING = auto()  #: gradients are still missing
    READY = auto()  #: all gradients are in the flat buffer, an earlier bucket has not left yet
    LAUNCHED = auto()  #: the all-reduce is under way


class BucketBuffer:
    """The flat buffer of one bucket and the gradients that are views into it.

    Args:
        spec: The bucket's part of the plan.
        parameters: Its parameters, in the order of ``spec.gradients``.
        gradient_as_bucket_view: Whether ``.grad`` becomes a view into the flat buffer. Otherwise the result is copied
            back into the gradients the engine made.

    The buffer owns ``flat``. On a CUDA device the stream on which the last gradient arrived writes it, then the process
    group's; ``work`` keeps it alive until it has been waited for. Sparse gradients have no flat buffer.
    """

    def __init__(self, spec: BucketSpec, parameters: Sequence[Parameter], gradient_as_bucket_view: bool) -> None:
        self.spec = spec
        self.parameters = tuple(parameters)
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.state = BucketState.COLLECTING
        self.missing = {gradient.index for gradient in spec.gradients}
        self.work: dist.Work | None = None
        self._has_waited = False
        self.flat: Tensor | None = None
        self._flatten_plan: FlattenPlan | None = None

    def arrive(self, parameter: int) -> bool:
        """Note one gradient; returns whether it was the last one missing."""
        self.missing.discard(parameter)
        return not self.missing

    def flatten(self, gradients: Sequence[Tensor], scale: float) -> None:
        """Bring the gradients, times ``scale``, into the flat buffer.

        A gradient that lies there already, from an accumulation over several backwards, is scaled in place.
        """
        if self.spec.is_sparse:
            with torch.no_grad():
                gradients[0].mul_(scale)
            return
        # A functional embedding can give a sparse gradient that no module announced.
        gradients = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
        self._plan().flatten(gradients, scale)

    def launch(self, process_group: dist.ProcessGroup) -> None:
        """Start the all-reduce of the flattened gradients."""
        payload = self.parameters[0].grad if self.spec.is_sparse else self.flat
        assert payload is not None
        self.work = dist.all_reduce(payload, group=process_group, async_op=True)

    def wait(self) -> None:
        """Wait for the all-reduce, once; raises RuntimeError if it failed or timed out."""
        if self.work is not None and not self._has_waited:
            self.work.wait()
            self._has_waited = True

    def hand_over(self) -> None:
        """Let every parameter's ``.grad`` be the reduced gradient; the all-reduce must have been waited for."""
        if self.spec.is_sparse:
            # A sparse sum has other indices than the sparse tensor it started from, so it is a new tensor.
            assert self.work is not None
            (self.parameters[0].grad,) = self.work.result()
            return
        if self.gradient_as_bucket_view:
            self.point_gradients_at_views()
        else:
            gradients = [parameter.grad for parameter in self.parameters]
            self._plan().unflatten([gradient for gradient in gradients if gradient is not None])

    def point_gradients_at_views(self) -> None:
        """Make each ``.grad`` a view into the flat buffer, which frees the gradient that the engine made."""
        for parameter, view in zip(self.parameters, self._plan().views, strict=True):
            if parameter.grad is not view:
                parameter.grad = view

    def reset(self) -> None:
        """Be ready for the next backward."""
        self.state = BucketState.COLLECTING
        self.missing = {gradient.index for gradient in self.spec.gradients}
        self.work = None
        self._has_waited = False

    def describe(self) -> str:
        """The bucket for an error message: its number, size and the ends of its list of parameters."""
        names = [gradient.fqn for gradient in self.spec.gradients]
        shown = ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]}, ..., {names[-1]}"
        return f"bucket {self.spec.index} ({self.spec.num_bytes} bytes: {shown})"

    def _plan(self) -> FlattenPlan:
        if self._flatten_plan is None:
            # Made at the first use, when the seal is behind us; zeros, so that the padding is and stays zero.
            first = self.parameters[0]
            offsets = [offset // first.element_size() for offset in self.spec.byte_offsets]
            num_elements = self.spec.num_bytes // first.element_size()
            self.flat = torch.zeros(num_elements, dtype=first.dtype, device=first.device)
            self._flatten_plan = FlattenPlan.for_bucket(self.parameters, self.flat, offsets)
        return self._flatten_plan
