"""What DistributedDataParallel documents and no other file tests: each compared with it or with its documentation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import beside
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from beside import average, beside_plain, difference, flat_of, is_same_everywhere, of_all_ranks, seeded, train_beside
from in_ci import only
from models import Mlp, largest, loss_of, relative_difference
from process_copies import context_of_copies
from rank_pool import on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from ddp_compile import GradientArrivalError, ddp_compile, torch_internals

pytestmark = pytest.mark.usefixtures("each_split")

WIDTH = 9


def small_mlp() -> nn.Module:
    return Mlp(width=WIDTH, num_layers=3)


def pair(make: Callable[[], nn.Module] = small_mlp, backend: str = "aot_eager", **both: Any) -> tuple[Any, Any]:
    return beside.pair(make, both, bucket_cap_mb=0.0005, backend=backend)


def own_batch(step: int) -> Tensor:
    return beside.own_batch(step, WIDTH)


class Layouts(nn.Module):
    """Parameters that are not in the order of their rows: channels last, transposed, and with holes."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(6, 4).t())
        self.with_holes = nn.Parameter(torch.randn(4, 8)[:, ::2])

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x).mean((2, 3)) @ self.with_holes @ self.transposed


@pytest.mark.parametrize("as_view", only([True], [True, False]))
@on_ranks(2)
def test_gradients_are_laid_out_as_ddps(as_view: bool) -> None:
    ours, theirs = pair(Layouts, gradient_as_bucket_view=as_view)
    for step in range(3):
        x = beside.own_batch(step, 75, 2).view(2, 3, 5, 5)
        for model in (ours, theirs):
            model.zero_grad(set_to_none=step < 2)
            model(x).square().sum().backward()
        assert difference(ours, theirs) < 1e-6
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        # With holes, a gradient is laid out by rows; any other one like its parameter.
        assert p.grad.stride() == (p.contiguous() if name == "with_holes" else p).stride(), name
        assert p.grad.stride() == q.grad.stride(), name


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


@pytest.mark.parametrize("settings", only([{}], [{}, {"gradient_as_bucket_view": False}, {"static_graph": True}]))
@on_ranks(2)
def test_complex_gradients_are_ddps(settings: dict[str, bool]) -> None:
    models = pair(Complex, **settings)
    for set_to_none in (True, False):
        assert largest(train_beside(models, num_steps=2, width=WIDTH, set_to_none=set_to_none)) < 1e-6


@on_ranks(2)
def test_double_backward_by_autograd_grad_is_ddps() -> None:
    def step_of(model: nn.Module, x: Tensor, step: int) -> None:
        x.requires_grad_()
        loss = loss_of(model(x))
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()

    # AOTAutograd's backwards cannot be differentiated.
    assert train_beside(pair(backend="eager"), step_of, 2, width=WIDTH) == [0.0, 0.0]


@pytest.mark.parametrize("backend", only(["aot_eager"], ["eager", "aot_eager"]))
@on_ranks(2)
def test_double_backward_through_grad_is_refused(backend: str) -> None:
    loss = loss_of(ddp_compile(small_mlp(), backend=backend)(own_batch(0)))
    with (
        torch._functorch.config.patch(donated_buffer=False),
        pytest.raises(GradientArrivalError, match=r"torch\.autograd\.grad\(\.\.\., create_graph=True\)") as raised,
    ):
        loss.backward(create_graph=True)
    assert f"rank {dist.get_rank()}: the gradient of layers.2." in str(raised.value)


@on_ranks(2)
def test_grad_scaler() -> None:
    """The second step's gradients are not finite on rank 1, so no rank may take it, and the scale is halved."""
    models = pair()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for step in range(4):
        x = own_batch(step)
        if step == 1 and dist.get_rank() == 1:
            x[0, 0] = float("inf")
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss_of(model(x))).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert torch.equal(*map(flat_of, models))
    assert [scaler.get_scale() for scaler in scalers] == [512.0, 512.0]


def with_buffers() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))


def buffers_beside_ddps(broadcast_buffers: bool, accumulates: bool) -> tuple[float, float, int]:
    """The difference to DistributedDataParallel's buffers, that to rank 0's, and how many broadcasts there were."""
    ours, theirs = pair(with_buffers, broadcast_buffers=broadcast_buffers)
    sent: list[int] = []
    broadcast = torch_internals.broadcast_coalesced

    def counting(process_group: Any, tensors: Any, *rest: Any, **settings: Any) -> None:
        sent.append(len(tensors))
        broadcast(process_group, tensors, *rest, **settings)

    with mock.patch.object(torch_internals, "broadcast_coalesced", counting):
        for step in range(3):
            for model in (ours, theirs):
                if accumulates:
                    with model.no_sync():
                        loss_of(model(own_batch(10 + step))).backward()
                loss_of(model(own_batch(step))).backward()
    assert all(num_tensors == 6 for num_tensors in sent)  # all of them at once
    buffers = zip(ours.buffers(), theirs.buffers(), strict=True)
    worst = max(relative_difference(a.float(), b.float()) for a, b in buffers)
    return worst, relative_difference(ours[0].running_mean, of_all_ranks(ours[0].running_mean)[0]), len(sent)


@pytest.mark.parametrize("broadcast_buffers", [True, False])
@on_ranks(2)
def test_statistics_are_ddps_and_all_are_broadcast_at_once(broadcast_buffers: bool) -> None:
    worst, to_rank_0s, num_broadcasts = buffers_beside_ddps(broadcast_buffers, accumulates=False)
    assert worst < 1e-6
    assert num_broadcasts == (3 if broadcast_buffers else 0)
    # After the last broadcast every rank continues with its own batches.
    assert dist.get_rank() == 0 or to_rank_0s > 0.01


@on_ranks(2)
def test_nothing_is_broadcast_in_no_sync() -> None:
    worst, _, num_broadcasts = buffers_beside_ddps(broadcast_buffers=True, accumulates=True)
    assert num_broadcasts == 3
    # DistributedDataParallel broadcasts before the first forward in no_sync, and not before the synchronized one. That
    # makes no difference to rank 0, whose statistics all ranks get.
    assert worst < 1e-6 if dist.get_rank() == 0 else worst > 0.01


@pytest.mark.parametrize("init_sync", [True, False])
@on_ranks(2)
def test_parameters_and_buffers_come_from_rank_0_at_construction(init_sync: bool) -> None:
    own = 1.0 + dist.get_rank()
    model = with_buffers()
    for tensor in [*model.parameters(), *model.buffers()]:
        nn.init.constant_(tensor, own)
    ddp_compile(model, backend="eager", init_sync=init_sync, parameters_to_ignore=["2.running_mean"])
    seen = {name: float(tensor.flatten()[0]) for name, tensor in model.state_dict().items()}
    assert seen.pop("2.running_mean") == own
    assert set(seen.values()) == {1.0 if init_sync else own}


@on_ranks(2)
def test_an_ignored_parameter_keeps_this_ranks_gradient() -> None:
    model, plain = beside_plain(small_mlp, parameters_to_ignore=(name for name in ["layers.1.weight"]))
    for each in (model, plain):
        loss_of(each(own_batch(0))).backward()
    assert torch.equal(model.layers[1].weight.grad, plain.layers[1].weight.grad)
    average(plain)
    assert relative_difference(model.layers[0].weight.grad, plain.layers[0].weight.grad) < 1e-6


@pytest.mark.parametrize("with_mesh", [True, False])
@on_ranks(3)
def test_the_mean_is_over_the_group_or_mesh_that_is_given(with_mesh: bool) -> None:
    if with_mesh:
        settings: dict[str, Any] = {"device_mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    else:
        settings = {"process_group": dist.new_group([0, 2])}
        if dist.get_rank() == 1:
            return
    assert largest(train_beside(pair(**settings), width=WIDTH)) < 1e-6


@on_ranks(2)
def test_autograd_grad_gives_this_ranks_gradients() -> None:
    """And the backward that follows is reduced as usual."""
    ours, theirs = pair()
    plain, x = seeded(small_mlp), own_batch(0)
    loss = loss_of(ours(x))
    local = torch.autograd.grad(loss, list(ours.parameters()), retain_graph=True)
    assert all(map(torch.equal, local, torch.autograd.grad(loss_of(plain(x)), list(plain.parameters()))))
    loss.backward()
    loss_of(theirs(x)).backward()
    assert difference(ours, theirs) == 0.0


@on_ranks(2)
def test_zero_redundancy_optimizer() -> None:
    models = pair()
    optimizers = [ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01) for model in models]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model(own_batch(step))).backward()
            optimizer.step()
        assert torch.equal(*map(flat_of, models))


@on_ranks(2)
def test_frozen_parameters_are_not_sent() -> None:
    def make() -> nn.Module:
        model = small_mlp()
        model.layers[1].requires_grad_(False)
        return model

    models = pair(make)
    assert train_beside(models, width=WIDTH) == [0.0] * 3
    sent = [gradient.fqn for bucket in models[0].bucket_plan.buckets for gradient in bucket.gradients]
    assert sorted(sent) == ["layers.0.bias", "layers.0.weight", "layers.2.bias", "layers.2.weight"]


@on_ranks(2)
def test_a_deep_copy_is_not_reduced() -> None:
    """As one for a moving average of the weights."""
    model = ddp_compile(small_mlp(), backend="aot_eager")
    copied = copy.deepcopy(model)
    if dist.get_rank() == 0:
        loss_of(copied(own_batch(0))).backward()  # alone, and no rank waits
    loss_of(model(own_batch(0))).backward()
    assert type(copied) is Mlp


# Averages of parameters: over steps in a second model, and over ranks.


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))


def are_equal(ours: nn.Module, theirs: nn.Module) -> bool:
    left, right = [*ours.parameters(), *ours.buffers()], [*theirs.parameters(), *theirs.buffers()]
    return len(left) == len(right) and all(map(torch.equal, left, right))


@on_ranks(2)
def test_a_model_averaged_over_steps_is_ddps() -> None:
    models = pair(with_batch_norm)
    settings: dict[str, Any] = {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True}
    averages = [[AveragedModel(each, **given) for each in models] for given in ({}, settings)]
    assert type(averages[0][0].module) is nn.Sequential  # neither replicated nor compiled
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
    for step in range(5):
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model(own_batch(step))).backward()
            optimizer.step()
            for kind in averages:
                kind[i].update_parameters(model)
        for ours, theirs in averages:
            assert are_equal(ours.module, theirs.module.module), step
        if step == 2:  # a copy is a module of its own: what it is used for changes nothing of the training
            own = [kind[0] for kind in averages]
            assert all(torch.isfinite(each.eval()(own_batch(9))).all() for each in own)
            own[0].module(own_batch(9)).sum().backward()
    for ours, theirs in averages:
        for each in (ours, theirs):
            update_bn([own_batch(20), own_batch(21)], each)
        assert torch.equal(ours.eval()(own_batch(30)), theirs.eval()(own_batch(30)))
    again = ddp_compile(copy.deepcopy(averages[1][0].module), backend="aot_eager")  # averages may be trained on
    again(own_batch(40)).sum().backward()
    assert all(parameter.grad is not None for parameter in again.parameters())


@pytest.mark.parametrize("averager", [PeriodicModelAverager, HierarchicalModelAverager])
@on_ranks(2)
def test_models_averaged_over_ranks_are_ddps(averager: Callable[..., Any]) -> None:
    period: Any = {"period": 2} if averager is PeriodicModelAverager else {"period_group_size_dict": {2: 2}}
    models = pair(with_batch_norm)
    optimizers = []
    for model in models:
        state = PostLocalSGDState(process_group=None, subgroup=dist.new_subgroups(1)[0], start_localSGD_iter=2)
        model.register_comm_hook(state, post_localSGD_hook)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizers.append(PostLocalSGDOptimizer(inner, averager(**period, warmup_steps=2)))
    drifted = False
    for step in range(7):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model(own_batch(step))).backward()
            optimizer.step()
        assert are_equal(models[0], models[1].module), step
        drifted = drifted or not is_same_everywhere(flat_of(models[0]))
    assert drifted


# The first example of DistributedDataParallel's own notes, with ddp_compile in its place: spawn, one layer, SGD.

SPLITS = ("forward", "backward")


def example(split: str) -> dict[str, Tensor]:
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(10, 10)
    ddp_model = ddp_compile(model, split=split, backend="aot_eager")
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001)

    outputs = ddp_model(torch.randn(20, 10))
    labels = torch.randn(20, 10)
    loss_fn(outputs, labels).backward()
    optimizer.step()
    return ddp_model.state_dict()


def run_rank(rank: int, world_size: int, directory: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    for split in SPLITS:
        torch.save(example(split), f"{directory}/rank_{rank}_{split}.pt")
    dist.destroy_process_group()


# As the example starts them, and as copies of a process that has imported torch, which are there at once.
@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.long), "forkserver"])
def test_spawned_example_ends_with_the_same_weights_on_every_rank(method: str, tmp_path: Path) -> None:
    context_of_copies()
    mp.start_processes(run_rank, (2, str(tmp_path)), 2, start_method=method)
    torch.manual_seed(0)
    untrained = nn.Linear(10, 10).state_dict()
    for split in SPLITS:
        first, second = (torch.load(tmp_path / f"rank_{rank}_{split}.pt") for rank in range(2))
        assert list(first) == ["weight", "bias"]
        for name, trained in first.items():
            assert torch.equal(trained, second[name])
            assert not torch.equal(trained, untrained[name])
