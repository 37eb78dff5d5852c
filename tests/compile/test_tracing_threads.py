"""A module that is called while another thread of the process traces a graph."""

import threading

import pytest
import torch
from torch import nn

from ddp_compile import ddp_compile

pytestmark = pytest.mark.usefixtures("single_rank_group")

tracing = pytest.mark.skipif(
    not hasattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag"), reason="this torch has a flag for each thread"
)


@tracing
def test_call_waits_for_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ddp_compile(nn.Linear(3, 3), backend="eager")
    model(torch.ones(2, 3))
    outputs: list[torch.Tensor] = []
    other = threading.Thread(target=lambda: outputs.append(model(torch.ones(2, 3))), daemon=True)
    with torch._dynamo.convert_frame.compile_lock:
        monkeypatch.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", True)
        other.start()
        other.join(0.3)
        assert other.is_alive() and outputs == []
        monkeypatch.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", False)
    other.join(60)
    assert len(outputs) == 1


@tracing
def test_trace_of_own_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ddp_compile(nn.Linear(3, 3), backend="eager")
    monkeypatch.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", True)
    with pytest.raises(RuntimeError, match="symbolically trace"):
        model(torch.ones(2, 3))
