"""Fused flatten-and-scale between the tensors of one bucket and its flat buffer."""

import functools
import threading
from collections.abc import Sequence
from typing import Self

from torch import Tensor
from torch.autograd.graph import increment_version

from ddp_compile.kernels.contract import layout, reference
from ddp_compile.kernels.executors import choose, executor_for


class FlattenPlan:
    """Moves the tensors of one bucket to and from their places in a flat buffer. Made once, used in every step.

    A step reads the tensors' addresses and moves them in one call. Kernels move tensors that have the memory order of
    their place and a dtype with kernels (float32, bfloat16, float16). torch moves the others, one by one.

    Args:
        tensors: Tensors of any shape on the device of ``flat``. Only shape and strides matter, not the values.
        flat: One-dimensional contiguous buffer of a floating dtype. The plan keeps it alive, the caller owns it. On a
            CUDA device it is written and read on the current stream.
        offsets: Where each tensor starts, in elements of ``flat``; None packs them without gaps.

    Raises:
        ValueError: Devices differ, ``flat`` is not one-dimensional, contiguous and floating, a tensor does not fit,
            or places overlap.
    """

    def __init__(self, tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int] | None = None) -> None:
        self.flat = flat
        # Another tensor on the same storage, to notice if `flat` gets other memory.
        self._alias = flat.detach()
        self._lock = threading.Lock()  # around reading addresses and moving
        if flat.numel() and not flat.data_ptr():
            raise ValueError(f"flat with {flat.numel()} elements has no memory: its storage has been freed")
        layout.check_flat(flat)
        self.implementation = choose(flat.device, flat.dtype)  #: what moves the tensors: "native", "cuda", "reference"
        self._executor = executor_for(self.implementation, tensors, flat, offsets)
        # Views are made on demand: kernels need none.
        self._offsets = None if offsets is None else tuple(offsets)
        self._examples = tuple(tensors)

    @classmethod
    def for_bucket(cls, tensors: Sequence[Tensor], flat: Tensor, offsets: Sequence[int] | None = None) -> Self:
        """A plan that outlives the tensors that it is made from. Arguments and errors are those of the class."""
        plan = cls(tensors, flat, offsets)
        _ = plan.views
        return plan

    @functools.cached_property
    def views(self) -> tuple[Tensor, ...]:
        """One view into ``flat`` for each tensor, of the tensor's shape, and of its strides if these leave no gaps."""
        offsets = layout.packed_offsets(self._examples) if self._offsets is None else self._offsets
        pairs = zip(self._examples, offsets, strict=True)
        views = tuple(layout.place_of(tensor, self.flat, offset) for tensor, offset in pairs)
        self._examples = ()
        return views

    def flatten(self, tensors: Sequence[Tensor], scale: float | Tensor) -> None:
        """Write each tensor times ``scale`` to its place. A tensor that is already there is scaled in place.

        Args:
            tensors: One for each view, of its shape, on its device, of any floating dtype.
            scale: Factor for every element. A float64 tensor of shape () on the device of ``flat`` is read by the
                kernels, without a wait of the host.

        Raises:
            ValueError: A tensor has another shape or device, is not floating, or shares memory with ``flat`` outside
                its place. Then ``flat`` is unchanged.
        """
        self._move(tuple(tensors), scale, to_flat=True)

    def unflatten(self, tensors: Sequence[Tensor], scale: float = 1.0) -> None:
        """Write each tensor's place in the flat buffer, times ``scale``, to the tensor.

        Args:
            tensors: As for `flatten`.
            scale: Factor for every element.

        Raises:
            ValueError: Like `flatten`, or two tensors share memory. Then no tensor is changed.
        """
        self._move(tuple(tensors), scale, to_flat=False)

    def _move(self, tensors: tuple[Tensor, ...], scale: float | Tensor, to_flat: bool) -> None:
        self._check_flat()
        with self._lock:
            others = self._executor.read(tensors, self.flat, written=not to_flat)
            # torch may refuse the others, so they come first, before anything is written.
            if others:
                self._move_others(others, tensors, scale, to_flat)
            self._executor.move(self.flat, to_flat, scale)
        # torch has counted what it has written itself.
        increment_version([self.flat] if to_flat else [t for i, t in enumerate(tensors) if i not in others])

    def _move_others(
        self, others: Sequence[int], tensors: tuple[Tensor, ...], scale: float | Tensor, to_flat: bool
    ) -> None:
        for i in others:
            layout.check_tensor(i, tensors[i], self.views[i].shape, self.flat)
        # `read` has checked the pairs in which a kernel moves at least one tensor.
        layout.check_memory(tensors, self.views, self.flat, written=not to_flat, indices=others)
        places, moved = [self.views[i] for i in others], [tensors[i] for i in others]
        sources, destinations = (moved, places) if to_flat else (places, moved)
        reference.scale_into(sources, destinations, scale)

    def _check_flat(self) -> None:
        flat, alias = self.flat, self._alias
        needed = (alias.storage_offset() + alias.numel()) * alias.element_size()
        if (
            flat.data_ptr() != alias.data_ptr()
            or flat.shape != alias.shape
            or flat.stride() != alias.stride()
            or flat.dtype != alias.dtype
            or alias.untyped_storage().nbytes() < needed
        ):
            raise ValueError("flat has another size, dtype or memory than when the plan was made; make a new plan")
