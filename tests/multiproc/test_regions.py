"""Regional compilation on several ranks: gradients in every way to train, and buckets launched behind each region."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from backward_patterns import PATTERNS
from in_ci import only
from models import GptBlock, global_batch, largest, loss_of, make_model, relative_difference
from rank_pool import RankPool, on_ranks
from test_split_backward import train as train_pattern
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_compile import RanksDifferError, ddp_compile, shard_optimizer
from ddp_compile.algorithms import ByteGrad, Decentralized

Ranks = Callable[[int], RankPool]
WIDTH, NUM_BLOCKS, NUM_STEPS, ROWS = 24, 6, 4, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Blocks(nn.Module):
    """Equal blocks between layers of other kinds; 2.6 KiB of gradients in each block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
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
    """

    make: type[nn.Module] = Blocks
    settings: dict[str, Any] = {}  # noqa: RUF012 - only read
    ddp: dict[str, Any] = {}  # noqa: RUF012 - only read
    micro_batches: int = 1
    num_graphs: int = 1


UNUSED = {"find_unused_parameters": True}
STATIC = {"static_graph": True}
WAYS = {
    "plain": Way(),
    "no_sync": Way(micro_batches=3),
    "checkpointed": Way(Checkpointed),
    "checkpointed_reentrantly": Way(
        CheckpointedReentrantly, STATIC, STATIC, num_graphs=2
    ),  # at first without gradients
    "tied": Way(Tied),
    "skipping": Way(Skipping, UNUSED, UNUSED),
    "static_graph_without_one": Way(WithoutOne, STATIC, STATIC),
    "breaks_in_loop": Way(BreaksInLoop),
    "lazy_buckets": Way(settings={"lazy_bucket_allocation": True}),
    "copied_gradients": Way(settings={"gradient_as_bucket_view": False}),
}


class Trained(NamedTuple):
    """What training has shown on one rank.

    Args:
        to_ddp: Largest relative difference of a gradient to DistributedDataParallel's.
        to_whole: The same to one process with the batches of all ranks.
        num_graphs: Graphs that the backend was given.
        buckets: Names of the parameters in each bucket in the end.
        num_early: Buckets launched while the stem's gradient was missing, in the last step.
    """

    to_ddp: float
    to_whole: float
    num_graphs: int
    buckets: list[list[str]]
    num_early: int


def rows(step: int, micro_batch: int) -> list[Tensor]:
    """The batches of all ranks."""
    torch.manual_seed(100 * step + micro_batch)
    return [torch.randn(ROWS, WIDTH) for _ in range(dist.get_world_size())]


def train(way: Way, cap_mb: float, backend: str) -> Trained:
    models = []
    for _ in range(3):
        torch.manual_seed(3)
        models.append(way.make())
    counter = CompileCounterWithBackend(backend)
    settings = {"regions": "auto", **way.settings}
    model: Any = ddp_compile(models[0], bucket_cap_mb=cap_mb, backend=counter, **settings)
    with_ddp, whole = DistributedDataParallel(models[1], **way.ddp), models[2]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
    launches = launches_before(model, model.stem.weight)
    to_ddp, to_whole = [0.0], [0.0]
    for step in range(NUM_STEPS):
        launches.clear()
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
        for ours, theirs, of_whole in zip(*(each.parameters() for each in models), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None:
                to_ddp.append(relative_difference(ours.grad, theirs.grad))
                to_whole.append(0.0 if of_whole.grad is None else relative_difference(ours.grad, of_whole.grad))
        for optimizer in optimizers:
            optimizer.step()
    buckets = [[gradient.fqn for gradient in bucket.gradients] for bucket in model.bucket_plan.buckets]
    assert model._ddp_compile_state.compiler.failures == []
    return Trained(largest(to_ddp), largest(to_whole), counter.frame_count, buckets, sum(launches))


def launches_before(model: Any, parameter: Tensor) -> list[bool]:
    """Gets an entry for each bucket that is launched: whether the parameter's gradient is still missing."""
    launches: list[bool] = []
    algorithm = model.comm_algorithm
    launch = algorithm.launch
    # Behind an optimizer's zero_grad, and before its own hook has let the reducer know.
    algorithm.launch = lambda *args: (launches.append(parameter.grad is None), launch(*args))[1]
    return launches


def owners(names: list[str]) -> set[str]:
    """The regions of parameters; those outside have none."""
    return {".".join(name.split(".")[:2]) for name in names if name.startswith("blocks.")}


@pytest.mark.parametrize("name", only(["plain", "checkpointed", "tied"], WAYS))
def test_gradients_equal_ddps_and_those_of_the_whole_batch(name: str, ranks: Ranks) -> None:
    for trained in ranks(2).run(train, WAYS[name], 0.004, "aot_eager"):
        assert trained.to_ddp == 0.0  # the same products in the same order
        assert trained.to_whole < 1e-5
        assert trained.num_graphs == WAYS[name].num_graphs
        assert len(trained.buckets) > 2


@pytest.mark.parametrize(("cap_mb", "regions_of_bucket"), [(0.004, 2), (0.002, 1)])
def test_buckets_begin_and_end_where_regions_do(cap_mb: float, regions_of_bucket: int, ranks: Ranks) -> None:
    for trained in ranks(2).run(train, WAYS["plain"], cap_mb, "aot_eager"):
        in_buckets = [owners(names) for names in trained.buckets if owners(names)]
        if regions_of_bucket == 1:  # a region is larger than a bucket
            in_buckets = [names for i, names in enumerate(in_buckets) if names not in in_buckets[:i]]
        backwards = [f"blocks.{i}" for i in reversed(range(NUM_BLOCKS))]
        begins = range(0, NUM_BLOCKS, regions_of_bucket)
        assert in_buckets == [set(backwards[i : i + regions_of_bucket]) for i in begins]
        assert trained.num_early == len(trained.buckets) - 1


@pytest.mark.inductor
@pytest.mark.long
@on_ranks(2)
def test_gradients_equal_ddps_under_inductor() -> None:
    models = [make_model("gpt") for _ in range(2)]
    model = ddp_compile(models[0], bucket_cap_mb=0.05, regions=[GptBlock], backend="inductor")
    with_ddp = DistributedDataParallel(models[1])
    worst = []
    for step in range(2):
        tokens = global_batch("gpt", step, 2)[dist.get_rank() :: 2]
        for each in (model, with_ddp):
            each.zero_grad()
            loss_of(each(tokens)).backward()
        pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
        worst += [relative_difference(p.grad, q.grad) for p, q in pairs]
    worst = largest(worst)
    assert worst < 1e-4


@on_ranks(2)
def test_a_sharded_optimizer_steps_regions() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    models = []
    for settings in ({"regions": "auto", "backend": counter}, {"backend": "eager"}):
        torch.manual_seed(3)
        models.append(ddp_compile(Blocks(), bucket_cap_mb=0.004, **settings))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    shard_optimizer(optimizers[0], models[0])
    for step in range(NUM_STEPS):
        x = rows(step, 0)[dist.get_rank()]
        for model, optimizer in zip(models, optimizers, strict=True):
            loss_of(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
        # A region by itself: its parameters are still being gathered.
        with torch.no_grad():
            by_itself = [model.blocks[0](x) for model in models]
        assert relative_difference(*by_itself) < 1e-5
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    worst = largest(relative_difference(p, q) for p, q in pairs)
    num_graphs = counter.frame_count
    assert worst < 1e-5
    assert num_graphs == 2  # for training, and for the region by itself


@pytest.mark.long
@on_ranks(2)
def test_other_algorithms_reduce_the_buckets_of_regions() -> None:
    """With other algorithms: the largest relative difference of a parameter to the model compiled as a whole."""
    found = []
    for algorithm in (ByteGrad(), Decentralized()):
        models = []
        for settings in ({"regions": "auto"}, {"split": "none"}):
            torch.manual_seed(3)
            models.append(ddp_compile(Blocks(), bucket_cap_mb=100, backend="eager", algorithm=algorithm, **settings))
        for step in range(NUM_STEPS):
            for model in models:
                model.zero_grad()
                loss_of(model(rows(step, 0)[dist.get_rank()])).backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.1 * parameter.grad
        pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
        found.append((algorithm.__class__.__name__, largest(relative_difference(p, q) for p, q in pairs)))
    assert dict(found)["Decentralized"] < 1e-5
    assert dict(found)["ByteGrad"] < 0.05  # eight bits, rounded in buckets of another order


@on_ranks(2)
def test_ranks_that_were_given_other_regions_are_told_so() -> None:
    with pytest.raises(RanksDifferError) as raised:
        ddp_compile(Blocks(), backend="eager", regions=[Block] if dist.get_rank() else None)
    assert "modules that are compiled by themselves=" in str(raised.value)


@pytest.mark.long
@on_ranks(2)
def test_regions_that_fully_shard_has_sharded_share_a_graph() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(Blocks())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in models[0].blocks:
        fully_shard(block, mesh=mesh)
    counter = CompileCounterWithBackend("aot_eager")
    model = ddp_compile(models[0], regions="auto", backend=counter)
    worst = []
    for step in range(2):
        for each in (model, models[1]):
            each.zero_grad()
            loss_of(each(rows(step, 0)[dist.get_rank()])).backward()
        for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
            dist.all_reduce(q.grad)
            ours = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            worst.append(relative_difference(ours, q.grad / dist.get_world_size()))
    worst, num_graphs = largest(worst), counter.frame_count
    assert worst < 1e-5
    assert num_graphs == 1


#: What is left out: a model without submodules; gradients of a part of the model, which a backward of regions brings as
#: an eager one does; a backward on one rank alone that brings all of a bucket.
NOT_BY_REGIONS = ("shared_gradients", "losses_one_by_one", "regulariser_by_itself_on_one_rank")


@pytest.mark.long
@pytest.mark.parametrize("pattern", [pattern for pattern in PATTERNS if pattern not in NOT_BY_REGIONS])
def test_each_layer_a_region_in_every_way_to_train(pattern: str, ranks: Ranks) -> None:
    kinds = [nn.Conv2d if pattern in ("channels_last", "convolutions") else nn.Linear]
    for trained in ranks(2).run(train_pattern, pattern, "aot_eager", split="auto", regions=kinds):
        assert trained.worst < 1e-5
