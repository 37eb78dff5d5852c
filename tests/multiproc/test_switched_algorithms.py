"""Algorithms that average parameters: what is refused, what goes wrong, and one in the place of another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import loss_of
from rank_pool import RankPool
from test_hierarchical import tell_nodes
from test_parameter_averages import batch, flat_of, train_step
from test_training_parameter_averages import PAIRS, RING, make_model, of_all_ranks
from torch import nn

from ddp_compile import ddp_compile
from ddp_compile.algorithms import (
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    GradientAllReduce,
    LocalSGD,
    LowPrecisionDecentralized,
)
from ddp_compile.errors import RanksDifferError, ReductionError, ReplicationError

Ranks = Callable[[int], RankPool]


def things_that_go_wrong() -> list[str]:
    said = []
    model, _ = make_model(Decentralized(), backend="eager")
    loss = loss_of(model(batch(0, 0, 0)))
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    with pytest.raises((ReductionError, RuntimeError)) as refused:
        loss.backward()
    said.append(str(refused.value))
    model, _ = make_model(RING, backend="eager")
    for attempt in (
        lambda: model.register_comm_hook(None, lambda state, bucket: None),
        lambda: model.join_hook(),
        lambda: model.comm_algorithm.load_state_dict({"algorithm": "another"}),
        lambda: ddp_compile(nn.Linear(2, 2).to(torch.complex64), algorithm=Decentralized()),
        lambda: model.set_comm_algorithm("all-reduce"),
    ):
        with pytest.raises((RuntimeError, ValueError, TypeError)) as wrong:
            attempt()
        said.append(str(wrong.value))
    return said


def test_what_goes_wrong_is_named(ranks: Ranks) -> None:
    for rank, (written, hook, join, state, dtype, no_config) in enumerate(ranks(2).run(things_that_go_wrong)):
        assert written.startswith(f"rank {rank}: parameters were written between a forward and the end of its backward")
        assert (
            "cannot be used with the low-precision decentralized average (every 2): a hook can only replace the default"
            in hook
        )
        assert "Join cannot be used with the low-precision decentralized average" in join
        assert "was given the state of another, and has that of" in state
        assert f"rank {rank}: the decentralized average (all, every 1) takes gradients of float32" in dtype
        assert "algorithm='all-reduce' is not an AlgorithmConfig" in no_config


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (Decentralized, {"communication_interval": 0}),
        (Decentralized, {"peer_selection": "ring"}),
        (LowPrecisionDecentralized, {"communication_interval": 1.5}),
        (LocalSGD, {"period": 0}),
        (LocalSGD, {"period": 2, "warmup_steps": -1}),
    ],
)
def test_settings_out_of_range_are_refused(config: Any, setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{config.__name__}\({list(setting)[-1]}="):
        config(**setting)


def odd_and_unknown() -> list[str]:
    said = []
    for config in (
        Decentralized(peer_selection="shift_one"),
        Decentralized(hierarchical=True),
        LowPrecisionDecentralized(hierarchical=True),
    ):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.delenv("LOCAL_RANK", raising=False)
            with pytest.raises(ValueError) as refused:
                ddp_compile(nn.Linear(2, 2), algorithm=config)
        said.append(str(refused.value))
    with pytest.MonkeyPatch.context() as monkeypatch:
        tell_nodes(monkeypatch, [1, 2])
        model, optimizer = make_model(Decentralized(), backend="eager")
        with pytest.raises(ValueError) as refused:
            model.set_comm_algorithm(LowPrecisionDecentralized(hierarchical=True))
        train_step(model, optimizer, 0)  # by the one before
    return [*said, str(refused.value)]


def test_odd_numbers_of_ranks_and_unknown_nodes_are_refused(ranks: Ranks) -> None:
    for rank, (odd, unknown, ring, sizes) in enumerate(ranks(3).run(odd_and_unknown)):
        assert odd.startswith("Decentralized(peer_selection='shift_one') pairs all ranks, and there are 3;")
        assert unknown.startswith(
            f"rank {rank}: the decentralized average (all, every 1, hierarchical) has to know which"
        )
        assert "LOCAL_RANK is no number on ranks 0-2" in ring
        assert "takes nodes of one size" in sizes and "1, 2 ranks" in sizes


def states_of_others() -> str:
    model, _ = make_model(RING, backend="eager")
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, model.comm_algorithm.state_dict())
    with pytest.raises(ValueError) as refused:
        model.comm_algorithm.load_state_dict(states[1 - dist.get_rank()])
    return str(refused.value)


def test_the_state_of_another_rank_is_refused(ranks: Ranks) -> None:
    for rank, said in enumerate(ranks(2).run(states_of_others)):
        assert said.startswith(
            f"rank {rank} of 2: the low-precision decentralized average (every 2) was given the state"
        )
        assert f"of rank {1 - rank} of 2, whose neighbours are others" in said


def switches() -> bool:
    chain = [GradientAllReduce(), Decentralized(), RING, ByteGrad(), LocalSGD(period=3), PAIRS, AsyncModelAverage()]
    model, optimizer = make_model(chain[0], backend="aot_eager")
    for number, config in enumerate([*chain[1:], GradientAllReduce()]):
        for step in range(3):
            train_step(model, optimizer, 10 * number + step)
        if isinstance(config, ByteGrad):
            with pytest.raises(ReplicationError, match="the ranks' optimizers have come to different states"):
                model.set_comm_algorithm(config)
        model.set_comm_algorithm(config, [optimizer])
        everyone = of_all_ranks(flat_of(model))
        assert (everyone == everyone[0]).all(), config
    return True


def test_every_algorithm_may_follow_every_other(ranks: Ranks) -> None:
    assert ranks(2).run(switches) == [True, True]


def switches_with_counts_that_differ() -> bool:
    """Adam's counts of steps become alike as well; and what cannot be made alike changes nothing."""
    model, optimizer = make_model(LocalSGD(period=2), backend="eager")
    for step in range(4):
        train_step(model, optimizer, step)
    for state in optimizer.state.values():
        state["step"] += dist.get_rank()
    with pytest.raises(TypeError, match="pass a list of"):
        model.set_comm_algorithm(GradientAllReduce(), optimizers=optimizer)
    optimizer.param_groups[0]["lr"] *= 1 + dist.get_rank()
    with pytest.raises(RanksDifferError, match="other states or settings on ranks 1"):
        model.set_comm_algorithm(GradientAllReduce(), optimizers=[optimizer])
    optimizer.param_groups[0]["lr"] = 0.01
    train_step(model, optimizer, 4)
    assert model.comm_algorithm.name.startswith("local SGD")
    model.set_comm_algorithm(GradientAllReduce(), optimizers=[optimizer])
    for step in range(5, 9):
        train_step(model, optimizer, step)
    everyone = of_all_ranks(flat_of(model))
    return bool((everyone == everyone[0]).all())


def test_optimizers_whose_counts_differ_are_made_alike(ranks: Ranks) -> None:
    assert ranks(2).run(switches_with_counts_that_differ) == [True, True]


def a_forward_on_one_rank_before_the_end() -> bool:
    model, optimizer = make_model(Decentralized(peer_selection="shift_one"), backend="eager")
    train_step(model, optimizer, 0)
    if dist.get_rank() == 0:
        model(batch(0, 1, 0))  # which has sent, and no other rank has
    model.unwrap()
    everyone = of_all_ranks(flat_of(model))
    return bool((everyone == everyone[0]).all())


def test_a_last_forward_on_one_rank_does_not_hold_up_the_end(ranks: Ranks) -> None:
    assert ranks(2).run(a_forward_on_one_rank_before_the_end) == [True, True]


def out_of_step() -> str:
    """One rank has left out a backward."""
    model, optimizer = make_model(LowPrecisionDecentralized(), backend="eager")
    train_step(model, optimizer, 0)
    if dist.get_rank() == 1:
        loss_of(model(batch(0, 0, 0)))
    try:
        for step in range(1, 5):
            train_step(model, optimizer, step)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_ranks_that_get_out_of_step_are_told(ranks: Ranks) -> None:
    for rank, said in enumerate(ranks(2).run(out_of_step)):
        assert said.startswith(f"RanksDifferError: rank {rank}: at the end of iteration")
        assert "training forwards without a backward: " in said
