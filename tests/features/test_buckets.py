"""The plan of buckets: what is sent, how graphs are cut, and how the eager tail is packed again."""

from __future__ import annotations

import time
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from beside import beside_plain, pair, train_beside
from in_ci import only
from models import Mlp, largest, loss_of, relative_difference
from rank_pool import on_ranks
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from ddp_compile import ddp_compile
from ddp_compile.torch_internals import queue_backward_callback


def large_mlp() -> nn.Module:
    """Twelve layers of 1 MiB and a little."""
    return Mlp(width=512, num_layers=12)


def deep_mlp() -> nn.Module:
    """Twenty-four layers of 0.25 MiB and a little, six MiB in all."""
    return Mlp(width=256, num_layers=24)


# A capacity below the bias's 1 KiB parts bias and weight; one node makes both ready, so they share a partition. With
# the largest capacity the first bucket keeps its own of 1 MiB.
@pytest.mark.parametrize(
    ("cap_mb", "num_buckets", "num_partitions"),
    only([(0.0005, 48, 24)], [(0.0005, 48, 24), (0.1, 24, 24), (1.0, 6, 6), (25.0, 2, 2)]),
)
@on_ranks(2)
def test_wire_plan_and_partitions_agree(cap_mb: float, num_buckets: int, num_partitions: int, each_split: str) -> None:
    model = ddp_compile(deep_mlp(), bucket_cap_mb=cap_mb, backend="aot_eager")
    loss_of(model(torch.randn(2, 256))).backward()
    model.zero_grad()
    sent: list[int] = []
    all_reduce = dist.ProcessGroup.allreduce

    def counting(group: dist.ProcessGroup, tensors: list[torch.Tensor], *args: Any) -> Any:
        sent.extend(t.numel() * t.element_size() for t in tensors if t.is_floating_point())  # not the ranks' messages
        return all_reduce(group, tensors, *args)

    with mock.patch.object(dist.ProcessGroup, "allreduce", counting):
        loss_of(model(torch.randn(2, 256))).backward()
    (report,) = model._ddp_compile_state.backend.reports
    assert sent == [bucket.num_bytes for bucket in model.bucket_plan.buckets]
    assert len(sent) == num_buckets
    assert report.num_partitions == (num_partitions if each_split == "forward" else 1)
    assert digests(model) == [model.bucket_plan.digest] * 2


def digests(model: Any) -> list[str]:
    """Of the plans of all ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, model.bucket_plan.digest)
    return everyone


@on_ranks(2)
def test_all_reduces_start_before_the_last_backward_partition() -> None:
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


@on_ranks(2)
def test_ranks_that_planned_differently_reduce_by_rank_0s_plan(each_split: str) -> None:
    model, plain = beside_plain(large_mlp, bucket_cap_mb=1.0 if dist.get_rank() == 0 else 3.0)
    assert train_beside((model, plain), width=512, rows=2) == [0.0] * 3
    (report,) = model._ddp_compile_state.backend.reports
    assert len(model.bucket_plan.buckets) == 12 and len(set(digests(model))) == 1
    if dist.get_rank() == 0:
        assert report.num_partitions == (12 if each_split == "forward" else 1)
    else:
        assert report.num_partitions < 12


@on_ranks(2)
def test_a_recompiled_graph_is_cut_at_the_sealed_boundaries() -> None:
    model = ddp_compile(large_mlp(), bucket_cap_mb=3.0, split="forward", backend="eager", dynamic=False)
    for rows in (2, 3):
        model.zero_grad()
        loss_of(model(torch.randn(rows, 512))).backward()
    partitions = [report.num_partitions for report in model._ddp_compile_state.backend.reports]
    num_buckets = len(model.bucket_plan.buckets)
    assert partitions == [num_buckets, num_buckets]


# The eager tail is packed again, once, in the order in which its gradients came, as DistributedDataParallel does.

WIDTH = 23
#: Holds one layer's weight and bias.
ONE_LAYER_MIB = 2000 / 2**20


class Shuffled(nn.Module):
    """Four layers, used after a compiled one, in another order than that of registration.

    Args:
        order: The order in which the layers are used; None for a different order on each rank.
    """

    def __init__(self, order: tuple[int, ...] | None = (2, 0, 3, 1)) -> None:
        super().__init__()
        self.eager = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.compiled = nn.Linear(WIDTH, WIDTH)
        self.order = order or ((0, 1, 2, 3) if dist.get_rank() == 0 else (3, 1, 2, 0))

    def forward(self, x: Tensor) -> Tensor:
        return self.in_order(torch.tanh(self.compiled(x)))

    @torch.compiler.disable
    def in_order(self, x: Tensor) -> Tensor:
        for i in self.order:
            x = torch.tanh(self.eager[i](x))
        return x


def make(order: tuple[int, ...] | None = (2, 0, 3, 1), cap_mib: float = ONE_LAYER_MIB, **both: Any) -> tuple[Any, Any]:
    return pair(lambda: Shuffled(order), both, bucket_cap_mb=cap_mib)


def layers_of(model: nn.Module) -> list[str]:
    """For each bucket, the layer that all its gradients belong to."""
    layers = [
        {gradient.fqn.rpartition(".")[0] for gradient in bucket.gradients} for bucket in model.bucket_plan.buckets
    ]
    return ["+".join(sorted(names)) for names in layers]


def train(order: tuple[int, ...] | None, set_to_none: bool = True, **both: bool) -> tuple[list[int], list[str]]:
    """The plan's generation after each step, and the layers of its buckets in the end; both are those of all ranks."""
    models = make(order, **both)
    generations = []

    def step_of(model: Any, x: Tensor, step: int) -> None:
        loss_of(model(x)).backward()
        if model is models[0]:
            generations.append(model.bucket_plan.generation)

    assert largest(train_beside(models, step_of, 4, width=WIDTH, rows=5, set_to_none=set_to_none)) < 1e-6
    assert len(set(digests(models[0]))) == 1
    return generations, layers_of(models[0])


@pytest.mark.parametrize("set_to_none", only([True], [True, False]))
@pytest.mark.parametrize("as_view", [True, False])
@on_ranks(2)
def test_the_tail_follows_the_gradients_once(set_to_none: bool, as_view: bool, each_split: str) -> None:
    generations, layers = train((2, 0, 3, 1), set_to_none, gradient_as_bucket_view=as_view)
    assert generations == [1, 1, 1, 1]
    # The backward reaches the eager layers first, beginning with the one used last.
    assert layers == ["eager.1", "eager.3", "eager.0", "eager.2", "compiled"]


@on_ranks(2)
def test_so_it_does_if_the_first_backward_comes_without_a_call() -> None:
    model, _ = make()
    loss_of(model.forward(torch.randn(5, WIDTH))).backward()
    assert model.bucket_plan.generation == 1
    assert layers_of(model) == ["eager.1", "eager.3", "eager.0", "eager.2", "compiled"]


@pytest.mark.parametrize("world_size", only([3], [2, 3]))
@on_ranks()
def test_ranks_whose_gradients_come_in_other_orders_follow_rank_0(world_size: int, each_split: str) -> None:
    assert train(None)[1] == ["eager.3", "eager.2", "eager.1", "eager.0", "compiled"]


@on_ranks(2)
def test_unused_parameters_keep_the_plan_unless_the_graph_is_static(each_split: str) -> None:
    assert train((2, 0, 3, 1), find_unused_parameters=True)[0] == [0, 0, 0, 0]
    generations, layers = train((2, 0, 3), static_graph=True)
    assert generations == [1, 1, 1, 1]
    assert layers == ["eager.3", "eager.0", "eager.2", "compiled", "eager.1"]


def _shares(tensor: Tensor, flat: Tensor) -> bool:
    return 0 <= tensor.data_ptr() - flat.data_ptr() < flat.nbytes


@on_ranks(2)
def test_gradients_move_to_the_new_buffers_and_free_the_old_ones(each_split: str) -> None:
    model, _ = make(cap_mib=2 * ONE_LAYER_MIB)  # other layers share a bucket then
    reducer = model._ddp_compile_state.reducer
    x = torch.randn(5, WIDTH)
    loss = loss_of(model(x))
    old_tail: list[weakref.ref[Any]] = []

    def note() -> None:
        tail = (bucket for bucket in reducer.buckets if bucket.spec.frame is None)
        old_tail.extend(weakref.ref(bucket.flat.untyped_storage()) for bucket in tail)

    loss.register_hook(lambda _: queue_backward_callback(note))  # before the reducer's
    loss.backward()
    plain = Shuffled()
    plain.load_state_dict(model.state_dict())
    loss_of(plain(x)).backward()
    before = [parameter.grad for parameter in plain.parameters()]
    for gradient in before:
        dist.all_reduce(gradient.div_(2))
    assert old_tail
    assert [len(bucket.gradients) for bucket in model.bucket_plan.buckets] == [4, 4, 2]
    assert all(relative_difference(p.grad, old) < 1e-6 for p, old in zip(model.parameters(), before, strict=True))
    deadline = time.monotonic() + 20  # gloo's thread releases a tensor some time after `wait` has returned
    while (alive := any(storage() is not None for storage in old_tail)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive
    assert all(any(_shares(p.grad, bucket.flat) for bucket in reducer.buckets) for p in model.parameters())
    loss_of(model(x)).backward()
    assert all(relative_difference(p.grad, 2 * old) < 1e-6 for p, old in zip(model.parameters(), before, strict=True))


@on_ranks(2)
def test_lazy_buckets_that_are_packed_anew_are_allocated_in_the_backward() -> None:
    model = ddp_compile(Shuffled(), bucket_cap_mb=ONE_LAYER_MIB, backend="aot_eager", lazy_bucket_allocation=True)
    for _ in range(3):
        model.zero_grad()
        loss = loss_of(model(torch.randn(2, WIDTH)))
        assert all(bucket._buffer._tensor is None for bucket in model._ddp_compile_state.reducer.buckets)
        loss.backward()
    assert model.bucket_plan.generation == 1
