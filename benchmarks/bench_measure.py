"""What ``model.measure()`` says where the truth is known, and what it costs.

    python benchmarks/bench_measure.py [--output FILE.csv]
    python benchmarks/bench_measure.py --overhead [--rounds 60]

The truth: layers that sleep instead of computing, on a simulated link. When sleeps and transfers really began and ended
is noted by the layers and by the link, since a machine that is busy lengthens both. From these times the exposed time
follows, and the report must say the same: eight settings, with and without a sharded optimizer. Skew needs several
ranks: in four settings two ranks on gloo, one of which sleeps before its backward. All must be right within 5 %, by the
median of the steps.

The cost: gpt-small on two ranks, one core each, with records and without in turns. It prints the milliseconds of a step
on the slower rank and the processor time of both, and the median ratio with its 95 % interval.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from ddp_compile import ddp_compile, shard_optimizer
from ddp_compile.bench.report import report_rows
from ddp_compile.bench.results import median_and_interval
from ddp_compile.bench.settings import WorkloadSettings
from ddp_compile.bench.simulated_link import LinkModel, init_simulated_process_group
from ddp_compile.bench.workloads import make_workload
from ddp_compile.module.mixin import state_of
from ddp_compile.report.step_report import StepReport
from ddp_compile.report.steps import Step
from ddp_compile.runtime.comm.step_records import NO_RECORDS

NUM_LAYERS, NUMEL = 4, 1000
STEPS = 7
WARM_UP = 3


class Truth(NamedTuple):
    """What happened in a step, or what its report says, in seconds; the transfer is the mean of all buckets'."""

    exposed_s: float
    transfer_s: float
    communication_s: float
    lateness_s: float


class Setting(NamedTuple):
    """Times in seconds.

    Args:
        forward_s: Sleep in the forward of each layer.
        backward_s: Sleep in the backward of each layer.
        transfer_s: Of each bucket, one for each layer, on the simulated link.
        sharded: Whether the optimizer is sharded.
        between_s: Sleep between the optimizer's step and the next forward.
        late_s: On two ranks on gloo: what one sleeps before its backward. None on the simulated link.
    """

    forward_s: float = 0.010
    backward_s: float = 0.040
    transfer_s: float = 0.0
    sharded: bool = False
    between_s: float = 0.0
    late_s: float | None = None


class Sent(NamedTuple):
    """When a transfer was handed to the simulated link, and when it was over."""

    launched: float
    done: float


@dataclass
class Happened:
    """What a training notes by itself."""

    sent: list[Sent] = field(default_factory=list)
    backward_ended: float = 0.0  #: the last sleep of a backward
    truths: list[Truth] = field(default_factory=list)

    def note_step(
        self, gathers: Sequence[Sent], reductions: Sequence[Sent], forward_began: float, late_s: float
    ) -> None:
        """A forward, which is not compiled, waits for all gathers first; a backward waits for all reductions last."""
        exposed = busy = free_at = 0.0
        if gathers:
            exposed += max(0.0, gathers[-1].done - forward_began)
        if reductions:
            exposed += max(0.0, reductions[-1].done - self.backward_ended)
        in_turn = []
        for each in (*gathers, *reductions):
            in_turn.append(each.done - max(each.launched, free_at))
            free_at = each.done
        busy = sum(in_turn)
        reduced = in_turn[len(gathers) :]
        self.truths.append(Truth(exposed, statistics.fmean(reduced) if reduced else 0.0, busy, late_s))


class _NotedTransfer:
    """A transfer that notes when it is over. Its attributes are those of the one that it stands for."""

    def __init__(self, transfer: Any, happened: Happened) -> None:
        self._transfer, self._happened = transfer, happened
        self._launched = time.perf_counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transfer, name)

    def apply(self) -> None:
        self._transfer.apply()
        self._happened.sent.append(Sent(self._launched, time.perf_counter()))


def note_transfers(happened: Happened) -> None:
    """From now on, of the simulated default group."""
    link = dist.group.WORLD.line.out  # type: ignore[union-attr]
    launch = link.launch
    link.launch = lambda transfer: launch(_NotedTransfer(transfer, happened))


SETTINGS = (
    Setting(transfer_s=0.080),
    Setting(transfer_s=0.060),
    Setting(transfer_s=0.040),
    Setting(transfer_s=0.020),
    Setting(transfer_s=0.030, backward_s=0.010, forward_s=0.030),
    Setting(transfer_s=0.060, sharded=True),
    Setting(transfer_s=0.040, sharded=True, between_s=0.060),
    Setting(transfer_s=0.025, sharded=True, between_s=0.120),
    Setting(late_s=0.400),
    Setting(late_s=0.200),
    Setting(late_s=0.100, backward_s=0.020),
    Setting(late_s=0.100, forward_s=0.040),
)


class _Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, setting: Setting, happened: Happened) -> Tensor:
        time.sleep(setting.forward_s)
        ctx.setting, ctx.happened = setting, happened
        ctx.save_for_backward(weight)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (weight,) = ctx.saved_tensors
        gradient = torch.zeros_like(weight)
        time.sleep(ctx.setting.backward_s)
        ctx.happened.backward_ended = time.perf_counter()
        return gradients[0], gradient, None, None


class SleepyLayers(nn.Module):
    """Each layer has one parameter, and sleeps in its forward and in its backward."""

    def __init__(self, setting: Setting, happened: Happened) -> None:
        super().__init__()
        self.setting, self.happened = setting, happened
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(NUMEL)) for _ in range(NUM_LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = _Sleeping.apply(x, weight, self.setting, self.happened)
        return x


def link_of(setting: Setting, world_size: int = 4) -> LinkModel:
    """A link on which each bucket takes the time of the setting, whatever is done with it."""
    passes = 1 if setting.sharded else 2
    sent = passes * NUMEL * 4 * (world_size - 1) / world_size
    return LinkModel(world_size=world_size, alpha_s=0.0, bytes_per_second=sent / setting.transfer_s)


@torch.compiler.set_stance("force_eager")
def train(setting: Setting, happened: Happened, steps: int = STEPS) -> list[tuple[Truth, Truth]]:
    """Train in the default process group; for each step what happened and what the report says."""
    model: Any = ddp_compile(SleepyLayers(setting, happened), bucket_cap_mb=NUMEL * 4 / 2**20, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if setting.sharded:
        optimizer = shard_optimizer(optimizer, model)
    x = torch.ones(1, requires_grad=True)
    measurement = None
    is_late = setting.late_s is not None and dist.get_rank() == 1
    marks = [0, 0]
    for number in range(WARM_UP + steps):
        if number == WARM_UP:
            measurement = model.measure(steps=None)
        forward_began = time.perf_counter()
        loss = model(x).sum()
        late_from = time.perf_counter()
        time.sleep(setting.late_s or 0.0) if is_late else None
        late_s = time.perf_counter() - late_from if is_late else 0.0
        loss.backward()
        ended = len(happened.sent)
        gathers, reductions = happened.sent[marks[0] : marks[1]], happened.sent[marks[1] : ended]
        happened.note_step(gathers, reductions, forward_began, late_s)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(setting.between_s)
        marks = [ended, ended + (NUM_LAYERS if setting.sharded else 0)]
    assert measurement is not None
    measurement.stop()
    said = [_said(step, measurement.report()) for step in measurement.report().steps]
    model.unwrap()
    return list(zip(happened.truths[-len(said) :], said, strict=True))


def _said(step: Step, report: StepReport) -> Truth:
    transfers: list[Any] = [step.transfer_s(bucket.index) for bucket in report.buckets]
    communication_s: Any = step.communication_s
    return Truth(
        exposed_s=step.exposed_s,
        transfer_s=statistics.fmean(transfers),
        communication_s=communication_s,
        lateness_s=max(step.lateness_s(rank.rank) for rank in step.ranks),
    )


def on_simulated_link(setting: Setting, steps: int = STEPS) -> list[tuple[Truth, Truth]]:
    init_simulated_process_group(link_of(setting), torch.device("cpu"))
    try:
        happened = Happened()
        note_transfers(happened)
        return train(setting, happened, steps)
    finally:
        dist.destroy_process_group()


def _late_rank(rank: int, store: str, setting: Setting, results: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found = train(setting, Happened())
    if rank == 1:
        torch.save([(tuple(true), tuple(said)) for true, said in found], results)
    dist.destroy_process_group()


def on_two_ranks(function: Callable[..., None], *arguments: Any) -> Any:
    """What one of them saves."""
    with tempfile.TemporaryDirectory() as folder:
        results = str(Path(folder) / "results")
        mp.spawn(function, args=(str(Path(folder) / "store"), *arguments, results), nprocs=2)
        return torch.load(results, weights_only=False)


def error_of(found: Sequence[tuple[Sequence[float], Sequence[float]]], what: str) -> tuple[float, float, float]:
    """Medians over the steps of what is true, of what is said, and of the relative error."""
    place = Truth._fields.index(what)
    pairs = [(true[place], said[place]) for true, said in found]
    true, said = (statistics.median(values) for values in zip(*pairs, strict=True))
    return true, said, statistics.median(b / a - 1 for a, b in pairs)


def compare(output: Path | None) -> None:
    rows = []
    for setting in SETTINGS:
        is_late = setting.late_s is not None
        found = on_two_ranks(_late_rank, setting) if is_late else on_simulated_link(setting)
        shown = {name: value for name, value in setting._asdict().items() if value != Setting._field_defaults[name]}
        for what in ["lateness_s"] if is_late else ["exposed_s", "transfer_s", "communication_s"]:
            true, said, error = error_of(found, what)
            rows.append(
                {
                    "setting": " ".join(f"{name}={value}" for name, value in shown.items()),
                    "what": what.removesuffix("_s"),
                    "true_ms": round(1e3 * true, 2),
                    "measured_ms": round(1e3 * said, 2),
                    "error_percent": round(100 * error, 2),
                }
            )
    report_rows(rows, output)
    worst = max(rows, key=lambda row: abs(float(str(row["error_percent"]))))
    print(f"worst of {len(SETTINGS)} settings: {worst['error_percent']} % ({worst['what']}, {worst['setting']})")


# Overhead


def _overhead_rank(rank: int, store: str, rounds: int, results: str) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    workload = make_workload(WorkloadSettings(model="gpt-small"))
    model: Any = ddp_compile(workload.model)
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = workload.make_batch(torch.Generator().manual_seed(rank))
    reducer = state_of(model).reducer
    times: dict[str, list[list[float]]] = {"off": [], "on": []}
    records = None
    for number in range(WARM_UP + rounds):
        if number == WARM_UP:
            model.measure(steps=None)
            records = reducer._queue.records
        for name in ("off", "on") if number % 2 else ("on", "off"):
            # Measurements begin and end by a meeting of the ranks, which is not what is timed.
            reducer.record_into(NO_RECORDS if name == "off" or records is None else records)
            dist.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            workload.loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            found = torch.tensor([time.perf_counter() - begin, time.process_time() - cpu], dtype=torch.float64)
            everyone = [torch.empty_like(found) for _ in range(2)]
            dist.all_gather(everyone, found)
            if number >= WARM_UP:
                slower, both = torch.stack(everyone).max(0).values[0], torch.stack(everyone).sum(0)[1]
                times[name].append([float(slower), float(both)])
    if rank == 0:
        num_transfers = len(model.comm_stats().ranks[0].transfers)
        torch.save((times, num_transfers), results)
    dist.destroy_process_group()


def overhead(rounds: int, output: Path | None) -> None:
    times, num_transfers = on_two_ranks(_overhead_rank, rounds)
    rows = []
    for place, what in enumerate(("wall time, slower rank", "processor time, both ranks")):
        off, on = ([each[place] for each in times[name]] for name in ("off", "on"))
        ratio, low, high = median_and_interval(a / b for a, b in zip(on, off, strict=True))
        rows.append(
            {
                "what": what,
                "transfers": num_transfers,
                "off_ms": round(1e3 * statistics.median(off), 2),
                "on_ms": round(1e3 * statistics.median(on), 2),
                "ratio": round(ratio, 4),
                "from": round(low, 4),
                "to": round(high, 4),
            }
        )
    report_rows(rows, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--overhead", action="store_true", help="measure the cost instead of the truth")
    parser.add_argument("--rounds", type=int, default=60, help="steps with records, and as many without")
    parser.add_argument("--output", type=Path, help="CSV file (default: only print)")
    arguments = parser.parse_args()
    if arguments.overhead:
        overhead(arguments.rounds, arguments.output)
    else:
        compare(arguments.output)


if __name__ == "__main__":
    main()
