"""The eager tail is packed anew, once, in the order in which its gradients came, as DistributedDataParallel does."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from in_ci import only
from models import loss_of, relative_difference
from rank_pool import RankPool, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ddp_compile

pytestmark = pytest.mark.usefixtures("each_split")

Ranks = Callable[[int], RankPool]
WIDTH = 23
#: Holds one layer's weight and bias.
ONE_LAYER_MIB = 2000 / 2**20


class Shuffled(nn.Module):
    """Four layers, used in another order than the one they are registered in, behind a compiled one.

    Args:
        order: In which order the layers are used; None for an order of its own on each rank.
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


def make(order: tuple[int, ...] | None = (2, 0, 3, 1), cap_mib: float = ONE_LAYER_MIB, **options: object) -> nn.Module:
    torch.manual_seed(11)
    return ddp_compile(Shuffled(order), bucket_cap_mb=cap_mib, backend="aot_eager", **options)


def make_eager_ddp(order: tuple[int, ...] | None, **options: object) -> nn.Module:
    torch.manual_seed(11)
    return DistributedDataParallel(Shuffled(order), **options)


def layers_of(model: nn.Module) -> list[str]:
    """For each bucket, the layer that all its gradients belong to."""
    layers = [
        {gradient.fqn.rpartition(".")[0] for gradient in bucket.gradients} for bucket in model.bucket_plan.buckets
    ]
    return ["+".join(sorted(names)) for names in layers]


def train(order: tuple[int, ...] | None, set_to_none: bool, options: dict[str, bool]) -> dict[str, object]:
    ours, theirs = make(order, **options), make_eager_ddp(order, **options)
    plans, differences = [], []
    for step in range(4):
        torch.manual_seed(100 * step + dist.get_rank())
        x = torch.randn(5, WIDTH)
        for model in (ours, theirs):
            model.zero_grad(set_to_none=set_to_none)
            loss_of(model(x)).backward()
        plans.append((model_plan := ours.bucket_plan).generation)
        pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
        differences += [relative_difference(a.grad, b.grad) for a, b in pairs if a.grad is not None]
    return {
        "generations": plans,
        "digest": model_plan.digest,
        "layers": layers_of(ours),
        "difference": max(differences),
    }


@pytest.mark.parametrize("set_to_none", only([True], [True, False]))
@pytest.mark.parametrize("as_view", [True, False])
def test_the_tail_follows_the_gradients_once(set_to_none: bool, as_view: bool, ranks: Ranks) -> None:
    results = ranks(2).run(train, (2, 0, 3, 1), set_to_none, {"gradient_as_bucket_view": as_view})
    for result in results:
        assert result["generations"] == [0, 1, 1, 1]
        # The backward meets the eager layers first, the one used last before all others.
        assert result["layers"] == ["eager.1", "eager.3", "eager.0", "eager.2", "compiled"]
        assert result["difference"] < 1e-6


@pytest.mark.parametrize("world_size", only([3], [2, 3]))
def test_ranks_whose_gradients_come_in_other_orders_follow_rank_0(world_size: int, ranks: Ranks) -> None:
    results = ranks(world_size).run(train, None, True, {})
    assert {result["digest"] for result in results} == {results[0]["digest"]}
    assert results[0]["layers"] == ["eager.3", "eager.2", "eager.1", "eager.0", "compiled"]
    assert max(result["difference"] for result in results) < 1e-6


def test_unused_parameters_keep_the_plan_unless_the_graph_is_static(ranks: Ranks) -> None:
    for result in ranks(2).run(train, (2, 0, 3, 1), True, {"find_unused_parameters": True}):
        assert result["generations"] == [0, 0, 0, 0]
        assert result["difference"] < 1e-6
    for result in ranks(2).run(train, (2, 0, 3), True, {"static_graph": True}):
        assert result["generations"] == [0, 1, 1, 1]
        assert result["layers"] == ["eager.3", "eager.0", "eager.2", "compiled", "eager.1"]
        assert result["difference"] < 1e-6


def _shares(tensor: Tensor, flat: Tensor) -> bool:
    return 0 <= tensor.data_ptr() - flat.data_ptr() < flat.nbytes


@on_ranks(2)
def test_gradients_move_to_the_new_buffers_and_free_the_old_ones() -> None:
    model = make(cap_mib=2 * ONE_LAYER_MIB)  # other layers share a bucket then
    x = torch.randn(5, WIDTH)
    loss_of(model(x)).backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    old_tail = [
        weakref.ref(bucket.flat.untyped_storage())
        for bucket in model._ddp_compile_state.reducer.buckets
        if bucket.spec.frame is None
    ]
    output = model(x)
    assert [len(bucket.gradients) for bucket in model.bucket_plan.buckets] == [4, 4, 2]
    kept = all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), before, strict=True))
    deadline = time.monotonic() + 20  # gloo's thread lets go of a tensor some time after `wait` has returned
    while (alive := any(storage() is not None for storage in old_tail)) and time.monotonic() < deadline:
        time.sleep(0.01)
    flats = [bucket.flat for bucket in model._ddp_compile_state.reducer.buckets]
    inside = all(any(_shares(p.grad, flat) for flat in flats) for p in model.parameters())
    loss_of(output).backward()
    accumulated = [relative_difference(p.grad, 2 * old) for p, old in zip(model.parameters(), before, strict=True)]
    result = {"kept": kept, "alive": alive, "inside": inside, "difference": max(accumulated)}
    assert result["kept"]
    assert result["inside"]
    assert not result["alive"]
    assert result["difference"] < 1e-6
