"""Parameters that are added, replaced or converted after ddp_compile are refused by name; allowed changes work."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize

from ddp_compile import MissingGradientError, ParametersChangedError, ddp_compile

pytestmark = pytest.mark.usefixtures("single_rank_group")


class WithAdapter(nn.Module):
    """Adds ``adapter`` to its layer's output once it has one; its last layer is frozen."""

    def __init__(self, num_breaks: int = 0) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last = nn.Linear(4, 4).requires_grad_(False)
        self.adapter: nn.Module | None = None
        self._num_breaks = num_breaks

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.layer.weight)
        for _ in range(self._num_breaks):
            torch._dynamo.graph_break()  # in a loop, so that Dynamo gives the frame up and nothing is compiled
        y = self.layer(x)
        y = y if self.adapter is None else y + self.adapter(x)
        return self.last(self.head(y))


def replicated(**settings: Any) -> Any:
    return ddp_compile(WithAdapter(), **{"backend": "eager", **settings})


def train(model: nn.Module, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        model.zero_grad()
        model(torch.randn(2, 4)).sum().backward()


def add_adapters(model: Any) -> None:
    model.requires_grad_(False)
    model.adapter = nn.Linear(4, 4)


def replace_head(model: Any) -> None:
    model.head = nn.Linear(4, 4)


def remove_layer(model: Any) -> None:
    model.layer = nn.Identity()
    model.layer.weight = torch.ones(())


def wrap_a_layer(model: Any) -> None:
    model.head = DistributedDataParallel(model.head)


def reshape(model: Any) -> None:
    model.head.weight.data, model.head.bias.data = torch.randn(8, 4), torch.randn(8)
    model.last.weight.data = torch.randn(4, 8)


Change = Callable[[Any], Any]
CHANGES: dict[str, tuple[Change, str]] = {
    "add_adapters": (add_adapters, "added: adapter.weight, adapter.bias."),
    "replace_head": (replace_head, "replaced by another Parameter: head.weight, head.bias."),
    "remove_layer": (remove_layer, "removed: layer.weight, layer.bias."),
    "unfreeze": (lambda model: model.last.requires_grad_(True), "unfrozen: last.weight, last.bias."),
    "convert": (lambda model: model.double(), "float32 before and float64 now: layer.weight, layer.bias, head."),
    "normalize_weight": (
        lambda model: parametrizations.weight_norm(model.layer),
        "removed: layer.weight; added: layer.parametrizations.weight.original0, ",
    ),
    "shard_a_layer": (
        lambda model: fully_shard(model.head, mesh=init_device_mesh("cpu", (1,))),
        "head is an FSDPModule; replaced by another DTensor: head.weight, head.bias.",
    ),
    "wrap_a_layer": (wrap_a_layer, "head is a DistributedDataParallel."),
    "reshape": (reshape, "[4, 4] before and [8, 4] now: head.weight; [4] before and [8] now: head.bias."),
}


@pytest.mark.parametrize("change", CHANGES)
def test_change_at_a_checked_forward(change: str) -> None:
    model = replicated()
    train(model)
    make, named = CHANGES[change]
    make(model)
    said = f"rank 0: .*{re.escape(named)}.*{re.escape('ddp_compile(model.unwrap(), ...)')}"
    with pytest.raises(ParametersChangedError, match=said):
        train(model)


# Before torch 2.12 Dynamo keeps the graph of a parameter that is converted or unfrozen: the next check names it.
NOTICED_SINCE_2_12 = pytest.mark.skipif(torch.__version__ < "2.12", reason="Dynamo does not see it before torch 2.12")


@pytest.mark.parametrize(
    "change", ["add_adapters", *(pytest.param(c, marks=NOTICED_SINCE_2_12) for c in ("convert", "unfreeze"))]
)
def test_change_that_dynamo_sees(change: str) -> None:
    model = replicated()
    train(model, num_steps=4)  # the next check is due before forward 8
    make, named = CHANGES[change]
    make(model)
    with pytest.raises(ParametersChangedError, match=re.escape(named)):
        model(torch.randn(2, 4))


@pytest.mark.parametrize(
    ("change", "said"),
    [(add_adapters, "added: adapter"), (lambda model: model.double(), "] now: head.")],
    ids=["add_adapters", "convert"],
)
def test_change_that_nothing_sees(change: Change, said: str) -> None:
    """Neither Dynamo nor the forward; the second one the backward."""
    model: Any = ddp_compile(WithAdapter(num_breaks=1), backend="eager")
    model.register_comm_hook(None, torch.distributed.BuiltinCommHookType.ALLREDUCE)  # so that a single rank sends
    train(model, num_steps=4)
    assert model.explain().graphs == ()
    change(model)
    with pytest.raises(ParametersChangedError, match=re.escape(said)):
        train(model, num_steps=4)


def on_fakes(model: Any) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = {name: mode.from_tensor(parameter) for name, parameter in model.named_parameters()}
        return torch.func.functional_call(model, fakes, (torch.randn(2, 4),))


def on_other_parameters(model: Any) -> Any:
    return torch.func.functional_call(model, dict(WithAdapter().named_parameters()), (torch.randn(2, 4),))


def on_tensors_assigned_by_hand(model: Any) -> Any:
    own = model.head._parameters["weight"]
    model.head._parameters["weight"] = own * 0.5  # as torchopt does
    output = model(torch.randn(2, 4))
    model.head._parameters["weight"] = own
    return output


@pytest.mark.parametrize("call", [on_fakes, on_other_parameters, on_tensors_assigned_by_hand])
def test_swapped_tensors(call: Change) -> None:
    for num_before in range(4):  # some of these forwards are checked
        model = replicated()
        train(model, num_before)
        assert call(model).shape == (2, 4)
        train(model)
        replace_head(model)
        with pytest.raises(ParametersChangedError, match=re.escape(CHANGES["replace_head"][1])):
            train(model, num_steps=4)


def through_functional_call(model: Any) -> Any:
    derived = {name: 0.5 * parameter for name, parameter in model.named_parameters()}
    return torch.func.functional_call(model, derived, (torch.randn(2, 4),))


def through_an_outer_functional_call(model: Any) -> Any:
    outer = nn.Sequential(model, nn.Linear(4, 4))
    return torch.func.functional_call(outer, {"1.bias": torch.ones(4)}, (torch.randn(2, 4),))


def beside_a_tensor_in_a_place(model: Any) -> Any:
    model.layer._parameters["bias"] = 0.5 * model.named["layer.bias"]
    return model(torch.randn(2, 4))


@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}])
@pytest.mark.parametrize("change", ["add_adapters", "replace_head", "unfreeze"])
@pytest.mark.parametrize(
    "call", [through_functional_call, through_an_outer_functional_call, beside_a_tensor_in_a_place]
)
def test_change_with_swapped_tensors(call: Change, change: str, settings: dict[str, Any]) -> None:
    """The places in which other tensors stand in are left out of the check, and no others."""
    model = replicated(**settings)
    model.__dict__["named"] = dict(model.named_parameters())
    train(model)
    make, named = CHANGES[change]
    make(model)
    with pytest.raises(ParametersChangedError, match=re.escape(named.split(": ")[1])):
        for _ in range(8):
            call(model).sum().backward()


def test_way_out() -> None:
    model = replicated()
    train(model)
    add_adapters(model)
    with pytest.raises(ParametersChangedError):
        train(model)
    model = ddp_compile(model.unwrap(), backend="eager")
    train(model, num_steps=2)
    names = [gradient.fqn for bucket in model.bucket_plan.buckets for gradient in bucket.gradients]
    assert sorted(names) == ["adapter.bias", "adapter.weight"]


class Scaled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize(
    "change",
    [
        lambda model: parametrize.register_parametrization(model.layer, "weight", Scaled()),
        lambda model: setattr(model, "head", nn.Sequential(model.head)),
        lambda model: setattr(model, "adapter", nn.Linear(4, 4).requires_grad_(False)),
    ],
    ids=["parametrized in place", "moved", "frozen and added"],
)
def test_allowed_changes(change: Change) -> None:
    model = replicated()
    train(model)
    change(model)
    train(model, num_steps=4)
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


def test_frozen_within_a_step() -> None:
    """A discriminator that is frozen while the generator trains through it."""
    model = replicated()
    for step in range(6):
        model.requires_grad_(False)
        x = torch.randn(2, 4, requires_grad=True)
        model(x).sum().backward()
        assert x.grad is not None and (step or model.layer.weight.grad is None)
        model.layer.requires_grad_(True)
        model.head.requires_grad_(True)
        train(model)


def test_frozen_and_missing() -> None:
    model = replicated()
    train(model)
    model.head.requires_grad_(False)
    model(torch.randn(2, 4)).sum().backward()
    said = r"rank 0: 2 of 4 .* got no gradient.* 2 were frozen after ddp_compile: head\..*, head\..*unwrap\(\)"
    with pytest.raises(MissingGradientError, match=said):
        model(torch.randn(2, 4))
