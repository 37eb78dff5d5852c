"""States of a sharded optimizer for ``torch.distributed.checkpoint``: each rank saves and loads its own pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_compile import torch_internals
from ddp_compile.errors import ReplicationError, this_rank

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

    from ddp_compile.runtime.sharded.optimizer import SteppedPieces


#: Attribute of an optimizer that has pieces; a table would keep optimizers alive, as their pieces refer to them.
PIECES = "_ddp_compile_pieces"


def sharded_optimizer_state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """The states of a sharded optimizer for ``torch.distributed.checkpoint``, of which each rank saves its own part.

    Call it on every rank: for ``dcp.save``, and for ``dcp.load``, which writes into what it returns; then call
    `load_sharded_optimizer_state_dict`. A checkpoint holds what ``get_optimizer_state_dict`` returns for an optimizer
    that is not sharded, so either can load the other's, on any number of ranks::

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
    """Take over the states that ``dcp.load`` has read; see `sharded_optimizer_state_dict`.

    Args:
        optimizer: The optimizer of the state_dict.
        state_dict: Returned by `sharded_optimizer_state_dict`, after ``dcp.load``.

    Raises:
        ReplicationError: The optimizer is not sharded, or has no pieces yet, or its states are other tensors since.
    """
    _pieces_of(optimizer).load_sharded_state_dict(state_dict)


def _pieces_of(optimizer: Optimizer) -> SteppedPieces:
    sharded: SteppedPieces | None = vars(optimizer).get(PIECES)
    if sharded is None:
        raise ReplicationError(
            f"this {type(optimizer).__name__} has no pieces: it is not sharded, or no backward of the model has ended"
            " since shard_optimizer. Use torch.distributed.checkpoint.state_dict.get_optimizer_state_dict until then,"
            " whose states are cut into pieces at the end of the first backward"
        )
    return sharded


class PartOfTensor(Tensor):
    """This rank's part of a tensor, as ``torch.distributed.checkpoint`` saves and loads it: any number of boxes.

    Args:
        values: The tensor's elements from ``begin`` on, shape (n,), in the order of its memory; or all of it, in its
            shape. Loading writes them. None if this rank has none.
        begin: Number of the first one.
        whole: Has the shape, the strides, which leave no gaps, and the device of the whole tensor.
        dtype: Of the whole tensor.
        is_still: Whether this rank's part of the state is still ``values``, which is its argument.
    """

    _boxes: dict[torch.Size, Tensor]
    _is_current: Callable[[], bool]

    @staticmethod
    def __new__(
        cls,
        values: Tensor | None,
        begin: int,
        whole: Tensor,
        dtype: torch.dtype,
        is_still: Callable[[Tensor | None], bool],
    ) -> PartOfTensor:
        part: PartOfTensor = torch_internals.wrapper_subclass(cls, whole.shape, whole.stride(), dtype, whole.device)
        strides = whole.stride()
        order = sorted(range(whole.dim()), key=lambda dim: (-strides[dim], dim))
        back = [order.index(dim) for dim in range(whole.dim())]
        part._boxes, part._is_current, done = {}, partial(is_still, values), 0
        if values is not None and (values.shape == whole.shape or not whole.numel()):  # one rank saves an empty tensor
            part._boxes[torch.Size([0] * whole.dim())] = values.view(whole.shape)
            return part
        for offsets, sizes in _boxes_of(begin, begin + _numel(values), [whole.shape[dim] for dim in order]):
            assert values is not None
            box = values[done : done + math.prod(sizes)].view(sizes).permute(back)
            part._boxes[torch.Size(offsets[place] for place in back)] = box
            done += math.prod(sizes)
        return part

    def __init__(self, *_args: Any) -> None:
        """Nothing is left to do."""

    def refuse_if_replaced(self) -> None:
        """Raise a ReplicationError unless it still represents a state of the optimizer."""
        if not self._is_current():
            raise ReplicationError(
                f"{this_rank()}: a state of shape {list(self.shape)} has another tensor now than when"
                " sharded_optimizer_state_dict(optimizer) was called: the bucket plan has changed, a state_dict was"
                " loaded, or the optimizer has replaced it. Call it again for each dcp.save and dcp.load"
            )

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        boxes = [f"{list(box.shape)} at {list(offsets)}" for offsets, box in self._boxes.items()]
        return f"PartOfTensor({list(self.shape)}, {self.dtype}: {', '.join(boxes) or 'nothing'})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub says what a disabled one is
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise ReplicationError(
            f"{func} of a part of an optimizer's state, which torch.distributed.checkpoint alone can save and load;"
            " optimizer.state_dict() gives whole states"
        )

    # torch.distributed.checkpoint calls these for subclasses of Tensor (torch 2.13, checkpoint/planner_helpers). It has
    # been imported by then, which takes long.

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        self.refuse_if_replaced()
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

        self.refuse_if_replaced()
        return [ChunkStorageMetadata(offsets=offsets, sizes=box.shape) for offsets, box in self._boxes.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._boxes[torch.Size(index.offset)]


def _numel(values: Tensor | None) -> int:
    return 0 if values is None else values.numel()


def _boxes_of(begin: int, end: int, shape: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Offsets and sizes of the boxes, at most 2 d - 1, that elements from ``begin`` to ``end`` fill in memory order."""
    if begin == end:
        return
    if len(shape) <= 1:
        yield [begin] * len(shape), [end - begin] * len(shape)
        return
    inner = math.prod(shape[1:])
    first, from_first = divmod(begin, inner)
    last, to_last = divmod(end, inner)
    if first == last:
        yield from _in_row(first, from_first, to_last, shape)
        return
    if from_first:
        yield from _in_row(first, from_first, inner, shape)
        first += 1
    if first < last:
        yield [first, *(0 for _ in shape[1:])], [last - first, *shape[1:]]
    yield from _in_row(last, 0, to_last, shape)


def _in_row(row: int, begin: int, end: int, shape: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    for offsets, sizes in _boxes_of(begin, end, shape[1:]):
        yield [row, *offsets], [1, *sizes]
