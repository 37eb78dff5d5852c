"""One bucket while it is being reduced: its parameters, its flat buffer, its progress."""

from __future__ import annotations

from collections.abc import Container, Sequence
from enum import Enum, auto

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ddp_compile.bucket_plan import BucketSpec
from ddp_compile.kernels import FlattenPlan
from ddp_compile.runtime.comm_hooks import CommHook, GradBucket, HookWork


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
    group's; ``work`` keeps it alive until it has been waited for. A sparse gradient is its own buffer.
    """

    def __init__(self, spec: BucketSpec, parameters: Sequence[Parameter], gradient_as_bucket_view: bool) -> None:
        self.spec = spec
        self.parameters = tuple(parameters)
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.state = BucketState.COLLECTING
        self._all = frozenset(gradient.index for gradient in spec.gradients)
        self.missing = set(self._all)
        self.work: dist.Work | HookWork | None = None
        self._has_waited = False
        self.flat: Tensor | None = None
        self._kept: dict[int, Tensor] = {}
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
                self.flat = gradients[0].mul_(scale)
            return
        # A functional embedding can give a sparse gradient that no module announced.
        gradients = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
        self._plan().flatten(gradients, scale)

    def contribution_of_unused(self, position: int) -> Tensor:
        """What a parameter contributes that got no gradient in this round: what it holds from before, else zeros.

        A gradient that lies in the flat buffer is kept aside, to be put back if no other rank has one to add.
        """
        parameter = self.parameters[position]
        if self.spec.is_sparse:
            if parameter.grad is not None:
                return parameter.grad.clone()
            # No rows, as embeddings give them: one sparse dimension, which ranks have to agree on.
            rows = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
            values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
            return torch.sparse_coo_tensor(rows, values, parameter.shape)
        view = self._plan().views[position]
        if parameter.grad is None:
            return view.zero_()
        if parameter.grad.data_ptr() == view.data_ptr():
            self._kept[position] = view.clone()
        return parameter.grad

    def launch(
        self, process_group: dist.ProcessGroup, comm_hook: CommHook | None = None, is_last: bool = False
    ) -> None:
        """Start the reduction of the flattened gradients.

        Args:
            process_group: The ranks of the all-reduce.
            comm_hook: What reduces them in place of the all-reduce.
            is_last: Whether no bucket leaves after this one.

        Raises:
            ReductionError: The comm hook raised.
        """
        assert self.flat is not None
        if comm_hook is None:
            self.work = dist.all_reduce(self.flat, group=process_group, async_op=True)
            return
        # Hooks may resize what they are given, as batched PowerSGD does; the buffer itself keeps its shape.
        handed_out = self.flat if self.spec.is_sparse else self.flat.view(-1)
        bucket = GradBucket(self.spec.index, is_last, handed_out, self.parameters)
        self.work = comm_hook.launch(bucket, self.flat, self.describe())

    def wait(self) -> None:
        """Wait for the reduction, once; raises RuntimeError if it failed or timed out."""
        if self.work is not None and not self._has_waited:
            self.work.wait()
            self._has_waited = True

    def hand_over(self, untouched: Container[int] = ()) -> None:
        """Let every parameter's ``.grad`` be the reduced gradient; the all-reduce must have been waited for.

        Args:
            untouched: Numbers of parameters that got no gradient on any rank: theirs stay what they were.
        """
        left_alone = [position for position, spec in enumerate(self.spec.gradients) if spec.index in untouched]
        if self.spec.is_sparse:
            # A sparse sum has other indices than the sparse tensor it started from, so it is a new tensor.
            assert self.work is not None
            if not left_alone:
                (self.parameters[0].grad,) = self.work.result()
            return
        for position in left_alone:
            if position in self._kept:
                self._plan().views[position].copy_(self._kept[position])
        if self.gradient_as_bucket_view:
            self.point_gradients_at_views(untouched)
        else:
            self._copy_back(left_alone)

    def point_gradients_at_views(self, untouched: Container[int] = ()) -> None:
        """Make each ``.grad`` a view into the flat buffer, which frees the gradient that the engine made.

        Args:
            untouched: Numbers of parameters whose ``.grad`` stays what it is.
        """
        for parameter, view, spec in zip(self.parameters, self._plan().views, self.spec.gradients, strict=True):
            if parameter.grad is not view and spec.index not in untouched:
                parameter.grad = view

    def _copy_back(self, left_alone: Sequence[int]) -> None:
        gradients = []
        for position, (parameter, view) in enumerate(zip(self.parameters, self._plan().views, strict=True)):
            if position in left_alone:
                gradients.append(torch.empty_like(view))  # thrown away
                continue
            if parameter.grad is None:  # other ranks have used it
                parameter.grad = torch.empty_like(view)
            gradients.append(parameter.grad)
        self._plan().unflatten(gradients)

    def reset(self) -> None:
        """Be ready for the next backward."""
        self.state = BucketState.COLLECTING
        self.missing.update(self._all)
        self.work = None
        self._has_waited = False
        self._kept.clear()

    def lay_out_as(self, spec: BucketSpec) -> None:
        """Give the gradients their places in a new flat buffer, between two backwards.

        Args:
            spec: The same bucket with another layout. Each ``.grad`` stays where it is until the next flatten.
        """
        self.spec = spec
        self.flat = None
        self._flatten_plan = None

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
