"""The README's statements about ``torch.compile(DistributedDataParallel(module))``, for the torch that they name."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.parallel import DistributedDataParallel

pytestmark = [
    pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="said of torch 2.13"),
    pytest.mark.usefixtures("single_rank_group"),
]


class Layers(nn.Module):
    """Four layers of 1.4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(600, 600) for _ in range(4))

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * factor
        return x


class BreaksInALoop(Layers):
    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


def incumbent(module: nn.Module, bucket_cap_mb: float = 1, **settings: Any) -> Any:
    settings = {"backend": "aot_eager", **settings}
    return torch.compile(DistributedDataParallel(module, bucket_cap_mb=bucket_cap_mb), **settings)


def test_a_small_bucket_is_an_assertion_error() -> None:
    with pytest.raises(AssertionError, match="First bucket should be smaller"):
        incumbent(Layers(), bucket_cap_mb=0.25)(torch.randn(2, 600))


class KeywordParameters(Layers):
    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        for layer in self.layers:
            x = nn.functional.linear(x, weight=layer.weight, bias=layer.bias)
        return x


def test_keyword_parameters_are_not_seen() -> None:
    counter = CompileCounter()
    incumbent(KeywordParameters(), backend=counter)(torch.randn(2, 600))
    assert counter.frame_count == 1


def test_graphs_and_buckets_differ() -> None:
    counter = CompileCounter()
    layers = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(6)])
    model = DistributedDataParallel(Passes(layers), bucket_cap_mb=1.5)
    compiled = torch.compile(model, backend=counter)
    for _ in range(3):
        compiled(torch.randn(2, 512)).sum().backward()
    sizes = model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(", ")
    assert (counter.frame_count, len(sizes)) == (4, 3), sizes


class Passes(nn.Module):
    """A forward of one's own: a bare nn.Sequential is not compiled at all."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_a_varying_float_crashes() -> None:
    model = incumbent(Layers())
    with pytest.raises(Exception, match="'float' object has no attribute 'meta'"):
        for factor in (0.5, 0.6, 0.7):
            model(torch.randn(2, 600), factor)


def test_a_forward_under_no_grad_is_cut() -> None:
    counter = CompileCounter()
    model = incumbent(Layers(), backend=counter)
    with torch.no_grad():
        model(torch.randn(2, 600))
    assert counter.frame_count == 4


def test_fullgraph_fails_with_batch_norm() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported):
        incumbent(nn.Sequential(nn.BatchNorm1d(6)), fullgraph=True)(torch.randn(4, 6))


def test_state_dict_keys_have_prefixes() -> None:
    assert list(incumbent(nn.Linear(2, 2)).state_dict()) == ["_orig_mod.module.weight", "_orig_mod.module.bias"]


def test_nothing_compiled_is_not_said(caplog: pytest.LogCaptureFixture) -> None:
    counter = CompileCounter()
    with caplog.at_level("WARNING"):
        incumbent(BreaksInALoop(), backend=counter)(torch.randn(2, 600)).sum().backward()
    assert counter.frame_count == 0
    assert caplog.records == []
