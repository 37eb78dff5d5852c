"""Gradients of half precision that are reduced in float32, and rounded once."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import of_all_ranks, own_batch, seeded
from in_ci import only
from models import Mlp, loss_of
from rank_pool import on_ranks
from torch import Tensor, nn

from ddp_compile import ParametersChangedError, ddp_compile
from ddp_compile.algorithms import ByteGrad, GradientAllReduce
from ddp_compile.sharded_optimizer import shard_optimizer

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
WIDTH = 17

WAYS: dict[str, dict[str, Any]] = {
    "forward split": {"split": "forward"},
    "backward split": {"split": "backward"},
    "no split, copied": {"split": "none", "gradient_as_bucket_view": False},
    "static graph": {"static_graph": True, "split": "backward"},
    "regions": {"regions": [nn.Linear]},
    "unused": {"find_unused_parameters": True, "lazy_bucket_allocation": True},
    "reproducible": {"algorithm": GradientAllReduce(reproducible=True)},
    "inductor": {"backend": "inductor", "split": "backward"},
}


class Mixed(nn.Module):
    """Layers of half precision, a norm in float32, and one parameter that is used on even ranks only."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.body = Mlp(WIDTH, 4).to(dtype)
        self.norm = nn.LayerNorm(WIDTH)
        self.on_even_ranks = nn.Parameter(torch.ones(WIDTH, dtype=dtype))
        self.uses_all = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x).float()
        if self.uses_all or dist.get_rank() % 2 == 0:
            y = y * self.on_even_ranks
        return self.norm(y)


def own_gradients(model: Any, batch: Tensor) -> list[Tensor]:
    """This rank's, whose bits depend on what was compiled."""
    model.zero_grad()
    with model.no_sync():
        loss_of(model(batch)).backward()
    found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def mean_in_float32(own: Tensor) -> Tensor:
    """Of the ranks' gradients, in the order of ranks: a sum of two is the same in any order."""
    scaled = of_all_ranks(own).float() * (1.0 / dist.get_world_size())
    total = scaled[0]
    for each in scaled[1:]:
        total = total + each
    return total


@pytest.mark.parametrize("dtype", only([BFLOAT16], [BFLOAT16, FLOAT16]), ids=str)
@pytest.mark.parametrize("way", only(["forward split", "backward split", "unused"], WAYS))
@on_ranks(2)
def test_means_are_rounded_once(way: str, dtype: torch.dtype) -> None:
    settings = {"backend": "aot_eager", "bucket_cap_mb": 0.002, **WAYS[way]}
    model: Any = seeded(lambda: Mixed(dtype))
    model.uses_all = way != "unused"
    model = ddp_compile(model, reduce_dtype=FLOAT32, **settings)
    for step in range(4):
        batch = own_batch(step, WIDTH, 6).to(dtype)
        loss_of(model(batch)).backward()
        found = [p.grad.clone() for p in model.parameters()]
        for p, gradient, own in zip(model.parameters(), found, own_gradients(model, batch), strict=True):
            assert gradient.dtype == p.dtype
            assert torch.equal(gradient, mean_in_float32(own).to(p.dtype))
    dtypes = {(bucket.dtype, bucket.param_dtype) for bucket in model.bucket_plan.buckets}
    assert dtypes == {("float32", str(dtype).removeprefix("torch.")), ("float32", None)}


@pytest.mark.parametrize("world_size", only([3], [3, 8]))
@on_ranks()
def test_error_beside_half_precision(world_size: int) -> None:
    errors = []
    for reduce_dtype in (FLOAT32, None):
        model: Any = ddp_compile(seeded(lambda: Mlp(65, 2).bfloat16()), reduce_dtype=reduce_dtype, backend="eager")
        batch = own_batch(0, 65, 6).bfloat16()
        loss_of(model(batch)).backward()
        reduced = torch.cat([p.grad.flatten().double() for p in model.parameters()])
        own = torch.cat([each.flatten().double() for each in own_gradients(model, batch)])
        mean = of_all_ranks(own).mean(0)
        errors.append(((reduced - mean).norm() / (mean.bfloat16().double() - mean).norm()).item())
    assert errors[0] < 1.001  # that of one rounding
    assert errors[1] > 1.2


@on_ranks(2)
def test_comm_hooks_and_byte_grad_get_float32() -> None:
    seen = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        seen.append((bucket.buffer().dtype, bucket.gradients()[0].dtype, bucket.parameters()[0].dtype))
        work: Any = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    for algorithm in (GradientAllReduce(), ByteGrad()):
        model: Any = seeded(lambda: Mlp(WIDTH, 2).bfloat16())
        model = ddp_compile(model, reduce_dtype=FLOAT32, algorithm=algorithm, backend="eager")
        if algorithm == GradientAllReduce():
            model.register_comm_hook(None, hook)
        batch = own_batch(0, WIDTH, 6).bfloat16()
        loss_of(model(batch)).backward()
        found = [p.grad.clone() for p in model.parameters()]
        for gradient, own in zip(found, own_gradients(model, batch), strict=True):
            mean = mean_in_float32(own)
            torch.testing.assert_close(gradient.float(), mean, rtol=1e-2, atol=float(mean.abs().max()) / 50)
    assert set(seen) == {(FLOAT32, FLOAT32, BFLOAT16)}


@pytest.mark.parametrize("bucket_cap_mb", only([0.002], [0.002, 25]))
@on_ranks(3)
def test_master_weights_step_by_float32(bucket_cap_mb: float) -> None:
    model: Any = seeded(lambda: Mlp(WIDTH, 3).bfloat16())
    masters = [p.detach().float() for p in model.parameters()]
    model = ddp_compile(model, reduce_dtype=FLOAT32, backend="aot_eager", bucket_cap_mb=bucket_cap_mb)
    optimizer = shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), model, master_weights=True)
    twin = copy.deepcopy(seeded(lambda: Mlp(WIDTH, 3).bfloat16()))
    for step in range(3):
        batch = own_batch(step, WIDTH, 6).bfloat16()
        for p, q in zip(twin.parameters(), model.parameters(), strict=True):
            p.data.copy_(q.data)
        twin.zero_grad()
        loss_of(twin(batch)).backward()
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        optimizer.step()
        for master, p, q in zip(masters, twin.parameters(), model.parameters(), strict=True):
            assert p.grad is not None
            master -= 0.5 * of_all_ranks(p.grad.float()).mean(0)
            # Another order of the sum may round a value to the other neighbor.
            assert (q != master.bfloat16()).float().mean() < 0.02
    pieces = [p for group in optimizer.param_groups for p in group["params"] if p.numel()]
    steps = [p.grad.as_subclass(Tensor) for p in pieces if p.grad is not None]
    assert any(not torch.equal(each, each.bfloat16().float()) for each in steps)


@on_ranks(2)
def test_delayed_parameters() -> None:
    net: Any = seeded(lambda: Mlp(WIDTH, 2).bfloat16())
    twin, delayed = copy.deepcopy(net), net.layers[0].weight
    named = {"delay_all_reduce_named_params": [("layers.0.weight", delayed)]}
    model = ddp_compile(
        net, reduce_dtype=FLOAT32, backend="eager", param_to_hook_all_reduce=net.layers[1].weight, **named
    )
    for each in (twin, model):
        loss_of(each(own_batch(0, WIDTH, 6).bfloat16())).backward()
    assert torch.equal(delayed.grad, mean_in_float32(twin.layers[0].weight.grad).bfloat16())


@on_ranks(2)
def test_sparse_gradients_that_no_module_announces() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(7, 3, dtype=BFLOAT16))
            self.head = nn.Linear(3, 3, dtype=BFLOAT16)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(nn.functional.embedding(x, self.weight, sparse=True))
            return y

    model: Any = ddp_compile(Table(), reduce_dtype=FLOAT32, backend="eager")
    loss_of(model(torch.tensor([dist.get_rank(), 3]))).backward()
    assert (model.weight.grad.to_dense().abs().sum(1) > 0).tolist() == [True, True, False, True, False, False, False]


@on_ranks(2)
def test_other_ways_to_train() -> None:
    model: Any = ddp_compile(seeded(lambda: Mlp(WIDTH, 2).bfloat16()), reduce_dtype=FLOAT32, backend="eager")
    batch = own_batch(0, WIDTH, 6).bfloat16()
    model.normalize_by(3 + dist.get_rank())
    model(batch).sum().backward()
    with model.no_sync():
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(batch).sum().backward()
    for gradient, p in zip(found, model.parameters(), strict=True):
        total = of_all_ranks(p.grad).float().sum(0)
        torch.testing.assert_close(gradient.float(), total / 7, rtol=1e-2, atol=1e-5)
        p.grad = gradient
    expected = torch.nn.utils.get_total_norm(found)
    assert torch.equal(model.clip_grad_norm_(1e-3), expected)


@on_ranks(2)
def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"reduce_dtype=torch.float64: pass torch.float32"):
        ddp_compile(nn.Linear(2, 2), reduce_dtype=torch.float64)
    model: Any = ddp_compile(nn.Linear(3, 3).bfloat16(), reduce_dtype=FLOAT32, backend="eager")
    loss_of(model(torch.randn(2, 3).bfloat16())).backward()
    model.float()
    with pytest.raises(ParametersChangedError, match="bfloat16"):
        loss_of(model(torch.randn(2, 3))).backward()
