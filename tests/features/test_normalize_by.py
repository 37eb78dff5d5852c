"""``model.normalize_by``: gradients of summed losses, divided by the counts of all micro-batches and ranks.

The oracle is one process that has all micro-batches of a step at once. `train` steps both and compares the parameters.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from in_ci import only
from models import Mlp
from rank_pool import on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddp_compile import RanksDifferError, ReplicationError, ddp_compile, shard_optimizer
from ddp_compile.algorithms import ByteGrad, GradientAllReduce

WIDTH, LR, STEPS = 9, 0.05, 4


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, WIDTH)
        self.mlp = Mlp(WIDTH, 3)
        self.unused = nn.Linear(2, 2)
        self.requires_grad_(True).to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.mlp(self.table(tokens)).square()


def batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens, shape (3, 5), and which of them count: fewer on later ranks, none on rank 1 in step 2."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    tokens = torch.randint(11, (3, 5), generator=generator)
    mask = torch.rand(3, 5, generator=generator) < 0.9 / (rank + micro + 1)
    return tokens, mask & (step != 2 or rank != 1)


def summed(outputs: Tensor, mask: Tensor) -> Tensor:
    return (outputs.sum(-1) * mask).sum()


def sgd(module: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(module.parameters(), lr=LR)]


def muon(module: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in module.parameters() if p.ndim == 2]
    return [torch.optim.Muon(matrices, lr=LR), torch.optim.SGD([p for p in module.parameters() if p.ndim < 2], lr=LR)]


def count_and_sum(model: Any, outputs: Tensor, mask: Tensor, as_tensor: bool) -> Tensor:
    loss = summed(outputs, mask)
    count = mask.sum()
    model.normalize_by(count if as_tensor else int(count), loss=loss)
    return loss


class Way(NamedTuple):
    settings: Mapping[str, Any] = MappingProxyType({})
    num_micro: int = 1
    then: Callable[[Any], object] = lambda model: None
    sharded: bool = False
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]] = sgd
    compile_loss: Callable[[Any], Any] = lambda function: function
    loss_scale: float = 1.0  #: of a GradScaler
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-12


#: `test_feature_pairs` has other settings.
WAYS = {
    "forward": Way({"split": "forward"}),
    "backward": Way({"split": "backward"}),
    "backward, accumulation": Way({"split": "backward"}, num_micro=2),
    "comm hook": Way(then=lambda model: model.register_comm_hook(None, allreduce_hook)),
    "hierarchical": Way({"algorithm": GradientAllReduce(hierarchical=True)}),
    "float16 wire": Way({"algorithm": GradientAllReduce(wire_dtype=torch.float16)}, tolerance=1e-3),
    "reproducible": Way({"algorithm": GradientAllReduce(reproducible=True)}),
    "byte_grad": Way({"algorithm": ByteGrad()}, dtype=torch.float32, tolerance=1e-2),
    "sharded": Way(num_micro=2, sharded=True),
    "muon, sharded": Way(num_micro=2, optimizers=muon, sharded=True),
    "compiled loss": Way(num_micro=2, compile_loss=torch.compile(backend="aot_eager")),
    "grad_scaler": Way(num_micro=2, loss_scale=1024.0),
}


def train(way: Way) -> tuple[float, list[tuple[float, float]]]:
    """The largest difference of a parameter from one process's, and the mean loss of each step, ours and expected."""
    rank, world = dist.get_rank(), dist.get_world_size()
    net = Net(way.dtype)
    plain = copy.deepcopy(net)
    settings = {"backend": "aot_eager", "bucket_cap_mb": 5e-4, "find_unused_parameters": True, **way.settings}
    model: Any = ddp_compile(net, **settings)
    way.then(model)
    optimizers, plain_optimizers = way.optimizers(model), way.optimizers(plain)
    if way.sharded:
        shard_optimizer(optimizers, model)
    count_and_sum_here = way.compile_loss(count_and_sum)
    scaler = torch.amp.GradScaler("cpu", init_scale=way.loss_scale, enabled=way.loss_scale != 1.0)
    losses = []
    for step in range(STEPS):
        for micro in range(way.num_micro):
            is_last = micro == way.num_micro - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                tokens, mask = batch(step, micro, rank)
                loss = count_and_sum_here(model, model(tokens), mask, as_tensor=bool(step % 2))
                scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        everything = [batch(step, micro, r) for micro in range(way.num_micro) for r in range(world)]
        total = sum(int(mask.sum()) for _, mask in everything)
        expected = sum(summed(plain(tokens), mask) for tokens, mask in everything) / total
        expected.backward()
        for optimizer in plain_optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append((float(model.mean_loss), float(expected)))
    parameters = dict(model.named_parameters())
    worst = max(float((parameters[name] - p).abs().max()) for name, p in plain.named_parameters())
    return worst, losses


IN_CI = ["forward", "backward, accumulation", "comm hook", "byte_grad", "sharded", "muon, sharded", "grad_scaler"]


@pytest.mark.parametrize("name", only(IN_CI, WAYS))
@on_ranks(2)
def test_equals_one_process(name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", str(dist.get_rank()))  # one node
        worst, losses = train(WAYS[name])
    assert worst < WAYS[name].tolerance
    for ours, expected in losses:
        assert ours == pytest.approx(expected, rel=100 * WAYS[name].tolerance)


@pytest.mark.parametrize("name", ["backward, accumulation", "sharded"])
@pytest.mark.parametrize("world_size", only([3], [1, 3, 4]))
@on_ranks()
def test_other_numbers_of_ranks(world_size: int, name: str) -> None:
    worst, _ = train(WAYS[name])
    assert worst < 1e-12


def model_and_loss(**settings: Any) -> tuple[Any, Callable[[], Tensor], Tensor]:
    model: Any = ddp_compile(Net(), backend="aot_eager", find_unused_parameters=True, **settings)
    tokens, mask = batch(0, 0, dist.get_rank())
    return model, lambda: summed(model(tokens), mask), mask.sum()


@on_ranks(2)
def test_first_call_in_a_later_step() -> None:
    model, loss, count = model_and_loss()
    (loss() / count).backward()
    model.zero_grad()
    model.normalize_by(count)
    loss().backward()
    normalized = model.table.weight.grad.clone()
    model.zero_grad()
    totals = count.clone()
    dist.all_reduce(totals)
    (loss() * dist.get_world_size() / totals).backward()  # called in no micro-batch of any rank: the mean over ranks
    torch.testing.assert_close(normalized, model.table.weight.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("has_hook", [False, True])
@on_ranks(2)
def test_fewer_batches_in_join(has_hook: bool) -> None:
    model, _, _ = model_and_loss(broadcast_buffers=False)
    if has_hook:
        model.register_comm_hook(None, allreduce_hook)
    plain = Net()
    optimizer, plain_optimizer = (torch.optim.SGD(each.parameters(), lr=LR) for each in (model, plain))
    num_steps = (4, 2)
    with model.join(divide_by_initial_world_size=not has_hook):
        for step in range(num_steps[dist.get_rank()]):
            tokens, mask = batch(step, 0, dist.get_rank())
            model.normalize_by(int(mask.sum()))
            summed(model(tokens), mask).backward()
            optimizer.step()
            optimizer.zero_grad()
    for step in range(max(num_steps)):
        everything = [batch(step, 0, rank) for rank, steps in enumerate(num_steps) if step < steps]
        total = sum(int(mask.sum()) for _, mask in everything)
        sum((summed(plain(tokens), mask) for tokens, mask in everything), torch.zeros(())).div(total).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    torch.testing.assert_close(dict(model.named_parameters()), dict(plain.named_parameters()), rtol=0, atol=1e-12)


@on_ranks(2)
def test_delayed_gradients() -> None:
    """`test_feature_pairs` has their mean."""
    net = Net()
    late: Any = ddp_compile(
        net,
        backend="eager",
        find_unused_parameters=True,
        delay_all_reduce_named_params=[("table.weight", net.table.weight)],
        param_to_hook_all_reduce=net.table.weight,
    )
    tokens, mask = batch(0, 0, dist.get_rank())
    with pytest.raises(ReplicationError, match=r"delayed gradients of table.weight .*no_sync"), late.no_sync():
        late.normalize_by(mask.sum())
        summed(late(tokens), mask).backward()


@on_ranks(2, eagerly=True)
def test_nothing_counted_gives_zeros() -> None:
    model, loss, _ = model_and_loss()
    model.normalize_by(0, loss=(value := loss()))
    value.backward()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)
    assert math.isnan(model.mean_loss)


# Steps of micro-batches, whose counts all ranks pass, "a", or rank 0 alone, "0".
@pytest.mark.parametrize("steps", [("0",), ("a", "0"), ("0a",), ("a0",)])
@on_ranks(2, eagerly=True)
def test_ranks_that_count_differently(steps: tuple[str, ...]) -> None:
    model, loss, count = model_and_loss()
    with pytest.raises(RanksDifferError, match=r"do not divide by the same counts.* on rank [01].*Call it on every"):
        for step in steps:
            model.zero_grad()
            for number, who in enumerate(step, start=1):
                with contextlib.nullcontext() if number == len(step) else model.no_sync():
                    if who == "a" or dist.get_rank() == 0:
                        model.normalize_by(count)
                    loss().backward()


@on_ranks(2, timeout_s=3.0, eagerly=True)
def test_first_call_on_one_rank() -> None:
    model, loss, count = model_and_loss()
    loss().backward()
    model.zero_grad()
    if dist.get_rank() == 0:
        with pytest.raises(RanksDifferError, match="not called on rank 1"):
            model.normalize_by(count)


@pytest.mark.parametrize("counts_again", [True, False])
@on_ranks(2, eagerly=True)
def test_gradients_that_were_not_zeroed(counts_again: bool) -> None:
    model, loss, count = model_and_loss()
    model.normalize_by(count)
    loss().backward()
    if counts_again:
        model.normalize_by(count)
    with pytest.raises(ReplicationError, match=r"were not zeroed.*optimizer.zero_grad"):
        loss().backward()


@pytest.mark.parametrize(("after_loss", "raising", "factor"), [(False, (0, 1), 1), (True, (0,), 1), (False, (0,), 7)])
@on_ranks(2, eagerly=True)
def test_forward_that_raises_is_not_counted(after_loss: bool, raising: tuple[int, ...], factor: int) -> None:
    """Before the forward of the step, which then counts again, or between it and its backward."""
    model, loss, count = model_and_loss()
    gradients = []
    for step in range(3):
        raises = dist.get_rank() in raising and (step < 2 if len(raising) == 2 else step > 0)
        value = loss() if after_loss else None
        if raises:
            model.normalize_by(factor * count)
            with pytest.raises(IndexError):
                model(torch.full((1, 1), 99))
        if not (raises and after_loss):
            model.normalize_by(count)
        (loss() if value is None else value).backward()
        gradients.append(model.table.weight.grad.clone())
        model.zero_grad()
    assert all(torch.equal(gradients[0], other) for other in gradients)


@on_ranks(2, eagerly=True)
def test_local_forward_on_one_rank_before_a_count() -> None:
    """What the ranks send has one order: this rank's count does not come before the buffers."""
    model: Any = ddp_compile(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), backend="eager")
    x = torch.randn(4, 2)
    for step in range(3):
        model.zero_grad()
        if step > 0 and dist.get_rank() == 0:
            with model.no_sync():
                model(x)
        model.normalize_by(4)
        model(x)[:, 0].sum().backward()


@on_ranks(2, eagerly=True)
def test_recomputed_forward_is_counted() -> None:
    model: Any = ddp_compile(nn.Linear(2, 2), backend="eager")
    for _ in range(2):
        model.zero_grad()
        model.normalize_by(4)
        torch.utils.checkpoint.checkpoint(model, torch.ones(1, 2), use_reentrant=False).sum().backward()
        torch.testing.assert_close(model.weight.grad, torch.full((2, 2), 2 / 8))


@on_ranks(2, eagerly=True)
def test_mean_loss_before_it_is_sent() -> None:
    model, loss, count = model_and_loss()
    for _ in range(2):
        model.zero_grad()
        with model.no_sync():
            value = loss()
            model.normalize_by(count, loss=value)
            with pytest.raises(RuntimeError, match="after the last backward of a step"):
                _ = model.mean_loss
            value.backward()
        value = loss()
        model.normalize_by(count, loss=value)
        value.backward()
        assert model.mean_loss.isfinite()


@on_ranks(2, eagerly=True)
def test_first_backward_of_a_method() -> None:
    model: Any = ddp_compile(nn.Linear(2, 2), backend="eager")
    for call in (model.forward, model):
        outputs = call(torch.ones(1, 2) * dist.get_rank())
        model.normalize_by(3 - dist.get_rank())
        outputs.sum().backward()
        torch.testing.assert_close(model.weight.grad, torch.full((2, 2), 1 / 5))
        model.zero_grad()


@pytest.mark.parametrize("error", ["in a later forward", "in a later loss", "in the first loss"])
@on_ranks(2, eagerly=True)
def test_step_that_is_left_is_not_counted(error: str) -> None:
    model, loss, count = model_and_loss()
    model.normalize_by(count)
    loss().backward()
    gradient = model.table.weight.grad.clone()
    model.zero_grad()
    with model.no_sync():
        if error != "in the first loss":
            model.normalize_by(3 * count)
            loss().backward()
        model.normalize_by(5 * count)
        if error == "in a later forward":
            with pytest.raises(IndexError):
                model(torch.full((1, 1), 99))
    model.zero_grad()
    if error != "in a later forward":
        loss()  # whose backward is left out
    if error == "in the first loss":
        with pytest.raises(ReplicationError, match=r"called twice for one backward.*counts of this step are dropped"):
            model.normalize_by(count)
    model.normalize_by(count)
    loss().backward()
    torch.testing.assert_close(model.table.weight.grad, gradient, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": -1}, r"normalize_by\(-1\): pass the number"),
        ({"count": "7"}, "'7'"),
        ({"count": torch.tensor(-1)}, r"normalize_by\(-1\)"),
        ({"count": torch.ones(1)}, r"tensor of shape \(1,\) on cpu; pass a number, or a tensor of shape \(\)"),
        ({"count": torch.ones((), device="meta")}, "on meta"),
        ({"count": 1, "loss": torch.ones(2)}, "summed loss, a tensor of shape"),
    ],
)
@on_ranks(2, eagerly=True)
def test_bad_counts(arguments: dict[str, Any], message: str) -> None:
    model, loss, count = model_and_loss()
    with pytest.raises(ValueError, match=message):
        model.normalize_by(**arguments)
    model.normalize_by(count)  # nothing has been sent
    loss().backward()
