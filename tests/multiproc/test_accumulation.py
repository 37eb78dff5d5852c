"""Several backwards before one step, against eager DistributedDataParallel doing the same."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from in_ci import only
from models import Mlp, assert_buckets_launched_early, loss_of, relative_difference
from rank_pool import RankPool, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ddp_compile

pytestmark = pytest.mark.usefixtures("each_split")

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize(
    ("with_no_sync", "set_to_none", "as_view"),
    only([(True, True, True), (False, False, True)], itertools.product([True, False], repeat=3)),
)
@on_ranks(2)
def test_accumulated_gradients_equal_ddps(with_no_sync: bool, set_to_none: bool, as_view: bool) -> None:
    num_micro_batches = 3
    torch.manual_seed(3)
    reference = Mlp(width=33, num_layers=4)
    torch.manual_seed(3)
    model = ddp_compile(
        Mlp(width=33, num_layers=4),
        bucket_cap_mb=0.005,
        backend="aot_eager",
        gradient_as_bucket_view=as_view,
    )
    with_ddp = DistributedDataParallel(reference, gradient_as_bucket_view=as_view)
    worst = 0.0
    torch.manual_seed(100 + dist.get_rank())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, with_ddp)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        for i in range(num_micro_batches):
            x = torch.randn(4, 33)
            for each in (model, with_ddp):
                local = with_no_sync and i < num_micro_batches - 1
                with each.no_sync() if local else contextlib.nullcontext():
                    loss_of(each(x)).backward()
        for p, q in zip(model.parameters(), with_ddp.parameters(), strict=True):
            worst = max(worst, relative_difference(p.grad, q.grad))
        for optimizer in optimizers:
            optimizer.step()
    assert_buckets_launched_early(model)
    assert worst == 0.0


@on_ranks(2)
def test_any_number_of_micro_batches_may_be_accumulated() -> None:
    """Every step has another number of micro-batches, the last of which is reduced."""
    torch.manual_seed(3)
    reference = Mlp(width=17, num_layers=3)
    model = ddp_compile(copy.deepcopy(reference), bucket_cap_mb=0.001, backend="aot_eager")
    with_ddp = DistributedDataParallel(reference)
    torch.manual_seed(100 + dist.get_rank())
    worst = 0.0
    for num_micro_batches in (1, 2, 5, 1, 9):
        for each in (model, with_ddp):
            each.zero_grad()
        for i in range(num_micro_batches):
            x = torch.randn(4, 17)
            for each in (model, with_ddp):
                with each.no_sync() if i < num_micro_batches - 1 else contextlib.nullcontext():
                    loss_of(each(x)).backward()
        for p, q in zip(model.parameters(), with_ddp.parameters(), strict=True):
            worst = max(worst, relative_difference(p.grad, q.grad))
    assert worst == 0.0


@on_ranks(2)
def test_loops_that_set_require_backward_grad_sync_accumulate_as_with_ddp() -> None:
    torch.manual_seed(3)
    reference = Mlp(width=17, num_layers=3)
    model = ddp_compile(copy.deepcopy(reference), bucket_cap_mb=0.001, backend="aot_eager")
    with_ddp = DistributedDataParallel(reference)
    torch.manual_seed(100 + dist.get_rank())
    worst, are_local = 0.0, True
    for _ in range(2):
        for each in (model, with_ddp):
            each.zero_grad()
        for i in range(3):
            x = torch.randn(4, 17)
            for each in (model, with_ddp):
                each.require_backward_grad_sync = i == 2
                loss_of(each(x)).backward()
            gathered = [torch.empty_like(reference.layers[0].weight) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, model.layers[0].weight.grad)
            are_local &= torch.equal(*gathered) == (i == 2)
            for p, q in zip(model.parameters(), with_ddp.parameters(), strict=True):
                worst = max(worst, relative_difference(p.grad, q.grad))
    assert (worst, are_local) == (0.0, True)


@on_ranks(2)
def test_gradients_stay_local_inside_no_sync() -> None:
    torch.manual_seed(5)
    model = ddp_compile(nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3)), backend="aot_eager")
    torch.manual_seed(dist.get_rank())
    x = torch.randn(4, 7)
    with model.no_sync():
        loss_of(model(x)).backward()
    local = [p.grad.clone() for p in model.parameters()]
    plain = model.unwrap()
    plain.zero_grad()
    loss_of(plain(x)).backward()
    same_as_alone = all(torch.allclose(a, p.grad) for a, p in zip(local, plain.parameters(), strict=True))
    gathered = [torch.empty_like(local[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local[0])
    assert (same_as_alone, torch.equal(gathered[0], gathered[1])) == (True, False)


def differences_to_the_mean(run: Callable[[nn.Module, Tensor, Tensor], None]) -> tuple[float, float]:
    """Over three steps, how far our gradients and DistributedDataParallel's are from the mean of the plain module's.

    Args:
        run: What is done in a step, with two inputs.
    """
    torch.manual_seed(3)
    reference = Mlp(width=17, num_layers=3)
    with_ddp = DistributedDataParallel(copy.deepcopy(reference))
    model = ddp_compile(copy.deepcopy(reference), bucket_cap_mb=0.001, backend="aot_eager")
    worst = {model: 0.0, with_ddp: 0.0}
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        first, second = torch.randn(4, 17), torch.randn(4, 17)
        for each in (model, with_ddp, reference):
            each.zero_grad()
            run(each, first, second)
        for parameter in reference.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        for each in worst:
            gradients = zip(each.parameters(), reference.parameters(), strict=True)
            worst[each] = max(worst[each], *(relative_difference(p.grad, q.grad) for p, q in gradients))
    return worst[model], worst[with_ddp]


@pytest.mark.parametrize("one_backward", only([False], [True, False]))
@on_ranks(2)
def test_two_forwards_before_the_backward_give_the_mean_of_the_sum(one_backward: bool) -> None:
    def run(model: nn.Module, first: Tensor, second: Tensor) -> None:
        losses = loss_of(model(first)), loss_of(model(second))
        if one_backward:
            (losses[0] + losses[1]).backward()
        else:
            losses[0].backward()
            losses[1].backward()

    ours, ddps = differences_to_the_mean(run)
    assert ours < 1e-6
    # DistributedDataParallel leaves what a second backward brings on its rank.
    assert ddps < 1e-6 if one_backward else ddps > 0.1


@pytest.mark.parametrize("donated_buffer", only([True], [True, False]))
@on_ranks(2)
def test_a_second_backward_through_a_kept_graph_is_averaged_as_well(donated_buffer: bool) -> None:
    def run(model: nn.Module, x: Tensor, _: Tensor) -> None:
        with torch._functorch.config.patch(donated_buffer=donated_buffer):
            loss = loss_of(model(x))
            loss.backward(retain_graph=True)
            loss.backward()

    ours, ddps = differences_to_the_mean(run)
    assert ours < 1e-6
    assert ddps > 0.1  # what the second backward brings stays on its rank


@on_ranks(2)
def test_a_graph_kept_later_than_in_the_first_backward_needs_donated_buffers_off() -> None:
    with pytest.raises(RuntimeError) as raised:
        model = ddp_compile(Mlp(width=17, num_layers=3), backend="aot_eager")
        loss_of(model(torch.randn(4, 17))).backward()
        loss_of(model(torch.randn(4, 17))).backward(retain_graph=True)
    assert "torch._functorch.config.donated_buffer=False" in str(raised.value)
