"""Local forwards between others. Transitions that are refused: features/test_interrupted_iterations.py."""

from typing import Any

import pytest
import torch
from torch import nn

from ddp_compile import MissingGradientError, ddp_compile

pytestmark = pytest.mark.usefixtures("single_rank_group")


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor, uses_bias: bool = True) -> torch.Tensor:
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


def test_local_forward_between_forwards_and_their_backward() -> None:
    model = replicated(sent := [])
    outputs = [model(torch.ones(2, 3)), model(torch.ones(2, 3))]
    with model.no_sync():
        model(torch.ones(2, 3))
    sum(output.sum() for output in outputs).backward()
    assert sent == [0]


def test_forward_that_raises_before_a_local_one() -> None:
    model = replicated(sent := [])
    with pytest.raises(RuntimeError, match=r"mat1 and mat2|reduction dim"):
        model(torch.ones(2, 5))
    with model.no_sync():
        local = model(torch.ones(2, 3))
    local.sum().backward()  # not taken for the backward that cannot come
    assert sent == []
    model(torch.ones(2, 3)).sum().backward()
    assert sent == [0]


def test_local_forward_after_a_backward_without_all_gradients() -> None:
    model = replicated(sent := [])
    model(torch.ones(2, 3), uses_bias=False).sum().backward()
    with pytest.raises(MissingGradientError), model.no_sync():
        model(torch.ones(2, 3))
    model.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    assert sent == [0]
