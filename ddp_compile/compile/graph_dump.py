"""Graph dumps for ``TORCH_LOGS="ddp_graphs"`` and ``TORCH_TRACE``, made by observers around the passes."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

from torch import fx

from ddp_compile import torch_internals
from ddp_compile.plan.spec import BucketSpec


def format_graph_buckets(buckets: Sequence[BucketSpec], ready_order: Sequence[int]) -> str:
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
