"""After a Ctrl-C in the middle of an iteration, the next forward refuses to go on."""

from typing import Any

import pytest
import torch
from torch import nn

from ddp_compile import ReductionError, ddp_compile
from ddp_compile.runtime.arrivals.parameter_hooks import ParameterHooks
from ddp_compile.runtime.buckets import bucket_set
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.bucket_set import BucketSet
from ddp_compile.runtime.buckets.gradients import Views
from ddp_compile.runtime.launch_queue import LaunchQueue

pytestmark = pytest.mark.usefixtures("single_rank_group")


def press_ctrl_c(*args: Any, **kwargs: Any) -> None:
    raise KeyboardInterrupt


def small_model(**settings: Any) -> Any:
    return ddp_compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), bucket_cap_mb=1e-5, backend="eager", **settings)


def go_backward(model: Any) -> None:
    model(torch.randn(2, 4)).sum().backward()


def go_backward_in_no_sync(model: Any) -> None:
    with model.no_sync():
        go_backward(model)


def regularize(model: nn.Module) -> None:
    next(model.parameters()).square().sum().backward()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (bucket_set, "plan_of_rank_0"),
        (Bucket, "flatten"),
        (Bucket, "wait"),
        (Views, "hand_over"),
        (LaunchQueue, "_launch_ready"),
        (LaunchQueue, "finish"),
        (BucketSet, "begin_iteration"),
        (ParameterHooks, "notify_of_each"),
    ],
)
def test_the_next_forward_refuses(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(find_unused_parameters=True)
    # A comm hook lets a single rank send as several do.
    model.register_comm_hook(None, torch.distributed.BuiltinCommHookType.ALLREDUCE)
    if name != "plan_of_rank_0":
        go_backward(model)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, press_ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            go_backward(model)
    for go_on in (go_backward, go_backward_in_no_sync, lambda m: go_backward(m.forward), regularize):
        with pytest.raises(ReductionError, match="the last backward raised"):
            go_on(model)
    if name == "plan_of_rank_0":
        assert all(parameter.grad is None for parameter in model.unwrap().parameters())


def test_gradients_of_an_interrupted_backward() -> None:
    model = small_model()
    go_backward(model)
    handle = model[0].weight.register_hook(press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        go_backward(model)
    handle.remove()
    assert model[1].weight.grad is not None
    plain = model.unwrap()
    assert all(parameter.grad is None for parameter in plain.parameters())
