"""What a step costs: transfers, launches, and when gradients are ready and parameters needed.

All times are in seconds, all sizes in bytes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import linear_regression
from typing import Self

from ddp_compile.errors import number_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """The alpha-beta model of a collective: a latency, and a time for each byte.

    Raises a ValueError if a number is zero, negative, infinite or NaN.

    Source: Hockney 1994, "The communication challenge for MPP"; for collectives, Thakur et al. 2005.
    """

    latency_s: float  #: seconds that even an empty buffer takes
    s_per_byte: float  #: seconds for each byte of the flat buffer, not for each byte that travels

    def __post_init__(self) -> None:
        _check_positive("latency_s", self.latency_s, "20e-6 for 20 microseconds")
        _check_positive("s_per_byte", self.s_per_byte, "1 / 12.5e9 for 100 Gbit/s")

    def time_s(self, num_bytes: float) -> float:
        return self.latency_s + self.s_per_byte * num_bytes

    @property
    def half(self) -> Self:
        """A reduce-scatter or an all-gather, if this is an all-reduce."""
        return replace(self, latency_s=self.latency_s / 2, s_per_byte=self.s_per_byte / 2)


#: The latency of a fit that finds none.
_LEAST_LATENCY_S = 1e-6


def fit_collective(times_s: Mapping[int, float]) -> Collective:
    """The least-squares line through the times of transfers, in seconds by bytes, of at least two sizes.

    Raises a ValueError if the times do not grow with the sizes.
    """
    sizes, times = list(times_s), list(times_s.values())
    slope, intercept = linear_regression(sizes, times)
    if slope <= 0:
        ends = [f"{size} bytes took {times_s[size] * 1e3:.3f} ms" for size in (min(sizes), max(sizes))]
        raise ValueError(f"{' and '.join(ends)}, so the times give no rate; measure more steps")
    if intercept < _LEAST_LATENCY_S:
        (slope, _), intercept = linear_regression(sizes, times, proportional=True), _LEAST_LATENCY_S
    return Collective(latency_s=intercept, s_per_byte=slope)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What connects the ranks; raises a ValueError if a number is out of range, or the nodes are not full.

    Source: a ring sends ``2 (n - 1) / n`` of the buffer over each link, also if it passes through the ranks of a node
    in turn. Its latency is taken to be that of a double binary tree (Sanders et al. 2009), which NCCL uses for small
    buffers: as many messages as the tree of the nodes is deep, up and down.
    """

    world_size: int  #: number of ranks, at least 2
    latency_s: float  #: latency of one message between two nodes, in seconds
    bytes_per_second: float  #: rate of a node's link, in each direction
    ranks_per_node: int = 1  #: ranks that share a node's link; transfers inside a node are taken to be no slower

    def __post_init__(self) -> None:
        if self.world_size < 2:
            raise ValueError(f"world_size={self.world_size} must be at least 2; one rank reduces nothing")
        _check_positive("latency_s", self.latency_s, "20e-6 for 20 microseconds")
        _check_positive("bytes_per_second", self.bytes_per_second, "12.5e9 for 100 Gbit/s")
        if self.ranks_per_node < 1 or self.world_size % self.ranks_per_node:
            raise ValueError(
                f"ranks_per_node={self.ranks_per_node} must be at least 1 and divide world_size={self.world_size}"
            )

    def all_reduce(self) -> Collective:
        depth = max(1, math.ceil(math.log2(self.world_size // self.ranks_per_node)))
        share = (self.world_size - 1) / self.world_size
        return Collective(latency_s=2 * depth * self.latency_s, s_per_byte=2 * share / self.bytes_per_second)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a training step of one model costs on one rank, apart from how its gradients are grouped.

    Raises a ValueError if a time is negative, infinite or NaN, or if with a ``gather``, ``needed_s`` is for other
    parameters than ``ready_s``.
    """

    reduce: Collective  #: the transfer of a bucket in the backward: an all-reduce, or a reduce-scatter
    gather: Collective | None = None  #: the transfer of a bucket after its step; None if the optimizer is not sharded
    #: For each parameter, by index, when its gradient is ready: seconds since the backward began, if nothing were
    #: launched.
    ready_s: Sequence[float]
    #: For each parameter, by index, when the forward first reads it: seconds since the forward began.
    needed_s: Sequence[float] = ()
    forward_s: float = 0.0  #: length of a forward that waits for nothing
    launch_s: float = 0.0  #: by how much a launch delays the computation
    #: The optimizer's time for a byte of gradients. A sharded one's is that of this rank's part.
    step_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        named = {"launch_s": self.launch_s, "step_s_per_byte": self.step_s_per_byte, "forward_s": self.forward_s}
        named |= {f"ready_s[{i}]": time for i, time in enumerate(self.ready_s)}
        named |= {f"needed_s[{i}]": time for i, time in enumerate(self.needed_s)}
        for name, value in named.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}={value} must be a finite number of seconds that is not negative")
        if self.gather is not None and len(self.needed_s) != len(self.ready_s):
            raise ValueError(
                f"needed_s is for {number_of(len(self.needed_s), 'parameter')}, and ready_s for {len(self.ready_s)};"
                " with gather= pass both for every parameter"
            )

    def sharded(self, world_size: int) -> Self:
        """These costs of an all-reduce with a sharded optimizer: two transfers, and one part to step on each rank."""
        half = self.reduce.half
        return replace(self, reduce=half, gather=half, step_s_per_byte=self.step_s_per_byte / world_size)


def _check_positive(setting: str, value: float, example: str) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{setting}={value} must be above zero and finite; pass for example {example}")
