"""Settings and results as plain data, which the processes of a run exchange."""

from dataclasses import dataclass

OPTIMIZERS = ("sgd", "adamw", "muon")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadSettings:
    """Which model is trained, and on which device."""

    model: str  #: a name of `ddp_compile.bench.workloads.WORKLOADS`, or a user's ``module:function``
    depth: int | None = None  #: number of layers; the model's own default when None
    width: int | None = None  #: features of a layer; the model's own default when None
    batch_size: int | None = None  #: samples of one micro-batch on one rank; the model's own default when None
    optimizer: str = "sgd"  #: a name of `OPTIMIZERS`
    device: str = "cpu"  #: "cpu" or "cuda"
    #: Largest norm of all gradients, to which they are clipped before the optimizer; not clipped when None.
    clip: float | None = None
    tokens: bool = False  #: sequences have uneven lengths, and gradients are the mean over the tokens of all ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One row of the table: an implementation with its settings."""

    #: A name of `ddp_compile.bench.implementations.IMPLEMENTATIONS`, or a user's ``module:function``.
    implementation: str
    bucket_cap_mb: float = 25.0  #: bucket capacity in MiB
    mode: str = "default"  #: mode of ``torch.compile``
    no_sync_every: int = 1  #: micro-batches of one step; all but the last one run inside ``no_sync``

    def __str__(self) -> str:
        return f"{self.implementation} (mode {self.mode}, cap {self.bucket_cap_mb:g} MiB)"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankContext:
    """The settings of one rank's process of one case."""

    case: Case
    workload: WorkloadSettings
    rank: int
    world_size: int
    store_path: str  #: file over which the ranks of this case connect
    interface: str | None  #: network interface for gloo; None lets gloo choose
    cache_dir: str  #: compile caches of this rank and case
    #: Rate of a simulated link; the real process group is used when None.
    simulated_bits_per_second: float | None = None
    simulated_world_size: int = 8  #: number of ranks that the simulated link has
    simulated_latency_s: float = 50e-6  #: of each of its collectives


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One timed step of one rank; times in seconds."""

    step_s: float  #: from the end of the step before to the end of this one
    forward_s: float  #: forward passes of all micro-batches, with the loss, and before them a blocking count of tokens
    backward_s: float  #: backward passes, with the reductions that they wait for
    optimizer_s: float  #: clipping, and ``step()`` and ``zero_grad()`` of all optimizers
    cpu_s: float  #: CPU seconds of the process with all its threads


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Figures of building a case and of its first steps, on one rank."""

    num_parameters: int  #: elements of all parameters
    gradient_bytes: int  #: bytes of all gradients
    warmup_s: list[float]  #: length of each of the first steps, in seconds; the first one compiles
    #: Graphs that AOTAutograd compiled: forwards, parts of cut ones counted one by one, and the backwards of compiled
    #: autograd.
    num_graphs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Profiled:
    """One profiled step of one rank."""

    num_all_reduces: int  #: all-reduces that were launched
    payload_bytes: int | None  #: bytes that they reduced; None if the profiler does not say
