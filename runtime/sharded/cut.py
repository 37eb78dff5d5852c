"""Which elements of a bucket each rank keeps."""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from ddp_compile.plan.spec import PADDED_ALIGNMENT_BYTES, BucketSpec


@dataclass(frozen=True, slots=True)
class Cut:
    """How the flat buffer of a bucket is divided among the ranks.

    Parameters without an owner are cut: each rank keeps a shard of ``shard_numel`` elements of them, the last ranks
    fewer or none. A rank keeps all elements of the parameters that it owns. So a rank keeps up to two ranges.
    """

    shards: tuple[range, ...]  #: the shard of each rank
    owned: tuple[range, ...]  #: the elements of each rank's own parameters, padding included
    shard_numel: int  #: length of a shard that is not cut short

    @classmethod
    def of(cls, spec: BucketSpec, world_size: int) -> Self:
        """The cut of a bucket.

        Shards begin at multiples of `PADDED_ALIGNMENT_BYTES`, as gradients do. So an operator takes the same elements
        in vectors, whether it gets a piece or the whole parameter. It takes the rest at the end one by one, and may
        round those elements differently (docs/torch_facts.md). NCCL moves memory that is not aligned to 16 bytes in
        smaller pieces.
        """
        element_size = spec.itemsize
        unit = PADDED_ALIGNMENT_BYTES // element_size
        ranges = {
            owner: range(begin // element_size, end // element_size)
            for owner, (begin, end) in spec.bytes_of_owner.items()
        }
        numel = len(ranges.get(None, ()))  # those without an owner come first
        size = -(-numel // (world_size * unit)) * unit
        shards = tuple(range(min(rank * size, numel), min((rank + 1) * size, numel)) for rank in range(world_size))
        return cls(shards, tuple(ranges.get(rank, range(0)) for rank in range(world_size)), size)

    @property
    def is_even(self) -> bool:
        """Whether nothing has an owner, so that all ranks keep about as much."""
        return not any(self.owned)

    def parts_of(self, rank: int, flat: Tensor) -> list[Tensor]:
        """The elements of a flat buffer that a rank keeps: views, none of them empty."""
        return [flat[kept.start : kept.stop] for kept in (self.shards[rank], self.owned[rank]) if kept]
