"""What a sharded optimizer does not do is an error by name, and never a step by other values than the user's."""

import copy
import gc
import importlib
import math
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import flat_of, is_same_everywhere
from models import Mlp, loss_of
from oracle import WIDTH, batch, make, plain, refused, said_by
from rank_pool import RankFailure, Ranks, on_ranks
from torch import Tensor, nn, optim

from ddp_compile import ddp_compile, shard_optimizer, sharded_optimizer_state_dict

LOCAL = "was called while layers.0.weight.grad holds a local gradient, which has not been reduced"


def replicated(module: nn.Module | None = None, **settings: Any) -> Any:
    return ddp_compile(module or Mlp(WIDTH, 2), bucket_cap_mb=0.001, **{"backend": "eager", **settings})


class Unknown(optim.SGD):
    pass


@on_ranks(2)
def test_calls() -> None:
    model, rank = replicated(), dist.get_rank()
    parameters = list(model.parameters())
    halved = Mlp(WIDTH, 2)
    halved.layers[0].requires_grad_(False)
    halved = replicated(halved)
    other = nn.Parameter(torch.zeros(2))
    low = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    adamw, sgd, unlike = optim.AdamW(parameters), optim.SGD, "RanksDifferError: RANK: on rank 1, the optimizers to be"
    calls: list[tuple[str, Any]] = [
        ("TypeError: optimizer='adamw' is not a torch.optim.Optimizer", "adamw"),
        ("the model reduces their gradients: layers.0.weight. Put all", optim.AdamW(parameters[1:])),
        ("the optimizer has 1 parameter outside of the model", optim.AdamW([*parameters, other])),
        ("LBFGS cannot be sharded, since a step looks at all parameters at once", optim.LBFGS(parameters)),
        ("RANK: missing in the optimizer, although ", [sgd(parameters[:1]), optim.Adafactor(parameters[2:])]),
        ("optimizer=[] has no optimizer", []),
        ("Adafactor with eps=(None, 0.001) derives a group's first", optim.Adafactor([*parameters, low])),
        ("in more than one optimizer: layers.0.weight; leave each", [sgd(parameters), sgd(parameters[:1])]),
        ("SGD with differentiable=True cannot be sharded", sgd(parameters, differentiable=True)),
        (unlike, sgd(parameters, lr=0.1 * (1 + rank))),
        (unlike, sgd(parameters, lr=torch.tensor(0.1 + 1e-7 * rank))),
        (unlike, [sgd(parameters[i::2]) for i in (rank, 1 - rank)]),
        (unlike, sgd([{"params": parameters[: 1 + rank]}, {"params": parameters[1 + rank :]}])),
        (unlike, sgd(parameters[:: 1 - 2 * rank])),
    ]
    for said, optimizer in calls:
        with refused(said):
            shard_optimizer(optimizer, model)
    said = "Unknown works element by element is unknown; pass elementwise=True" if rank else unlike
    with refused(said):
        shard_optimizer(Unknown(parameters), model, elementwise=None if rank else True)
    for setting, said in (("placement", "write elementwise=False instead"), ("momentum", "leave it out")):
        with refused(f"{setting}=; {said}"):
            shard_optimizer(adamw, model, **{setting: 1})  # type: ignore[arg-type]
    with refused("model is an Mlp that is not replicated; call ddp_compile(model) first"):
        shard_optimizer(adamw, Mlp(WIDTH, 2))
    with refused("SGD has no parameter that the model reduces; leave it out"):
        shard_optimizer([sgd(layer.parameters()) for layer in halved.layers], halved)
    loss_of(model(batch(0))).backward()
    with refused("shard_optimizer was called while 4 parameters had a gradient; call it between two steps"):
        shard_optimizer(adamw, model)
    model.zero_grad()
    sparse = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    with refused("takes no sparse gradients"):
        shard_optimizer(optim.SGD(sparse.parameters()), replicated(sparse))


@on_ranks(2, eagerly=True)
def test_calls_once_sharded() -> None:
    model, optimizer = make()
    plain(model, optimizer, 0)
    loss_of(model(batch(0))).backward()
    parameters = list(model.parameters())
    for foreach in (False, True):
        with refused("layers.0.weight.grad, which is reduced to shards: no rank has all of it"):
            optim.SGD(parameters, foreach=foreach).step()
    with refused("this AdamW is sharded already"):
        shard_optimizer(optimizer, model)
    with refused("the first call shards all parameters of a model. Pass all optimizers to one call"):
        shard_optimizer(optim.AdamW(parameters), model)
    with refused("add_param_group was called on a sharded optimizer"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with refused("Join cannot be used with the sharded optimizer: "):
        model.join_hook()
    for copied in (copy.deepcopy, pickle.dumps):
        with refused("a sharded optimizer cannot be copied or pickled"):
            copied(optimizer)
    assert {type(p) for p in copy.deepcopy(model).parameters()} == {nn.Parameter}
    assert optimizer.state[parameters[0]] == {}  # a look leaves nothing in the state_dict
    assert sorted(optimizer.state_dict()["state"]) == list(range(8))


class WithAlias(Mlp):
    """Has something on the memory of its first weight."""

    def __init__(self, alias: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__(WIDTH, 2)
        if alias is not None:
            self.add(alias)

    def add(self, alias: Callable[[Tensor], Tensor]) -> None:
        value = alias(self.layers[0].weight)
        if isinstance(value, nn.Parameter):
            self.alias = value
        else:
            self.register_buffer("alias", value)


def frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.data[1:], requires_grad=False)


OF_STORAGE = "parameters share a storage, which sharding would undo: layers.0.weight, the"
BETWEEN_PROCESSES = "layers.0.weight, layers.0.bias, layers.1.weight, layers.1.bias lie in memory that other processes"


@on_ranks(2, eagerly=True)
def test_shared_memory() -> None:
    """At the call, at the end of the first backward, and after it."""
    changes: list[tuple[str, Callable[[WithAlias], Any]]] = [
        (f"{OF_STORAGE} buffer alias, which is not trained", lambda m: m.add(Tensor.detach)),
        (f"{OF_STORAGE} parameter alias, which is not trained", lambda m: m.add(frozen)),
        (BETWEEN_PROCESSES, lambda m: m.share_memory()),
    ]

    def trained(model: Any) -> Any:
        return optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    for said, change in changes:
        module = WithAlias()
        change(module)
        model = replicated(module)
        with refused("ReplicationError: RANK: parameters ", said):
            shard_optimizer(trained(model), model)
        model = replicated(WithAlias())
        shard_optimizer(trained(model), model)
        loss = loss_of(model(batch(0)))
        if dist.get_rank() == 1:
            change(model)
        with refused("ReplicationError: rank 1: ", said):
            loss.backward()
    model = replicated(WithAlias())
    optimizer = shard_optimizer(trained(model), model)
    loss_of(model(batch(0))).backward()
    with refused("RANK: layers.0.weight.grad, which exists only as shards, cannot be moved into memory"):
        model.share_memory()
    with refused("RANK: layers.0.weight has been moved into memory that other", "send them p.detach().clone()"):
        optimizer.step()
    tied = Mlp(WIDTH, 2)
    tied.layers[1].weight.data = tied.layers[0].weight.data
    with refused("parameters share a storage, which sharding would undo: layers.0.weight, layers.1.weight"):
        make(module=tied)


@on_ranks(2, eagerly=True)
def test_gradients() -> None:
    model, optimizer = make()
    first = next(model.parameters())
    for step in range(2):
        loss_of(model(batch(step))).backward()
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    pieces = optimizer.param_groups[0]["params"]
    for question in (partial(nn.utils.clip_grad_norm_, pieces, 1.0), pieces[0].grad.isfinite):
        with refused("was called on gradients that are reduced to shards", "clip with model.clip_grad_norm_"):
            question()
    for order in (0, -math.inf, math.nan):
        with refused(f"ValueError: norm_type={float(order)} must be above zero"):
            model.clip_grad_norm_(1.0, order)
    assert "reduced to shards" in repr(first.grad)
    first.grad = torch.ones_like(first)
    with refused(".grad of layers.0.weight was set after a backward had reduced it"):
        optimizer.step()
    first.grad = None
    before = first.detach().clone()
    optimizer.step()
    assert torch.equal(first.detach(), before)  # None is no gradient


@on_ranks(2, eagerly=True)
def test_gradients_that_are_never_reduced() -> None:
    model, optimizer = make(find_unused_parameters=False)
    plain(model, optimizer, 0)
    loss_of(model(batch(1))).backward()
    with model.no_sync():
        loss_of(model(batch(2))).backward()
    for what, call in (
        ("model.clip_grad_norm_()", partial(model.clip_grad_norm_, 1.0)),
        ("model.full_gradients()", model.full_gradients),
        ("optimizer.step()", optimizer.step),
    ):
        with refused(f"{what} {LOCAL}"):
            call()
    model.zero_grad()
    plain(model, optimizer, 3)  # the step that was refused has not begun
    loss_of(model(batch(4))).backward()
    next(model.parameters()).square().sum().backward()  # without a forward
    with refused(f"optimizer.step() {LOCAL}"):
        optimizer.step()


@pytest.mark.parametrize("is_local", [False, True])
@on_ranks(2, eagerly=True)
def test_forward_between_backward_and_step(is_local: bool) -> None:
    model, optimizer = make()
    loss_of(model(batch(0))).backward()
    with model.no_sync() if is_local else nullcontext():
        loss = loss_of(model(batch(1)))
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    with refused(".grad of layers.0.weight was set after a backward"):
        optimizer.step()
    first.grad = None
    optimizer.step()
    optimizer.zero_grad()
    with refused("has been modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("split", ["forward", "backward"])
@on_ranks(2)
def test_gradients_stay_hidden_after_a_forward(split: str) -> None:
    """Between backward and step, in ``no_sync()`` too: what a user's code does that has forgotten the shards."""
    torch._dynamo.reset()
    model, optimizer = make("sgd", backend="aot_eager", split=split)
    first = next(model.parameters())
    said: list[str] = []
    uses: list[Callable[[], Any]] = [
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: first.grad.add_(1.0),
        lambda: first.grad + 1.0,
        lambda: first.grad.sum(),
    ]
    for is_local in (False, True, False):
        loss_of(model(batch(0))).backward()
        with model.no_sync() if is_local else nullcontext():
            out = model(batch(1))

        out.register_hook(lambda _gradient: said.extend(map(said_by, uses)))
        said.extend(map(said_by, uses))
        with model.no_sync() if is_local else nullcontext():
            loss_of(out).backward()
        if is_local:
            loss_of(model(batch(2))).backward()
        optimizer.step()
        optimizer.zero_grad()
    model(batch(3))
    assert all(parameter.grad is None for parameter in model.parameters())  # nothing is hidden where nothing is
    assert len(said) == 3 * 2 * len(uses)
    for text in said:
        assert f"ReplicationError: rank {dist.get_rank()}: " in text
        assert "Clip with model.clip_grad_norm_(max_norm), read with model.full_gradients()" in text


@on_ranks(2, eagerly=True)
def test_step_after_the_model_is_gone() -> None:
    """A GradScaler asks for the gradients of an optimizer whose model is gone."""
    model, optimizer = make("sgd")
    held, scaler = list(model.parameters()), torch.amp.GradScaler("cpu", init_scale=64.0)
    before = torch.cat([p.detach().flatten() for p in held])
    scaler.scale(loss_of(model(batch(0)))).backward()
    algorithm = weakref.ref(model.comm_algorithm)
    del model
    gc.collect()
    scaler.step(optimizer)
    after = torch.cat([p.detach().flatten() for p in held])
    assert algorithm() is None
    assert is_same_everywhere(after) and (before != after).any()


@torch.compiler.set_stance("force_eager")
def leaves_out_a_step() -> None:
    """On rank 1, which goes on."""
    model, optimizer = make()
    for step in range(8):
        loss_of(model(batch(step))).backward()
        if step == 3 and dist.get_rank() == 1:
            continue
        optimizer.step()
        optimizer.zero_grad()


def test_a_rank_that_leaves_out_a_step(ranks: Ranks) -> None:
    for said in ranks(2).run_expecting_failures(leaves_out_a_step, timeout_s=2.0):
        assert isinstance(said, RankFailure) and said.kind == "ReductionError", said


@on_ranks(2, eagerly=True)
def test_edits_of_groups() -> None:
    said = 'group["params"], or the number of groups, of a sharded optimizer has been changed'
    model, optimizer = make()
    if dist.get_rank() == 1:
        del optimizer.param_groups[0]["params"][0]
    with refused("rank 1: ", said):
        loss_of(model(batch(0))).backward()
    ends = []
    for edits in (True, False):
        model, optimizer = make()
        group = optimizer.param_groups[0]
        num_whole = len(group["params"])
        for step in range(3):
            loss_of(model(batch(step))).backward()
            if edits and step < 2:
                kept = list(group["params"])
                group["params"] = kept[1:] if step else []
                for call in (optimizer.step, optimizer.state_dict):
                    with refused(f"RANK: {said}", "Put back what was there; to leave parameters out"):
                        call()
                group["params"] = kept
            optimizer.step()
            optimizer.zero_grad()
        ends.append(flat_of(model))
    assert torch.equal(*ends)
    group["params"] = group["params"][1:]
    with pytest.warns(UserWarning, match=r"an edit is undone: group"):
        model.unwrap()
    assert len(optimizer.param_groups[0]["params"]) == num_whole


@pytest.mark.parametrize(("is_gone", "stay"), [(False, 0), (True, 2)])
@on_ranks(2, eagerly=True)
def test_unwrap_destroys_its_process_groups(is_gone: bool, stay: int) -> None:
    """Unless that of the model is gone."""
    groups = dist.distributed_c10d._world.pg_map
    before = set(groups)
    own = dist.new_group()
    model, optimizer = make(process_group=own)
    assert len(set(groups) - before) == 3
    plain(model, optimizer, 0)
    model.await_parameters()
    dist.barrier()  # the other rank may still be sending over it
    if is_gone:
        dist.destroy_process_group(own)
    model.unwrap()
    assert len(set(groups) - before - {own}) == stay
    dist.barrier()


@on_ranks(2, eagerly=True)
def test_unwrap_early_and_after_an_error() -> None:
    model, optimizer = make()
    model.unwrap()
    loss_of(model(batch(0))).backward()
    optimizer.step()
    assert "step" not in vars(optimizer) and "zero_grad" not in vars(optimizer)

    def bad_sample(_gradient: Any) -> None:
        raise KeyError

    model, optimizer = make()
    plain(model, optimizer, 0)
    model.layers[0].weight.register_hook(bad_sample)  # others have come by then
    with pytest.raises((KeyError, RuntimeError)):
        loss_of(model(batch(1))).backward()
    model.unwrap()
    with refused("was sharded for a model that was unwrapped after an error"):
        optimizer.step()


@pytest.mark.parametrize("left", [0, 1, 2])  # in the first bucket, between, and in the last, outside of our hooks
@on_ranks(2, eagerly=True)
def test_states_after_a_step_that_is_interrupted(left: int) -> None:
    model = replicated(Mlp(WIDTH, 3))
    held = list(model.parameters())
    optimizer = shard_optimizer(optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False), model)
    module: Any = importlib.import_module("torch.optim.sgd")
    calls, step_of = [], module.sgd

    def fails(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) > left:
            raise KeyboardInterrupt
        step_of(*args, **kwargs)

    loss_of(model(batch(0))).backward()
    num_pieces = len(optimizer.param_groups[0]["params"])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "sgd", fails)
        optimizer.step()
    said = "SGD.step() has raised before all parameters were stepped, so the ranks have diverged"
    for call in (
        optimizer.state_dict,
        lambda: optimizer.load_state_dict({}),
        lambda: sharded_optimizer_state_dict(optimizer),
        optimizer.step,
    ):
        with refused(f"RANK: {said}"):
            call()
    pieces = optimizer.param_groups[0]["params"]
    with refused("isfinite was called on gradients that are reduced to shards"):
        pieces[0].grad.isfinite()
    assert len(pieces) == num_pieces
    for call in (
        model.state_dict,
        lambda: model.layers[0].weight.sum(),
        lambda: model(batch(1)),
        model.unwrap,
        lambda: [float(p.sum()) for p in held],
    ):
        with refused(said):
            call()
    with refused("make a new optimizer, and load a checkpoint"):
        optimizer.step()


@pytest.mark.parametrize("change", [Tensor.double, Tensor.t])
@on_ranks(2, eagerly=True)
def test_parameters_that_no_longer_fit(change: Callable[[Tensor], Tensor]) -> None:
    model, optimizer = make("sgd")
    plain(model, optimizer, 0)
    first = next(model.parameters())
    first.data = change(first.data)
    with refused("ParametersChangedError", "layers.0.weight"):
        plain(model, optimizer, 1)
