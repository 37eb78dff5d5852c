"""What ``model.explain()`` returns: the plan, how graphs were cut, what is launched early, and what runs eagerly.

All of it is plain data. ``str`` makes a text of it, `Explanation.to_json` is for programs.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Self

from ddp_compile.errors import format_ranks, number_of, shorten_names
from ddp_compile.plan.spec import BucketPlan
from ddp_compile.plan.typed_json import from_document
from ddp_compile.torch_internals import SourceLine

_JSON_VERSION = 3


@dataclass(frozen=True, slots=True)
class Refusal:
    """A cut or a launch that was planned for a graph but not made.

    Args:
        node: Name of the graph's node at which it was planned.
        reason: Why it was not made, and what happens instead. The reason numbers buckets as the plan did at that time.
        bucket: Index in the plan of the bucket that it concerns.
        module: Name of the submodule in whose call the node is, if it is known and not the model itself.
        source: The user's line that the node comes from; for the output node, the line that the bucket's last gradient
            comes from. None if there is none.
    """

    node: str
    reason: str
    bucket: int | None
    module: str | None
    source: SourceLine | None


@dataclass(frozen=True, slots=True)
class Partition:
    """A part of a graph that is compiled by itself; the whole graph if it is not cut.

    Args:
        buckets: Indices in the plan of the buckets whose parameters it reads.
        first_node: Name of its first node, before which the graph is cut; None in the first partition.
        module: As in `Refusal`.
        source: The user's line that this node comes from, if it is known.
    """

    buckets: tuple[int, ...]
    first_node: str | None
    module: str | None
    source: SourceLine | None


@dataclass(frozen=True, slots=True)
class GraphExplanation:
    """How one graph was cut.

    Args:
        number: Its number among the graphs that Dynamo made of the module, including recompiled ones.
        num_buckets: How many buckets get gradients from it.
        partitions: In the order of the forward.
        launches_in_backward: Whether the graph is left whole, and buckets are launched inside its backward.
        not_cut: Why a graph that is left whole was not cut for every bucket.
        refusals: Cuts that were not made as planned; with ``launches_in_backward``, buckets that are not launched
            inside the backward. Empty for compiled code from a cache.
    """

    number: int
    num_buckets: int
    partitions: tuple[Partition, ...]
    launches_in_backward: bool
    not_cut: tuple[Refusal, ...]
    refusals: tuple[Refusal, ...]

    def lines(self) -> Iterator[str]:
        """The lines of its text."""
        how = "launched inside its backward" if self.launches_in_backward else None
        buckets = number_of(self.num_buckets, "bucket")
        yield f"graph {self.number}: {buckets}, {how or number_of(len(self.partitions), 'partition')}"
        for part in self.partitions[1:]:
            yield from _with_source(f"  cut at {_place(part.first_node, part.module)}", part.source)
        for each in self.not_cut:
            at = _place(each.node, each.module)
            yield from _with_source(f"  not cut in the forward at {at}: {each.reason}", each.source)
        for each in self.refusals:
            yield from _with_source(f"  at {_place(each.node, each.module)}: {each.reason}", each.source)


@dataclass(frozen=True, slots=True)
class BucketLaunch:
    """When a bucket is launched.

    Args:
        bucket: Index of the bucket in the plan.
        is_early: Whether it is launched while the rest of the backward computes.
        when: Where in the backward, or why not earlier.
    """

    bucket: int
    is_early: bool
    when: str


@dataclass(frozen=True, slots=True)
class Region:
    """The regions of one class, which share compiled code.

    Args:
        cls: Name of the class.
        names: Names of the submodules.
        num_training_graphs: Number of graphs made for training.
        num_evaluation_graphs: Number of graphs made for evaluation.
    """

    cls: str
    names: tuple[str, ...]
    num_training_graphs: int
    num_evaluation_graphs: int

    def __str__(self) -> str:
        return (
            f"{number_of(len(self.names), 'region')} of {self.cls} ({shorten_names(self.names)}):"
            f" {number_of(self.num_training_graphs, 'graph')} for training,"
            f" {number_of(self.num_evaluation_graphs, 'graph')} for evaluation"
        )


@dataclass(frozen=True, slots=True)
class Break:
    """A graph break.

    Args:
        what: Which break it is, for example "the first graph break".
        reason: Dynamo's reason, in one line.
        source: The user's line.
    """

    what: str
    reason: str
    source: SourceLine

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}, at {self.source}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What was decided for one replicated module, as this rank sees it.

    Args:
        model: The module's class.
        world_size: Number of ranks.
        algorithm: Name of the algorithm.
        settings: Arguments of ``ddp_compile`` that differ from their defaults, as in a call.
        plan: The bucket plan; ``plan.digest`` identifies it. With a sharded optimizer, gradients have owners.
        launches: One for each bucket, in plan order.
        graphs: The training graphs.
        regions: One for each class that is compiled by itself.
        in_no_graph: Indices of the buckets that no graph uses, if anything is compiled.
        breaks: The graph breaks that made Dynamo leave code to Python.
        sharding: Lines about a sharded optimizer.
        averaging: A line about ``normalize_by``, if it is called.
    """

    model: str
    world_size: int
    algorithm: str
    settings: tuple[str, ...]
    plan: BucketPlan
    launches: tuple[BucketLaunch, ...]
    graphs: tuple[GraphExplanation, ...]
    regions: tuple[Region, ...]
    in_no_graph: tuple[int, ...]
    breaks: tuple[Break, ...]
    sharding: tuple[str, ...]
    averaging: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([self.plan.format_table(), *self.lines()])

    def lines(self) -> Iterator[str]:
        """The text without the table of the plan."""
        settings = f"; {', '.join(self.settings)}" if self.settings else ""
        yield f"{self.model} on {number_of(self.world_size, 'rank')}, {self.algorithm}{settings}"
        yield from self._launch_lines()
        for graph in self.graphs:
            yield from graph.lines()
        yield from map(str, self.regions)
        if self.in_no_graph:
            yield (
                f"{number_of(len(self.in_no_graph), 'bucket')} of {len(self.plan.buckets)}"
                f" {'is' if len(self.in_no_graph) == 1 else 'are'} in no graph, since Dynamo does not compile the code"
                ' that uses the parameters (TORCH_LOGS="graph_breaks" says why); hooks launch each bucket when its'
                " gradients are there"
            )
        yield from map(str, self.breaks)
        yield from self.sharding
        yield from self.averaging

    def _launch_lines(self) -> Iterator[str]:
        """A line for each way to launch, the early ones first."""
        buckets_of: dict[tuple[bool, str], list[int]] = {}
        for launch in sorted(self.launches, key=lambda launch: not launch.is_early):
            buckets_of.setdefault((launch.is_early, launch.when), []).append(launch.bucket)
        for (is_early, when), buckets in buckets_of.items():
            yield f"{_buckets(buckets)} {'' if is_early else 'not '}launched early: {when}"

    def to_json(self) -> str:
        """The explanation as JSON text; paths of source files are absolute."""
        document = asdict(replace(self, plan=BucketPlan(())))
        plan = json.loads(self.plan.to_json())
        return json.dumps({"version": _JSON_VERSION, "digest": self.plan.digest, **document, "plan": plan})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The explanation that `to_json` wrote.

        Raises:
            ValueError: The text is malformed, or of another version of the format. The error says what is wrong.
        """
        try:
            document = json.loads(text)
        except ValueError as error:
            raise ValueError(f"the explanation cannot be read ({error}); pass what to_json() returned") from error
        version = document.pop("version", None) if isinstance(document, dict) else None
        if version != _JSON_VERSION:
            raise ValueError(
                f"the explanation has JSON version {version!r}, but this version of ddp_compile reads {_JSON_VERSION};"
                " write it again with this version"
            )
        document.pop("digest", None)
        plan = BucketPlan.from_json(json.dumps(document.pop("plan", None)))
        return from_document(cls, document, "explanation", {"plan": plan})


def _buckets(indices: Sequence[int]) -> str:
    return f"bucket{'' if len(indices) == 1 else 's'} {format_ranks(indices)}"


def _place(node: str | None, module: str | None) -> str:
    return f"{module} ({node})" if module else str(node)


def _with_source(line: str, source: SourceLine | None) -> Iterator[str]:
    yield line
    if source is not None:
        yield f"    {source}  {source.code}".rstrip()
