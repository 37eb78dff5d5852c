"""What a step costs: transfers by bytes, launches, and when gradients are ready and parameters needed.

All times are in seconds, all sizes in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import linear_regression


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """The alpha-beta model of a collective: a latency, and a time for each byte.

    Args:
        latency_s: What it takes however small the buffer is, in seconds.
        s_per_byte: Seconds for each byte of the flat buffer, not for each byte that travels.

    Raises:
        ValueError: A number is zero, negative, infinite or NaN.

    Source: Hockney 1994, "The communication challenge for MPP"; for collectives, Thakur et al. 2005.
    """

    latency_s: float
    s_per_byte: float

    def __post_init__(self) -> None:
        _check_positive("latency_s", self.latency_s, "20e-6 for 20 microseconds")
        _check_positive("s_per_byte", self.s_per_byte, "1 / 12.5e9 for 100 Gbit/s")

    def time_s(self, num_bytes: float) -> float:
        return self.latency_s + self.s_per_byte * num_bytes


#: The latency that stands for one that is too small to be seen.
_LEAST_LATENCY_S = 1e-6


def fit_collective(times_s: Mapping[int, float], way_out: str) -> Collective:
    """The line through the times of transfers.

    Args:
        times_s: Seconds by bytes, of at least two sizes.
        way_out: What the error tells the user to do.

    Raises:
        ValueError: The times do not grow with the sizes.
    """
    sizes, times = list(times_s), list(times_s.values())
    slope, intercept = linear_regression(sizes, times)
    if slope <= 0:
        least, most = (f"{size} bytes take {times_s[size] * 1e3:.3f} ms" for size in (min(sizes), max(sizes)))
        raise ValueError(f"{least} and {most}, which is no rate; {way_out}")
    if intercept < _LEAST_LATENCY_S:
        (slope, _), intercept = linear_regression(sizes, times, proportional=True), _LEAST_LATENCY_S
    return Collective(latency_s=intercept, s_per_byte=slope)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What connects the ranks.

    Args:
        world_size: Number of ranks, at least 2.
        latency_s: Of one message between two nodes, in seconds.
        bytes_per_second: Rate of a node's link, in each direction.
        ranks_per_node: Ranks that share a node's link. Transfers inside a node are taken to be no slower.

    Raises:
        ValueError: A number out of range, or the nodes are not full.

    Source: a ring sends ``2 (n - 1) / n`` of the buffer over each link, also if it passes through the ranks of a node
    in turn. Its latency is taken to be that of a double binary tree (Sanders et al. 2009), which NCCL uses for small
    buffers: as many messages as the tree of the nodes is deep, up and down.
    """

    world_size: int
    latency_s: float
    bytes_per_second: float
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        if self.world_size < 2:
            raise ValueError(f"world_size={self.world_size} must be at least 2; one rank reduces nothing")
        _check_positive("latency_s", self.latency_s, "20e-6 for 20 microseconds")
        _check_positive("bytes_per_second", self.bytes_per_second, "12.5e9 for 100 Gbit/s")
        if self.ranks_per_node < 1 or self.world_size % self.ranks_per_node:
            raise ValueError(
                f"ranks_per_node={self.ranks_per_node} must be at least 1 and divide world_size={self.world_size}"
            )

    @property
    def depth(self) -> int:
        """Messages from one node to the farthest one in a tree; 1 if there is one node, for its own latency."""
        return max(1, math.ceil(math.log2(self.world_size // self.ranks_per_node)))

    @property
    def share(self) -> float:
        """The part of a buffer that belongs to the other ranks."""
        return (self.world_size - 1) / self.world_size

    def all_reduce(self, wire: float = 1.0) -> Collective:
        """An all-reduce. ``wire`` is the number of bytes that travel for a byte of the buffer."""
        return Collective(
            latency_s=2 * self.depth * self.latency_s, s_per_byte=2 * self.share * wire / self.bytes_per_second
        )

    def shards(self, wire: float = 1.0) -> Collective:
        """A reduce-scatter or an all-gather."""
        return Collective(latency_s=self.depth * self.latency_s, s_per_byte=self.share * wire / self.bytes_per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """A step of one model without communication. The arguments are those of `Costs`, in seconds.

    Args:
        ready_s: See `Costs`.
        needed_s: See `Costs`.
        forward_s: See `Costs`.
        launch_s: See `Costs`.
        step_s_per_byte: Of an optimizer that is not sharded.
    """

    ready_s: Sequence[float]
    needed_s: Sequence[float]
    forward_s: float
    launch_s: float = 0.0
    step_s_per_byte: float = 0.0

    def with_transfers(self, reduce: Collective, gather: Collective | None = None, shards: int = 1) -> Costs:
        """The costs with these transfers, if each rank steps one of ``shards`` parts."""
        return Costs(
            reduce=reduce,
            ready_s=self.ready_s,
            launch_s=self.launch_s,
            step_s_per_byte=self.step_s_per_byte / shards,
            forward_s=self.forward_s,
            gather=gather,
            needed_s=self.needed_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a training step of one model costs, on one rank, apart from how its gradients are grouped.

    Args:
        reduce: The transfer of a bucket in the backward: an all-reduce, or a reduce-scatter.
        ready_s: For each parameter, by index, when its gradient is ready: seconds since the backward began, if nothing
            were launched.
        launch_s: What a launch takes from the computation.
        step_s_per_byte: The optimizer's time for a byte of gradients. A sharded one's is that of this rank's part.
        forward_s: Length of a forward that waits for nothing.
        gather: The transfer of a bucket after its step; None if the optimizer is not sharded.
        needed_s: For each parameter, by index, when the forward first reads it: seconds since the forward began. Used
            if there is a ``gather``.

    Raises:
        ValueError: A time is negative, infinite or NaN, or ``needed_s`` is for other parameters than ``ready_s``.
    """

    reduce: Collective
    ready_s: Sequence[float]
    launch_s: float = 0.0
    step_s_per_byte: float = 0.0
    forward_s: float = 0.0
    gather: Collective | None = None
    needed_s: Sequence[float] = ()

    def __post_init__(self) -> None:
        named = {"launch_s": self.launch_s, "step_s_per_byte": self.step_s_per_byte, "forward_s": self.forward_s}
        named |= {f"ready_s[{i}]": time for i, time in enumerate(self.ready_s)}
        named |= {f"needed_s[{i}]": time for i, time in enumerate(self.needed_s)}
        for name, value in named.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}={value} must be a finite number of seconds from 0 on")
        if self.gather is not None and len(self.needed_s) != len(self.ready_s):
            raise ValueError(
                f"needed_s is for {len(self.needed_s)} parameters, and ready_s for {len(self.ready_s)}; with gather="
                " pass both for every parameter"
            )


def _check_positive(setting: str, value: float, example: str) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{setting}={value} must be above zero and finite; pass for example {example}")
