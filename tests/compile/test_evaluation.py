"""Which forwards without gradients are compiled: those of evaluation, and those of ``generate`` only if requested."""

import copy
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_net import Net, backward
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from ddp_compile import ddp_compile, unwrap

pytestmark = pytest.mark.usefixtures("single_rank_group")


class Generates(Net):
    @torch.no_grad()
    def generate(self, x: Tensor, *, steps: int = 2) -> list[Tensor]:
        """Its author's."""
        return [self(x[: 2 + i]) for i in range(steps)]


class GeneratesTwice(Generates):
    @torch.no_grad()
    def generate(self, x: Tensor, *, steps: int = 2) -> list[Tensor]:
        outputs = super().generate(x, steps=steps)
        if x.isnan().any():
            raise ValueError("not a number")
        return [*outputs, self(x)]


def graphs_of(make: type[nn.Module], **settings: Any) -> Iterator[int]:
    """Graphs compiled by a forward under ``no_grad``, by ``generate``, and by training, each after the other."""
    counter = CompileCounter()
    model = ddp_compile(make(), backend=counter, **settings).eval()
    reference, x = copy.deepcopy(model), torch.randn(4, 6)
    with torch.no_grad():
        assert torch.equal(model(x), reference(x))
    yield counter.frame_count
    outputs, expected = model.generate(x), reference.generate(x)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(outputs, expected, strict=True))
    yield counter.frame_count
    backward(model.train())
    yield counter.frame_count


@pytest.mark.parametrize("make", [Generates, GeneratesTwice])
def test_generate_runs_eagerly(make: type[nn.Module]) -> None:
    assert list(graphs_of(make)) == [1, 1, 2]


def test_compile_evaluation_settings() -> None:
    after_evaluation, after_generate, _ = graphs_of(Generates, compile_evaluation=True, dynamic=False)
    assert (after_evaluation, after_generate) == (1, 3)
    assert list(graphs_of(Generates, compile_evaluation=False)) == [0, 0, 1]


def test_eager_generate_calls_hooks() -> None:
    calls: list[str] = []
    model = Generates()
    model.register_forward_hook(lambda module, args, output: calls.append("post"))
    model = ddp_compile(model, backend="eager").eval()
    model.generate(torch.randn(4, 6), steps=3)
    assert calls == ["post"] * 3
    assert inspect.signature(model.generate) == inspect.signature(Generates().generate)
    assert model.generate.__doc__ == "Its author's."
    assert unwrap(model).generate.__func__ is Generates.generate


def test_generate_in_another_thread() -> None:
    counter = CompileCounter()
    inside, trained = threading.Event(), threading.Event()

    class Waits(Generates):
        @torch.no_grad()
        def generate(self, x: Tensor) -> Tensor:
            inside.set()
            assert trained.wait(60)
            output: Tensor = self(x)
            return output

    model = ddp_compile(Waits(), backend=counter)
    thread = threading.Thread(target=model.generate, args=(torch.randn(4, 6),))
    thread.start()
    assert inside.wait(60)
    backward(model)
    trained.set()
    thread.join()
    assert counter.frame_count == 1
