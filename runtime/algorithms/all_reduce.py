"""The default: one all-reduce for each bucket gives every rank the mean of all gradients."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_compile.kernels import add_rows, flatten_scale, unflatten
from ddp_compile.runtime.algorithms.collective_chain import CollectiveChain, Hierarchical
from ddp_compile.runtime.algorithms.flat_parameters import FLOATING
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.comm_algorithm import AlgorithmConfig, CommAlgorithm, Pending, Traits
from ddp_compile.runtime.comm.transfers import all_gather, all_reduce, all_to_all

_WIRE_DTYPES = (torch.float16, torch.bfloat16)


class AllReduce(CommAlgorithm):
    """Adds up buckets, which arrive divided by the number of ranks."""

    name = "gradient all-reduce"
    gives_way_to_comm_hook = True

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._process_group = process_group

    def launch(self, bucket: Bucket, is_last: bool) -> Pending:
        # Not dist.all_reduce: with many small gradients, its checks show in the time of a step.
        return self._process_group.allreduce([bucket.flat])


class AllReduceInChain(CollectiveChain):
    """The same as a chain of one collective, for algorithms that combine chains."""

    name = AllReduce.name
    num_collectives = 1

    def reduce(self, bucket: Bucket) -> Iterator[dist.Work]:
        yield all_reduce(bucket.flat, self.process_group)


class WireDtypeAllReduce(CollectiveChain):
    """The same with values cast to another dtype on the wire.

    Buckets arrive divided by the number of ranks n. In float16, small gradients divided by n would vanish, and sums of
    undivided ones would overflow. So values on the wire are divided by about the square root of n. The rest of the
    factor, a power of 2, is applied after the sum.
    """

    traits = Traits(takes_sparse=False, takes_dtypes=FLOATING)
    num_collectives = 1

    def __init__(self, process_group: dist.ProcessGroup, wire_dtype: torch.dtype) -> None:
        super().__init__(process_group)
        self.name = f"gradient all-reduce in {str(wire_dtype).removeprefix('torch.')}"
        self._wire_dtype = wire_dtype
        self._factor = 2.0 ** round(math.log2(process_group.size()) / 2)

    def reduce(self, bucket: Bucket) -> Iterator[dist.Work]:
        wire = torch.empty_like(bucket.flat, dtype=self._wire_dtype)
        flatten_scale([bucket.flat], wire, self._factor)
        yield all_reduce(wire, self.process_group)
        unflatten(wire, [bucket.flat], 1.0 / self._factor)


class SumAtOwner(CollectiveChain):
    """An all-to-all and an all-gather, with a sum in float32 in between (float64 for float64).

    Part j of a bucket belongs to rank j, which adds up the parts j of all ranks, its own included, in the order of
    ranks. So the bits of a sum depend neither on the place of an element in a bucket nor on the size of a message. Each
    rank sends the bytes of a ring: 2 (n - 1) / n for a byte of the bucket. All ranks decode the same bytes.

    Buckets arrive divided by the number of ranks. On a narrower wire, a power of 2 near that number is applied before
    the sum and taken back after it, since small quotients would vanish in float16.
    """

    traits = Traits(takes_sparse=False, takes_dtypes=FLOATING)
    num_collectives = 2

    def __init__(self, process_group: dist.ProcessGroup, wire_dtype: torch.dtype | None) -> None:
        super().__init__(process_group)
        wire = "" if wire_dtype is None else f" in {str(wire_dtype).removeprefix('torch.')}"
        self.name = f"gradient all-reduce{wire} with sums at the owner"
        self._wire_dtype = wire_dtype
        self._unreserved: dict[Bucket, int] = {}  # buckets whose values had to be copied, and the elements they need

    def reduce(self, bucket: Bucket) -> Iterator[dist.Work]:
        flat, size, rank = bucket.flat, self.process_group.size(), self.process_group.rank()
        dtype = self._wire_dtype or flat.dtype
        factor = 1.0 if dtype == flat.dtype else 2.0 ** math.floor(math.log2(size))
        wire = self._on_the_wire(bucket, size, dtype, factor)
        parts = wire.view(size, -1)
        received = torch.empty_like(parts)
        yield all_to_all(received, parts, self.process_group)
        add_rows(received, parts[rank], 1.0 / factor)
        del received
        yield all_gather(wire, parts[rank], self.process_group)
        if wire.data_ptr() != flat.data_ptr():
            unflatten(wire[: flat.numel()], [flat])

    def after_backward(self) -> None:
        """Let the buckets lie in memory for whole units from the next iteration on, which then needs no copy."""
        for bucket, numel in self._unreserved.items():
            bucket.reserve(numel)
        self._unreserved.clear()

    def _on_the_wire(self, bucket: Bucket, size: int, dtype: torch.dtype, factor: float) -> Tensor:
        """The bucket's values times ``factor``, and zeros to fill ``size`` parts of whole units of 16 bytes."""
        flat = bucket.flat
        unit = size * 16 // dtype.itemsize
        numel = -(-flat.numel() // unit) * unit
        if dtype == flat.dtype:
            if flat.untyped_storage().nbytes() >= numel * flat.element_size():
                return flat.as_strided((numel,), (1,))
            self._unreserved[bucket] = numel
        wire = flat.new_empty(numel, dtype=dtype)
        wire[flat.numel() :].zero_()
        flatten_scale([flat], wire[: flat.numel()], factor)
        return wire


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientAllReduce(AlgorithmConfig):
    """The default: every ``.grad`` is the mean over all ranks. Without arguments, a comm hook can replace it.

    Args:
        wire_dtype: Send gradients in ``torch.float16`` or ``torch.bfloat16``, half of the bytes of float32. None keeps
            the gradients' own dtype. Without ``sum_dtype`` they are also added up in it, at each hop of the
            all-reduce, so that the error grows with the number of ranks; in float16, means beyond 65504 divided by
            about the square root of the number of ranks become infinite, which a GradScaler notices. In exchange, the
            smallest values that survive are smaller than with ``fp16_compress_hook``, by the same factor.
        sum_dtype: Pass ``torch.float32`` to add up in float32 what comes in the wire's dtype, or in the gradients' own
            half precision. Each sum is rounded once, whatever the number of ranks. An all-to-all and an all-gather
            take the place of the all-reduce, with the same bytes.
        reproducible: Give sums the same bits with every plan, capacity, split, order of buckets and backend: each is
            added up in the order of ranks, in float32 (float64 for float64), by the same two collectives.
        hierarchical: Add up on each node first, then between one rank of each node, then broadcast on each node. This
            sends fewer bytes between nodes. LOCAL_RANK, set by the launcher, tells which ranks share a node. Nodes may
            have different sizes.

    Raises:
        ValueError: ``wire_dtype`` or ``sum_dtype`` is none of these, or ``reproducible`` goes with ``hierarchical``,
            whose sums depend on the nodes.
    """

    wire_dtype: torch.dtype | None = None
    sum_dtype: torch.dtype | None = None
    reproducible: bool = False
    hierarchical: bool = False

    def __post_init__(self) -> None:
        if self.wire_dtype is not None and self.wire_dtype not in _WIRE_DTYPES:
            raise ValueError(
                f"GradientAllReduce(wire_dtype={self.wire_dtype!r}): pass torch.float16 or torch.bfloat16, or None for"
                " the dtype of the gradients; ByteGrad() sends eight bits a value"
            )
        if self.sum_dtype not in (None, torch.float32):
            raise ValueError(
                f"GradientAllReduce(sum_dtype={self.sum_dtype!r}): pass torch.float32, or None for the wire's dtype"
            )
        if self.reproducible and self.hierarchical:
            raise ValueError(
                "GradientAllReduce(reproducible=True, hierarchical=True): a sum on each node first depends on how many"
                " ranks a node has; drop one of them"
            )

    def build(self, process_group: dist.ProcessGroup) -> CommAlgorithm:
        adds_at_owner = self.reproducible or self.sum_dtype is not None
        if self.wire_dtype is None and not self.hierarchical and not adds_at_owner:
            return AllReduce(process_group)
        algorithm: CollectiveChain = AllReduceInChain(process_group)
        if adds_at_owner:
            algorithm = SumAtOwner(process_group, self.wire_dtype)
        elif self.wire_dtype is not None:
            algorithm = WireDtypeAllReduce(process_group, self.wire_dtype)
        return Hierarchical(process_group, algorithm) if self.hierarchical else algorithm
