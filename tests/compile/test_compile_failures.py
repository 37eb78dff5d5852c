"""Graphs that cannot be compiled: the compiler's error is raised, unless Dynamo is told to suppress it.

One rank is enough here. A failure on one of several ranks is in tests/desync/test_exceptions.py.
"""

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


ADVICE = " did not compile. torch._dynamo.config.suppress_errors = True runs such code eagerly, with the same gradients"


def test_failed_partition(warnings_of_ours: Warnings) -> None:
    """The compiler's error is raised, and the log names the rank and the graph. The next forward may compile it."""
    model = replicated(backend=Raises(ValueError("no kernel for this"), numbers=(1,)))
    with pytest.raises(BackendCompilerFailed, match="no kernel for this"):
        model(torch.randn(4, 8))
    (said,) = warnings_of_ours()
    assert said.startswith(f"rank 0: partition_1 of graph 0 (2.weight, 2.bias){ADVICE}")
    assert model.explain().graphs == ()  # of which none runs
    assert_trains_as_the_plain_module(model)
    assert len(model.explain().graphs) == 1 and warnings_of_ours() == [said]


def test_failed_whole_graph(warnings_of_ours: Warnings) -> None:
    """Those of evaluation, with gradients and without, and of training."""
    for enabled, train in ((False, False), (True, False), (True, True)):
        model = replicated(backend=Raises(ValueError("no"), numbers=(0,)), split="none").train(train)
        with torch.set_grad_enabled(enabled), pytest.raises(BackendCompilerFailed):
            model(torch.randn(4, 8))
        x = torch.randn(4, 8)
        assert torch.equal(model(x), small_model()(x))
    *of_evaluation, of_training = warnings_of_ours()
    assert of_evaluation[0].startswith(f"rank 0: evaluation graph 0{ADVICE}") and len(of_evaluation) == 2
    assert of_training.startswith(f"rank 0: graph 0 (0.weight, 0.bias, ..., 4.bias){ADVICE}")


@pytest.mark.parametrize("regions", [None, [nn.Linear]])
@torch._dynamo.config.patch(suppress_errors=True)
def test_suppressed_errors(regions: list[type[nn.Module]] | None) -> None:
    """As under ``torch.compile``, the code runs eagerly; so does evaluation."""
    model = replicated(backend=Raises(ValueError("no"), numbers=tuple(range(20))), regions=regions)
    assert_trains_as_the_plain_module(model)
    assert model.explain().graphs == ()
    x = torch.randn(4, 8)
    with torch.no_grad():
        assert torch.equal(model(x), model.eval()(x))


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
    assert len(warnings_of_ours()) == isinstance(error, Exception)


@pytest.mark.parametrize(
    ("error", "num_calls"), [(TensorifyScalarRestartAnalysis(), 2 + 3), (SkipFrame("bfloat16 is not supported"), 2)]
)
def test_requests_to_dynamo_pass_through(error: Exception, num_calls: int, warnings_of_ours: Warnings) -> None:
    backend = Raises(error, numbers=(1,))
    model = replicated(backend=backend)
    assert_trains_as_the_plain_module(model)
    assert backend.num_calls == num_calls
    assert warnings_of_ours() == [] or isinstance(error, SkipFrame)  # of which the model is told


def raise_in_backward(graph: fx.Graph) -> None:
    """A pass of inductor."""
    if any(node.name.startswith("tangents") for node in graph.find_nodes(op="placeholder")):
        raise ValueError("stopped half way")


@pytest.mark.inductor
def test_failed_inductor_backward_raises(split: str, warnings_of_ours: Warnings) -> None:
    """As under ``torch.compile``. The next forward is right again."""
    model = replicated(linear_model, split=split, options={"post_grad_custom_post_pass": raise_in_backward})
    for _ in range(2):
        with pytest.raises(Exception, match="stopped half way"):
            model(torch.randn(4, 8)).sum().backward()
        assert model[0].weight.grad is None
    assert warnings_of_ours() == []


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
