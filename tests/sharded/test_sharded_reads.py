"""Parameters of a sharded optimizer are complete when they are read, by compiled code and after errors too."""

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from beside import flat_of, gathered, is_same_everywhere, seeded
from in_ci import only
from models import Mlp, Scaled, loss_of
from oracle import WIDTH, assert_trains_alike, batch, in_a_child, late_rank, make, plain, said_by
from rank_pool import Ranks, on_ranks
from torch import Tensor, nn

from ddp_compile import ReductionError
from ddp_compile.plan.spec import PADDED_ALIGNMENT_BYTES

READERS: dict[str, Callable[[Any, list[Any]], Tensor]] = {
    "held since before": lambda model, held: torch.cat([p.detach().flatten() for p in held]),
    "data": lambda model, held: torch.cat([p.data.flatten() for p in held]),
    "in a list": lambda model, held: torch.stack(torch._foreach_norm(held)),
    "numpy": lambda model, held: torch.from_numpy(held[0].detach().numpy().copy()),
    "list": lambda model, held: torch.tensor(held[-2].tolist()),
    "operator": lambda model, held: torch.ops.aten.mul(held[0], 2.0).detach(),
    "in place": lambda model, held: held[2].data.add_(0.0),
    "state_dict": lambda model, held: torch.cat([v.flatten() for v in model.state_dict().values()]),
    "pickle": lambda model, held: flat_of(pickle.loads(pickle.dumps(model))),
    "copy": lambda model, held: torch.cat([p.detach().flatten() for p in copy.deepcopy(model).parameters()]),
    "submodule": lambda model, held: model.layers[0](torch.ones(1, WIDTH)).detach(),
    "function": lambda model, held: F.linear(torch.ones(1, WIDTH), held[0]).detach(),
    "jvp": lambda model, held: torch.func.jvp(lambda p: p * 2, (held[0],), (torch.ones_like(held[0]),))[0].detach(),
    "hessian": lambda model, held: torch.func.hessian(lambda p: (p**3).sum())(held[0]).detach(),
    "linearize": lambda model, held: torch.func.linearize(lambda p: p * 2, held[0])[0].detach(),
    "vmap": lambda model, held: torch.vmap(lambda row: row * 2)(held[0]).detach(),
    "as another class": lambda model, held: held[0].as_subclass(Tensor).detach(),
    "functional call, asked for anew": lambda model, held: functionally(dict(model.named_parameters()), "layers.0."),
    "without gradients": lambda model, held: evaluated(model),
    "in evaluation mode": lambda model, held: model.eval()(torch.ones(2, WIDTH)).detach(),
    "after load_state_dict": lambda model, held: loaded(model),
}
#: No class is asked before these read a parameter that is held: `await_parameters` has to be called.
UNSEEN: dict[str, Callable[[Any, list[Any]], Tensor]] = {
    "functional call": lambda model, held: functionally(dict(model.layers[0].named_parameters())),
    "vjp": lambda model, held: torch.func.vjp(lambda p: p * 2, held[0])[0].detach(),
    "functionalize": lambda model, held: torch.func.functionalize(lambda p: p * 2)(held[0]).detach(),
    "parameter": lambda model, held: nn.Parameter(held[0]).detach(),
    "of a tensor": lambda model, held: torch.tensor(held[0]),
    "traced": lambda model, held: torch.jit.trace(model.layers[0], torch.ones(1, WIDTH))(torch.ones(1, WIDTH)).detach(),
    "in a child": lambda model, held: torch.tensor(in_a_child(held[0].tolist)),
}


def loaded(model: nn.Module) -> Tensor:
    model.load_state_dict(seeded(lambda: Mlp(WIDTH, 4)).state_dict())
    return flat_of(model)


def functionally(named: dict[str, Tensor], prefix: str = "") -> Tensor:
    """Of the gradients of a loss of another one than the replicated module."""
    named = {name.removeprefix(prefix): p for name, p in named.items() if name.startswith(prefix)}
    layer = nn.Linear(WIDTH, WIDTH, device="meta")

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, parameters, (torch.ones(1, WIDTH),)).square().sum()

    return torch.func.grad(loss)(named)["bias"].detach()


@torch.no_grad()
def evaluated(model: nn.Module) -> Tensor:
    return model(torch.ones(2, WIDTH))


@pytest.mark.parametrize("way", only(["noticed"], ["noticed", "await_parameters", "overlap=False"]))
@on_ranks(2)
def test_reads_after_a_step_are_complete(way: str) -> None:
    """What each of them sees is the same on all ranks."""
    model, optimizer = make(overlap=way != "overlap=False")
    held = list(model.parameters())
    plain(model, optimizer, 0)
    stale = []
    for step, (name, read) in enumerate((READERS if way == "noticed" else READERS | UNSEEN).items()):
        loss_of(model.train()(batch(step))).backward()
        with late_rank():
            optimizer.step()
        if way == "await_parameters":
            model.await_parameters()
        assert way == "noticed" or all(type(p) is nn.Parameter for p in held)
        values = read(model, held)
        assert all(type(p) is nn.Parameter for p in held), name
        optimizer.zero_grad()
        if not is_same_everywhere(values):
            stale.append(name)
    assert stale == []


class Broken(Mlp):
    """Python code that reads a parameter between two graphs, and before any."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 3)
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.look()
        x = self.layers[0](x)
        self.look()
        return self.layers[2](self.layers[1](x))

    @torch.compiler.disable
    def look(self) -> None:
        self.seen.append(float(sum(layer.weight.detach().abs().sum() for layer in self.layers)))


@pytest.mark.parametrize("way", ["graph breaks", "many shapes", "told to be eager"])
@on_ranks(2)
def test_eager_code_sees_complete_parameters(way: str) -> None:
    seen = []

    def train(model: Any, optimizer: Any) -> None:
        for step in range(4):
            x = batch(step)
            if way == "many shapes":  # beyond the limit of recompilations, where Dynamo runs the module eagerly
                x = x[: step + 1]
            stance = "force_eager" if way == "told to be eager" and step > 1 else "default"
            with torch.compiler.set_stance(stance):
                loss_of(model(x)).backward()
            with late_rank():
                optimizer.step()
            optimizer.zero_grad()
        seen.append(getattr(model, "seen", []))

    with torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False):
        assert_trains_alike(train, Broken if way == "graph breaks" else None, split="forward")
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("backend", "split"),
    only(
        [("aot_eager", "forward"), ("aot_eager", "backward")],
        [("aot_eager", "forward"), ("aot_eager", "backward"), ("inductor", "backward")],
    ),
)
@on_ranks(2)
def test_forward_waits_before_each_read(backend: str, split: str) -> None:
    """At each wait: how many buckets are still being gathered after it; and products of matrices."""
    torch._dynamo.reset()
    model, optimizer = make(backend=backend, split=split)
    for step in range(3):
        plain(model, optimizer, step)
    sharding = model.comm_algorithm.sharding
    assert "gathered parameters are waited for part by part" in str(model.explain())
    wait = sharding.await_parameters

    def noted(indices: Any = None) -> None:
        wait(indices)
        with torch.profiler.record_function(f"left {sum(bucket.is_gathering for bucket in sharding.buckets)}"):
            pass

    sharding.await_parameters = noted
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss_of(model(batch(3))).backward()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    found = [event.name for event in events if event.name.startswith(("left ", "aten::addmm", "aten::mm"))]
    num_buckets = len(model.bucket_plan.buckets)
    assert num_buckets > 2
    assert {f"ddp_compile::bucket_0_{what}" for what in ("wait", "gather_wait")} <= {event.name for event in events}
    expected = [name for left in range(num_buckets - 1, -1, -1) for name in (f"left {left}", "mm")]
    assert [name if name.startswith("left ") else "mm" for name in found][: 2 * num_buckets] == expected


@on_ranks(2, eagerly=True)
def test_profiler_does_not_see_messages() -> None:
    """One that stops after a step; see `unprofiled_messages`."""
    model, optimizer = make()
    plain(model, optimizer, 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        plain(model, optimizer, 1)
    plain(model, optimizer, 2)  # waits for what the profiler would have seen
    assert not [event.name for event in profile.events() if "send" in event.name or "recv" in event.name]


# Compiled code, forwards that fail, errors, and forked processes.


@pytest.mark.parametrize("way", ["before", "after", "within"])
@on_ranks(2)
def test_compiled_code_reads_complete_parameters(way: str) -> None:
    """A layer that is compiled before the first step or after it, and a training step that is compiled as a whole."""
    torch._dynamo.reset()
    model, optimizer = make()
    num_graphs, ones = 0, torch.ones(1, WIDTH)

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal num_graphs
        num_graphs += 1
        return graph

    layer = torch.compile(model.layers[0], backend=backend)
    if way == "before":
        layer(ones)
    seen = []

    def train(x: Tensor) -> None:
        loss_of(model(x)).backward()
        with late_rank():
            optimizer.step()
        optimizer.zero_grad()
        seen.append((model.layers[0] if way == "within" else layer)(ones).detach())

    for step in range(4):
        (torch.compile(train, backend=backend) if way == "within" else train)(batch(step))
    assert is_same_everywhere(torch.cat(seen))
    assert num_graphs <= 1 or way == "within"  # nothing is traced again for a parameter's other class


@on_ranks(2)
def test_reads_after_an_early_failure() -> None:
    """Of a forward that fails before it has read any parameter: when its buffer is to be broadcast."""
    model, optimizer = make(module=Scaled(WIDTH, 3), backend="aot_eager")
    for step in range(2):
        plain(model, optimizer, step)
    loss_of(model(batch(2))).backward()
    with late_rank():
        optimizer.step()
    under_way = 0

    def fail(*_: Any) -> None:
        nonlocal under_way
        under_way = sum(bucket.is_gathering for bucket in model.comm_algorithm.sharding.buckets)
        raise ValueError

    model._register_buffer_comm_hook(None, fail, "PRE_FORWARD")
    with pytest.raises(ValueError):
        model(batch(3))
    assert under_way > 0
    assert is_same_everywhere(flat_of(model))


def read_after_a_failure(stance: str) -> list[str]:
    with torch.compiler.set_stance(stance):
        model, optimizer = make()
        for step in range(2):
            loss_of(model(batch(step))).backward()
            if step and dist.get_rank() == 1:
                time.sleep(0.5)  # or the other one's step would find the connection closed
                return []
            optimizer.step()
            optimizer.zero_grad()
        said = [said_by(lambda: model(batch(2)), ReductionError)]  # one graph, if compiled, during which nobody waits
    nn.Linear(1, 1)(torch.ones(1))  # what has nothing to do with it is left alone
    torch.vmap(torch.sin)(torch.ones(2))
    return said + [said_by(model.state_dict, ReductionError) for _ in range(len(model.bucket_plan.buckets) + 2)]


@pytest.mark.parametrize("stance", ["force_eager", "default"])
def test_parameters_that_never_came_stay_an_error(ranks: Ranks, stance: str) -> None:
    said, nothing = ranks(2).run_expecting_failures(read_after_a_failure, stance, timeout_s=8.0)
    assert nothing == []
    assert all("gather of parameters after step 2 failed" in each for each in said)


@on_ranks(2, eagerly=True)
def test_reads_in_a_forked_child_are_refused() -> None:
    model, optimizer = make()
    held = next(model.parameters())
    plain(model, optimizer, 0)
    for text in in_a_child(lambda: [said_by(held.sum), said_by(model.state_dict), said_by(model.await_parameters)]):
        assert f"ReplicationError: rank {dist.get_rank()}: a parameter is read in a process that was forked" in text
        assert "Call model.await_parameters() before the fork" in text
    assert is_same_everywhere(held.detach().flatten())


# What it keeps, and in which precision.


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks(eagerly=True)
def test_states_are_divided_by_the_ranks(world_size: int) -> None:
    model, optimizer = make()
    other, other_optimizer = make(sharded=False)
    for each in ((model, optimizer), (other, other_optimizer)):
        plain(*each, 0)
    shards, element = model.comm_algorithm.sharding.buckets, 4
    # Operators take the same elements in vectors, and the same ones one by one, in a piece and in the whole.
    assert all(piece.begin * element % PADDED_ALIGNMENT_BYTES == 0 for bucket in shards for piece in bucket.pieces)
    padding = element * (sum(b.cut.shard_numel * world_size for b in shards) - flat_of(model).numel())
    own, whole = (
        sum(v.nbytes for s in each.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim())
        for each in (optimizer, other_optimizer)
    )
    assert sum(gathered(own)) == whole
    assert own <= (whole + 2 * padding) / world_size
