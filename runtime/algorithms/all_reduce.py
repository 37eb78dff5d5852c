"""The default: one all-reduce for each bucket gives every rank the mean of all gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp_compile.kernels import flatten_scale, unflatten
from ddp_compile.runtime.algorithms.collective_chain import CollectiveChain, Hierarchical
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.comm_algorithm import AlgorithmConfig, CommAlgorithm, Pending, Traits
from ddp_compile.runtime.comm.transfers import all_reduce

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

    traits = Traits(takes_sparse=False, takes_dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16))
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


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientAllReduce(AlgorithmConfig):
    """The default: every ``.grad`` is the mean over all ranks. Without arguments, a comm hook can replace it.

    Args:
        wire_dtype: Send and add up gradients in ``torch.float16`` or ``torch.bfloat16``, half of the bytes of float32.
            None keeps the gradients' own dtype. In float16, means beyond 65504 divided by about the square root of the
            number of ranks become infinite, which a GradScaler notices. In exchange, the smallest values that survive
            are smaller than with ``fp16_compress_hook``, by the same factor.
        hierarchical: Add up on each node first, then between one rank of each node, then broadcast on each node. This
            sends fewer bytes between nodes. LOCAL_RANK, set by the launcher, tells which ranks share a node. Nodes may
            have different sizes.

    Raises:
        ValueError: ``wire_dtype`` is none of these.
    """

    wire_dtype: torch.dtype | None = None
    hierarchical: bool = False

    def __post_init__(self) -> None:
        if self.wire_dtype is not None and self.wire_dtype not in _WIRE_DTYPES:
            raise ValueError(
                f"GradientAllReduce(wire_dtype={self.wire_dtype!r}): pass torch.float16 or torch.bfloat16, or None for"
                " the dtype of the gradients; ByteGrad() sends eight bits a value"
            )

    def build(self, process_group: dist.ProcessGroup) -> CommAlgorithm:
        if self.wire_dtype is None and not self.hierarchical:
            return AllReduce(process_group)
        algorithm: CollectiveChain = AllReduceInChain(process_group)
        if self.wire_dtype is not None:
            algorithm = WireDtypeAllReduce(process_group, self.wire_dtype)
        return Hierarchical(process_group, algorithm) if self.hierarchical else algorithm
