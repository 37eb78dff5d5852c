"""One plan: what the reducer sends is what the plan says, and so is what the graphs are cut into."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from in_ci import only
from models import Mlp, loss_of
from rank_pool import RankPool, on_ranks
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ddp_compile import ddp_compile

Ranks = Callable[[int], RankPool]


def large_mlp() -> nn.Module:
    """Twelve layers of 1 MiB and a little."""
    return Mlp(width=512, num_layers=12)


def deep_mlp() -> nn.Module:
    """Twenty-four layers of 0.25 MiB and a little, six MiB in all."""
    return Mlp(width=256, num_layers=24)


def count_buckets(cap_mb: float) -> dict[str, Any]:
    model = ddp_compile(deep_mlp(), bucket_cap_mb=cap_mb, backend="aot_eager")
    loss_of(model(torch.randn(2, 256))).backward()
    model.zero_grad()
    sent: list[int] = []
    all_reduce = dist.ProcessGroup.allreduce

    def counting(group: dist.ProcessGroup, tensors: list[torch.Tensor], *args: Any) -> Any:
        sent.extend(t.numel() * t.element_size() for t in tensors if t.is_floating_point())  # not the ranks' own talk
        return all_reduce(group, tensors, *args)

    with mock.patch.object(dist.ProcessGroup, "allreduce", counting):
        loss_of(model(torch.randn(2, 256))).backward()
    (report,) = model._ddp_compile_state.backend.reports
    return {
        "sent": sent,
        "plan": [bucket.num_bytes for bucket in model.bucket_plan.buckets],
        "partitions": report.num_partitions,
        "digest": model.bucket_plan.digest,
    }


# A capacity below the bias's 1 KiB parts bias and weight; one node makes both ready, so they share a partition. With
# the largest capacity the first bucket keeps its own of 1 MiB.
@pytest.mark.parametrize(
    ("cap_mb", "num_buckets", "num_partitions"),
    only([(0.0005, 48, 24)], [(0.0005, 48, 24), (0.1, 24, 24), (1.0, 6, 6), (25.0, 2, 2)]),
)
def test_wire_plan_and_partitions_agree(
    cap_mb: float, num_buckets: int, num_partitions: int, each_split: str, ranks: Ranks
) -> None:
    results = ranks(2).run(count_buckets, cap_mb)
    for counted in results:
        assert counted["sent"] == counted["plan"]
        assert len(counted["plan"]) == num_buckets
        assert counted["partitions"] == (num_partitions if each_split == "forward" else 1)
        assert counted["digest"] == results[0]["digest"]


@on_ranks(2)
def test_all_reduces_start_before_the_last_backward_partition() -> None:
    """Names and start times in microseconds of what the backward did, in order."""
    model = ddp_compile(large_mlp(), bucket_cap_mb=2.0, split="forward", backend="aot_eager")
    for _ in range(2):
        loss_of(model(torch.randn(2, 512))).backward()
    loss = loss_of(model(torch.randn(2, 512)))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss.backward()
    wanted = ("CompiledFunctionBackward", "ddp_compile::", "gloo:all_reduce")
    events = [(e.name, e.time_range.start) for e in profiler.events() if e.name.startswith(wanted)]
    events = sorted(events, key=lambda event: event[1])
    backwards = [start for name, start in events if name == "CompiledFunctionBackward"]
    launches = [start for name, start in events if name.endswith("_launch")]
    on_the_wire = [start for name, start in events if name == "gloo:all_reduce"]
    assert len(backwards) == len(launches) == len(on_the_wire) >= 6
    early = [start for start in launches if start < backwards[-1]]
    assert len(early) == len(launches) - 1
    # Every launch but the last comes right after the partition that made its bucket ready.
    assert all(launch < following for launch, following in zip(launches, backwards[1:], strict=False))
    assert [name for name, _ in events if name.endswith("_launch")] == [
        f"ddp_compile::bucket_{i}_launch" for i in range(len(launches))
    ]


def cut_by_rank_0s_plan() -> tuple[int, int, str]:
    cap_mb = 1.0 if dist.get_rank() == 0 else 3.0
    model = ddp_compile(large_mlp(), bucket_cap_mb=cap_mb, backend="aot_eager")
    torch.manual_seed(dist.get_rank())
    x = torch.randn(2, 512)
    plain = copy.deepcopy(model)
    loss_of(plain(x)).backward()
    for parameter in plain.parameters():
        dist.all_reduce(parameter.grad)
    for _ in range(3):
        model.zero_grad()
        loss_of(model(x)).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad / dist.get_world_size())
    (report,) = model._ddp_compile_state.backend.reports
    return len(model.bucket_plan.buckets), report.num_partitions, model.bucket_plan.digest


def test_ranks_that_planned_differently_reduce_by_rank_0s_plan(each_split: str, ranks: Ranks) -> None:
    rank_0, rank_1 = ranks(2).run(cut_by_rank_0s_plan)
    assert rank_0 == (12, 12 if each_split == "forward" else 1, rank_0[2])
    assert rank_1[0] == 12 and rank_1[1] < 12 and rank_1[2] == rank_0[2]


@on_ranks(2)
def test_a_recompiled_graph_is_cut_at_the_sealed_boundaries() -> None:
    model = ddp_compile(large_mlp(), bucket_cap_mb=3.0, split="forward", backend="eager", dynamic=False)
    for rows in (2, 3):
        model.zero_grad()
        loss_of(model(torch.randn(rows, 512))).backward()
    partitions = [report.num_partitions for report in model._ddp_compile_state.backend.reports]
    num_buckets = len(model.bucket_plan.buckets)
    assert partitions == [num_buckets, num_buckets]
