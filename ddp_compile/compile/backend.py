"""The Dynamo backends: for each graph, plan -> passes -> inner compiler."""

import hashlib
import json
import logging
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, fx

from ddp_compile import torch_internals
from ddp_compile.compile.graph_compiler import compile_graph, compile_partitions
from ddp_compile.compile.graph_dump import dump_buckets, dump_graph, format_graph_buckets
from ddp_compile.compile.graph_report import GraphReport, parts_of
from ddp_compile.compile.pipelines import BACKWARD_SPLIT, FOR_INDUCTOR, FORWARD_SPLIT, WHOLE_FORWARD, pipelines_version
from ddp_compile.config import SplitMode
from ddp_compile.errors import CompilationError, number_of, shorten_names, this_rank, warning_level
from ddp_compile.graph_ops import await_before, gathers_parameters, watch_parameters
from ddp_compile.kernels.contract.layout import is_non_overlapping_and_dense
from ddp_compile.passes.analysis.grad_ready_order import grad_ready_order
from ddp_compile.passes.analysis.graph_nodes import requires_grad
from ddp_compile.passes.forward.partition_graph import partition_names
from ddp_compile.passes.pipeline import AotContext, Declined, PassContext, PassResult, run_pipeline
from ddp_compile.plan.builder import PlanBuilder
from ddp_compile.plan.spec import BucketSpec
from ddp_compile.torch_internals import GraphEdit, InnerBackend

log = logging.getLogger(__name__)


class _Graph(NamedTuple):
    """A graph with gradients for buckets, before it is compiled."""

    number: int
    inputs: Sequence[Any]  #: Dynamo's example inputs
    parameter_of: Mapping[str, int]  #: index of the reduced parameter that a node stands for, by the node's name
    buckets: tuple[BucketSpec, ...]  #: with gradients from the graph
    table: str  #: of the buckets, for dumps

    @property
    def name(self) -> str:
        return f"graph {self.number}"


@dataclass(eq=False, repr=False)  # Dynamo compares backends by identity, and takes str() for a name
class TrainingBackend:
    """Compiles the training graphs of one module."""

    inner: InnerBackend  #: compiles each graph, or each part of one
    builder: PlanBuilder  #: the module's plan, which every graph extends until it is sealed
    parameters: Mapping[int, int]  #: index of each reduced parameter, by ``id`` of the parameter
    modules: Mapping[int, str]  #: name of each submodule, by ``id``
    #: ``"forward"`` cuts graphs at bucket boundaries, ``"backward"`` leaves them whole and launches buckets inside the
    #: backward, ``"auto"`` does the latter with graphs that cannot be cut for every bucket.
    split: SplitMode
    launches_in_backward: bool
    reducer_id: int  #: number by which compiled code finds the reducer
    moves_gradients: bool  #: whether such a backward may move gradients to the flat buffers
    reports: list[GraphReport] = field(default_factory=list, init=False)
    #: For each graph run since a forward began, whether it is all of the forward.
    runs: list[bool] = field(default_factory=list, init=False)
    root: Callable[..., Any] | None = field(default=None, init=False)  #: the function at whose frame Dynamo starts

    @property
    def has_launches(self) -> bool:
        """Whether a graph was compiled whose backward hands buckets over."""
        return any(report.launches_in_backward for report in self.reports)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph; Dynamo calls this for each frame, and again for each recompile."""
        is_whole = self.root is not None and torch_internals.is_whole_frame(gm, self.root)
        num_reports = len(self.reports)
        try:
            compiled = self._compile(gm, example_inputs)
        except Exception:
            del self.reports[num_reports:]  # the graph does not run
            raise

        def run(*arguments: Any) -> Any:
            self.runs.append(is_whole)
            return compiled(*arguments)

        return run

    def _compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Decide whether to cut the graph, to launch buckets inside its backward, or neither."""
        number = len(self.reports)
        name = f"graph {number}"
        if torch_internals.loses_gradients_of_collectives(gm):
            raise _loses_gradients(name)
        parameter_of = self._find_parameters(gm, example_inputs)
        order = list(grad_ready_order(gm, parameter_of))
        has_backward = any(requires_grad(node) for node in gm.graph.output_node().all_input_nodes)
        if not order or not has_backward:  # no backward if the graph was made under no_grad
            log.info("%s: not split: no reduced parameter gets a gradient in it", name)
            self.reports.append(GraphReport(number, (), parts_of(gm, parameter_of)))
            compiled = compile_graph(self.inner, gm, example_inputs, name)
            return await_before(compiled, parameter_of.values(), self.reducer_id)
        buckets = self.builder.add_frame(order)
        graph = _Graph(number, example_inputs, parameter_of, tuple(buckets), format_graph_buckets(buckets, order))
        in_backward = self._launches_in_backward(name)
        if self.split == "backward" and in_backward:
            return self._compile_whole(gm, graph)
        result = self._cut(gm, graph, in_backward)
        if in_backward and len(buckets) > 1 and not partition_names(result.gm):
            log.info("%s: left whole, since cutting it in the forward would not launch every bucket early", name)
            return self._compile_whole(result.gm, graph, result.declined)
        return self._compile_parts(result, graph)

    def _cut(self, gm: fx.GraphModule, graph: _Graph, every_cut_or_none: bool) -> PassResult:
        ctx = PassContext(
            parameter_of=graph.parameter_of,
            buckets=graph.buckets,
            graph_name=graph.name,
            every_cut_or_none=every_cut_or_none,
        )
        passes = FORWARD_SPLIT if self.split != "none" and _parts_are_equal(graph) else ()
        result = run_pipeline(gm, ctx, passes, dump_buckets(graph.name, graph.table))
        for name in partition_names(result.gm):
            dump_graph(graph.name, name, getattr(result.gm, name))
        return result

    def _compile_parts(self, result: PassResult, graph: _Graph) -> Callable[..., Any]:
        parts = parts_of(result.gm, graph.parameter_of)
        report = GraphReport(graph.number, graph.buckets, parts, result.declined)
        self.reports.append(report.with_places_of(result.gm, self.modules))
        num_buckets, num_parts = number_of(len(graph.buckets), "bucket"), number_of(len(parts), "partition")
        log.info("%s: %s, %s", graph.name, num_buckets, num_parts)
        if len(parts) == 1:
            return self._compile_part(result.gm, graph.inputs, graph.name, parts[0].reads)
        reads_of = dict(zip(partition_names(result.gm), (part.reads for part in parts), strict=True))

        def compile_partition(gm: fx.GraphModule, inputs: Sequence[Any], name: str) -> Callable[..., Any]:
            return self._compile_part(gm, inputs, f"{name} of {graph.name}", reads_of[name])

        return compile_partitions(result.gm, graph.inputs, compile_partition)

    def _compile_part(
        self, gm: fx.GraphModule, inputs: Sequence[Any], name: str, reads: Collection[int]
    ) -> Callable[..., Any]:
        compiled = compile_graph(self.inner, gm, inputs, f"{name} ({self._named(reads)})")
        return await_before(compiled, reads, self.reducer_id)

    def _compile_whole(
        self, gm: fx.GraphModule, graph: _Graph, not_cut: tuple[Declined, ...] = ()
    ) -> Callable[..., Any]:
        """Compile a graph whose backward launches buckets."""
        placeholders = enumerate(gm.graph.find_nodes(op="placeholder"))
        parameter_of_input = {i: graph.parameter_of[n.name] for i, n in placeholders if n.name in graph.parameter_of}
        (part,) = parts_of(gm, graph.parameter_of)
        ctx = AotContext(
            parameter_of_input=parameter_of_input,
            buckets=graph.buckets,
            reducer_id=self.reducer_id,
            graph_name=graph.name,
            reads=part.reads,
            strides=_strides(graph.inputs, parameter_of_input) if self.moves_gradients else {},
        )
        report = GraphReport(graph.number, graph.buckets, (part,), launches_in_backward=True, not_cut=not_cut)
        reports = self.reports
        reports.append(report := report.with_places_of(gm, self.modules))
        log.info("%s: %s, launched inside its backward", graph.name, number_of(len(graph.buckets), "bucket"))

        def insert_launches(backward: fx.GraphModule, is_inductors: bool) -> None:
            passes = (*BACKWARD_SPLIT, *FOR_INDUCTOR) if is_inductors else BACKWARD_SPLIT
            result = run_pipeline(backward, ctx, passes, dump_buckets(f"{graph.name} backward", graph.table))
            reports[graph.number] = report._replace(declined=result.declined)

        def insert_waits(forward: fx.GraphModule) -> None:
            name = f"{graph.name} forward"
            run_pipeline(forward, replace(ctx, graph_name=name), WHOLE_FORWARD, dump_buckets(name, graph.table))

        waits_inside = gathers_parameters(self.reducer_id)
        edit = GraphEdit(insert_launches, _cache_key(ctx, waits_inside), insert_waits if waits_inside else None)
        name = f"{graph.name} ({self._named(part.reads)})"
        compiled = compile_graph(self.inner, gm, graph.inputs, name, edit)
        if not waits_inside:
            compiled = await_before(compiled, part.reads, self.reducer_id)
        buckets = [tuple(gradient.index for gradient in bucket.gradients) for bucket in graph.buckets]
        return watch_parameters(compiled, graph.inputs, parameter_of_input, buckets, self.reducer_id)

    def _launches_in_backward(self, name: str) -> bool:
        if not self.launches_in_backward or not torch_internals.compiled_autograd_is_on():
            return self.launches_in_backward
        if self.split == "auto":
            log.info("%s: not launched inside its backward, since compiled autograd compiles another one", name)
            return False
        raise ValueError(
            "split='backward' cannot be used with compiled autograd (torch._dynamo.config.compiled_autograd=True),"
            " which compiles another backward than the one that launches buckets; turn it off, or pass"
            " split='forward'"
        )

    def _named(self, parameters: Iterable[int]) -> str:
        names = [self.builder.gradients[index].fqn for index in parameters]
        return shorten_names(names) or "no parameters"

    def _find_parameters(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[str, int]:
        """Node names of the reduced parameters. Dynamo passes the parameters themselves as example inputs."""
        attributes = gm.graph.find_nodes(op="get_attr")
        values = [
            *zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True),
            *((node, operator.attrgetter(str(node.target))(gm)) for node in attributes),
        ]
        known = self.parameters
        return {n.name: known[id(value)] for n, value in values if isinstance(value, Tensor) and id(value) in known}


def _loses_gradients(name: str) -> CompilationError:
    return CompilationError(
        f"{this_rank()}: {name} contains a collective of torch.distributed.nn, but torch {torch.__version__} computes"
        " zeros for gradients that pass through one in compiled code; decorate the function that calls it with"
        " torch.compiler.disable, or install torch 2.12 or newer"
    )


def _strides(example_inputs: Sequence[Any], parameter_of_input: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """Strides, by index, of reduced parameters without gaps in memory, whose places in flat buffers have the same."""
    return {
        index: example_inputs[position].stride()
        for position, index in parameter_of_input.items()
        if is_non_overlapping_and_dense(example_inputs[position])
    }


def _cache_key(ctx: AotContext, waits_inside: bool) -> str:
    """A digest of everything but the graph itself that the edited graphs depend on."""
    buckets = [[gradient.index for gradient in bucket.gradients] for bucket in ctx.buckets]
    numbers = [sorted(ctx.parameter_of_input.items()), sorted(ctx.strides.items())]
    described = [pipelines_version(), ctx.reducer_id, buckets, *numbers, waits_inside]
    return f"ddp_compile {hashlib.sha256(json.dumps(described).encode()).hexdigest()}"


def _parts_are_equal(graph: _Graph) -> bool:
    """Whether the ranks hold equal-sized parts of every DTensor input, so that all cut the graph at the same places.

    Buckets follow the sizes of the parts. If the cuts differed, the ranks would run the collectives that redistribute
    gradients after a partition's backward in different orders.
    """
    if all(torch_internals.has_equal_parts(value) for value in graph.inputs):
        return True
    log.info("%s: not cut, since a DTensor in it has parts of different sizes", graph.name)
    return False


def launches_in_backward(split: SplitMode, inner: InnerBackend, process_group: dist.ProcessGroup) -> bool:
    """Whether compiled backwards may launch buckets, the same on every rank; raises like `editing_backend`."""
    if split not in ("auto", "backward"):
        return False
    can_edit = torch_internals.editing_backend(inner) is not None
    if split == "backward" and not can_edit:
        log.log(
            warning_level(process_group),
            "split='backward' needs a backend that is known to compile the operators of ddp_compile (inductor,"
            f" compile_fx, aot_eager), which {getattr(inner, 'compiler_name', inner)} is not: graphs are cut in the"
            " forward instead",
        )
    return can_edit


class EvaluationBackend:
    """Compiles the graphs of one module without gradients, or in evaluation mode, as they are.

    Dynamo keeps every backend for good, so neither this one nor `TrainingBackend` may hold a reference to the module.
    """

    def __init__(self, inner: InnerBackend, kind: str = "evaluation graph") -> None:
        self.inner = inner
        self.kind = kind
        self.num_graphs = 0

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        name = f"{self.kind} {self.num_graphs}"
        self.num_graphs += 1
        return compile_graph(self.inner, gm, example_inputs, name)


class RegionBackend(EvaluationBackend):
    """Compiles training graphs that several modules share, unchanged, so that they contain nothing of one module."""

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if torch_internals.loses_gradients_of_collectives(gm):
            raise _loses_gradients(f"{self.kind} {self.num_graphs}")
        dump_buckets(f"{self.kind} {self.num_graphs}", "those of all modules that share the graph")("graph before", gm)
        return super().__call__(gm, example_inputs)
