"""The visible output of a split: bucket table, graphs before and after, partitions, and explain(). Structure only."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from ddp_compile import ddp_compile, torch_internals


class MLP(nn.Module):
    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.fixture
def dumps() -> Iterator[list[str]]:
    """Messages of the ddp_graphs logger."""
    messages: list[str] = []
    handler, log = logging.Handler(logging.DEBUG), torch_internals.graphs_log()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    yield messages
    log.setLevel(before)
    log.removeHandler(handler)


def heading(message: str) -> str:
    match = re.match(r"\n--- (.*) ---\n", message)
    assert match, message
    return match.group(1)


def body(messages: list[str], wanted: str) -> str:
    """The text under a heading: short names for parameters, no types in signatures, no comments, blanks or resets."""
    (message,) = (m for m in messages if heading(m) == wanted)
    text = message.split(" ---\n", 1)[1]
    text = re.sub(r"[lL]_\w+?_layers_modules_(\d)_parameters_(weight|bias)_", r"\2_\1", text)
    text = re.sub(r"\b[lL]_args_0_", "x_0", text)
    text = re.sub(r"(?<=forward\(self, ).*(?=\):)", lambda m: re.sub(r' ?: ?("[^"]*"|[\w.]+)', "", m.group()), text)
    text = re.sub(r";  .* = None$", "", text, flags=re.MULTILINE)
    lines = [line.rstrip() for line in text.splitlines() if not line.strip().startswith("#")]
    return "\n".join(line for line in lines if line and not re.fullmatch(r" *(\w+) = \1", line))


def without_digest(text: str) -> str:
    return re.sub(r"plan [0-9a-f]{16}", "plan <digest>", text).replace(f"{Path(__file__).parent}/", "")


def test_graphs_are_dumped_in_order(single_rank_group: None, dumps: list[str]) -> None:
    # Capacities of 200 and 600 bytes: the last weight and bias, then the other two layers.
    model = ddp_compile(MLP(), bucket_cap_mb=[200 / 2**20, 600 / 2**20], backend="eager")
    model(torch.randn(5, 8)).sum().backward()
    assert_expected_inline(
        "\n".join(f"--- {heading(dump)}\n{body(dumps, heading(dump))}" for dump in dumps),
        """\
--- graph 0: buckets
bucket 0: 0.00 MiB float32: layers.2.bias, layers.2.weight
bucket 1: 0.00 MiB float32: layers.1.bias, layers.1.weight, layers.0.bias, layers.0.weight
--- graph 0: graph before
class GraphModule(torch.nn.Module):
    def forward(self, weight_0, bias_0, x_0, weight_1, bias_1, weight_2, bias_2):
        linear: "f32[5, 8]" = torch._C._nn.linear(x_0, weight_0, bias_0)
        x: "f32[5, 8]" = torch.tanh(linear)
        linear_1: "f32[5, 8]" = torch._C._nn.linear(x, weight_1, bias_1)
        x_1: "f32[5, 8]" = torch.tanh(linear_1)
        linear_2: "f32[5, 8]" = torch._C._nn.linear(x_1, weight_2, bias_2)
        x_2: "f32[5, 8]" = torch.tanh(linear_2)
        return (x_2,)
--- graph 0: graph after split_forward
def forward(self, weight_0, bias_0, x_0, weight_1, bias_1, weight_2, bias_2):
    partition_0 = self.partition_0(x_0, weight_0, bias_0, weight_1, bias_1)
    getitem = partition_0[0]
    partition_1 = self.partition_1(getitem, weight_2, bias_2)
    getitem_1 = partition_1[0]
    return (getitem_1,)
--- graph 0: partition_0
class partition_0(torch.nn.Module):
    def forward(self, x_0, weight_0, bias_0, weight_1, bias_1):
        linear: "f32[5, 8]" = torch._C._nn.linear(x_0, weight_0, bias_0)
        x: "f32[5, 8]" = torch.tanh(linear)
        linear_1: "f32[5, 8]" = torch._C._nn.linear(x, weight_1, bias_1)
        x_1: "f32[5, 8]" = torch.tanh(linear_1)
        return (x_1,)
--- graph 0: partition_1
class partition_1(torch.nn.Module):
    def forward(self, x_1, weight_2, bias_2):
        linear_2: "f32[5, 8]" = torch._C._nn.linear(x_1, weight_2, bias_2)
        x_2: "f32[5, 8]" = torch.tanh(linear_2)
        return (x_2,)""",
    )


def test_explain_shows_plan_and_cuts(single_rank_group: None) -> None:
    model = ddp_compile(MLP(), bucket_cap_mb=1e-5, backend="eager")
    model(torch.randn(5, 8)).sum().backward()
    assert_expected_inline(
        without_digest(str(model.explain())),
        """\
bucket   MiB  cap MiB  dtype    device  gradients  from             to               frame
------  ----  -------  -------  ------  ---------  ---------------  ---------------  -----
     0  0.00     0.00  float32  cpu             1  layers.2.bias    layers.2.bias    0
     1  0.00     0.00  float32  cpu             1  layers.2.weight  layers.2.weight  0
     2  0.00     0.00  float32  cpu             1  layers.1.bias    layers.1.bias    0
     3  0.00     0.00  float32  cpu             1  layers.1.weight  layers.1.weight  0
     4  0.00     0.00  float32  cpu             1  layers.0.bias    layers.0.bias    0
     5  0.00     0.00  float32  cpu             1  layers.0.weight  layers.0.weight  0
6 buckets, 6 gradients, 0.00 MiB, generation 0, plan <digest>
MLP on 1 rank, gradient all-reduce; bucket_cap_mb=[9.53674e-06, 9.53674e-06], backend='eager'
buckets 0-5 not launched early: there is one rank, so nothing is sent
graph 0: 6 buckets, 3 partitions
  cut at layers.1 (linear_1)
    test_graph_dumps.py:23  x = torch.tanh(layer(x))
  cut at layers.2 (linear_2)
    test_graph_dumps.py:23  x = torch.tanh(layer(x))
  at layers.2 (linear_2): bucket 0 is launched with bucket 1: one node computes with gradients of both
    test_graph_dumps.py:23  x = torch.tanh(layer(x))
  at layers.1 (linear_1): bucket 2 is launched with bucket 3: one node computes with gradients of both
    test_graph_dumps.py:23  x = torch.tanh(layer(x))
  at layers.0 (linear): bucket 4 is launched with bucket 5: one node computes with gradients of both
    test_graph_dumps.py:23  x = torch.tanh(layer(x))""",
    )


def test_backward_graph_dumps(single_rank_group: None, dumps: list[str]) -> None:
    model = ddp_compile(MLP(2), bucket_cap_mb=200 / 2**20, backend="aot_eager", split="backward")
    model(torch.randn(5, 8)).sum().backward()
    assert list(map(heading, dumps)) == [
        f"graph 0 backward: {name}" for name in ("buckets", "graph before", "graph after bucket_backward")
    ]
    assert "bucket_ready.default([view, t_5]" in dumps[-1]


class Lines(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8, sparse=sparse)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        x = torch.tanh(self.first(x))
        return self.second(x)


@pytest.mark.parametrize("sparse", [False, True])
def test_refused_bucket_has_its_line(single_rank_group: None, sparse: bool) -> None:
    model = ddp_compile(Lines(sparse), bucket_cap_mb=200 / 2**20, split="backward", backend="aot_eager")
    model(torch.tensor([1, 2, 3])).square().sum().backward()
    (graph,) = model.explain().graphs
    (refusal,) = graph.refusals
    assert refusal.bucket == len(model.bucket_plan.buckets) - 1
    assert refusal.reason == f"bucket {refusal.bucket} is {'sparse' if sparse else 'ready when the graph ends'}"
    assert refusal.source is not None and refusal.source.file == __file__
    assert refusal.source.code == "x = self.table(x)"
