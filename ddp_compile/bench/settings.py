"""Settings and results as plain data, which the processes of a run exchange."""

from __future__ import annotations

from dataclasses import dataclass

OPTIMIZERS = ("sgd", "adamw", "muon")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadSettings:
    """Which model is trained, and on which device.

    Args:
        model: A name of `ddp_compile.bench.workloads.WORKLOADS`, or a user's ``module:function``.
        depth: Number of layers; the model's own default when None.
        width: Features of a layer; the model's own default when None.
        batch_size: Samples of one micro-batch on one rank; the model's own default when None.
        optimizer: A name of `OPTIMIZERS`.
        device: "cpu" or "cuda".
        clip: Largest norm of all gradients, to which they are clipped before the optimizer; not clipped when None.
        tokens: Sequences have uneven lengths, and gradients are the mean over the tokens of all ranks.
    """

    model: str
    depth: int | None = None
    width: int | None = None
    batch_size: int | None = None
    optimizer: str = "sgd"
    device: str = "cpu"
    clip: float | None = None
    tokens: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One row of the table: an implementation with its settings.

    Args:
        implementation: A name of `ddp_compile.bench.implementations.IMPLEMENTATIONS`, or a user's ``module:function``.
        bucket_cap_mb: Bucket capacity in MiB.
        mode: Mode of ``torch.compile``.
        no_sync_every: Micro-batches of one step; all but the last one run inside ``no_sync``.
    """

    implementation: str
    bucket_cap_mb: float = 25.0
    mode: str = "default"
    no_sync_every: int = 1

    def __str__(self) -> str:
        return f"{self.implementation} (mode {self.mode}, cap {self.bucket_cap_mb:g} MiB)"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankContext:
    """The settings of one rank's process of one case.

    Args:
        case: The case.
        workload: The model and its settings.
        rank: This rank.
        world_size: Number of ranks.
        store_path: File over which the ranks of this case connect.
        interface: Network interface for gloo; None lets gloo choose.
        cache_dir: Compile caches of this rank and case.
        simulated_bits_per_second: Rate of a simulated link; the real process group is used when None.
        simulated_world_size: Number of ranks that the simulated link has.
        simulated_latency_s: Of each of its collectives.
    """

    case: Case
    workload: WorkloadSettings
    rank: int
    world_size: int
    store_path: str
    interface: str | None
    cache_dir: str
    simulated_bits_per_second: float | None = None
    simulated_world_size: int = 8
    simulated_latency_s: float = 50e-6


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One timed step of one rank; times in seconds.

    Args:
        step_s: From the end of the step before to the end of this one.
        forward_s: Forward passes of all micro-batches, with the loss, and before them a blocking count of tokens.
        backward_s: Backward passes, with the reductions that they wait for.
        optimizer_s: Clipping, and ``step()`` and ``zero_grad()`` of all optimizers.
        cpu_s: CPU seconds of the process with all its threads.
    """

    step_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    cpu_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Figures of building a case and of its first steps, on one rank.

    Args:
        num_parameters: Elements of all parameters.
        gradient_bytes: Bytes of all gradients.
        warmup_s: Length of each of the first steps, in seconds; the first one compiles.
        num_graphs: Graphs that AOTAutograd compiled: forwards, parts of cut ones counted one by one, and the backwards
            of compiled autograd.
    """

    num_parameters: int
    gradient_bytes: int
    warmup_s: list[float]
    num_graphs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Profiled:
    """One profiled step of one rank.

    Args:
        num_all_reduces: All-reduces that were launched.
        payload_bytes: Bytes that they reduced; None if the profiler does not say.
    """

    num_all_reduces: int
    payload_bytes: int | None
