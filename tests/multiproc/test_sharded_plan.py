"""A sharded optimizer whose bucket plan is replaced: pieces, states and gradients follow, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from in_ci import only
from models import loss_of
from plan_changes import replace_plan
from rank_pool import Ranks, on_ranks
from sharded_pairs import CAP_MB, KINDS, Pair, batch
from test_sharded_refusals import said_by

from ddp_compile import ReplicationError, load_sharded_optimizer_state_dict, sharded_optimizer_state_dict
from ddp_compile.runtime.sharded.checkpoint import PartOfTensor


@torch.compiler.set_stance("force_eager")
def followed(kind: str, settings: dict[str, Any]) -> list[int]:
    pair = Pair(kind, **settings)
    buckets = []
    for cycle, cap_mb in enumerate((CAP_MB / 4, 1.0, CAP_MB)):
        for step in range(3):
            pair.train(3 * cycle + step, clips=step % 2 == 1)
        buckets.append(len(pair.model.bucket_plan.buckets))
        replace_plan(pair.model, cap_mb)
        pair.compare()
    pair.train(9)
    pair.model.unwrap()
    assert pair.dtype is torch.bfloat16 or not pair.differences()
    return buckets


EVERYWHERE = [
    (kind, dtype, world_size)
    for kind in KINDS
    for dtype in (torch.float32, torch.bfloat16)
    for world_size in (2, 3)
    if (kind, dtype) != ("whitening", torch.bfloat16)  # which has float32 matrices
]
IN_CI = [("muon", torch.float32, 2), ("two", torch.bfloat16, 2)]


@pytest.mark.parametrize(("kind", "dtype", "world_size"), only(IN_CI, EVERYWHERE))
def test_training_goes_on_bit_for_bit(ranks: Ranks, kind: str, world_size: int, dtype: torch.dtype) -> None:
    for buckets in ranks(world_size).run(followed, kind, {"dtype": dtype}):
        assert buckets[1] > buckets[0] > buckets[2] == 1


@pytest.mark.parametrize("zeroed", only(["hidden"], ["to none", "in place", "hidden"]))
@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_reduced_gradients_follow_and_may_be_zeroed(zeroed: str) -> None:
    pair = Pair("two")
    pair.train(0)
    for part in range(3):
        loss_of(pair.model((part + 1) * batch(4))).backward()
        before = pair.model.full_gradients()
        replace_plan(pair.model, CAP_MB / 4 if part % 2 else 1.0)
        after = pair.model.full_gradients()
        assert all(torch.equal(before[name], after[name]) for name in before)
    pair.follow()
    pair.step()
    replace_plan(pair.model, CAP_MB)
    if zeroed == "hidden":
        for parameter in pair.model.parameters():
            parameter.grad.zero_()
    else:
        for each in pair.optimizers:
            each.zero_grad(set_to_none=zeroed == "to none")
    pair.compare()
    pair.train(1)


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_gradients_that_are_not_zeroed_are_still_noticed() -> None:
    pair = Pair("two")
    pair.train(0)
    loss_of(pair.model(batch(1))).backward()
    pair.follow()
    pair.step()
    replace_plan(pair.model, 1.0)
    loss = loss_of(pair.model(batch(2)))
    assert "from before the last step, taken or skipped, has not been zeroed" in said_by(loss.backward)


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_local_gradients_stay_local() -> None:
    pair = Pair("muon")
    pair.train(0)
    with pair.model.no_sync():
        loss_of(pair.model(batch(1))).backward()
    replace_plan(pair.model, 1.0)
    loss_of(pair.model(2 * batch(1))).backward()
    pair.follow()
    pair.step()
    for each in pair.optimizers:
        each.zero_grad()
    pair.compare()


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_what_cannot_follow_keeps_the_plan_on_every_rank() -> None:
    pair = Pair("two")
    pair.train(0)
    loss_of(pair.model(batch(1))).backward()
    group, before = pair.optimizers[0].param_groups[0], pair.model.bucket_plan
    kept = list(group["params"])
    if dist.get_rank() == 1:
        group["params"] = kept[:-1]
    replace_plan(pair.model, 1.0)
    group["params"] = kept
    assert pair.model.bucket_plan == before
    pair.model.clip_grad_norm_(1e9)  # gradients are still hidden, and there
    with pytest.raises(ReplicationError, match="reduced to shards"):
        pair.model.first.weight.grad.sum()
    pair.follow()
    pair.step()
    pair.model.zero_grad()
    pair.compare()
    replace_plan(pair.model, 1.0)
    assert pair.model.bucket_plan != before
    pair.train(2)


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_states_for_dcp_that_are_no_longer_those_of_the_optimizer_are_refused() -> None:
    pair = Pair("two")
    pair.train(0)
    states = [sharded_optimizer_state_dict(each) for each in pair.optimizers]
    for each, state in zip(pair.optimizers, states, strict=True):
        load_sharded_optimizer_state_dict(each, state)
    pair.train(1)
    for each, state in zip(pair.optimizers, states, strict=True):
        load_sharded_optimizer_state_dict(each, state)  # steps write in place
    replace_plan(pair.model, 1.0)
    parts = [value for state in states for of in state["state"].values() for value in of.values()]
    for part in (part for part in parts if isinstance(part, PartOfTensor)):
        with pytest.raises(ReplicationError, match="Call it again for each dcp"):
            part.__create_write_items__("state", part)
    for each, state in zip(pair.optimizers, states, strict=True):
        with pytest.raises(ReplicationError, match="has another tensor now than when sharded_optimizer_state_dict"):
            load_sharded_optimizer_state_dict(each, state)


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_states_of_owners_are_not_sent() -> None:
    pair = Pair("muon")
    pair.train(0)
    momenta = {id(state["momentum_buffer"]) for state in pair.optimizers[0].state.values()}
    replace_plan(pair.model, 1.0)
    assert {id(state["momentum_buffer"]) for state in pair.optimizers[0].state.values()} == momenta
    pair.train(1)
