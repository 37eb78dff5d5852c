"""Modules whose own code Dynamo leaves to Python, on several ranks: gradients, and buckets launched early."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from in_ci import only
from rank_pool import Ranks, on_ranks
from test_regions import WAYS, WIDTH, Block, Blocks, Trained, Way
from test_regions import train as train_regions
from torch import Tensor, nn

NUM_EXPERTS = 4


class Loop(Blocks):
    """Blocks in a loop that Dynamo gives up if it ``breaks``."""

    breaks = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            if self.breaks:
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
    """Blocks that are experts: regions inside regions, since Dynamo also gives up the loop of each block."""

    make_block = Experts

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + block(x)


def train(make: type[nn.Module], split: str) -> Trained:
    unused = {"find_unused_parameters": True} if make is Mixture else {}
    way = Way(make, {"regions": None, "split": split, **unused}, unused, lr=0.0)  # gates choose the same experts again
    trained = train_regions(way, 0.004, "aot_eager")
    assert trained.to_ddp < 1e-5
    assert trained.to_whole < 1e-5
    return trained


IN_BLOCKS = {
    Loop: "6 regions of Block (",
    Logging: "6 regions of Block (",
    OfTorch: "6 regions of Sequential (",
    Mixture: "24 regions of Block (blocks.0.experts.0, blocks.0.experts.1, ..., blocks.5.experts.3)",
}


def assert_launched_early(trained: Trained) -> None:
    """All except the bucket with the stem. In the first step the buckets follow the order that the plan expects."""
    num_buckets = len(trained.buckets)
    assert trained.num_early[-1] >= num_buckets - 2 > 1, trained.num_early
    assert trained.num_early[0] > num_buckets // 3, trained.num_early


@pytest.mark.parametrize("make", only([Mixture, OfTorch], IN_BLOCKS), ids=lambda make: make.__name__)
def test_what_python_calls_is_compiled_and_launched_early(make: type[nn.Module], split: str, ranks: Ranks) -> None:
    trained = ranks(2).run(train, make, split)
    for of_rank in trained:
        assert IN_BLOCKS[make] in of_rank.says
        assert_launched_early(of_rank)
        assert of_rank.plan == trained[0].plan
    if make is Mixture:
        assert all(of_rank.num_unused for of_rank in trained)
        assert len({of_rank.num_unused for of_rank in trained}) == 2


class DiffersByRank(Loop):
    """Dynamo gives up the loop on one rank only."""

    breaks_on = 0

    def __init__(self) -> None:
        super().__init__()
        self.breaks = dist.get_rank() == self.breaks_on


class BreaksOnRank1(DiffersByRank):
    breaks_on = 1


class BreaksLater(Loop):
    """Dynamo gives up the loop from the third step on, after it compiled the whole module and buckets were packed."""

    num_steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_steps += 1
        self.breaks = self.num_steps > 2
        return super().forward(x)


@pytest.mark.long
@on_ranks(2)
def test_a_loop_that_is_given_up_later_goes_on_with_blocks(split: str) -> None:
    trained = train(BreaksLater, split)
    assert "6 regions of Block (" in trained.says
    assert trained.num_early[-1] >= len(trained.buckets) - 2 > 1, trained.num_early


@pytest.mark.parametrize("make", only([DiffersByRank], [DiffersByRank, BreaksOnRank1]))
def test_one_rank_may_compile_the_whole_and_another_one_blocks(make: type[Any], split: str, ranks: Ranks) -> None:
    trained = ranks(2).run(train, make, split)
    for rank, of_rank in enumerate(trained):
        assert ("6 regions of Block (" in of_rank.says) == (rank == make.breaks_on)
        assert of_rank.plan == trained[0].plan


#: Dynamo compiles `call` for one block, and does not guard on which one ``is`` the present block: plain torch.compile
#: is also wrong there (2.13).
COMPARES_BLOCKS = "static_graph_without_one"


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in WAYS if name != COMPARES_BLOCKS])
@on_ranks(2)
def test_blocks_are_trained_in_every_way(name: str) -> None:
    """Those of `test_regions`, without regions asked for, in a loop that Dynamo gives up."""
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
    if name != "no_sync":  # in which the stem already has a gradient
        assert trained.num_early[-1] > 1
