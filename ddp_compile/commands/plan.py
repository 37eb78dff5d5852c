"""``python -m ddp_compile plan``: predicts steps on any number of ranks from measured ones, and saves a plan."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ddp_compile.commands.arguments import GONE
from ddp_compile.config import caps_from_mib, in_mib
from ddp_compile.errors import number_of
from ddp_compile.plan.costs import Collective, Link
from ddp_compile.plan.scenarios import Scenario, alone_s, scenarios
from ddp_compile.report.costs import all_reduce_of, costs_of
from ddp_compile.report.step_report import StepReport
from ddp_compile.runtime.algorithms.all_reduce import AllReduce
from ddp_compile.runtime.sharded.algorithm import ShardedAlgorithm
from ddp_compile.validation.rates import Rate, parse_seconds


def run(arguments: argparse.Namespace) -> int:
    """Predict, print, write a plan. Returns the exit status: 2 for wrong input."""
    try:
        _refuse_gone(arguments)
        _check_files(arguments)
        report = _report(arguments.profile)
        plan = report.plan
        world_size = len(report.steps[0].ranks) if arguments.world_size is None else arguments.world_size
        all_reduce, link = _all_reduce(arguments, report, world_size)
        costs = costs_of(report, all_reduce)
        specs = [gradient for bucket in plan.buckets for gradient in bucket.gradients]
        gradients = sorted((replace(each, owner=None) for each in specs), key=lambda each: each.index)
        device = arguments.device or report.device

        def found_on(size: int) -> list[Scenario]:
            costs_on = replace(costs, reduce=_all_reduce(arguments, report, size)[0])
            return list(scenarios(gradients, costs_on, size, caps_from_mib(None, 1.0, device, size)))

        found = found_on(world_size)
        if arguments.png is not None:
            _draw(arguments, world_size, found_on, alone_s(gradients, costs))
    except (ValueError, ModuleNotFoundError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    unknown = "" if costs.step_s_per_byte else ", which do not have the optimizer's time: it is left out"
    size = f"{number_of(len(gradients), 'gradient')}, {sum(each.num_bytes for each in gradients) / 2**20:.1f} MiB"
    alone = f"{alone_s(gradients, costs) * 1e3:.2f} ms a step on one rank"
    print(f"{size}; {alone}, from {number_of(len(report.steps), 'step')} of {arguments.profile}{unknown}")
    print(f"{number_of(world_size, 'rank')}, link: {link}")
    caps = in_mib(caps_from_mib(None, 1.0, device, world_size))
    print(f"default capacities: {caps}, those for {device}; --device has others")
    print(_table(found, alone_s(gradients, costs)))
    print(_advice(found, report.algorithm == ShardedAlgorithm.name, arguments.save))
    return 0


def _check_files(arguments: argparse.Namespace) -> None:
    for name, path in {"--save": arguments.save, "--png": arguments.png}.items():
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{name} {path} cannot be written: no folder {path.parent}; create it")
    if arguments.png is not None and arguments.bandwidth is None:
        raise ValueError(f"--png {arguments.png} shows more ranks than the profile has; pass --bandwidth and --latency")


def _refuse_gone(arguments: argparse.Namespace) -> None:
    for name, way_out in GONE.items():
        if (value := getattr(arguments, name.lstrip("-").replace("-", "_"))) is not None:
            shown = f"{name} {value}" if name.startswith("--") else repr(value)
            raise ValueError(f"{shown} is no longer an argument: {way_out}")


def _report(path: Path) -> StepReport:
    try:
        report = StepReport.from_json(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--profile {path} cannot be read: {error}") from error
    if not report.steps:
        raise ValueError(f"--profile {path} has no steps; measure some")
    return report


def _all_reduce(arguments: argparse.Namespace, report: StepReport, world_size: int) -> tuple[Collective, str]:
    """What an all-reduce of this many ranks takes, and a line about their link."""
    if arguments.bandwidth is not None:
        rate = Rate.parse(arguments.bandwidth).bits_per_second
        if rate is None:
            raise ValueError(f"--bandwidth {arguments.bandwidth} is not a rate; pass for example 100gbit")
        latency_s, per_node = parse_seconds(arguments.latency), arguments.intra_node
        link = Link(world_size=world_size, latency_s=latency_s, bytes_per_second=rate / 8, ranks_per_node=per_node)
        about = f"{arguments.bandwidth}, {arguments.latency}, {number_of(per_node, 'rank')} a node"
        return link.all_reduce(), about
    measured_size = len(report.steps[0].ranks)
    if world_size != measured_size:
        raise ValueError(
            f"--world-size {world_size}: the profile is of {number_of(measured_size, 'rank')}; pass --bandwidth and"
            f" --latency, or a profile of {number_of(world_size, 'rank')}"
        )
    if report.algorithm not in (AllReduce.name, ShardedAlgorithm.name):
        raise ValueError(
            f"the profile is of the algorithm {report.algorithm!r}, whose transfers do not say what an all-reduce"
            " takes; pass --bandwidth and --latency, or a profile of GradientAllReduce() or of a sharded optimizer"
        )
    all_reduce = all_reduce_of(report)
    about = f"{all_reduce.latency_s * 1e6:.0f} us and {all_reduce.s_per_byte * 1e12:.1f} us/MB for an all-reduce"
    return all_reduce, f"as measured, {about}"


def _table(found: Sequence[Scenario], alone_s: float) -> str:
    header = ("", "step ms", "exposed ms", "efficiency")
    rows = [
        (each.name, f"{each.step_s * 1e3:.2f}", f"{each.exposed_s * 1e3:.2f}", f"{alone_s / each.step_s:.0%}")
        for each in found
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in [header, *rows]
    )


def _advice(found: Sequence[Scenario], is_sharded: bool, path: Path | None) -> str:
    """The fastest way, and the line of code for it; if there is a path, saves the best plan with this optimizer."""
    best = min(found, key=lambda each: each.step_s)
    faster = found[0].step_s / best.step_s
    text = f"fastest: {best.name}, {faster:.2f} times as fast as the default\n    {best.code}"
    (saved,) = (each for each in found if each.plan is not None and each.is_sharded == is_sharded)
    if path is None:
        return f"{text}\n    (pass --save FILE to write the plan of: {saved.name})"
    assert saved.plan is not None
    saved.plan.save(path)
    text = f"{text}\nFILE has the plan of: {saved.name}"
    if best.plan is not None and best is not saved:
        text = f"{text} (for that of: {best.name}, measure {'without' if is_sharded else 'with'} a sharded optimizer)"
    return text.replace("FILE", str(path))


def _draw(
    arguments: argparse.Namespace, world_size: int, found_on: Callable[[int], Sequence[Scenario]], alone_s: float
) -> None:
    """Draw the steps of the five fastest ways, the fastest one first, on up to twice as many ranks."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"--png {arguments.png} needs matplotlib; pip install matplotlib") from error

    sizes = [max(2, arguments.intra_node)]
    while sizes[-1] < 2 * world_size:
        sizes.append(2 * sizes[-1])
    name_of = {each.step_s: each.name for each in reversed(found_on(world_size))}  # one line for equal ones
    found = [{each.name: each.step_s * 1e3 for each in found_on(size)} for size in sizes]
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    for _, name in sorted(name_of.items())[:5]:
        axes.plot(sizes, [steps_ms[name] for steps_ms in found], marker="o", label=name)
    axes.axhline(alone_s * 1e3, color="black", linestyle=":", label="one rank alone")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, list(map(str, sizes)))
    axes.set(xlabel="ranks", ylabel="predicted step (ms)", title=f"{arguments.bandwidth}, {arguments.latency}")
    figure.legend(loc="outside right upper", title=f"fastest first, with {number_of(world_size, 'rank')}")
    figure.savefig(arguments.png, format="png", dpi=120)
