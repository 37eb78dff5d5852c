"""``model.clip_grad_norm_``: norm and gradients are those of ``torch.nn.utils.clip_grad_norm_`` on copies."""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from in_ci import only
from rank_pool import on_ranks
from torch import Tensor, nn

from ddp_compile import ReductionError, ddp_compile, shard_optimizer
from ddp_compile.algorithms import ByteGrad, LocalSGD
from ddp_compile.torch_internals import takes_grad_scale

WIDTH, NUM_LAYERS = 9, 4


class Net(nn.Module):
    """Gradients of odd sizes, which leave gaps in flat buffers, and some that come in every second step."""

    def __init__(self, dtypes: tuple[torch.dtype, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).to(dtypes[i % len(dtypes)]) for i in range(NUM_LAYERS))
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.ignored = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        x = self.table(x) * self.ignored
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return self.sometimes(x.float()) if step % 2 == 0 else x


class Way(NamedTuple):
    settings: Mapping[str, Any] = MappingProxyType({})
    max_norm: float = 0.01
    norm_type: float = 2.0
    num_local: int = 0  #: backwards inside ``no_sync`` before the one that is reduced
    num_reduced: int = 1
    change: Callable[[Any], object] = lambda model: None  #: gradients before they are clipped
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    tolerance: float = 1e-6


def halve(model: Any) -> None:
    model.layers[0].weight.grad.mul_(0.5)


def unscale(model: Any) -> None:
    """As ``GradScaler.unscale_`` does, by an operator that leaves the gradients' versions as they were."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, torch.zeros(1), torch.tensor(1 / 64))


def give_other_memory(model: Any) -> None:
    gradient = model.layers[0].weight.grad
    gradient.data = gradient.data * 3


WAYS = {
    "largest value": Way(norm_type=math.inf),
    "order 1": Way(norm_type=1.0),
    "nothing to clip": Way(max_norm=1e6),
    "accumulation": Way(num_local=2),
    "two reductions": Way(num_reduced=2),
    "byte_grad": Way({"algorithm": ByteGrad()}),
    "local_sgd": Way({"algorithm": LocalSGD(period=2)}),
    "changed": Way(change=halve),
    "unscaled": Way(change=unscale),
    "other memory": Way(change=give_other_memory),
    "two dtypes": Way(dtypes=(torch.float32, torch.float64), tolerance=1e-6),
    "bfloat16": Way(dtypes=(torch.bfloat16,), tolerance=2e-2),
    "complex": Way(dtypes=(torch.complex64,), tolerance=1e-6),
}


def clipped_copies(model: nn.Module, way: Way) -> tuple[Tensor, dict[str, Tensor]]:
    copies = {name: nn.Parameter(torch.empty_like(p)) for name, p in model.named_parameters() if p.grad is not None}
    for name, copied in copies.items():
        copied.grad = model.get_parameter(name).grad.clone()  # type: ignore[union-attr]
    total = nn.utils.clip_grad_norm_(copies.values(), way.max_norm, way.norm_type)
    return total, {name: copied.grad for name, copied in copies.items() if copied.grad is not None}


@pytest.mark.parametrize("name", only(["accumulation", "changed", "unscaled", "other memory", "two dtypes"], WAYS))
@on_ranks(2)
def test_as_torch_does(name: str) -> None:
    way = WAYS[name]
    settings = {"backend": "aot_eager", "bucket_cap_mb": 8e-4, "find_unused_parameters": True, **way.settings}
    net: Any = Net(way.dtypes)
    if net.layers[0].weight.is_complex():
        net.sometimes = nn.Identity()
    net._ddp_params_and_buffers_to_ignore = ["ignored"]
    model: Any = ddp_compile(net, **settings)
    for step in range(4):
        model.zero_grad(set_to_none=step % 2 == 0)
        for backward in range(way.num_local + way.num_reduced):
            torch.manual_seed(100 * step + 10 * backward + dist.get_rank())
            with model.no_sync() if backward < way.num_local else nullcontext():
                model(torch.randint(11, (4,)), step).abs().square().sum().backward()
        way.change(model)
        total, expected = clipped_copies(model, way)
        found = model.clip_grad_norm_(way.max_norm, way.norm_type)
        torch.testing.assert_close(found, total, rtol=way.tolerance, atol=0)
        for parameter, gradient in expected.items():
            given = model.get_parameter(parameter).grad
            torch.testing.assert_close(given, gradient, rtol=way.tolerance, atol=1e-7)


FUSED = [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad]  # the last one takes no grad_scale in torch 2.11


@pytest.mark.parametrize("kind", [k for k in FUSED if takes_grad_scale(k([torch.ones(1)], fused=True))])
@pytest.mark.parametrize("scale", [None, 8.0])
@on_ranks(2)
def test_left_to_a_fused_optimizer(kind: Any, scale: float | None) -> None:
    """Parameters and ``.grad`` after its steps are those of gradients that were clipped before."""
    models: list[Any] = [ddp_compile(Net((torch.float32,)), backend="eager", bucket_cap_mb=8e-4) for _ in range(2)]
    optimizers: list[Any] = [kind(model.parameters(), lr=1e-3, fused=True) for model in models]
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None) for _ in models]
    for step in range(4):
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            torch.manual_seed(10 * step + dist.get_rank())
            scaler.scale(model(torch.randint(11, (4,))).square().sum()).backward()
            scaler.unscale_(optimizer)
            max_norm = 1e6 if step == 1 else 0.01
            if model is models[0]:
                model.clip_grad_norm_(max_norm)
            else:
                model.clip_grad_norm_(2 * max_norm, optimizer=optimizer)  # the last call counts
                model.clip_grad_norm_(max_norm, optimizer=optimizer)
            if step != 2:  # a step that is left out leaves nothing to the next one, which is not clipped
                scaler.step(optimizer)
            scaler.update()
            assert hasattr(optimizer, "grad_scale") == (step == 2 and model is models[1])
        for parameter, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(other, parameter)
            if step != 2:
                torch.testing.assert_close(other.grad, parameter.grad)
        for model in models:
            model.zero_grad()


@on_ranks(2)
def test_float64_is_not_left_to_a_fused_optimizer() -> None:
    """``grad_scale`` is of float32."""
    model: Any = ddp_compile(nn.Linear(4, 4).double(), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), fused=True)
    model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    model.clip_grad_norm_(0.1, optimizer=optimizer)
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    torch.testing.assert_close(norm.item(), 0.1, rtol=1e-5, atol=0)


@on_ranks(2)
def test_optimizers_that_gradients_cannot_be_left_to() -> None:
    model: Any = ddp_compile(Net((torch.float32,)), backend="eager")
    model(torch.arange(4)).sum().backward()
    own = torch.nn.Parameter(torch.ones(1))
    own.grad = torch.ones(1)
    for optimizer, said in (
        (torch.optim.SGD(model.parameters()), "class SGD that is not fused"),
        (torch.optim.SGD(model.layers.parameters(), fused=True), "does not step all gradients of the model"),
        (torch.optim.Adam([*model.parameters(), own], fused=True), "does not step all gradients of the model"),
    ):
        with pytest.raises(ValueError, match=said):
            model.clip_grad_norm_(1.0, optimizer=optimizer)
    optimizer = torch.optim.SGD(model.parameters(), fused=True)
    model.zero_grad()
    shard_optimizer(optimizer, model)
    model(torch.arange(4)).sum().backward()
    with pytest.raises(ValueError, match="leave optimizer= out"):
        model.clip_grad_norm_(1.0, optimizer=optimizer)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@on_ranks(2)
def test_ignored_parameters_beside_a_sharded_optimizer(norm_type: float) -> None:
    """They are in no bucket. Here all ranks have the same gradient of them, as if the user had reduced it."""
    trained = []
    for is_sharded in (False, True):
        net: Any = Net((torch.float32,))
        net._ddp_params_and_buffers_to_ignore = ["ignored"]
        model: Any = ddp_compile(net, backend="eager", bucket_cap_mb=8e-4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if is_sharded:
            shard_optimizer(optimizer, model)
        norms = []
        for step in range(3):
            torch.manual_seed(step)
            model(torch.randint(11, (4,))).square().sum().backward()
            net.ignored.grad.mul_(100)
            norms.append(model.clip_grad_norm_(0.1, norm_type))
            optimizer.step()
            optimizer.zero_grad()
        model.await_parameters()
        trained.append([torch.stack(norms), *(p.detach().clone() for p in model.parameters())])
    torch.testing.assert_close(*trained, rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_a_norm_that_is_not_finite() -> None:
    model: Any = ddp_compile(nn.Linear(4, 4), backend="eager")
    model(torch.full((1, 4), float("inf") if dist.get_rank() == 1 else 1.0)).sum().backward()
    with pytest.raises(RuntimeError, match=r"rank \d: the total norm of order 2.0 of the gradients is (inf|nan)"):
        model.clip_grad_norm_(1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("max_norm", [1.0, math.inf])
@on_ranks(2)
def test_a_norm_that_is_nan_ends_with_its_step(max_norm: float) -> None:
    model: Any = ddp_compile(nn.Linear(3, 3), backend="eager")  # with gaps in the flat buffer
    for step in range(3):
        model.zero_grad(set_to_none=False)
        model(torch.full((1, 3), (math.nan if max_norm == 1 else math.inf) if step == 0 else 1.0)).sum().backward()
        total = model.clip_grad_norm_(max_norm)
        assert total.isfinite() == (step > 0)
    torch.testing.assert_close(model.weight.grad, torch.full((3, 3), min(1.0, max_norm / math.sqrt(12))))


@on_ranks(2)
def test_before_finalization() -> None:
    model: Any = ddp_compile(nn.Linear(4, 4), backend="eager")
    model.require_manual_backward_finalization = True
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(ReductionError, match=r"model.clip_grad_norm_\(\) before finalize_backward\(\)"):
        model.clip_grad_norm_(1.0)
    model.finalize_backward()
    model.clip_grad_norm_(1.0)
