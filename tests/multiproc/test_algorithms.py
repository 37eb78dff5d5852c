"""An algorithm of a user's own trains as DistributedDataParallel in every way; what is no algorithm is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from halves import Halves, HalvesConfig
from in_ci import only
from models import CASES, Mlp, loss_of, relative_difference
from rank_pool import RankPool, on_ranks
from test_gradient_parity import train_three_ways
from test_split_backward import train as train_backward_pattern
from test_training_patterns import PATTERNS
from test_training_patterns import train as train_pattern
from torch import nn

from ddp_compile import RanksDifferError, ReplicationError, ddp_compile
from ddp_compile.algorithms import AlgorithmConfig, CommAlgorithm, GradientAllReduce, Traits, build_algorithm

Ranks = Callable[[int], RankPool]


@pytest.fixture
def with_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of `ddp_compile` that names no ``algorithm`` has this one, in the ranks of a `RankPool` as well."""
    defaults = ddp_compile.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "algorithm", HalvesConfig())


@pytest.mark.parametrize("world_size", only([3], [2, 3]))
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == "mlp" else [pytest.mark.long]) for case in CASES]
)
def test_it_passes_the_parity_tests(case: str, world_size: int, split: str, with_halves: None, ranks: Ranks) -> None:
    for worst in ranks(world_size).run(train_three_ways, case, "aot_eager", 0.005, split):
        assert worst["ranks"] == 0.0
        assert worst["ddp"] < 1e-5 and worst["whole"] < 1e-5


# Those in which the reducer asks most of an algorithm: no launch, another one, and gradients that others change.
PATTERNS_IN_CI = ["watched_inside_no_sync", "gradients_replaced_in_between"]
OTHER_PATTERNS = [name for name in PATTERNS if name not in PATTERNS_IN_CI]


def train_in_all_ways(train: Callable[..., Any], names: list[str], *arguments: Any) -> dict[str, Any]:
    return {name: train(name, *arguments) for name in names}


@pytest.mark.parametrize("patterns", only([PATTERNS_IN_CI], [PATTERNS_IN_CI, OTHER_PATTERNS]), ids=["some", "others"])
def test_it_passes_the_patterns_of_training(
    patterns: list[str], split: str, each_split: str, with_halves: None, ranks: Ranks
) -> None:
    for worst in ranks(2).run(train_in_all_ways, train_pattern, patterns):
        assert max(worst.values()) < 1e-5, worst


EARLY_PATTERNS = ["plain", "accumulate_in_no_sync", "two_forwards", "shared_gradients"]


@pytest.mark.parametrize(
    "patterns",
    only([["contributor_that_appears_on_one_rank"]], [["contributor_that_appears_on_one_rank"], EARLY_PATTERNS]),
    ids=["sent again", "others"],
)
def test_buckets_may_leave_early_and_be_sent_again(patterns: list[str], with_halves: None, ranks: Ranks) -> None:
    for trained in ranks(2).run(train_in_all_ways, train_backward_pattern, patterns, "aot_eager"):
        assert max(each.worst for each in trained.values()) < 1e-6, trained


class ParameterAverage(CommAlgorithm):
    """The other payload: parameters are averaged before each forward, gradients stay each rank's own."""

    name = "parameter average"
    traits = Traits(payload="parameters")

    def __init__(self) -> None:
        self.num_backwards = 0

    def attach(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters

    def before_forward(self) -> None:
        average(self.parameters)

    def after_backward(self) -> None:
        self.num_backwards += 1


@torch.no_grad()
def average(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        dist.all_reduce(parameter)
        parameter /= dist.get_world_size()


@dataclass(frozen=True)
class ParameterAverageConfig(AlgorithmConfig):
    def build(self, process_group: dist.ProcessGroup) -> ParameterAverage:
        return ParameterAverage()


@pytest.mark.parametrize("world_size", only([3], [2, 3]))
@on_ranks()
def test_an_algorithm_may_communicate_parameters(split: str, world_size: int) -> None:
    torch.manual_seed(0)
    module = Mlp(17, 4)
    by_hand = copy.deepcopy(module)
    model = ddp_compile(
        module, algorithm=ParameterAverageConfig(), split=split, backend="aot_eager", bucket_cap_mb=0.001
    )
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, by_hand)]
    torch.manual_seed(dist.get_rank())
    for step in range(4):
        x = torch.randn(6, 17)
        average(by_hand.parameters())
        for each, optimizer in zip((model, by_hand), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(each(x)).backward()
            optimizer.step()
        with torch.no_grad():
            model.eval()(x)  # an evaluation moves nothing
            model.train()
        assert model._ddp_compile_state.reducer.algorithm.num_backwards == step + 1
    pairs = zip(model.parameters(), by_hand.parameters(), strict=True)
    far = max((p.grad - q.grad).abs().max().item() + (p - q).abs().max().item() for p, q in pairs)
    first = next(model.parameters()).grad
    mean = first.clone()
    dist.all_reduce(mean)
    apart = relative_difference(first, mean / dist.get_world_size())
    assert far == 0.0 and apart > 0.01


class HalvesUntilAHook(Halves):
    gives_way_to_comm_hook = True
    detached: tuple[bool, ...] = ()

    def detach(self, together: bool) -> None:
        self.detached += (together,)


@dataclass(frozen=True)
class GivesWay(AlgorithmConfig):
    def build(self, process_group: dist.ProcessGroup) -> CommAlgorithm:
        return HalvesUntilAHook(process_group)


def test_what_gives_way_to_a_comm_hook_is_detached(single_rank_group: None) -> None:
    model = ddp_compile(nn.Linear(2, 2), algorithm=GivesWay(), backend="eager")
    algorithm = model.comm_algorithm
    model.register_comm_hook(None, lambda state, bucket: None)
    assert model.comm_algorithm is not algorithm and algorithm.detached == (True,)


@pytest.mark.parametrize(
    ("traits", "says"),
    [
        ({"payload": "weights"}, "Traits(payload='weights'): pass one of 'gradients', 'parameters'"),
        ({"layout": "flat"}, "Traits(layout='flat'): pass one of"),
        (
            {"payload": "parameters", "replayable": False},
            "launches of gradient buckets",
        ),
        ({"payload": "parameters", "layout": "ddp"}, "launches of gradient buckets"),
        ({"in_step": False}, "each rank waits for the gradients of all others"),
    ],
)
def test_traits_that_do_not_exist_or_contradict_each_other_are_refused(traits: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as refused:
        Traits(**traits)
    assert says in str(refused.value)


class WithoutLaunch(CommAlgorithm):
    name = "nothing"


class AverageThatGivesWay(ParameterAverage):
    gives_way_to_comm_hook = True


class SaysNotWhen(WithoutLaunch):
    traits = Traits(payload="both")
    launch = Halves.launch


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        (WithoutLaunch, "WithoutLaunch has no launch(), which reduces a bucket of gradients"),
        (SaysNotWhen, "SaysNotWhen has the payload 'both' and does not say when gradients are sent"),
        (AverageThatGivesWay, "AverageThatGivesWay has the payload 'parameters' and gives_way_to_comm_hook"),
    ],
)
def test_an_algorithm_that_contradicts_itself_is_refused(algorithm: type[CommAlgorithm], says: str) -> None:
    @dataclass(frozen=True)
    class Config(AlgorithmConfig):
        def build(self, process_group: dist.ProcessGroup) -> CommAlgorithm:
            return algorithm()

    with pytest.raises(TypeError) as refused:
        build_algorithm(Config(), None)
    assert says in str(refused.value)


@dataclass(frozen=True)
class SharedHalves(AlgorithmConfig):
    """Makes the mistake of giving the same algorithm to every model."""

    def build(self, process_group: dist.ProcessGroup) -> CommAlgorithm:
        return SHARED.setdefault("one", Halves(process_group))


SHARED: dict[str, Halves] = {}


@dataclass(frozen=True)
class NoAlgorithm(AlgorithmConfig):
    def build(self, process_group: dist.ProcessGroup) -> Any:
        return "all-reduce"


@on_ranks(2)
def test_what_is_no_algorithm_of_this_model_is_refused_by_name() -> None:
    said = []
    model = ddp_compile(nn.Linear(2, 2), algorithm=SharedHalves())
    for wrong in ("allreduce", GradientAllReduce, Halves(dist.group.WORLD), NoAlgorithm(), SharedHalves()):
        with pytest.raises((TypeError, ReplicationError)) as refused:
            ddp_compile(nn.Linear(2, 2), algorithm=wrong)
        said.append(str(refused.value))
    with pytest.raises(RuntimeError) as refused:
        model.register_comm_hook(None, lambda state, bucket: None)
    said = [*said, str(refused.value)]
    text, a_class, live, none, shared, hook = said
    assert "algorithm='allreduce' is not an AlgorithmConfig" in text
    assert "did you mean GradientAllReduce()?" in a_class
    assert "algorithm=Halves(...) is an algorithm at work" in live
    assert "NoAlgorithm.build() returned 'all-reduce'" in none
    assert "SharedHalves.build() returned the reduce-scatter and all-gather of another model" in shared
    assert "<locals>.<lambda>, but the reduce-scatter and all-gather reduces" in hook


@dataclass(frozen=True)
class EqualToOthers(Halves):
    """An algorithm that is a value, and so equal to that of another model."""

    group: Any = None

    def __init__(self, group: dist.ProcessGroup) -> None:
        vars(self).update(_group=group, _scattered=None)


@dataclass(frozen=True)
class MakesEqualOnes(AlgorithmConfig):
    def build(self, process_group: dist.ProcessGroup) -> CommAlgorithm:
        return EqualToOthers(process_group)


class Nameless(CommAlgorithm):
    launch = Halves.launch


@dataclass(frozen=True)
class MakesNameless(AlgorithmConfig):
    def build(self, process_group: dist.ProcessGroup) -> CommAlgorithm:
        return Nameless()


@on_ranks(2)
def test_algorithms_are_told_apart_and_asked_for_what_they_need() -> None:
    models = [ddp_compile(nn.Linear(2, 2), algorithm=MakesEqualOnes()) for _ in range(2)]
    assert models[0]._ddp_compile_state.reducer.algorithm == models[1]._ddp_compile_state.reducer.algorithm
    said = []
    for module, wrong in (
        (nn.Linear(2, 2), MakesNameless()),
        (nn.Linear(2, 2), int),
        (nn.Embedding(4, 2, sparse=True), HalvesConfig()),
    ):
        with pytest.raises((TypeError, ReplicationError)) as refused:
            ddp_compile(module, algorithm=wrong)
        said.append(str(refused.value))
    rank = dist.get_rank()
    (nameless, a_class, sparse) = said
    assert nameless.startswith("Nameless has no name")
    assert "did you mean" not in a_class
    assert (
        sparse.startswith(f"rank {rank}: the reduce-scatter and all-gather takes no sparse gradients")
        and "weight" in sparse
    )


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return self.first(x), self.second(x)


@on_ranks(2)
def test_ranks_may_wait_at_another_time() -> None:
    """Rank 0 does one backward over both outputs, rank 1 one for each; the largest difference to the mean."""
    torch.manual_seed(3)
    model = ddp_compile(TwoHeads(), bucket_cap_mb=1e-4, backend="eager", split="none", algorithm=HalvesConfig())
    worst = 0.0
    for step in range(3):
        plain = copy.deepcopy(model)
        torch.manual_seed(10 * step + dist.get_rank())
        x = torch.randn(4, 8)
        for each in (plain, model):
            each.zero_grad()
            losses = [loss_of(output) for output in each(x)]
            for loss in [sum(losses)] if dist.get_rank() == 0 else losses[::-1]:
                loss.backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            dist.all_reduce(q.grad)
            worst = max(worst, relative_difference(p.grad, q.grad / dist.get_world_size()))
    assert worst < 1e-6


@on_ranks(2)
def test_ranks_have_to_be_given_the_same_algorithm() -> None:
    with pytest.raises(RanksDifferError) as raised:
        algorithm = HalvesConfig() if dist.get_rank() else GradientAllReduce()
        ddp_compile(nn.Linear(2, 2), algorithm=algorithm)
    assert "algorithm=gradient all-reduce on rank 0 is algorithm=reduce-scatter and all-gather" in str(raised.value)


@on_ranks(2)
def test_at_world_size_1_it_is_not_asked() -> None:
    alone, _ = dist.new_subgroups(1)
    model = ddp_compile(Mlp(width=8, num_layers=2), backend="eager", algorithm=HalvesConfig(), process_group=alone)
    launched: list[Any] = []
    model._ddp_compile_state.reducer.algorithm.launch = lambda *args: launched.append(args)
    loss_of(model(torch.randn(2, 8))).backward()
    assert len(launched) == 0


def test_settings_are_values() -> None:
    assert pickle.loads(pickle.dumps(GradientAllReduce())) == GradientAllReduce()
    assert hash(GradientAllReduce()) == hash(GradientAllReduce())
