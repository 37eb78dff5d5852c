"""``model.measure()`` of one rank, and after its process group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from small_net import backward, replicated

from ddp_compile import ReplicationError

pytestmark = pytest.mark.usefixtures("single_rank_group")


@torch.compiler.set_stance("force_eager")
def test_one_rank() -> None:
    model = replicated()
    assert model.comm_stats() is None
    with model.measure(steps=None) as measurement:
        for _ in range(3):
            backward(model)
    report = measurement.report()
    assert [step.number for step in report.steps] == [2, 3]  # after the first one the plan changes
    assert report.clock_error_s == 0
    for step in report.steps:
        assert step.ranks[0].transfers == () and step.communication_s == 0 and step.exposed_s < 1e-3
        assert 0 < step.computation_s <= step.duration_s
    assert str(model.comm_stats()).startswith("compute ")


@torch.compiler.set_stance("force_eager")
def test_exception_while_measuring() -> None:
    model = replicated()
    with pytest.raises(KeyError), model.measure(steps=None) as measurement:
        backward(model)
        raise KeyError
    backward(model)
    assert measurement.is_over and not measurement.is_complete and measurement.num_steps == 1
    with pytest.raises(ReplicationError, match=r"no report: 1 steps have been measured\. It has ended"):
        measurement.report()


def test_last_hundred_steps() -> None:
    with torch.compiler.set_stance("force_eager"):
        model = replicated()
        with model.measure(steps=None) as measurement:
            for _ in range(103):
                backward(model)
    assert [step.number for step in measurement.report().steps] == list(range(4, 104))


def test_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    model = replicated()
    monkeypatch.setattr(dist, "is_initialized", lambda: False)  # as after destroy_process_group()
    with pytest.raises(ReplicationError, match=r"after destroy_process_group\(\), .* call it before"):
        model.measure()
