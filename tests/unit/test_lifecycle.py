"""Training uses all transitions in the table of a reducer's states, and no others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_compile import MissingGradientError, ReductionError, ddp_compile
from ddp_compile.runtime.lifecycle import TABLE, Event, Lifecycle, Phase, State

Edge = tuple[Phase, Event]


class Net(nn.Module):
    """Two layers, the second of which a call may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, uses_second: bool = True) -> Tensor:
        return self.second(self.first(x)) if uses_second else self.first(x)


X = torch.ones(2, 3)


def whole_step(model: Any) -> None:
    model(X).sum().backward()


def regularizer(model: Any) -> None:
    model.first.weight.square().sum().backward()


def local_forward_first(model: Any) -> None:
    with model.no_sync():
        model(X).sum().backward()
        model(X).sum().backward()
    whole_step(model)


def local_forward_in_between(model: Any) -> None:
    outputs = [model(X), model(X)]
    with model.no_sync():
        model(X)
    sum(output.sum() for output in outputs).backward()


def raise_in_the_forward(model: Any) -> None:
    with pytest.raises(RuntimeError, match=r"mat1 and mat2|reduction dim"):
        model(torch.ones(2, 5))
    local_forward(model).sum().backward()  # not taken for the backward that cannot come


def in_two_backwards(model: Any) -> None:
    hidden = model(X, uses_second=False)
    hidden.sum().backward()
    model.second(X).sum().backward()


def leave_out_and_go_on(model: Any) -> None:
    model(X, uses_second=False).sum().backward()
    whole_step(model)


def leave_out_and_go_on_locally(model: Any) -> None:
    model(X, uses_second=False).sum().backward()
    with model.no_sync():
        model(X)


def raise_in_the_middle(begin: Callable[[Any], None], *then: Callable[[Any], Any]) -> Callable[[Any], None]:
    """A backward raises when one gradient has come. Everything that follows is refused."""

    def scenario(model: Any) -> None:
        def refuse(_gradient: Tensor) -> None:
            raise ValueError

        handle = model.first.weight.register_post_accumulate_grad_hook(refuse)
        with pytest.raises(ValueError):
            begin(model)
        handle.remove()
        for each in then:
            with pytest.raises(ReductionError, match="the last backward raised"):
                each(model)

    return scenario


def finalize_by_hand(begin: Callable[[Any], None]) -> Callable[[Any], None]:
    """The second of two backwards comes before the first one has been finalized."""

    def scenario(model: Any) -> None:
        model.require_manual_backward_finalization = True
        begin(model)
        for refused in (forward, local_forward):
            with pytest.raises(ReductionError, match=r"a forward before finalize_backward\(\)"):
                refused(model)
        model.finalize_backward()
        with pytest.raises(RuntimeError, match="no reduced backward has come"):
            model.finalize_backward()
        begin(model)
        with pytest.raises(ReductionError, match=r"a gradient of first.weight before finalize_backward\(\)"):
            regularizer(model)
        with pytest.raises(RuntimeError, match="the last backward, or its finalization, has raised"):
            model.finalize_backward()

    return scenario


def forward(model: Any) -> Any:
    return model(X)


def local_forward(model: Any) -> Any:
    with model.no_sync():
        return model(X)


SCENARIOS: list[Callable[[Any], None]] = [
    whole_step,
    regularizer,
    local_forward_first,
    local_forward_in_between,
    raise_in_the_forward,
    in_two_backwards,
    leave_out_and_go_on,
    leave_out_and_go_on_locally,
    finalize_by_hand(whole_step),
    finalize_by_hand(regularizer),
    raise_in_the_middle(whole_step, forward, forward, local_forward, regularizer),
    raise_in_the_middle(whole_step, local_forward),
    raise_in_the_middle(regularizer, forward, forward, local_forward, regularizer),
    raise_in_the_middle(regularizer, local_forward),
]


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> set[Edge]:
    """The changes of all reducers."""
    edges: set[Edge] = set()
    on = Lifecycle.on

    def noted(lifecycle: Lifecycle, event: Event) -> State:
        edges.add((lifecycle.phase, event))
        return on(lifecycle, event)

    monkeypatch.setattr(Lifecycle, "on", noted)
    return edges


def replicated() -> Any:
    model = ddp_compile(Net(), bucket_cap_mb=1e-5, backend="eager")
    # With a comm hook a single rank reduces as several do.
    model.register_comm_hook(None, torch.distributed.BuiltinCommHookType.ALLREDUCE)
    whole_step(model)
    return model


def test_training_walks_the_table(walked: set[Edge], single_rank_group: None) -> None:
    for scenario in SCENARIOS:
        with contextlib.suppress(MissingGradientError):
            scenario(replicated())
    assert walked == TABLE.keys()
