"""Models whose graphs are hard to cut: split at every layer, they must train exactly as they do eagerly.

One rank is enough: graphs are cut for any world size, and with one rank the gradients must equal the plain module's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

import pytest
import split_models as models
import torch
import torch.utils._pytree as pytree
from split_models import WIDTH
from torch import Tensor, nn

from ddp_compile import ddp_compile
from ddp_compile.comm_hooks import allreduce_hook

pytestmark = pytest.mark.usefixtures("single_rank_group")


def images(step: int) -> tuple[Any, ...]:
    return (torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last),)


# Model, and the least number of partitions that the cuts have to give over all graphs. The fuzzer trains what its
# blocks are made of with every split; plain writes and casts are in tests/unit.
CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "keyword_and_list_parameters": (models.KeywordAndListParameters, 4),
    "autocast_inside": (models.AutocastInside, 4),
    "inference_mode_inside": (models.InferenceModeInside, 4),
    "checkpointed_blocks": (models.CheckpointedBlocks, 4),
    "checkpointed_whole": (models.CheckpointedWhole, 1),
    "conjugated_view": (models.ConjugatedView, 2),
    "inplace_under_other_names": (models.InplaceUnderOtherNames, 1),
    "shared_layer": (models.SharedLayer, 4),
    "tied_weights": (models.TiedWeights, 3),
    "data_dependent_shape": (models.DataDependentShape, 3),
    "scalar_from_tensor": (models.ScalarFromTensor, 3),
    "conditional": (models.Conditional, 4),
    "hook_on_a_gradient": (models.HookOnAGradient, 2),
    "function_transforms": (models.FunctionTransforms, 4),
    "nested_regions": (models.NestedRegions, 4),
    "sizes_across_layers": (models.SizesAcrossLayers, 8),
    "conv_net_channels_last": (lambda: models.ConvNet().to(memory_format=torch.channels_last), 3),
}
# Other inputs than five rows of `WIDTH`.
INPUTS: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "sizes_across_layers": lambda step: (torch.randn(4 + 2 * step, WIDTH),),
    "conv_net_channels_last": images,
}


def rows(step: int) -> tuple[Any, ...]:
    return (torch.randn(5, WIDTH),)


def tensor_sum(output: Any) -> Tensor:
    floats = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([leaf.float().square().mean() for leaf in floats]).sum()


def assert_trains_alike(
    model: nn.Module, reference: nn.Module, inputs: Callable[[int], tuple[Any, ...]], tolerance: float, steps: int = 3
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


def make_split(module: nn.Module, split: str, backend: str) -> nn.Module:
    model = ddp_compile(module, bucket_cap_mb=1e-5, split=split, backend=backend)
    if split == "backward":
        # With a hook buckets are launched on a single rank as well, and so inside the backward.
        model.register_comm_hook(None, allreduce_hook)
    return model


# In CI the backward split trains those whose graph concerns it, and the forward split the others, except those that
# other tests train there as well: convolutions, regions and tied weights, for example.
BACKWARD_CASES_IN_CI = {"checkpointed_whole", "function_transforms", "hook_on_a_gradient"}
LEFT_TO_OTHERS_IN_CI = {
    *("autocast_inside", "checkpointed_blocks", "conv_net_channels_last", "nested_regions"),
    *("shared_layer", "tied_weights"),
}
FORWARD_CASES_IN_CI = CASES.keys() - BACKWARD_CASES_IN_CI - LEFT_TO_OTHERS_IN_CI


def both_splits(names: Collection[str], in_ci: Collection[tuple[str, str]]) -> pytest.MarkDecorator:
    pairs = [(split, name) for split in ("forward", "backward") for name in names]
    cases = [pytest.param(*pair, marks=[] if pair in in_ci else [pytest.mark.long]) for pair in pairs]
    return pytest.mark.parametrize(("split", "name"), cases)


@both_splits(CASES, [("forward", n) for n in FORWARD_CASES_IN_CI] + [("backward", n) for n in BACKWARD_CASES_IN_CI])
def test_split_models_train(name: str, split: str) -> None:
    make, least_partitions = CASES[name]
    torch.manual_seed(0)
    reference = make()
    capture = name in ("scalar_from_tensor", "data_dependent_shape")
    with torch._dynamo.config.patch(capture_scalar_outputs=capture, capture_dynamic_output_shape_ops=capture):
        model = make_split(copy.deepcopy(reference), split, "aot_eager")
        # Autocast and double precision round differently if ops are regrouped; the others are equal bit for bit.
        tolerance = 1e-2 if "autocast" in name else 1e-6
        assert_trains_alike(model, reference, INPUTS.get(name, rows), tolerance)
    reports = model._ddp_compile_state.backend.reports
    if split == "backward":
        assert all(report.launches_in_backward for report in reports if report.num_buckets)
        assert all(report.num_partitions == 1 for report in reports)
        assert model._ddp_compile_state.reducer.early_buckets
    else:
        assert sum(report.num_partitions for report in reports) >= least_partitions, model.explain()


INDUCTOR_CASES = ["conv_net_channels_last", "nested_regions", "sizes_across_layers"]


# In CI they are left to aot_eager, and inductor to `test_gradient_parity`.
@pytest.mark.inductor
@both_splits(INDUCTOR_CASES, [])
def test_split_models_under_inductor(name: str, split: str) -> None:
    torch.manual_seed(0)
    reference = CASES[name][0]()
    model = make_split(copy.deepcopy(reference), split, "inductor")
    assert_trains_alike(model, reference, INPUTS.get(name, rows), tolerance=1e-5)
    assert model._ddp_compile_state.compiler.failures == []
    if split == "backward":
        assert model._ddp_compile_state.reducer.early_buckets


def test_split_none() -> None:
    model = ddp_compile(models.Plain(), bucket_cap_mb=1e-5, backend="eager", split="none")
    tensor_sum(model(torch.randn(5, WIDTH))).backward()
    (report,) = model._ddp_compile_state.backend.reports
    assert report.num_buckets == len(model.bucket_plan.buckets) == 8
    assert report.num_partitions == 1
