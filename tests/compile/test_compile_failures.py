"""Graphs that cannot be compiled run eagerly, with right gradients and a warning; with ``fullgraph`` they are errors.

One rank is enough here. A failure on one of several ranks is in tests/desync/test_exceptions.py.
"""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from beside import train_beside
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed, SkipFrame, TensorifyScalarRestartAnalysis
from torch._inductor.exc import InductorError
from torch.distributed.nn.functional import all_reduce
from torch.utils.checkpoint import checkpoint

from ddp_compile import ddp_compile, torch_internals

pytestmark = pytest.mark.usefixtures("single_rank_group")


Warnings = Callable[[], list[str]]


@pytest.fixture(autouse=True)
def warnings_of_ours(caplog: pytest.LogCaptureFixture) -> Warnings:
    caplog.set_level(logging.WARNING, logger="ddp_compile")
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("ddp_compile")]


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def linear_model() -> nn.Module:
    """Inductor needs no C++ compiler for its forward, which saves seconds."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3))


def replicated(make: Callable[[], nn.Module] = small_model, **settings: Any) -> Any:
    """Three partitions of one layer each, unless the graph is not split."""
    return ddp_compile(make(), **{"bucket_cap_mb": 1e-4, **settings})


def assert_trains_as_the_plain_module(model: nn.Module, num_steps: int = 3) -> None:
    assert max(train_beside((model, small_model()), num_steps=num_steps, width=8, lr=0.1)) < 1e-6


class Raises:
    """A backend that raises for the graphs with these numbers and runs the others as they are."""

    def __init__(self, error: BaseException, numbers: tuple[int, ...]) -> None:
        self.error = error
        self.numbers = numbers
        self.num_calls = 0

    def __call__(self, gm: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.num_calls += 1
        if self.num_calls - 1 in self.numbers:
            raise self.error
        return gm.forward


def test_failed_partition_runs_eagerly(warnings_of_ours: Warnings) -> None:
    backend = Raises(ValueError("no kernel for this\nand much more"), numbers=(1,))
    model = replicated(backend=backend)
    assert_trains_as_the_plain_module(model)
    assert backend.num_calls == 3
    (warning,) = warnings_of_ours()
    assert warning.startswith(
        "rank 0: partition_1 of graph 0 (2.weight, 2.bias) did not compile and runs eagerly:"
        " ValueError: no kernel for this. Gradients stay correct, only slower."
    )
    assert all(way_out in warning for way_out in ('TORCH_LOGS="+ddp_compile"', "fullgraph=True", 'backend="aot_eager"'))
    assert str(model.explain()).endswith(
        "partition_1 of graph 0 (2.weight, 2.bias) runs eagerly: ValueError: no kernel for this"
    )


def test_failed_whole_graph_runs_eagerly(warnings_of_ours: Warnings) -> None:
    """Those of evaluation, with gradients and without, and of training."""
    for under_no_grad in (True, False):
        model = replicated(backend=Raises(ValueError("no"), numbers=(0,))).eval()
        x = torch.randn(4, 8)
        with torch.set_grad_enabled(not under_no_grad):
            assert torch.equal(model(x), small_model()(x))
    assert_trains_as_the_plain_module(replicated(backend=Raises(ValueError("no"), numbers=(0,)), split="none"))
    *of_evaluation, of_training = warnings_of_ours()
    assert len(of_evaluation) == 2
    for warning in of_evaluation:
        assert "evaluation graph 0 did not compile and runs eagerly: ValueError: no" in warning
    assert "graph 0 (0.weight, 0.bias, ..., 4.bias) did not compile and runs eagerly: ValueError: no" in of_training


def test_fullgraph_raises_compiler_error(warnings_of_ours: Warnings) -> None:
    model = replicated(backend=Raises(ValueError("no kernel for this"), numbers=(1,)), fullgraph=True)
    with pytest.raises(BackendCompilerFailed, match="no kernel for this"):
        model(torch.randn(4, 8))
    assert warnings_of_ours() == []
    assert_trains_as_the_plain_module(model)  # the backend raises only once


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (MemoryError(), BackendCompilerFailed),
        (OUT_OF_MEMORY, BackendCompilerFailed),
        (InductorError(OUT_OF_MEMORY, None), InductorError),
    ],
)
def test_interrupts_and_memory_errors_are_raised(
    error: BaseException, raised: type[BaseException], warnings_of_ours: Warnings
) -> None:
    model = replicated(backend=Raises(error, numbers=(1,)))
    with pytest.raises(raised):
        model(torch.randn(4, 8))
    assert_trains_as_the_plain_module(model)
    assert warnings_of_ours() == []


@pytest.mark.parametrize(
    ("error", "num_calls"), [(TensorifyScalarRestartAnalysis(), 2 + 3), (SkipFrame("bfloat16 is not supported"), 2)]
)
def test_requests_to_dynamo_pass_through(error: Exception, num_calls: int, warnings_of_ours: Warnings) -> None:
    backend = Raises(error, numbers=(1,))
    model = replicated(backend=backend)
    assert_trains_as_the_plain_module(model)
    assert backend.num_calls == num_calls and model._ddp_compile_state.compiler.failures == []
    assert warnings_of_ours() == [] or isinstance(error, SkipFrame)  # of which the model is told


def rewrite_and_raise(graph: fx.Graph) -> None:
    """A pass of inductor that stops half way: the half-edited graph must not run."""
    for node in list(graph.nodes):
        if node.op == "call_function":
            node.replace_all_uses_with(next(iter(graph.nodes)))
    graph.owning_module.recompile()
    raise ValueError("stopped half way")


def raise_in_backward(graph: fx.Graph) -> None:
    if any(node.name.startswith("tangents") for node in graph.find_nodes(op="placeholder")):
        rewrite_and_raise(graph)


@pytest.mark.inductor
def test_failed_inductor_forward(warnings_of_ours: Warnings) -> None:
    model = replicated(options={"pre_grad_custom_pass": rewrite_and_raise})
    assert_trains_as_the_plain_module(model, num_steps=1)
    assert len(warnings_of_ours()) == 3
    assert "partition_0 of graph 0 (0.weight, 0.bias) did not compile" in warnings_of_ours()[0]
    assert all("ValueError: stopped half way" in warning for warning in warnings_of_ours())


@pytest.mark.inductor
def test_failed_inductor_backward_raises(split: str, warnings_of_ours: Warnings) -> None:
    """As under ``torch.compile``. The next forward is right again."""
    model = replicated(linear_model, split=split, options={"post_grad_custom_post_pass": raise_in_backward})
    for _ in range(2):
        with pytest.raises(Exception, match="stopped half way"):
            model(torch.randn(4, 8)).sum().backward()
        assert model[0].weight.grad is None
    assert warnings_of_ours() == []


def test_nested_graphs_are_copied() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = small_model()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=False)

    def spoil_and_raise(gm: fx.GraphModule, inputs: list[Tensor]) -> Any:
        for child in gm.children():
            for node in child.graph.nodes:
                if node.target is torch.tanh:
                    node.target = torch.relu
            child.recompile()
        raise ValueError("no")

    model, reference = Checkpointed(), small_model()
    x = torch.randn(4, 8)
    expected = copy.deepcopy(reference)(x)
    assert torch.equal(ddp_compile(model, backend=spoil_and_raise)(x), expected)


class AllReduced(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return all_reduce(super().forward(x)).cos()


def body_with_a_collective() -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops._c10d_functional.all_reduce, (x, "sum", "0")))
    return fx.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("way", ["as in torch 2.11", "traced"])
def test_lost_gradients_of_collectives(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only torch 2.11 puts a function that communicates into a graph; its gradient is then zero."""
    if way == "traced" and torch.__version__ >= "2.12":
        pytest.skip("this torch breaks the graph there")
    monkeypatch.setattr(torch_internals.dynamo, "_LOSES_GRADIENTS_OF_COLLECTIVES", True)
    model = ddp_compile(AllReduced(8, 8), backend="eager")
    with pytest.raises(Exception, match=r"rank 0: graph 0 contains .* computes zeros .* with torch\.compiler\.disable"):
        if way == "traced":
            model(torch.randn(4, 8))
        else:
            gm = fx.GraphModule(nn.Module(), fx.Graph())
            gm.add_module("fwd_body_0", body_with_a_collective())
            model._ddp_compile_state.backend(gm, [])
