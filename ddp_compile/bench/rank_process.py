"""The process of one rank of one case: builds the case, then answers the run's calls.

Note [A process for each case and rank]
Torch's ways to train switch global settings (the Python reducer changes what Dynamo inlines for the rest of the
process), share compile caches in memory and leak into each other's memory figures. So each case has a process for each
rank. While it is one case's turn, the processes of the others sleep on a pipe. They are forked from a process that has
imported torch, since importing takes seconds, and run in their rank's network namespace and on its core.
"""

from __future__ import annotations

import os
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from ddp_compile.bench import torch_switches
from ddp_compile.bench.implementations import COMMUNICATION, implementation_named
from ddp_compile.bench.profiling import peak_live_bytes, profile_step
from ddp_compile.bench.settings import Prepared, Profiled, RankContext, StepRecord
from ddp_compile.bench.training import Communication, Steppable, Training, timed_steps
from ddp_compile.bench.workloads import make_workload
from ddp_compile.config import caps_from_mib
from ddp_compile.plan.packing import plan_buckets
from ddp_compile.plan.spec import GradientSpec

if TYPE_CHECKING:
    from ddp_compile.bench.simulated_link import LinkModel

GROUP_TIMEOUT_S = 300
NUM_WARMUP_STEPS = 4


class Failure(NamedTuple):
    """The exception of a rank that could not answer."""

    summary: str
    traceback: str


class RankCase:
    """One case on one rank; a run calls its public methods."""

    def __init__(self, context: RankContext) -> None:
        self.context = context
        self.device = torch.device(context.workload.device)
        self.target: Steppable | None = None
        self.parameters: list[torch.nn.Parameter] = []

    def prepare(self) -> Prepared:
        """Build the case and take its first steps, which compile."""
        self.target = self._build()
        dist.barrier()
        warmup_s = []
        for _ in range(NUM_WARMUP_STEPS):
            start = time.perf_counter()
            self.target.step()
            self.target.clock.settle()
            warmup_s.append(time.perf_counter() - start)
        return Prepared(
            num_parameters=sum(parameter.numel() for parameter in self.parameters),
            gradient_bytes=sum(parameter.numel() * parameter.element_size() for parameter in self.parameters),
            warmup_s=warmup_s,
            num_graphs=torch_switches.num_compiled_graphs(),
        )

    def time(self, num_warm: int, num_steps: int) -> list[StepRecord]:
        """Time steps; see `timed_steps`."""
        assert self.target is not None
        return timed_steps(self.target, num_warm, num_steps)

    def profile(self, trace: Path) -> Profiled:
        """Profile one step; rank 0 writes the trace, see `profile_step`."""
        assert isinstance(self.target, Training)
        if self.context.rank:
            trace = Path(self.context.cache_dir) / "trace.json.gz"
        trace.parent.mkdir(parents=True, exist_ok=True)
        return profile_step(self.target, trace)

    def loss(self) -> float:
        """Mean over the ranks, or over their tokens, of the last step's loss."""
        assert isinstance(self.target, Training)
        return self.target.mean_loss()

    def peak_bytes(self) -> int:
        """The most bytes that were live at the same time in a step; see `peak_live_bytes`."""
        assert isinstance(self.target, Training)
        return peak_live_bytes(self.target, self.parameters)

    def time_all_reduce(self, num_bytes: int, repeats: int) -> list[StepRecord]:
        """Time all-reduces of one size."""
        return timed_steps(Communication([num_bytes], self.device), 2, repeats)

    def set_simulated_rate(self, bits_per_second: float) -> None:
        """Change the rate of the simulated link."""
        from ddp_compile.bench.simulated_link import set_link_model

        set_link_model(_link_model(bits_per_second, self.context))

    def _build(self) -> Steppable:
        context = self.context
        case, settings = context.case, context.workload
        workload = make_workload(settings)
        model = workload.model.to(self.device)
        self.parameters = list(model.parameters())
        if case.implementation == COMMUNICATION:
            return Communication(bucket_bytes(model, case.bucket_cap_mb), self.device)
        implementation = implementation_named(case.implementation)(model, case)
        return Training(implementation, model, workload, settings, context.rank, case.no_sync_every)


def bucket_bytes(model: torch.nn.Module, cap_mb: float) -> list[int]:
    """Sizes of the buckets in bytes, if gradients become ready in the reverse order of registration."""
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    gradients = [
        GradientSpec(
            index=i, fqn=name, numel=p.numel(), dtype=str(p.dtype).removeprefix("torch."), device=str(p.device)
        )
        for i, (name, p) in reversed(list(enumerate(parameters)))
    ]
    return [bucket.num_bytes for bucket in plan_buckets(gradients, caps_from_mib(cap_mb, 1.0, "cpu")).buckets]


def serve(context: RankContext, connection: Connection, connection_of_host: Connection) -> None:
    """Join the process group of the case, then answer calls until the run hangs up.

    The fork inherits ``connection_of_host``. If it stayed open, it would hide the host's death.
    """
    connection_of_host.close()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = context.cache_dir
    os.environ["TRITON_CACHE_DIR"] = os.path.join(context.cache_dir, "triton")
    try:
        _join_process_group(context)
        case = RankCase(context)
    except Exception as error:
        connection.send(_failure(error))
        return
    connection.send(None)
    _answer_calls(case, connection)


def _answer_calls(case: RankCase, connection: Connection) -> None:
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send(getattr(case, method)(**arguments))
        except Exception as error:
            connection.send(_failure(error))


def _join_process_group(context: RankContext) -> None:
    if context.workload.device == "cuda":
        torch.cuda.set_device(context.rank)
    if context.interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = context.interface
    if context.simulated_bits_per_second is not None:
        from ddp_compile.bench.simulated_link import init_simulated_process_group

        model = _link_model(context.simulated_bits_per_second, context)
        init_simulated_process_group(model, torch.device(context.workload.device))
        return
    dist.init_process_group(
        "nccl" if context.workload.device == "cuda" else "gloo",
        init_method=f"file://{context.store_path}",
        rank=context.rank,
        world_size=context.world_size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )


def _link_model(bits_per_second: float, context: RankContext) -> LinkModel:
    from ddp_compile.bench.simulated_link import LinkModel

    return LinkModel.from_rate(bits_per_second, context.simulated_world_size, context.simulated_latency_s)


def _failure(error: Exception) -> Failure:
    lines = str(error).strip().splitlines()
    return Failure(f"{type(error).__name__}: {lines[0] if lines else ''}"[:200], traceback.format_exc())
