"""``model.measure()``: what is recorded, late ranks, ranks that do not measure, and a single one."""

import gc
import time
import weakref
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from beside import gathered
from models import Mlp, loss_of
from rank_pool import on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ddp_compile import ddp_compile, shard_optimizer
from ddp_compile.__main__ import main
from ddp_compile.algorithms import AsyncModelAverage, ByteGrad, GradientAllReduce, LocalSGD
from ddp_compile.errors import GradientArrivalError, RanksDifferError, ReplicationError
from ddp_compile.report.step_report import StepReport
from ddp_compile.report.steps import Step

LATE_S = 0.2


def replicate(**settings: Any) -> Any:
    return ddp_compile(Mlp(width=33, num_layers=4), **{"bucket_cap_mb": 0.009, "backend": "aot_eager", **settings})


def trained(**settings: Any) -> Any:
    """After two steps the plan stays, and the ranks compare fingerprints in few of the next steps."""
    model = replicate(**settings)
    train_step(model)
    train_step(model)
    return model


def train_step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    loss_of(model(torch.randn(6, 33))).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def check_times(step: Step) -> None:
    """Every rank has all transfers, in an order that is possible."""
    for rank in step.ranks:
        assert rank.began <= rank.backward_began <= rank.ended
        for each in rank.transfers:
            assert each.ready <= each.launched <= each.launch_returned
            assert each.waited_from is not None and each.waited_until is not None
            assert each.launched <= each.waited_from <= each.waited_until
            if each.done is not None:
                assert each.launched <= each.done <= each.waited_until
        waited = sum(each.exposed_s for each in rank.transfers)
        assert rank.exposed_s == pytest.approx(waited + rank.drained_s)
    assert len({tuple((each.kind, each.bucket) for each in rank.transfers) for rank in step.ranks}) == 1


@on_ranks(2)
def test_report_of_every_rank(split: str, tmp_path: Path) -> None:
    model = replicate(split=split)
    train_step(model)
    measurement = model.measure(steps=3)
    assert model.comm_stats() is None
    with pytest.raises(ReplicationError, match=r"0 of 3 steps have been measured\. Train on"):
        measurement.report()
    for number in range(2, 5):
        assert not measurement.is_complete
        train_step(model)
        last = model.comm_stats()
        assert last.number == number and [rank.rank for rank in last.ranks] == [dist.get_rank()]
        assert last.communication_s > 0
    report = measurement.report()  # sends nothing
    train_step(model)
    assert measurement.num_steps == 3 and model.comm_stats().number == 4
    assert [*map(StepReport.from_json, gathered(report.to_json()))] == [report, report]
    assert [step.number for step in report.steps] == [2, 3, 4]
    assert report.plan == model.bucket_plan and report.clock_error_s < 0.1
    for step in report.steps:
        check_times(step)
        assert [each.bucket for each in step.ranks[0].transfers] == [bucket.index for bucket in report.plan.buckets]
    profile, plan = tmp_path / f"profile_{dist.get_rank()}.json", tmp_path / f"plan_{dist.get_rank()}.json"
    report.save(profile)
    # With a bandwidth: the times of so small buckets need not grow with their sizes, which is an error without one.
    assert main(["plan", "--profile", str(profile), "--bandwidth", "1gbit", "--save", str(plan)]) == 0
    train_step(replicate(split=split, bucket_plan=plan, bucket_cap_mb=None))


@on_ranks(2, eagerly=True)
def test_late_rank_is_named() -> None:
    model = trained()
    measurement = model.measure(steps=3)
    for _ in range(3):
        loss = loss_of(model(torch.randn(6, 33)))
        if dist.get_rank() == 1:
            time.sleep(LATE_S)
        loss.backward()
    steps = measurement.report().steps
    # Medians, since other tests may hold up either rank in one of the steps.
    assert 0.8 * LATE_S < median(step.lateness_s(1) for step in steps) < 1.5 * LATE_S
    assert median(step.lateness_s(0) for step in steps) < 0.25 * LATE_S
    assert median(step.ranks[0].exposed_s for step in steps) > 0.7 * LATE_S  # it waits, but not for transfers
    for of_transfers in ([step.communication_s for step in steps], [step.exposed_s for step in steps]):
        assert median(seconds for seconds in of_transfers if seconds is not None) < 0.5 * LATE_S
    assert all("rank 1 late by " in str(step) for step in steps)


@on_ranks(2, eagerly=True)
def test_gathers_of_the_next_step() -> None:
    model = replicate()
    optimizer = shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    train_step(model, optimizer)
    measurement = model.measure(steps=2)  # the gathers for step 2 have been launched: step 3 is the first
    for _ in range(4):
        train_step(model, optimizer)
    steps = measurement.report().steps
    assert [step.number for step in steps] == [3, 4]
    for step in steps:
        check_times(step)
        for rank in step.ranks:
            kinds = [each.kind for each in rank.transfers]
            assert kinds == sorted(kinds) and kinds.count("gather") == kinds.count("reduce") == len(
                model.bucket_plan.buckets
            )
            gathers = [each for each in rank.transfers if each.kind == "gather"]
            assert all(each.launched < rank.began < each.waited_until < rank.backward_began for each in gathers)
        assert step.communication_s is None and "communication unknown" in str(step)  # gloo's messages do not say


@on_ranks(2, eagerly=True)
def test_launches_are_not_computation() -> None:
    """ByteGrad waits inside `launch` for the bucket before; LocalSGD waits after the backward."""
    for algorithm in (ByteGrad(), LocalSGD(period=1)):
        model = trained(algorithm=algorithm)
        with model.measure(steps=None) as measurement:
            for _ in range(3):
                if dist.get_rank() == 1:
                    time.sleep(LATE_S)
                train_step(model)
        firsts = [step.of_rank(0) for step in measurement.report().steps]
        # Medians, since other tests may hold up either rank in one of the steps.
        assert median(first.launching_s + first.exposed_s for first in firsts) > 0.7 * LATE_S
        assert median(first.computation_s for first in firsts) < 0.3 * LATE_S
        assert len(firsts) == 3 and all(each.done is None for first in firsts for each in first.transfers)
        text = "nothing reported when reductions ended"
        assert (text in str(measurement.report())) == isinstance(algorithm, ByteGrad)
        model.unwrap()


def slow_hook(_state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Its future is complete `LATE_S` after its all-reduce."""

    def divide(work: Any) -> torch.Tensor:
        time.sleep(LATE_S)
        return work.value()[0].div_(dist.get_world_size())

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(divide)


@on_ranks(2, eagerly=True)
def test_ends_of_hooks_and_chains() -> None:
    for algorithm, hook in (
        (GradientAllReduce(), slow_hook),
        (GradientAllReduce(), default_hooks.fp16_compress_hook),
        (GradientAllReduce(wire_dtype=torch.float16), None),
    ):
        model = replicate(algorithm=algorithm)
        if hook is not None:
            model.register_comm_hook(None, hook)
        train_step(model)
        train_step(model)
        measurement = model.measure(steps=2)
        train_step(model)
        train_step(model)
        steps = measurement.report().steps
        for step in steps:
            check_times(step)
            assert step.communication_s is not None and step.communication_s > 0
        for bucket in steps[0].exposed_by_bucket:
            transfers_s = [transfer_s for step in steps if (transfer_s := step.transfer_s(bucket)) is not None]
            assert len(transfers_s) == 2
            assert hook is not slow_hook or 0.9 * LATE_S < min(transfers_s) < 2 * LATE_S
        assert "nothing reported" not in str(measurement.report())
        model.unwrap()


@on_ranks(2, eagerly=True)
def test_counts_and_clipping_are_measured() -> None:
    model = replicate()
    measurement = None
    for step in range(4):
        if step == 2:
            measurement = model.measure(steps=2)
        loss = loss_of(model(torch.randn(6, 33)))
        model.normalize_by(6)
        loss.backward()
        model.clip_grad_norm_(1.0)
        model.zero_grad()
    assert measurement is not None
    first, second = measurement.report().steps
    for each in (first, second):
        for rank in each.ranks:
            assert 0 < rank.counts_s <= rank.drained_s
    # The call before the first one came before measuring began.
    assert all(rank.clip_s == 0 for rank in first.ranks) and all(rank.clip_s > 0 for rank in second.ranks)
    (normalizes,) = model.explain().averaging
    assert "normalize_by() divides" in normalizes
    assert normalizes in str(model.explain())


class Branches(Mlp):
    def forward(self, x: torch.Tensor, takes_branch: bool = False) -> torch.Tensor:
        x = self.layers[0](x)
        return self.layers[1](x) if takes_branch else x


@on_ranks(2, eagerly=True)
def test_step_that_raises() -> None:
    settings = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb": 0.004}
    model: Any = ddp_compile(Branches(33, 2), **settings)
    for _ in range(2):
        model(torch.randn(6, 33)).sum().backward()
    measurement = model.measure(steps=3)
    for number in range(3):
        loss = model(torch.randn(6, 33), takes_branch=number == 1).sum()
        with pytest.raises(GradientArrivalError) if number == 1 else nullcontext():
            loss.backward()
    assert [step.number for step in measurement.report().steps] == [3, 5]


@on_ranks(2, eagerly=True)
def test_ranks_that_measure_different_steps() -> None:
    """A rank that measures alone is one of those of `test_error_says_where_ranks_stand`."""
    with pytest.raises(RanksDifferError, match=r"measure\(steps=2\) from iteration 1 on on rank 0"):
        replicate().measure(steps=2 + dist.get_rank())


@on_ranks(2, eagerly=True)
def test_refused_measurements() -> None:
    model = replicate()
    for steps in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match=r"measure\(steps=.*\) must be an integer of at least 1"):
            model.measure(steps=steps)
    said = r"after destroy_process_group\(\), .* call it before"
    with mock.patch.object(dist, "is_initialized", lambda: False), pytest.raises(ReplicationError, match=said):
        model.measure()
    measurement = model.measure(steps=2)
    with pytest.raises(ReplicationError, match="while another measurement of this model records"):
        model.measure()
    train_step(model)
    model.unwrap()
    measurement.stop()
    with pytest.raises(ReplicationError, match=r"1 of 2 steps have been measured. It has ended; call model.measure"):
        measurement.report()
    averaged: Any = replicate(algorithm=AsyncModelAverage())
    with pytest.raises(ReplicationError, match="no rank waits for another"):
        averaged.measure()
    dist.barrier()  # the other rank may still be connecting, and fails if this one closes the group
    averaged.unwrap()


@on_ranks(2, eagerly=True)
def test_model_is_freed_after_measuring() -> None:
    """Callbacks of works run in the group's threads, which are joined when it is destroyed."""
    group = dist.new_group()
    model = trained(process_group=group)
    measurement = model.measure(steps=None)
    train_step(model)
    model.require_manual_backward_finalization = True
    train_step(model)  # launched, and never waited for
    alive = weakref.ref(model)
    del model
    assert alive() is None
    gc.collect()
    dist.destroy_process_group(group)
    with pytest.raises(ReplicationError, match=r"1 steps have been measured\. It has ended"):
        measurement.report()


@torch.compiler.set_stance("force_eager")
def test_one_rank(single_rank_group: None) -> None:
    model = replicate()
    assert model.comm_stats() is None
    with model.measure(steps=None) as measurement:
        for _ in range(3):
            train_step(model)
    report = measurement.report()
    assert [step.number for step in report.steps] == [2, 3]  # after the first one the plan changes
    assert report.clock_error_s == 0
    for step in report.steps:
        assert step.ranks[0].transfers == () and step.communication_s == 0 and step.exposed_s < 1e-3
        assert 0 < step.computation_s <= step.duration_s
    assert str(model.comm_stats()).startswith("compute ")


@torch.compiler.set_stance("force_eager")
def test_last_hundred_steps_and_an_exception(single_rank_group: None) -> None:
    model = replicate()
    with model.measure(steps=None) as measurement:
        for _ in range(103):
            train_step(model)
    assert [step.number for step in measurement.report().steps] == list(range(4, 104))
    with pytest.raises(KeyError), model.measure(steps=None) as left:
        train_step(model)
        raise KeyError
    train_step(model)
    assert left.is_over and not left.is_complete
    with pytest.raises(ReplicationError, match=r"no report: 1 steps have been measured\. It has ended"):
        left.report()
