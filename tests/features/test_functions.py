"""The functions that match the methods, modules that have our names, and printed modules."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable

import pytest
import torch
from small_net import Net, backward, replicated
from torch import nn

import ddp_compile
from ddp_compile import explain, is_replicated, no_sync, unwrap

pytestmark = pytest.mark.usefixtures("single_rank_group")


def test_functions_are_methods() -> None:
    model = replicated()
    assert is_replicated(model) and not is_replicated(Net()) and not is_replicated(nn.Sequential(model))
    with no_sync(model):
        assert not model.require_backward_grad_sync
        backward(model)
    assert model.require_backward_grad_sync
    backward(model)
    assert explain(model) == model.explain() and str(explain(model)).startswith("bucket ")
    assert unwrap(model) is model and type(model) is Net and not is_replicated(model)


@pytest.mark.parametrize("function", [no_sync, explain, unwrap])
def test_module_that_is_not_replicated(function: Callable[[nn.Module], object]) -> None:
    for module in (Net(), nn.Sequential(replicated()), copy.deepcopy(replicated())):
        kind = type(module).__name__
        said = f"{function.__name__}: model is a {kind} that is not replicated; call ddp_compile(model) first"
        with pytest.raises(ddp_compile.ReplicationError, match=re.escape(said)):
            function(module)


class OwnMethods(Net):
    def explain(self) -> str:
        return "its author's"

    @property
    def no_sync(self) -> str:
        return "a property"


def test_own_methods(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ddp_compile"):
        model = ddp_compile.ddp_compile(OwnMethods(), backend="eager", fullgraph=True)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"rank 0: model.{name} remains the attribute of OwnMethods; for that of ddp_compile, call the"
        f" function: from ddp_compile import {name}"
        for name in ("no_sync", "explain")
    ]
    assert (model.explain(), model.no_sync) == ("its author's", "a property")
    with no_sync(model):
        assert not model.require_backward_grad_sync
        backward(model)
    backward(model)
    assert "graph 0" in str(explain(model))
    assert model.unwrap() is model and model.explain() == "its author's"


class OwnRepr(nn.Linear):
    def __repr__(self) -> str:
        return "its author's"


def test_repr() -> None:
    plain = Net()
    keys = list(plain.state_dict())
    printed = repr(plain)
    model = ddp_compile.ddp_compile(plain, split="none", backend="aot_eager")
    said = "ddp_compile(split='none', backend='aot_eager', world_size=1): "
    assert repr(model) == said + printed and list(model.state_dict()) == keys
    assert "(0): ddp_compile(split='none'" in repr(nn.Sequential(model))
    assert repr(copy.deepcopy(model)) == repr(unwrap(model)) == printed
    own = ddp_compile.ddp_compile(OwnRepr(2, 2))
    assert repr(own) == "ddp_compile(split='auto', backend='inductor', world_size=1): its author's"
    by_function = replicated(backend=lambda gm, inputs: gm.forward)
    assert "<lambda>" in repr(by_function).splitlines()[0]
    by_function(torch.randn(4, 6))
