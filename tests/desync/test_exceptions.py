"""Exceptions of every kind in the middle of training: either the next step is right, or the next forward refuses.

If the step continues, it is compared with the mean over ranks of the plain module's results. If the next forward
refuses, the model is made again in a new process group, as the error says, and compared then.
"""

import _thread
import copy
import itertools
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from beside import difference, difference_to_mean
from in_ci import only
from models import loss_of
from rank_pool import Ranks, on_ranks
from torch import Tensor, fx, nn

from ddp_compile import ReductionError, ddp_compile

pytestmark = pytest.mark.usefixtures("each_split")

USER = ValueError("user error")
WIDTH = 8
CAP_MB = 1e-4  # each layer's gradients fill a bucket


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ctx.error


class Net(nn.Module):
    """Two graphs of two partitions each, with places around and between them where something may go wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fails_at = "nowhere"
        self.error: Any = None

    @torch.compiler.disable
    def place(self, name: str, x: Tensor) -> Tensor:
        if self.fails_at == f"forward, {name}":
            raise self.error
        return RaisesInBackward.apply(x, self.error) if self.fails_at == f"backward, {name}" else x

    def forward(self, x: Tensor) -> Tensor:
        x = self.place("first", x)
        x = torch.tanh(self.b(torch.tanh(self.a(x))))
        x = self.place("middle", x)
        x = torch.tanh(self.d(torch.tanh(self.c(x))))
        return self.place("last", x)


def replicated(net: nn.Module | None = None, **settings: Any) -> Any:
    torch.manual_seed(3)
    return ddp_compile(Net() if net is None else net, **{"bucket_cap_mb": CAP_MB, "backend": "aot_eager", **settings})


def batch(step: int) -> Tensor:
    torch.manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, WIDTH, requires_grad=True)


def train_one_step(model: Any, step: int) -> float:
    """Largest relative difference of a gradient to the mean of the plain module's."""
    plain = copy.deepcopy(model)
    for each in (plain, model):
        each.zero_grad()
        loss_of(each(batch(step))).backward()
    worst = difference_to_mean(model, plain, model._ddp_compile_state.process_group)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    return worst


def raise_at(place: str, error: BaseException) -> Callable[[Any], None]:
    def fail(model: Any) -> None:
        model.fails_at, model.error = place, error
        try:
            loss_of(model(batch(1))).backward()
        finally:
            model.fails_at = "nowhere"

    return fail


def raise_user_error(*_: Any) -> None:
    raise USER


def raise_in_hook_on_the_first_gradient(model: Any) -> None:
    with ExitStack() as hooks:
        for parameter in model.d.parameters():
            hooks.enter_context(parameter.register_hook(raise_user_error))
        loss_of(model(batch(1))).backward()


def press_ctrl_c(model: Any) -> None:
    """What arrives is Python's own signal, at some later bytecode of the main thread."""

    def hook(_: Tensor) -> None:
        _thread.interrupt_main()
        for _ in range(1000):  # the signal is noticed between two of them, and would not end a long one
            time.sleep(0.01)

    with model.b.weight.register_post_accumulate_grad_hook(hook):
        loss_of(model(batch(1))).backward()


def raise_in_comm_hook(model: Any) -> None:
    def comm_hook(state: Any, bucket: Any) -> Any:
        if bucket.index() == 1:
            raise USER
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future()

    model.register_comm_hook(None, comm_hook)
    loss_of(model(batch(1))).backward()


def raise_in_optimizer(model: Any) -> None:
    loss_of(model(batch(1))).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: raise_at("forward, first", USER)(model))
    optimizer.step()


def raise_in_no_sync(model: Any) -> None:
    with model.no_sync():
        raise_at("backward, middle", USER)(model)


INTERRUPT = KeyboardInterrupt("pressed")
GOES_ON = "goes on"
REFUSES = "the last backward raised after its reduction had started"


class Scenario(NamedTuple):
    """What raises an exception, its type, and what the next forward does."""

    fail: Callable[[Any], None]
    raises: type[BaseException]
    says: str


SCENARIOS = {
    "interrupt in forward": Scenario(raise_at("forward, middle", INTERRUPT), KeyboardInterrupt, GOES_ON),
    "backward, before any gradient": Scenario(raise_at("backward, last", USER), ValueError, GOES_ON),
    "backward, between graphs": Scenario(raise_at("backward, middle", USER), ValueError, REFUSES),
    "backward in no_sync": Scenario(raise_in_no_sync, ValueError, GOES_ON),
    "ctrl-c in backward": Scenario(press_ctrl_c, KeyboardInterrupt, REFUSES),
    "hook on the first gradient": Scenario(raise_in_hook_on_the_first_gradient, ValueError, GOES_ON),
    "comm hook": Scenario(raise_in_comm_hook, ReductionError, REFUSES),
    "optimizer": Scenario(raise_in_optimizer, ValueError, GOES_ON),
}


def go_on_or_rebuild(model: Any) -> tuple[str, float, Any]:
    """What the next forward said, the largest difference over two more steps, and the model, new if it refused."""
    try:
        model(batch(0))
    except ReductionError as refused:
        said = str(refused)
        with pytest.raises(ReductionError, match=REFUSES):
            model(batch(0))  # asking twice does not help
        model = model.unwrap()
        assert all(parameter.grad is None for parameter in model.parameters())
        model = replicated(model, process_group=dist.new_group())
    else:
        said = GOES_ON
    return said, max(train_one_step(model, step) for step in (2, 3)), model


@on_ranks(2)
def test_exception_on_every_rank(split: str) -> None:
    model = replicated()
    for name, (fail, error, says) in SCENARIOS.items():
        train_one_step(model, step=0)
        with pytest.raises(error):
            fail(model)
        said, worst, model = go_on_or_rebuild(model)
        if (name, split) == ("hook on the first gradient", "backward"):
            says = REFUSES  # the other layer's gradients come out of the same graph, and before these
        assert says in said and worst < 1e-6, (name, said, worst)
        if says is REFUSES:
            assert f"rank {dist.get_rank()}:" in said and "process_group=torch.distributed.new_group()" in said


@pytest.mark.parametrize("place", only(["backward, last"], ["forward, middle", "backward, last"]))
@on_ranks(2)
def test_one_rank_repeats_a_step(place: str) -> None:
    """The rank catches its exception and repeats the step, while the other waits for its buckets."""
    model = replicated()
    worst = train_one_step(model, step=0)
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="user error"):
            raise_at(place, USER)(model)
    assert max(worst, *(train_one_step(model, step) for step in (1, 2))) < 1e-6


def raises_on_rank_1(gm: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    if dist.get_rank() == 1 and "d_parameters" in gm.code:
        raise RuntimeError("no compiler on this machine")
    return gm.forward


@on_ranks(2)
@torch._dynamo.config.patch(suppress_errors=True)
def test_graph_that_one_rank_cannot_compile() -> None:
    """It runs eagerly there, and the gradients are the same."""
    model = replicated(backend=raises_on_rank_1)
    assert max(train_one_step(model, step) for step in range(3)) < 1e-6
    assert len(model.explain().graphs) == 2 - dist.get_rank()


def raise_in_backward_on_rank_1(graph: fx.Graph) -> None:
    if dist.get_rank() == 1 and any(node.name.startswith("tangents") for node in graph.find_nodes(op="placeholder")):
        raise RuntimeError("no space left on device")


def fail_to_compile_a_backward() -> str:
    # Without biases, whose gradients would need a C++ compiler and seconds.
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    options = {"post_grad_custom_post_pass": raise_in_backward_on_rank_1}
    with pytest.raises(Exception) as failed:
        train_one_step(replicated(net, backend="inductor", options=options), 0)
    return str(failed.value)


@pytest.mark.inductor
def test_backward_that_one_rank_cannot_compile(ranks: Ranks) -> None:
    pool = ranks(2)
    waiting, raising = pool.run_expecting_failures(fail_to_compile_a_backward, timeout_s=3.0)
    pool.close()
    assert "training forward 1 has returned" in waiting and "no space left on device" in raising


def fail_in_the_middle_on_one_rank() -> tuple[str, str, float]:
    model = replicated()
    train_one_step(model, step=0)
    if dist.get_rank() == 1:
        model.fails_at, model.error = "backward, middle", USER
    with pytest.raises((ReductionError, ValueError)) as failed:
        loss_of(model(batch(1))).backward()
    model.fails_at = "nowhere"
    said, worst, _ = go_on_or_rebuild(model)
    return str(failed.value), said, worst


def test_one_rank_raises_in_the_middle(ranks: Ranks) -> None:
    pool = ranks(2)
    waiting, raising = pool.run_expecting_failures(fail_in_the_middle_on_one_rank, timeout_s=3.0)
    pool.close()  # what the first group still waits for must not meet the next test
    assert "the all-reduce of bucket 2" in waiting[0] and "b.bias" in waiting[0] and raising[0] == "user error"
    for _, said, worst in (waiting, raising):
        assert REFUSES in said and worst < 1e-6


@pytest.mark.parametrize(
    ("raises", "trains"), only([(False, False), (True, True)], list(itertools.product((False, True), repeat=2)))
)
@on_ranks(2)
def test_backward_in_no_sync_before_another(raises: bool, trains: bool) -> None:
    model = replicated().train(trains)
    plain = copy.deepcopy(model)

    for _ in range(4):  # buckets are launched early from the second or third one on
        outer = loss_of(model(batch(1)))
        if raises:
            outer.register_hook(raise_user_error)
            with pytest.raises(ValueError, match="user error"):
                outer.backward()
        with model.no_sync():
            loss_of(model(batch(2))).backward()
        loss_of(plain(batch(2))).backward()
        assert difference(model, plain) < 1e-6
        loss_of(plain(batch(1))).backward()
        (loss_of(model(batch(1))) if raises else outer).backward()
        assert difference_to_mean(model, plain) < 1e-6
        model.zero_grad()
        plain.zero_grad()
