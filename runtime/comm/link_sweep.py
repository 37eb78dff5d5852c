"""What an all-reduce of a process group costs, measured by all-reduces of several sizes while nothing else is sent."""

from __future__ import annotations

import math
import time
from statistics import median
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ddp_compile.plan.costs import Collective, fit_collective

#: Bytes of the buffers, if there is time.
_SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
#: All-reduces of each size that are timed. One more comes before them, since it may set up connections.
_REPEATS = 4
#: No size is begun that would take the sweep beyond this, in seconds.
BUDGET_S = 0.8


class _Sweep(NamedTuple):
    found: Collective | str  #: the line, or why there is none
    at_s: float  #: when it ended on this rank


_latest: WeakKeyDictionary[dist.ProcessGroup, _Sweep] = WeakKeyDictionary()


def measure_link(process_group: dist.ProcessGroup, device: torch.device, again_after_s: float = math.inf) -> Collective:
    """The latency and rate of a group's all-reduce, the same on every rank. Kept for as long as the group lives.

    Call it on every rank, while nothing of the group is under way. It takes less than a second, unless the two smallest
    sizes take longer, and without the time that new connections take.

    Args:
        device: Of the buffers.
        again_after_s: Measure again if the last time was so many seconds ago. Unless it is infinite, the ranks exchange
            a message to agree on that.

    Returns:
        The line through the medians of the slowest rank.

    Raises:
        ValueError: On every rank: the times did not grow with the sizes when it was last measured.
    """
    latest = _latest.get(process_group)
    if latest is None or _is_over(latest.at_s + again_after_s, process_group, device):
        found: Collective | str
        try:
            found = fit_collective(_sweep(process_group, device), "repeat it, or pass a plan")
        except ValueError as error:
            found = str(error)
        latest = _latest[process_group] = _Sweep(found, time.monotonic())
    if isinstance(latest.found, str):
        raise ValueError(latest.found)
    return latest.found


def _is_over(end_s: float, process_group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether it is past that time on some rank; the same on every rank."""
    if end_s == math.inf:
        return False
    is_over = torch.tensor(float(time.monotonic() >= end_s), device=device)
    dist.all_reduce(is_over, dist.ReduceOp.MAX, group=process_group)
    return bool(is_over.item())


def _sweep(process_group: dist.ProcessGroup, device: torch.device) -> dict[int, float]:
    """Seconds that an all-reduce takes, by bytes; on every rank those of the slowest one, so that all go on alike."""
    times: dict[int, float] = {}
    spent_s = 0.0
    for num_bytes in _SIZES:
        if len(times) >= 2:
            before, latest = list(times.items())[-2:]
            growth = (latest[1] - before[1]) / (latest[0] - before[0])
            expected_s = latest[1] + max(0.0, growth) * (num_bytes - latest[0])
            if spent_s + (1 + _REPEATS) * expected_s > BUDGET_S:
                break
        buffer = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
        _time_s(buffer, process_group)
        samples = [_time_s(buffer, process_group) for _ in range(_REPEATS)]
        slowest = torch.tensor([median(samples), sum(samples)], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=process_group)
        times[num_bytes], total_s = slowest.tolist()
        spent_s += total_s
    return times


def _time_s(buffer: torch.Tensor, process_group: dist.ProcessGroup) -> float:
    began = time.perf_counter()
    dist.all_reduce(buffer, group=process_group)
    buffer[0].item()  # on an accelerator the host waits only here
    return time.perf_counter() - began
