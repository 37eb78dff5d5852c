"""A user's algorithm trains like DistributedDataParallel in every way; other objects are refused."""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from averages import on_nodes
from beside import beside_plain, difference_to_mean, own_batch, train_beside
from halves import Built, Halves, HalvesConfig
from in_ci import only
from models import Mlp, largest, loss_of
from rank_pool import Ranks, on_ranks
from torch import Tensor, nn
from ways_to_train import WAYS
from ways_to_train import train as train_way

from ddp_compile import RanksDifferError, ReductionError, ReplicationError, ddp_compile
from ddp_compile.algorithms import (
    AlgorithmConfig,
    AsyncModelAverage,
    Bucket,
    ByteGrad,
    CollectiveChain,
    CommAlgorithm,
    Decentralized,
    DiLoCo,
    GradientAllReduce,
    LocalSGD,
    LowPrecisionDecentralized,
    Traits,
    build_algorithm,
)

# Those in which the reducer asks most of an algorithm: no launch, another one, and gradients that others change. A wire
# of fewer bits has something relative to say of no gradient that is rounding alone, and is not asked for sparse ones.
WAYS_IN_CI = ["forward_inside_no_sync", "gradients_replaced_in_between", "contributor_that_appears_on_one_rank"]
# A graph that is cut takes the losses one by one for a gradient that arrives twice.
LEFT_OUT = ("two_forwards_with_batch_norm", "sparse_regulariser", "losses_one_by_one")
#: With what a gradient may be off; what is not reduced, or twice, is off by half or more.
TOLERANCES: dict[AlgorithmConfig, float] = {
    HalvesConfig(): 1e-5,
    ByteGrad(): 0.15,
    GradientAllReduce(wire_dtype=torch.float16): 0.15,
    GradientAllReduce(reproducible=True): 1e-5,
    GradientAllReduce(wire_dtype=torch.bfloat16): 0.15,
}
IN_CI = [(HalvesConfig(), way) for way in WAYS_IN_CI]


@pytest.mark.parametrize(
    ("algorithm", "way"),
    only(IN_CI, itertools.product(TOLERANCES, (way for way in WAYS if way not in LEFT_OUT))),
    ids=str,
)
@on_ranks(2)
def test_ways_to_train(algorithm: AlgorithmConfig, way: str, split: str) -> None:
    assert train_way(way, split=split, algorithm=algorithm).worst < TOLERANCES[algorithm]


class HalvesUntilAHook(Halves):
    gives_way_to_comm_hook = True
    detached: tuple[bool, ...] = ()

    def detach(self, together: bool) -> None:
        self.detached += (together,)


def test_comm_hook_detaches_algorithm(single_rank_group: None) -> None:
    model = ddp_compile(nn.Linear(2, 2), algorithm=Built(HalvesUntilAHook), backend="eager")
    algorithm = model.comm_algorithm
    model.register_comm_hook(None, lambda state, bucket: None)
    assert model.comm_algorithm is not algorithm and algorithm.detached == (True,)


class WithoutLaunch(CommAlgorithm):
    name = "nothing"


class AverageThatGivesWay(WithoutLaunch):
    traits = Traits(payload="parameters")
    gives_way_to_comm_hook = True


class SaysNotWhen(WithoutLaunch):
    traits = Traits(payload="both")
    launch = Halves.launch


class Uncounted(CollectiveChain):
    name = "uncounted"
    reduce = None


class Nameless(CommAlgorithm):
    launch = Halves.launch


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Traits(payload="weights"), "Traits(payload='weights'): pass one of 'gradients', 'parameters'"),
        (lambda: Traits(layout="flat"), "Traits(layout='flat'): pass one of"),
        (lambda: Traits(payload="parameters", replayable=False), "how gradient buckets are launched"),
        (lambda: Traits(payload="parameters", layout="ddp"), "how gradient buckets are launched"),
        (lambda: Traits(in_step=False), "each rank waits for the gradients of all others"),
        (WithoutLaunch, "WithoutLaunch has no launch(), which reduces a bucket of gradients"),
        (SaysNotWhen, "SaysNotWhen has the payload 'both' but does not say when gradients are sent"),
        (AverageThatGivesWay, "AverageThatGivesWay has the payload 'parameters' and gives_way_to_comm_hook"),
        (lambda: Uncounted(None), "Uncounted has no num_collectives"),
        (Nameless, "Nameless has no name"),
    ],
)
def test_contradictions_are_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError)) as refused:
        build_algorithm(Built(lambda group: make()), None)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("config", "settings", "says"),
    [
        (AsyncModelAverage, {"sync_interval_ms": 0}, "sync_interval_ms=0"),
        (AsyncModelAverage, {"sync_interval_ms": float("inf")}, "sync_interval_ms=inf"),
        (AsyncModelAverage, {"warmup_steps": -1}, "warmup_steps=-1"),
        (Decentralized, {"communication_interval": 0}, "communication_interval=0"),
        (Decentralized, {"peer_selection": "ring"}, "peer_selection='ring'"),
        (DiLoCo, {"sync_every": 0}, "sync_every=0): pass a number of steps from 1 on"),
        (DiLoCo, {"sync_every": 8, "fragments": 0}, "fragments=0"),
        (DiLoCo, {"sync_every": 8, "fragment_sync_delay": -1}, "fragment_sync_delay=-1"),
        (DiLoCo, {"sync_every": 8, "fragment_sync_delay": 8}, "fragment_sync_delay=8) must be less than sync_every=8"),
        (DiLoCo, {"sync_every": 8, "fragment_update_alpha": 1.5}, "fragment_update_alpha=1.5): pass a number from 0"),
        (DiLoCo, {"sync_every": 8, "wire_dtype": torch.uint8}, "wire_dtype=torch.uint8): pass torch.float32 or torch."),
        (DiLoCo, {"sync_every": 8, "outer_lr": float("nan")}, "outer_lr=nan"),
        (DiLoCo, {"sync_every": 8, "outer_momentum": -0.1}, "outer_momentum=-0.1"),
        (GradientAllReduce, {"wire_dtype": torch.int8}, "wire_dtype=torch.int8): pass torch.float16 or"),
        (GradientAllReduce, {"wire_dtype": "float16"}, "wire_dtype='float16'): pass torch.float16 or"),
        (GradientAllReduce, {"sum_dtype": torch.float16}, "sum_dtype=torch.float16): pass torch.float32"),
        (GradientAllReduce, {"reproducible": True, "hierarchical": True}, "how many ranks a node has"),
        (LocalSGD, {"period": 0}, "period=0"),
        (LocalSGD, {"period": 2, "warmup_steps": -1}, "warmup_steps=-1"),
        (LowPrecisionDecentralized, {"communication_interval": 1.5}, "communication_interval=1.5"),
    ],
)
def test_settings_out_of_range_are_refused(config: Any, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as refused:
        config(**settings)
    said = str(refused.value)
    assert said.startswith(config.__name__) and says in said


@on_ranks(2)
def test_other_objects_are_refused() -> None:
    said: list[str] = []
    halves = Halves(dist.group.WORLD)
    shared = Built(lambda group: halves)  # a mistake: the same algorithm for every model
    _first = ddp_compile(nn.Linear(2, 2), algorithm=shared)
    none = Built(lambda group: "all-reduce")
    for wrong in ("allreduce", GradientAllReduce, Halves(dist.group.WORLD), none, shared, int, HalvesConfig()):
        module = nn.Embedding(4, 2, sparse=True) if wrong == HalvesConfig() else nn.Linear(2, 2)
        with pytest.raises((TypeError, ReplicationError)) as refused:
            ddp_compile(module, algorithm=wrong)
        said.append(str(refused.value))
    text, a_class, live, none, again, no_config, sparse = said
    assert "algorithm='allreduce' is not an AlgorithmConfig" in text
    assert "did you mean GradientAllReduce()?" in a_class and "did you mean" not in no_config
    assert "algorithm=Halves(...) is a CommAlgorithm, which works for one model" in live
    assert "Built.build() returned 'all-reduce'" in none
    assert "Built.build() returned the reduce-scatter and all-gather of another model" in again
    assert sparse.startswith(f"rank {dist.get_rank()}: the reduce-scatter and all-gather takes no sparse gradients")
    assert "weight" in sparse


class TwoHeads(Mlp):
    def forward(self, x: Any) -> Any:
        return self.layers[0](x), self.layers[1](x)


@on_ranks(2)
def test_ranks_wait_at_different_times() -> None:
    """Rank 0 does one backward over both outputs, rank 1 one for each."""
    settings = {"bucket_cap_mb": 1e-4, "backend": "eager", "split": "none", "algorithm": HalvesConfig()}

    def step_of(model: nn.Module, x: Tensor, step: int) -> None:
        losses = [loss_of(output) for output in model(x)]
        for loss in [sum(losses)] if dist.get_rank() == 0 else losses[::-1]:
            loss.backward()

    assert largest(train_beside(beside_plain(lambda: TwoHeads(8, 2), **settings), step_of, width=8)) < 1e-6


@on_ranks(2)
def test_ranks_have_to_agree() -> None:
    for other, name in (
        (HalvesConfig(), "reduce-scatter and all-gather"),
        (GradientAllReduce(hierarchical=True), "hierarchical gradient all-reduce"),
    ):
        said = f"algorithm=gradient all-reduce on rank 0 is algorithm={name}"
        with on_nodes(2), pytest.raises(RanksDifferError, match=said):
            ddp_compile(nn.Linear(2, 2), algorithm=other if dist.get_rank() else GradientAllReduce())


# Algorithms that send a bucket by several collectives: in one order on all ranks, and errors that name them.


class Miscounted(CollectiveChain):
    """Two collectives, one after the other, whatever ``num_collectives`` says."""

    name = "all-reduce of twice the half"

    def __init__(self, process_group: dist.ProcessGroup, num_collectives: int) -> None:
        super().__init__(process_group)
        self.num_collectives = num_collectives

    def reduce(self, bucket: Bucket) -> Iterator[dist.Work]:
        for _ in range(2):
            bucket.flat.div_(dist.get_world_size())
            yield dist.all_reduce(bucket.flat, async_op=True)


CHAINED = {"bucket_cap_mb": 0.0003, "backend": "eager", "split": "none"}


class Raises(Miscounted):
    def reduce(self, bucket: Bucket) -> Iterator[dist.Work]:
        yield dist.all_reduce(bucket.flat, async_op=True)
        raise ValueError("no idea what comes next")


@pytest.mark.parametrize(
    ("algorithm", "num_collectives", "says"),
    [(Miscounted, 1, "yielded more"), (Miscounted, 3, "yielded fewer"), (Raises, 2, "raised ValueError('no idea what")],
)
@on_ranks(2)
def test_errors_of_reduce(algorithm: Callable[..., Any], num_collectives: int, says: str) -> None:
    """They are not taken for errors of another rank."""
    model = ddp_compile(Mlp(9, 3), algorithm=Built(lambda group: algorithm(group, num_collectives)), **CHAINED)
    with pytest.raises(ReductionError) as raised:
        loss_of(model(torch.randn(4, 9))).backward()
    message = str(raised.value)
    assert message.startswith(f"rank {dist.get_rank()}: reduce() of the all-reduce of twice the half {says}")
    assert "bucket 0" in message and "Another rank" not in message


class WithPenalty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(8, 8, bias=False)
        self.penalised = nn.Parameter(torch.randn(8, 8))

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@pytest.mark.parametrize("width", only([8], [8, 40]))
@on_ranks(2)
def test_two_modules_in_one_backward(width: int) -> None:
    """The first gradient of the iteration is another module's on each rank."""
    torch.manual_seed(3)
    plain = [WithPenalty(), nn.Linear(width, 8, bias=False)]
    settings = {"algorithm": ByteGrad(), "backend": "eager", "split": "none"}
    models = [ddp_compile(copy.deepcopy(each), **settings) for each in plain]
    for step in range(5):
        x, y = own_batch(step, 8), own_batch(step, width)
        for first, second in (plain, models):
            first.zero_grad()
            second.zero_grad()
            penalty_comes_first = dist.get_rank() == 1 and step >= 2
            penalty = first.penalised.square().sum() if penalty_comes_first else None
            losses = first(x).square().sum() + second(y).square().sum()
            (losses + (first.penalised.square().sum() if penalty is None else penalty)).backward()
        assert largest(map(difference_to_mean, models, plain)) < 0.05


def leave_in_the_middle() -> None:
    """Rank 1 does not reach its second backward."""
    model = ddp_compile(Mlp(33, 4), algorithm=ByteGrad(), bucket_cap_mb=0.003, backend="eager", split="none")
    for step in range(2 - dist.get_rank()):
        torch.manual_seed(step)
        loss_of(model(torch.randn(6, 33))).backward()


def test_missing_rank_is_named(ranks: Ranks) -> None:
    waiting, _ = ranks(2).run_expecting_failures(leave_in_the_middle, timeout_s=3.0)
    assert waiting.kind == "ReductionError"
    assert waiting.message.startswith("rank 0: the all-reduce of bucket 0 (")
