"""One bucket: its parameters, its flat buffer and its state. A `GradientStore` writes the ``.grad``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ddp_compile.errors import shorten_names
from ddp_compile.plan.spec import BucketSpec
from ddp_compile.runtime.buckets.comm_algorithm import Pending
from ddp_compile.runtime.buckets.flat_buffer import FlatBuffer
from ddp_compile.runtime.buckets.iteration import BucketIteration, BucketState
from ddp_compile.runtime.comm import error_messages, flight_recorder, streams

if TYPE_CHECKING:
    from ddp_compile.runtime.buckets.computed_bucket import ComputedBucket
    from ddp_compile.runtime.buckets.gradients import GradientStore


class Bucket:
    """The flat buffer of one bucket, and how far it has come in an iteration.

    Args:
        spec: The bucket's part of the plan.
        parameters: Its parameters, in the order of ``spec.gradients``.
        gradient_store: Writes the ``.grad`` of its parameters.
        lazy_allocation: Whether the flat buffer is dropped when an iteration ends.

    The bucket owns ``flat``. The stream on which the last gradient arrived, or that of a compiled backward, writes it;
    after the launch the process group's stream does. The pending work keeps it alive until it has been waited for. A
    sparse gradient is its own buffer.
    """

    def __init__(
        self, spec: BucketSpec, parameters: Sequence[Parameter], gradient_store: GradientStore, lazy_allocation: bool
    ) -> None:
        self.spec = spec
        self.parameters = tuple(parameters)
        self.buffer = FlatBuffer(spec, parameters)
        self.gradient_store = gradient_store
        self.param_indices = tuple(gradient.index for gradient in spec.gradients)  #: numbers of its parameters
        #: Whether a compiled backward that has computed it launches it; the same on every rank.
        self.may_launch_early = False
        self.was_launched_too_early = False  #: the same on every rank
        self.was_launched_early = False  #: on this rank, and nothing came later
        self.iteration = BucketIteration(set(self.param_indices))
        self.lazy_allocation = lazy_allocation
        self._sparse: Tensor | None = None
        self._device = parameters[0].device
        self.plan_digest = ""  #: of the plan that it belongs to, see `BucketPlan.digest`
        #: Calls a function that starts a collective of the bucket, from a frame with the bucket's name.
        self.call_by_name: Callable[..., Any]
        self._accumulated_on: set[streams.Stream] = set()  # of AccumulateGrad nodes: each always runs on one

    def begin_iteration(self) -> None:
        self.iteration = BucketIteration(set(self.param_indices))
        self._sparse = None
        if self.lazy_allocation:
            self.buffer.drop()

    def let_launch_early(self, may: bool) -> None:
        """From the next iteration on let a compiled backward launch it or not, as all ranks have agreed."""
        self.may_launch_early = may and not self.was_launched_too_early

    def note_early_launch(self, was_too_early: bool) -> None:
        """The iteration ends. If some rank launched it too early, its hooks launch it from now on."""
        if was_too_early:
            self.may_launch_early, self.was_launched_too_early, self.was_launched_early = False, True, False
        elif self.iteration.computed is not None:
            self.was_launched_early = True

    @property
    def names(self) -> list[str]:
        """The fully qualified names of its parameters."""
        return [gradient.fqn for gradient in self.spec.gradients]

    # Gradients arrive.

    @property
    def is_pending(self) -> bool:
        """Whether gradients are missing."""
        return self.iteration.state is BucketState.PENDING

    @property
    def is_ready(self) -> bool:
        """Whether it waits for its turn in plan order."""
        return self.iteration.state is BucketState.READY

    def arrive(self, index: int) -> bool:
        """AccumulateGrad has stored one gradient; returns whether it was the last one missing."""
        self.iteration.pending.discard(index)
        return not self.iteration.pending

    def arrive_all(self, indices: Sequence[int]) -> list[int]:
        """AccumulateGrad has stored several gradients; returns those that were no longer missing."""
        pending, once = self.iteration.pending, set(indices)
        if len(once) == len(indices) and once <= pending:
            pending -= once
            return []
        again = []
        for index in indices:
            if index in pending:
                pending.remove(index)
            else:
                again.append(index)
        return again

    def mark_unused(self, index: int) -> None:
        """A parameter gets no gradient on this rank. It contributes its previous ``.grad``, or zeros."""
        self.iteration.unused.add(index)

    def mark_used(self, indices: Iterable[int]) -> None:
        """Parameters have got gradients after all."""
        self.iteration.unused.difference_update(indices)

    def mark_computed(self, computed: ComputedBucket) -> None:
        """A compiled backward has computed all gradients, and AccumulateGrad has seen none of them."""
        self.iteration.computed = computed

    def note_stream(self) -> None:
        """Record on which stream AccumulateGrad, whose hook is running, stores a gradient of this bucket."""
        if (stream := streams.current(self._device)) is not None:
            self._accumulated_on.add(stream)

    def accumulates_like(self, other: Bucket) -> None:
        """Some of its parameters were in another bucket, so their AccumulateGrad nodes run on that one's streams."""
        self._accumulated_on |= other._accumulated_on

    @property
    def _accumulated_elsewhere(self) -> set[streams.Stream]:
        return self._accumulated_on - {streams.current(self._device)} if self._accumulated_on else set()

    # It becomes ready.

    def contributions(self, sends: bool, verify_undefined: Callable[[int], None], keeps_own: bool) -> list[Tensor]:
        """What this rank sends: the ``.grad`` of each parameter, or its stand-in. From now on nothing is missing.

        Args:
            sends: Whether anything is sent; otherwise what stands for a gradient is not read.
            verify_undefined: Called with each parameter that has arrived and holds no gradient; raises unless its
                gradient is undefined.
            keeps_own: Whether the bucket may have to be launched again.

        Raises:
            GradientArrivalError: A gradient was removed, or was computed with ``create_graph=True``.
        """
        self.iteration.pending.clear()
        for stream in self._accumulated_elsewhere:
            streams.record_on(stream, self._device).wait()
        gradients = self.gradients()
        if sends:
            self.claim(gradients)
        if torch.is_grad_enabled():  # create_graph=True
            for spec, gradient in zip(self.spec.gradients, gradients, strict=True):
                if gradient is not None and gradient.requires_grad:
                    raise error_messages.gradient_with_graph(spec.fqn)
        contributions = [gradient for gradient in gradients if gradient is not None]
        unused = self.iteration.unused
        if unused or len(contributions) < len(gradients):
            for index, gradient in zip(self.param_indices, gradients, strict=True):
                if gradient is None and index not in unused:
                    verify_undefined(index)
            contributions = [
                self._contribution(position, gradient, sends) for position, gradient in enumerate(gradients)
            ]
        if keeps_own:
            self.keep_own(contributions)
        return contributions

    def keep_own(self, gradients: Sequence[Tensor]) -> None:
        """Keep this rank's gradients, which the result will overwrite, until the iteration ends."""
        # Not the tensors themselves, which would look as if users held them.
        self.iteration.own = [g.clone() if self.buffer.holds(g) else g.detach() for g in gradients]

    def claim(self, gradients: Sequence[Tensor | None]) -> None:
        """Before the first write of an iteration: leave the flat buffer to those who hold a part of it, if any."""
        if not self.iteration.is_claimed:
            self.iteration.is_claimed = True
            self.buffer.claim(gradients)

    def flatten(self, gradients: Sequence[Tensor], scale: float | Tensor) -> None:
        """Write the gradients, times ``scale``, to the flat buffer; the bucket is ready then.

        A gradient that is already there, accumulated over several backwards, is scaled in place.
        """
        if self.spec.is_sparse:
            with torch.no_grad():
                self._sparse = gradients[0].mul_(scale)
        else:
            self.iteration.flattened = gradients
            if self._accumulated_elsewhere:
                streams.used_here(gradients)
            self.buffer.flatten(gradients, scale)
        self.iteration.flattened_at = None
        self.iteration.state = BucketState.READY

    def flatten_zeros(self) -> None:
        """Send zeros from a new flat buffer, so that ``.grad`` does not change; the bucket is ready then."""
        self.iteration.pending.clear()
        if self.spec.is_sparse:
            self._sparse = self._without_rows()
        else:
            self.buffer.drop()
            _ = self.buffer.places  # allocates it, filled with zeros
        self.iteration.state = BucketState.READY

    def skip(self) -> None:
        """Leave it out of this iteration, so that it waits for nothing."""
        self.iteration.pending.clear()
        self.iteration.is_skipped = True
        self.iteration.state = BucketState.READY

    def keep_local(self) -> None:
        """Keep this rank's own gradients, since nothing is sent in this iteration."""
        self.iteration.state = BucketState.READY

    def note_flattened(self) -> None:
        """Record an event after the flatten, since the launch may come on another stream."""
        self.iteration.flattened_at = streams.record(self.flat.device)

    def note_held(self, positions: frozenset[int]) -> None:
        """Record which ``.grad`` stay the tensors that they are; the result is copied into them."""
        self.iteration.copied_back = positions

    def release_flattened(self) -> None:
        """Release the flattened tensors, which are not ``.grad``."""
        self.iteration.flattened = ()

    def positions_of(self, indices: Set[int]) -> set[int]:
        """The positions of those of these parameters that are in it."""
        if not indices:
            return set()
        return {position for position, index in enumerate(self.param_indices) if index in indices}

    def _contribution(self, position: int, gradient: Tensor | None, sends: bool) -> Tensor:
        """What a parameter sends: its gradient of this iteration, else its earlier ``.grad``, else zeros.

        An earlier ``.grad`` in the flat buffer is saved, and restored if no other rank adds to it.
        """
        parameter = self.parameters[position]
        if gradient is not None and self.param_indices[position] not in self.iteration.unused:
            return gradient
        if not sends:
            return parameter  # it is not read
        if self.spec.is_sparse:
            return self._without_rows() if parameter.grad is None else parameter.grad.clone()
        view = self.buffer.places[position]
        if parameter.grad is None:
            return view.zero_()
        if not self.buffer.has_dtensors and parameter.grad.data_ptr() == view.data_ptr():
            self.iteration.saved[position] = view.clone()
        return parameter.grad

    def _without_rows(self) -> Tensor:
        """A sparse gradient of zeros with one sparse dimension, like those of embeddings; ranks must agree on that."""
        parameter = self.parameters[0]
        rows = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
        values = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
        return torch.sparse_coo_tensor(rows, values, parameter.shape)

    # It is reduced.

    def await_flatten(self) -> None:
        """Before a launch, let the current stream wait for the flatten, which may have run on another one."""
        if self.iteration.flattened_at is not None:
            self.iteration.flattened_at.wait()

    def reduction_begins(self, work: Pending) -> None:
        """Record that the flat buffer is being reduced."""
        self.iteration.work = work
        self.iteration.state = BucketState.LAUNCHED
        self.buffer.follow()  # a comm hook may have resized it

    @property
    def is_under_way(self) -> bool:
        """Whether its reduction has started and has not been waited for."""
        return self.iteration.state is BucketState.LAUNCHED

    def wait(self) -> None:
        """Wait for the reduction, once; raises RuntimeError if it failed or timed out."""
        if self.is_under_way:
            assert self.iteration.work is not None
            self.iteration.work.wait()
            self.iteration.state = BucketState.REDUCED
            self.buffer.used_here()
            self.buffer.follow()  # a comm hook may resize it when its communication is over

    def gradients(self) -> list[Tensor | None]:
        """The ``.grad`` of each parameter."""
        return [parameter.grad for parameter in self.parameters]

    # The flat buffer and its layout.

    @property
    def flat(self) -> Tensor:
        """After the flatten, what is reduced: shape (n,) of the gradients' dtype, or a sparse gradient."""
        return self.buffer.tensor if self._sparse is None else self._sparse

    @property
    def places(self) -> Sequence[Tensor]:
        """The place of each gradient in the flat buffer: a view of the shape of this rank's part of its parameter.

        Do not keep them after the reduction.
        """
        return self.buffer.places

    @property
    def is_aligned(self) -> bool:
        """Whether every place begins at a multiple of 16 bytes."""
        return all(offset % 16 == 0 for offset in self.spec.byte_offsets)

    def new_views(self) -> list[Tensor]:
        """New views into the flat buffer, which AccumulateGrad stores as they are, since nothing else holds them."""
        return [view.detach() for view in self.buffer.gradient_views.tensors]

    def lay_out_as(self, spec: BucketSpec) -> None:
        """Between two backwards, take another layout; each ``.grad`` stays where it is until the next flatten."""
        self.spec = spec
        self.buffer.lay_out_as(spec)

    def take_name(self, plan_digest: str) -> None:
        """Be a bucket of this plan, also in torch's flight recorder."""
        self.plan_digest = plan_digest
        self.call_by_name = flight_recorder.caller(f"bucket_{self.spec.index}_of_plan_{plan_digest}")

    def reserve(self, numel: int) -> None:
        """Between two iterations, have memory for this many elements from ``flat``'s first one on; see `FlatBuffer`."""
        self.buffer.reserve(numel)

    def describe(self) -> str:
        """The bucket for an error message: its number, size and the ends of its list of parameters."""
        return f"bucket {self.spec.index} ({self.spec.num_bytes} bytes: {shorten_names(self.names)})"
