"""Regions, asked for or in modules whose own code Dynamo leaves to Python: gradients, and buckets launched early."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from beside import flat_of, pair, seeded, train_beside
from models import largest, loss_of, relative_difference
from rank_pool import Ranks, on_ranks
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from ways_to_train import note_launches

from ddp_compile import RanksDifferError, ddp_compile, shard_optimizer

WIDTH, NUM_BLOCKS, NUM_STEPS, ROWS = 24, 6, 4, 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Blocks(nn.Module):
    """Equal blocks between layers of other kinds; 2.6 KiB of gradients in each block."""

    make_block: Callable[[], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(type(self).make_block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


class Checkpointed(Blocks):
    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)


class Tied(Blocks):
    """Two blocks share a weight, and a third one has a weight of the stem, which is outside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[4].linear.weight = self.blocks[1].linear.weight
        self.blocks[3].linear.weight = self.stem.weight


class Trained(NamedTuple):
    """The results of training on one rank, with gradients of DistributedDataParallel."""

    num_graphs: int  #: that the backend was given
    buckets: list[list[str]]  #: in the end, the names of their parameters
    num_early: list[int]  #: buckets launched while the stem's gradient was missing, in each step
    num_unused: int  #: parameters that this rank's backwards have not reached, in all steps
    plan: str  #: its digest
    says: str  #: by ``explain()``


def rows(step: int) -> list[Tensor]:
    """The batches of all ranks; their means differ so far that gates choose other experts on each rank."""
    torch.manual_seed(100 * step)
    return [2 * torch.randn(1, WIDTH) + 0.3 * torch.randn(ROWS, WIDTH) for _ in range(dist.get_world_size())]


def train(make: type[nn.Module], lr: float = 0.1, regions: Any = "auto", split: str = "auto", **both: bool) -> Trained:
    counter = CompileCounterWithBackend("aot_eager")
    models = pair(make, both, bucket_cap_mb=0.004, backend=counter, regions=regions, split=split)
    model, reached = models[0], set[str]()
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: reached.add(name))
    # After zero_grad, and before the parameter's own hook has told the reducer.
    launches = note_launches(model, lambda bucket: model.stem.weight.grad is None)
    num_early, num_unused = [], []

    def step_of(each: Any, _x: Tensor, step: int) -> None:
        launches.clear()
        reached.clear()
        loss_of(each(rows(step)[dist.get_rank()])).backward()
        if each is model:
            num_early.append(sum(launches))
            num_unused.append(len(list(model.parameters())) - len(reached))

    assert largest(train_beside(models, step_of, NUM_STEPS, width=WIDTH, lr=lr)) < 1e-5
    plan = model.bucket_plan
    buckets = [[gradient.fqn for gradient in bucket.gradients] for bucket in plan.buckets]
    return Trained(counter.frame_count, buckets, num_early, sum(num_unused), plan.digest, str(model.explain()))


def owners(names: list[str]) -> set[str]:
    """The regions of parameters; those outside have none."""
    return {".".join(name.split(".")[:2]) for name in names if name.startswith("blocks.")}


@pytest.mark.parametrize("make", [Checkpointed, Tied])
@on_ranks(2)
def test_regions_train(make: type[nn.Module]) -> None:
    trained = train(make)
    assert trained.num_graphs == 1
    if make is Checkpointed:  # two whole regions in each bucket, from the last one to the first
        backwards = [f"blocks.{i}" for i in reversed(range(NUM_BLOCKS))]
        in_buckets = [owners(names) for names in trained.buckets if owners(names)]
        assert in_buckets == [set(backwards[i : i + 2]) for i in range(0, NUM_BLOCKS, 2)]
        assert trained.num_early[-1] == len(trained.buckets) - 1


@on_ranks(2)
def test_sharded_optimizer_steps_regions() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    ways = ({"regions": "auto", "backend": counter}, {"backend": "eager"})
    models: list[Any] = [ddp_compile(seeded(Blocks), bucket_cap_mb=0.004, **settings) for settings in ways]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    shard_optimizer(optimizers[0], models[0])
    for step in range(NUM_STEPS):
        x = rows(step)[dist.get_rank()]
        for model, optimizer in zip(models, optimizers, strict=True):
            loss_of(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
        # A region by itself: its parameters are still being gathered.
        with torch.no_grad():
            assert relative_difference(*(model.blocks[0](x) for model in models)) < 1e-5
    assert relative_difference(*map(flat_of, models)) < 1e-5
    assert counter.frame_count == 2  # for training, and for the region by itself


@on_ranks(2)
def test_regions_that_differ() -> None:
    with pytest.raises(RanksDifferError, match="modules that are compiled by themselves="):
        ddp_compile(Blocks(), backend="eager", regions=[Block] if dist.get_rank() else None)


# Blocks that are compiled by themselves since Dynamo gives up the code around them.

NUM_EXPERTS = 4


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


def train_left_to_python(make: type[nn.Module], split: str) -> Trained:
    unused = {"find_unused_parameters": True} if make is Mixture else {}
    return train(make, regions=None, split=split, lr=0.0, **unused)  # gates choose the same experts again


IN_BLOCKS = {
    OfTorch: "6 regions of Sequential (",
    Mixture: "24 regions of Block (blocks.0.experts.0, blocks.0.experts.1, ..., blocks.5.experts.3)",
}


def assert_launched_early(trained: Trained) -> None:
    """All except the bucket with the stem. In the first step the buckets follow the order that the plan expects."""
    num_buckets = len(trained.buckets)
    assert trained.num_early[-1] >= num_buckets - 2 > 1, trained.num_early
    assert trained.num_early[0] > num_buckets // 3, trained.num_early


@pytest.mark.parametrize("make", IN_BLOCKS)
def test_blocks_after_a_graph_break(make: type[nn.Module], split: str, ranks: Ranks) -> None:
    trained = ranks(2).run(train_left_to_python, make, split)
    for of_rank in trained:
        assert IN_BLOCKS[make] in of_rank.says
        assert_launched_early(of_rank)
        assert of_rank.plan == trained[0].plan
    if make is Mixture:
        assert all(of_rank.num_unused for of_rank in trained)
        assert len({of_rank.num_unused for of_rank in trained}) == 2


class DiffersByRank(Blocks):
    """Dynamo gives up the loop on one rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.breaks = dist.get_rank() == 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            if self.breaks:
                print(end="")
        return self.head(x)


def test_one_rank_compiles_blocks(split: str, ranks: Ranks) -> None:
    trained = ranks(2).run(train_left_to_python, DiffersByRank, split)
    for rank, of_rank in enumerate(trained):
        assert ("6 regions of Block (" in of_rank.says) == (rank == 0)
        assert of_rank.plan == trained[0].plan
