"""Training programs on the pretend accelerator, and what each has to come to.

A program trains on a `Where` and returns the parameters. Those that are expected come from one process with the whole
batch or, if ranks do something else than average gradients, from the same program on CPU ranks that compile nothing.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import device
import torch
import torch.distributed as dist
from device_places import PLACEMENTS, WIDTH, Side, Where, batch_of, placed
from models import TanhLayer
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from ddp_compile import shard_optimizer
from ddp_compile.algorithms import (
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    DiLoCo,
    GradientAllReduce,
    LocalSGD,
    LowPrecisionDecentralized,
)
from ddp_compile.optim import QAdam

NUM_STEPS = 7

Parameters = list[Tensor]


class Unused(nn.Module):
    """Leaves a layer out in every second step."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = TanhLayer(WIDTH), TanhLayer(WIDTH)
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.always(x)
        return self.sometimes(x) if self.step % 2 == 0 else x


def blocks() -> nn.Module:
    return nn.Sequential(*(TanhLayer(WIDTH) for _ in range(4)), nn.Linear(WIDTH, 1))


def seeded(make: Callable[[], nn.Module], where: Where) -> nn.Module:
    torch.manual_seed(3)
    return make().to(where.device)


def values(model: nn.Module) -> Parameters:
    return [parameter.detach().cpu() for parameter in model.parameters()]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def loss_of(model: Any, batches: list[Tensor]) -> Tensor:
    return torch.stack([model(x).square().mean() for x in batches]).mean()


def sharded(optimizers: Any, model: Any, where: Where, is_sharded: bool = True) -> Any:
    """One process has nothing to shard."""
    return shard_optimizer(optimizers, model) if is_sharded and not where.is_alone else optimizers


def train(
    where: Where,
    make: Callable[[], nn.Module] = blocks,
    optimizer: Callable[[Any], Any] = sgd,
    is_sharded: bool = False,
    num_local: int = 0,
    prepare: Callable[[Any, Any], object] = lambda model, optimizers: None,
    before_step: Callable[[Any], object] = lambda model: None,
    **settings: Any,
) -> Parameters:
    """An ordinary loop; ``num_local`` backwards in ``no_sync`` come before the one that is averaged."""
    model = where.replicate(seeded(make, where), **settings)
    optimizers = optimizer(model.parameters())
    if not where.is_alone:
        prepare(model, optimizers)
    step_all(where, model, sharded(optimizers, model, where, is_sharded), num_local, before_step)
    return values(model)


def step_all(
    where: Where,
    model: Any,
    optimizers: Any,
    num_local: int = 0,
    before_step: Callable[[Any], object] = lambda model: None,
    after_step: Callable[[], object] = lambda: None,
) -> None:
    for step in range(NUM_STEPS):
        model.step = step
        model.zero_grad()
        for i in range(num_local + 1):
            with nullcontext() if where.is_alone or i == num_local else model.no_sync():
                loss_of(model, where.batches(10 * step + i)).backward()
        before_step(model)
        for each in optimizers if isinstance(optimizers, list) else [optimizers]:
            each.step()
        after_step()


def compare_states(model: Any, optimizer: Any) -> None:
    """AdamW counts its steps in tensors on the CPU."""
    model.check_replicas_of(optimizer, buffers=True)


def normalized(where: Where, is_sharded: bool = False, **settings: Any) -> Parameters:
    """Micro-batches of fewer rows on rank 1. One process divides by the number of all rows."""
    model = where.replicate(seeded(blocks, where), **settings)
    stepped = sharded(sgd(model.parameters()), model, where, is_sharded)
    num_micro = 2
    for step in range(NUM_STEPS):
        stepped.zero_grad()
        for i in range(num_micro):
            batches = where.batches(10 * step + i)
            first_rank = 0 if where.is_alone else dist.get_rank()
            used = [x[: max(1, len(x) - first_rank - at)] for at, x in enumerate(batches)]
            with nullcontext() if where.is_alone or i == num_micro - 1 else model.no_sync():
                loss = torch.stack([model(x).square().sum() for x in used]).sum()
                if where.is_alone:
                    (loss / (num_micro * sum(map(len, used)))).backward()
                else:
                    model.normalize_by(torch.full((), len(used[0]), device=where.device), loss=loss)
                    loss.backward()
        stepped.step()
    return values(model)


def with_hook(where: Where, hook: Any, state: Callable[[], Any] = lambda: dist.group.WORLD) -> Parameters:
    return train(where, prepare=lambda model, _: model.register_comm_hook(state(), hook))


def power_sgd_state() -> Any:
    """Without error feedback: torch's hook computes the error on the stream of its callback, and frees the memory that
    it reads and the error of the last iteration without a call of record_stream."""
    return powerSGD_hook.PowerSGDState(
        dist.group.WORLD, matrix_approximation_rank=1, start_powerSGD_iter=3, use_error_feedback=False
    )


def with_grad_scaler(where: Where, is_sharded: bool = False) -> Parameters:
    """Autocast to bfloat16. In the third step rank 1 alone has an infinite gradient, and all ranks skip the step."""
    model = where.replicate(seeded(blocks, where))
    optimizer = sharded(sgd(model.parameters()), model, where, is_sharded)
    scaler = torch.amp.GradScaler(where.device.type, init_scale=16.0)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        batches = where.batches(step)
        if step == 2 and (where.is_alone or dist.get_rank() == 1):
            batches[-1] = batches[-1] * float("inf")
        with torch.autocast(where.device.type, dtype=torch.bfloat16):
            loss = loss_of(lambda x: model(x).float(), batches)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 8.0, "one step was skipped"
    return values(model)


def clip(model: Any) -> None:
    if hasattr(model, "clip_grad_norm_"):
        model.clip_grad_norm_(0.01)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def muon(parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Steps whole matrices, beside one that steps everything else."""
    parameters = list(parameters)
    others = [p for p in parameters if p.dim() != 2]
    return [torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.01), torch.optim.AdamW(others, lr=0.01)]


def with_q_adam(where: Where) -> Parameters:
    module = seeded(blocks, where)
    optimizer = QAdam(module.parameters(), lr=0.01, warmup_steps=3)
    model = where.replicate(module, algorithm=optimizer.algorithm())
    step_all(where, model, optimizer)
    return values(model)


def joined(where: Where) -> Parameters:
    """Rank 1 has two batches more."""
    model = where.replicate(seeded(blocks, where))
    optimizer = sgd(model.parameters())
    with model.join():
        for step in range(3 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            loss_of(model, where.batches(step)).backward()
            optimizer.step()
    return values(model)


def evaluated_between(where: Where) -> Parameters:
    """With shards: after each step the model is evaluated, and its weights are averaged, on a stream of their own."""
    model = where.replicate(seeded(blocks, where))
    averaged = [parameter.detach().clone() for parameter in model.parameters()]
    sums = []
    other = Side(where.device)

    def evaluate() -> None:
        with other.after_current(), torch.no_grad():
            sums.append(sum(model(batch_of(-1, rank).to(where.device)).sum() for rank in range(dist.get_world_size())))
            torch._foreach_lerp_(averaged, list(model.parameters()), 0.5)
        other.before_current()

    step_all(where, model, sharded(adam(model.parameters()), model, where), after_step=evaluate)
    return [*values(model), *(average.cpu() for average in averaged), *(each.cpu() for each in sums)]


def asynchronous(where: Where) -> Parameters:
    """The rounds come at random times; in the end the ranks are equal, and not far from where one process comes to."""
    model = where.replicate(seeded(blocks, where), algorithm=AsyncModelAverage(sync_interval_ms=1, warmup_steps=2))
    step_all(where, model, sgd(model.parameters()))
    if not where.is_alone:
        model.comm_algorithm.abort()
    return values(model)


def measured(where: Where) -> Parameters:
    """Times come from the events of streams, and training stays what it is."""
    model = where.replicate(seeded(blocks, where))
    measurement = None if where.is_alone else model.measure(steps=3)
    step_all(where, model, sgd(model.parameters()))
    if measurement is not None:
        report = measurement.report()
        assert len(report.steps) == 3
        for step in report.steps:
            for rank in step.ranks:
                assert len(rank.transfers) == len(model.bucket_plan.buckets)
                for transfer in rank.transfers:
                    assert rank.began <= transfer.ready <= transfer.launched
                    assert transfer.done is None or transfer.launched <= transfer.done <= rank.ended
    return values(model)


def with_inductor(where: Where, **settings: Any) -> Parameters:
    """Whose generated code starts the device's operators."""
    if where.device.type == "cpu":
        return train(where)
    device.register_with_inductor()
    with inductor_config.patch(fallback_by_default=True):
        return train(where, backend="inductor", **settings)


def without_dlpack(where: Where, is_sharded: bool = False) -> Parameters:
    def refuse(tensor: Tensor) -> object:
        raise BufferError(f"Cannot pack tensors on {tensor.device}")

    with patch.object(torch.utils.dlpack, "to_dlpack", refuse):
        return train(where, is_sharded=is_sharded, optimizer=adam)


def steady(where: Where, is_sharded: bool = False, **settings: Any) -> Parameters:
    """In the steady state the host waits for nothing."""
    model = where.replicate(seeded(blocks, where), **settings)
    optimizer = sharded(sgd(model.parameters()), model, where, is_sharded)
    waits = []
    for step in range(NUM_STEPS + 4):  # agreement points are at 1, 2, 4 and 8
        optimizer.zero_grad()
        batches = where.batches(step)
        before = host_waits()
        loss_of(model, batches).backward()
        optimizer.step()
        waits.append(host_waits() - before)
    assert where.device.type == "cpu" or waits[-2:] == [0, 0], f"the host waited in steps: {waits}"
    return values(model)


def host_waits() -> int:
    return device.extension().counts()["host_waits"]


@dataclass(frozen=True)
class Program:
    """A program, and the oracle: ``expected`` is "one process" with all batches, or "CPU ranks"."""

    run: Callable[[Where], Parameters]
    expected: str = "one process"
    tolerance: float = 2e-6  # of the largest absolute difference of a parameter


def averaging(tolerance: float = 2e-6, **settings: Any) -> Program:
    return Program(partial(train, **settings), tolerance=tolerance)


def as_on_cpu(run: Callable[[Where], Parameters], tolerance: float = 2e-6) -> Program:
    return Program(run, "CPU ranks", tolerance)


DILOCO = DiLoCo(sync_every=2, fragments=2, fragment_sync_delay=1, fragment_update_alpha=0.5)
BACKWARD, FORWARD = {"split": "backward"}, {"split": "forward"}
PROGRAMS = {
    "backward split": averaging(**BACKWARD),
    "forward split": averaging(**FORWARD),
    "regions": averaging(regions=[TanhLayer]),
    "eager": averaging(backend="eager"),
    "static graph": averaging(static_graph=True, **BACKWARD),
    "unused parameters": averaging(make=Unused, find_unused_parameters=True),
    "gradients of their own": averaging(gradient_as_bucket_view=False),
    "lazy buckets": averaging(lazy_bucket_allocation=True),
    "accumulation": averaging(num_local=2),
    "clipped": averaging(before_step=clip),
    "states compared": averaging(optimizer=adam, prepare=compare_states),
    "normalized": Program(partial(normalized, **BACKWARD)),
    "normalized, sharded": Program(partial(normalized, is_sharded=True)),
    "grad scaler": Program(with_grad_scaler, tolerance=1e-3),
    "allreduce hook": Program(partial(with_hook, hook=default_hooks.allreduce_hook)),
    "fp16 hook": as_on_cpu(partial(with_hook, hook=default_hooks.fp16_compress_hook), 1e-5),
    "PowerSGD hook": as_on_cpu(partial(with_hook, hook=powerSGD_hook.powerSGD_hook, state=power_sgd_state), 1e-4),
    "wire dtype": as_on_cpu(partial(train, algorithm=GradientAllReduce(wire_dtype=torch.bfloat16)), 1e-4),
    "hierarchical": averaging(algorithm=GradientAllReduce(hierarchical=True)),
    "sums at the owner": as_on_cpu(partial(train, algorithm=GradientAllReduce(reproducible=True))),
    "ByteGrad": as_on_cpu(partial(train, algorithm=ByteGrad()), 1e-4),
    "QAdam": as_on_cpu(with_q_adam, 1e-4),
    "decentralized": as_on_cpu(partial(train, algorithm=Decentralized())),
    "shift one": as_on_cpu(partial(train, algorithm=Decentralized(peer_selection="shift_one"))),
    "ring": as_on_cpu(partial(train, algorithm=LowPrecisionDecentralized()), 1e-4),
    "local SGD": as_on_cpu(partial(train, algorithm=LocalSGD(period=2))),
    "DiLoCo": as_on_cpu(partial(train, algorithm=DILOCO)),
    "asynchronous average": Program(asynchronous, tolerance=0.05),
    "join": as_on_cpu(joined),
    "measured": Program(measured),
    "sharded": averaging(is_sharded=True, **BACKWARD),
    "sharded, forward split": averaging(is_sharded=True, **FORWARD),
    "sharded AdamW": averaging(is_sharded=True, optimizer=adam),
    "sharded, static graph": averaging(is_sharded=True, static_graph=True, **BACKWARD),
    "sharded, clipped": averaging(is_sharded=True, before_step=clip),
    "sharded, grad scaler": Program(partial(with_grad_scaler, is_sharded=True), tolerance=1e-3),
    "sharded, read on another stream": Program(evaluated_between, tolerance=1e-5),
    "sharded Muon": averaging(is_sharded=True, optimizer=muon, tolerance=1e-4),
    "inductor": Program(with_inductor, tolerance=1e-5),
    "inductor, regions": Program(partial(with_inductor, regions=[TanhLayer]), tolerance=1e-5),
    "inductor, sharded": Program(partial(with_inductor, is_sharded=True), tolerance=1e-5),
    "without DLPack": Program(without_dlpack),
    "sharded, without DLPack": Program(partial(without_dlpack, is_sharded=True)),
    "steady": Program(steady),
    "steady, sharded": Program(partial(steady, is_sharded=True)),
}


def perform(name: str, placement: str) -> float:
    """The largest difference of a parameter of this rank to what is expected; infinite if one is NaN."""
    program = PROGRAMS[name]
    is_alone = program.expected == "one process"
    expected = program.run(Where(torch.device("cpu"), is_alone))
    with placed(PLACEMENTS[placement]) as where:
        found = program.run(where)
    return largest_difference(found, expected)


def largest_difference(found: Parameters, expected: Parameters) -> float:
    differences = [(a - b).abs().max().item() for a, b in zip(found, expected, strict=True)]
    return max(each if each == each else float("inf") for each in differences)
