"""Checkpoints have the keys of the plain module, and those of wrapped ones load."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_net import Net, replicated
from torch import nn

from ddp_compile import ddp_compile

pytestmark = pytest.mark.usefixtures("single_rank_group")


def test_keys() -> None:
    assert list(replicated().state_dict()) == list(Net().state_dict())


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod."])
def test_checkpoints_of_wrappers(prefix: str) -> None:
    saved = Net().state_dict()
    model = replicated()
    result = model.load_state_dict({f"{prefix}{key}": value for key, value in saved.items()})
    assert not result.missing_keys and not result.unexpected_keys
    assert all(torch.equal(model.state_dict()[key], value) for key, value in saved.items())


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module."])
def test_truncated_checkpoint(prefix: str) -> None:
    saved = {f"{prefix}{key}": value for key, value in Net().state_dict().items() if not key.startswith("norm.")}
    with pytest.raises(RuntimeError, match=r"loading state_dict for Net:\s*Missing key.*\"norm\.weight\"") as refused:
        replicated().load_state_dict(saved)
    assert "Unexpected key" not in str(refused.value) and "first" not in str(refused.value)


def test_checkpoint_of_another_model() -> None:
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"module\.layers\.0\"\."):
        replicated().load_state_dict({"module.layers.0": torch.zeros(3)})


@pytest.mark.parametrize("value", [None, "checkpoint.pt", 5, [("first.weight", None)]])
def test_not_a_state_dict(value: Any) -> None:
    with pytest.raises(TypeError) as plain:
        Net().load_state_dict(value)
    with pytest.raises(TypeError) as ours:
        replicated().load_state_dict(value)
    assert str(ours.value) == str(plain.value)


class Delegating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.net.load_state_dict(*args, **kwargs)


def test_load_by_assignment() -> None:
    with pytest.raises(ValueError, match="assign=False"):
        ddp_compile(Delegating(), backend="eager").load_state_dict(Net().state_dict(), assign=True)
    with pytest.raises(ValueError, match="assign=False"):
        replicated().load_state_dict(Net().state_dict(), assign=True)
    with pytest.raises(ValueError, match="assign=False"):
        nn.ModuleList([replicated()]).load_state_dict(nn.ModuleList([Net()]).state_dict(), assign=True)


class Versioned(nn.Linear):
    _version = 2

    def _load_from_state_dict(self, state_dict: dict, prefix: str, metadata: dict, *rest: Any) -> None:
        if metadata.get("version") != 2:
            raise AssertionError("taken for a checkpoint of version 1")
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)


@pytest.mark.parametrize("wrap", [lambda m: m, nn.parallel.DistributedDataParallel, torch.compile])
def test_versions_in_checkpoints(wrap: Callable[[nn.Module], nn.Module]) -> None:
    saved = wrap(nn.Sequential(Versioned(3, 3))).state_dict()
    model = ddp_compile(nn.Sequential(Versioned(3, 3)), backend="eager")
    model.load_state_dict(saved)
    assert torch.equal(model[0].weight, next(iter(saved.values())))


def test_prefixes_of_the_model() -> None:
    model = ddp_compile(nn.ModuleDict({"module": nn.Linear(3, 3)}), backend="eager")
    model.load_state_dict(model.state_dict())
    wrapped = {f"module.{key}": value for key, value in model.state_dict().items()}
    assert not model.load_state_dict(wrapped).missing_keys
