"""Models whose graphs are hard to cut: split at every layer, they must train exactly as they do eagerly.

One rank is enough: graphs are cut for any world size, and with one rank the gradients must equal the plain module's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_compile import ddp_compile

WIDTH = 8


class Layers(nn.Module):
    """Four linear layers; subclasses say what happens between them."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))


class Plain(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class KeywordAndListParameters(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.linear(x, bias=layer.bias, weight=layer.weight)
            x = torch.cat([x, layer.weight.sum(0, keepdim=True)]).tanh()
        return x


class CastAtTheTop(Layers):
    def forward(self, x: Tensor) -> Tensor:
        weights = [layer.weight.double().t() for layer in self.layers]
        x = x.double()
        for weight, layer in zip(weights, self.layers, strict=True):
            x = torch.tanh(x @ weight + layer.bias)
        return x


class VaryingFloat(Layers):
    def forward(self, x: Tensor, factor: float) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i == 1:
                x = x * factor
            if i == 2:
                x = x + factor
        return x


class AutocastInside(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in self.layers[:3]:
                x = torch.tanh(layer(x))
            with torch.autocast("cpu", enabled=False):
                x = self.layers[3](x.float())
        return x


class NoGradInside(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = torch.tanh(layer(x))
            with torch.no_grad():
                scale = y.abs().mean()
                scale = scale + layer.weight.abs().mean()
            x = y / (1 + scale)
        return x


class InferenceModeInside(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with torch.inference_mode(False):
                x = torch.tanh(layer(x))
        return x


class CheckpointedBlocks(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=False)
        return x


class CheckpointedWhole(Layers):
    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


class InplaceActivation(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x), inplace=True)
        return x


class InplaceResidual(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        for layer in self.layers:
            x += torch.tanh(layer(x.clone()))
        return x


class InplaceSlices(Layers):
    """Every write goes into a part of one tensor that stays in use, so no cut is possible."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        for layer in self.layers:
            x[:2] += torch.tanh(layer(x.clone()))[:2]
        return x


class InplaceUnderOtherNames(Layers):
    """In-place sums that must stay in place: a view looks on, the history is kept, or the dtype is."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        seen = h.view(-1)
        h += torch.ones_like(h)
        y = self.layers[1](torch.tanh(seen).view_as(h))
        with torch.no_grad():
            y *= 2.0
        z = self.layers[2](y).to(torch.bfloat16)
        z += y.detach()
        return self.layers[3](z.float())


class AugmentedMatmul(Layers):
    """``@=`` is written like an in-place operation, but tensors have none."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(x + layer.bias)
            x @= layer.weight
        return x


class ConjugatedView(Layers):
    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(self.layers[0](x), self.layers[1](x))
        conjugated = z.conj()
        z += 1.0
        y = (conjugated * z).real
        return self.layers[3](self.layers[2](torch.tanh(y)))


class KeywordOrder(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(x)
            F.leaky_relu(negative_slope=0.1, input=h, inplace=True)
            x = h + layer.weight.sum()
        return x


class RingInCheckpoints(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ring", torch.zeros(4, WIDTH))

    def body(self, layer: nn.Module, i: int, x: Tensor) -> Tensor:
        x = torch.tanh(layer(x)) + self.ring[i]
        self.ring[i].copy_(x.detach()[0] * 0 + 1)
        return x

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = checkpoint(self.body, layer, i, x, use_reentrant=False)
        return x


class WriteThroughView(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        first = x[:1]
        y = torch.tanh(self.layers[1](x.detach().clone()))
        z = torch.tanh(self.layers[2](y))
        first.mul_(2.0)
        return self.layers[3](z + x)


class BufferWrites(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("ring", torch.zeros(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            self.count.add_(1)
            self.ring[i].copy_(x.detach()[0])
        return x + self.count + self.ring.sum()


class BufferReadThenWritten(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x)) + self.scale
        x = torch.tanh(self.layers[1](x)) + self.scale
        x = torch.tanh(self.layers[2](x))
        self.scale.mul_(1.5)
        return self.layers[3](x) * self.scale


class InputWritten(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        for layer in self.layers:
            y = torch.tanh(layer(y))
        x.mul_(2.0)
        return y


class NestedOutput(Layers):
    def forward(self, x: Tensor) -> dict[str, Any]:
        outputs = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            outputs.append(x.transpose(0, 1))
        return {"views": outputs, "nothing": None, "rows": x.shape[0], "last": (x, x[1:])}


class SharedLayer(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.layers, self.layers[0]]:
            x = torch.tanh(layer(x))
        return x


class TiedWeights(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class SplitAndCat(Layers):
    def forward(self, x: Tensor) -> Tensor:
        left, right = self.layers[0](x).chunk(2, dim=1)
        x = self.layers[1](torch.cat([right, left], dim=1))
        parts = x.split([3, 5], dim=1)
        y = self.layers[2](x)
        y = y[:, :3] * parts[0]
        return self.layers[3](torch.cat([y, parts[1]], dim=1))


class UnusedParameter(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.linear(x, layer.weight) + layer.bias.detach().sum()
        return x


class DataDependentShape(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        rows = (x.detach().sum(1) > -1e9).nonzero().squeeze(1)
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x[rows]))
            rows = rows * 1
        return x


class ScalarFromTensor(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        factor = x.detach().abs().max().item()
        x = torch.tanh(self.layers[1](x)) / (1 + factor)
        x = torch.tanh(self.layers[2](x))
        return self.layers[3](x)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * grad * x  # not the true derivative, so that a lost custom backward shows


class CustomFunction(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Square.apply(torch.tanh(layer(x)))
        return x


class GraphBreaks(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))
        torch._dynamo.graph_break()
        return torch.tanh(self.layers[3](torch.tanh(self.layers[2](x))))


class Conditional(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cond(x.sum() > 0, lambda y: torch.tanh(y), lambda y: torch.sin(y), (layer(x),))
        return x


class PartialOutput(Layers):
    """The last layer's output is not part of the loss."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers[:3]:
            x = torch.tanh(layer(x))
        return x, self.layers[3](x).detach()


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else WIDTH, WIDTH, 3, padding=1, bias=False) for i in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)), inplace=True)
        return x.mean((2, 3))


class WriteThroughViewOfASlice(Layers):
    """The views are made right before the writes, where a cut would like to be."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        flat = x.view(-1)
        flat += self.layers[1](torch.ones_like(x)).view(-1)
        x = self.layers[2](x)
        x[:, :2].mul_(2.0)
        return self.layers[3](x)


class HookOnAGradient(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        y = torch.tanh(self.layers[1](h))
        h.register_hook(lambda gradient: 2 * gradient)
        y = torch.tanh(self.layers[2](y))
        return self.layers[3](y * h)


class FunctionTransforms(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.vmap(lambda row, layer=layer: torch.tanh(layer(row)))(x)
        return x + torch.func.grad(lambda y: y.sin().sum())(x.detach())


class NestedRegions(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = region(layer, x)
        return x


@torch.compiler.nested_compile_region
def region(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.tanh(layer(x))


class SizesAcrossLayers(Layers):
    def forward(self, x: Tensor) -> Tensor:
        rows, columns = x.size()
        half = rows // 2
        for layer in self.layers:
            x = torch.tanh(layer(x)).reshape(rows * columns).view(rows, columns)
        return x[:half] * half


class SharedNormInCheckpoints(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def body(self, layer: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(layer(x)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self.body, layer, x, use_reentrant=False)
            self.calls += 1
        return x


class KeywordInplaceActivations(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            F.relu(input=y, inplace=True)
            x = torch.relu_(input=y + 0.1)
        return x


def vectors(rows: int = 5) -> Callable[[int], tuple[Any, ...]]:
    return lambda step: (torch.randn(rows, WIDTH),)


def images(step: int) -> tuple[Any, ...]:
    return (torch.randn(2, 3, 6, 6),)


# Model, inputs for a step, least number of partitions that the cuts have to give over all frames.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]], int]] = {
    "plain": (Plain, vectors(), 4),
    "sequential": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)), vectors(), 2),
    "keyword_and_list_parameters": (KeywordAndListParameters, vectors(), 4),
    "cast_at_the_top": (CastAtTheTop, vectors(), 4),
    "varying_float": (VaryingFloat, lambda step: (torch.randn(5, WIDTH), 0.5 + step), 3),
    "autocast_inside": (AutocastInside, vectors(), 4),
    "no_grad_inside": (NoGradInside, vectors(), 4),
    "inference_mode_inside": (InferenceModeInside, vectors(), 4),
    "checkpointed_blocks": (CheckpointedBlocks, vectors(), 4),
    "checkpointed_whole": (CheckpointedWhole, vectors(), 1),
    "inplace_activation": (InplaceActivation, vectors(), 4),
    "inplace_residual": (InplaceResidual, vectors(), 4),
    "augmented_matmul": (AugmentedMatmul, vectors(), 4),
    "conjugated_view": (ConjugatedView, vectors(), 2),
    "keyword_order": (KeywordOrder, vectors(), 3),
    "ring_in_checkpoints": (RingInCheckpoints, vectors(), 1),
    "inplace_slices": (InplaceSlices, vectors(), 1),
    "inplace_under_other_names": (InplaceUnderOtherNames, vectors(), 1),
    "write_through_view": (WriteThroughView, vectors(), 2),
    "buffer_writes": (BufferWrites, vectors(), 4),
    "buffer_read_then_written": (BufferReadThenWritten, vectors(), 2),
    "input_written": (InputWritten, vectors(), 1),
    "nested_output": (NestedOutput, vectors(), 4),
    "shared_layer": (SharedLayer, vectors(), 4),
    "tied_weights": (TiedWeights, vectors(), 3),
    "split_and_cat": (SplitAndCat, vectors(), 3),
    "dynamic_rows": (Plain, lambda step: (torch.randn(3 + 2 * step, WIDTH),), 8),
    "data_dependent_shape": (DataDependentShape, vectors(), 3),
    "scalar_from_tensor": (ScalarFromTensor, vectors(), 3),
    "custom_function": (CustomFunction, vectors(), 4),
    "graph_breaks": (GraphBreaks, vectors(), 4),
    "conditional": (Conditional, vectors(), 4),
    "write_through_view_of_a_slice": (WriteThroughViewOfASlice, vectors(), 2),
    "hook_on_a_gradient": (HookOnAGradient, vectors(), 2),
    "function_transforms": (FunctionTransforms, vectors(), 4),
    "nested_regions": (NestedRegions, vectors(), 4),
    "sizes_across_layers": (SizesAcrossLayers, lambda step: (torch.randn(4 + 2 * step, WIDTH),), 8),
    "shared_norm_in_checkpoints": (SharedNormInCheckpoints, vectors(), 4),
    "keyword_inplace_activations": (KeywordInplaceActivations, vectors(), 4),
    "conv_net": (ConvNet, images, 3),
    "conv_net_channels_last": (
        lambda: ConvNet().to(memory_format=torch.channels_last),
        lambda step: (images(step)[0].to(memory_format=torch.channels_last),),
        3,
    ),
}


def tensor_sum(output: Any) -> Tensor:
    floats = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([leaf.float().square().mean() for leaf in floats]).sum()


def assert_trains_alike(
    model: nn.Module, reference: nn.Module, inputs: Callable[[int], tuple[Any, ...]], tolerance: float, steps: int = 4
) -> None:
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(steps):
        torch.manual_seed(step)
        args = inputs(step)
        ours, theirs = copy.deepcopy(args), copy.deepcopy(args)
        outputs = [model(*ours), reference(*theirs)]
        for optimizer, output in zip(optimizers, outputs, strict=True):
            optimizer.zero_grad()
            tensor_sum(output).backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert_close(f"gradient of {name}, step {step}", p.grad, q.grad, tolerance)
        for (name, p), q in zip(model.named_buffers(), reference.buffers(), strict=True):
            assert_close(f"buffer {name}, step {step}", p, q, tolerance)
        pytree.tree_map(lambda a, b: assert_close("output", a, b, tolerance), *outputs)
        pytree.tree_map(lambda a, b: assert_close("input", a, b, tolerance), ours, theirs)
        for optimizer in optimizers:
            optimizer.step()


def assert_close(what: str, ours: Any, theirs: Any, tolerance: float) -> None:
    if not isinstance(ours, Tensor):
        assert ours == theirs, what
        return
    assert isinstance(theirs, Tensor) and ours.shape == theirs.shape and ours.stride() == theirs.stride(), what
    difference = (ours.double() - theirs.double()).norm().item()
    assert difference <= tolerance * theirs.double().norm().item(), f"{what} differs by {difference}"


@pytest.mark.parametrize("name", CASES)
def test_a_split_model_trains_as_the_eager_one(name: str, single_rank_group: None) -> None:
    make, inputs, least_partitions = CASES[name]
    torch.manual_seed(0)
    reference = make()
    capture = name in ("scalar_from_tensor", "data_dependent_shape")
    with torch._dynamo.config.patch(capture_scalar_outputs=capture, capture_dynamic_output_shape_ops=capture):
        model = ddp_compile(copy.deepcopy(reference), bucket_cap_mb=1e-5, backend="aot_eager")
        # Autocast and double precision round differently where ops are regrouped; the others are bit for bit.
        assert_trains_alike(model, reference, inputs, tolerance=1e-2 if "autocast" in name else 1e-6)
    reports = model._ddp_compile_state.backend.reports
    assert sum(report.num_partitions for report in reports) >= least_partitions, model.explain()


INDUCTOR_CASES = [
    "buffer_writes",
    "conv_net_channels_last",
    "nested_output",
    "nested_regions",
    "no_grad_inside",
    "sizes_across_layers",
]


@pytest.mark.inductor
@pytest.mark.parametrize("name", INDUCTOR_CASES)
def test_a_split_model_trains_as_the_eager_one_under_inductor(name: str, single_rank_group: None) -> None:
    make, inputs, _ = CASES[name]
    torch.manual_seed(0)
    reference = make()
    model = ddp_compile(copy.deepcopy(reference), bucket_cap_mb=1e-5)
    assert_trains_alike(model, reference, inputs, tolerance=1e-5, steps=2)


def test_a_model_without_a_cut_says_so_in_explain(single_rank_group: None) -> None:
    torch.manual_seed(0)
    model = ddp_compile(InplaceSlices(), bucket_cap_mb=1e-5, backend="eager")
    tensor_sum(model(torch.randn(5, WIDTH))).backward()
    assert "writes into" in model.explain()


def test_whole_graph_is_one_partition_with_split_none(single_rank_group: None) -> None:
    model = ddp_compile(Plain(), bucket_cap_mb=1e-5, backend="eager", split="none")
    tensor_sum(model(torch.randn(5, WIDTH))).backward()
    (report,) = model._ddp_compile_state.backend.reports
    assert report.num_buckets == len(model.bucket_plan.buckets) == 8
    assert report.num_partitions == 1
