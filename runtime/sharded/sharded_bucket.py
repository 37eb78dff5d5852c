"""The parameters of one bucket in a flat buffer, of which each rank steps a shard."""

from __future__ import annotations

import threading
from collections.abc import Callable, Set
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from ddp_compile.errors import ReplicationError, this_rank
from ddp_compile.kernels import FlattenPlan
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.gradient_views import with_own_storage
from ddp_compile.runtime.comm import error_messages, streams
from ddp_compile.runtime.comm.transfers import Transfer
from ddp_compile.runtime.sharded.shard_transfers import ShardTransfers
from ddp_compile.runtime.sharded.sharded_gradients import GradientShard


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The part of one parameter that lies in this rank's shard, if any. Rank 0 has those without elements.

    Args:
        index: Number of the parameter.
        begin: Its first element, of the parameter's in the order of their memory.
        end: Behind its last element.
        place: Its first element in the shard.
        stepped: What the optimizer steps in the parameter's place: shape (end - begin,), or () where the parameter has
            that; on the memory of the flat buffer, or a copy of its own in float32.
    """

    index: int
    begin: int
    end: int
    place: int
    stepped: Parameter

    def of_shard(self, shard: Tensor) -> Tensor:
        """Its part of something of the shard's shape."""
        return shard[self.place : self.place + self.end - self.begin].view(self.stepped.shape)

    def accumulate(self, shard: Tensor, unscaled: Callable[[Tensor], None]) -> None:
        """Let ``.grad`` be its part of a reduced shard, or have it added.

        Args:
            shard: Shape (n,), on memory of its own.
            unscaled: See `GradientShard.of`.
        """
        gradient = self.of_shard(shard)
        if self.stepped.grad is None:
            self.stepped.grad = GradientShard.of(gradient.to(self.stepped.dtype), unscaled)
        else:
            with torch.no_grad():
                self.stepped.grad.add_(gradient)

    def zero(self, set_to_none: bool) -> None:
        """What ``zero_grad`` does."""
        if set_to_none or self.stepped.grad is None:
            self.stepped.grad = None
        else:
            self.stepped.grad.zero_()


class ShardedBucket:
    """The flat buffer that the parameters of a bucket lie in from now on, and this rank's shard of it.

    Each parameter is the same object on other memory, with a storage of its own, so that compilers and ``torch.save``
    see separate tensors. A gather writes that memory; what was computed from the parameters before is not touched.

    Args:
        bucket: The bucket, whose gradients are cut into the same shards.
        transfers: Sends shards.
        master_weights: Whether pieces of low precision are stepped in float32.
    """

    def __init__(self, bucket: Bucket, transfers: ShardTransfers, master_weights: bool) -> None:
        self.spec = bucket.spec
        self.parameters = bucket.parameters
        self.param_indices = bucket.param_indices
        self._transfers = transfers
        self._gathering: Transfer | None = None
        self._gathered: streams.Event | None = None
        self._lock = threading.RLock()
        element_size = self.parameters[0].element_size()
        self._numel = self.spec.num_bytes // element_size
        self.shard_numel = transfers.shard_numel(self._numel, element_size)
        self.offsets = [offset // element_size for offset in self.spec.byte_offsets]
        with torch.no_grad(), torch.inference_mode(False):
            first = self.parameters[0]
            self.flat = torch.zeros(self.shard_numel * transfers.world_size, dtype=first.dtype, device=first.device)
            self._layout = FlattenPlan.for_bucket(self.parameters, self.flat[: self._numel], self.offsets)
            self._layout.flatten(self.parameters, 1.0)
            for parameter, place in zip(self.parameters, self._layout.views, strict=True):
                parameter.data = with_own_storage(place)
            self._addresses = [parameter.data_ptr() for parameter in self.parameters]
            is_low = first.dtype in (torch.bfloat16, torch.float16)
            self.stepped_dtype = torch.float32 if master_weights and is_low else first.dtype  #: of the pieces
            self.pieces = self._cut()

    def _cut(self) -> list[Piece]:
        begin_of_shard = self._transfers.rank * self.shard_numel
        shard = self.shard
        pieces = []
        for index, parameter, offset in zip(self.param_indices, self.parameters, self.offsets, strict=True):
            begin = max(0, begin_of_shard - offset)
            end = max(begin, min(parameter.numel(), begin_of_shard + self.shard_numel - offset))
            if begin < end or (not parameter.numel() and self._transfers.rank == 0):
                place = offset + begin - begin_of_shard
                values = shard[place : place + end - begin]
                values = values if parameter.dim() else values[0]  # states of a number are numbers
                stepped = values.to(self.stepped_dtype) if self.has_master_weights else with_own_storage(values)
                pieces.append(Piece(index, begin, end, place, Parameter(stepped)))
        return pieces

    @property
    def shard(self) -> Tensor:
        """This rank's part of the flat buffer, shape (shard_numel,)."""
        return self.shard_of(self.flat)

    def shard_of(self, shards: Tensor) -> Tensor:
        """This rank's part of something that holds all shards, one behind the other."""
        return shards[self._transfers.rank * self.shard_numel :][: self.shard_numel]

    @property
    def has_master_weights(self) -> bool:
        """Whether pieces are copies of their own."""
        return self.stepped_dtype != self.flat.dtype

    def name_of(self, index: int) -> str:
        """What the module calls the parameter of this number."""
        return self.spec.gradients[self.param_indices.index(index)].fqn

    # A step.

    def take_edits(self, rank: int) -> None:
        """Before a step: see that pieces are what users have made of the parameters.

        A parameter that was given other memory (``.data = ...``) is copied into its place, and lies there again.

        Raises:
            ParametersChangedError: One has another dtype, device or number of elements.
            ReplicationError: One has been moved into shared memory.
        """
        moved = [i for i, parameter in enumerate(self.parameters) if parameter.data_ptr() != self._addresses[i]]
        for i in moved:
            parameter, place = self.parameters[i], self._layout.views[i]
            if (parameter.dtype, parameter.device, parameter.shape) != (place.dtype, place.device, place.shape):
                change = f"other memory, now {parameter.dtype} {list(parameter.shape)} on {parameter.device}"
                raise error_messages.parameters_changed([f"{change}: {self.spec.gradients[i].fqn}"])
            if parameter.device.type == "cpu" and parameter.is_shared():
                raise ReplicationError(
                    f"{this_rank()}: {self.spec.gradients[i].fqn} has been moved into memory that other processes"
                    " share, which a sharded optimizer would not write. Send p.detach().clone(), or let them have a"
                    " copy of the model that shares memory, written after steps:"
                    " copy.load_state_dict(model.state_dict()); p.data = p.data.clone() undoes it"
                )
            with torch.no_grad():
                place.copy_(parameter)
                parameter.data = with_own_storage(place)
                self._addresses[i] = parameter.data_ptr()
        with torch.no_grad():
            for piece in self.pieces if self.has_master_weights else ():
                low = piece.of_shard(self.shard)
                is_same = piece.stepped.to(low.dtype) == low
                piece.stepped.copy_(torch.where(is_same, piece.stepped, low.to(self.stepped_dtype)))

    def gather(self, stepped: Set[int], tag: int) -> None:
        """Start to give all ranks what this one has stepped.

        Args:
            stepped: Numbers of the parameters that may have changed.
            tag: See `ShardTransfers.all_gather`.
        """
        with torch.no_grad():
            for piece in self.pieces if self.has_master_weights else ():
                piece.of_shard(self.shard).copy_(piece.stepped)
        self._gathering = self._transfers.all_gather(self.flat, tag)
        # Pieces have version counters of their own: without this, a backward that saved parameters before the step
        # would not notice that they have changed.
        pairs = zip(self.param_indices, self.parameters, strict=True)
        increment_version([parameter for index, parameter in pairs if index in stepped])

    @property
    def is_gathering(self) -> bool:
        """Whether parameters are incomplete."""
        return self._gathering is not None

    def wait(self) -> None:
        """Return when the parameters are complete, or will be before what comes next on the current stream.

        Raises:
            RuntimeError: The gather failed or timed out; each time.
        """
        with self._lock:  # another thread that comes meanwhile waits as well
            if self._gathering is not None:
                self._gathering.wait()
                self._gathering = None
                self._gathered = streams.record(self.flat.device)
            elif self._gathered is not None:
                self._gathered.wait()  # the gather may have held up another stream than this one

    # Conversions.

    def assemble(self, shards: Tensor) -> dict[int, Tensor]:
        """What each parameter has of something that is cut into shards.

        Args:
            shards: All shards one behind the other, shape (n,), of any dtype.

        Returns:
            By number of the parameter, new tensors of its shape and strides.
        """
        assembled = {}
        for index, place, offset in zip(self.param_indices, self._layout.views, self.offsets, strict=True):
            values = shards[offset : offset + place.numel()].clone()
            assembled[index] = values.as_strided(place.shape, place.stride())
        return assembled

    def whole_gradients(self) -> dict[int, Tensor]:
        """The gradients of all ranks' pieces together; to be called on every rank.

        Returns:
            By number of the parameter, of those that have one on any rank, new tensors.
        """
        present = torch.zeros(len(self.parameters), dtype=torch.int64, device=self.flat.device)
        shards = torch.zeros_like(self.flat)
        own = self.shard_of(shards)
        with torch.no_grad():
            for piece in self.pieces:
                if piece.stepped.grad is not None:
                    present[self.param_indices.index(piece.index)] = 1
                    piece.of_shard(own).copy_(piece.stepped.grad.as_subclass(Tensor))
        self._transfers.any_rank(present)
        self._transfers.all_gather(shards).wait()
        is_present = present.tolist()
        values = self.assemble(shards)
        return {index: values[index] for index, any_has in zip(self.param_indices, is_present, strict=True) if any_has}

    def cut(self, piece: Piece, value: Tensor) -> Tensor:
        """A piece's elements of something of its parameter's shape, a new tensor of shape (n,)."""
        place = self.place_of(piece.index)
        in_memory_order = torch.empty_like(place, dtype=value.dtype, device=value.device).copy_(value)
        return in_memory_order.as_strided((place.numel(),), (1,))[piece.begin : piece.end].clone()

    def place_of(self, index: int) -> Tensor:
        """Where a parameter lies: a view of the flat buffer of its shape."""
        return self._layout.views[self.param_indices.index(index)]

    def leave(self) -> None:
        """Give the parameters memory of their own again."""
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.data = parameter.data.clone()
