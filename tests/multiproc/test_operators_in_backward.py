"""Backwards with operators of their own: collectives between the buckets', and exceptions behind one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside_plain import CAP_MB, WIDTH, Step, train
from models import Mlp, loss_of
from rank_pool import RankPool, on_ranks
from torch import Tensor

from ddp_compile import ReductionError, ddp_compile
from ddp_compile.comm_hooks import allreduce_hook

pytestmark = pytest.mark.usefixtures("each_split")

Ranks = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def split() -> str:
    """Under "forward" a rank on its own has no say in when its buckets are launched."""
    return "backward"


LIBRARY = torch.library.Library("ddp_compile_tests", "FRAGMENT")


class AllReducesInBackward(torch.autograd.Function):
    """Stands for layers that communicate over the group of the gradients, as a synchronised BatchNorm does."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.ops.ddp_compile_tests.all_reduce(gradient)


def all_reduced(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


LIBRARY.define("all_reduce(Tensor x) -> Tensor")
LIBRARY.impl("all_reduce", all_reduced, "CompositeExplicitAutograd")
torch.library.register_fake("ddp_compile_tests::all_reduce", torch.empty_like, lib=LIBRARY)


class WithCollective(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i == 1:
                x = AllReducesInBackward.apply(x)
        return x


def look_on_rank_0(model: Any, x: Tensor, step: int) -> None:
    if step == 2 and dist.get_rank() == 0:
        list(model.parameters())[-1].register_hook(lambda gradient: None)
    loss_of(model(x)).backward()


def evaluate_on_rank_0(model: Any, x: Tensor, step: int) -> None:
    if step >= 2 and dist.get_rank() == 0:
        model.eval()
        model(x)
        model.train()
    loss_of(model(x)).backward()


@pytest.mark.parametrize(
    ("step_of", "comm_hook", "settings"),
    [
        pytest.param(look_on_rank_0, False, {}, marks=pytest.mark.long),
        pytest.param(look_on_rank_0, True, {}, marks=pytest.mark.long),
        pytest.param(look_on_rank_0, False, {"static_graph": True}, marks=pytest.mark.long),
        (evaluate_on_rank_0, False, {}),
    ],
)
@on_ranks(2)
def test_collectives_of_the_backward_itself_meet_those_of_other_ranks(
    step_of: Step, comm_hook: bool, settings: dict[str, bool]
) -> None:
    def step(model: Any, x: Tensor, number: int) -> None:
        if comm_hook and number == 0 and hasattr(model, "register_comm_hook"):
            model.register_comm_hook(None, allreduce_hook)
        step_of(model, x, number)

    assert train(lambda: WithCollective(WIDTH, 4), step, **settings) == [0.0] * 5


class RaisesOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.ops.ddp_compile_tests.raise_if_asked(gradient)


asked_to_raise = False


def raise_if_asked(x: Tensor) -> Tensor:
    if asked_to_raise:
        raise ValueError("user error")
    return x.clone()


LIBRARY.define("raise_if_asked(Tensor x) -> Tensor")
LIBRARY.impl("raise_if_asked", raise_if_asked, "CompositeExplicitAutograd")
torch.library.register_fake("ddp_compile_tests::raise_if_asked", torch.empty_like, lib=LIBRARY)


class MayRaise(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i == 1:
                x = RaisesOnce.apply(x)
        return x


def raise_behind_the_first_launch() -> str:
    global asked_to_raise
    model = ddp_compile(MayRaise(WIDTH, 4), bucket_cap_mb=CAP_MB, backend="aot_eager")
    x = torch.ones(6, WIDTH)
    with model.no_sync():
        loss_of(model(x)).backward()
    loss = loss_of(model(x))
    asked_to_raise = True
    with pytest.raises(ValueError, match="user error"):
        loss.backward()
    asked_to_raise = False
    with pytest.raises(ReductionError) as refused:
        model(x)
    return str(refused.value)


def test_an_exception_behind_the_first_launch_is_refused_the_next_forward(ranks: Ranks) -> None:
    for said in ranks(2).run(raise_behind_the_first_launch):
        assert "the last backward raised after its reduction had started" in said
