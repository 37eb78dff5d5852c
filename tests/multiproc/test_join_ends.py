"""How a ``Join`` ends, what it refuses, and what it leaves behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import loss_of, relative_difference
from rank_pool import RankPool
from test_join import WIDTH, ManySteps, Model, batches
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ReplicationError, ddp_compile
from ddp_compile.algorithms import AlgorithmConfig, CommAlgorithm, Traits

Ranks = Callable[[int], RankPool]


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


@torch.compiler.set_stance("force_eager")
def do_nothing_of_it() -> list[Any]:
    """What is refused, and what is left of a context that is not enabled, or over."""
    model: Any = ddp_compile(nn.Linear(2, 2), backend="eager")
    assert isinstance(model, Joinable) and model.join_process_group is dist.group.WORLD
    for enable in (False, True):
        with model.join(enable=enable):
            model(torch.ones(1, 2)).sum().backward()
        assert not model._join_config.enable
    before = set(vars(model))
    plain = model.unwrap()
    return [sorted(before), hasattr(plain, "join_hook"), hasattr(plain, "_join_config")]


def test_nothing_is_left_of_a_context(ranks: Ranks) -> None:
    for attributes, *has in ranks(2).run(do_nothing_of_it):
        assert "_join_config" not in attributes and has == [False, False]


class SendsParameters(CommAlgorithm):
    name = "parameter exchange"
    traits = Traits(payload="parameters")


class SendsParametersConfig(AlgorithmConfig):
    def build(self, process_group: dist.ProcessGroup) -> CommAlgorithm:
        return SendsParameters()


@torch.compiler.set_stance("force_eager")
def what_is_refused() -> list[str]:
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
    exchanges = ddp_compile(nn.Linear(2, 2), backend="eager", algorithm=SendsParametersConfig())
    with pytest.raises(ReplicationError) as refused:
        exchanges.join()
    return [*said, str(refused.value)]


def test_what_shadows_cannot_follow_is_refused_by_name(ranks: Ranks) -> None:
    for rank, (two, second, algorithm) in enumerate(ranks(2).run(what_is_refused)):
        assert (
            two.startswith(f"rank {rank}: Linear.join() cannot be used with Linear.join() around it")
            and "Join([first, second])" in two
        )
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


@torch.compiler.set_stance("force_eager")
def go_on_after_an_early_termination() -> list[float]:
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
    return [relative_difference(ours, theirs) for ours, theirs in zip(*gradients, strict=True)]


def test_nothing_is_left_of_a_context_that_an_error_has_ended(ranks: Ranks) -> None:
    for differences in ranks(2).run(go_on_after_an_early_termination):
        assert max(differences) < 1e-6, differences


def raise_where_a_contribution_comes_late() -> list[str]:
    """What each rank gets, and whether it can be trained afterwards."""
    torch.manual_seed(0)
    model = ddp_compile(ManySteps(), bucket_cap_mb=0.003, split="backward", backend="aot_eager")
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
    return said


def test_an_error_that_concerns_all_is_raised_by_shadows_too_and_training_goes_on(ranks: Ranks) -> None:
    for (said,) in ranks(2).run(raise_where_a_contribution_comes_late):
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
