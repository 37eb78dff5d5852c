"""The ring's messages are under way while the ranks train on, and nobody is left waiting for them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from models import loss_of
from rank_pool import RankPool, on_ranks
from test_parameter_averages import batch, check_invariants, flat_of, train_step
from test_training_parameter_averages import make_model

from ddp_compile.algorithms import LowPrecisionDecentralized
from ddp_compile.errors import ReductionError

Ranks = Callable[[int], RankPool]


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_a_step_does_not_wait_for_the_neighbours() -> None:
    """Rank 1 begins its step when rank 0 has told it that its own is done, and its next forward and backward too."""
    model, optimizer = make_model(LowPrecisionDecentralized(), backend="eager", broadcast_buffers=False)
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    loss_of(model(batch(rank, 0, 0))).backward()
    if rank == 1:
        store.wait(["rank 0 is done"], timedelta(seconds=30))
    before = flat_of(model)
    optimizer.step()
    stepped = not torch.equal(before, flat_of(model))
    if rank == 0:
        store.set("rank 0 is done", "")
    for step in range(1, 4):
        train_step(model, optimizer, step)
    check_invariants(model.comm_algorithm)
    assert stepped


@torch.compiler.set_stance("force_eager")
def take_it_away(how: str) -> list[torch.Tensor]:
    """The mean of what the ranks had, though messages are under way when it is asked for."""
    model, optimizer = make_model(LowPrecisionDecentralized(), backend="eager")
    for step in range(3):
        train_step(model, optimizer, step)
    own = flat_of(model)
    if how == "unwrap":
        model.unwrap()
    else:
        model.set_comm_algorithm(LowPrecisionDecentralized())
    return [own, flat_of(model)]


@pytest.mark.parametrize("how", ["unwrap", "set_comm_algorithm"])
def test_messages_under_way_do_not_outlive_the_algorithm(how: str, ranks: Ranks) -> None:
    (first, mean), (second, same) = ranks(2).run(take_it_away, how)
    assert not torch.equal(first, second) and torch.equal(mean, same)
    assert (mean - (first + second) / 2).abs().max() < 1e-6


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_what_is_loaded_is_not_rounded() -> None:
    model, _ = make_model(LowPrecisionDecentralized(), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train_step(model, optimizer, 0)
    torch.manual_seed(1)
    loaded = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(loaded)
    for step in range(1, 3):
        train_step(model, optimizer, step)
    check_invariants(model.comm_algorithm)
    assert max((value - loaded[name]).abs().max().item() for name, value in model.state_dict().items()) < 1e-6


@torch.compiler.set_stance("force_eager")
def load_alone() -> None:
    model, optimizer = make_model(LowPrecisionDecentralized(), backend="eager")
    for step in range(4):
        if step == 2 and dist.get_rank() == 0:
            model.load_state_dict(model.state_dict())
        train_step(model, optimizer, step)


@pytest.mark.long
def test_parameters_that_one_rank_loads_are_an_error_of_both(ranks: Ranks) -> None:
    for failure in ranks(2).run_expecting_failures(load_alone, timeout_s=2.0):
        assert "low-precision decentralized average" in failure.message


@torch.compiler.set_stance("force_eager")
def lose_a_neighbour() -> str:
    model, optimizer = make_model(LowPrecisionDecentralized(), backend="eager")
    for step in range(2):
        train_step(model, optimizer, step)
    if dist.get_rank() == 1:
        raise ValueError("a bad batch")
    with pytest.raises(ReductionError) as raised:
        for step in range(2, 4):
            train_step(model, optimizer, step)
    raise RuntimeError(str(raised.value))


@pytest.mark.long
def test_a_neighbour_that_is_gone_is_an_error_of_the_next_exchange(ranks: Ranks) -> None:
    said = ranks(2).run_expecting_failures(lose_a_neighbour, timeout_s=2.0)[0].message
    assert "low-precision decentralized average" in said
