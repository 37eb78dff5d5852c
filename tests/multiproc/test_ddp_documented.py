"""What DistributedDataParallel documents and no other file here looks at, each beside it or beside what it says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from in_ci import only
from models import Mlp, loss_of, relative_difference
from rank_pool import RankPool, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import GradientArrivalError, ddp_compile, torch_internals

pytestmark = pytest.mark.usefixtures("each_split")

Ranks = Callable[[int], RankPool]
WIDTH = 9


def small_mlp() -> nn.Module:
    torch.manual_seed(3)
    return Mlp(width=WIDTH, num_layers=3)


def pair(make: Callable[[], nn.Module] = small_mlp, backend: str = "aot_eager", **settings: Any) -> tuple[Any, Any]:
    ours = ddp_compile(make(), bucket_cap_mb=0.0005, backend=backend, **settings)
    return ours, DistributedDataParallel(make(), **settings)


def own_batch(step: int) -> Tensor:
    torch.manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, WIDTH)


def difference(ours: nn.Module, theirs: nn.Module) -> float:
    gradients = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(relative_difference(p.grad, q.grad) for p, q in gradients)


class Layouts(nn.Module):
    """Parameters that are not in the order of their rows: channels last, transposed, and with holes."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(6, 4).t())
        self.with_holes = nn.Parameter(torch.randn(4, 8)[:, ::2])

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x).mean((2, 3)) @ self.with_holes @ self.transposed


def make_layouts() -> nn.Module:
    torch.manual_seed(3)
    return Layouts()


def gradients_of_layouts(as_view: bool) -> tuple[float, dict[str, bool]]:
    ours, theirs = pair(make_layouts, gradient_as_bucket_view=as_view)
    worst = 0.0
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        x = torch.randn(2, 3, 5, 5)
        for model in (ours, theirs):
            model.zero_grad(set_to_none=step < 2)
            model(x).square().sum().backward()
        worst = max(worst, difference(ours, theirs))
    # With holes, a gradient is laid out by rows; any other one like its parameter.
    strides = {
        name: p.grad.stride() == (p.contiguous() if name == "with_holes" else p).stride()
        for name, p in ours.named_parameters()
    }
    alike = [p.grad.stride() == q.grad.stride() for p, q in zip(ours.parameters(), theirs.parameters(), strict=True)]
    return worst, strides | {"as DistributedDataParallel's": all(alike)}


@pytest.mark.parametrize("as_view", only([True], [True, False]))
def test_gradients_are_laid_out_as_ddps(as_view: bool, ranks: Ranks) -> None:
    for worst, strides in ranks(2).run(gradients_of_layouts, as_view):
        assert worst < 1e-6
        assert [name for name, holds in strides.items() if not holds] == []


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.filters = nn.ParameterList(torch.randn(WIDTH // 2 + 1, 1, dtype=torch.complex64) for _ in range(3))
        self.mixing = nn.Parameter(torch.randn(3, WIDTH, dtype=torch.complex64).t())  # transposed

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for weight in self.filters:
            x = torch.fft.irfft(torch.fft.rfft(x) * weight.squeeze(1), n=WIDTH)
        return torch.view_as_real(x.to(torch.complex64) @ self.mixing.conj())


def make_complex() -> nn.Module:
    torch.manual_seed(3)
    return Complex()


@pytest.mark.parametrize("settings", only([{}], [{}, {"gradient_as_bucket_view": False}, {"static_graph": True}]))
@on_ranks(2)
def test_complex_gradients_are_ddps(settings: dict[str, bool]) -> None:
    ours, theirs = pair(make_complex, **settings)
    worst = 0.0
    for step in range(3):
        for model in (ours, theirs):
            model.zero_grad(set_to_none=step < 2)
            loss_of(model(own_batch(step))).backward()
        worst = max(worst, difference(ours, theirs))
    assert worst < 1e-6


@on_ranks(2)
def test_double_backward_by_autograd_grad_is_ddps() -> None:
    ours, theirs = pair(backend="eager")  # AOTAutograd's backwards cannot be differentiated
    worst = 0.0
    for step in range(2):
        for model in (ours, theirs):
            model.zero_grad()
            x = own_batch(step).requires_grad_()
            loss = loss_of(model(x))
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + slope.square().sum()).backward()
        worst = max(worst, difference(ours, theirs))
    assert worst == 0.0


@pytest.mark.parametrize("backend", only(["aot_eager"], ["eager", "aot_eager"]))
@on_ranks(2)
def test_double_backward_through_grad_is_refused(backend: str) -> None:
    with pytest.raises(GradientArrivalError) as raised:
        model = ddp_compile(small_mlp(), backend=backend)
        with torch._functorch.config.patch(donated_buffer=False):
            loss_of(model(own_batch(0))).backward(create_graph=True)
    rank = dist.get_rank()
    message = str(raised.value)
    assert f"rank {rank}: the gradient of layers.2." in message
    assert "torch.autograd.grad(..., create_graph=True)" in message


@on_ranks(2)
def test_grad_scaler() -> None:
    """The second step's gradients are not finite on rank 1, so no rank may take it, and the scale is halved."""
    ours, theirs = pair()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    worst = 0.0
    for step in range(4):
        x = own_batch(step)
        if step == 1 and dist.get_rank() == 1:
            x[0, 0] = float("inf")
        for model, optimizer, scaler in zip((ours, theirs), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss_of(model(x))).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        parameters = zip(ours.parameters(), theirs.parameters(), strict=True)
        worst = max(worst, *(relative_difference(p, q) for p, q in parameters))
    assert (worst, [scaler.get_scale() for scaler in scalers]) == (0.0, [512.0, 512.0])


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.norms(x)


def make_with_buffers() -> nn.Module:
    torch.manual_seed(3)
    return WithBuffers()


def buffers_beside_ddps(broadcast_buffers: bool, accumulates: bool) -> tuple[float, float, int]:
    """The difference to DistributedDataParallel's buffers, that to rank 0's, and how many broadcasts there were."""
    ours, theirs = pair(make_with_buffers, broadcast_buffers=broadcast_buffers)
    sent: list[int] = []
    broadcast = torch_internals.broadcast_coalesced

    def counting(process_group: Any, tensors: Any, *rest: Any, **settings: Any) -> None:
        sent.append(len(tensors))
        broadcast(process_group, tensors, *rest, **settings)

    with mock.patch.object(torch_internals, "broadcast_coalesced", counting):
        for step in range(3):
            if accumulates:
                with ours.no_sync(), theirs.no_sync():
                    for model in (ours, theirs):
                        loss_of(model(own_batch(10 + step))).backward()
            for model in (ours, theirs):
                loss_of(model(own_batch(step))).backward()
    assert all(num_tensors == 6 for num_tensors in sent)  # all of them at once
    buffers = zip(ours.buffers(), theirs.buffers(), strict=True)
    worst = max(relative_difference(a.float(), b.float()) for a, b in buffers)
    rank_0s = ours.norms[0].running_mean.clone()
    dist.broadcast(rank_0s, 0)
    return worst, relative_difference(ours.norms[0].running_mean, rank_0s), len(sent)


@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_statistics_are_ddps_and_all_are_broadcast_at_once(broadcast_buffers: bool, ranks: Ranks) -> None:
    rank_0, rank_1 = ranks(2).run(buffers_beside_ddps, broadcast_buffers, accumulates=False)
    for worst, _, num_broadcasts in (rank_0, rank_1):
        assert worst < 1e-6
        assert num_broadcasts == (3 if broadcast_buffers else 0)
    assert rank_1[1] > 0.01  # after the last broadcast every rank goes on with its own batches


def test_nothing_is_broadcast_in_no_sync(ranks: Ranks) -> None:
    rank_0, rank_1 = ranks(2).run(buffers_beside_ddps, broadcast_buffers=True, accumulates=True)
    assert rank_0[2] == rank_1[2] == 3
    # DistributedDataParallel broadcasts before the first forward in no_sync, and not before the synchronised one. That
    # makes no difference to rank 0, whose statistics are everybody's.
    assert rank_0[0] < 1e-6 and rank_1[0] > 0.01


def weights_after_construction(init_sync: bool) -> tuple[list[float], list[float]]:
    model = WithBuffers()
    for tensor in [*model.parameters(), *model.buffers()]:
        nn.init.constant_(tensor, 1.0 + dist.get_rank())
    ddp_compile(model, backend="eager", init_sync=init_sync, parameters_to_ignore=["norms.2.running_mean"])
    seen = {name: float(tensor.flatten()[0]) for name, tensor in model.state_dict().items()}
    ignored = seen.pop("norms.2.running_mean")
    return sorted(set(seen.values())), [ignored]


@pytest.mark.parametrize("init_sync", [True, False])
def test_parameters_and_buffers_come_from_rank_0_at_construction(init_sync: bool, ranks: Ranks) -> None:
    rank_0, rank_1 = ranks(2).run(weights_after_construction, init_sync)
    assert rank_0 == ([1.0], [1.0])
    assert rank_1 == ([1.0 if init_sync else 2.0], [2.0])


@on_ranks(2)
def test_an_ignored_parameter_keeps_this_ranks_gradient() -> None:
    model = ddp_compile(small_mlp(), backend="aot_eager", parameters_to_ignore=["layers.1.weight"])
    plain = small_mlp()
    for each in (model, plain):
        loss_of(each(own_batch(0))).backward()
    local = relative_difference(model.layers[1].weight.grad, plain.layers[1].weight.grad)
    dist.all_reduce(plain.layers[0].weight.grad)
    mean = relative_difference(model.layers[0].weight.grad, plain.layers[0].weight.grad / 2)
    assert local == 0.0 and mean < 1e-6


def train_in_a_subgroup(with_mesh: bool) -> float | None:
    if with_mesh:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        settings: dict[str, Any] = {"device_mesh": mesh}
    else:
        settings = {"process_group": dist.new_group([0, 2])}
        if dist.get_rank() == 1:
            return None
    ours, theirs = pair(**settings)
    for model in (ours, theirs):
        loss_of(model(own_batch(0))).backward()
    return difference(ours, theirs)


@pytest.mark.parametrize("with_mesh", [True, False])
def test_the_mean_is_over_the_group_or_mesh_that_is_given(with_mesh: bool, ranks: Ranks) -> None:
    differences = ranks(3).run(train_in_a_subgroup, with_mesh)
    assert [value is None for value in differences] == [False, not with_mesh, False]
    assert max(value for value in differences if value is not None) < 1e-6


@on_ranks(2)
def test_autograd_grad_gives_this_ranks_gradients() -> None:
    """They are this rank's own, and the backward that follows is reduced as if nothing had been."""
    ours, theirs = pair()
    plain = small_mlp()
    x = own_batch(0)
    loss, own_loss = loss_of(ours(x)), loss_of(plain(x))
    local = torch.autograd.grad(loss, list(ours.parameters()), retain_graph=True)
    expected = torch.autograd.grad(own_loss, list(plain.parameters()))
    loss.backward()
    loss_of(theirs(x)).backward()
    assert (max(map(relative_difference, local, expected)), difference(ours, theirs)) == (0.0, 0.0)


@on_ranks(2)
def test_zero_redundancy_optimizer() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its imports take a second

    ours, theirs = pair()
    optimizers = [
        ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
        for model in (ours, theirs)
    ]
    worst = 0.0
    for step in range(3):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model(own_batch(step))).backward()
            optimizer.step()
        parameters = zip(ours.parameters(), theirs.parameters(), strict=True)
        worst = max(worst, *(relative_difference(p, q) for p, q in parameters))
    assert worst == 0.0


@on_ranks(2)
def test_frozen_parameters_are_not_sent() -> None:
    def make() -> nn.Module:
        model = small_mlp()
        model.layers[1].requires_grad_(False)
        return model

    ours, theirs = pair(make)
    for model in (ours, theirs):
        loss_of(model(own_batch(0))).backward()
    sent = [gradient.fqn for bucket in ours.bucket_plan.buckets for gradient in bucket.gradients]
    trained = [(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True) if p.requires_grad]
    sent, worst = sorted(sent), max(relative_difference(p.grad, q.grad) for p, q in trained)
    assert sent == ["layers.0.bias", "layers.0.weight", "layers.2.bias", "layers.2.weight"]
    assert worst == 0.0


@on_ranks(2)
def test_a_deep_copy_is_not_reduced() -> None:
    """A deep copy, for a moving average of the weights for example, is a module that no gradient is reduced of."""
    model = ddp_compile(small_mlp(), backend="aot_eager")
    copied = copy.deepcopy(model)
    if dist.get_rank() == 0:
        loss_of(copied(own_batch(0))).backward()  # alone, and yet nobody waits
    loss_of(model(own_batch(0))).backward()
    assert type(copied) is Mlp
