"""The plan of buckets: what is sent, how graphs are cut, and how the eager tail is packed again."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from beside import difference, gathered, one_backward, own_batch, pair, train_beside
from in_ci import only
from models import Mlp, assert_in_their_buckets, largest, loss_of
from rank_pool import on_ranks
from torch import Tensor, nn

from ddp_compile import ddp_compile


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
def test_plan_is_what_is_sent(cap_mb: float, num_buckets: int, num_partitions: int, each_split: str) -> None:
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
    (graph,) = model.explain().graphs
    assert sent == [bucket.num_bytes for bucket in model.bucket_plan.buckets]
    assert len(sent) == num_buckets
    assert len(graph.partitions) == (num_partitions if each_split == "forward" else 1)
    assert gathered(model.bucket_plan.digest) == [model.bucket_plan.digest] * 2


@on_ranks(2)
def test_recompiled_graph() -> None:
    model = ddp_compile(deep_mlp(), bucket_cap_mb=1.0, split="forward", backend="eager", dynamic=False)
    for rows in (2, 3):
        model.zero_grad()
        loss_of(model(torch.randn(rows, 256))).backward()
    partitions = [len(graph.partitions) for graph in model.explain().graphs]
    num_buckets = len(model.bucket_plan.buckets)
    assert partitions == [num_buckets, num_buckets]


# The eager tail is packed again, once, in the order in which its gradients came, as DistributedDataParallel does.

WIDTH = 23
#: Holds one layer's weight and bias.
ONE_LAYER_MIB = 2000 / 2**20


class Shuffled(nn.Module):
    """Four layers, used after a compiled one in this ``order``, or in a different one on each rank."""

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
    layers = [{g.fqn.rpartition(".")[0] for g in bucket.gradients} for bucket in model.bucket_plan.buckets]
    return ["+".join(sorted(names)) for names in layers]


TAIL = ["eager.1", "eager.3", "eager.0", "eager.2", "compiled"]


# The backward reaches the eager layers first, beginning with the one used last.
@pytest.mark.parametrize(
    ("order", "both", "generation", "layers"),
    [
        ((2, 0, 3, 1), {"gradient_as_bucket_view": True}, 1, TAIL),
        ((2, 0, 3, 1), {"gradient_as_bucket_view": False}, 1, TAIL),
        (None, {}, 1, ["eager.3", "eager.2", "eager.1", "eager.0", "compiled"]),  # the order of rank 0
        ((2, 0, 3), {"static_graph": True}, 1, ["eager.3", "eager.0", "eager.2", "compiled", "eager.1"]),
        ((2, 0, 3, 1), {"find_unused_parameters": True}, 0, None),
    ],
)
@on_ranks(2)
def test_eager_tail_is_rebuilt(
    order: Any, both: dict[str, bool], generation: int, layers: Any, each_split: str
) -> None:
    models = make(order, **both)
    generations = []

    def step_of(model: Any, x: Tensor, step: int) -> None:
        loss_of(model(x)).backward()
        if model is models[0]:
            generations.append(model.bucket_plan.generation)

    assert largest(train_beside(models, step_of, 4, width=WIDTH, rows=5)) < 1e-6
    assert len(set(gathered(models[0].bucket_plan.digest))) == 1
    assert generations == [generation] * 4
    assert layers is None or layers_of(models[0]) == layers


@on_ranks(2)
def test_gradients_move_to_rebuilt_buckets(each_split: str) -> None:
    models = make(cap_mib=2 * ONE_LAYER_MIB, gradient_as_bucket_view=True)  # other layers share a bucket then
    for _ in range(2):
        for model in models:
            one_backward(model, own_batch(0, WIDTH))
        assert difference(*models) < 1e-6
        assert [len(bucket.gradients) for bucket in models[0].bucket_plan.buckets] == [4, 4, 2]
        assert_in_their_buckets(models[0])
