"""Local forwards between others. Transitions that are refused: features/test_interrupted_iterations.py."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from ddp_compile import MissingGradientError, ddp_compile

pytestmark = pytest.mark.usefixtures("single_rank_group")


class Layer(nn.Linear):
    is_interrupted = False

    def forward(self, x: torch.Tensor, uses_bias: bool = True) -> torch.Tensor:
        if self.is_interrupted:
            raise KeyboardInterrupt
        return nn.functional.linear(x, self.weight, self.bias if uses_bias else None)


def replicated(sent: list[int]) -> Any:
    """A model that has trained, and that counts its buckets: with a comm hook a single rank reduces as several do."""
    model: Any = ddp_compile(Layer(3, 3), backend="eager")

    def count(_state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        sent.append(bucket.index())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, count)
    model(torch.ones(2, 3)).sum().backward()
    sent.clear()
    return model


def test_local_forward_after_a_backward_without_all_gradients() -> None:
    model = replicated(sent := [])
    model(torch.ones(2, 3), uses_bias=False).sum().backward()
    with pytest.raises(MissingGradientError), model.no_sync():
        model(torch.ones(2, 3))
    model.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    assert sent == [0]


def saliency(model: Any) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x)


def raising_forward(model: Any) -> None:
    with pytest.raises(RuntimeError, match=r"mat1 and mat2|reduction dim"):
        model(torch.ones(2, 5))


def failing_backward(model: Any) -> None:
    hidden = model(torch.ones(2, 3))
    hidden.grad_fn.register_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hidden.sum().backward()


def interrupted_forward(model: Any) -> None:
    model.is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2, 3))
    model.is_interrupted = False


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("before", [saliency, raising_forward, failing_backward, interrupted_forward])
def test_local_backward_after_a_forward_without_gradients(before: Any, inside: bool) -> None:
    model = replicated(sent := [])
    before(model)
    with model.no_sync():
        loss = model(torch.ones(2, 3)).sum()
    with model.no_sync() if inside else nullcontext():
        loss.backward()  # not taken for the backward that cannot come
    assert sent == []
    model(torch.ones(2, 3)).sum().backward()
    assert sent == [0]


@pytest.mark.parametrize("method", ["__call__", "forward"])
@pytest.mark.parametrize("order", ["A B a b", "A B b a", "B A a b", "B A b a", "A B ab", "A A B a"])
def test_backwards_of_forwards_and_of_a_local_one_in_any_order(order: str, method: str) -> None:
    """A: a forward, B: a local forward, a and b: their backwards. The next forward may be called as a method."""
    model, losses = replicated(sent := []), {}
    for action in order.split():
        if action.isupper():
            with model.no_sync() if action == "B" else nullcontext():
                losses[action.lower()] = losses.get(action.lower(), 0) + model(torch.ones(2, 3)).sum()
        else:
            sum(losses.pop(name) for name in action).backward()
            assert sent == [0] * ("a" not in losses), action
    getattr(model, method)(torch.ones(2, 3)).sum().backward()
    assert sent == [0, 0]


def test_local_backward_through_a_reentrant_checkpoint() -> None:
    model = replicated(sent := [])
    model(torch.ones(2, 3))
    with model.no_sync():
        x = torch.ones(2, 3, requires_grad=True)
        local = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True)
    local.sum().backward()  # the forward with gradients is the recomputation, outside no_sync
    assert sent == [0]
