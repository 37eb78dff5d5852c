"""``delay_all_reduce_named_params``: averaged when another gradient has come, after any number of backwards."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import Step, own_batch, seeded, train_beside
from models import largest
from rank_pool import on_ranks
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.checkpoint import checkpoint

from ddp_compile import ParametersChangedError, RanksDifferError, ReplicationError, ddp_compile

pytestmark = pytest.mark.usefixtures("each_split")

WIDTH = 17


class Net(nn.Module):
    """A table and layers. The table is also used separately, in its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x @ self.table))) * self.scale.sum().float()


def train(make: Callable[[], Any], delayed: list[str], trigger: str, step_of: Step, **settings: Any) -> float:
    """Largest relative difference of a gradient to the mean of the plain module's."""
    module = seeded(make)
    plain = copy.deepcopy(module)
    names = dict(module.named_parameters())
    model = ddp_compile(
        module,
        bucket_cap_mb=0.0005,
        backend="aot_eager",
        delay_all_reduce_named_params=[(name, names[name]) for name in delayed],
        param_to_hook_all_reduce=names[trigger],
        **settings,
    )
    return largest(train_beside((model, plain), step_of, width=WIDTH))


@pytest.mark.parametrize("by_itself", [False, True])
@on_ranks(2)
def test_delayed_mean(by_itself: bool) -> None:
    def step_of(model: Any, x: Tensor, step: int) -> None:
        if by_itself:
            (model.table @ x.T).square().sum().backward()  # the trigger's gradient does not come in this one
        model(x).square().sum().backward()

    assert train(Net, ["table", "scale"], "first.weight", step_of) < 1e-6


def frozen_scale() -> nn.Module:
    net = Net()
    net.scale.requires_grad_(False)
    return net


EVERY = [name for name, _ in Net().named_parameters()]


@pytest.mark.parametrize(
    ("make", "delayed", "trigger", "said"),
    [
        (Net, ["table"], "", r"belong together.*pass both, or neither"),
        (Net, [], "table", r"belong together.*pass both, or neither"),
        (Net, ["tables"], "first.weight", "names tables, which is not that parameter of the module"),
        (frozen_scale, ["scale"], "first.weight", r"scale requires no gradient.*leave it out"),
        (Net, EVERY, "last.bias", "every parameter that requires a gradient is named in"),
        (
            lambda: nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4)),
            ["0.weight"],
            "1.weight",
            r"0\.weight: sparse gradients cannot be delayed; leave them out",
        ),
    ],
)
def test_arguments_that_do_not_fit(
    make: Any, delayed: list[str], trigger: str, said: str, single_rank_group: None
) -> None:
    net = make()
    names = dict(net.named_parameters())
    arguments: dict[str, Any] = {"delay_all_reduce_named_params": [(n, names.get(n, net)) for n in delayed]}
    with pytest.raises((ValueError, ReplicationError), match=said):
        ddp_compile(net, **(arguments if delayed else {}), param_to_hook_all_reduce=names.get(trigger))


class FirstOnOneRank(nn.Module):
    """On rank 0 alone the trigger's gradient is the first one that comes; no loss uses the second output."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.trigger = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.first, self.last, self.unused = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    @torch.compiler.disable
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.first(x @ self.table))
        h = self.trigger * self.last(h) if dist.get_rank() == 0 else self.last(self.trigger * h)
        return h, self.unused(h)


@on_ranks(2)
def test_trigger_at_another_time() -> None:
    def step_of(model: Any, x: Tensor, step: int) -> None:
        model(x)[0].sum().backward()

    assert train(FirstOnOneRank, ["table"], "trigger", step_of, find_unused_parameters=True) < 1e-6


class InCheckpoint(Net):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.first, x @ self.table, use_reentrant=True)) * self.scale.sum().float()


def another_shape(module: Net) -> None:
    if dist.get_rank():
        module.table = nn.Parameter(torch.randn(WIDTH, WIDTH + 1))


def stepped_in_backward(module: Net) -> None:
    _apply_optimizer_in_backward(torch.optim.SGD, [module.table], {"lr": 0.1})


def nothing(module: Net) -> None:
    pass


@pytest.mark.parametrize(
    ("make", "change", "num_steps", "said"),
    [
        (Net, another_shape, 1, "table: float32[17, 17] on cpu on rank 0 is parameter table: float32[17, 18]"),
        (Net, stepped_in_backward, 1, "table: such a step would take this rank's own gradients"),
        (InCheckpoint, nothing, 1, "has come in a backward inside another one, of a reentrant checkpoint for example"),
        (Net, nothing, 3, "replaced by another Parameter: table"),
    ],
)
@on_ranks(2)
def test_refused_on_every_rank(make: Any, change: Any, num_steps: int, said: str) -> None:
    module = make()
    change(module)
    delayed: Any = {"delay_all_reduce_named_params": [("table", module.table)]}
    with pytest.raises((ParametersChangedError, RanksDifferError, ReplicationError)) as refused:
        model = ddp_compile(module, backend="eager", param_to_hook_all_reduce=module.first.weight, **delayed)
        for step in range(num_steps):
            if step == 1:
                module.table = nn.Parameter(torch.randn(WIDTH, WIDTH))
            model.zero_grad()
            model(own_batch(step, WIDTH)).sum().backward()
    assert said in str(refused.value)
