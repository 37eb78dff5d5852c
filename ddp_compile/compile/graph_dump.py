"""Graph dumps for ``TORCH_LOGS="ddp_graphs"`` and ``TORCH_TRACE``, made by observers around the passes."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence

from torch import fx

from ddp_compile import torch_internals
from ddp_compile.plan.builder import PlanBuilder
from ddp_compile.plan.spec import BucketSpec


def format_graph_buckets(buckets: list[BucketSpec], ready_order: list[int]) -> str:
    """One line for each bucket of a graph, with those of its gradients that the graph computes."""
    members = set(ready_order)
    lines = []
    for bucket in buckets:
        present = [gradient.fqn for gradient in bucket.gradients if gradient.index in members]
        missing = len(bucket.gradients) - len(present)
        note = f" ({missing} more elsewhere)" if missing else ""
        lines.append(
            f"bucket {bucket.index}: {bucket.num_bytes / 2**20:.2f} MiB {bucket.dtype}: {', '.join(present)}{note}"
        )
    return "\n".join(lines)


def format_graph(gm: fx.GraphModule) -> str:
    """The graph as Python source with shapes and dtypes; only the calls if it consists of partitions."""
    if any(node.op == "call_module" for node in gm.graph.nodes):
        return gm.code.strip()
    return gm.print_readable(print_output=False, include_stride=False, include_device=False, colored=False).strip()


def trace_cut(
    graph_name: str, parts: Mapping[str, Sequence[int]], buckets: Sequence[BucketSpec], builder: PlanBuilder
) -> None:
    """Write to ``TORCH_TRACE``, as JSON, where a graph was cut.

    Until the plan is sealed, it has no digest, and graphs that are compiled later may move buckets to higher numbers.

    Args:
        parts: Indices of the parameters that each part reads, by its name, in the order of the forward.
        buckets: With gradients from the graph.
    """

    def text() -> str:
        described, left = [], list(buckets)
        for part, reads in parts.items():
            # The backward runs through the parts from the last to the first, so the first reader completes a bucket.
            completes = [bucket for bucket in left if not {g.index for g in bucket.gradients}.isdisjoint(reads)]
            left = [bucket for bucket in left if bucket not in completes]
            names = [builder.gradients[index].fqn for index in reads]
            described.append({"name": part, "parameters": names, "completes": [bucket.index for bucket in completes]})
        contents = {bucket.index: [gradient.fqn for gradient in bucket.gradients] for bucket in buckets}
        plan = builder.sealed and builder.sealed.digest
        return json.dumps({"graph": graph_name, "plan": plan, "parts": described, "buckets": contents}, indent=1)

    torch_internals.trace_artifact(f"ddp_compile_{graph_name}_cut".replace(" ", "_"), text, "json")


class GraphDump:
    """An observer that writes the table of buckets, each graph that a pass changed, and every partition."""

    def __init__(self, graph_name: str, bucket_table: str) -> None:
        self.graph_name = graph_name
        self.log = torch_internals.graphs_log()
        self.bucket_table = bucket_table

    def before_pipeline(self, gm: fx.GraphModule) -> None:
        self._write("buckets", lambda: self.bucket_table)
        self._write("graph before", lambda: format_graph(gm))

    def after_pass(self, name: str, gm: fx.GraphModule, num_changed: int) -> None:
        if num_changed:
            self._write(f"graph after {name}", lambda: format_graph(gm))

    def after_pipeline(self, gm: fx.GraphModule) -> None:
        for node in gm.graph.find_nodes(op="call_module"):
            partition = gm.get_submodule(node.target)
            if isinstance(partition, fx.GraphModule):
                self._write(str(node.target), functools.partial(format_graph, partition))

    def _write(self, heading: str, text: Callable[[], str]) -> None:
        if self.log.isEnabledFor(logging.DEBUG):
            self.log.debug("\n--- %s: %s ---\n%s", self.graph_name, heading, text())
        name = f"ddp_compile_{self.graph_name}_{heading}".replace(" ", "_")
        torch_internals.trace_artifact(name, text)
