"""Several backwards before one step, against eager DistributedDataParallel doing the same."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from beside import Step, difference, own_batch, pair, seeded, train_beside
from in_ci import only
from models import Mlp, assert_buckets_launched_early, loss_of
from rank_pool import on_ranks
from torch import Tensor, nn

from ddp_compile import ddp_compile

pytestmark = pytest.mark.usefixtures("each_split")


def small_mlp() -> nn.Module:
    return Mlp(width=17, num_layers=3)


def accumulate(num_micro_batches: int, with_no_sync: bool = True) -> Step:
    def step_of(model: nn.Module, x: Tensor, step: int) -> None:
        for i in range(num_micro_batches):
            local = with_no_sync and i < num_micro_batches - 1
            with model.no_sync() if local else contextlib.nullcontext():
                loss_of(model((i + 1) * x)).backward()

    return step_of


@pytest.mark.parametrize(
    ("with_no_sync", "set_to_none", "as_view"),
    only([(True, True, True), (False, False, True)], itertools.product([True, False], repeat=3)),
)
@on_ranks(2)
def test_accumulated_gradients_equal_ddps(with_no_sync: bool, set_to_none: bool, as_view: bool) -> None:
    models = pair(lambda: Mlp(33, 4), {"gradient_as_bucket_view": as_view}, bucket_cap_mb=0.005)
    found = train_beside(models, accumulate(3, with_no_sync), width=33, set_to_none=set_to_none, lr=0.1)
    assert found == [0.0] * 3
    assert_buckets_launched_early(models[0])


@on_ranks(2)
def test_any_number_of_micro_batches_may_be_accumulated() -> None:
    numbers = (1, 2, 5, 1, 9)

    def step_of(model: nn.Module, x: Tensor, step: int) -> None:
        accumulate(numbers[step])(model, x, step)

    assert train_beside(pair(small_mlp, bucket_cap_mb=0.001), step_of, len(numbers), width=17) == [0.0] * 5


@on_ranks(2)
def test_loops_that_set_require_backward_grad_sync_accumulate_as_with_ddp() -> None:
    models = pair(small_mlp, bucket_cap_mb=0.001)
    for step in range(2):
        for each in models:
            each.zero_grad()
        for i in range(3):
            for each in models:
                each.require_backward_grad_sync = i == 2
                loss_of(each(own_batch(3 * step + i, 17))).backward()
            gathered = [torch.empty(17, 17) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, models[0].layers[0].weight.grad)
            assert torch.equal(*gathered) == (i == 2)
            assert difference(*models) == 0.0


@on_ranks(2)
def test_gradients_stay_local_inside_no_sync() -> None:
    torch.manual_seed(5)
    model = ddp_compile(nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3)), backend="aot_eager")
    x = own_batch(0, 7)
    with model.no_sync():
        loss_of(model(x)).backward()
    local = [p.grad.clone() for p in model.parameters()]
    plain = model.unwrap()
    plain.zero_grad()
    loss_of(plain(x)).backward()
    assert all(torch.allclose(a, p.grad) for a, p in zip(local, plain.parameters(), strict=True))
    gathered = [torch.empty_like(local[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local[0])
    assert not torch.equal(*gathered)


def differences_to_the_mean(step_of: Step) -> tuple[float, float]:
    """How far our gradients, and DistributedDataParallel's, are from the mean of the plain module's."""
    ours, with_ddp = pair(small_mlp, bucket_cap_mb=0.001)
    plain = seeded(small_mlp)
    return tuple(max(train_beside((each, plain), step_of, width=17)) for each in (ours, with_ddp))


@pytest.mark.parametrize("one_backward", only([False], [True, False]))
@on_ranks(2)
def test_two_forwards_before_the_backward_give_the_mean_of_the_sum(one_backward: bool) -> None:
    def step_of(model: nn.Module, x: Tensor, step: int) -> None:
        losses = loss_of(model(x)), loss_of(model(2 * x))
        for loss in [sum(losses)] if one_backward else losses:
            loss.backward()

    ours, ddps = differences_to_the_mean(step_of)
    assert ours < 1e-6
    # DistributedDataParallel leaves the gradients of a second backward on their rank.
    assert ddps < 1e-6 if one_backward else ddps > 0.1


@pytest.mark.parametrize("donated_buffer", only([True], [True, False]))
@on_ranks(2)
def test_a_second_backward_through_a_kept_graph_is_averaged_as_well(donated_buffer: bool) -> None:
    def step_of(model: nn.Module, x: Tensor, step: int) -> None:
        with torch._functorch.config.patch(donated_buffer=donated_buffer):
            loss = loss_of(model(x))
            loss.backward(retain_graph=True)
            loss.backward()

    ours, ddps = differences_to_the_mean(step_of)
    assert ours < 1e-6
    assert ddps > 0.1  # the gradients of the second backward stay on their rank


@on_ranks(2)
def test_a_graph_kept_later_than_in_the_first_backward_needs_donated_buffers_off() -> None:
    model = ddp_compile(small_mlp(), backend="aot_eager")
    loss_of(model(torch.randn(4, 17))).backward()
    with pytest.raises(RuntimeError, match=r"torch\._functorch\.config\.donated_buffer=False"):
        loss_of(model(torch.randn(4, 17))).backward(retain_graph=True)
