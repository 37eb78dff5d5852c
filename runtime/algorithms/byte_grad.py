"""ByteGrad: the mean of the gradients, sent in eight bits a value."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_compile.algorithms import (
    AlgorithmConfig,
    Bucket,
    CollectiveChain,
    Hierarchical,
    Traits,
    all_gather,
    all_to_all,
)
from ddp_compile.kernels import minmax_u8_compress, minmax_u8_decompress
from ddp_compile.kernels.contract.reference import row_bytes
from ddp_compile.kernels.executors import KERNEL_DTYPES


class ByteGradAlgorithm(CollectiveChain):
    """An all-to-all and an all-gather of compressed chunks, with a sum in float32 in between.

    Chunk j of a bucket belongs to rank j. It receives the others' compressed chunks j, adds them to its own, and sends
    the compressed sum to all. Every rank decodes the same bytes, so all have the same bits.
    """

    name = "ByteGrad all-reduce"
    # No padding, since its zeros would count in the minimum and maximum of a chunk.
    traits = Traits(layout="ddp", takes_sparse=False, takes_dtypes=KERNEL_DTYPES)
    num_collectives = 2

    def reduce(self, bucket: Bucket) -> Iterator[dist.Work]:
        flat, size, rank = bucket.flat.view(-1), self.process_group.size(), self.process_group.rank()
        sent = minmax_u8_compress(flat, size, skip_chunk=rank)
        received = torch.empty_like(sent)
        yield all_to_all(received, sent, self.process_group)
        numel = -(-flat.numel() // size)
        total = _sum_of(flat[rank * numel :][:numel], received, rank)
        # Equally long on every rank, including the last ones, whose chunks are shorter.
        own = torch.zeros_like(sent[0])
        row = minmax_u8_compress(total)[0]
        own[: len(row)] = row
        del sent, received, total
        rows = own.new_empty(size, len(own))
        yield all_gather(rows.view(-1), own, self.process_group)
        minmax_u8_decompress(rows, flat)


def _sum_of(own: Tensor, received: Tensor, rank: int) -> Tensor:
    """This rank's own chunk plus the decoded rows of the others, added in the order of ranks, in float32."""
    total = own.to(torch.float32, copy=True)
    for other, row in enumerate(received[:, : row_bytes(own.numel())]):
        if other != rank:
            minmax_u8_decompress(row[None], total, accumulate=True)
    return total


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteGrad(AlgorithmConfig):
    """Sends gradients in eight bits a value, relative to the smallest and largest value of a chunk of each bucket.

    With n ranks and gradients in float32, each rank sends 2 (n - 1) / n bytes for an element instead of 8 (n - 1) / n,
    and 8 to 23 bytes for each chunk. The rounding error is at most half of a 255th of the range of a chunk, for each
    other rank's part and once more for the sum. A chunk with a NaN or an infinity becomes NaN as a whole, on every
    rank, as `torch.amp.GradScaler` expects. It takes dense gradients in float32, bfloat16 and float16.

    A zero gradient may become nonzero: it is rounded to the nearest step of its chunk, which is the same in every
    iteration with the same range. Adam makes a full step of it, however small it is. If some values must not move, such
    as rows of an embedding that no batch contains, zero their gradients after the backward. A parameter that is
    trained must not be in ``parameters_to_ignore``: each rank would train it on its own gradients.

    Args:
        hierarchical: Add up gradients on each node first, in their own dtype, and send eight bits only between nodes;
            see `GradientAllReduce`.

    Source: Gan et al. 2021, Bagua (arXiv 2107.01499), section 4, with the codec of
    `ddp_compile.kernels.minmax_u8_compress`.
    """

    hierarchical: bool = False

    def build(self, process_group: dist.ProcessGroup) -> CollectiveChain:
        algorithm = ByteGradAlgorithm(process_group)
        return Hierarchical(process_group, algorithm) if self.hierarchical else algorithm
