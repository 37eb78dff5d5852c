"""A training step is not captured into a device's graph: an error by name, before anything is sent.

The tests have no device that captures, so a stand-in answers the runtime's questions.
"""

import itertools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_net import backward, replicated
from torch import nn

from ddp_compile import ReplicationError, ddp_compile, shard_optimizer
from ddp_compile.algorithms import AlgorithmConfig, Decentralized, GradientAllReduce, LocalSGD
from ddp_compile.runtime.comm import streams
from ddp_compile.runtime.desync.monitor import DesyncMonitor

pytestmark = pytest.mark.usefixtures("single_rank_group")


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """``capture.is_on = True`` begins one."""
    state = SimpleNamespace(is_on=False)
    monkeypatch.setattr(streams, "is_capturing", lambda device: state.is_on)
    return state


def test_captured_forward(capture: SimpleNamespace) -> None:
    model = replicated()
    capture.is_on = True
    said = r"^rank 0: a forward of a replicated module with gradients was called while work for cpu is being captured"
    with pytest.raises(ReplicationError, match=said):
        model(torch.randn(2, 6))
    with model.no_sync(), pytest.raises(ReplicationError, match=said):
        model(torch.randn(2, 6))
    with torch.no_grad():
        model(torch.randn(2, 6))
    capture.is_on = False
    backward(model)


@pytest.mark.parametrize("num_steps_before", [0, 1])
def test_captured_backward(num_steps_before: int, capture: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = replicated()
    # A comm hook lets a single rank send as several do.
    model.register_comm_hook(None, torch.distributed.BuiltinCommHookType.ALLREDUCE)
    for _ in range(num_steps_before):
        backward(model)
    loss = model(torch.randn(2, 6)).sum()
    sent: list[str] = []
    monkeypatch.setattr(DesyncMonitor, "backward_begins", lambda *_: sent.append("a message"))
    monkeypatch.setattr(type(model.comm_algorithm), "launch", lambda *_: sent.append("a bucket"))
    capture.is_on = True
    with pytest.raises(ReplicationError, match=r"^rank 0: a backward of a replicated module was called while work for"):
        loss.backward()
    assert sent == []


@pytest.mark.parametrize(
    ("algorithm", "shards", "said"),
    [
        (LocalSGD(period=1), False, "rank 0: a step of SGD, around which ranks communicate, was called while work for"),
        (Decentralized(), False, "rank 0: a step of SGD, around which"),
        (GradientAllReduce(), True, "rank 0: a step of a sharded optimizer was called while work for cpu"),
        (GradientAllReduce(), False, ""),
    ],
)
def test_captured_optimizer_step(algorithm: AlgorithmConfig, shards: bool, said: str, capture: SimpleNamespace) -> None:
    model: Any = ddp_compile(nn.Linear(4, 4), backend="eager", algorithm=algorithm)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = shard_optimizer(optimizer, model) if shards else optimizer
    model(torch.randn(2, 4)).sum().backward()
    before = model.weight.detach().clone()
    capture.is_on = True
    with pytest.raises(ReplicationError, match=said) if said else nullcontext():
        optimizer.step()
    assert torch.equal(model.weight, before) == bool(said)
    capture.is_on = False
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_devices_that_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "backend", type(streams.backend)())
    assert not streams.has_streams(torch.device("xla"))  # torch has no module of that name
    modules = {"cuda": SimpleNamespace(is_current_stream_capturing=lambda: True), "mtia": SimpleNamespace()}
    new_streams = {"cuda": itertools.count(), "mtia": itertools.count(), "mps": itertools.repeat(0)}
    monkeypatch.setattr(torch, "get_device_module", lambda device: modules[device.type])
    monkeypatch.setattr(torch, "Stream", lambda device: next(new_streams[device.type]))
    devices = [torch.device(kind) for kind in ("cpu", "cuda", "mtia", "mps")]
    assert [streams.is_capturing(device) for device in devices] == [False, True, False, False]
    assert [streams.has_streams(device) for device in devices] == [False, True, True, False]
