"""Modules whose own code Dynamo leaves to Python, on several ranks: gradients, and buckets launched early."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from in_ci import only
from models import largest, loss_of, relative_difference
from rank_pool import RankPool, on_ranks
from test_regions import WAYS, launches_before
from test_regions import train as train_regions
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ddp_compile, shard_optimizer

Ranks = Callable[[int], RankPool]
WIDTH, NUM_BLOCKS, NUM_EXPERTS, NUM_STEPS, ROWS = 16, 4, 4, 4, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class Blocks(nn.Module):
    """Blocks in a loop that Dynamo gives up, between two layers outside."""

    make_block: Callable[[], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(type(self).make_block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            print(end="")
        return self.head(x)


class Logging(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            logging.getLogger("tests").info("block %d", number)
        return self.head(x)


class OfTorch(Blocks):
    """Blocks whose forward is torch's own, and another such module."""

    make_block = staticmethod(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            if x.isnan().any():
                break
        return self.head(self.last(x))


class Experts(nn.Module):
    """Each row goes to the expert that its gate chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS)
        self.experts = nn.ModuleList(Block() for _ in range(NUM_EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        chosen, out = weights.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, number, None])
        return out


class Mixture(Blocks):
    """Blocks that are experts: regions inside regions, since Dynamo gives up the loop of each block as well."""

    make_block = Experts

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Trained(NamedTuple):
    """The results of training on one rank.

    Args:
        to_ddp: Largest relative difference of a gradient to DistributedDataParallel's.
        to_whole: The same to one process with the batches of all ranks.
        num_early: Buckets launched while the stem's gradient was missing, in each step.
        num_buckets: In the end.
        num_unused: Parameters that this rank's backwards have not reached, in all steps.
        plan: The digest of the bucket plan.
        says: What ``explain()`` says.
    """

    to_ddp: float
    to_whole: float
    num_early: list[int]
    num_buckets: int
    num_unused: int
    plan: str
    says: str


def rows(step: int) -> list[Tensor]:
    """The batches of all ranks; their values differ so far that the gates choose other experts on each rank."""
    torch.manual_seed(step)
    return [2 * torch.randn(1, WIDTH) + 0.3 * torch.randn(ROWS, WIDTH) for _ in range(dist.get_world_size())]


def train(make: type[nn.Module], backend: str, **settings: Any) -> Trained:
    models: list[Any] = []
    for _ in range(3):
        torch.manual_seed(3)
        models.append(make())
    unused = {"find_unused_parameters": True} if make is Mixture else {}
    model: Any = ddp_compile(models[0], bucket_cap_mb=0.004, backend=backend, **unused, **settings)
    with_ddp, whole = DistributedDataParallel(models[1], **unused), models[2]
    reached = set[str]()
    for name, parameter in models[0].named_parameters():
        parameter.register_hook(lambda gradient, name=name: reached.add(name))
    launches = launches_before(model, model.stem.weight)
    to_ddp, to_whole, num_early, num_unused = [0.0], [0.0], [], 0
    for step in range(NUM_STEPS):
        for each in (launches, reached):
            each.clear()
        for each in models:
            each.zero_grad()
        for each in (model, with_ddp):
            loss_of(each(rows(step)[dist.get_rank()])).backward()
        loss_of(whole(torch.cat(rows(step)))).backward()
        num_early.append(sum(launches))
        num_unused += len(list(whole.parameters())) - len(reached)
        for ours, theirs, of_whole in zip(*(each.parameters() for each in models), strict=True):
            assert (ours.grad is None) == (theirs.grad is None) == (of_whole.grad is None)
            if ours.grad is not None:
                to_ddp.append(relative_difference(ours.grad, theirs.grad))
                to_whole.append(relative_difference(ours.grad, of_whole.grad))
    assert model._ddp_compile_state.compiler.failures == []
    plan = model.bucket_plan
    return Trained(
        largest(to_ddp), largest(to_whole), num_early, len(plan.buckets), num_unused, plan.digest, model.explain()
    )


IN_BLOCKS = {
    Blocks: "4 regions of Block (",
    Logging: "4 regions of Block (",
    OfTorch: "4 regions of Sequential (",
    Mixture: "16 regions of Block (blocks.0.experts.0, blocks.0.experts.1, ..., blocks.3.experts.3)",
}


@pytest.mark.parametrize("make", only([Mixture, OfTorch], IN_BLOCKS), ids=lambda make: make.__name__)
def test_what_python_calls_is_compiled_and_launched_early(make: type[nn.Module], split: str, ranks: Ranks) -> None:
    trained = ranks(2).run(train, make, "aot_eager", split=split)
    for of_rank in trained:
        assert of_rank.to_ddp < 1e-5
        assert of_rank.to_whole < 1e-5
        assert IN_BLOCKS[make] in of_rank.says
        # All but what holds the stem; in the first step the buckets are packed by what the plan expects.
        assert of_rank.num_early[-1] >= of_rank.num_buckets - 2 > 1, of_rank.num_early
        assert of_rank.num_early[0] > of_rank.num_buckets // 3, of_rank.num_early
        assert of_rank.plan == trained[0].plan
    if make is Mixture:
        assert all(of_rank.num_unused for of_rank in trained)
        assert len({of_rank.num_unused for of_rank in trained}) == 2


class DiffersByRank(Blocks):
    """Dynamo gives up the loop on one rank only."""

    breaks_on = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            if dist.get_rank() == self.breaks_on:
                print(end="")
        return self.head(x)


class BreaksOnRank1(DiffersByRank):
    breaks_on = 1


class BreaksLater(Blocks):
    """Dynamo gives up the loop from the third step on, after it compiled the whole module and buckets were packed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            if self.num_steps > 1:
                print(end="")
        self.num_steps += 1
        return self.head(x)


@pytest.mark.long
def test_a_loop_that_is_given_up_later_goes_on_with_blocks(split: str, ranks: Ranks) -> None:
    trained = ranks(2).run(train, BreaksLater, "aot_eager", split=split)
    for of_rank in trained:
        assert of_rank.to_ddp < 1e-5
        assert of_rank.to_whole < 1e-5
        assert "4 regions of Block (" in of_rank.says
        assert of_rank.num_early[-1] >= of_rank.num_buckets - 2 > 1, of_rank.num_early


@pytest.mark.parametrize("make", only([DiffersByRank], [DiffersByRank, BreaksOnRank1]))
def test_one_rank_may_compile_the_whole_and_another_one_blocks(make: type[Any], split: str, ranks: Ranks) -> None:
    trained = ranks(2).run(train, make, "aot_eager", split=split)
    for rank, of_rank in enumerate(trained):
        assert of_rank.to_ddp < 1e-5
        assert of_rank.to_whole < 1e-5
        assert ("4 regions of Block (" in of_rank.says) == (rank == make.breaks_on)
        assert of_rank.plan == trained[0].plan


#: Dynamo compiles `call` for one block, and does not guard on which one ``is`` the block at hand: plain torch.compile
#: computes something else there as well (2.13).
COMPARES_BLOCKS = "static_graph_without_one"


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in WAYS if name != COMPARES_BLOCKS])
@on_ranks(2)
def test_blocks_are_trained_in_every_way(name: str) -> None:
    """One of the ways to train regions, without any asked for, in a loop that Dynamo gives up."""
    way: Any = WAYS[name]

    def call(self: Any, block: nn.Module, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return way.make.call(self, block, x)

    broken = type("Broken", (way.make,), {"call": call})
    settings = {**way.settings, "regions": None}
    trained = train_regions(way._replace(make=broken, settings=settings), 0.004, "aot_eager")
    assert trained.to_ddp < 1e-5
    assert trained.to_whole < 1e-5
    assert 1 <= trained.num_graphs <= 3
    if name != "no_sync":  # where the stem has a gradient before
        assert trained.num_early > 1


@pytest.mark.long
@on_ranks(2)
def test_a_sharded_optimizer_steps_blocks() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(ddp_compile(Blocks(), bucket_cap_mb=0.004, backend="aot_eager"))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    shard_optimizer(optimizers[0], models[0])
    for step in range(NUM_STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss_of(model(rows(step)[dist.get_rank()])).backward()
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    worst = largest(relative_difference(p, q) for p, q in pairs)
    says = models[0].explain()
    assert worst < 1e-5
    assert "4 regions of Block (" in says
