"""``python -m ddp_compile plan``: predicted steps on ranks that are not here, and the buckets that are best there.

Note [Times without a device]
Without ``--profile``, one forward and one backward run eagerly on fake tensors. Each operator takes the time of its
floating-point operations or of its bytes, whichever is longer, at the speed that the arguments state. That gives the
length of the forward, when it first reads each parameter, and when each gradient is ready.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ddp_compile import torch_internals
from ddp_compile.commands.users_step import RETURNS, TracingError, UsersStep, loaded, raising_at, users_step
from ddp_compile.config import cap_bytes_from_mib, caps_from_mib
from ddp_compile.plan.costs import Computation, Link
from ddp_compile.plan.scenarios import Model, Prediction, predictions
from ddp_compile.report.costs import all_reduce_of, computation_of
from ddp_compile.report.steps import StepReport
from ddp_compile.runtime.algorithms.all_reduce import AllReduce
from ddp_compile.runtime.sharded.algorithm import ShardedAlgorithm
from ddp_compile.validation.description import describe_gradients
from ddp_compile.validation.rates import Rate, parse_seconds

#: Of a launch, by which a launch delays the computation if no profile says more.
_LAUNCH_S = 10e-6
#: AdamW reads parameter, gradient and two states, and writes all but the gradient.
_PASSES_OF_ADAMW = 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to its parser."""
    parser.add_argument("function", metavar="module:function", help=f"a function without arguments; it must {RETURNS}")
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--bandwidth", metavar="RATE", help="of a node's link in each direction, such as 100gbit")
    parser.add_argument("--latency", default="20us", metavar="TIME", help="between two nodes (default: %(default)s)")
    parser.add_argument("--intra-node", type=int, default=1, metavar="K", help="ranks that share a node's link")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="JSON of model.measure(): times of this model")
    parser.add_argument("--tflops", type=float, default=100.0, help="of a device, if no profile says (default: 100)")
    parser.add_argument(
        "--memory-bandwidth", type=float, default=1500.0, metavar="GB/S", help="of a device (default: 1500)"
    )
    parser.add_argument(
        "--max-bucket-cap-mb", type=float, metavar="MIB", help="largest bucket of several gradients in optimal plans"
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the better one of the optimal plans")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw predicted steps over world sizes")


def run(arguments: argparse.Namespace) -> int:
    """Predict, print, write files. Returns the exit status: 2 for wrong input or code that raises."""
    try:
        _check(arguments)
        model, said = _model(arguments)
        link_of = _link(arguments)
        found = list(predictions(model, link_of(arguments.world_size)))
        print(said)
        print(_table(found))
        print(_advice(found, arguments.save))
        if arguments.save is not None:
            saved = _best([each for each in found if each.plan is not None])
            assert saved.plan is not None
            saved.plan.save(arguments.save)
            print(f"{arguments.save} has the plan of: {saved.name}")
        if arguments.png is not None:
            _draw(model, link_of, arguments)
    except (ValueError, TracingError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"plan: {error}; pip install {error.name}", file=sys.stderr)
        return 2
    return 0


def _check(arguments: argparse.Namespace) -> None:
    for setting in ("tflops", "memory_bandwidth"):
        if not 0 < (value := getattr(arguments, setting)) < float("inf"):
            raise ValueError(f"--{setting.replace('_', '-')} {value} must be above zero and finite")
    if arguments.bandwidth is None and arguments.profile is None:
        raise ValueError("the speed of the link is not known; pass --bandwidth, for example 100gbit, or --profile")
    if arguments.png is not None and arguments.bandwidth is None:
        raise ValueError("--png draws other world sizes than that of the profile; pass --bandwidth too")
    for path in filter(None, [arguments.save, arguments.png]):
        if not path.parent.is_dir():
            raise ValueError(f"{path} cannot be written, since there is no folder {path.parent}; make it first")


def _link(arguments: argparse.Namespace) -> Callable[[int], Link]:
    # Without --bandwidth the profile's transfers stand for the link, and its rate is not used.
    rate = Rate.parse(arguments.bandwidth or "100gbit").bits_per_second
    if rate is None:
        raise ValueError(f"--bandwidth {arguments.bandwidth} is not a rate; pass for example 100gbit")
    latency_s = parse_seconds(arguments.latency)
    return lambda world_size: Link(
        world_size=world_size,
        latency_s=latency_s,
        bytes_per_second=rate / 8,
        ranks_per_node=arguments.intra_node,
    )


def _model(arguments: argparse.Namespace) -> tuple[Model, str]:
    """The model with its times, and a line that says where they are from."""
    function = loaded(arguments.function)
    with torch_internals.quiet_fake_mode() as fake_mode:
        with raising_at(f"{arguments.function}()"), fake_mode:
            returned = function()
        step = users_step(arguments.function, returned, fake_mode)
        named = {name: p for name, p in step.module.named_parameters() if p.requires_grad}
        gradients = describe_gradients(step.module, named)
        bytes_per_s = arguments.memory_bandwidth * 1e9
        collective = None
        if arguments.profile is None:
            computation = _traced(step, list(named.values()), fake_mode, arguments.tflops * 1e12, bytes_per_s)
            said = f"operations and bytes at {arguments.tflops:g} TFLOP/s and {arguments.memory_bandwidth:g} GB/s"
        else:
            report = _report(arguments.profile)
            sizes = [gradient.num_bytes for gradient in gradients]
            computation = computation_of(report, list(named), sizes)
            said = f"{arguments.profile}, {len(report.steps)} steps"
            if not computation.step_s_per_byte:
                said += "; its optimizer's time is not known and left out"
            if arguments.bandwidth is None:
                _refuse_other_algorithm(report)
                collective = all_reduce_of(report, arguments.world_size)
    limit_mib = arguments.max_bucket_cap_mb
    model = Model(
        gradients=gradients,
        computation=computation,
        default_caps_bytes=caps_from_mib(None, 1.0, "cuda"),
        collective=collective,
        largest_bytes=None if limit_mib is None else cap_bytes_from_mib("--max-bucket-cap-mb", limit_mib),
    )
    size = f"{len(gradients)} gradients, {model.num_bytes / 2**20:.1f} MiB"
    if collective is not None:
        rate = f"{collective.latency_s * 1e6:.0f} us and {collective.s_per_byte * 1e12:.1f} us/MB for an all-reduce"
    else:
        rate = f"{arguments.bandwidth}, {arguments.latency}, {arguments.intra_node} ranks a node"
    alone = f"{model.alone_s * 1e3:.2f} ms a step on one rank"
    return model, f"{size}; {alone}, from {said}\n{arguments.world_size} ranks, link: {rate}"


def _report(path: Path) -> StepReport:
    try:
        return StepReport.from_json(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--profile {path} cannot be read: {error}") from error


def _refuse_other_algorithm(report: StepReport) -> None:
    if report.algorithm not in (AllReduce.name, ShardedAlgorithm.name):
        raise ValueError(
            f"the profile is of the algorithm {report.algorithm!r}, whose transfers do not tell what an all-reduce"
            " takes; pass --bandwidth and --latency, or a profile of GradientAllReduce() or of a sharded optimizer"
        )


def _traced(
    step: UsersStep, parameters: Sequence[Any], fake_mode: Any, flops_per_s: float, bytes_per_s: float
) -> Computation:
    """See Note [Times without a device]."""
    index_of = {id(parameter): i for i, parameter in enumerate(parameters)}
    clock = torch_internals.OperatorTimes(flops_per_s, bytes_per_s, index_of)
    ready_s: dict[int, float] = {}
    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: ready_s.update({index: clock.now_s}))
    with fake_mode, clock:
        with raising_at("the forward"):
            loss = step.loss(step.module(*step.args, **step.kwargs))
        forward_s = clock.now_s
        with raising_at("the backward"):
            loss.backward()
    if unused := [index for index in range(len(parameters)) if index not in ready_s]:
        raise ValueError(
            f"{len(unused)} of {len(parameters)} parameters get no gradient in the backward, so when they are ready is"
            " not known; set requires_grad=False for them, or return a loss that uses them"
        )
    return Computation(
        ready_s=[ready_s[index] - forward_s for index in range(len(parameters))],
        needed_s=[min(forward_s, clock.first_read_s.get(index, 0.0)) for index in range(len(parameters))],
        forward_s=forward_s,
        launch_s=_LAUNCH_S,
        step_s_per_byte=_PASSES_OF_ADAMW / bytes_per_s,
    )


def _table(found: Sequence[Prediction]) -> str:
    from tabulate import tabulate

    rows = [
        {
            "": each.name,
            "step ms": f"{each.step_s * 1e3:.2f}",
            "exposed ms": f"{each.exposed_s * 1e3:.2f}",
            "memory MiB": f"{each.memory_bytes / 2**20:.0f}",
            "efficiency": f"{each.efficiency:.0%}",
            "same gradients": "yes" if each.is_exact else "no",
        }
        for each in found
    ]
    return tabulate(rows, headers="keys", disable_numparse=True, colalign=("left", *["right"] * 4, "left"))


def _best(found: Sequence[Prediction]) -> Prediction:
    return min(found, key=lambda each: each.step_s)


def _advice(found: Sequence[Prediction], saved: Path | None) -> str:
    """The best prediction, and the best one with the same gradients, each with its line of code."""
    best, exact = _best(found), _best([each for each in found if each.is_exact])
    lines = []
    for said, each in {"best": best, "best with the same gradients": exact}.items():
        if said != "best" and each is best:
            continue
        faster = found[0].step_s / each.step_s
        code = each.code.replace("FILE", str(saved)) if saved is not None else each.code
        lines.append(f"{said}: {each.name}, {faster:.2f} times as fast as the default\n    {code}")
        if saved is None and each.plan is not None:
            lines.append("    (pass --save FILE to write the plan)")
    return "\n".join(lines)


def _draw(model: Model, link_of: Callable[[int], Link], arguments: argparse.Namespace) -> None:
    """A chart of the predicted steps over world sizes, twice that of the arguments at most."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sizes = [max(2, arguments.intra_node)]
    while sizes[-1] * 2 <= 2 * arguments.world_size:
        sizes.append(sizes[-1] * 2)
    lines: dict[str, list[float]] = {}
    for size in sizes:
        for each in predictions(model, link_of(size)):
            lines.setdefault(each.name, []).append(each.step_s * 1e3)
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for name, times in lines.items():
        axes.plot(sizes, times, marker="o", label=name)
    axes.axhline(model.alone_s * 1e3, color="gray", linestyle=":", label="one rank alone")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("ranks")
    axes.set_ylabel("predicted step, ms")
    axes.set_title(f"{arguments.function}, {arguments.bandwidth}, {arguments.latency}")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    FigureCanvasAgg(figure).print_figure(arguments.png, dpi=120)
