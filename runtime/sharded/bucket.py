"""The parameters of one bucket in a flat buffer, of which each rank steps a shard."""

import threading
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from ddp_compile.errors import ReplicationError, this_rank
from ddp_compile.kernels import FlattenPlan
from ddp_compile.kernels.contract.layout import is_non_overlapping_and_dense, same_layout
from ddp_compile.plan.spec import GradientSpec
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.gradient_views import with_own_storage
from ddp_compile.runtime.comm import error_messages, streams
from ddp_compile.runtime.comm.transfers import Transfer
from ddp_compile.runtime.sharded.cut import Cut
from ddp_compile.runtime.sharded.gradients import SHARED_MEMORY, GradientShard
from ddp_compile.runtime.sharded.transfers import ShardTransfers


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The part of one parameter that this rank steps. Every rank has a piece of every parameter; it may be empty."""

    spec: GradientSpec  #: the parameter's gradient in the plan
    place: Tensor  #: the parameter's view of the flat buffer
    begin: int  #: the piece's first element, counted in the order of the parameter's memory
    end: int  #: the element after its last one
    in_shard: int  #: offset of the first element in this rank's reduced gradients
    in_flat: int  #: offset of the first element in the flat buffer
    #: What the optimizer steps instead of the parameter: a view of the flat buffer, or a copy in float32. It has the
    #: parameter's shape for an owner, else shape (end - begin,), or () if the parameter has that shape.
    stepped: Parameter

    @property
    def index(self) -> int:
        """Number of the parameter."""
        return self.spec.index

    @property
    def is_own(self) -> bool:
        """Whether this rank steps the piece. All ranks step parameters that have no elements."""
        return self.stepped.numel() > 0 or self.place.numel() == 0

    def view_of_flat(self, flat: Tensor) -> Tensor:
        """This piece's view into a tensor like the flat buffer."""
        return flat[self.in_flat :].as_strided(self.stepped.shape, self.stepped.stride())

    def part_of(self, value: Tensor) -> Tensor:
        """This piece's elements of a tensor of the parameter's shape, as a new tensor of the piece's shape."""
        in_memory_order = torch.empty_like(self.place, dtype=value.dtype, device=value.device).copy_(value)
        part = in_memory_order.as_strided((self.place.numel(),), (1,))[self.begin : self.end].clone()
        return part.as_strided(self.stepped.shape, self.stepped.stride())

    @property
    def gradient(self) -> Tensor | None:
        """``.grad`` as a plain tensor."""
        gradient = self.stepped.grad
        return None if gradient is None else gradient.as_subclass(Tensor)

    def accumulate(self, shard: Tensor, unscaled: Callable[[Tensor], None]) -> None:
        """Add this piece's part of a reduced shard, shape (n,), to ``.grad``, which becomes a view if it was None."""
        gradient = shard[self.in_shard :].as_strided(self.stepped.shape, self.stepped.stride())
        if self.stepped.grad is None:
            self.stepped.grad = GradientShard.of(gradient.to(self.stepped.dtype), unscaled)
        else:
            with torch.no_grad():
                self.stepped.grad.add_(gradient)

    def zero(self, set_to_none: bool) -> None:
        """Like ``zero_grad``, for this piece."""
        if set_to_none or self.stepped.grad is None:
            self.stepped.grad = None
        else:
            self.stepped.grad.zero_()


class ShardedBucket:
    """Moves the parameters of a bucket into a flat buffer, of which each rank steps one shard.

    Gradients are cut into the same shards. Each parameter stays the same object and gets a storage of its own on the
    buffer's memory, so compilers and ``torch.save`` see separate tensors. A gather writes that memory.
    """

    def __init__(self, bucket: Bucket, transfers: ShardTransfers, master_weights: bool) -> None:
        self.spec = bucket.spec
        self.parameters = bucket.parameters
        self.param_indices = bucket.param_indices
        self._transfers = transfers
        self._call_by_name = bucket.call_by_name
        self._gather: Transfer | None = None  # of the last step, until something has waited for it
        self._gathered: streams.Event | None = None
        self._lock = threading.RLock()
        itemsize = self.spec.itemsize  # of gradients, which may be of another dtype; places are the same elements
        self.cut = Cut.of(self.spec, transfers.world_size)
        offsets = [offset // itemsize for offset in self.spec.byte_offsets]
        numel = self.spec.num_bytes // itemsize
        padded = self.cut.shard_numel * transfers.world_size if self.cut.is_even else numel
        bucket.reserve(padded)  # so that no collective needs a padded copy
        with torch.no_grad(), torch.inference_mode(False):
            first = self.parameters[0]
            self.flat = torch.zeros(padded, dtype=first.dtype, device=first.device)
            places = FlattenPlan.for_bucket(self.parameters, self.flat[:numel], offsets).views
            for parameter, place in zip(self.parameters, places, strict=True):
                place.copy_(parameter.detach())  # `inference_mode(False)` also lets autograd record
                parameter.data = with_own_storage(place)
            is_low = first.dtype in (torch.bfloat16, torch.float16)
            self.stepped_dtype = torch.float32 if master_weights and is_low else first.dtype  #: of the pieces
            self.pieces = self._make_pieces(places, offsets)  #: in the order of the parameters
            self.own_pieces = [piece for piece in self.pieces if piece.is_own]
            self._copied_pieces = self.own_pieces if self.stepped_dtype != self.flat.dtype else []

    def _make_pieces(self, places: Sequence[Tensor], offsets: Sequence[int]) -> list[Piece]:
        rank = self._transfers.rank
        shard, own = self.cut.shards[rank], self.cut.owned[rank]
        pieces = []
        for spec, place, offset in zip(self.spec.gradients, places, offsets, strict=True):
            begin, end = max(0, shard.start - offset), min(spec.numel, shard.stop - offset)
            if spec.owner is None and begin < end:
                in_shard, values = offset + begin - shard.start, self.flat[offset + begin : offset + end]
                values = values if place.dim() else values[0]  # the optimizer then keeps numbers, not tensors
            elif spec.owner == rank or not spec.numel:
                begin, end, in_shard, values = 0, spec.numel, len(shard) + offset - own.start, place
            else:
                begin, end, in_shard, values = 0, 0, 0, self.flat[:0]
            is_copied = self.stepped_dtype != values.dtype
            stepped = Parameter(values.to(self.stepped_dtype) if is_copied else with_own_storage(values))
            pieces.append(Piece(spec, place, begin, end, in_shard, offset + begin, stepped))
        return pieces

    # A step.

    @property
    def is_gathering(self) -> bool:
        """Whether the other ranks' shards are on their way, and nothing has waited for them."""
        return self._gather is not None

    def take_edits(self) -> None:
        """Before a step, update the pieces to what users have written into the parameters.

        A parameter that was given other memory (``.data = ...``) is copied back into the flat buffer.

        Raises:
            ParametersChangedError: A parameter has another dtype, device, shape, or order of elements in memory, in
                which its gradient may have been reduced.
            ReplicationError: A parameter has been moved into shared memory.
        """
        for parameter, piece in zip(self.parameters, self.pieces, strict=True):
            place, name = piece.place, piece.spec.fqn
            is_there = parameter.data_ptr() == place.data_ptr() and parameter.stride() == place.stride()
            if is_there or not place.numel():
                continue
            is_alike = (parameter.dtype, parameter.device, parameter.shape) == (place.dtype, place.device, place.shape)
            if not is_alike or (is_non_overlapping_and_dense(parameter) and not same_layout(parameter, place)):
                now = f"{parameter.dtype} {list(parameter.shape)} on {parameter.device}"
                change = f"other memory, now {now} with strides {parameter.stride()} instead of {place.stride()}"
                raise error_messages.parameters_changed([f"{change}: {name}"])
            if parameter.device.type == "cpu" and parameter.is_shared():
                raise ReplicationError(f"{this_rank()}: {name} has been moved into {SHARED_MEMORY}")
            with torch.no_grad():
                streams.used_here([parameter.detach()])  # it is freed, and may come from another stream
                place.copy_(parameter)
                parameter.data = with_own_storage(place)
        with torch.no_grad():
            for piece in self._copied_pieces:
                low = piece.view_of_flat(self.flat)
                is_same = piece.stepped.to(low.dtype) == low
                piece.stepped.copy_(torch.where(is_same, piece.stepped, low.to(self.stepped_dtype)))

    def gather(self, stepped: Set[int]) -> Transfer:
        """Start to send this rank's shard to all ranks; ``stepped`` are the parameters that may have changed."""
        with torch.no_grad():
            for piece in self._copied_pieces:
                piece.view_of_flat(self.flat).copy_(piece.stepped)
        self._gather = self._call_by_name(self._transfers.all_gather, self.flat, self.cut)
        # Pieces have version counters of their own: without this, a backward that saved parameters before the step
        # would not notice that they have changed.
        pairs = zip(self.param_indices, self.parameters, strict=True)
        increment_version([parameter for index, parameter in pairs if index in stepped])
        return self._gather

    def wait(self) -> None:
        """Return when the parameters are complete, or will be before what comes next on the current stream.

        If the gather failed or timed out, each call raises that RuntimeError.
        """
        with self._lock:  # a second thread that reads waits as well
            if self._gather is not None:
                self._gather.wait()
                self._gathered = streams.record(self.flat.device)
                self._gather = None
            elif self._gathered is not None:
                self._gathered.wait()  # the gather may have held up another stream than this one

    # Conversions.

    def gather_whole(
        self, value_of: Callable[[Piece], Tensor | None], dtype: torch.dtype, device: torch.device
    ) -> dict[int, Tensor]:
        """Assemble whole tensors from the values that the ranks have for their pieces; called on every rank.

        ``value_of`` returns a tensor of the piece's shape, or None for zeros. The result has for each parameter, by
        number, a new tensor of its shape and strides.
        """
        shards = torch.zeros_like(self.flat, dtype=dtype)
        with torch.no_grad():
            for piece in self.own_pieces:
                if (value := value_of(piece)) is not None:
                    piece.view_of_flat(shards).copy_(value)
            self._transfers.all_gather(shards, self.cut).wait()
        shards, assembled = shards.to(device), {}
        for piece in self.pieces:
            offset = piece.in_flat - piece.begin
            values = shards[offset : offset + piece.place.numel()].clone()
            assembled[piece.index] = values.as_strided(piece.place.shape, piece.place.stride())
        return assembled

    def whole_gradients(self) -> dict[int, Tensor]:
        """A new tensor for each parameter that has a gradient; called on every rank."""
        values = self.gather_whole(lambda piece: piece.gradient, self.flat.dtype, self.flat.device)
        return {piece.index: values[piece.index] for piece in self.pieces if piece.stepped.grad is not None}

    def leave(self) -> None:
        """Move the parameters out of the flat buffer."""
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.data = parameter.data.clone()
