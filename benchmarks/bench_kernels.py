"""Flatten-and-scale and unflatten, compared with every way to do it in torch and with a plain copy of as many bytes.

    python benchmarks/bench_kernels.py [--device cuda] [--rounds 30] [--output FILE.csv]

All ways take turns in one process on one core (or one device), in changing order; table and CSV give the 20th, 50th and
80th percentile of the rounds. The file is written anew after each case. Nothing is installed or downloaded.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor

from ddp_compile import kernels
from ddp_compile.bench.provenance import commit, processor
from ddp_compile.bench.report import write_csv

SCALE = 0.25
#: Minimum length of a turn. Shorter calls are repeated.
TURN_S = 0.004
#: Turns of each way of a case: first those that find out how many calls fill a turn.
NUM_TRIALS, NUM_ROUNDS = 3, 30
#: Larger than every cache. Each call of a turn uses another copy of the tensors, like each bucket of a step.
ROTATED_BYTES = {"cpu": 0, "cuda": 256 << 20}
#: But not more tensors than this, or two buckets: one launch for each tensor would take minutes. With small tensors,
#: launches take the time and not memory, so that it does not matter that these buckets fit into a cache.
ROTATED_TENSORS = 2000


@dataclass(frozen=True, kw_only=True)
class Case:
    """The tensors to move.

    Args:
        name: For the table.
        numels: Elements of each tensor, float32.
        flat_dtype: Dtype of the flat buffer.
        to_flat: Flatten, or unflatten.
        new_addresses: Whether the tensors have other addresses in every call.
    """

    name: str
    numels: tuple[int, ...]
    flat_dtype: torch.dtype = torch.float32
    to_flat: bool = True
    new_addresses: bool = False

    @property
    def moved_bytes(self) -> int:
        """Bytes that have to be read and written."""
        return sum(self.numels) * (4 + self.flat_dtype.itemsize)


def uneven(num_bytes: int, count: int) -> tuple[int, ...]:
    """Sizes of ``count`` float32 tensors that differ like those of a model, with ``num_bytes`` in total."""
    weights = [1 + (i * 7919) % 13 for i in range(count)]
    total = num_bytes // 4
    sizes = [max(1, total * weight // sum(weights)) for weight in weights]
    sizes[-1] += total - sum(sizes)
    return tuple(sizes)


MIB = 1 << 20
BUCKET = uneven(25 * MIB, 200)
SMALL = (256,) * 5000
BF16, FP16 = torch.bfloat16, torch.float16

CASES = {
    "cpu": (
        Case(name="25 MiB in 200", numels=BUCKET),
        Case(name="25 MiB in 200 to bf16", numels=BUCKET, flat_dtype=BF16),
        Case(name="25 MiB in 200 to fp16", numels=BUCKET, flat_dtype=FP16),
        Case(name="25 MiB in 200, back", numels=BUCKET, to_flat=False),
        Case(name="25 MiB in 200, back from bf16", numels=BUCKET, flat_dtype=BF16, to_flat=False),
        Case(name="5000 of 1 KiB", numels=SMALL),
        Case(name="5000 of 1 KiB, new addresses", numels=SMALL, new_addresses=True),
    ),
    "cuda": (
        *(
            Case(name=f"{mib} MiB in 200{label}", numels=uneven(mib * MIB, 200), flat_dtype=dtype, to_flat=to_flat)
            for mib in (25, 100, 1024)
            for label, dtype, to_flat in (
                ("", torch.float32, True),
                (" to bf16", BF16, True),
                (", back", torch.float32, False),
            )
        ),
        Case(name="5000 of 1 KiB", numels=SMALL),
        Case(name="5000 of 1 KiB, new addresses", numels=SMALL, new_addresses=True),
    ),
}


@dataclass(frozen=True)
class Bucket:
    """Tensors and the flat buffer they go to or come from."""

    tensors: list[Tensor]
    flat: Tensor
    views: list[Tensor]


Way = Callable[[Bucket], object]


def per_tensor(case: Case) -> Way:
    """One call of mul for each tensor, as DDP does by default, and one call of copy_ for each on the way back."""

    def flatten(bucket: Bucket) -> None:
        for tensor, view in zip(bucket.tensors, bucket.views, strict=True):
            torch.mul(tensor, SCALE, out=view)

    def unflatten(bucket: Bucket) -> None:
        for tensor, view in zip(bucket.tensors, bucket.views, strict=True):
            tensor.copy_(view)

    return flatten if case.to_flat else unflatten


def copy_and_divide(case: Case) -> Way:
    """copy_ for each tensor, then div_ for the bucket."""

    def flatten(bucket: Bucket) -> None:
        for tensor, view in zip(bucket.tensors, bucket.views, strict=True):
            view.copy_(tensor)
        bucket.flat.div_(1 / SCALE)

    return flatten


def cat_and_scale(case: Case) -> Way:
    """torch.cat into the bucket, then mul_."""

    def flatten(bucket: Bucket) -> None:
        torch.cat([tensor.view(-1) for tensor in bucket.tensors], out=bucket.flat).mul_(SCALE)

    return flatten


def foreach(case: Case) -> Way:
    """_foreach_copy_ and one div_ for the bucket: DDP with batched_grad_copy=True."""

    def flatten(bucket: Bucket) -> None:
        torch._foreach_copy_(bucket.views, bucket.tensors)
        bucket.flat.div_(1 / SCALE)

    def unflatten(bucket: Bucket) -> None:
        torch._foreach_copy_(bucket.tensors, bucket.views)

    return flatten if case.to_flat else unflatten


def plain_function(case: Case) -> Way:
    """ddp_compile.kernels.flatten_scale or unflatten: a plan for each call."""
    if case.to_flat:
        return lambda bucket: kernels.flatten_scale(bucket.tensors, bucket.flat, SCALE)
    return lambda bucket: kernels.unflatten(bucket.flat, bucket.tensors)


def with_plan(case: Case) -> Way:
    """FlattenPlan, made once for each bucket, as the reducer does."""
    plans: dict[int, kernels.FlattenPlan] = {}

    def plan_of(bucket: Bucket) -> kernels.FlattenPlan:
        key = bucket.flat.data_ptr()
        if key not in plans:
            plans[key] = kernels.FlattenPlan.for_bucket(bucket.tensors, bucket.flat)
        return plans[key]

    if case.to_flat:
        return lambda bucket: plan_of(bucket).flatten(bucket.tensors, SCALE)
    return lambda bucket: plan_of(bucket).unflatten(bucket.tensors)


def plain_copy(case: Case) -> Way:
    """One contiguous copy that reads and writes as many bytes in total: the limit."""
    size = case.moved_bytes // 2
    buffers: dict[int, tuple[Tensor, Tensor]] = {}

    def copy(bucket: Bucket) -> None:
        key = bucket.tensors[0].data_ptr()
        if key not in buffers:
            device = bucket.flat.device
            buffers[key] = tuple(torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))  # type: ignore[assignment]
        destination, source = buffers[key]
        if destination.is_cuda:
            destination.copy_(source)
        else:
            ctypes.memmove(destination.data_ptr(), source.data_ptr(), size)

    return copy


LIMIT = "plain copy"
OURS = ("FlattenPlan", "plain function")
#: Tensors in one launch of torch's kernels for lists; the ways that are not here have a launch for each.
TENSORS_OF_A_LAUNCH = {"foreach (DDP batched)": 64, "cat + mul_": 64}


def ways_of(case: Case) -> dict[str, Way]:
    ways = {
        LIMIT: plain_copy(case),
        "FlattenPlan": with_plan(case),
        "plain function": plain_function(case),
        "per tensor (DDP)": per_tensor(case),
        "foreach (DDP batched)": foreach(case),
    }
    if case.to_flat:
        ways["copy_ + div_"] = copy_and_divide(case)
        if case.flat_dtype is torch.float32:
            ways["cat + mul_"] = cat_and_scale(case)
    return ways


def num_buckets(case: Case, device: str) -> int:
    """Number of buckets that the calls of a turn rotate over."""
    wanted = -(-ROTATED_BYTES[device] // case.moved_bytes)
    fewest = 2 if case.new_addresses or wanted > 1 else 1
    return max(fewest, min(wanted, ROTATED_TENSORS // len(case.numels)))


def make_buckets(case: Case, device: str) -> list[Bucket]:
    count = num_buckets(case, device)
    flats = [torch.randn(sum(case.numels), device=device).to(case.flat_dtype) for _ in range(count)]
    if case.new_addresses:
        flats = flats[:1] * count  # one bucket whose tensors have moved
    buckets = []
    for flat in flats:
        tensors = [torch.randn(numel, device=device) for numel in case.numels]
        buckets.append(Bucket(tensors, flat, list(flat.split(list(case.numels)))))
    return buckets


def seconds_of(way: Way, buckets: Sequence[Bucket], calls: int) -> float:
    """Time of one call, mean over a turn of ``calls``."""
    if buckets[0].flat.is_cuda:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for i in range(calls):
            way(buckets[i % len(buckets)])
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1000 / calls
    start = time.perf_counter()
    for i in range(calls):
        way(buckets[i % len(buckets)])
    return (time.perf_counter() - start) / calls


def measure(case: Case, device: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of one call of each way, in each round."""
    buckets = make_buckets(case, device)
    ways = ways_of(case)
    calls = {}
    for name, way in ways.items():
        once = min(seconds_of(way, buckets, len(buckets)) for _ in range(NUM_TRIALS))
        # A multiple of the buckets, so that with new addresses they are also new in the first call of a turn.
        calls[name] = len(buckets) * max(1, round(TURN_S / once / len(buckets)))
    times: dict[str, list[float]] = {name: [] for name in ways}
    shuffled = random.Random(0)
    for _ in range(rounds):
        # In another order each time, since the caches that one way leaves behind delay the next.
        for name in shuffled.sample(list(ways), len(ways)):
            times[name].append(seconds_of(ways[name], buckets, calls[name]))
    return times


class Estimate(NamedTuple):
    """What measuring a case will take, without a device to measure on."""

    launches: int
    seconds: float


def estimate(case: Case, device: str, launch_s: float = 6e-6, bytes_per_s: float = 2e12) -> Estimate:
    """Launches and seconds of `measure`, of all ways and turns.

    Args:
        launch_s: Assumed for a launch.
        bytes_per_s: Assumed for what is read and written, on an H100; a fiftieth of it on a core.
    """
    rate = bytes_per_s if device == "cuda" else bytes_per_s / 50
    buckets, num_tensors = num_buckets(case, device), len(case.numels)
    launches, seconds = 2 * buckets * num_tensors, 0.0  # to make the tensors
    for name in ways_of(case):
        # Of a call: one for each tensor, or for as many as fit into the arguments of a launch.
        of_call = (
            1 if name == LIMIT else -(-num_tensors // (1360 if name in OURS else TENSORS_OF_A_LAUNCH.get(name, 1)))
        )
        call_s = max(of_call * launch_s, case.moved_bytes / rate)
        calls = buckets * max(1, round(TURN_S / call_s / buckets))
        launches += of_call * (NUM_TRIALS * buckets + NUM_ROUNDS * calls)
        seconds += call_s * (NUM_TRIALS * buckets + NUM_ROUNDS * calls)
    return Estimate(launches, seconds + 2 * buckets * num_tensors * launch_s)


def rows_of(case: Case, times: dict[str, list[float]]) -> list[dict[str, object]]:
    peers = [name for name in times if name not in (LIMIT, *OURS)]
    best_peer = min(peers, key=lambda name: statistics.median(times[name]), default=None)

    def ratio(name: str, other: str | None) -> object:
        return (
            ""
            if other is None
            else round(statistics.median(a / b for a, b in zip(times[name], times[other], strict=True)), 3)
        )

    rows = []
    for name, values in times.items():
        p20, p50, p80 = (statistics.quantiles(values, n=10, method="inclusive")[i] for i in (1, 4, 7))
        rows.append(
            {
                "case": case.name,
                "way": name,
                "p20_us": round(p20 * 1e6, 1),
                "p50_us": round(p50 * 1e6, 1),
                "p80_us": round(p80 * 1e6, 1),
                "gb_per_s": round(case.moved_bytes / p50 / 1e9, 2),
                "x_plain_copy": ratio(name, LIMIT),
                "x_best_torch": ratio(name, best_peer),
                "x_plan": ratio(name, "FlattenPlan"),
            }
        )
    return rows


def provenance(device: str) -> dict[str, str]:
    native = {row.implementation: row.reason for row in kernels.status() if row.device_type == device}
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "kernels": "; ".join(f"{name} ({reason})" for name, reason in native.items()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--output", type=Path, help="CSV file (default: only print)")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        torch.set_num_threads(1)
    about = provenance(arguments.device)
    print("\n".join(f"{name}: {value}" for name, value in about.items()))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, object]] = []
    for case in CASES[arguments.device]:
        of_case = rows_of(case, measure(case, arguments.device, arguments.rounds))
        rows += of_case
        print(tabulate(of_case, headers="keys"), end="\n\n", flush=True)
        if arguments.output:
            write_csv(arguments.output, [*rows[0], *about], [{**row, **about} for row in rows])


if __name__ == "__main__":
    main()
