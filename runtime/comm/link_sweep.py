"""What an all-reduce of a process group costs, measured by all-reduces of several sizes while nothing else is sent."""

from __future__ import annotations

import time
from statistics import median
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ddp_compile.plan.costs import Collective, fit_collective

#: Bytes of the buffers, if there is time.
_SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
#: All-reduces of each size; the first one is not timed, since it may set up connections.
_REPEATS = 5
#: No size is begun that would take the sweep beyond this, in seconds.
BUDGET_S = 0.8

_found: WeakKeyDictionary[dist.ProcessGroup, Collective] = WeakKeyDictionary()


def measure_link(process_group: dist.ProcessGroup, device: torch.device, again: bool = False) -> Collective:
    """The latency and rate of a group's all-reduce, the same on every rank. Kept for as long as the group lives.

    Call it on every rank, while nothing of the group is under way. It takes less than a second, unless the two smallest
    sizes take longer.

    Args:
        device: Of the buffers.
        again: Measure also if there is a result of this group, which the new one replaces; alike on every rank.

    Returns:
        The line through the medians of the slowest rank.

    Raises:
        ValueError: On every rank: the times do not grow with the sizes.
    """
    if (found := _found.get(process_group)) is None or again:
        found = _found[process_group] = fit_collective(_sweep(process_group, device), "repeat it, or pass a plan")
    return found


def _sweep(process_group: dist.ProcessGroup, device: torch.device) -> dict[int, float]:
    """Seconds that an all-reduce takes, by bytes; on every rank those of the slowest one, so that all go on alike."""
    times: dict[int, float] = {}
    spent_s = 0.0
    for num_bytes in _SIZES:
        if len(times) >= 2:
            before, latest = list(times.items())[-2:]
            growth = (latest[1] - before[1]) / (latest[0] - before[0])
            expected_s = latest[1] + max(0.0, growth) * (num_bytes - latest[0])
            if spent_s + _REPEATS * expected_s > BUDGET_S:
                break
        buffer = torch.zeros(num_bytes // 4, device=device)
        samples = [_time_s(buffer, process_group) for _ in range(_REPEATS)]
        slowest = torch.tensor([median(samples[1:]), sum(samples)], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=process_group)
        times[num_bytes], total_s = slowest.tolist()
        spent_s += total_s
    return times


def _time_s(buffer: torch.Tensor, process_group: dist.ProcessGroup) -> float:
    began = time.perf_counter()
    dist.all_reduce(buffer, group=process_group)
    buffer[0].item()  # on an accelerator the host waits only here
    return time.perf_counter() - began
