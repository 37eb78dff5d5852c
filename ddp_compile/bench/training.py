"""One rank's training loop, with a clock reading after each phase of a step."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ddp_compile.bench.implementations import Implementation
from ddp_compile.bench.loss_scale import LossScale, num_tokens
from ddp_compile.bench.settings import OPTIMIZERS, StepRecord, WorkloadSettings
from ddp_compile.bench.workloads import Workload

NUM_BATCHES = 8


class Clock:
    """Clock readings that do not stop a device: events in its stream, or the host's time on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def settle(self) -> None:
        """Wait until all readings have been taken."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def elapsed_s(self, start: Any, end: Any) -> float:
        return end - start if self.device.type == "cpu" else start.elapsed_time(end) / 1000


class Marks(NamedTuple):
    """Clock readings of one step: when each phase of each micro-batch ended."""

    start: Any
    forwards: Sequence[Any]
    backwards: Sequence[Any]
    end: Any
    cpu_s: float


class Steppable(Protocol):
    """A case that can take steps."""

    clock: Clock

    def step(self) -> Marks: ...


class Training:
    """Forward, loss, backward, clipping and optimizers, as every implementation does them.

    ``model`` is that of ``implementation``, for its parameters. Ranks train on different data.
    """

    def __init__(
        self,
        implementation: Implementation,
        model: nn.Module,
        workload: Workload,
        settings: WorkloadSettings,
        rank: int,
        micro_batches: int,
    ) -> None:
        self.implementation = implementation
        self.loss_function = workload.loss
        self.micro_batches = micro_batches
        self.clock = Clock(torch.device(settings.device))
        generator = torch.Generator().manual_seed(1000 + rank)
        self.batches = [_moved(workload.make_batch(generator), settings.device) for _ in range(NUM_BATCHES)]
        self.optimizers = implementation.prepare_optimizers(make_optimizers(settings.optimizer, model))
        self.around_optimizers: Callable[[], AbstractContextManager[Any]] = (
            Float32NewtonSchulz if settings.optimizer == "muon" and settings.device == "cpu" else nullcontext
        )
        self.counts_tokens = settings.tokens
        self.loss_scale = implementation.token_scale() if settings.tokens else LossScale()
        self.clip = (
            (lambda: None)
            if settings.clip is None
            else partial(implementation.clip, model, settings.clip, self.optimizers)
        )
        self.num_steps = 0
        self.loss: Tensor | None = None
        self.targets: Tensor | None = None  # of the same micro-batch, the last one

    def step(self) -> Marks:
        clock, implementation = self.clock, self.implementation
        forwards, backwards = [], []
        cpu_start = time.process_time()
        first = self.num_steps * self.micro_batches
        batches = [self.batches[(first + i) % NUM_BATCHES] for i in range(self.micro_batches)]
        start = clock.now()
        self.loss_scale.begin_step([targets for _, targets in batches])
        for micro_batch, (inputs, targets) in enumerate(batches):
            with implementation.no_sync() if micro_batch < self.micro_batches - 1 else nullcontext():
                self.loss = self.loss_function(implementation.forward(inputs), targets)
                scaled = self.loss_scale.scaled(self.loss, targets)
                forwards.append(clock.now())
                scaled.backward()
                backwards.append(clock.now())
        self.clip()
        with self.around_optimizers():
            for optimizer in self.optimizers:
                optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.targets = targets
        self.num_steps += 1
        return Marks(start, forwards, backwards, clock.now(), time.process_time() - cpu_start)

    def mean_loss(self) -> float:
        """The last micro-batch's loss: its mean over the ranks, or over their tokens. Called on every rank."""
        assert self.loss is not None and self.targets is not None
        count = num_tokens(self.targets) if self.counts_tokens else torch.ones_like(self.loss)
        sums = torch.stack([self.loss.detach().double(), count.double()])
        dist.all_reduce(sums)
        loss, count = sums.tolist()
        return loss / count


class Communication:
    """All-reduces of a step's buckets without any computation, launched one after the other and then waited for."""

    def __init__(self, bucket_bytes: Sequence[int], device: torch.device) -> None:
        self.clock = Clock(device)
        self.buckets = [torch.zeros(num_bytes // 4, device=device) for num_bytes in bucket_bytes]

    def step(self) -> Marks:
        cpu_start = time.process_time()
        start = self.clock.now()
        works = [dist.all_reduce(bucket, async_op=True) for bucket in self.buckets]
        for work in works:
            work.wait()
        end = self.clock.now()
        return Marks(start, [start], [end], end, time.process_time() - cpu_start)


def timed_steps(target: Steppable, num_warm: int, num_steps: int) -> list[StepRecord]:
    """Run steps without pauses, as training does, and time the last ``num_steps`` of them.

    The first steps refill the processor's caches after another case's turn. The ranks start them together.
    """
    dist.barrier()
    marks = [target.step() for _ in range(num_warm + num_steps)]
    target.clock.settle()
    ends = [marks[0].start, *(step.end for step in marks)]
    return [_record(target.clock, step, ends[i]) for i, step in enumerate(marks)][num_warm:]


def _record(clock: Clock, step: Marks, end_before: Any) -> StepRecord:
    forward_s = backward_s = 0.0
    before = step.start
    for forward, backward in zip(step.forwards, step.backwards, strict=True):
        forward_s += clock.elapsed_s(before, forward)
        backward_s += clock.elapsed_s(forward, backward)
        before = backward
    return StepRecord(
        step_s=clock.elapsed_s(end_before, step.end),
        forward_s=forward_s,
        backward_s=backward_s,
        optimizer_s=clock.elapsed_s(before, step.end),
        cpu_s=step.cpu_s,
    )


def make_optimizers(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    """The optimizers of all parameters of a model; fused if torch has that, to take the smallest share of the time.

    "muon" is Muon for `hidden_matrices`, and AdamW for the other parameters, if any. Raises a ValueError if the name is
    not one of `OPTIMIZERS`, or the model has nothing for Muon.
    """
    if name == "sgd":
        return [torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)]
    if name == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)]
    if name != "muon":
        raise ValueError(f"optimizer={name!r} is not known; pass one of {', '.join(OPTIMIZERS)}")
    matrices = hidden_matrices(model)
    if not matrices:
        raise ValueError(
            f"optimizer={name!r} steps the weights of linear layers, and the model has none but its head; pass 'adamw'"
        )
    known = set(map(id, matrices))
    others = [parameter for parameter in model.parameters() if id(parameter) not in known]
    muon = torch.optim.Muon(matrices, lr=1e-4, adjust_lr_fn="match_rms_adamw")
    return [torch.optim.AdamW(others, lr=1e-4, fused=True), muon] if others else [muon]


class Float32NewtonSchulz(TorchFunctionMode):
    """Let ``torch.optim.Muon`` iterate in float32, while this is entered, instead of bfloat16.

    A CPU without instructions for bfloat16 takes 40 to 90 times as long for its products (torch 2.13, AVX2).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Muon calls it once, on the matrix that the iteration then works on in place.
        return args[0].clone() if func is Tensor.bfloat16 else func(*args, **(kwargs or {}))


def hidden_matrices(model: nn.Module) -> list[Tensor]:
    """The weights of a model's linear layers, apart from layers whose name ends in "head"."""
    return [
        module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not name.endswith("head")
    ]


def _moved(batch: tuple[Tensor, Tensor], device: str) -> tuple[Tensor, Tensor]:
    return batch[0].to(device), batch[1].to(device)
