"""Inductor keeps the order of collectives, unless the user has changed the setting.

The setting for that came after torch 2.13. So a setting that does not affect these graphs stands in for it.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._inductor import compile_fx, config

from ddp_compile import ddp_compile
from ddp_compile.torch_internals import dynamo

pytestmark = pytest.mark.usefixtures("single_rank_group")

(REAL,) = dynamo._KEEP_ORDER
STAND_IN = "aten_distributed_optimizations.insert_overlap_deps"
SETTINGS = [
    STAND_IN,
    pytest.param(REAL, marks=pytest.mark.skipif(REAL not in config.get_config_copy(), reason="not in this torch")),
]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Inductor's settings while it compiles each graph; the graphs themselves run eagerly."""
    configs: list[dict[str, Any]] = []

    def compile_nothing(graph: fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Callable[..., Any]:
        configs.append({"is_backward": settings.get("is_backward", False), **config.get_config_copy()})
        return make_boxed_func(graph.forward)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", compile_nothing)
    _, *defaults = compile_fx.compile_fx.__defaults__ or ()
    monkeypatch.setattr(compile_fx.compile_fx, "__defaults__", (compile_nothing, *defaults))
    return configs


def train(split: str, **settings: Any) -> None:
    model = ddp_compile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), split=split, bucket_cap_mb=1e-4, **settings)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        model(torch.randn(2, 8)).sum().backward()


def values(seen: list[dict[str, Any]], setting: str) -> dict[bool, set[object]]:
    """Of a setting, in forwards (False) and backwards (True)."""
    return {way: {each[setting] for each in seen if each["is_backward"] is way} for way in (False, True)}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("split", ["forward", "backward"])
def test_setting_reaches_each_graph(
    setting: str, split: str, seen: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamo, "_KEEP_ORDER", {setting: False})
    for _ in range(2):
        train(split)
    assert values(seen, setting) == {False: {False}, True: {False}}


@pytest.mark.parametrize("way", ["options", "process"])
def test_user_setting_stays(way: str, seen: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "_KEEP_ORDER", {STAND_IN: False})
    with config.patch({STAND_IN: True}) if way == "process" else nullcontext():
        train("backward", **({"options": {STAND_IN: True}} if way == "options" else {}))
    assert values(seen, STAND_IN) == {False: {True}, True: {True}}
