"""Sizes are unpacked, so that a graph with symbolic shapes can be cut at the same places as one with fixed shapes."""

from __future__ import annotations

import torch
from graphs import capture
from torch import Tensor, fx

from ddp_compile.passes.analysis.cut_constraints import find_held_cuts
from ddp_compile.passes.forward.unpack_sizes import unpack_sizes_pass
from ddp_compile.passes.pipeline import PassContext

CONTEXT = PassContext(parameter_of={}, buckets=(), graph_name="graph 0")


def uses_sizes(x: Tensor) -> Tensor:
    rows, columns = x.size()
    y = x.sin().reshape(rows * columns).cos()
    return y.view(x.size()) * rows


def run(gm: fx.GraphModule, inputs: list[object]) -> Tensor:
    return gm(*(value.node.hint if isinstance(value, torch.SymInt) else value for value in inputs))[0]


def test_symbolic_sizes_are_unpacked() -> None:
    gm, inputs = capture(uses_sizes, torch.rand(6, 4), dynamic=True)
    expected = run(gm, inputs)
    held = [interval for interval in find_held_cuts(gm) if "Size" in interval.reason]
    gm, num_changed, _ = unpack_sizes_pass(gm, CONTEXT)
    gm.graph.lint()
    gm.recompile()
    sizes = [node for node in gm.graph.nodes if node.target == "size"]
    assert held and num_changed
    assert all(len(node.args) == 2 for node in sizes)
    assert not any("Size" in interval.reason for interval in find_held_cuts(gm))
    assert torch.equal(run(gm, inputs), expected)
