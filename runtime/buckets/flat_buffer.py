"""The flat buffer of one bucket: the place of each gradient, and whether others hold a part of it."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from ddp_compile import torch_internals
from ddp_compile.kernels import FlattenPlan
from ddp_compile.plan.spec import BucketSpec
from ddp_compile.runtime.buckets.gradient_views import GradientViews
from ddp_compile.runtime.comm import error_messages, streams


class FlatBuffer:
    """Memory for the gradients of one bucket, allocated at its first use and at the first use after `drop`."""

    def __init__(self, spec: BucketSpec, parameters: Sequence[Parameter]) -> None:
        self._spec = spec
        self._parameters = tuple(parameters)
        self._gradient_dtype: torch.dtype = getattr(torch, spec.param_dtype or spec.dtype)
        self.has_dtensors = any(map(torch_internals.is_dtensor, parameters))  #: by tensor parallelism
        self._tensor: Tensor | None = None
        self._flatten_plan: FlattenPlan | RealParts | None = None
        self._views: GradientViews | None = None
        self._used_on: set[streams.Stream] = set()
        self._num_reserved = 0

    @property
    def tensor(self) -> Tensor:
        """The whole buffer, shape (n,) of the gradients' dtype. Only after its first use."""
        assert self._tensor is not None
        return self._tensor

    @property
    def places(self) -> Sequence[Tensor]:
        """A view for each gradient."""
        return self._plan().views

    @property
    def gradient_views(self) -> GradientViews:
        """Tensors on the same memory that can become ``.grad``."""
        if self._views is None:
            with torch.inference_mode(False):
                self._views = GradientViews(self.places)
        return self._views

    def lay_out_as(self, spec: BucketSpec) -> None:
        """Use another layout of the same bucket from the next use on."""
        self._spec = spec
        self.drop()

    def drop(self) -> None:
        """Leave the memory to its other holders."""
        self._tensor = None
        self._flatten_plan = None
        self._views = None

    def reserve(self, numel: int) -> None:
        """From the next use on, lie at the beginning of memory for at least this many elements, the others zeros."""
        if numel > max(self._num_reserved, self._spec.num_bytes // self._spec.itemsize):
            self._num_reserved = numel
            self.drop()

    def claim(self, gradients: Sequence[Tensor | None]) -> None:
        """Before the first write of an iteration: drop it if other code holds a part of it that is not ``.grad``."""
        if self._views is not None and not self._views.are_free() and not self._views.make_free(gradients):
            self.drop()

    def follow(self) -> None:
        """Make the views refer to it again, after a comm hook may have resized it."""
        if self._views is not None:
            self._views.follow()

    def flatten(self, gradients: Sequence[Tensor], scale: float | Tensor) -> None:
        """Write each gradient times ``scale`` to its place. A gradient that is already there is scaled in place.

        Raises a ParametersChangedError if the parameters have been converted.
        """
        plan, gradients = self._plan(), self._on_this_rank(gradients)
        self.used_here()
        if gradients[0].dtype != self._gradient_dtype:  # cheap, and finds nearly every conversion
            self._refuse_converted()
        try:
            plan.flatten(gradients, scale)
        except ValueError:
            self._refuse_converted()
            # A functional embedding can give a sparse gradient that no module announced. Checking every gradient in
            # every step would cost more than reading its address.
            if not any(gradient.is_sparse for gradient in gradients):
                raise
            gradients = [g.to_dense() if g.is_sparse else g for g in gradients]
            plan.flatten(gradients, scale)
        streams.launched("flatten", [*gradients, *([scale] if isinstance(scale, Tensor) else [])], plan.views)

    def used_here(self) -> None:
        """Keep the memory until the current stream is done with it, even if another stream allocated it."""
        if self._tensor is not None and (stream := streams.current(self._tensor.device)) not in self._used_on:
            self._used_on.add(stream)
            streams.used_here([self._tensor])

    def unflatten(self, gradients: Sequence[Tensor]) -> None:
        """Copy each gradient from its place."""
        plan, gradients = self._plan(), self._on_this_rank(gradients)
        plan.unflatten(gradients)
        streams.launched("unflatten", plan.views, gradients)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is in the buffer."""
        if self._tensor is None or tensor.layout is not torch.strided:
            return False
        begin = self._tensor.data_ptr()
        return begin <= tensor.data_ptr() < begin + self._tensor.nbytes

    def is_gradients(self, gradients: Sequence[Tensor | None]) -> bool:
        """Whether these are its views."""
        return self._views is not None and self._tensor is not None and self._views.are(gradients)

    def scale(self, factor: Tensor) -> None:
        """Multiply its views by a tensor of shape ()."""
        if not streams.has_streams(self.tensor.device) and factor.isfinite():
            self.tensor.mul_(factor)
        else:  # perhaps NaN, and the padding stays zero
            self.flatten(self.places, factor.to(torch.float64))
        increment_version(self.gradient_views.tensors)

    def holds_zeros(self, gradients: Sequence[Tensor | None]) -> bool:
        """Whether all of these are its views and hold zeros; False if only a wait of the host could tell."""
        return self.is_gradients(gradients) and not streams.has_streams(self.tensor.device) and not self.tensor.any()

    def _on_this_rank(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return torch_internals.local_tensors(tensors) if self.has_dtensors else tensors

    def _plan(self) -> "FlattenPlan | RealParts":
        if self._flatten_plan is None:
            self._refuse_converted()
            parameters = self._on_this_rank(self._parameters)
            first, dtype = parameters[0], getattr(torch, self._spec.dtype)
            offsets = [offset // self._spec.itemsize for offset in self._spec.byte_offsets]
            num_elements = self._spec.num_bytes // self._spec.itemsize
            with torch.inference_mode(False):  # else no later backward could write to it
                # The padding must be zero, and stays zero.
                memory = torch.zeros(max(num_elements, self._num_reserved), dtype=dtype, device=first.device)
                self._tensor = memory[:num_elements]
                self._used_on = {streams.current(first.device)}
                make = RealParts if self._tensor.is_complex() else FlattenPlan.for_bucket
                self._flatten_plan = make(parameters, self._tensor, offsets)
        return self._flatten_plan

    def _refuse_converted(self) -> None:
        """Raise a ParametersChangedError if dtype, size or device of a parameter have changed since ddp_compile."""
        changes = []
        parameters = self._on_this_rank(self._parameters)
        for spec, parameter in zip(self._spec.gradients, parameters, strict=True):
            was = f"{spec.param_dtype or spec.dtype}[{spec.numel}]"
            is_now = f"{str(parameter.dtype).removeprefix('torch.')}[{parameter.numel()}]"
            if self._tensor is not None and parameter.device != self._tensor.device:
                was, is_now = f"{was} on {self._tensor.device}", f"{is_now} on {parameter.device}"
            if was != is_now:
                changes.append(f"{was} before and {is_now} now: {spec.fqn}")
        if changes:
            raise error_messages.parameters_changed(changes)


class RealParts:
    """A `FlattenPlan` for complex tensors: a plan over their real and imaginary parts, which lie side by side."""

    def __init__(self, tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int]) -> None:
        parts = torch.view_as_real(flat).view(-1)
        self._plan = FlattenPlan.for_bucket(_real_parts(tensors), parts, [2 * offset for offset in offsets])
        self.views = tuple(torch.view_as_complex(view) for view in self._plan.views)

    def flatten(self, tensors: Sequence[Tensor], scale: float | Tensor) -> None:
        self._plan.flatten(_real_parts(tensors), scale)

    def unflatten(self, tensors: Sequence[Tensor]) -> None:
        written = [torch.empty_like(tensor) if tensor.is_conj() else tensor for tensor in tensors]
        self._plan.unflatten(_real_parts(written))
        for tensor, result in zip(tensors, written, strict=True):
            if result is not tensor:
                tensor.copy_(result)


def _real_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    # Autograd can leave a conjugation to be done when the values are read; such a tensor has no view of its parts.
    return [torch.view_as_real(tensor.detach().resolve_conj()) for tensor in tensors]
