"""Where training programs run: streams for forward, AccumulateGrad and caller, and the steps of an ordinary loop."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import simulated_group
import torch
import torch.distributed as dist
from detector import RaceDetector, Stack
from observer import observing
from simulated_group import BACKEND, Device, Launch
from simulated_streams import DEFAULT_STREAM, SimulatedStreams, Site
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp_compile import torch_internals
from ddp_compile.runtime.comm import streams as runtime_streams


class Roles(NamedTuple):
    """On which streams one training step runs; each is "default", "side", or a name of its own.

    AccumulateGrad's is the same in all steps of a model, as it is with torch; "accumulate" are two, one for each half
    of the parameters, which meet in the middle of a bucket.
    """

    forward: str
    accumulate: str
    caller: str


WIDTH, ROWS = 9, 4  #: of a batch

#: All different. A program that is in order here is also in order if some of the streams are the same.
DISTINCT = [Roles("forward", "accumulate", "caller"), Roles("side", "accumulate", "side")]


def all_roles(accumulate: str) -> list[Roles]:
    """Each of default and side, and one stream for each role."""
    both = ("default", "side")
    return [*(Roles(f, accumulate, c) for f in both for c in both), Roles("forward", accumulate, "caller")]


@dataclass
class Outcome:
    races: list[str] = field(default_factory=list)
    sites: dict[Site, int] = field(default_factory=dict)
    host_waits: list[str] = field(default_factory=list)  # in steps that were said to be steady
    launches: list[Launch] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)


class Stage:
    """One rank's streams, a process group on them, and batches; ``roles`` has the streams of each step in turn."""

    def __init__(self, streams: SimulatedStreams, group: dist.ProcessGroup, roles: list[Roles]) -> None:
        self.group = group
        self.roles = roles
        self.outcome = Outcome()
        self._streams = streams
        self._named = {"default": DEFAULT_STREAM, "side": streams.new()}
        self._batches = torch.Generator().manual_seed(17 + dist.get_rank())
        self._module = nn.Module()
        self._places: dict[int, int] = {}  # of parameters, by their numbers
        self._inputs: list[Any] = []
        self._nodes: list[Any] = []  # or the hooks would be gone with them

    @property
    def detector(self) -> RaceDetector:
        return self._streams.detector

    def end(self) -> None:
        self.idle()
        self.outcome.parameters = [parameter.detach().clone() for parameter in self._module.parameters()]

    def idle(self) -> None:
        """Let the host wait for all streams."""
        for stream in self._named.values():
            self.detector.host_waits(stream)

    def steps(self, times: int = 1, pause_s: float = 0.0) -> Iterator[Roles]:
        """Each of the roles, this many times, on the caller's stream; the device is idle between two of them."""
        for roles in self.roles:
            self.idle()
            for _ in range(times):
                with self.on(roles.caller):
                    yield roles
                    self.use_memory()
                    time.sleep(pause_s)

    def batch(self) -> Tensor:
        """Another one in each call and on each rank, the same in each run."""
        return torch.randn(ROWS, WIDTH, generator=self._batches)

    def train(
        self,
        model: Callable[[Any], Any],
        optimizer: Any,
        times: int = 1,
        steady: bool = False,
        before_step: Callable[[Roles], object] = lambda roles: None,
        after_step: Callable[[Roles], object] = lambda roles: None,
    ) -> None:
        """Steps of an ordinary loop, which keeps its own streams in order."""
        for roles in self.steps(times):
            with self.counting_host_waits(steady):
                optimizer.zero_grad()
                self.backward(self.forward(model, self.batch(), roles), roles)
                before_step(roles)
                optimizer.step()
                after_step(roles)

    def use_memory(self) -> None:
        """Between two steps, allocate on every stream, as the next batch and other work would."""
        for stream in self._named.values():
            with self._streams.on(stream):
                torch.zeros(1)

    def forward(self, model: Callable[[Any], Any], x: Any, roles: Roles, is_looked_at: bool = True) -> Tensor:
        """The loss of a forward on its stream. The caller's stream waits for it if the loss is read."""
        self._inputs.append(x)  # a user who trains on several streams keeps them, or tells the allocator
        caller, forward = self.stream(roles.caller), self.stream(roles.forward)
        self.detector.wait_for_stream(forward, caller)
        with self._streams.on(forward):
            loss: Tensor = model(x).square().mean()
        if is_looked_at:
            self.detector.wait_for_stream(caller, forward)
        return loss

    def watch(self, module: nn.Module) -> None:
        """Train this module. The allocator is told, as by the engine, that AccumulateGrad reads the gradients."""
        self._module = module
        for place, parameter in enumerate(p for p in module.parameters() if p.requires_grad):
            self._places[id(parameter)] = place
            node = torch_internals.accumulator_of(parameter)
            torch_internals.register_own(node.register_prehook, self._read_by_accumulate)
            self._nodes.append(node)

    def _read_by_accumulate(self, gradients: tuple[Any, ...]) -> None:
        for gradient in gradients:
            if gradient is not None:
                self.detector.used_by(gradient, self._streams.current())

    def backward(self, loss: Tensor, roles: Roles) -> None:
        """The backward of a loss, called by the caller's stream."""

        def accumulate(parameter: Parameter) -> int:
            if roles.accumulate != "accumulate":
                return self.stream(roles.accumulate)
            half = 2 * self._places[id(parameter)] // len(self._places)
            return self.stream(f"accumulate {half}")

        with self._streams.backward(self.stream(roles.forward), accumulate) as join:
            torch_internals.register_own(loss.register_hook, lambda _: torch_internals.queue_backward_callback(join))
            loss.backward()

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        with self._streams.on(self.stream(name)):
            yield

    def stream(self, name: str) -> int:
        if name not in self._named:
            self._named[name] = self._streams.new()
        return self._named[name]

    def wait_for(self, name: str) -> None:
        """Let the current stream wait for another one."""
        self.detector.wait_for_stream(self._streams.current(), self.stream(name))

    @contextmanager
    def counting_host_waits(self, counting: bool = True) -> Iterator[None]:
        """Inside, each wait of the host that the project's own code asks for is noted."""
        before = len(self._streams.host_waits)
        yield
        if counting:
            for name, stack in self._streams.host_waits[before:]:
                if place := _asked_by_us(stack):
                    self.outcome.host_waits.append(f"{name} in {place}")


def _asked_by_us(stack: Stack) -> str:
    """The innermost call of the project's sources; empty if a test's program has asked."""
    ours = stack.ours()
    return "" if not ours or ours[0].startswith("tests/") else ours[0]


Program = Callable[[Stage], Any]


@dataclass(frozen=True)
class Blocking:
    """A program that runs with groups whose ``wait()`` blocks the host, as gloo's does for tensors of a GPU."""

    program: Program

    def __call__(self, stage: Stage) -> Any:
        return self.program(stage)


SEED = 3


def perform_without_streams(program: Program, roles: list[Roles]) -> Outcome:
    """Run the same program on the ranks' own group, without streams: the expected result."""
    group = dist.group.WORLD
    assert group is not None
    stage = Stage(SimulatedStreams(RaceDetector()), group, roles)
    torch.manual_seed(SEED)
    with torch.compiler.set_stance("force_eager"):
        program(stage)
        stage.end()
    return stage.outcome


def perform(program: Program, roles: list[Roles], ignored: Site | None = None, delays: int | None = None) -> Outcome:
    """Run a program on this rank of the default group, with streams.

    The waits and records at the place ``ignored`` do nothing. ``delays`` seeds random pauses before launches and waits.
    """
    detector = RaceDetector()
    streams = SimulatedStreams(detector, ignored)
    device = Device(streams, _pauses(delays), blocks_host=isinstance(program, Blocking))
    simulated_group.use(device)
    group = dist.new_group(backend=BACKEND)
    stage = Stage(streams, group, roles)
    torch.manual_seed(SEED)

    def note_host_memory(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        for state in optimizer.state.values():  # numbers of steps, whatever device the parameters are on
            if isinstance(number := state.get("step"), Tensor):
                detector.note_host_memory(number)

    handle = register_optimizer_step_post_hook(note_host_memory)
    real, runtime_streams.backend = runtime_streams.backend, streams
    try:
        with observing(streams), patch.object(dist, "ProcessGroupGloo", simulated_group.host_groups(detector)):
            program(stage)
            stage.end()
    except Exception:  # what races spoil may raise
        if ignored is None:
            raise
    finally:
        runtime_streams.backend = real
        handle.remove()
    dist.barrier()  # the group closes with this frame, and another rank may still send
    stage.outcome.races = [str(race) for race in detector.races]
    stage.outcome.sites = streams.sites
    stage.outcome.launches = device.launches
    return stage.outcome


def _pauses(seed: int | None) -> Callable[[], None]:
    if seed is None:
        return lambda: None
    generator = random.Random(1000 * seed + dist.get_rank())
    return lambda: time.sleep(generator.choice((0.0, 0.0, 0.001, 0.004)))
