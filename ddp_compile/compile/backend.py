"""The Dynamo backends: for each graph, plan -> passes -> inner compiler."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import CodeType, MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ddp_compile import torch_internals
from ddp_compile.compile.backward_pieces import compile_whole_or_in_pieces
from ddp_compile.compile.graph_compiler import GraphCompiler
from ddp_compile.compile.graph_dump import GraphDump, format_graph_buckets, trace_cut
from ddp_compile.compile.partitions import compile_partitions
from ddp_compile.compile.pipelines import BACKWARD_SPLIT, FORWARD_SPLIT, WHOLE_FORWARD, pipelines_version
from ddp_compile.config import SplitMode
from ddp_compile.errors import CompilationError, number_of, shorten_names, this_rank
from ddp_compile.graph_ops import await_before, gathers_parameters, watch_parameters
from ddp_compile.kernels.contract.layout import is_non_overlapping_and_dense
from ddp_compile.passes.analysis.grad_ready_order import grad_ready_order
from ddp_compile.passes.analysis.graph_nodes import requires_grad
from ddp_compile.passes.forward.partition_graph import partition_names
from ddp_compile.passes.pipeline import AotContext, Declined, PassContext, run_pipeline
from ddp_compile.plan.builder import PlanBuilder
from ddp_compile.plan.spec import BucketSpec
from ddp_compile.torch_internals import BackwardPass, GraphEdit, UserLine

log = logging.getLogger(__name__)


class GraphPart(NamedTuple):
    """A part of a graph that is compiled by itself."""

    reads: tuple[int, ...]  #: indices of the reduced parameters that it reads
    first_node: str | None = None  #: name of the node before which the graph is cut; None for the first part


class GraphReport(NamedTuple):
    """What was done with one graph."""

    graph: int  #: ordinal among the graphs that Dynamo made of the module, recompiled ones included
    buckets: tuple[BucketSpec, ...]  #: with gradients from the graph, numbered as when it was compiled
    parts: tuple[GraphPart, ...]  #: graphs that were compiled; one if nothing was cut
    #: The cuts that were not made as planned; with ``launches_in_backward``, the buckets that are not launched inside
    #: the backward. Empty for compiled code from a cache.
    declined: tuple[Declined, ...]
    launches_in_backward: bool = False
    not_cut: tuple[Declined, ...] = ()  #: of a graph left whole since it could not be cut for every bucket
    lines: Mapping[str, UserLine] = MappingProxyType({})  #: of the user, by name of the nodes that are named here

    @property
    def num_buckets(self) -> int:
        return len(self.buckets)

    @property
    def num_partitions(self) -> int:
        return len(self.parts)


class TrainingBackend:
    """Compiles the training graphs of one module.

    Args:
        builder: The module's plan, which every graph extends until it is sealed.
        parameters: Index of each reduced parameter, by ``id`` of the parameter.
        split: ``"forward"`` cuts graphs at bucket boundaries, ``"backward"`` leaves them whole and launches buckets
            inside the backward, ``"auto"`` does the latter with graphs that cannot be cut for every bucket.
        reducer: Number by which a compiled backward finds the reducer.
        moves_gradients: Whether such a backward may move gradients to the flat buffers.
    """

    def __init__(
        self,
        compiler: GraphCompiler,
        builder: PlanBuilder,
        parameters: Mapping[int, int],
        split: SplitMode,
        launches_in_backward: bool,
        reducer: int,
        moves_gradients: bool,
    ) -> None:
        self.compiler = compiler
        self.builder = builder
        self.parameters = parameters
        self.split = split
        self.reducer = reducer
        self.reports: list[GraphReport] = []
        self.launches_in_backward = launches_in_backward
        self.moves_gradients = moves_gradients
        self.num_runs = 0  #: of compiled graphs
        self.num_whole_runs = 0  #: of those that are all of the module's forward
        self._frames: dict[int, weakref.ref[CodeType]] = {}  # by identity: copies of a code object are equal
        self.root: Callable[..., Any] | None = None  #: the function at whose frame Dynamo starts

    @property
    def has_launches(self) -> bool:
        """Whether a graph was compiled whose backward hands buckets over."""
        return any(report.launches_in_backward for report in self.reports)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph; Dynamo calls this for each frame, and again for each recompile."""
        is_whole = self.root is not None and torch_internals.is_whole_frame(gm, self.root)
        if (code := torch_internals.code_being_compiled(gm)) is not None:
            self._frames[id(code)] = weakref.ref(code)
        compiled = self._compile(gm, example_inputs)

        def run(*arguments: Any) -> Any:
            self.num_runs += 1
            self.num_whole_runs += is_whole
            return compiled(*arguments)

        return run

    def forget(self) -> None:
        """Forget all graphs, also those after graph breaks, so that the next forward compiles them by the plan.

        What Dynamo has compiled of frames after a graph break goes for other modules of the class too, since they
        share its code.
        """
        self.reports = []  # a backward that is compiled late writes to the list that it knows
        frames, self._frames = self._frames, {}
        for reference in frames.values():
            if (code := reference()) is not None:
                torch_internals.forget_code(code)

    def _compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        ordinal = len(self.reports)
        name = f"graph {ordinal}"
        if torch_internals.loses_gradients_of_collectives(gm):
            raise _loses_gradients(name)
        parameter_of = self._find_parameters(gm, example_inputs)
        order = grad_ready_order(gm, parameter_of)
        has_backward = any(requires_grad(node) for node in gm.graph.output_node().all_input_nodes)
        if not order or not has_backward:  # no backward if the graph was made under no_grad
            log.info("%s: not split: no reduced parameter gets a gradient in it", name)
            self.reports.append(GraphReport(ordinal, (), (GraphPart(tuple(parameter_of.values())),), ()))
            return await_before(self.compiler.compile(gm, example_inputs, name), parameter_of.values(), self.reducer)
        buckets = self.builder.add_frame([entry.parameter for entry in order])
        table = format_graph_buckets(buckets, [entry.parameter for entry in order])
        launches_in_backward = self._launches_in_backward(name)
        if self.split == "backward" and launches_in_backward:
            return self._compile_whole(gm, example_inputs, name, parameter_of, buckets, table)

        def read_by(part: Any) -> list[int]:
            return [parameter_of[node.name] for node in part.graph.nodes if node.name in parameter_of]

        ctx = PassContext(
            parameter_of=parameter_of, buckets=tuple(buckets), graph_name=name, every_cut_or_none=launches_in_backward
        )
        passes = FORWARD_SPLIT if self.split != "none" and _parts_are_equal(name, example_inputs) else ()
        result = run_pipeline(gm, ctx, passes, [GraphDump(name, table)])
        parts = _parts(result.gm, parameter_of)
        if len(parts) == 1 < len(buckets) and launches_in_backward:
            log.info("%s: left whole, since cutting it in the forward would not launch every bucket early", name)
            return self._compile_whole(result.gm, example_inputs, name, parameter_of, buckets, table, result.declined)
        log.info("%s: %s, %s", name, number_of(len(buckets), "bucket"), number_of(len(parts), "partition"))
        lines = _lines_of(result.gm, [declined.node for declined in result.declined], parts)
        self.reports.append(GraphReport(ordinal, tuple(buckets), parts, result.declined, lines=lines))
        names = partition_names(result.gm) or ["whole graph"]
        trace_cut(name, {part: each.reads for part, each in zip(names, parts, strict=True)}, buckets, self.builder)

        def compile_part(gm: fx.GraphModule, inputs: Sequence[Any], part: str) -> Callable[..., Any]:
            reads = read_by(gm)
            compiled = self.compiler.compile(gm, inputs, f"{part} ({self._named(reads)})")
            return await_before(compiled, reads, self.reducer)

        if len(parts) == 1:
            return compile_part(result.gm, example_inputs, name)
        return compile_partitions(
            result.gm, example_inputs, lambda gm, inputs, part: compile_part(gm, inputs, f"{part} of {name}")
        )

    def _compile_whole(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        name: str,
        parameter_of: Mapping[str, int],
        buckets: Sequence[BucketSpec],
        table: str,
        not_cut: tuple[Declined, ...] = (),
    ) -> Callable[..., Any]:
        placeholders = gm.graph.find_nodes(op="placeholder")
        parameter_of_input = {
            i: parameter_of[node.name] for i, node in enumerate(placeholders) if node.name in parameter_of
        }
        reads, num_failures = list(parameter_of.values()), len(self.compiler.failures)
        ctx = AotContext(
            parameter_of_input=parameter_of_input,
            buckets=tuple(buckets),
            reducer=self.reducer,
            graph_name=name,
            reads=tuple(reads),
            strides=_strides(example_inputs, parameter_of_input) if self.moves_gradients else {},
        )
        reports, place = self.reports, len(self.reports)
        parts = (GraphPart(ctx.reads),)
        lines = _lines_of(gm, [declined.node for declined in not_cut], parts)
        report = GraphReport(place, ctx.buckets, parts, (), launches_in_backward=True, not_cut=not_cut, lines=lines)
        self.reports.append(report)

        def insert_launches(backward: fx.GraphModule, of_the_compiler: Sequence[BackwardPass]) -> None:
            dump = GraphDump(f"{name} backward", table)
            result = run_pipeline(backward, ctx, [*BACKWARD_SPLIT, *of_the_compiler], [dump])
            reports[place] = report._replace(declined=result.declined)

        log.info("%s: %s, launched inside its backward", name, number_of(len(buckets), "bucket"))
        trace_cut(name, {"whole graph": reads}, buckets, self.builder)
        compile_edited = functools.partial(compile_whole_or_in_pieces, name=f"{name} backward")
        wait_inside = self._waiter(ctx, table)
        edit = GraphEdit(insert_launches, _cache_key(ctx, wait_inside is not None), compile_edited, wait_inside)
        compiled = self.compiler.compile(gm, example_inputs, f"{name} ({self._named(reads)})", edit)
        if wait_inside is None or len(self.compiler.failures) > num_failures:
            compiled = await_before(compiled, reads, self.reducer)
        param_indices = [tuple(gradient.index for gradient in bucket.gradients) for bucket in buckets]
        return watch_parameters(compiled, example_inputs, parameter_of_input, param_indices, ctx.reducer)

    def _waiter(self, ctx: AotContext, table: str) -> Callable[[fx.GraphModule], None] | None:
        """The edit that inserts waits for parameters into a forward; None if the graph waits before it runs."""
        if not (gathers_parameters(self.reducer) and self.compiler.can_edit_forwards()):
            return None
        forward_ctx = replace(ctx, graph_name=f"{ctx.graph_name} forward")

        def insert_waits(forward: fx.GraphModule) -> None:
            run_pipeline(forward, forward_ctx, WHOLE_FORWARD, [GraphDump(forward_ctx.graph_name, table)])

        return insert_waits

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


def _parts(gm: fx.GraphModule, parameter_of: Mapping[str, int]) -> tuple[GraphPart, ...]:
    """The partitions of a graph, or all of it."""

    def reads(part: fx.GraphModule) -> tuple[int, ...]:
        return tuple(parameter_of[node.name] for node in part.graph.nodes if node.name in parameter_of)

    partitions = [getattr(gm, name) for name in partition_names(gm)]
    first_nodes = [next(node.name for node in part.graph.nodes if node.op.startswith("call")) for part in partitions]
    parts = (GraphPart(reads(part), name) for part, name in zip(partitions, [None, *first_nodes[1:]], strict=True))
    return tuple(parts) if partitions else (GraphPart(reads(gm)),)


def _lines_of(gm: fx.GraphModule, nodes: Sequence[str], parts: Sequence[GraphPart]) -> dict[str, UserLine]:
    """The user's lines that nodes of a graph come from, by name; those in its partitions too."""
    graphs = [gm, *(getattr(gm, name) for name in partition_names(gm))]
    named = {*nodes, *(part.first_node for part in parts)}
    found = {n.name: torch_internals.user_line_of(n) for part in graphs for n in part.graph.nodes if n.name in named}
    return {name: line for name, line in found.items() if line is not None}


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
    described = [pipelines_version(), ctx.reducer, buckets, *numbers, waits_inside]
    return f"ddp_compile {hashlib.sha256(json.dumps(described).encode()).hexdigest()}"


def _parts_are_equal(name: str, example_inputs: Sequence[Any]) -> bool:
    """Whether the ranks hold equal-sized parts of every DTensor input, so that all cut the graph at the same places.

    Buckets follow the sizes of the parts. If the cuts differed, the ranks would run the collectives that redistribute
    gradients after a partition's backward in different orders.
    """
    if all(torch_internals.has_equal_parts(value) for value in example_inputs):
        return True
    log.info("%s: not cut, since a DTensor in it has parts of different sizes", name)
    return False


def launches_in_backward(split: SplitMode, compiler: GraphCompiler) -> bool:
    """Whether buckets may be launched inside compiled backwards; the same on every rank.

    Raises:
        ValueError: The backend's ``inner_compile`` is not callable.
    """
    if split not in ("auto", "backward"):
        return False
    can_edit = compiler.can_edit_backwards()
    if split == "backward" and not can_edit:
        log.warning(
            "split='backward' needs a backend that is known to be built on AOTAutograd, which %s is not:"
            " graphs are cut in the forward instead",
            getattr(compiler.inner, "compiler_name", compiler.inner),
        )
    return can_edit


class EvaluationBackend:
    """Compiles the graphs of one module without gradients, or in evaluation mode, as they are.

    Dynamo keeps every backend for good, so neither this one nor `TrainingBackend` may hold a reference to the module.
    """

    def __init__(self, compiler: GraphCompiler, kind: str = "evaluation graph") -> None:
        self.compiler = compiler
        self.kind = kind
        self.num_graphs = 0

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        name = f"{self.kind} {self.num_graphs}"
        self.num_graphs += 1
        return self.compiler.compile(gm, example_inputs, name)


class RegionBackend(EvaluationBackend):
    """Compiles training graphs that several modules share, unchanged, so that they contain nothing of one module."""

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if torch_internals.loses_gradients_of_collectives(gm):
            raise _loses_gradients(f"{self.kind} {self.num_graphs}")
        GraphDump(f"{self.kind} {self.num_graphs}", "those of all modules that share the graph").before_pipeline(gm)
        return super().__call__(gm, example_inputs)


def graphs_without_cut(reports: Sequence[GraphReport]) -> Sequence[GraphReport]:
    """The graphs with several buckets that could not be cut anywhere."""
    return [
        report
        for report in reports
        if report.num_buckets > 1
        and report.num_partitions == 1
        and not (report.launches_in_backward and len(report.declined) < report.num_buckets)
    ]
