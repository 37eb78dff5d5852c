"""Graph dumps for ``TORCH_LOGS="ddp_graphs"`` and ``TORCH_TRACE``."""

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


def dump_graph(graph_name: str, heading: str, gm: fx.GraphModule) -> None:
    """Write a graph that is observed around passes, or one of its partitions."""
    _write(graph_name, heading, lambda: format_graph(gm))


def dump_buckets(graph_name: str, table: str) -> Callable[[str, fx.GraphModule], None]:
    """Write the table of a graph's buckets; returns `dump_graph` for that graph."""
    _write(graph_name, "buckets", lambda: table)
    return functools.partial(dump_graph, graph_name)


def _write(graph_name: str, heading: str, text: Callable[[], str]) -> None:
    if (log := torch_internals.graphs_log()).isEnabledFor(logging.DEBUG):
        log.debug("\n--- %s: %s ---\n%s", graph_name, heading, text())
    torch_internals.trace_artifact(f"ddp_compile_{graph_name}_{heading}".replace(" ", "_"), text)
