"""Training programs, one for each way in which ranks communicate; see `stage`."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from averages import on_nodes
from fake_manager import FakeManager
from models import TanhLayer
from stage import WIDTH, Blocking, Program, Roles, Stage
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from ddp_compile import ddp_compile, shard_optimizer
from ddp_compile.algorithms import (
    AsyncModelAverage,
    ByteGrad,
    Decentralized,
    DiLoCo,
    GradientAllReduce,
    LocalSGD,
    LowPrecisionDecentralized,
)
from ddp_compile.integrations.torchft import ManagedAllReduce
from ddp_compile.optim import QAdam

CAP_MB = 0.0003  # a layer each


class Layers(nn.Module):
    """Three buckets of odd sizes; before the last layer nothing, a graph "break", or "eager" code not compiled."""

    def __init__(self, ending: str = "", normed: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH) if normed else nn.Identity()
        self.ending = ending

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.second(torch.tanh(self.first(x)))))
        if self.ending == "break":
            torch._dynamo.graph_break()
        return _uncompiled(self.last, x) if self.ending == "eager" else torch.tanh(self.last(x))


@torch.compiler.disable(recursive=True)
def _uncompiled(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.tanh(layer(x))


class Branches(nn.Module):
    """Every second forward leaves a layer out."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        x = torch.tanh(self.always(x))
        return self.sometimes(x) if self.num_forwards % 2 else x


def replicated(stage: Stage, module: nn.Module | None = None, **settings: Any) -> Any:
    module = Layers() if module is None else module
    stage.watch(module)
    settings = {"split": "auto" if "regions" in settings else "backward", **settings}
    settings = {"backend": "aot_eager", "bucket_cap_mb": CAP_MB, "process_group": stage.group, **settings}
    return ddp_compile(module, **settings)


def adam(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), 0.01)


def train(
    stage: Stage,
    make: Callable[[], nn.Module] = Layers,
    times: int = 3,
    prepare: Callable[[Any], object] = lambda model: None,
    nodes: tuple[int, ...] = (),
    **settings: Any,
) -> None:
    """An ordinary loop; if ``nodes`` are given, on nodes with so many ranks each."""
    with on_nodes(*nodes) if nodes else nullcontext():
        model = replicated(stage, make(), **settings)
        prepare(model)
        stage.train(model, adam(model), times)


def managed_replicas(stage: Stage) -> None:
    """Both groups have the same ranks, which makes no difference to streams."""
    manager = FakeManager()
    manager.start_quorum(dist.new_group())
    train(stage, algorithm=ManagedAllReduce(manager))


def with_comm_hook(stage: Stage, name: str) -> None:
    hook: Any = getattr(default_hooks, name)
    train(stage, times=2, prepare=lambda model: model.register_comm_hook(stage.group, hook))


def with_power_sgd(stage: Stage) -> None:
    # Its error feedback frees what another stream reads, within torch's own code.
    state = powerSGD_hook.PowerSGDState(
        stage.group, matrix_approximation_rank=1, start_powerSGD_iter=2, use_error_feedback=False
    )
    train(stage, times=2, prepare=lambda model: model.register_comm_hook(state, powerSGD_hook.powerSGD_hook))


def with_buffer_hook(stage: Stage) -> None:
    """A hook sums buffers up after the forward, over a group of its own; the end of the backward waits for it."""

    def add_up(group: dist.ProcessGroup, buffers: dict[str, Tensor]) -> list[Any]:
        works: list[Any] = [dist.all_reduce(buffer, group=group, async_op=True) for buffer in buffers.values()]
        return [work.get_future() for work in works]

    def register(model: Any) -> None:
        group = dist.new_group(backend=dist.get_backend(stage.group))
        model._register_buffer_comm_hook(group, add_up, "POST_FORWARD")

    train(stage, partial(Layers, normed=True), times=2, prepare=register)


def accumulating(stage: Stage, **settings: Any) -> None:
    """Two micro-batches, of which the second is reduced; and gradients that stay and are zeroed in place."""
    model = replicated(stage, **settings)
    accumulate(stage, model, model, num_steps=2, set_to_none=False)


def accumulate(stage: Stage, model: Any, call: Callable[[Tensor], Tensor], num_steps: int, set_to_none: bool) -> None:
    optimizer = adam(model)
    for roles in stage.steps(num_steps):
        optimizer.zero_grad(set_to_none)
        for synchronizes in (False, True):
            with nullcontext() if synchronizes else model.no_sync():
                stage.backward(stage.forward(call, stage.batch(), roles), roles)
        optimizer.step()


def normalized(stage: Stage, of_shards: bool = False, reads_early: bool = False, **settings: Any) -> None:
    """Two micro-batches, counted on the caller's stream; another one reads the mean loss, also before the backward."""

    def read_mean_loss() -> None:
        with stage.on("other"):
            stage.wait_for(roles.caller)
            model.mean_loss.clone()

    # No bucket has gradients of two streams.
    model = replicated(stage, nn.Sequential(TanhLayer(WIDTH), TanhLayer(WIDTH)), **settings)
    optimizer = shard_optimizer(adam(model), model) if of_shards else adam(model)
    for number, roles in enumerate(stage.steps(3)):
        optimizer.zero_grad()
        for is_last in (False, True):
            with nullcontext() if is_last else model.no_sync():
                loss = stage.forward(model, stage.batch(), roles)
                model.normalize_by(torch.full((), 4.0), loss=loss)
                if reads_early and is_last and number:  # the first step is counted in its backward
                    read_mean_loss()
                stage.backward(loss, roles)
        read_mean_loss()
        optimizer.step()


def clipped(stage: Stage) -> None:
    """Norms are read on the stream of the backward's caller, from the second step on, and used on another."""
    model = replicated(stage)

    def clip(roles: Roles) -> None:
        with stage.on("other"):
            stage.wait_for(roles.caller)
            model.clip_grad_norm_(0.01)
        stage.wait_for("other")

    stage.train(model, adam(model), times=3, before_step=clip)


def late_gradients(stage: Stage, accumulates: bool = False) -> None:
    """From some step on a parameter gets a second gradient after its bucket was launched, which is sent again.

    If gradients are accumulated, in the bucket between the graphs of a forward and a backward.
    """
    model, numbers = replicated(stage), itertools.count()
    late, begins = (model.second, 4) if accumulates else (model.last, 2)

    def with_penalty_later(x: Tensor) -> Tensor:
        y = model(x)
        return y if next(numbers) < begins else torch.cat([y.flatten(), late.weight.flatten()])

    if accumulates:
        accumulate(stage, model, with_penalty_later, num_steps=4, set_to_none=True)
    else:
        stage.train(with_penalty_later, adam(model), times=3)


def delayed(stage: Stage) -> None:
    module = Layers()
    names = [(name, parameter) for name, parameter in module.named_parameters() if name.startswith("first")]
    model = replicated(stage, module, delay_all_reduce_named_params=names, param_to_hook_all_reduce=module.last.weight)
    stage.train(model, adam(model), times=2)


def joined(stage: Stage) -> None:
    """The second rank has one batch less."""
    model = replicated(stage, Layers(normed=True))
    optimizer = adam(model)
    with model.join():
        for number, roles in enumerate(stage.steps(2)):
            if number == 2 * len(stage.roles) - 1 and dist.get_rank() == 1:
                break
            optimizer.zero_grad()
            stage.backward(stage.forward(model, stage.batch(), roles), roles)
            optimizer.step()
        stage.idle()


def finalized_manually(stage: Stage) -> None:
    model = replicated(stage)
    model.require_manual_backward_finalization = True
    stage.train(model, adam(model), times=2, before_step=lambda roles: model.finalize_backward())


def stepped_in_backward(stage: Stage) -> None:
    model = replicated(stage)
    model._register_fused_optim(torch.optim.SGD, lr=0.1)
    for roles in stage.steps(2):
        model.zero_grad()
        stage.backward(stage.forward(model, stage.batch(), roles), roles)


def q_adam(stage: Stage) -> None:
    module = Layers()
    optimizer = QAdam(module.parameters(), lr=0.01, warmup_steps=2)
    model = replicated(stage, module, algorithm=optimizer.algorithm())
    stage.train(model, optimizer, times=3)


def asynchronous(stage: Stage) -> None:
    """The thread averages during steps, evaluations, and forwards on other streams."""
    # In the last step of the warm-up the ranks compare nothing, so the host does not wait.
    model = replicated(stage, algorithm=AsyncModelAverage(sync_interval_ms=1, warmup_steps=3))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for roles in stage.steps(4, pause_s=0.01):  # for the other threads and ranks
        optimizer.zero_grad()
        # No backward follows this one, and the next one finds the trainer inside already.
        stage.forward(model, stage.batch(), Roles("other", "", roles.caller), is_looked_at=False)
        stage.backward(stage.forward(model, stage.batch(), roles), roles)
        for other in ("other", "another"):
            stage.wait_for(other)  # which may still read what is stepped
        optimizer.step()
        with torch.no_grad():
            for other in ("other", "another"):
                stage.forward(model, stage.batch(), Roles(other, "", roles.caller), is_looked_at=False)
    with stage.on("default"):
        model.comm_algorithm.abort()


def switched(stage: Stage) -> None:
    """From one algorithm to the next: gradients, then parameters."""
    model = replicated(stage)
    optimizer = adam(model)
    for algorithm in (ByteGrad(), LocalSGD(period=2), Decentralized()):
        stage.train(model, optimizer)
        stage.idle()
        model.set_comm_algorithm(algorithm)
    stage.train(model, optimizer)


def sharded(stage: Stage, ending: str = "", **settings: Any) -> None:
    """Steps of shards, clipped; evaluations on another stream; and an average of weights that reads after each step."""
    model = replicated(stage, Layers(ending), **settings)
    optimizer = shard_optimizer(adam(model), model)
    averaged = [parameter.detach().clone() for parameter in model.parameters()]
    for number, roles in enumerate(stage.steps(3)):
        stage.backward(stage.forward(model, stage.batch(), roles), roles)
        stage.wait_for("other")  # which may still read what is stepped
        model.clip_grad_norm_(1.0)
        optimizer.step()
        with torch.no_grad():
            if number % 3 == 0:
                stage.forward(model, stage.batch(), Roles("other", "", roles.caller), is_looked_at=False)
            elif number % 3 == 1:
                with stage.on("other"):
                    torch._foreach_norm(list(model.parameters()))  # the first reader waits for all others
                torch._foreach_lerp_(averaged, list(model.parameters()), 0.5)
        optimizer.zero_grad()


def sharded_whole(stage: Stage, **settings: Any) -> None:
    """Two optimizers, on two streams, of which one steps matrices as a whole."""
    model = replicated(stage, **settings)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    optimizers = shard_optimizer([torch.optim.Muon(matrices, 0.01), torch.optim.AdamW(others, 0.01)], model)
    for roles in stage.steps(3):
        stage.backward(stage.forward(model, stage.batch(), roles), roles)
        model.clip_grad_norm_(1.0)
        with stage.on("other"):
            stage.wait_for(roles.caller)
            optimizers[0].step()
        optimizers[1].step()  # steps in the same buckets, and waits for no other stream
        stage.wait_for("other")
        model.zero_grad()


def sharded_moved(stage: Stage) -> None:
    """Between two steps, parameters are given memory that another stream has allocated."""
    model = replicated(stage)
    optimizer = shard_optimizer(adam(model), model)
    for roles in stage.steps(2):
        stage.backward(stage.forward(model, stage.batch(), roles), roles)
        with stage.on("other"):
            stage.use_memory()  # of what the first backward has moved
            stage.wait_for(roles.caller)
            for parameter in model.parameters():
                parameter.data = parameter.detach().clone()
        stage.wait_for("other")
        optimizer.step()
        optimizer.zero_grad()


def diloco_saved(stage: Stage) -> None:
    """States are saved on another stream between a message and the step that applies it, on which the message ends."""
    model = replicated(stage, algorithm=DiLoCo(sync_every=3, fragments=1, fragment_sync_delay=2))
    numbers = itertools.count()

    def save(roles: Roles) -> None:
        if next(numbers) % 3 == 0:
            with stage.on("other"):
                stage.wait_for(roles.caller)
                model.comm_algorithm.state_dict()
            stage.wait_for("other")

    stage.train(model, adam(model), times=6, after_step=save)


def steady(stage: Stage, of_shards: bool = False, **settings: Any) -> None:
    """A few steps to reach the steady state, in which nothing may make the host wait for the device."""
    model = replicated(stage, **settings)
    optimizer = shard_optimizer(adam(model), model) if of_shards else adam(model)
    every = stage.roles
    stage.roles = every[:1]
    stage.train(model, optimizer, times=9)  # agreement points at 1, 2, 4 and 8
    stage.roles = every
    stage.train(model, optimizer, steady=True)


#: With groups whose ``wait()`` holds up a stream.
_ON_NCCL: dict[str, Program] = {
    "backward split": train,
    "forward split": partial(train, split="forward"),
    "graph break": partial(train, make=partial(Layers, "break")),
    # The bucket that is launched last is ready first, since parameters that are unused in the first iteration are not
    # packed again.
    "eager end": partial(train, make=partial(Layers, "eager"), find_unused_parameters=True),
    "regions": partial(train, make=lambda: nn.Sequential(*(TanhLayer(WIDTH) for _ in range(3))), regions=[TanhLayer]),
    "buffers": partial(train, make=partial(Layers, normed=True)),
    "buffer hook": with_buffer_hook,
    "gradients of their own": partial(train, gradient_as_bucket_view=False),
    "lazy buckets": partial(train, lazy_bucket_allocation=True, gradient_as_bucket_view=False),
    "static graph": partial(train, static_graph=True),
    "unused parameters": partial(train, make=Branches, times=4, find_unused_parameters=True),
    "accumulation": accumulating,
    "accumulation, forward split": partial(accumulating, split="forward"),
    "normalized": normalized,
    "normalized, forward split": partial(normalized, split="forward"),
    "normalized, sharded": partial(normalized, of_shards=True),
    "normalized, read early": partial(normalized, reads_early=True),
    "clipped": clipped,
    "late gradients": late_gradients,
    "late gradients, added": partial(late_gradients, accumulates=True),
    "delayed all-reduce": delayed,
    "join": joined,
    "manual finalization": finalized_manually,
    "steps in backward": stepped_in_backward,
    "allreduce hook": partial(with_comm_hook, name="allreduce_hook"),
    "bf16 hook": partial(with_comm_hook, name="bf16_compress_hook"),
    "PowerSGD hook": with_power_sgd,
    "wire dtype": partial(train, algorithm=GradientAllReduce(wire_dtype=torch.bfloat16)),
    "sums at the owner": partial(train, algorithm=GradientAllReduce(reproducible=True)),
    "hierarchical, one node": partial(train, algorithm=GradientAllReduce(hierarchical=True), nodes=(2,)),
    "hierarchical, two nodes": partial(train, algorithm=ByteGrad(hierarchical=True), nodes=(1, 1)),
    "managed replicas": managed_replicas,
    "ByteGrad": partial(train, algorithm=ByteGrad()),
    "ByteGrad, eager end": partial(train, algorithm=ByteGrad(), make=partial(Layers, "eager")),
    "QAdam": q_adam,
    "decentralized": partial(train, algorithm=Decentralized()),
    "shift one": partial(train, algorithm=Decentralized(peer_selection="shift_one")),
    "ring": partial(train, algorithm=LowPrecisionDecentralized()),
    "ring, one node": partial(train, algorithm=LowPrecisionDecentralized(hierarchical=True), nodes=(2,)),
    "local SGD": partial(train, algorithm=LocalSGD(period=2)),
    "DiLoCo": partial(
        train, algorithm=DiLoCo(sync_every=2, fragments=2, fragment_sync_delay=1, wire_dtype=torch.bfloat16)
    ),
    "DiLoCo, saved": diloco_saved,
    "asynchronous average": asynchronous,
    "switched algorithms": switched,
    "sharded": sharded,
    "sharded, graph break": partial(sharded, ending="break"),
    "sharded, forward split": partial(sharded, split="forward"),
    "sharded, moved parameters": sharded_moved,
    "sharded, whole parameters": sharded_whole,
    "sharded, whole parameters, forward split": partial(sharded_whole, split="forward"),
}

#: With groups whose ``wait()`` blocks the host.
_ON_GLOO = (
    "backward split", "normalized", "eager end", "bf16 hook", "ByteGrad, eager end", "hierarchical, two nodes",
    "sharded",
)  # fmt: skip
PROGRAMS = _ON_NCCL | {f"{name}, blocking": Blocking(_ON_NCCL[name]) for name in _ON_GLOO}

#: In which the host must not wait for the device.
STEADY_PROGRAMS: dict[str, Program] = {
    "backward split": steady,
    "forward split": partial(steady, split="forward"),
    "unused parameters": partial(steady, find_unused_parameters=True),
    "static graph": partial(steady, static_graph=True),
    "sharded": partial(steady, of_shards=True),
    "ByteGrad": partial(steady, algorithm=ByteGrad()),
}
