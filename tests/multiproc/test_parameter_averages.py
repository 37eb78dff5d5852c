"""Algorithms that average parameters, beside the same computed by one process that stands for all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from in_ci import only
from models import Mlp, loss_of
from rank_pool import RankPool
from torch import Tensor, nn

from ddp_compile import ddp_compile
from ddp_compile.algorithms import AlgorithmConfig, Decentralized, LocalSGD, LowPrecisionDecentralized
from ddp_compile.kernels import minmax_u8_compress, minmax_u8_decompress
from ddp_compile.runtime.algorithms import low_precision_decentralized as ring

Ranks = Callable[[int], RankPool]
STEPS = 7


class Simulation:
    """As many models as ranks, each with its optimizer, in one process."""

    def __init__(self, module: nn.Module, size: int, make_optimizer: Callable[..., Any]) -> None:
        self.models = [copy.deepcopy(module) for _ in range(size)]
        self.optimizers = [make_optimizer(model.parameters()) for model in self.models]

    @property
    def size(self) -> int:
        return len(self.models)

    def flat(self, rank: int) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.models[rank].parameters()])

    def set(self, rank: int, flat: Tensor) -> None:
        sizes = [p.numel() for p in self.models[rank].parameters()]
        for parameter, values in zip(self.models[rank].parameters(), flat.split(sizes), strict=True):
            parameter.data.copy_(values.view(parameter.shape))

    def compute_gradients(self, step: int) -> None:
        for rank, model in enumerate(self.models):
            self.optimizers[rank].zero_grad()
            for micro_step in range(micro_steps_of(step)):
                loss_of(model(batch(rank, step, micro_step))).backward()

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
        flats = [simulation.flat(rank) for rank in range(simulation.size)]
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
    own = [simulation.flat(rank) for rank in range(size)]
    left, right = [own[rank].clone() for rank in range(size)], [own[rank].clone() for rank in range(size)]
    for step in range(STEPS):
        simulation.compute_gradients(step)
        simulation.step()
        if step % config.communication_interval == 0 and size > 1:  # one rank alone sends nothing and loses nothing
            q = []
            for rank in range(size):
                neighbours = [left[rank], right[rank]] if size > 2 else [left[rank]]
                q.append(coded(simulation.flat(rank), own[rank], neighbours))
            for rank in range(size):
                left[rank] = left[rank] + q[(rank - 1) % size]
                right[rank] = right[rank] + q[(rank + 1) % size]
                own[rank] = own[rank] + q[rank]
                simulation.set(rank, own[rank])
        yield


def coded(x: Tensor, own: Tensor, neighbours: list[Tensor]) -> Tensor:
    """Of blocks alone, since the last bits of a sum depend on where a vector ends, and a code on these."""
    values = torch.empty_like(x)
    for of_x, of_own, result, *others in zip(
        *(f.split(ring.BLOCK_NUMEL) for f in (x, own, values, *neighbours)), strict=True
    ):
        z = (of_own * (-5 / 3)).add(of_x)
        for each in others:
            z = z.add(each, alpha=2 / 3 / len(neighbours))
        rows = minmax_u8_compress(z, -(-z.numel() // ring.CHUNK_NUMEL), implementation="reference")
        minmax_u8_decompress(rows, result, implementation="reference")
    return values


def local_sgd(simulation: Simulation, config: LocalSGD) -> Iterator[None]:
    for step in range(STEPS):
        simulation.compute_gradients(step)
        if step < config.warmup_steps:
            for parameters in zip(*(model.parameters() for model in simulation.models), strict=True):
                mean = torch.stack([p.grad for p in parameters]).sum(0) / simulation.size
                for parameter in parameters:
                    parameter.grad = mean.clone()
        simulation.step()
        if step >= config.warmup_steps and (step - config.warmup_steps) % config.period == 0:
            mean = torch.stack([simulation.flat(rank) for rank in range(simulation.size)]).sum(0) / simulation.size
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


def train_beside_simulation(name: str, backend: str) -> float:
    """The largest difference of a parameter, after any step, relative to the largest parameter."""
    with pytest.MonkeyPatch.context() as monkeypatch:  # several blocks, and several segments, of 1224 elements
        monkeypatch.setattr(ring, "CHUNK_NUMEL", 100)
        monkeypatch.setattr(ring, "BLOCK_NUMEL", 200)
        monkeypatch.setattr(ring, "SEGMENT_NUMEL", 400)
        return largest_difference(name, backend)


def largest_difference(name: str, backend: str) -> float:
    case = CASES[name]
    torch.manual_seed(0)
    module = Mlp(17, 4)
    simulation = Simulation(module, dist.get_world_size(), make_adamw)
    model: Any = ddp_compile(copy.deepcopy(module), algorithm=case.config, backend=backend, bucket_cap_mb=0.001)
    optimizer = make_adamw(model.parameters())
    rank, worst = dist.get_rank(), 0.0
    for step, _ in enumerate(case.simulate(simulation, case.config)):
        train_step(model, optimizer, step)
        with torch.no_grad():
            model(batch(rank, step, 0))  # an evaluation moves nothing
        ours, expected = flat_of(model), simulation.flat(rank)
        worst = max(worst, ((ours - expected).abs().max() / expected.abs().max()).item())
        check_invariants(model.comm_algorithm)
    return worst


def train_step(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    for micro_step in range(micro_steps_of(step)):
        is_last = micro_step == micro_steps_of(step) - 1
        with nullcontext() if is_last else model.no_sync():
            loss_of(model(batch(dist.get_rank(), step, micro_step))).backward()
    optimizer.step()


def flat_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def check_invariants(algorithm: Any) -> None:
    """What a rank keeps of its neighbours in a ring is what they have, in every bit."""
    if not hasattr(algorithm, "_left"):
        return
    size, rank = dist.get_world_size(), dist.get_rank()
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, algorithm.state_dict())
    for mine, theirs in (("left", (rank - 1) % size), ("right", (rank + 1) % size)):
        for kept, own in zip(everyone[rank][mine], everyone[theirs]["own"], strict=True):
            assert torch.equal(kept, own)


def sizes_of(name: str) -> list[int]:
    return [2, 4] if "shift_one" in name else [1, 2, 3, 4, 5]


EVERYWHERE = [(name, size) for name in CASES for size in sizes_of(name)]
IN_CI = [
    ("shift_one in intervals", 4),
    ("low precision in intervals", 4),
    ("local SGD", 3),
]


@pytest.mark.parametrize(("name", "world_size"), only(IN_CI, EVERYWHERE))
def test_every_step_is_that_of_the_simulation(name: str, world_size: int, ranks: Ranks) -> None:
    for worst in ranks(world_size).run(train_beside_simulation, name, "eager"):
        assert worst < 1e-6
