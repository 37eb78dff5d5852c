"""Which forwards without gradients are compiled: those of evaluation, and those of ``generate`` only if requested."""

from __future__ import annotations

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


def evaluated(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(x)
    return output


def graphs_of(make: type[nn.Module], **settings: Any) -> Iterator[int]:
    """Graphs compiled by a forward under ``no_grad``, by ``generate``, and by training, each after the other."""
    counter = CompileCounter()
    model = ddp_compile(make(), backend=counter, **settings).eval()
    plain = model.state_dict()
    x = torch.randn(4, 6)
    reference = make().eval()
    reference.load_state_dict(plain)
    assert torch.equal(evaluated(model, x), evaluated(reference, x))
    yield counter.frame_count
    outputs, expected = model.generate(x), reference.generate(x)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(outputs, expected, strict=True))
    yield counter.frame_count
    backward(model.train())
    yield counter.frame_count


@pytest.mark.parametrize("make", [Generates, GeneratesTwice])
def test_generate_runs_eagerly_and_other_evaluation_is_compiled(make: type[nn.Module]) -> None:
    assert list(graphs_of(make)) == [1, 1, 2]


def test_all_evaluation_is_compiled_or_none_where_that_is_asked_for() -> None:
    after_evaluation, after_generate, _ = graphs_of(Generates, compile_evaluation=True, dynamic=False)
    assert (after_evaluation, after_generate) == (1, 3)
    assert list(graphs_of(Generates, compile_evaluation=False)) == [0, 0, 1]


def test_forwards_with_gradients_are_compiled_in_evaluation_mode_too() -> None:
    counter = CompileCounter()
    model = ddp_compile(Net(), backend=counter, compile_evaluation=False).eval()
    backward(model)
    assert counter.frame_count == 1


def test_what_runs_eagerly_is_the_module_with_its_hooks() -> None:
    calls: list[str] = []
    model = Generates()
    model.register_forward_hook(lambda module, args, output: calls.append("post"))
    model = ddp_compile(model, backend="eager").eval()
    model.generate(torch.randn(4, 6), steps=3)
    assert calls == ["post"] * 3
    assert inspect.signature(model.generate) == inspect.signature(Generates().generate)
    assert model.generate.__doc__ == "Its author's."
    assert unwrap(model).generate.__func__ is Generates.generate


def test_after_an_exception_in_generate_evaluation_is_compiled_again() -> None:
    counter = CompileCounter()
    model = ddp_compile(GeneratesTwice(), backend=counter).eval()
    with pytest.raises(ValueError, match="not a number"):
        model.generate(torch.full((4, 6), torch.nan))
    assert counter.frame_count == 0
    evaluated(model, torch.randn(4, 6))
    assert counter.frame_count == 1


def test_training_goes_on_compiled_while_another_thread_generates() -> None:
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


class HasGenerator(Net):
    generate = nn.Linear(6, 6)


def test_a_generate_that_is_no_function_is_left_as_it_is() -> None:
    assert ddp_compile(HasGenerator(), backend="eager").generate is HasGenerator.generate
