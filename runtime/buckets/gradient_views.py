"""What ``.grad`` is while a gradient is in its bucket's flat buffer.

Note [Gradients that others hold]
Users keep gradients (gradient surgery, logging), put others in their place (``p.grad.data = ...``), let them be views
of a buffer of their own, and save them. With DistributedDataParallel's default that is all safe: each gradient has
memory of its own, and the reduced one is copied into it. Views into flat buffers save that copy and its memory, but
only if no other code can tell the difference:

- Before a bucket writes its flat buffer, it counts the references to each view and to its storage. If other code holds
  a view that is no ``.grad`` any more, the bucket leaves that buffer to them and takes a new one.
- Before ``.grad`` becomes a view, the bucket checks whether other code holds the tensor that is there; or its memory,
  if it has been written in place and so is not what the engine has just made. Then that tensor stays ``.grad``, and the
  reduced gradient is copied into it.
- A view that has been given other memory is an ordinary gradient from then on; its place gets another view.
- Each view has its own storage on the buffer's memory, so that ``torch.save(p.grad)`` and ``copy.deepcopy`` take one
  gradient and not the bucket.
"""

import functools
import operator
import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ddp_compile import torch_internals

# Uses of a storage that only one tensor and the object under examination refer to.
_TENSOR_AND_STORAGE_OBJECT = 2


class GradientViews:
    """One tensor for each gradient of a bucket, on the memory of its place in the flat buffer, which it keeps alive.

    A tensor's storage is as large as its place. DLPack makes it on the memory of another storage without a copy.
    """

    def __init__(self, places: Sequence[Tensor]) -> None:
        self._places = tuple(places)
        self.tensors = [with_own_storage(place) for place in places]
        self._look()
        # References to a tensor that no other code holds.
        self._own_references = max(torch_internals.num_references(self.tensors), default=0)
        self._references_to_storage = max(map(sys.getrefcount, self._storages), default=0)

    def are_free(self) -> bool:
        """Whether each tensor is in its place, and nothing holds one or its memory, not even as ``.grad``."""
        return (
            max(torch_internals.num_references(self.tensors), default=0) <= self._own_references
            and max(map(sys.getrefcount, self._storages), default=0) <= self._references_to_storage
            and set(torch_internals.num_storage_uses(self._storage_keys)) <= {_TENSOR_AND_STORAGE_OBJECT}
            and self._lie_in_place()
        )

    def follow(self) -> None:
        """Refer to the places again, if a comm hook has resized the flat buffer and so given it other memory.

        The tensors stay the same objects; views of them that were made before are lost with the old memory.
        """
        if not self._places or self._places[0].data_ptr() == self._begin:
            return
        for tensor, place in zip(self.tensors, self._places, strict=True):
            tensor.data = with_own_storage(place)
        self._look()

    def are(self, gradients: Sequence[Tensor | None]) -> bool:
        """Whether they are these tensors, each in its place."""
        return all(map(operator.is_, gradients, self.tensors)) and self._lie_in_place()

    def make_free(self, gradients: Sequence[Tensor | None]) -> bool:
        """Make sure that a write to the places is visible in ``.grad`` only. Replaces tensors that got other memory.

        ``gradients`` are the ``.grad`` of each parameter. If one of them is one of these tensors, its other holders see
        the write, as with any code that writes gradients in place. Returns False if other code holds a tensor that is
        no ``.grad`` any more.
        """
        if self.are(gradients):
            return True
        references = torch_internals.num_references(self.tensors)
        uses = torch_internals.num_storage_uses(self._storage_keys)
        of_storages = list(map(sys.getrefcount, self._storages))
        for i, (gradient, num_references, num_uses) in enumerate(zip(gradients, references, uses, strict=True)):
            is_held = num_references > self._own_references or of_storages[i] > self._references_to_storage
            if gradient is not self.tensors[i] and (is_held or num_uses > _TENSOR_AND_STORAGE_OBJECT):
                return False
            if num_uses < _TENSOR_AND_STORAGE_OBJECT:
                self._renew(i)
        self.leave_moved()
        return True

    def leave_moved(self) -> None:
        """Replace tensors that have been given other memory."""
        for i, tensor in enumerate(self.tensors):
            if tensor.data_ptr() != self._addresses[i]:
                self._renew(i)

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
    """Positions in a bucket of each ``.grad`` that must stay the same tensor; see Note [Gradients that others hold].

    ``gradients`` is the only list that has the ``.grad`` of the bucket's parameters. They are to become ``views``; some
    may already be that.
    """
    own = _references_to_a_gradient()
    held = {i for i, count in enumerate(torch_internals.num_references(gradients)) if count > own}
    held |= _in_shared_memory(gradients, _written(gradients))
    return frozenset(i for i in held if gradients[i] is not None and gradients[i] is not views[i])


def _written(gradients: Sequence[Tensor | None]) -> list[int]:
    """Positions of the gradients that may have been written in place, as inductor's kernels do (torch 2.13)."""
    try:
        return [i for i, gradient in enumerate(gradients) if gradient is not None and gradient._version]
    except RuntimeError:  # tensors made in inference mode have no versions
        return [i for i, gradient in enumerate(gradients) if gradient is not None]


@functools.cache
def _references_to_a_gradient() -> int:
    """The number of references to a ``.grad`` that only its parameter and one list hold."""
    parameter = Parameter(torch.zeros(1, device="cpu"))
    parameter.grad = torch.zeros(1, device="cpu")
    return torch_internals.num_references([parameter.grad])[0]


def _in_shared_memory(gradients: Sequence[Tensor | None], positions: Sequence[int]) -> set[int]:
    """Those of the positions where a write to the gradient may be visible in another tensor or another process."""
    strided = [(i, g) for i in positions if (g := gradients[i]) is not None and g.layout is torch.strided]
    storages = [gradient.untyped_storage() for _, gradient in strided]
    uses = torch_internals.num_storage_uses(list(map(torch_internals.key_of_storage, storages)))
    is_on_cpu = bool(strided) and strided[0][1].device.type == "cpu"
    return {
        i
        for (i, _), storage, num_uses in zip(strided, storages, uses, strict=True)
        if num_uses > _TENSOR_AND_STORAGE_OBJECT or (is_on_cpu and storage.is_shared())
    }


def with_own_storage(place: Tensor) -> Tensor:
    """A tensor on the same memory, of the same shape and strides, whose storage holds nothing else.

    On a device that DLPack does not know it is an ordinary view. Gradients then seem to be held by others, so each
    iteration takes a new flat buffer unless they stay.
    """
    if not place.numel():
        return torch.empty_like(place)
    try:
        # By a capsule, since `from_dlpack(place)` does not know the names that vendors give to their devices. Neither
        # stream has to wait: it is the same.
        shared = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(place))  # type: ignore[attr-defined]
    except (BufferError, RuntimeError):
        return place.data
    # DLPack may invent strides for dimensions of one element. A view would use the storage as well, so make no view.
    tensor = torch.empty(0, dtype=place.dtype, device=place.device)
    return tensor.set_(shared.untyped_storage(), shared.storage_offset(), place.shape, place.stride())
