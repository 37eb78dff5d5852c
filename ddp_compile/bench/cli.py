"""``python -m ddp_compile bench``."""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ddp_compile.bench.arguments import MODES, SimulatedRate, command_line, link_rates
from ddp_compile.bench.endings import check_folders, ending_of, one_interrupt
from ddp_compile.bench.implementations import (
    COMMUNICATION,
    EAGER,
    IMPLEMENTATIONS,
    LOCAL,
    PEERS,
    WITHOUT_BUCKETS,
    implementation_named,
)
from ddp_compile.bench.link import LinkError, NamespacedLink, remove_stale, unavailable_reason
from ddp_compile.bench.links import FixedLink, ShapedLink, SimulatedLink
from ddp_compile.bench.rank_world import RankDiedError, RankWorld, WorldSettings
from ddp_compile.bench.results import SummaryRow, summarize
from ddp_compile.bench.run import BenchmarkRun, Link, RunResult, RunSettings
from ddp_compile.bench.settings import Case, WorkloadSettings
from ddp_compile.bench.workloads import WORKLOADS, check_tokens
from ddp_compile.validation.named_functions import load_function
from ddp_compile.validation.rates import Rate


def run(arguments: argparse.Namespace) -> int:
    """Measure, print tables, write files. Returns the exit status."""
    directory = arguments.output or Path("runs/bench") / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    if arguments.link is None:
        arguments.link = link_rates("1gbit" if arguments.device == "cuda" else "1gbit,none")
    try:
        settings, workload = _checked(arguments, directory)
        _simulated_rates(arguments)
        check_folders(directory)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    with one_interrupt():
        try:
            return _measure_and_report(arguments, settings, workload, directory)
        except (RankDiedError, LinkError, OSError, KeyboardInterrupt) as error:
            ending = ending_of(error, directory)
            if ending is None:
                raise
            print(f"bench: {ending.message}", file=sys.stderr)
            return ending.status


def _measure_and_report(
    arguments: argparse.Namespace, settings: RunSettings, workload: WorkloadSettings, directory: Path
) -> int:
    from tqdm import tqdm

    from ddp_compile.bench.report import format_tables, provenance, write_files

    where = provenance(arguments.device)  # before measuring, since sources may be edited during the run
    with ExitStack() as stack:
        link, world_settings = _link_and_world(arguments, workload, stack)
        world = stack.enter_context(RankWorld(world_settings))
        bar = stack.enter_context(tqdm(unit="stage", leave=False, smoothing=0, disable=None))
        about: dict[str, Any] = {"model": arguments.model, "world_size": world_settings.num_communicating_ranks}
        about |= {"clip": "none" if arguments.clip is None else f"{arguments.clip:g}", "tokens": arguments.tokens}

        def progress(what: str) -> None:
            bar.set_description_str(what)
            bar.update()

        def rows_of(result: RunResult) -> list[SummaryRow]:
            about["parameters"] = next((case.cold.num_parameters for case in result.cases if case.cold is not None), 0)
            return summarize(result.cases, link.names(), result.achieved_gbit, tuple(PEERS), arguments.device == "cpu")

        def save(result: RunResult) -> None:
            write_files(directory, rows_of(result), result, about, {**where, "command": command_line(arguments)})

        def save_so_far(result: RunResult) -> None:
            try:
                save(result)
            except OSError as error:  # all is written once more at the end, when it has been printed
                print(f"bench: not written yet: {error}", file=sys.stderr)

        benchmark = BenchmarkRun(world, link, settings, progress, save_so_far)
        bar.total = benchmark.num_stages
        result = benchmark.measure()
    rows = rows_of(result)
    # Print first: a full disk must not lose the results.
    millions = about["parameters"] / 1e6
    print(f"{arguments.model}, {millions:.1f} M parameters, {about['world_size']} ranks, {where['device']},")
    print(f"clip {about['clip']}, mean over {'tokens' if arguments.tokens else 'ranks'},")
    print(f"{where['machine']}, torch {where['torch']}, Python {where['python']}, commit {where['commit']}\n")
    print(format_tables(rows))
    save(result)
    print(f"\nwrote {directory}: {', '.join(sorted(path.name for path in directory.iterdir()))}")
    return _report_failures(result, directory)


def _report_failures(result: RunResult, directory: Path) -> int:
    failed = [case for case in result.cases if case.error is not None]
    for case in failed:
        print(f"failed: {case.case}: {case.error}", file=sys.stderr)
    if failed:
        print(f"tracebacks are in {directory / 'failures.txt'}", file=sys.stderr)
    return 1 if len(failed) == len(result.cases) else 0


def _checked(arguments: argparse.Namespace, directory: Path) -> tuple[RunSettings, WorkloadSettings]:
    if arguments.model not in WORKLOADS:
        load_function("model", arguments.model, WORKLOADS)
    if arguments.tokens:
        check_tokens(arguments.model)
    names = list(IMPLEMENTATIONS) if arguments.implementations == ["all"] else arguments.implementations
    for name in names:
        implementation_named(name)
    for mode in arguments.modes:
        if mode not in MODES:
            raise ValueError(f"mode {mode!r} is not known; pass some of {', '.join(MODES)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda', but torch sees no CUDA device; pass --device cpu")
    for module in ("tabulate", "tqdm"):
        if find_spec(module) is None:
            raise ValueError(f"the Python package {module} is missing; pip install {module}")
    cases = make_cases(names, arguments.bucket_cap_mb, arguments.modes, arguments.no_sync_every)
    traces = None if arguments.only_steps else directory
    settings = RunSettings(cases=cases, rounds=arguments.rounds, steps=arguments.steps, traces=traces)
    workload = WorkloadSettings(
        model=arguments.model,
        depth=arguments.depth,
        width=arguments.width,
        batch_size=arguments.batch_size,
        optimizer=arguments.optimizer,
        device=arguments.device,
        clip=arguments.clip,
        tokens=arguments.tokens,
    )
    return settings, workload


def make_cases(
    names: Sequence[str], caps: Sequence[float], modes: Sequence[str], no_sync_every: int
) -> tuple[Case, ...]:
    """Every combination that differs from the others; ``local`` and ``communication`` come first."""
    cases: dict[Case, None] = {}
    for name in (LOCAL, COMMUNICATION, *(name for name in names if name not in (LOCAL, COMMUNICATION))):
        for cap in caps[:1] if name in WITHOUT_BUCKETS else caps:
            for mode in ("default",) if name in EAGER else modes:
                case = Case(implementation=name, bucket_cap_mb=cap, mode=mode, no_sync_every=no_sync_every)
                cases[case] = None
    return tuple(cases)


def _link_and_world(
    arguments: argparse.Namespace, workload: WorkloadSettings, stack: ExitStack
) -> tuple[Link, WorldSettings]:
    if rates := _simulated_rates(arguments):
        return SimulatedLink(rates), WorldSettings(
            world_size=1,
            workload=workload,
            simulated_bits_per_second=rates[0].bits_per_second,
            simulated_world_size=arguments.simulated_ranks,
            simulated_latency_s=arguments.simulated_latency_ms / 1000,
        )
    if arguments.device == "cuda":
        return FixedLink("none"), WorldSettings(world_size=arguments.ranks or 1, workload=workload)
    ranks = arguments.ranks or 2
    cores = len(os.sched_getaffinity(0))
    if ranks > cores:
        print(f"{ranks} ranks share {cores} cores, so the figures say little about overlap", file=sys.stderr)
    reason = unavailable_reason()
    if reason is not None:
        print(f"no real links ({reason}); the ranks talk over loopback, unshaped", file=sys.stderr)
        return FixedLink("loopback"), WorldSettings(world_size=ranks, workload=workload)
    for name in remove_stale():
        print(f"deleted {name}, left over from a killed run", file=sys.stderr)
    namespaces = stack.enter_context(NamespacedLink(ranks))
    return ShapedLink(namespaces, arguments.link), WorldSettings(world_size=ranks, workload=workload, link=namespaces)


def _simulated_rates(arguments: argparse.Namespace) -> list[Rate]:
    """The rates to simulate, in one process; empty if the ranks really communicate.

    Raises a ValueError if the links and ranks of this device cannot be measured together.
    """
    ranks, links = arguments.ranks or 1, arguments.link
    if arguments.device == "cuda":
        if ranks > torch.cuda.device_count():
            raise ValueError(f"--ranks {ranks} is more than the {torch.cuda.device_count()} CUDA devices of this host")
        rates = [rate for rate in links if rate.bits_per_second is not None]
    else:
        rates = [rate for rate in links if isinstance(rate, SimulatedRate)]
    if not rates:
        return []
    if len(rates) < len(links):
        raise ValueError(
            f"--link {','.join(map(str, links))} has simulated rates and others; a run has links of one kind, so"
            " measure them apart"
        )
    if ranks > 1:
        raise ValueError(
            f"--ranks {ranks} --link {rates[0]}: a simulated link has one real rank; set the number of pretended ranks"
            " with --simulated-ranks"
        )
    return rates
