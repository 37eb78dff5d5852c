"""Regional compilation on several ranks: gradients in every way to train, and buckets launched after each region."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from beside import average, difference, flat_of, seeded
from in_ci import only
from models import GptBlock, global_batch, largest, loss_of, make_model, relative_difference
from rank_pool import on_ranks
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from ways_to_train import WAYS as WAYS_TO_TRAIN
from ways_to_train import train as train_way

from ddp_compile import RanksDifferError, ddp_compile, shard_optimizer
from ddp_compile.algorithms import AlgorithmConfig, ByteGrad, Decentralized

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


class CheckpointedReentrantly(Blocks):
    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=True)


class Tied(Blocks):
    """Two blocks share a weight, and a third one has a weight of the stem, which is outside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[4].linear.weight = self.blocks[1].linear.weight
        self.blocks[3].linear.weight = self.stem.weight


class Skipping(Blocks):
    """Each rank leaves out another block in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        return super().forward(x)

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        place = next(i for i, each in enumerate(self.blocks) if each is block)
        return x if place == (self.num_forwards + dist.get_rank()) % NUM_BLOCKS else block(x)


class WithoutOne(Blocks):
    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return x if block is self.blocks[2] else block(x)


class BreaksInLoop(Blocks):
    """Dynamo gives up such a frame."""

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return block(x)


class Way(NamedTuple):
    """A model, and how it is trained.

    Args:
        make: Makes the model.
        settings: Of `ddp_compile`.
        ddp: Settings of DistributedDataParallel.
        micro_batches: Of one step, all but the last one inside ``no_sync``.
        num_graphs: How many are compiled.
        lr: Of SGD.
    """

    make: type[nn.Module] = Blocks
    settings: dict[str, Any] = {}  # noqa: RUF012 - only read
    ddp: dict[str, Any] = {}  # noqa: RUF012 - only read
    micro_batches: int = 1
    num_graphs: int = 1
    lr: float = 0.1


UNUSED = {"find_unused_parameters": True}
STATIC = {"static_graph": True}
WAYS = {
    "plain": Way(),
    "no_sync": Way(micro_batches=3),
    "checkpointed": Way(Checkpointed),
    # At first without gradients.
    "checkpointed_reentrantly": Way(CheckpointedReentrantly, STATIC, STATIC, num_graphs=2),
    "tied": Way(Tied),
    "skipping": Way(Skipping, UNUSED, UNUSED),
    "static_graph_without_one": Way(WithoutOne, STATIC, STATIC),
    "breaks_in_loop": Way(BreaksInLoop),
    "lazy_buckets": Way(settings={"lazy_bucket_allocation": True}),
    "copied_gradients": Way(settings={"gradient_as_bucket_view": False}),
}


class Trained(NamedTuple):
    """The results of training on one rank.

    Args:
        to_ddp: Largest relative difference of a gradient to DistributedDataParallel's.
        to_whole: The same to one process with the batches of all ranks.
        num_graphs: Graphs that the backend was given.
        buckets: Names of the parameters in each bucket in the end.
        num_early: Buckets launched while the stem's gradient was missing, in each step.
        num_unused: Parameters that this rank's backwards have not reached, in all steps.
        plan: The digest of the bucket plan.
        says: What ``explain()`` says.
    """

    to_ddp: float
    to_whole: float
    num_graphs: int
    buckets: list[list[str]]
    num_early: list[int]
    num_unused: int
    plan: str
    says: str


def rows(step: int, micro_batch: int = 0) -> list[Tensor]:
    """The batches of all ranks; their means differ so far that gates choose other experts on each rank."""
    torch.manual_seed(100 * step + micro_batch)
    return [2 * torch.randn(1, WIDTH) + 0.3 * torch.randn(ROWS, WIDTH) for _ in range(dist.get_world_size())]


def train(way: Way, cap_mb: float, backend: str) -> Trained:
    models = [seeded(way.make) for _ in range(3)]
    counter = CompileCounterWithBackend(backend)
    settings = {"regions": "auto", **way.settings}
    model: Any = ddp_compile(models[0], bucket_cap_mb=cap_mb, backend=counter, **settings)
    with_ddp, whole = DistributedDataParallel(models[1], **way.ddp), models[2]
    optimizers = [torch.optim.SGD(each.parameters(), lr=way.lr) for each in models]
    reached = set[str]()
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: reached.add(name))
    launches = launches_before(model, model.stem.weight)
    to_ddp, to_whole, num_early, num_unused = [0.0], [0.0], [], 0
    for step in range(NUM_STEPS):
        launches.clear()
        reached.clear()
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro_batch in range(way.micro_batches):
            is_last = micro_batch == way.micro_batches - 1
            of_ranks = rows(step, micro_batch)
            for each in (model, with_ddp):
                with contextlib.nullcontext() if is_last else each.no_sync():
                    loss_of(each(of_ranks[dist.get_rank()])).backward()
            if not issubclass(way.make, Skipping):
                loss_of(whole(torch.cat(of_ranks))).backward()
        num_early.append(sum(launches))
        num_unused += len(list(whole.parameters())) - len(reached)
        for ours, theirs, of_whole in zip(*(each.parameters() for each in models), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None:
                to_ddp.append(relative_difference(ours.grad, theirs.grad))
                to_whole.append(0.0 if of_whole.grad is None else relative_difference(ours.grad, of_whole.grad))
        for optimizer in optimizers:
            optimizer.step()
    plan = model.bucket_plan
    buckets = [[gradient.fqn for gradient in bucket.gradients] for bucket in plan.buckets]
    assert model._ddp_compile_state.compiler.failures == []
    differences = largest(to_ddp), largest(to_whole)
    return Trained(*differences, counter.frame_count, buckets, num_early, num_unused, plan.digest, str(model.explain()))


def launches_before(model: Any, parameter: Tensor) -> list[bool]:
    """Gets an entry for each bucket that is launched: whether the parameter's gradient is still missing."""
    launches: list[bool] = []
    algorithm = model.comm_algorithm
    launch = algorithm.launch
    # After an optimizer's zero_grad, and before its own hook has told the reducer.
    algorithm.launch = lambda *args: (launches.append(parameter.grad is None), launch(*args))[1]
    return launches


def owners(names: list[str]) -> set[str]:
    """The regions of parameters; those outside have none."""
    return {".".join(name.split(".")[:2]) for name in names if name.startswith("blocks.")}


@pytest.mark.parametrize("name", only(["plain", "checkpointed", "tied"], WAYS))
@on_ranks(2)
def test_gradients_equal_ddps_and_those_of_the_whole_batch(name: str) -> None:
    trained = train(WAYS[name], 0.004, "aot_eager")
    assert trained.to_ddp == 0.0  # the same products in the same order
    assert trained.to_whole < 1e-5
    assert trained.num_graphs == WAYS[name].num_graphs
    assert len(trained.buckets) > 2


@pytest.mark.parametrize(("cap_mb", "regions_of_bucket"), [(0.004, 2), (0.002, 1)])
@on_ranks(2)
def test_buckets_begin_and_end_where_regions_do(cap_mb: float, regions_of_bucket: int) -> None:
    trained = train(WAYS["plain"], cap_mb, "aot_eager")
    in_buckets = [owners(names) for names in trained.buckets if owners(names)]
    if regions_of_bucket == 1:  # a region is larger than a bucket
        in_buckets = [names for i, names in enumerate(in_buckets) if names not in in_buckets[:i]]
    backwards = [f"blocks.{i}" for i in reversed(range(NUM_BLOCKS))]
    begins = range(0, NUM_BLOCKS, regions_of_bucket)
    assert in_buckets == [set(backwards[i : i + regions_of_bucket]) for i in begins]
    assert trained.num_early[-1] == len(trained.buckets) - 1


@pytest.mark.inductor
@pytest.mark.long
@on_ranks(2)
def test_gradients_equal_ddps_under_inductor() -> None:
    models = make_model("gpt"), make_model("gpt")
    model = ddp_compile(models[0], bucket_cap_mb=0.05, regions=[GptBlock], backend="inductor")
    with_ddp = DistributedDataParallel(models[1])
    for step in range(2):
        tokens = global_batch("gpt", step, 2)[dist.get_rank() :: 2]
        for each in (model, with_ddp):
            each.zero_grad()
            loss_of(each(tokens)).backward()
        assert difference(*models) < 1e-4


@on_ranks(2)
def test_a_sharded_optimizer_steps_regions() -> None:
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "tolerance"),
    [(Decentralized(), 1e-5), (ByteGrad(), 0.05)],  # eight bits, rounded in buckets of another order
)
@on_ranks(2)
def test_other_algorithms_reduce_the_buckets_of_regions(algorithm: AlgorithmConfig, tolerance: float) -> None:
    """The parameters are those of the model compiled as a whole."""
    models: list[Any] = [
        ddp_compile(seeded(Blocks), bucket_cap_mb=100, backend="eager", algorithm=algorithm, **settings)
        for settings in ({"regions": "auto"}, {"split": "none"})
    ]
    for step in range(NUM_STEPS):
        for model in models:
            model.zero_grad()
            loss_of(model(rows(step)[dist.get_rank()])).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
    assert relative_difference(*map(flat_of, models)) < tolerance


@on_ranks(2)
def test_ranks_that_were_given_other_regions_are_told_so() -> None:
    with pytest.raises(RanksDifferError, match="modules that are compiled by themselves="):
        ddp_compile(Blocks(), backend="eager", regions=[Block] if dist.get_rank() else None)


@pytest.mark.long
@on_ranks(2)
def test_regions_that_fully_shard_has_sharded_share_a_graph() -> None:
    sharded, plain = seeded(Blocks), seeded(Blocks)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh)
    counter = CompileCounterWithBackend("aot_eager")
    model = ddp_compile(sharded, regions="auto", backend=counter)
    for step in range(2):
        for each in (model, plain):
            each.zero_grad()
            loss_of(each(rows(step)[dist.get_rank()])).backward()
        average(plain)
        for p, q in zip(sharded.parameters(), plain.parameters(), strict=True):
            ours = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            assert relative_difference(ours, q.grad) < 1e-5
    assert counter.frame_count == 1


#: A model without submodules; gradients of a part of the model, which a backward of regions brings as an eager one
#: does; a backward on one rank alone that brings all of a bucket.
NOT_BY_REGIONS = ("shared_gradients", "losses_one_by_one", "regulariser_first_on_one_rank")


@pytest.mark.long
@pytest.mark.parametrize("way", [way for way in WAYS_TO_TRAIN if way not in NOT_BY_REGIONS])
@on_ranks(2)
def test_each_layer_a_region_in_every_way_to_train(way: str) -> None:
    kinds = [nn.Conv2d if way in ("channels_last", "convolutions") else nn.Linear]
    assert train_way(way, split="auto", regions=kinds).worst < 1e-5
