"""How comm hooks are called on a single rank, like those of DistributedDataParallel, and refusals by name."""

from __future__ import annotations  # hooks are checked whose annotations are text

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from halves import Built
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ReductionError, ddp_compile
from ddp_compile.algorithms import Bucket, CommAlgorithm, Traits

CAP_MB = 60 / 2**20

pytestmark = pytest.mark.usefixtures("single_rank_group")


def done(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


def small_model() -> nn.Module:
    """Three buckets of two gradients at `CAP_MB`, with sizes that padding would change."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))


def replicated(backend: str = "eager") -> Any:
    return ddp_compile(small_model(), bucket_cap_mb=CAP_MB, backend=backend)


def go_backward(model: nn.Module) -> None:
    torch.manual_seed(1)
    model(torch.randn(2, 5)).square().mean().backward()


# Without annotations: DistributedDataParallel compares them unevaluated, and here they are text.
def threefold(state, bucket):
    state.append((bucket.index(), bucket.is_last(), [tuple(g.shape) for g in bucket.gradients()]))
    return done(bucket.buffer() * 3)


def test_called_as_by_ddp() -> None:
    ours, theirs = replicated("aot_eager"), DistributedDataParallel(small_model(), bucket_cap_mb=CAP_MB)
    calls: tuple[list[Any], list[Any]] = ([], [])
    for model, seen in zip((ours, theirs), calls, strict=True):
        model.register_comm_hook(seen, threefold)
        for _ in range(3):
            model.zero_grad()
            go_backward(model)
    assert len(calls[0]) == 3 * 3
    # DistributedDataParallel's first backward has one bucket; its plan is made afterward.
    assert calls[0][3:] == calls[1][1:]
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_last_bucket_if_a_later_one_is_passed_over() -> None:
    """A regularizer's backward has no forward: a bucket without gradients, here the third, waits for the next one."""
    model = replicated()
    go_backward(model)
    calls: list[Any] = []
    model.register_comm_hook(calls, threefold)
    for parameter in model[0].parameters():
        parameter.grad = None
    model[4].weight.square().sum().backward()
    assert [(index, is_last) for index, is_last, _ in calls] == [(0, False), (1, True)]


def test_bucket_of_a_hook() -> None:
    model = replicated()
    num_buckets = 0

    def look(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
        nonlocal num_buckets
        flat, gradients, parameters = bucket.buffer(), bucket.gradients(), bucket.parameters()
        assert flat.shape == (sum(p.numel() for p in parameters),)
        assert [g.shape for g in gradients] == [p.shape for p in parameters]
        assert torch.equal(torch.cat([g.flatten() for g in gradients]), flat)
        assert all(g.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for g in gradients)
        assert all(any(p is q for q in model.parameters()) for p in parameters)
        assert not torch.is_grad_enabled()
        bucket.set_buffer(flat * 2)
        assert torch.equal(bucket.buffer(), flat * 2) and torch.equal(bucket.gradients()[0], gradients[0] * 2)
        num_buckets += 1
        return done(bucket.buffer())

    model.register_comm_hook(None, look)
    go_backward(model)
    assert num_buckets == 3


def raises(state: Any, bucket: Any) -> Any:
    raise KeyError("no such peer")


def fails_later(state: Any, bucket: Any) -> Any:
    return done(bucket.buffer()).then(lambda future: raises(state, bucket))


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (raises, r"the comm hook raises raised KeyError\('no such peer'\) on bucket {0}"),
        (fails_later, "the comm hook fails_later failed on bucket {0} .*no such peer"),
        (lambda state, bucket: bucket.buffer(), r"returned a tensor of torch.float32, .* for bucket {0} .*Future"),
        (lambda state, bucket: done(bucket.buffer()[1:]), r"gave a tensor .* for bucket {0} .* shape \(\d+,\)"),
        (lambda state, bucket: done(bucket.buffer().int()), "gave a tensor of torch.int32, .* for bucket {0}"),
        (lambda state, bucket: done(bucket.gradients()), "gave a list of 2 values for bucket {0}"),
    ],
)
def test_hooks_that_fail(hook: Callable[..., Any], said: str) -> None:
    model = replicated()
    model.register_comm_hook(None, hook)
    with pytest.raises(ReductionError, match=said.replace("{0}", r"0 \(\d+ bytes:")) as failed:
        go_backward(model)
    assert "rank 0" in str(failed.value) and "start again from a checkpoint" in str(failed.value)
    with pytest.raises(ReductionError, match="the last backward raised"):
        go_backward(model)


def wrong_bucket(state: object, bucket: int) -> torch.futures.Future[Tensor]: ...


def reversed_arguments(bucket: dist.GradBucket, state: object) -> torch.futures.Future[Tensor]: ...


@pytest.mark.parametrize(
    ("hook", "error", "said"),
    [
        (5, TypeError, "the comm hook 5 is not callable; pass a function hook(state, bucket"),
        (lambda a, b, c: None, TypeError, "<lambda>(a, b, c) cannot be called with two arguments"),
        (reversed_arguments, TypeError, "takes the bucket first"),
        (wrong_bucket, ValueError, "wrong_bucket annotates bucket with <class 'int'>; write hook(state, bucket"),
    ],
)
def test_signatures(hook: Any, error: type[Exception], said: str) -> None:
    model = replicated()
    with pytest.raises(error, match=re.escape(said)):
        model.register_comm_hook(None, hook)
    model.register_comm_hook(None, allreduce_hook)  # a refused hook is not registered


def test_hook_inside_a_backward() -> None:
    model = replicated()
    go_backward(model)
    model[0].weight.register_hook(lambda gradient: model.register_comm_hook(None, allreduce_hook))
    with pytest.raises(
        RuntimeError, match="the comm hook allreduce_hook cannot take over while a backward has not been completed"
    ):
        go_backward(model)


class ReturnsNothing(CommAlgorithm):
    name = "algorithm that forgets to return"
    traits = Traits(on_one_rank=True)

    def launch(self, bucket: Bucket, is_last: bool) -> Any:
        """Without a result."""


def test_launch_returns_nothing() -> None:
    model = ddp_compile(small_model(), backend="eager", algorithm=Built(lambda group: ReturnsNothing()))
    with pytest.raises(TypeError, match=r"launch\(\) of the algorithm that forgets to return returned None for b"):
        go_backward(model)
