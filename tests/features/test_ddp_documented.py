"""What DistributedDataParallel documents and no other file tests: each compared with it or with its documentation."""

from collections.abc import Callable
from typing import Any

import beside
import pytest
import torch
import torch.distributed as dist
from beside import average, beside_plain, difference, flat_of, is_same_everywhere, train_beside
from models import Mlp, largest, loss_of, relative_difference
from rank_pool import on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import GradientArrivalError, ddp_compile

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


@on_ranks(2)
def test_layout_of_gradients() -> None:
    ours, theirs = pair(Layouts, gradient_as_bucket_view=True)
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


@on_ranks(2)
def test_complex_parameters() -> None:
    models = pair(Complex)
    for set_to_none in (True, False):
        assert largest(train_beside(models, num_steps=2, width=WIDTH, set_to_none=set_to_none)) < 1e-6


@on_ranks(2)
def test_double_backward_by_autograd_grad() -> None:
    def step_of(model: nn.Module, x: Tensor, step: int) -> None:
        x.requires_grad_()
        loss = loss_of(model(x))
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()

    # AOTAutograd's backwards cannot be differentiated.
    assert train_beside(pair(backend="eager"), step_of, 2, width=WIDTH) == [0.0, 0.0]


@on_ranks(2)
def test_create_graph_is_refused() -> None:
    loss = loss_of(ddp_compile(small_mlp(), backend="aot_eager")(own_batch(0)))
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


def ignoring_mlp() -> Mlp:
    net = small_mlp()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["layers.1.weight"])
    return net


@pytest.mark.parametrize("by_ddp", [False, True])
@on_ranks(2)
def test_parameters_to_ignore(by_ddp: bool) -> None:
    if by_ddp:
        model, plain = beside_plain(ignoring_mlp)
    else:
        model, plain = beside_plain(small_mlp, parameters_to_ignore=(name for name in ["layers.1.weight"]))
    for each in (model, plain):
        loss_of(each(own_batch(0))).backward()
    assert torch.equal(model.layers[1].weight.grad, plain.layers[1].weight.grad)
    average(plain)
    assert relative_difference(model.layers[0].weight.grad, plain.layers[0].weight.grad) < 1e-6


@pytest.mark.parametrize("averager", [PeriodicModelAverager, HierarchicalModelAverager])
@on_ranks(2)
def test_model_averagers(averager: Callable[..., Any]) -> None:
    period: Any = {"period": 2} if averager is PeriodicModelAverager else {"period_group_size_dict": {2: 2}}
    models = pair()
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
        assert torch.equal(*map(flat_of, models)), step
        drifted = drifted or not is_same_everywhere(flat_of(models[0]))
    assert drifted
