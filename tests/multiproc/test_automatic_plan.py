"""``bucket_cap_mb="auto"``: gradients stay right while the plan changes, and every rank changes it at once."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from in_ci import only
from models import Mlp, assert_buckets_launched_early, loss_of, relative_difference
from rank_pool import on_ranks
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ddp_compile, shard_optimizer
from ddp_compile.algorithms import ByteGrad
from ddp_compile.errors import ReplicationError
from ddp_compile.features import automatic_plan
from ddp_compile.features.automatic_plan import AutomaticPlan
from ddp_compile.module.mixin import state_of
from ddp_compile.plan.costs import Collective, Costs
from ddp_compile.plan.spec import BucketPlan
from ddp_compile.runtime.comm import link_sweep
from ddp_compile.runtime.comm.link_sweep import measure_link

WIDTH = 33


def make_model(**settings: Any) -> Any:
    torch.manual_seed(1)
    return ddp_compile(Mlp(WIDTH, 6), bucket_cap_mb="auto", **{"backend": "aot_eager", **settings})


class Links:
    """Costs of a link in place of measured ones, another one for each decision."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *links: Collective | ValueError) -> None:
        self._links = list(links)
        monkeypatch.setattr(AutomaticPlan, "_costs", lambda plan, report: self._costs(plan))

    def _costs(self, plan: AutomaticPlan) -> Costs:
        link = self._links.pop(0)
        if isinstance(link, ValueError):
            raise link
        num = len(plan._replica.builder.gradients)
        costs = Costs(reduce=link, ready_s=[(num - i) * 1e-3 for i in range(num)])
        if plan._replica.reducer.gathers_parameters:
            costs = replace(costs, gather=link, needed_s=[i * 1e-3 for i in range(num)])
        return costs


#: As slow as the computation, so that boundaries between gradients pay.
SLOW = Collective(latency_s=1e-6, s_per_byte=2e-3 / (4 * WIDTH * WIDTH))
#: A latency so high that one bucket is best.
FAR = Collective(latency_s=1.0, s_per_byte=1e-12)


def num_buckets(model: Any) -> int:
    return len(model.bucket_plan.buckets)


def train(model: Any, *others: Any, steps: int, micro_steps: int = 1) -> float:
    """The largest difference of a gradient from those of the others, whose parameters are the same."""
    models = [model, *others]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.02, momentum=0.9) for each in models]
    worst = 0.0
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro_step in range(micro_steps):
            torch.manual_seed(100 * step + 10 * micro_step + dist.get_rank())
            batch = torch.randn(4, WIDTH)
            for each in models:
                each.require_backward_grad_sync = micro_step == micro_steps - 1
                loss_of(each(batch)).backward()
        for ours, *theirs in zip(*(each.parameters() for each in models), strict=True):
            worst = max([worst, *(relative_difference(ours.grad, other.grad) for other in theirs)])
        for optimizer in optimizers:
            optimizer.step()
    return worst


EVERYWHERE = [
    (world_size, split, backend, micro_steps, static_graph)
    for world_size in (2, 3)
    for split in ("forward", "backward", "none")
    for backend in ("aot_eager", "inductor")
    for micro_steps in (1, 2)
    for static_graph in (False, True)
]
IN_CI = [(2, "forward", "aot_eager", 2, False), (3, "backward", "aot_eager", 1, True)]


@pytest.mark.parametrize(("world_size", "split", "backend", "micro_steps", "static_graph"), only(IN_CI, EVERYWHERE))
@on_ranks()
def test_gradients_are_those_of_ddp_while_the_plan_changes(
    world_size: int, split: str, backend: str, micro_steps: int, static_graph: bool
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(automatic_plan, "AGAIN_AFTER", 4)
        monkeypatch.setattr(automatic_plan, "MOST_LOSS", math.inf)
        Links(monkeypatch, SLOW, SLOW, FAR)
        model = make_model(split=split, backend=backend, static_graph=static_graph)
        ddp = DistributedDataParallel(make_plain(model))
        assert train(model, ddp, steps=13, micro_steps=micro_steps) < 1e-5
        assert num_buckets(model) == 1  # the default
        assert train(model, ddp, steps=5, micro_steps=micro_steps) < 1e-5
        assert num_buckets(model) > 4
        if split != "none" and micro_steps == 1:
            assert_buckets_launched_early(model)
        # Measured: the new plan, the same link again, another link.
        assert train(model, ddp, steps=42, micro_steps=micro_steps) < 1e-5
        assert num_buckets(model) == 1
        assert model.bucket_plan.generation >= 2


def make_plain(model: Any) -> torch.nn.Module:
    plain = Mlp(WIDTH, 6)
    plain.load_state_dict(model.state_dict())
    return plain


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"gradient_as_bucket_view": False, "find_unused_parameters": True}, marks=pytest.mark.long),
        pytest.param({"lazy_bucket_allocation": True}, marks=pytest.mark.long),
        pytest.param({"regions": [torch.nn.Linear]}, marks=pytest.mark.long),
    ],
)
@on_ranks(2)
def test_other_settings_stay_right(settings: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        Links(monkeypatch, SLOW)
        model = make_model(**settings)
        before = num_buckets(model)
        assert train(model, DistributedDataParallel(make_plain(model)), steps=24) < 1e-5
        assert num_buckets(model) > before


SHARDED = [(2, "forward", "inductor"), (2, "backward", "aot_eager"), (3, "backward", "inductor"), (3, "none", "eager")]


@pytest.mark.parametrize(("world_size", "split", "backend"), only(SHARDED[1:2], SHARDED))
@on_ranks()
def test_a_sharded_optimizer_follows_the_plan(world_size: int, split: str, backend: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(automatic_plan, "AGAIN_AFTER", 4)
        monkeypatch.setattr(automatic_plan, "MOST_LOSS", math.inf)
        Links(monkeypatch, SLOW, SLOW, FAR)
        sharded = make_model(split=split, backend=backend)
        models = sharded, DistributedDataParallel(make_plain(sharded))
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in models]
        shard_optimizer(optimizers[0], sharded)
        numbers = set()
        for step in range(78):
            torch.manual_seed(100 * step + dist.get_rank())
            batch = torch.randn(4, WIDTH)
            for model, optimizer in zip(models, optimizers, strict=True):
                loss = loss_of(model(batch))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            ours, theirs = (torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models)
            assert relative_difference(ours, theirs) < (1e-6 if world_size == 2 else 1e-4)
            numbers.add(num_buckets(sharded))
        assert num_buckets(sharded) == 1 and sharded.bucket_plan.generation >= 2
        assert max(numbers) > 4
        ours, theirs = (optimizer.state_dict()["state"] for optimizer in optimizers)
        for index, state in theirs.items():
            for name, value in state.items():
                assert torch.allclose(ours[index][name], value, rtol=1e-3, atol=1e-6), (index, name)


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_after_shard_optimizer_its_two_transfers_are_measured_anew() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        found: list[tuple[float, Costs]] = []

        def choose(_: AutomaticPlan, present: BucketPlan, step_s: float, costs: Costs) -> BucketPlan:
            found.append((step_s, costs))
            return present

        monkeypatch.setattr(AutomaticPlan, "_choose", choose)
        monkeypatch.setattr(automatic_plan, "measure_link", lambda *_: SLOW)
        model = make_model()
        train(model, steps=8)  # four steps are measured
        model.zero_grad()
        optimizer = shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        began = time.perf_counter()
        for step in range(20):
            assert not found or step > 14
            loss_of(model(torch.randn(4, WIDTH))).backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 1:
            assert not found
            return
        ((step_s, costs),) = found
        half = Collective(latency_s=SLOW.latency_s / 2, s_per_byte=SLOW.s_per_byte / 2)
        assert costs.reduce == costs.gather == half  # gloo does not say when messages are done
        assert 0 < step_s < time.perf_counter() - began


@on_ranks(2)
def test_a_plan_that_turns_out_slower_goes_and_the_log_says_what_came() -> None:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    automatic_plan.log.addHandler(handler)
    automatic_plan.log.setLevel(logging.INFO)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(automatic_plan, "MOST_LOSS", -math.inf)  # whatever comes is too slow
        Links(monkeypatch, SLOW)
        model = make_model()
        train(model, steps=15)
        assert num_buckets(model) > 4
        train(model, steps=12)
        assert num_buckets(model) == 1
        train(model, steps=20)  # nothing more is measured
    automatic_plan.log.setLevel(logging.NOTSET)
    automatic_plan.log.removeHandler(handler)
    decisions = [text for text in records if "plan" in text]
    if dist.get_rank() == 0:
        assert len(decisions) == 2, records
        assert "a forward with its backward took" in decisions[0] and "ms are expected" in decisions[0]
        assert "ms were expected" in decisions[1] and decisions[1].endswith("so that one comes back")
    else:
        assert not decisions


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_what_determines_no_plan_changes_none() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(automatic_plan, "AGAIN_AFTER", 2)
        for given in (ValueError("in the profile 8 bytes take 1 ms and 80 bytes take 0 ms, which is no rate"), FAR):
            Links(monkeypatch, given, given)
            model = make_model()
            train(model, steps=30)
            assert (num_buckets(model), model.bucket_plan.generation) == (1, 1)


@pytest.mark.parametrize("sharded", only([False], [False, True]))
@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_what_one_rank_does_alone_disturbs_nothing(sharded: bool) -> None:
    """Between any two steps one rank calls the model, with gradients, and then both use the same group."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(automatic_plan, "AGAIN_AFTER", 1)
        monkeypatch.setattr(automatic_plan, "MOST_LOSS", math.inf)
        Links(monkeypatch, *[SLOW, FAR] * 4)
        model = make_model()
        plain = make_plain(model)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
        plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
        if sharded:
            optimizer = shard_optimizer(optimizer, model)
        generations = set()
        for step in range(60):
            if step % 2 == dist.get_rank():
                with model.no_sync():
                    model(torch.randn(4, WIDTH))
            elif not sharded:  # whose forward waits for the other rank's step
                model.eval()
                model(torch.randn(4, WIDTH))
                model.train()
            metric = torch.tensor([1.0], dtype=torch.float64)
            dist.all_reduce(metric)
            assert metric.item() == 2
            torch.manual_seed(2 * step + dist.get_rank())
            batch = torch.randn(4, WIDTH)
            for each in (model, plain):
                each.zero_grad()
                loss_of(each(batch)).backward()
            for parameter in plain.parameters():
                dist.all_reduce(parameter.grad.div_(2))
            optimizer.step()
            plain_optimizer.step()
            generations.add(model.bucket_plan.generation)
        assert len(generations) > 2
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert relative_difference(ours.detach(), theirs.detach()) < 1e-5


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_two_models_are_called_in_another_order_on_each_rank() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        Links(monkeypatch, SLOW, SLOW)
        models = [make_model(), make_model()]
        plain = [make_plain(model) for model in models]
        for step in range(24):
            torch.manual_seed(2 * step + dist.get_rank())
            batch = torch.randn(4, WIDTH)
            outputs = {i: models[i](batch) for i in ([0, 1] if dist.get_rank() == 0 else [1, 0])}
            for i in (0, 1):
                loss_of(outputs[i]).backward()
            for ours, theirs in zip(models, plain, strict=True):
                loss_of(theirs(batch)).backward()
                for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
                    dist.all_reduce(q.grad)
                    assert relative_difference(p.grad, q.grad / 2) < 1e-5
                    p.grad = q.grad = None
        assert [num_buckets(model) > 4 for model in models] == [True, True]


class WithBreak(torch.nn.Module):
    """Two parts with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mlp(WIDTH, 4), Mlp(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


@pytest.mark.parametrize("split", only(["backward"], ["forward", "backward"]))
@on_ranks(2)
def test_graphs_after_a_break_follow_the_plan_too(split: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        Links(monkeypatch, SLOW)
        torch.manual_seed(1)
        model: Any = ddp_compile(WithBreak(), bucket_cap_mb="auto", backend="aot_eager", split=split)
        plain = WithBreak()
        plain.load_state_dict(model.state_dict())
        ddp = DistributedDataParallel(plain)
        assert train(model, ddp, steps=14) < 1e-5
        assert num_buckets(model) > 4 and len(model.explain().graphs) > 1  # the old ones, until the next forward
        assert train(model, ddp, steps=5) < 1e-5
        graphs = model.explain().graphs
        assert len(graphs) > 1  # and each has its part of the plan
        assert sum(graph.num_buckets for graph in graphs) == num_buckets(model) > 4


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_no_bucket_of_several_gradients_is_larger_than_the_limit() -> None:
    for limit_mb in (None, 0.01):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(automatic_plan, "LEAST_GAIN", -1.0)  # any plan
            monkeypatch.setattr(automatic_plan, "MOST_LOSS", math.inf)
            Links(monkeypatch, FAR)
            model = make_model(max_bucket_cap_mb=limit_mb)
            train(model, steps=4)
            assert limit_mb is None or keeps(model.bucket_plan, limit_mb)  # the capacities, too
            train(model, steps=16)
            assert model.bucket_plan.generation >= 2
            if limit_mb is None:
                assert num_buckets(model) == 1
            else:
                assert num_buckets(model) > 1
                assert keeps(model.bucket_plan, limit_mb)


def keeps(plan: BucketPlan, limit_mb: float) -> bool:
    sizes = [bucket.num_bytes for bucket in plan.buckets if len(bucket.gradients) > 1]
    return bool(sizes) and max(sizes) <= limit_mb * 2**20


@on_ranks(3)
@torch.compiler.set_stance("force_eager")
def test_a_slow_rank_makes_no_times_longer() -> None:
    slow_s = 0.15
    with pytest.MonkeyPatch.context() as monkeypatch:
        found: list[Costs] = []

        def choose(_: AutomaticPlan, present: BucketPlan, step_s: float, costs: Costs) -> BucketPlan:
            found.append(costs)
            return present

        monkeypatch.setattr(AutomaticPlan, "_choose", choose)
        torch.manual_seed(1)
        # Buckets of such different sizes that their transfers determine a line.
        plain = torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.Linear(8, 100_000), torch.nn.Linear(100_000, 2))
        model: Any = ddp_compile(plain, bucket_cap_mb="auto", max_bucket_cap_mb=0.01)
        if dist.get_rank() == 2:
            model.register_forward_pre_hook(lambda *_: time.sleep(slow_s))
            for parameter in list(model.parameters())[2:3]:
                parameter.register_hook(lambda _: time.sleep(slow_s))
        monkeypatch.setattr(automatic_plan, "measure_link", lambda *_: pytest.fail("the steps determine no link"))
        train(model, steps=16)
    if dist.get_rank() == 0:
        (costs,) = found
        # A mean over the ranks would be a third of what the slow one takes.
        assert 0 < max(costs.ready_s) < slow_s / 4 and costs.forward_s < slow_s / 4
        assert costs.reduce.time_s(4 * WIDTH * WIDTH) < slow_s / 4


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_a_measurement_of_the_user_goes_first() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        Links(monkeypatch, SLOW)
        model = make_model()
        train(model, steps=8)  # four steps are measured
        measurement = model.measure(steps=3)
        train(model, steps=3)
        assert len(measurement.report().steps) == 3
        train(model, steps=10)
        assert num_buckets(model) == 1
        train(model, steps=1)
        assert num_buckets(model) > 4


@on_ranks(2)
def test_what_excludes_it_is_refused_by_name() -> None:
    with pytest.raises(ReplicationError, match=r"bucket_cap_mb='auto' cannot be used with the ByteGrad"):
        make_model(algorithm=ByteGrad())
    with pytest.raises(ValueError, match=r"bucket_cap_mb='auto' and bucket_plan='plan.json' each say what a bucket"):
        make_model(bucket_plan="plan.json")


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_one_bucket_determines_no_line_so_the_link_is_measured_apart() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        sweeps = set_times(monkeypatch, {1: 1e-3, 100: 2e-3})
        asked: list[float] = []

        def measure(group: dist.ProcessGroup, device: torch.device, again_after_s: float) -> Collective:
            asked.append(again_after_s)
            return measure_link(group, device, again_after_s)

        monkeypatch.setattr(automatic_plan, "measure_link", measure)
        model = make_model()
        train(model, steps=16)
    assert len(sweeps) == len(asked) == 1 and asked[0] > 100


@on_ranks(2)
def test_a_link_is_measured_again_when_one_rank_says_that_it_is_time() -> None:
    group, cpu = dist.new_group(), torch.device("cpu")
    with pytest.MonkeyPatch.context() as monkeypatch:
        sweeps = set_times(monkeypatch, {1: 1e-3, 100: 2e-3})
        first = measure_link(group, cpu)
        assert measure_link(group, cpu, again_after_s=1000.0) is first
        now, later_s = time.monotonic, 2000.0 * dist.get_rank()
        monkeypatch.setattr(time, "monotonic", lambda: now() + later_s)
        again = measure_link(group, cpu, again_after_s=1000.0)
        assert again is not first and measure_link(group, cpu) is again
    assert len(sweeps) == 2


@on_ranks(2)
def test_a_link_without_a_rate_is_not_measured_again_at_once() -> None:
    group, cpu = dist.new_group(), torch.device("cpu")
    with pytest.MonkeyPatch.context() as monkeypatch:
        sweeps = set_times(monkeypatch, {1: 2e-3, 100: 1e-3})
        for again_after_s in (math.inf, 1000.0, 0.0):
            with pytest.raises(ValueError, match=r"100 bytes take 1\.000 ms, which is no rate"):
                measure_link(group, cpu, again_after_s)
    assert len(sweeps) == 2


def set_times(monkeypatch: pytest.MonkeyPatch, times_s: dict[int, float]) -> list[None]:
    """Every sweep finds these seconds by bytes. Returns a list with an entry for each sweep."""
    sweeps: list[None] = []
    monkeypatch.setattr(link_sweep, "_sweep", lambda *_: (sweeps.append(None), times_s)[1])
    return sweeps


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_the_link_is_measured_after_the_gathers_of_a_sharded_optimizer() -> None:
    model = make_model()
    optimizer = shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    algorithm = state_of(model).reducer.algorithm
    events: list[str] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        wait = type(algorithm.sharding).await_parameters
        monkeypatch.setattr(
            type(algorithm.sharding), "await_parameters", lambda *args: (events.append("awaited"), wait(*args))[1]
        )
        monkeypatch.setattr(automatic_plan, "measure_link", lambda *_: (events.append("measured"), SLOW)[1])
        for _ in range(18):
            loss = loss_of(model(torch.randn(4, WIDTH)))
            events.append("backward")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    at = events.index("measured")
    assert events[at - 2 : at] == ["backward", "awaited"]
