"""Values that share memory, across cuts and among outputs: nothing may differ from eager code.

If plain torch.compile differs from eager code, in one graph and with the same backend, we may differ too. It does in
these cases: a view made under ``no_grad`` gets a history when it is returned; hooks and custom backwards of views are
lost if the view and its base are both returned; and in ``y = h.t(); return y, y.detach()`` the second output is wrong.
Whether a single output is a view (``_base``) may differ, since that shows nothing.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from alias_models import OTHERS, SOURCES, VIEWS, WIDTH, SharedMemory, scalar_of
from in_ci import only
from torch import Tensor, nn

from ddp_compile import ddp_compile

pytestmark = pytest.mark.usefixtures("single_rank_group")


class Observed(NamedTuple):
    """All that a caller can see of a step: tensors and facts, by name."""

    tensors: dict[str, Tensor | None]
    facts: dict[str, Any]


def base(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


def observe(module: nn.Module, call: Callable[..., Any], input_requires_grad: bool) -> Observed:
    """One forward and backward of ``module``, called as ``call``."""
    torch.manual_seed(1)
    x = torch.randn(WIDTH, WIDTH).requires_grad_(input_requires_grad)
    outputs = call(x)
    inputs = {"input": x, **dict(module.named_parameters()), **dict(module.named_buffers())}
    named = {**inputs, **{f"output {i}": output for i, output in enumerate(outputs)}}
    facts: dict[str, Any] = {}
    for i, output in enumerate(outputs):
        facts[f"history of output {i}"] = output.grad_fn is not None
        facts[f"output {i} requires grad"] = output.requires_grad
        facts[f"layout of output {i}"] = (output.shape, output.stride(), output.storage_offset(), output.dtype)
        for name, other in named.items():
            shares = output.untyped_storage()._cdata == other.untyped_storage()._cdata
            facts[f"output {i} and {name}"] = (shares, output is other)
            # What is written into one of them changes the gradient of the other, which autograd has to know.
            has_gradients = output.requires_grad or other.requires_grad
            facts[f"output {i} and {name} have one base"] = shares and has_gradients and base(output) is base(other)
    tensors = {name: tensor.detach().clone() for name, tensor in named.items() if name.startswith("output")}
    torch.stack([scalar_of(output) for output in outputs if output.requires_grad]).sum().backward()
    return Observed({**tensors, **{f"gradient of {name}": tensor.grad for name, tensor in inputs.items()}}, facts)


def differences(ours: Observed, theirs: Observed) -> set[str]:
    wrong = {name for name, fact in theirs.facts.items() if ours.facts[name] != fact}
    for name, theirs_ in theirs.tensors.items():
        ours_ = ours.tensors[name]
        if ours_ is None or theirs_ is None:
            # AOTAutograd returns zeros for inputs that only nodes without a history use.
            wrong |= {name for tensor in (ours_, theirs_) if tensor is not None and tensor.any()}
        elif ours_.shape != theirs_.shape or not torch.allclose(ours_, theirs_, rtol=1e-6, atol=1e-6):
            wrong.add(name)
    return wrong


def assert_as_right_as_torch_compile(*model: Any, split: str = "forward", least_partitions: int = 1) -> None:
    torch.manual_seed(0)
    module, from_input = SharedMemory(*model), model[0] == "input"
    eager = copy.deepcopy(module)
    expected = observe(eager, eager, from_input)
    ours = ddp_compile(copy.deepcopy(module), split=split, bucket_cap_mb=1e-5, backend="aot_eager")
    torch._dynamo.reset()
    seen = observe(ours, ours, from_input)
    state = ours._ddp_compile_state
    assert sum(len(report.parts) for report in state.backend.reports) >= least_partitions, ours.explain()
    if wrong := differences(seen, expected):
        torch._dynamo.reset()
        whole = torch.compile(module, backend="aot_eager")
        theirs = observe(module, whole, from_input)
        wrong -= differences(theirs, expected)
    assert wrong == set(), model


# Each view once with gradients and once without, spread over what it may be a view of: all pairs take minutes.
@pytest.mark.parametrize(
    ("source", "with_gradients"), only([("layer", False)], [(s, g) for g in (True, False) for s in SOURCES])
)
def test_views_across_cuts(source: str, with_gradients: bool) -> None:
    operations = dict.fromkeys(["detach", *list(VIEWS)[SOURCES.index(source) :: len(SOURCES)]])
    assert_as_right_as_torch_compile(source, with_gradients, list(operations), True, least_partitions=3)


def test_as_strided_under_no_grad() -> None:
    assert_as_right_as_torch_compile("input", False, ["as_strided"], False)


@pytest.mark.long
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("operation", [*VIEWS, *OTHERS])
def test_each_operation_alone(operation: str, source: str, split: str) -> None:
    """Each pair of the three settings occurs, which is half of all combinations."""
    for with_gradients in (True, False):
        returned = with_gradients is (split == "forward")
        assert_as_right_as_torch_compile(source, with_gradients, [operation], returned, split=split)
