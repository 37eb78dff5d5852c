"""Algorithms that average parameters, compared with one process that computes the same for all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from beside import flat_of, is_same_everywhere, of_all_ranks
from in_ci import only
from models import Mlp, loss_of
from rank_pool import on_ranks
from torch import Tensor, nn

from ddp_compile import ddp_compile
from ddp_compile.algorithms import AlgorithmConfig, Decentralized, LocalSGD, LowPrecisionDecentralized
from ddp_compile.kernels import minmax_u8_compress, minmax_u8_decompress
from ddp_compile.runtime.algorithms import low_precision_decentralized as ring

STEPS = 7


class Simulation:
    """As many models as ranks, each with its optimizer, in one process."""

    def __init__(self, module: nn.Module, size: int) -> None:
        self.size = size
        self.models = [copy.deepcopy(module) for _ in range(size)]
        self.optimizers = [make_adamw(model.parameters()) for model in self.models]

    def flats(self) -> list[Tensor]:
        return [flat_of(model) for model in self.models]

    def set(self, rank: int, flat: Tensor) -> None:
        nn.utils.vector_to_parameters(flat.clone(), self.models[rank].parameters())

    def compute_gradients(self, step: int) -> None:
        for rank, model in enumerate(self.models):
            self.optimizers[rank].zero_grad()
            for micro_step in range(micro_steps_of(step)):
                loss_of(model(batch(rank, step, micro_step))).backward()

    def average_gradients(self) -> None:
        for parameters in zip(*(model.parameters() for model in self.models), strict=True):
            mean = torch.stack([p.grad for p in parameters]).sum(0) / self.size
            for parameter in parameters:
                parameter.grad = mean.clone()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def batch(rank: int, step: int, micro_step: int) -> Tensor:
    torch.manual_seed(10_000 * rank + 10 * step + micro_step)
    return torch.randn(5, 17)


def micro_steps_of(step: int) -> int:
    return 2 if step % 3 == 2 else 1


def peers(size: int, num_exchanges: int) -> list[int]:
    """Of each rank, by the pairs of lower and upper half."""
    half = size // 2
    peer_of = [0] * size
    for lower in range(half):
        upper = half + (lower + num_exchanges) % half
        peer_of[lower], peer_of[upper] = upper, lower
    return peer_of


def decentralized(simulation: Simulation, config: Decentralized) -> Iterator[None]:
    num_exchanges = 0
    for step in range(STEPS):
        flats = simulation.flats()
        simulation.compute_gradients(step)
        if step % config.communication_interval == 0:
            peer_of = peers(simulation.size, num_exchanges) if config.peer_selection == "shift_one" else []
            for rank in range(simulation.size):
                others = [flats[rank], flats[peer_of[rank]]] if peer_of else flats
                simulation.set(rank, torch.stack(others).sum(0) / len(others))
            num_exchanges += 1
        simulation.step()
        yield


def low_precision(simulation: Simulation, config: LowPrecisionDecentralized) -> Iterator[None]:
    size = simulation.size
    own, left, right = simulation.flats(), simulation.flats(), simulation.flats()
    for step in range(STEPS):
        simulation.compute_gradients(step)
        simulation.step()
        if step % config.communication_interval == 0 and size > 1:  # one rank alone sends nothing and loses nothing
            q = []
            for rank, flat in enumerate(simulation.flats()):
                neighbors = [left[rank], right[rank]] if size > 2 else [left[rank]]
                q.append(coded(flat, own[rank], neighbors))
            for rank in range(size):
                left[rank] = left[rank] + q[(rank - 1) % size]
                right[rank] = right[rank] + q[(rank + 1) % size]
                own[rank] = own[rank] + q[rank]
                simulation.set(rank, own[rank])
        yield


def coded(x: Tensor, own: Tensor, neighbors: list[Tensor]) -> Tensor:
    """Of blocks alone, since the last bits of a sum depend on where a vector ends, and a code on these."""
    values = torch.empty_like(x)
    for of_x, of_own, result, *others in zip(
        *(f.split(ring.BLOCK_NUMEL) for f in (x, own, values, *neighbors)), strict=True
    ):
        z = (of_own * (-5 / 3)).add(of_x)
        for each in others:
            z = z.add(each, alpha=2 / 3 / len(neighbors))
        rows = minmax_u8_compress(z, -(-z.numel() // ring.CHUNK_NUMEL))
        minmax_u8_decompress(rows, result)
    return values


def local_sgd(simulation: Simulation, config: LocalSGD) -> Iterator[None]:
    for step in range(STEPS):
        simulation.compute_gradients(step)
        if step < config.warmup_steps:
            simulation.average_gradients()
        simulation.step()
        if step >= config.warmup_steps and (step - config.warmup_steps) % config.period == 0:
            mean = torch.stack(simulation.flats()).sum(0) / simulation.size
            for rank in range(simulation.size):
                simulation.set(rank, mean)
        yield


class Case(NamedTuple):
    config: AlgorithmConfig
    simulate: Callable[..., Iterator[None]]


CASES = {
    "all": Case(Decentralized(), decentralized),
    "all in intervals": Case(Decentralized(communication_interval=3), decentralized),
    "shift_one": Case(Decentralized(peer_selection="shift_one"), decentralized),
    "shift_one in intervals": Case(Decentralized(peer_selection="shift_one", communication_interval=2), decentralized),
    "low precision": Case(LowPrecisionDecentralized(), low_precision),
    "low precision in intervals": Case(LowPrecisionDecentralized(communication_interval=3), low_precision),
    "local SGD": Case(LocalSGD(period=2, warmup_steps=3), local_sgd),
}


def make_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def make_model(algorithm: AlgorithmConfig, **settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: Any = ddp_compile(
        Mlp(17, 4), algorithm=algorithm, **{"bucket_cap_mb": 0.001, "backend": "eager", **settings}
    )
    return model, make_adamw(model.parameters())


def train_step(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    for micro_step in range(micro_steps_of(step)):
        is_last = micro_step == micro_steps_of(step) - 1
        with nullcontext() if is_last else model.no_sync():
            loss_of(model(batch(dist.get_rank(), step, micro_step))).backward()
    optimizer.step()


def check_invariants(algorithm: Any) -> None:
    """A rank's copies of its neighbors in a ring equal the neighbors' parameters in every bit."""
    if not hasattr(algorithm, "_left"):
        return
    size, rank = dist.get_world_size(), dist.get_rank()
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, algorithm.state_dict())
    for mine, theirs in (("left", (rank - 1) % size), ("right", (rank + 1) % size)):
        for kept, own in zip(everyone[rank][mine], everyone[theirs]["own"], strict=True):
            assert torch.equal(kept, own)


EVERYWHERE = [(name, size) for name in CASES for size in ([2, 4] if "shift_one" in name else [1, 2, 3, 4, 5])]
IN_CI = [("shift_one in intervals", 4), ("low precision in intervals", 4), ("local SGD", 3)]


@pytest.mark.parametrize(("name", "world_size"), only(IN_CI, EVERYWHERE))
@on_ranks()
def test_every_step_is_that_of_the_simulation(name: str, world_size: int) -> None:
    config, simulate = CASES[name]
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as monkeypatch:  # several blocks, and several segments, of 1224 elements
        monkeypatch.setattr(ring, "CHUNK_NUMEL", 100)
        monkeypatch.setattr(ring, "BLOCK_NUMEL", 200)
        monkeypatch.setattr(ring, "SEGMENT_NUMEL", 400)
        model, optimizer = make_model(config)
        simulation = Simulation(copy.deepcopy(model), world_size)
        for step, _ in enumerate(simulate(simulation, config)):
            train_step(model, optimizer, step)
            with torch.no_grad():
                model(batch(rank, step, 0))  # an evaluation moves nothing
            expected = flat_of(simulation.models[rank])
            # AdamW divides by the gradient's own size, so its first steps enlarge a rounding error of small gradients.
            assert (flat_of(model) - expected).abs().max() < 5e-6 * expected.abs().max(), step
            check_invariants(model.comm_algorithm)


# The ring's messages are under way while the ranks train on, and no rank is left waiting for them.

ONE_BY_ONE = LowPrecisionDecentralized()


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_a_step_does_not_wait_for_the_neighbors() -> None:
    """Rank 1 begins its step after rank 0 has told it that its own is done, and its next forward and backward too."""
    model, optimizer = make_model(ONE_BY_ONE, broadcast_buffers=False)
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    loss_of(model(batch(rank, 0, 0))).backward()
    if rank == 1:
        store.wait(["rank 0 is done"], timedelta(seconds=30))
    before = flat_of(model)
    optimizer.step()
    assert not torch.equal(before, flat_of(model))
    if rank == 0:
        store.set("rank 0 is done", "")
    for step in range(1, 4):
        train_step(model, optimizer, step)
    check_invariants(model.comm_algorithm)


@pytest.mark.parametrize("how", ["unwrap", "set_comm_algorithm"])
@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_messages_under_way_do_not_outlive_the_algorithm(how: str) -> None:
    """Parameters become their mean over the ranks although messages are under way."""
    model, optimizer = make_model(ONE_BY_ONE)
    for step in range(3):
        train_step(model, optimizer, step)
    first, second = of_all_ranks(flat_of(model))
    model.unwrap() if how == "unwrap" else model.set_comm_algorithm(ONE_BY_ONE)
    assert not torch.equal(first, second) and is_same_everywhere(flat_of(model))
    assert (flat_of(model) - (first + second) / 2).abs().max() < 1e-6


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_what_is_loaded_is_not_rounded() -> None:
    model, _ = make_model(ONE_BY_ONE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train_step(model, optimizer, 0)
    torch.manual_seed(1)
    loaded = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(loaded)
    for step in range(1, 3):
        train_step(model, optimizer, step)
    check_invariants(model.comm_algorithm)
    for name, value in model.state_dict().items():
        assert (value - loaded[name]).abs().max() < 1e-6  # eight bits of such a change would be 0.01


@torch.compiler.set_stance("force_eager")
def load_or_raise_alone(raises: bool) -> None:
    model, optimizer = make_model(ONE_BY_ONE)
    for step in range(4):
        if step == 2 and raises and dist.get_rank() == 1:
            raise KeyError("a bad batch")
        if step == 2 and dist.get_rank() == 0:
            model.load_state_dict(model.state_dict())
        train_step(model, optimizer, step)


@pytest.mark.long
@pytest.mark.parametrize("raises", [False, True])
def test_a_neighbor_that_is_gone_or_did_not_load_is_an_error_of_the_next_exchange(raises: bool, ranks: Any) -> None:
    first, second = ranks(2).run_expecting_failures(load_or_raise_alone, raises, timeout_s=2.0)
    assert "low-precision decentralized average" in first.message
    assert "a bad batch" in second.message if raises else "low-precision decentralized average" in second.message
