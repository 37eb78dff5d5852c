"""Training programs on the pretend accelerator, and what each has to come to.

A program trains on a `Where` and returns the parameters. Expected are those of the same program on CPU ranks that
compile nothing, which other tests compare with one process or with DistributedDataParallel.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import device
import torch
import torch.distributed as dist
from device_places import PLACEMENTS, WIDTH, Side, Where, placed
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


def loss_of(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def train(
    where: Where,
    make: Callable[[], nn.Module] = blocks,
    optimizer: Callable[[Any], Any] = sgd,
    is_sharded: bool = False,
    prepare: Callable[[Any, Any], object] = lambda model, optimizers: None,
    before_step: Callable[[Any], object] = lambda model: None,
    **settings: Any,
) -> Parameters:
    model = where.replicate(seeded(make, where), **settings)
    optimizers = optimizer(model.parameters())
    prepare(model, optimizers)
    optimizers = shard_optimizer(optimizers, model) if is_sharded else optimizers
    step_all(where, model, optimizers, before_step)
    return values(model)


def step_all(
    where: Where,
    model: Any,
    optimizers: Any,
    before_step: Callable[[Any], object] = lambda model: None,
    after_step: Callable[[], object] = lambda: None,
) -> None:
    """An ordinary loop."""
    for step in range(NUM_STEPS):
        model.step = step
        model.zero_grad()
        loss_of(model, where.batch(step)).backward()
        before_step(model)
        for each in optimizers if isinstance(optimizers, list) else [optimizers]:
            each.step()
        after_step()


def compare_states(model: Any, optimizer: Any) -> None:
    """AdamW counts its steps in tensors on the CPU."""
    model.check_replicas_of(optimizer, buffers=True)


def normalized(where: Where, is_sharded: bool = False, **settings: Any) -> Parameters:
    """Micro-batches of fewer rows on rank 1."""
    model = where.replicate(seeded(blocks, where), **settings)
    optimizer = sgd(model.parameters())
    optimizer = shard_optimizer(optimizer, model) if is_sharded else optimizer
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for is_last in (False, True):
            x = where.batch(10 * step + is_last)
            x = x[: len(x) - dist.get_rank()]
            with nullcontext() if is_last else model.no_sync():
                loss = model(x).square().sum()
                model.normalize_by(torch.full((), len(x), device=where.device), loss=loss)
                loss.backward()
        optimizer.step()
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
    optimizer = sgd(model.parameters())
    optimizer = shard_optimizer(optimizer, model) if is_sharded else optimizer
    scaler = torch.amp.GradScaler(where.device.type, init_scale=16.0)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        x = where.batch(step)
        if step == 2 and dist.get_rank() == 1:
            x = x * float("inf")
        with torch.autocast(where.device.type, dtype=torch.bfloat16):
            loss = loss_of(lambda x: model(x).float(), x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 8.0, "one step was skipped"
    return values(model)


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
            loss_of(model, where.batch(step)).backward()
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
            sums.append(model(where.batch(-1)).sum())
            torch._foreach_lerp_(averaged, list(model.parameters()), 0.5)
        other.before_current()

    step_all(where, model, shard_optimizer(adam(model.parameters()), model), after_step=evaluate)
    return [*values(model), *(average.cpu() for average in averaged), *(each.cpu() for each in sums)]


def asynchronous(where: Where) -> Parameters:
    """The rounds come at random times; in the end the ranks are not far from where averaged gradients come to."""
    if where.device.type == "cpu":
        return train(where)
    model = where.replicate(seeded(blocks, where), algorithm=AsyncModelAverage(sync_interval_ms=1, warmup_steps=2))
    step_all(where, model, sgd(model.parameters()))
    model.comm_algorithm.abort()
    return values(model)


def measured(where: Where) -> Parameters:
    """Times come from the events of streams, and training stays what it is."""
    if where.device.type == "cpu":
        return train(where)
    model = where.replicate(seeded(blocks, where))
    measurement = model.measure(steps=3)
    step_all(where, model, sgd(model.parameters()))
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
    optimizer = sgd(model.parameters())
    optimizer = shard_optimizer(optimizer, model) if is_sharded else optimizer
    waits = []
    for step in range(NUM_STEPS + 4):  # agreement points are at 1, 2, 4 and 8
        optimizer.zero_grad()
        x = where.batch(step)
        before = host_waits()
        loss_of(model, x).backward()
        optimizer.step()
        waits.append(host_waits() - before)
    assert where.device.type == "cpu" or waits[-2:] == [0, 0], f"the host waited in steps: {waits}"
    return values(model)


def host_waits() -> int:
    return device.extension().counts()["host_waits"]


class Program(NamedTuple):
    run: Callable[[Where], Parameters]
    tolerance: float = 2e-6  # of the largest absolute difference of a parameter


def ordinary(tolerance: float = 2e-6, **settings: Any) -> Program:
    return Program(partial(train, **settings), tolerance)


DILOCO = DiLoCo(sync_every=2, fragments=2, fragment_sync_delay=1, fragment_update_alpha=0.5)
BACKWARD, FORWARD = {"split": "backward"}, {"split": "forward"}
PROGRAMS = {
    "backward split": ordinary(**BACKWARD),
    "forward split": ordinary(**FORWARD),
    "regions": ordinary(regions=[TanhLayer]),
    "eager": ordinary(backend="eager"),
    "static graph": ordinary(static_graph=True, **BACKWARD),
    "unused parameters": ordinary(make=Unused, find_unused_parameters=True),
    "gradients of their own": ordinary(gradient_as_bucket_view=False),
    "lazy buckets": ordinary(lazy_bucket_allocation=True),
    "clipped": ordinary(before_step=lambda model: model.clip_grad_norm_(0.01)),
    "states compared": ordinary(optimizer=adam, prepare=compare_states),
    "normalized": Program(partial(normalized, **BACKWARD)),
    "normalized, sharded": Program(partial(normalized, is_sharded=True)),
    "grad scaler": Program(with_grad_scaler, tolerance=1e-3),
    "allreduce hook": Program(partial(with_hook, hook=default_hooks.allreduce_hook)),
    "fp16 hook": Program(partial(with_hook, hook=default_hooks.fp16_compress_hook), 1e-5),
    "PowerSGD hook": Program(partial(with_hook, hook=powerSGD_hook.powerSGD_hook, state=power_sgd_state), 1e-4),
    "wire dtype": ordinary(algorithm=GradientAllReduce(wire_dtype=torch.bfloat16), tolerance=1e-4),
    "hierarchical": ordinary(algorithm=GradientAllReduce(hierarchical=True)),
    "sums at the owner": ordinary(algorithm=GradientAllReduce(reproducible=True)),
    "ByteGrad": ordinary(algorithm=ByteGrad(), tolerance=1e-4),
    "QAdam": Program(with_q_adam, 1e-4),
    "decentralized": ordinary(algorithm=Decentralized()),
    "shift one": ordinary(algorithm=Decentralized(peer_selection="shift_one")),
    "ring": ordinary(algorithm=LowPrecisionDecentralized(), tolerance=1e-4),
    "local SGD": ordinary(algorithm=LocalSGD(period=2)),
    "DiLoCo": ordinary(algorithm=DILOCO),
    "asynchronous average": Program(asynchronous, tolerance=0.05),
    "join": Program(joined),
    "measured": Program(measured),
    "sharded": ordinary(is_sharded=True, **BACKWARD),
    "sharded, forward split": ordinary(is_sharded=True, **FORWARD),
    "sharded AdamW": ordinary(is_sharded=True, optimizer=adam),
    "sharded, static graph": ordinary(is_sharded=True, static_graph=True, **BACKWARD),
    "sharded, clipped": ordinary(is_sharded=True, before_step=lambda model: model.clip_grad_norm_(0.01)),
    "sharded, grad scaler": Program(partial(with_grad_scaler, is_sharded=True), tolerance=1e-3),
    "sharded, read on another stream": Program(evaluated_between, tolerance=1e-5),
    "sharded Muon": ordinary(is_sharded=True, optimizer=muon, tolerance=1e-4),
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
    expected = program.run(Where(torch.device("cpu")))
    with placed(PLACEMENTS[placement]) as where:
        found = program.run(where)
    differences = [(a - b).abs().max().item() for a, b in zip(found, expected, strict=True)]
    return max(each if each == each else float("inf") for each in differences)
