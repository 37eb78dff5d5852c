"""The gradients of which the reducer is notified, and those that are only counted."""

import torch
from torch.nn import Parameter

from ddp_compile.plan.spec import BucketSpec, GradientSpec
from ddp_compile.runtime.arrivals.accumulators import Accumulators
from ddp_compile.runtime.arrivals.parameter_hooks import ParameterHooks
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.gradients import Views

BEHIND = -10  #: that the listener hears when all hooks have run


def bucket_of(params: list[Parameter], *param_indices: int) -> Bucket:
    spec = BucketSpec(0, tuple(GradientSpec(i, f"p{i}", 2, "float32", "cpu") for i in param_indices), 1)
    return Bucket(spec, [params[i] for i in param_indices], Views(), lazy_allocation=False)


class Listener:
    """Counts a gradient as arrived, as the reducer does."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.hooks: ParameterHooks | None = None
        self.bucket_of: dict[int, Bucket] = {}

    def hooks_have_run(self, *_: object) -> None:
        self.heard.append(BEHIND)

    @property
    def missing(self) -> set[int]:
        return set().union(*(bucket.iteration.pending for bucket in self.bucket_of.values()))

    def batch(self, hooks: ParameterHooks, *buckets: Bucket) -> None:
        self.hooks = hooks
        for bucket in buckets:
            bucket.begin_iteration()
            self.bucket_of.update(dict.fromkeys(bucket.param_indices, bucket))
            hooks.batch(bucket)

    def mark_parameter_ready(self, index: int) -> None:
        self.heard.append(index)
        if self.hooks is not None:
            for again in self.hooks.flush(index):
                self.heard.append(again)
            if self.bucket_of[index].arrive(index):
                self.hooks.note_last(index)


def parameters(count: int) -> list[Parameter]:
    return [Parameter(torch.ones(2)) for _ in range(count)]


def batched() -> tuple[Listener, list[Parameter], ParameterHooks]:
    """Six parameters in two buckets, whose gradients are only counted but for those that are expected last."""
    listener, params = Listener(), parameters(6)
    hooks = ParameterHooks(params, Accumulators(params), listener)
    listener.batch(hooks, bucket_of(params, 3, 4, 5), bucket_of(params, 2, 1, 0))
    return listener, params, hooks


def backward(used: list[Parameter]) -> None:
    """Gradients arrive from the last one used to the first."""
    x = torch.ones(2)
    for parameter in used:
        x = x * parameter
    x.sum().backward()


def test_gradient_comes_twice() -> None:
    listener, params, _hooks = batched()
    backward([params[2]])
    backward([params[2]])
    assert listener.heard == []
    backward([params[0]])
    assert listener.heard == [0, 2] and listener.missing == {1, 3, 4, 5}


def test_gradient_after_the_last() -> None:
    listener, params, hooks = batched()
    backward(params[:3])
    backward([params[1]])
    assert listener.heard == [0]
    assert hooks.flush_all() == [1]


def test_notified_after_other_hooks() -> None:
    listener, params = Listener(), parameters(2)
    accumulators = Accumulators(params)
    hooks = ParameterHooks(params, accumulators, listener)
    node = torch.autograd.graph.get_gradient_edge(params[1]).node
    node.register_hook(lambda *_: listener.heard.append(-1))
    hooks.notify_after_others(1)
    params[1].register_post_accumulate_grad_hook(lambda _: listener.heard.append(-2))
    node.register_hook(lambda *_: listener.heard.append(-3))
    backward(params)
    assert listener.heard == [1, -2, -1, BEHIND, -3, 0]
    listener.heard.clear()
    hooks.notify_after_others(1)  # others that were registered since then go before it
    backward(params)
    assert listener.heard == [1, -2, -1, -3, BEHIND, 0]
    hooks.remove()
    backward(params)
    assert listener.heard[-3:] == [-2, -1, -3]
