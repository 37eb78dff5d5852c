"""Who writes the ``.grad`` of reduced parameters.

Note [Who writes gradients]
A `GradientStore` writes ``.grad`` of the parameters of a bucket: `Views`, `Copies` or `SparseGradient`. A bucket that a
compiled backward has computed takes them away until its iteration ends (`ComputedBucket`), by the functions below. With
a sharded optimizer no rank has the whole gradient, so `ddp_compile.runtime.sharded` writes it. Nothing else in the
runtime does.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Set

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from ddp_compile import torch_internals
from ddp_compile.plan.spec import BucketSpec
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.gradient_views import held_by_others


class GradientStore(ABC):
    """Makes every ``.grad`` of a bucket the reduced gradient. It has no state: one serves all buckets.

    In all methods ``untouched`` are numbers of parameters whose ``.grad`` does not change, since no rank has used them.
    """

    def point_at_views(self, bucket: Bucket, untouched: Set[int] = frozenset()) -> None:  # noqa: B027  # only `Views`
        """After the flatten, free the gradients that the engine made, if the flat buffer can be ``.grad``.

        It needs only the buffer's address, so it runs while the reduction is under way.
        """

    @abstractmethod
    def hand_over(self, bucket: Bucket, untouched: Set[int] = frozenset()) -> None:
        """After the reduction, let every ``.grad`` be the reduced gradient."""

    def adopt(self, bucket: Bucket) -> None:  # noqa: B027  # only `Views`
        """At the end of a backward, move what ``.grad`` holds into the flat buffer, to free its old memory."""


class Views(GradientStore):
    """Each ``.grad`` becomes a view into the flat buffer if no user could tell: Note [Gradients that others hold]."""

    def point_at_views(self, bucket: Bucket, untouched: Set[int] = frozenset()) -> None:
        views = bucket.buffer.gradient_views
        gradients = bucket.gradients()
        bucket.release_flattened()  # `gradients` keeps the objects, and must be the only list that does
        if views.are(gradients):
            return
        views.leave_moved()
        held = held_by_others(gradients, views.tensors)
        bucket.note_held(held)
        left_alone = bucket.positions_of(untouched) | held
        pairs: Iterable[tuple[Parameter, Tensor]] = zip(bucket.parameters, views.tensors, strict=True)
        if left_alone:
            pairs = [pair for position, pair in enumerate(pairs) if position not in left_alone]
        for parameter, view in pairs:
            parameter.grad = view

    def hand_over(self, bucket: Bucket, untouched: Set[int] = frozenset()) -> None:
        left_alone = bucket.positions_of(untouched)
        _restore(bucket, left_alone)
        for position in bucket.iteration.copied_back - left_alone:
            gradient = bucket.parameters[position].grad
            if gradient is not None:
                with torch.no_grad():
                    gradient.copy_(bucket.places[position])

    def adopt(self, bucket: Bucket) -> None:
        if bucket.lazy_allocation:
            return
        views = bucket.buffer.gradient_views.tensors
        held = held_by_others(bucket.gradients(), views)
        for position, (parameter, view) in enumerate(zip(bucket.parameters, views, strict=True)):
            if parameter.grad is not None and parameter.grad is not view and position not in held:
                parameter.grad = view.copy_(parameter.grad)


class Copies(GradientStore):
    """The result is copied into the gradients that the engine made."""

    def hand_over(self, bucket: Bucket, untouched: Set[int] = frozenset()) -> None:
        left_alone, gradients = bucket.positions_of(untouched), []
        _restore(bucket, left_alone)
        for position, (parameter, place) in enumerate(zip(bucket.parameters, bucket.places, strict=True)):
            if position in left_alone:
                gradients.append(torch.empty_like(place))  # discarded
                continue
            # Other ranks have used it, or a functional embedding has made it.
            if parameter.grad is None or parameter.grad.is_sparse:
                like = parameter if torch_internals.is_dtensor(parameter) else place
                parameter.grad = torch.empty_like(like, dtype=parameter.dtype)
            gradients.append(parameter.grad)
        bucket.buffer.unflatten(gradients)


class SparseGradient(GradientStore):
    """``.grad`` becomes the result, which has other indices than the tensor that was sent."""

    def hand_over(self, bucket: Bucket, untouched: Set[int] = frozenset()) -> None:
        assert bucket.iteration.work is not None
        if not bucket.positions_of(untouched):
            bucket.parameters[0].grad = bucket.iteration.work.result()[0]


_VIEWS, _COPIES, _SPARSE = Views(), Copies(), SparseGradient()


def store_for(spec: BucketSpec, parameters: Iterable[Parameter], gradient_as_bucket_view: bool) -> GradientStore:
    """The store of a bucket with these parameters."""
    if spec.is_sparse:
        return _SPARSE
    # One cannot know who holds the tensor inside a DTensor, so the result is copied into it.
    is_copied = spec.param_dtype is not None or any(map(torch_internals.is_dtensor, parameters))
    return _VIEWS if gradient_as_bucket_view and not is_copied else _COPIES


def set_gradient(parameter: Parameter, gradient: Tensor | None) -> None:
    """For a `ComputedBucket`, which takes ``.grad`` away for a while."""
    parameter.grad = gradient


def drop_gradients(parameters: Iterable[Parameter]) -> None:
    """Set every ``.grad`` to None."""
    for parameter in parameters:
        parameter.grad = None


def fill_with_zeros(parameter: Parameter) -> None:
    """Give a parameter a ``.grad`` of zeros if it has none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)


def _restore(bucket: Bucket, positions: Set[int]) -> None:
    """Bring back the gradients in the flat buffer to which no rank has added anything."""
    saved = positions & bucket.iteration.saved.keys()
    for position in saved:
        bucket.places[position].copy_(bucket.iteration.saved[position])
    if saved:
        increment_version([bucket.flat])  # which does not count writes to places
