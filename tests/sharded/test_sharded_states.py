"""States of sharded optimizers: each rank saves its part, and any number of ranks loads it, as without shards."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from beside import flat_of
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from in_ci import only
from models import Mlp, loss_of
from oracle import CAP_MB, KINDS, WIDTH, Net, Pair, batch, make, said_by, unequal
from rank_pool import Ranks, on_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ddp_compile import (
    ReplicationError,
    ddp_compile,
    load_sharded_optimizer_state_dict,
    shard_optimizer,
    sharded_optimizer_state_dict,
)
from ddp_compile.runtime.sharded.checkpoint import PartOfTensor


def train(model: Any, optimizer: Any, begin: int, end: int) -> None:
    """Steps with one batch for all ranks, however many there are."""
    for step in range(begin, end):
        torch.manual_seed(step)
        x = torch.randn(12, WIDTH).chunk(dist.get_world_size())[dist.get_rank()]
        loss_of(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()


class WithEmpty(Mlp):
    """One parameter has no elements."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 4)
        self.empty = nn.Parameter(torch.empty(3, 0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.empty.sum()


def make_with_empty(kind: str, sharded: bool) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(1)
    return make(kind, WithEmpty(), sharded)


def state_of(model: Any, optimizer: Any, sharded: bool) -> dict[str, Any]:
    of_optimizer = sharded_optimizer_state_dict(optimizer) if sharded else get_optimizer_state_dict(model, optimizer)
    return {"model": get_model_state_dict(model), "optimizer": of_optimizer}


@torch.compiler.set_stance("force_eager")
def save(path: str, sharded: bool, kind: str = "adamw") -> Any:
    model, optimizer = make_with_empty(kind, sharded)
    if sharded:
        with pytest.raises(ReplicationError, match="has no pieces: it is not sharded, or no backward"):
            sharded_optimizer_state_dict(optimizer)
    train(model, optimizer, 0, 3)
    dcp.save(state_of(model, optimizer, sharded), checkpoint_id=path)
    train(model, optimizer, 3, 6)
    return flat_of(model), optimizer.state_dict()


@torch.compiler.set_stance("force_eager")
def load(path: str, sharded: bool) -> Any:
    model, optimizer = make_with_empty("adamw", sharded)
    train(model, optimizer, 7, 9)
    state = state_of(model, optimizer, sharded)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    if sharded:
        load_sharded_optimizer_state_dict(optimizer, state["optimizer"])
    else:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    train(model, optimizer, 3, 6)
    return flat_of(model), optimizer.state_dict()


def test_checkpoints_are_those_without_shards(ranks: Ranks, tmp_path: Path) -> None:
    paths = {sharded: str(tmp_path / str(sharded)) for sharded in (True, False)}
    saved = {sharded: ranks(2).run(save, path, sharded) for sharded, path in paths.items()}
    through = saved[True][0]
    for loaded in (True, False):
        for sharded in (True, False):
            for found in ranks(2).run(load, paths[loaded], sharded):
                assert not unequal(found, through)
    for found in ranks(3).run(load, paths[True], True):
        assert not unequal(found, through, tolerance=1e-4)


@torch.compiler.set_stance("force_eager")
def load_into_new_run(path: str, kind: str, sharded: bool) -> Any:
    """As the documentation says: by names, before there are pieces."""
    model, optimizer = make_with_empty(kind, sharded)
    state = state_of(model, optimizer, sharded=False)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    loaded = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 3, 6)
    if sharded:
        for by_name in (
            lambda: get_optimizer_state_dict(model, optimizer),
            lambda: set_optimizer_state_dict(model, optimizer, state["optimizer"]),
        ):
            with pytest.raises(KeyError):  # torch's own: the groups hold no parameters of the model
                by_name()
    return (flat_of(model), optimizer.state_dict()), loaded


def test_new_run_loads_a_checkpoint_by_names(ranks: Ranks, tmp_path: Path) -> None:
    for kind in ("adamw", "sgd, nesterov"):
        path = str(tmp_path / kind)
        through = ranks(2).run(save, path, True, kind)[0]
        for num_ranks in (2, 3):
            ours, theirs = (ranks(num_ranks).run(load_into_new_run, path, kind, sharded) for sharded in (True, False))
            for (end, loaded), (their_end, their_loaded) in zip(ours, theirs, strict=True):
                assert not unequal(loaded, their_loaded)
                assert not unequal(end, their_end, tolerance=1e-5 if num_ranks > 2 else 0.0)
                assert num_ranks > 2 or not unequal(end, through)


@hypothesis_settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_are_the_elements_of_a_range(shape: list[int], data: st.DataObject) -> None:
    numel = math.prod(shape)
    begin = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(begin, numel))
    order = data.draw(st.permutations(range(len(shape))))
    whole = torch.arange(float(numel)).view([shape[dim] for dim in order])
    whole = whole.permute([list(order).index(dim) for dim in range(len(shape))])
    part = PartOfTensor.of(torch.arange(float(begin), float(end)), begin, whole, torch.float32)
    seen: list[Tensor] = []
    for chunk, item in zip(part.__create_chunk_list__(), part.__create_write_items__("x", part), strict=True):
        slices = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
        box = part.__get_tensor_shard__(item.index)
        assert torch.equal(box, whole[slices])
        seen.append(box.flatten())
    assert len(seen) <= max(1, 2 * len(shape) - 1)
    assert sorted(torch.cat(seen).tolist() if seen else []) == list(range(begin, end))
    if seen:
        with pytest.raises(ReplicationError, match=r"only torch\.distributed\.checkpoint can"):
            part + 1


# Optimizers that step whole parameters: precision, checkpoints, other numbers of ranks.


@on_ranks(2, eagerly=True)
def test_low_precision_states_to_master_weights() -> None:
    """From an unsharded run, before the first backward: tensors of other shapes, alone and in lists."""
    for make_of, settings in (KINDS["adafactor"], KINDS["whitening"]):
        torch.manual_seed(1)
        module = Net().to(torch.bfloat16)
        unsharded = make_of(module)
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
        for each in unsharded:
            each.step()
        model: Any = ddp_compile(copy.deepcopy(module), bucket_cap_mb=CAP_MB, backend="eager")
        optimizers = make_of(model)
        shard_optimizer(optimizers, model, master_weights=True, **settings)
        for mine, theirs in zip(optimizers, unsharded, strict=True):
            mine.load_state_dict(theirs.state_dict())
        for step in range(2):
            loss_of(model(batch(step).to(torch.bfloat16)).float()).backward()
            for each in optimizers:
                each.step()
            model.zero_grad()
        assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@on_ranks(2, eagerly=True)
def test_a_state_of_no_parameter_is_refused() -> None:
    pair = Pair("muon")
    pair.train(0)
    pair.optimizers[0].state["count"] = 7
    assert "Muon has the state 'count', which belongs to no parameter" in said_by(pair.optimizers[0].state_dict)


@torch.compiler.set_stance("force_eager")
def saved(kind: str, dtype: torch.dtype, path: str) -> Any:
    pair = Pair(kind, dtype=dtype)
    for step in range(3):
        pair.train(step)
    states = [each.state_dict() for each in pair.optimizers], pair.model.state_dict()
    sharded = [sharded_optimizer_state_dict(each) for each in pair.optimizers]
    dcp.save({f"optimizer {i}": state for i, state in enumerate(sharded)}, checkpoint_id=path)
    return states


@torch.compiler.set_stance("force_eager")
def goes_on(kind: str, dtype: torch.dtype, states: Any, path: str, way: str) -> None:
    pair = Pair(kind, dtype=dtype)
    of_optimizers, of_model = copy.deepcopy(states)  # the ranks share the memory of what they are called with
    if way != "at once":
        pair.train(7)
    pair.model.load_state_dict(of_model)
    pair.reference.load_state_dict(of_model)
    for each, state in zip(pair.of_reference, of_optimizers, strict=True):
        each.load_state_dict(state)
    if way == "dcp":
        sharded = {f"optimizer {i}": sharded_optimizer_state_dict(each) for i, each in enumerate(pair.optimizers)}
        dcp.load(sharded, checkpoint_id=path)
        for number, each in enumerate(pair.optimizers):
            load_sharded_optimizer_state_dict(each, sharded[f"optimizer {number}"])
    else:
        for each, state in zip(pair.optimizers, of_optimizers, strict=True):
            each.load_state_dict(state)
    if way != "at once":
        assert not (found := pair.differences()), found
    if dtype != torch.float32 and way != "at once":
        return  # where the loaded value is the present one, rounded, a master weight keeps its own
    for scheduler in (s for of_kind in pair.schedulers for s in of_kind):
        scheduler.step_size = 1000
    pair.train(8)
    pair.train(9)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    only([("muon", torch.bfloat16)], [*((kind, torch.float32) for kind in KINDS), ("muon", torch.bfloat16)]),
)
def test_resumes_on_another_number_of_ranks(ranks: Ranks, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    states = ranks(2).run(saved, kind, dtype, str(tmp_path))[0]
    for way in ("at once", "later", "dcp"):
        ranks(3).run(goes_on, kind, dtype, states, str(tmp_path), way)
