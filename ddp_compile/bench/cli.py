"""``python -m ddp_compile bench``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ddp_compile.bench.endings import check_folders, ending_of, one_interrupt
from ddp_compile.bench.implementations import (
    ALGORITHMS,
    COMMUNICATION,
    EAGER,
    IMPLEMENTATIONS,
    LOCAL,
    PEERS,
    WITHOUT_BUCKETS,
    implementation_named,
)
from ddp_compile.bench.link import LinkError, NamespacedLink, remove_stale, unavailable_reason
from ddp_compile.bench.links import FixedLink, ShapedLink, SimulatedLink, SimulatedRate
from ddp_compile.bench.rank_world import RankDiedError, RankWorld, WorldSettings
from ddp_compile.bench.results import SummaryRow, summarize
from ddp_compile.bench.run import BenchmarkRun, Link, RunResult, RunSettings
from ddp_compile.bench.settings import Case, WorkloadSettings
from ddp_compile.bench.training import OPTIMIZERS
from ddp_compile.bench.workloads import LANGUAGE_MODELS, WORKLOADS, check_tokens
from ddp_compile.validation.named_functions import load_function
from ddp_compile.validation.rates import Rate

QUICK = ("ddp-eager", "compile-ddp", "ddp_compile-forward")
MODES = ("default", "reduce-overhead", "max-autotune")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to its parser."""
    _add_cases(parser)
    _add_surroundings(parser)


def _add_cases(parser: argparse.ArgumentParser) -> None:
    own = "default: the model's own"
    parser.add_argument(
        "--model",
        default="gpt-small",
        help=f"{', '.join(WORKLOADS)}, or your own module:function, which takes nothing and returns a model, a function"
        " that makes (inputs, targets) with a torch.Generator, and a loss function (default: %(default)s)",
    )
    parser.add_argument("--depth", type=_positive, help=f"layers of the model ({own})")
    parser.add_argument("--width", type=_positive, help=f"features of a layer ({own})")
    parser.add_argument("--batch-size", type=_positive, help=f"samples of a micro-batch on one rank ({own})")
    parser.add_argument(
        "--implementations",
        type=_words,
        default=list(QUICK),
        metavar="NAME,...",
        help=f"'all', or some of {', '.join(IMPLEMENTATIONS)}, and also {', '.join(ALGORITHMS)}, or your own"
        " module:function, which takes the model and a Case and returns an Implementation (see"
        f" ddp_compile/bench/implementations.py) (default: {','.join(QUICK)}; {LOCAL} and {COMMUNICATION} are always"
        " measured)",
    )
    parser.add_argument(
        "--modes", type=_words, default=["default"], metavar="MODE,...", help=f"{', '.join(MODES)} (default: default)"
    )
    parser.add_argument(
        "--bucket-cap-mb", type=_capacities, default=[25.0], metavar="MIB,...", help="capacities to sweep (default: 25)"
    )
    parser.add_argument(
        "--no-sync-every",
        type=_positive,
        default=1,
        metavar="K",
        help="micro-batches of a step (default: %(default)s)",
    )
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default="sgd",
        help="muon: Muon for the weights of linear layers but the head, AdamW for the rest; on a CPU with Newton-Schulz"
        " iterations in float32 (default: %(default)s)",
    )
    parser.add_argument(
        "--clip",
        type=_positive_float,
        metavar="MAX_NORM",
        help="clip all gradients by their norm: peers with torch's clip_grad_norm_, ours with model.clip_grad_norm_",
    )
    parser.add_argument(
        "--tokens",
        action="store_true",
        help=f"pad sequences of uneven lengths, and train the mean over tokens ({', '.join(LANGUAGE_MODELS)}): peers"
        " with a blocking all-reduce of the count before the forward, ours with model.normalize_by",
    )


def _add_surroundings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--link",
        type=_rates,
        metavar="RATE,...",
        help="rates such as 1gbit, or none for an unshaped link; real ones between CPU ranks (needs root and"
        " iproute2), simulated ones on one CUDA device; simulated:1gbit for one CPU rank on a link that takes time but"
        " no computation (default: 1gbit,none; on CUDA 1gbit)",
    )
    parser.add_argument("--ranks", type=_positive, help="number of ranks (default: 2; 1 on CUDA)")
    parser.add_argument(
        "--simulated-ranks",
        type=_positive,
        default=8,
        help="ranks that a simulated link pretends to have (default: %(default)s)",
    )
    parser.add_argument(
        "--simulated-latency-ms",
        type=_positive_float,
        default=0.05,
        help="of each collective of a simulated link (default: %(default)s)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument(
        "--rounds", type=_positive, default=12, help="turns of each implementation on each link (default: %(default)s)"
    )
    parser.add_argument(
        "--steps",
        type=_positive,
        default=2,
        help="timed steps of a turn, after one that is not timed (default: %(default)s)",
    )
    parser.add_argument("--only-steps", action="store_true", help="no warm starts, memory or profiles")
    parser.add_argument("--output", type=Path, help="folder for the results (default: runs/bench/DATE)")


def command_line(arguments: argparse.Namespace) -> str:
    """The command line for these arguments, with the defaults written out, since they may change."""
    words = ["python", "-m", "ddp_compile", "bench"]
    for name, value in vars(arguments).items():
        if name == "command" or value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words.append(",".join(map(str, value)) if isinstance(value, list) else str(value))
    return shlex.join(words)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print tables, write files. Returns the exit status."""
    directory = arguments.output or Path("runs/bench") / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    if arguments.link is None:
        arguments.link = _rates("1gbit" if arguments.device == "cuda" else "1gbit,none")
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

    Raises:
        ValueError: The links and ranks of this device cannot be measured together.
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


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number, at least 1")
    return int(text)


def _words(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise argparse.ArgumentTypeError("name at least one")
    return words


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be a positive number")
    return value


def _capacities(text: str) -> list[float]:
    return [_positive_float(word) for word in _words(text)]


def _rate(word: str) -> Rate:
    rate = word.removeprefix("simulated:")
    if rate == word:
        return Rate.parse(word)
    if Rate.parse(rate).bits_per_second is None:
        raise ValueError(f"{word}: a simulated link has a rate; pass for example simulated:1gbit")
    return SimulatedRate.parse(rate)


def _rates(text: str) -> list[Any]:
    try:
        return [_rate(word) for word in _words(text)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
