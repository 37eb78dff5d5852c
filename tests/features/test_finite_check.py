"""``check_finite_gradients``: a non-finite gradient on one rank is an error on all, and training can continue."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import assert_buckets_launched_early
from rank_pool import on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from ddp_compile import NonFiniteGradientError, ReplicationError, ddp_compile, shard_optimizer
from ddp_compile.algorithms import ByteGrad, Decentralized, GradientAllReduce

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
) -> tuple[list[str], Any]:
    """What each step has raised, and the model in the end."""
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
    return raised, model


def train_and_check(name: str = "layers.1.bias", **arguments: Any) -> Any:
    """Every rank has raised and named the gradient, and continues to train; returns the model."""
    raised, model = train(**arguments)
    expected = {step: (rank, name) for step, (_, rank) in SPOILT.items()}
    pattern = r"gradients were infinite or NaN before they were reduced, on rank (\d) in bucket \d \((.*)\)"
    found = {step: re.fullmatch(pattern, text) for step, text in enumerate(raised) if text}
    assert {step: match and (int(match[1]), match[2]) for step, match in found.items()} == expected, raised
    assert all(bool(p.isfinite().all()) for p in model.state_dict().values())
    return model


@pytest.mark.parametrize("split", ["forward", "backward"])
@on_ranks(2)
def test_non_finite_gradient_on_one_rank(split: str) -> None:
    assert_buckets_launched_early(train_and_check(split=split))


@on_ranks(2)
def test_hook_after_the_launch() -> None:
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
def test_ways_to_train(way: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")  # two nodes
        train_and_check("rows.weight" if way == "sparse gradient" else "layers.1.bias", **WAYS[way])


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_rank_that_does_not_see_the_value() -> None:
    """With a comm hook that shows no rank the values of another."""
    model: Any = ddp_compile(Model(), check_finite_gradients=True)
    model.register_comm_hook(None, noop_hook)
    with pytest.raises(NonFiniteGradientError, match=r"on rank 1 in bucket 0 \(layers\.1\.bias\)"):
        plain_step(model, 0, NAN if dist.get_rank() == 1 else 0.0)
    assert bool(model.layers[1].bias.grad.isfinite().all()) == (dist.get_rank() == 0)


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_no_step_in_the_backward() -> None:
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
def test_inside_join() -> None:
    model: Any = ddp_compile(Model(), check_finite_gradients=True)
    with pytest.raises(NonFiniteGradientError, match=r"on rank 1 in bucket 0 \(layers\.1\.bias\)"), model.join():
        for step in range(1 + 2 * dist.get_rank()):
            plain_step(model, step, NAN if step == 2 else 0.0)


def test_one_rank(single_rank_group: None) -> None:
    """It is checked though nothing is sent."""
    model: Any = ddp_compile(Model(), check_finite_gradients=True, backend="eager")
    plain_step(model, 0, 0.0)
    with pytest.raises(NonFiniteGradientError, match=r"on rank 0 in bucket 0 \(layers\.1\.bias\)"):
        plain_step(model, 1, INF)
    model.zero_grad()
    plain_step(model, 2, 0.0)
    plain_step(ddp_compile(Model(), backend="eager"), 3, NAN)  # not an error unless that is asked for


def test_switch_to_an_average(single_rank_group: None) -> None:
    model: Any = ddp_compile(Model(), check_finite_gradients=True, backend="eager")
    with pytest.raises(ReplicationError, match=r"rank 0: check_finite_gradients=True .* the decentralized"):
        model.set_comm_algorithm(Decentralized())
