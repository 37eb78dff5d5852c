"""``check_finite_gradients``: a non-finite gradient on one rank is an error on all, and training can continue."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pool import on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from ddp_compile import NonFiniteGradientError, ddp_compile, shard_optimizer
from ddp_compile.algorithms import ByteGrad, GradientAllReduce
from ddp_compile.runtime.comm.iteration_message import IterationMessage

WIDTH = 33
NAN, INF = float("nan"), float("inf")


class Model(nn.Module):
    """The gradient of the second layer's bias has ``addend`` in it, and no other gradient has."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.rows = nn.Embedding(5, WIDTH, sparse=True) if sparse else None

    def forward(self, x: Tensor, addend: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.rows is not None:
            return x.mean() + (self.rows(torch.tensor([1, 3, 3])) * addend).sum()
        return x.mean() + (self.layers[1].bias * addend).sum()


def batch(step: int, value: float = 0.0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(10 * step + dist.get_rank())
    addend = torch.zeros(WIDTH)
    addend[7] = value
    return torch.randn(6, WIDTH), addend


def plain_step(model: Any, step: int, value: float) -> None:
    model(*batch(step, value)).backward()


def accumulates(model: Any, step: int, value: float) -> None:
    with model.no_sync():
        model(*batch(step, value)).backward()
    model(*batch(step)).backward()


def hook_after_the_launch(model: Any, step: int, value: float) -> None:
    """On one rank only: the graph has computed a finite gradient, and its bucket may have been launched with it."""
    spoil = model.layers[1].bias.register_hook(lambda gradient: gradient * value) if value else None
    try:
        model(*batch(step)).backward()
    finally:
        if spoil is not None:
            spoil.remove()


def finalized_by_hand(model: Any, step: int, value: float) -> None:
    model.require_manual_backward_finalization = True
    plain_step(model, step, value)
    model.finalize_backward()


#: By step: what a gradient has, and on which rank.
SPOILT = {0: (NAN, 1), 3: (INF, 0), 5: (NAN, 1)}


def train(
    step_of: Callable[[Any, int, float], None] = plain_step,
    prepare: Callable[[Any, torch.optim.Optimizer], object] = lambda model, optimizer: None,
    sparse: bool = False,
    **settings: Any,
) -> tuple[list[str], list[bool], int]:
    """What each step has raised, whether each parameter is finite in the end, and how many buckets launch early."""
    torch.manual_seed(3)
    settings = {"backend": "aot_eager", "bucket_cap_mb": 0.003, **settings}
    model: Any = ddp_compile(Model(sparse), check_finite_gradients=True, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare(model, optimizer)
    raised = []
    for step in range(7):
        value, rank = SPOILT.get(step, (0.0, 0))
        try:
            step_of(model, step, value if rank == dist.get_rank() else 0.0)
        except NonFiniteGradientError as error:
            raised.append(str(error).partition(": ")[2].partition(". ")[0])
        else:
            raised.append("")
            optimizer.step()
        optimizer.zero_grad()
    num_early = len(model._ddp_compile_state.reducer.early_buckets)
    model.unwrap()
    return raised, [bool(p.isfinite().all()) for p in model.parameters()], num_early


def train_and_check(name: str = "layers.1.bias", **arguments: Any) -> int:
    """Every rank has raised and named the gradient, and continues to train; returns how many buckets launch early."""
    raised, are_finite, num_early = train(**arguments)
    expected = {step: (rank, name) for step, (_, rank) in SPOILT.items()}
    pattern = r"gradients were infinite or NaN before they were reduced, on rank (\d) in bucket \d \((.*)\)"
    found = {step: re.fullmatch(pattern, text) for step, text in enumerate(raised) if text}
    assert {step: match and (int(match[1]), match[2]) for step, match in found.items()} == expected, raised
    assert all(are_finite)
    said_by_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said_by_all, raised)
    assert said_by_all == [raised] * dist.get_world_size()
    return num_early


@pytest.mark.parametrize("split", ["forward", "backward"])
@on_ranks(2)
def test_every_rank_raises_whose_gradient_it_was_and_trains_on(split: str) -> None:
    assert (train_and_check(split=split) > 0) == (split == "backward")


@on_ranks(2)
def test_a_hook_that_spoils_a_gradient_after_its_bucket_was_launched() -> None:
    train_and_check(step_of=hook_after_the_launch, split="backward")


WAYS: dict[str, dict[str, Any]] = {
    "accumulation in no_sync": {"step_of": accumulates},
    "comm hook": {"prepare": lambda model, _: model.register_comm_hook(None, fp16_compress_hook)},
    "sharded optimizer": {"prepare": lambda model, optimizer: shard_optimizer(optimizer, model)},
    "unused parameters": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "copied back, lazily": {"gradient_as_bucket_view": False, "lazy_bucket_allocation": True},
    "eight bits": {"algorithm": ByteGrad()},
    "hierarchical": {"algorithm": GradientAllReduce(hierarchical=True, wire_dtype=torch.bfloat16)},
    "finalized by hand": {"step_of": finalized_by_hand},
    "sparse gradient": {"sparse": True},
}


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
@torch.compiler.set_stance("force_eager")  # tracing would be most of the time
def test_it_holds_for_each_way_to_train(way: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")  # two nodes
        train_and_check("rows.weight" if way == "sparse gradient" else "layers.1.bias", **WAYS[way])


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_a_rank_that_does_not_see_the_value_raises_too() -> None:
    """With a comm hook that shows no rank the values of another."""
    model: Any = ddp_compile(Model(), check_finite_gradients=True)
    model.register_comm_hook(None, noop_hook)
    with pytest.raises(NonFiniteGradientError, match=r"on rank 1 in bucket 0 \(layers\.1\.bias\)"):
        plain_step(model, 0, NAN if dist.get_rank() == 1 else 0.0)
    assert bool(model.layers[1].bias.grad.isfinite().all()) == (dist.get_rank() == 0)


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_ranks_with_the_same_are_named_together_and_no_optimizer_steps_in_the_backward() -> None:
    model: Any = ddp_compile(Model(), check_finite_gradients=True)
    model._register_fused_optim(torch.optim.SGD, lr=0.1)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(NonFiniteGradientError, match=r"on ranks 0-1 in bucket 0 \(layers\.1\.bias\)"):
        plain_step(model, 0, NAN)
    assert all(map(torch.equal, model.parameters(), before))
    model.zero_grad()
    plain_step(model, 1, 0.0)
    assert not any(map(torch.equal, model.parameters(), before))


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_a_rank_without_input_hears_of_it() -> None:
    model: Any = ddp_compile(Model(), check_finite_gradients=True)
    with pytest.raises(NonFiniteGradientError, match=r"on rank 1 in bucket 0 \(layers\.1\.bias\)"), model.join():
        for step in range(1 + 2 * dist.get_rank()):
            plain_step(model, step, NAN if step == 2 else 0.0)


@pytest.mark.parametrize("checks", [False, True])
@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_nothing_is_sent_unless_it_is_asked_for(checks: bool) -> None:
    """In an iteration that is no agreement point and launches nothing early."""
    model: Any = ddp_compile(Model(), check_finite_gradients=checks, split="forward", backend="eager")
    with (
        mock.patch.object(IterationMessage, "send") as send,
        contextlib.suppress(AssertionError),  # nothing has been sent that could be waited for
    ):
        plain_step(model, 0, 0.0)
    assert send.call_count == int(checks)
