"""States of a sharded optimizer for ``torch.distributed.checkpoint``: each rank saves and loads its own pieces."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_compile import torch_internals
from ddp_compile.errors import ReplicationError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from ddp_compile.runtime.sharded.optimizer import SteppedPieces


#: Attribute of an optimizer that has pieces; a table would keep optimizers alive, since their pieces refer to them.
PIECES = "_ddp_compile_pieces"


def sharded_optimizer_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """The states of a sharded optimizer for ``torch.distributed.checkpoint``; each rank saves its own part.

    Call it on every rank, before each ``dcp.save`` and before each ``dcp.load``, which writes into the result; then
    call `load_sharded_optimizer_state_dict`. A checkpoint holds what ``get_optimizer_state_dict`` returns for an
    optimizer that is not sharded, so either can load the other's, on any number of ranks::

        state = {"optimizer": ddp_compile.sharded_optimizer_state_dict(optimizer)}
        dcp.load(state, checkpoint_id=path)
        ddp_compile.load_sharded_optimizer_state_dict(optimizer, state["optimizer"])

    Args:
        optimizer: Sharded by `shard_optimizer`, after the first backward.

    Returns:
        ``{"state": {name of a parameter: {name of a state: value}}, "param_groups": [...]}``. Tensors of the
        parameters' shapes are represented by this rank's part of them, on the memory of the optimizer's states.

    Raises:
        ReplicationError: The optimizer is not sharded, or has no pieces yet.
    """
    return _pieces_of(optimizer).sharded_state_dict()


def load_sharded_optimizer_state_dict(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Use the states that ``dcp.load`` has read; see `sharded_optimizer_state_dict`.

    Args:
        optimizer: The optimizer of the state_dict.
        state_dict: Returned by `sharded_optimizer_state_dict`, after ``dcp.load``.

    Raises:
        ReplicationError: The optimizer is not sharded, or has no pieces yet.
    """
    _pieces_of(optimizer).load_sharded_state_dict(state_dict)


def _pieces_of(optimizer: Optimizer) -> SteppedPieces:
    sharded: SteppedPieces | None = vars(optimizer).get(PIECES)
    if sharded is None:
        raise ReplicationError(
            f"this {type(optimizer).__name__} has no pieces: it is not sharded, or no backward of the model has ended"
            " since shard_optimizer. Until then use torch.distributed.checkpoint.state_dict.get_optimizer_state_dict;"
            " what it loads is cut into pieces at the end of the first backward"
        )
    return sharded


class PartOfTensor(Tensor):
    """This rank's part of a tensor, which ``torch.distributed.checkpoint`` saves and loads as any number of boxes."""

    local: Tensor | None  #: `values`
    _boxes: dict[torch.Size, Tensor]

    @classmethod
    def of(cls, values: Tensor | None, begin: int, whole: Tensor, dtype: torch.dtype) -> PartOfTensor:
        """A part on the memory of ``values``, which loading writes.

        Args:
            values: The tensor's elements from ``begin`` on, shape (n,), in the order of its memory; or all of it, in
                its shape. None if this rank has none.
            begin: Number of the first one.
            whole: Has the shape, the strides, which leave no gaps, and the device of the whole tensor.
            dtype: Of the whole tensor.
        """
        part: PartOfTensor = torch_internals.wrapper_subclass(cls, whole.shape, whole.stride(), dtype, whole.device)
        part.local, part._boxes, done = values, {}, 0
        if values is None:
            return part
        if values.shape == whole.shape:
            part._boxes[torch.Size([0] * whole.dim())] = values
            return part
        strides = whole.stride()
        order = sorted(range(whole.dim()), key=lambda dim: (-strides[dim], dim))
        back = [order.index(dim) for dim in range(whole.dim())]
        for offsets, sizes in _boxes_of(begin, begin + values.numel(), [whole.shape[dim] for dim in order]):
            box = values[done : done + math.prod(sizes)].view(sizes).permute(back)
            part._boxes[torch.Size(offsets[place] for place in back)] = box
            done += math.prod(sizes)
        return part

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        boxes = [f"{list(box.shape)} at {list(offsets)}" for offsets, box in self._boxes.items()]
        return f"PartOfTensor({list(self.shape)}, {self.dtype}: {', '.join(boxes) or 'nothing'})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub says what a disabled one is
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise ReplicationError(
            f"{func} was called on a part of an optimizer's state, which only torch.distributed.checkpoint can use;"
            " optimizer.state_dict() returns whole states"
        )

    # torch.distributed.checkpoint calls these for subclasses of Tensor (torch 2.13, checkpoint/planner_helpers). It has
    # been imported by then, which takes long.

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offsets, sizes=box.shape),
                    properties=TensorProperties(dtype=self.dtype),
                    size=self.shape,
                ),
            )
            for offsets, box in self._boxes.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(offsets=offsets, sizes=box.shape) for offsets, box in self._boxes.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._boxes[torch.Size(index.offset)]


def _boxes_of(begin: int, end: int, shape: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Offsets and sizes of the boxes, at most 2 d - 1, that elements from ``begin`` to ``end`` fill in memory order.

    Each is as large as it can be: as many whole rows as fit, of the first dimension in which one fits.
    """
    dims = range(len(shape))
    row_numel = [math.prod(shape[dim + 1 :]) for dim in dims]
    while begin < end:
        offsets = [begin // row_numel[dim] % shape[dim] for dim in dims]
        dim = next(dim for dim in dims if begin % row_numel[dim] == 0 and begin + row_numel[dim] <= end)
        rows = min((end - begin) // row_numel[dim], shape[dim] - offsets[dim])
        yield offsets, [*(1 for _ in range(dim)), rows, *shape[dim + 1 :]]
        begin += rows * row_numel[dim]
