"""Ranks with fewer batches than others, inside ``Join``: as with DistributedDataParallel, step for step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from halves import Built
from in_ci import only
from models import Mlp, loss_of, relative_difference
from rank_pool import RankPool, on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ReplicationError, ddp_compile
from ddp_compile.algorithms import CommAlgorithm, Traits

Ranks = Callable[[int], RankPool]
WIDTH = 33


class Model(nn.Module):
    """Four layers, buffers that training changes, and a branch that not every batch takes."""

    def __init__(self, has_branch: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.branch = nn.Linear(WIDTH, WIDTH) if has_branch else None

    def forward(self, x: Tensor, takes_branch: bool = False) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        x = self.norm(x)
        return self.branch(x) if self.branch is not None and takes_branch else x


def batches(count: int, epoch: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(10 * epoch + dist.get_rank())
    return (torch.randn(5, WIDTH, generator=generator) for _ in range(count))


def state_of(module: nn.Module) -> dict[str, Tensor]:
    plain = module.module if isinstance(module, DistributedDataParallel) else module
    return {name: value.clone() for name, value in plain.state_dict().items()}


def worst_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    return max(relative_difference(ours[name].float(), theirs[name].float()) for name in theirs)


def train(
    model: Any,
    counts: list[int],
    epoch: int,
    accumulate: bool = False,
    has_branch: bool = False,
    with_hook: bool = False,
    **join: Any,
) -> list[dict[str, Tensor]]:
    """One epoch; the model's state after each step of this rank, and at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states = []
    with model.join(**join):
        for step, x in enumerate(batches(counts[dist.get_rank()], epoch)):
            arguments = ((step + dist.get_rank()) % 2 == 0,) if has_branch else ()
            if accumulate and step % 2 == 0:
                with model.no_sync():
                    loss_of(model(x, *arguments)).backward()
                continue
            loss_of(model(x, *arguments)).backward()
            optimizer.step()
            optimizer.zero_grad()
            states.append(state_of(model))
    return [*states, state_of(model)]


def train_both(counts: list[int], settings: dict[str, Any], arguments: dict[str, Any]) -> list[float]:
    """The largest difference of any parameter or buffer to DistributedDataParallel's, after each step."""
    torch.manual_seed(0)
    module = Model(arguments.get("has_branch", False))
    of_ddp = {name: value for name, value in settings.items() if name != "split"}
    reference = DistributedDataParallel(copy.deepcopy(module), **of_ddp)
    model = ddp_compile(module, bucket_cap_mb=0.005, backend="aot_eager", **settings)
    if arguments.get("with_hook"):
        for each in (model, reference):
            each.register_comm_hook(None, allreduce_hook)
    differences = []
    for epoch in range(3):
        # Another rank runs out first each time, and in the last epoch none does.
        rolled = counts[epoch:] + counts[:epoch] if epoch < 2 else [2] * len(counts)
        pairs = zip(*(train(each, rolled, epoch, **arguments) for each in (model, reference)), strict=True)
        differences += [worst_difference(ours, theirs) for ours, theirs in pairs]
    assert model._ddp_compile_state.compiler.failures == []
    return differences


WAYS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({}, {"divide_by_initial_world_size": False}),
    ({"find_unused_parameters": True}, {"has_branch": True}),
    ({"broadcast_buffers": False}, {"accumulate": True}),
    ({}, {"with_hook": True}),
    ({"static_graph": True}, {}),
    ({"gradient_as_bucket_view": False}, {"divide_by_initial_world_size": False}),
    ({"broadcast_buffers": False}, {}),
]
TWO_RANKS, THREE_RANKS = [3, 6], [6, 3, 4]  # how many batches each has


@pytest.mark.parametrize(
    ("counts", "settings", "arguments"),
    only(
        [(TWO_RANKS, *WAYS[4]), (THREE_RANKS, *WAYS[2])],
        [(counts, *way) for counts in (TWO_RANKS, THREE_RANKS) for way in WAYS],
    ),
    ids=str,
)
def test_uneven_inputs_train_as_with_ddp(
    counts: list[int], settings: dict[str, Any], arguments: dict[str, Any], split: str, ranks: Ranks
) -> None:
    for differences in ranks(len(counts)).run(train_both, counts, {"split": split, **settings}, arguments):
        assert max(differences) < 1e-6, differences


@pytest.mark.parametrize("counts", only([[3, 0, 2]], [[0, 3], [3, 0, 2]]), ids=str)
def test_a_rank_may_have_no_input_at_all(counts: list[int], split: str, ranks: Ranks) -> None:
    for differences in ranks(len(counts)).run(train_both, counts, {"split": split}, {}):
        assert max(differences) < 1e-6, differences


def train_with_early_launches() -> tuple[float, list[int]]:
    """The difference to the mean done by hand, and how many buckets may be launched early in each step of rank 1.

    Rank 0 has two batches fewer. In the last step of rank 1 a contribution comes too late.
    """
    torch.manual_seed(0)
    module = Mlp(WIDTH, 4)
    reference = copy.deepcopy(module)
    model = ddp_compile(module, bucket_cap_mb=0.003, split="backward", backend="aot_eager")
    num_early = []
    worst = 0.0
    with model.join():
        for step in range(3 + 2 * dist.get_rank()):
            x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            for each in (model, reference):
                each.zero_grad()
                loss = loss_of(each(x))
                if step == 4:
                    loss = loss + each.layers[1].weight.square().sum()
                loss.backward()
            num_early.append(len(model._ddp_compile_state.reducer.early_buckets))
            if step >= 3:  # rank 0 contributes zeros
                pairs = zip(model.parameters(), reference.parameters(), strict=True)
                worst = max(relative_difference(ours.grad, theirs.grad / 2) for ours, theirs in pairs)
    return worst, num_early


def test_buckets_are_launched_early_and_again_beside_shadows(ranks: Ranks) -> None:
    short, long = ranks(2).run(train_with_early_launches)
    assert short == (0.0, [3, 3, 3])
    assert long[0] < 1e-6 and long[1] == [3, 3, 3, 3, 2]


def train_with_zero(with_ours: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Model()
    model: Any = ddp_compile(module, bucket_cap_mb=0.005, backend="aot_eager") if with_ours else None
    model = model or DistributedDataParallel(module)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    counter = CountsSteps()
    num_batches = 3 + 2 * dist.get_rank()
    with Join([model, optimizer, counter], divide_by_initial_world_size=False):
        for x in batches(num_batches, 0):
            optimizer.zero_grad()
            loss_of(model(x)).backward()
            optimizer.step()
            counter.count()  # behind the first of them, which says that this rank still trains
    assert counter.total == 3 + 5
    return state_of(model)


class CountsSteps(Joinable):
    """A user's own Joinable: how many steps all ranks have done together."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def count(self, own: int = 1) -> None:
        if own:
            Join.notify_join_context(self)
        number = torch.tensor(own)
        dist.all_reduce(number)
        self.total += int(number)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        counter = self

        class Hook(JoinHook):
            def main_hook(self) -> None:
                counter.count(0)

        return Hook()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return dist.group.WORLD


@on_ranks(2)
def test_other_joinables_may_be_in_the_same_context() -> None:
    difference = worst_difference(train_with_zero(True), train_with_zero(False))
    assert difference < 1e-6


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.branch = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, takes_branch: bool = False) -> Tensor:
        x = self.body(x)
        return self.branch(x) if takes_branch else x


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_a_shadow_does_not_use_up_what_it_has_still_to_send() -> None:
    torch.manual_seed(0)
    module, x = Branches(), torch.ones(2, 5)
    reference = DistributedDataParallel(copy.deepcopy(module), find_unused_parameters=True)
    model = ddp_compile(module, backend="eager", find_unused_parameters=True)
    differences = []
    for each in (model, reference):
        with each.join():
            with each.no_sync():
                each(x, dist.get_rank() == 0).sum().backward()
            if dist.get_rank() == 1:
                each(x).sum().backward()
        each(x).sum().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        differences.append(relative_difference(ours.grad, theirs.grad))
    assert max(differences) < 1e-6, differences


class CountsCalls(CommAlgorithm):
    """An all-reduce that counts what it is told of."""

    name = "counting all-reduce"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.calls = [0, 0]

    def before_forward(self) -> None:
        self.calls[0] += 1

    def after_backward(self) -> None:
        self.calls[1] += 1

    def launch(self, bucket: Any, is_last: bool) -> Any:
        return self.group.allreduce([bucket.flat])


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_an_algorithm_is_told_the_same_on_every_rank() -> None:
    model = ddp_compile(nn.Linear(2, 2), backend="eager", algorithm=Built(CountsCalls))
    with model.join():
        for _ in range(1 + 2 * dist.get_rank()):
            model(torch.ones(1, 2)).sum().backward()
    assert model._ddp_compile_state.reducer.algorithm.calls == [3, 3]


# How a Join ends, what it refuses, and what it leaves behind.


@torch.compiler.set_stance("force_eager")
def stop_when_one_has_no_input() -> str:
    model = ddp_compile(Model(), backend="eager")
    with pytest.raises(RuntimeError) as raised, model.join(throw_on_early_termination=True):
        for x in batches(2 + dist.get_rank(), 0):
            loss_of(model(x)).backward()
    return str(raised.value)


def test_all_ranks_stop_as_soon_as_one_has_no_input_left(ranks: Ranks) -> None:
    assert ranks(2).run(stop_when_one_has_no_input) == [
        "Rank 0 exhausted all inputs.",
        "Detected at least one rank that exhausted inputs. Throwing across all ranks.",
    ]


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_nothing_is_left_of_a_context() -> None:
    model: Any = ddp_compile(nn.Linear(2, 2), backend="eager")
    assert isinstance(model, Joinable) and model.join_process_group is dist.group.WORLD
    for enable in (False, True):
        with model.join(enable=enable):
            model(torch.ones(1, 2)).sum().backward()
        assert not model._join_config.enable
    before = set(vars(model))
    plain = model.unwrap()
    attributes, *has = [sorted(before), hasattr(plain, "join_hook"), hasattr(plain, "_join_config")]
    assert "_join_config" not in attributes and has == [False, False]


class SendsParameters(CommAlgorithm):
    name = "parameter exchange"
    traits = Traits(payload="parameters")


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_what_shadows_cannot_follow_is_refused_by_name() -> None:
    said = []
    one, other = (ddp_compile(nn.Linear(2, 2), backend="eager") for _ in range(2))
    with pytest.raises(ReplicationError) as refused, one.join(), other.join():
        pass
    said.append(str(refused.value))
    assert not other._join_config.enable
    for context in (nullcontext, other.no_sync):
        with pytest.raises(ReplicationError) as refused, other.join(divide_by_initial_world_size=False):
            loss = other(torch.ones(1, 2)).sum()
            with context():
                other(torch.ones(1, 2))
        loss.backward()
    said.append(str(refused.value))
    exchanges = ddp_compile(nn.Linear(2, 2), backend="eager", algorithm=Built(lambda group: SendsParameters()))
    with pytest.raises(ReplicationError) as refused:
        exchanges.join()
    rank = dist.get_rank()
    (two, second, algorithm) = [*said, str(refused.value)]
    assert two.startswith(f"rank {rank}: Linear.join() cannot be used with Linear.join() around it")
    assert "Join([first, second])" in two
    assert "a second forward inside a Join before the backward of the first one" in second
    assert "Join cannot be used with the parameter exchange" in algorithm


@torch.compiler.set_stance("force_eager")
def learn_without_input() -> None:
    model = ddp_compile(nn.Linear(2, 2), backend="eager", static_graph=True)
    with model.join():
        for _ in range(dist.get_rank()):
            model(torch.ones(1, 2)).sum().backward()


def test_a_static_graph_is_not_learnt_without_input(ranks: Ranks) -> None:
    failures = ranks(2).run_expecting_failures(learn_without_input, timeout_s=2.0)
    assert (
        "static_graph=True learns from the first iteration, in which this rank has had no input" in failures[0].message
    )


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_nothing_is_left_of_a_context_that_an_error_has_ended() -> None:
    """A gradient inside another context that is not enabled, and one outside of any, beside DistributedDataParallel."""
    torch.manual_seed(0)
    module, x = nn.Linear(5, 5), torch.ones(2, 5) * (1 + dist.get_rank())
    reference = DistributedDataParallel(copy.deepcopy(module))
    model = ddp_compile(module, backend="eager")
    gradients: list[list[Tensor]] = []
    for each in (model, reference):
        gradients.append([])
        with (
            pytest.raises(RuntimeError),
            each.join(divide_by_initial_world_size=False, throw_on_early_termination=True),
        ):
            for _ in range(1 + dist.get_rank()):
                with each.no_sync():
                    each(x).sum().backward()
        each.zero_grad()
        with each.join(enable=False):
            each(x).sum().backward()
        gradients[-1].append(next(each.parameters()).grad.clone())
    one, other = model(x), model(2 * x)  # nothing is left that would refuse a second forward
    (one.sum() + other.sum()).backward()
    assert not model._join_config.enable
    differences = [relative_difference(ours, theirs) for ours, theirs in zip(*gradients, strict=True)]
    assert max(differences) < 1e-6, differences


@on_ranks(2)
def test_an_error_that_concerns_all_is_raised_by_shadows_too_and_training_goes_on() -> None:
    torch.manual_seed(0)
    model = ddp_compile(Mlp(WIDTH, 4), bucket_cap_mb=0.003, split="backward", backend="aot_eager")
    model.register_comm_hook(None, allreduce_hook)
    said = []
    try:
        with model.join():
            for step in range(3 + 2 * dist.get_rank()):
                loss = loss_of(model(torch.randn(5, WIDTH)))
                if step == 4:
                    loss = loss + model.layers[1].weight.square().sum()
                loss.backward()
    except RuntimeError as error:
        said.append(str(error))
    model.zero_grad()
    loss_of(model(torch.randn(5, WIDTH))).backward()
    (said,) = said
    assert "layers.1.weight got another gradient" in said


@torch.compiler.set_stance("force_eager")
def raise_while_the_other_shadows() -> None:
    model = ddp_compile(nn.Linear(2, 2), backend="eager")
    with model.join():
        for step in range(1 + 2 * dist.get_rank()):
            loss = model(torch.ones(1, 2)).sum()
            if step == 2:
                raise ValueError("a bad batch")
            loss.backward()


def test_a_rank_that_raises_while_another_shadows_is_named(ranks: Ranks) -> None:
    shadow, raising = ranks(2).run_expecting_failures(raise_while_the_other_shadows, timeout_s=2.0)
    assert raising.message == "a bad batch"
    assert "the all-reduce of bucket 0" in shadow.message and "training forward 3 has returned" in shadow.message
