"""What ``.grad`` is while a gradient lies in the flat buffer of its bucket.

Note [Gradients that others hold]
Users keep gradients (gradient surgery, logging), put others in their place (``p.grad.data = ...``), let them be views
of a buffer of their own, and save them. With DistributedDataParallel's default that is all safe: each gradient has
memory of its own, the reduced one is copied into it. Views into flat buffers save that copy and its memory, but only
where nobody can tell the difference:

- Before a bucket writes its flat buffer, it looks whether somebody holds a view that is no ``.grad`` any more, by the
  number of references to the view and to its storage. Then that buffer is left to who holds it, and the bucket takes a
  new one.
- Before ``.grad`` becomes a view, the bucket looks whether somebody else holds what is there: the tensor itself, or,
  where it has been written in place and so is not what the engine has just made, its memory. Then it stays ``.grad``,
  and the reduced gradient is copied into it.
- A view that has been given other memory is an ordinary gradient from then on; its place gets another view.
- Each view has a storage of its own on the buffer's memory, so that ``torch.save(p.grad)`` and ``copy.deepcopy`` take
  one gradient and not the bucket.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ddp_compile import torch_internals

# What uses a storage that nothing but one tensor lies in, while somebody looks at it.
_TENSOR_AND_STORAGE_OBJECT = 2


class GradientViews:
    """One tensor for each gradient of a bucket, on the memory of its place in the flat buffer.

    Args:
        places: The places: views of the flat buffer. The tensors keep the buffer alive.

    A tensor's storage is as large as its place; on the memory of another storage it is made through DLPack, which
    copies nothing.
    """

    def __init__(self, places: Sequence[Tensor]) -> None:
        self._places = tuple(places)
        self.tensors = [with_own_storage(place) for place in places]
        self._look()
        # Of a tensor that nobody else holds; all have as many.
        self._own_references = max(torch_internals.num_references(self.tensors), default=0)
        self._references_to_storage = max(map(sys.getrefcount, self._storages), default=0)

    def are_free(self) -> bool:
        """Whether each tensor lies in its place, and nobody holds one or its memory, ``.grad`` included."""
        return (
            max(torch_internals.num_references(self.tensors), default=0) <= self._own_references
            and max(map(sys.getrefcount, self._storages), default=0) <= self._references_to_storage
            and all(uses == _TENSOR_AND_STORAGE_OBJECT for uses in torch_internals.num_storage_uses(self._storage_keys))
            and self._lie_in_place()
        )

    def follow(self) -> None:
        """Lie in the places again where the flat buffer has been given other memory, by a comm hook that resizes it.

        Whoever holds a tensor keeps it; views of a tensor that somebody has made before are lost with the old memory.
        """
        if not self._places or self._places[0].data_ptr() == self._begin:
            return
        for tensor, place in zip(self.tensors, self._places, strict=True):
            tensor.data = with_own_storage(place)
        self._look()

    def are(self, gradients: Sequence[Tensor | None]) -> bool:
        """Whether these are the gradients."""
        return all(map(operator.is_, gradients, self.tensors))

    def make_free(self, gradients: Sequence[Tensor | None]) -> bool:
        """See that the places can be written without anybody noticing but through ``.grad``.

        A tensor that has been given other memory is replaced by a new one.

        Args:
            gradients: The ``.grad`` of each parameter. Who holds one that is a tensor of these sees it written, as
                with any optimizer that steps over gradients in place.

        Returns:
            False where somebody holds one that is no ``.grad`` any more.
        """
        if self.are(gradients) and self._lie_in_place():
            return True
        references = torch_internals.num_references(self.tensors)
        uses = torch_internals.num_storage_uses(self._storage_keys)
        of_storages = list(map(sys.getrefcount, self._storages))
        for i, (gradient, num_references, num_uses) in enumerate(zip(gradients, references, uses, strict=True)):
            is_held = num_references > self._own_references or of_storages[i] > self._references_to_storage
            if gradient is not self.tensors[i] and (is_held or num_uses > _TENSOR_AND_STORAGE_OBJECT):
                return False
            if self.tensors[i].data_ptr() != self._addresses[i] or num_uses < _TENSOR_AND_STORAGE_OBJECT:
                self._renew(i)
        return True

    def _look(self) -> None:
        self._begin = self._places[0].data_ptr() if self._places else 0
        # Kept alive, for a tensor may be given another storage.
        self._storages = [tensor.untyped_storage() for tensor in self.tensors]
        self._storage_keys = [torch_internals.key_of_storage(storage) for storage in self._storages]
        self._addresses = [tensor.data_ptr() for tensor in self.tensors]

    def _lie_in_place(self) -> bool:
        return list(map(Tensor.data_ptr, self.tensors)) == self._addresses

    def _renew(self, position: int) -> None:
        tensor = with_own_storage(self._places[position])
        self.tensors[position] = tensor
        self._storages[position] = storage = tensor.untyped_storage()
        self._storage_keys[position] = torch_internals.key_of_storage(storage)


def held_by_others(gradients: Sequence[Tensor | None], views: Sequence[Tensor]) -> frozenset[int]:
    """Where the ``.grad`` of a parameter has to stay the tensor that it is; see Note [Gradients that others hold].

    Args:
        gradients: The ``.grad`` of each parameter of a bucket, in a list that nobody else has.
        views: What they are to become; one that is there already has nothing to stay.

    Returns:
        Positions in the bucket.
    """
    references = torch_internals.num_references(gradients)
    own = _references_to_a_gradient()
    if max(references, default=0) <= own and not _any_written(gradients):
        return frozenset()
    return frozenset(
        i
        for i, (gradient, num_references) in enumerate(zip(gradients, references, strict=True))
        if gradient is not None
        and gradient is not views[i]
        and (num_references > own or (_any_written([gradient]) and _shares_memory(gradient)))
    )


def _any_written(gradients: Sequence[Tensor | None]) -> bool:
    """Whether one may have been written in place; those that were made in inference mode count no versions."""
    try:
        return any(map(operator.attrgetter("_version"), gradients))
    except RuntimeError:
        return True


@functools.cache
def _references_to_a_gradient() -> int:
    """How many references there are to a ``.grad`` that nothing but its parameter and one list holds."""
    parameter = Parameter(torch.zeros(1, device="cpu"))
    parameter.grad = torch.zeros(1, device="cpu")
    return torch_internals.num_references([parameter.grad])[0]


def _shares_memory(gradient: Tensor) -> bool:
    """Whether another tensor, or another process, may see what is written into a gradient."""
    if gradient.layout is not torch.strided:
        return False
    storage = gradient.untyped_storage()
    (uses,) = torch_internals.num_storage_uses([torch_internals.key_of_storage(storage)])
    return uses > _TENSOR_AND_STORAGE_OBJECT or (gradient.device.type == "cpu" and gradient.is_shared())


def with_own_storage(place: Tensor) -> Tensor:
    """A tensor on the same memory, of the same shape and strides, whose storage is as large as itself."""
    if not place.numel():
        return torch.empty_like(place)
    shared = torch.utils.dlpack.from_dlpack(place)
    # DLPack may make strides of dimensions of one element up. Not a view of it, which would use the storage as well.
    tensor = torch.empty(0, dtype=place.dtype, device=place.device)
    return tensor.set_(shared.untyped_storage(), shared.storage_offset(), place.shape, place.stride())
