"""``delay_all_reduce_named_params``: averaged when another gradient has come, however many backwards came before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import relative_difference
from rank_pool import RankPool
from torch import Tensor, nn

from ddp_compile import ReplicationError, ddp_compile

pytestmark = pytest.mark.usefixtures("each_split")

Ranks = Callable[[int], RankPool]
WIDTH = 17


class Net(nn.Module):
    """A table and layers; the table is also used by itself, in a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x @ self.table))) * self.scale.sum().float()


def train(by_itself: bool) -> dict[str, float]:
    """For each parameter the largest relative difference to the mean of the plain module's gradients."""
    torch.manual_seed(dist.get_rank())  # rank 0's parameters go to all
    module = Net()
    delayed = [("table", module.table), ("scale", module.scale)]
    model: Any = ddp_compile(
        module,
        bucket_cap_mb=0.0005,
        backend="aot_eager",
        delay_all_reduce_named_params=delayed,
        param_to_hook_all_reduce=module.first.weight,
    )
    plain = copy.deepcopy(model)
    worst = dict.fromkeys(dict(plain.named_parameters()), 0.0)
    for step in range(4):
        torch.manual_seed(10 * step + dist.get_rank())
        x = torch.randn(5, WIDTH)
        for each in (model, plain):
            each.zero_grad()
            if by_itself:
                (each.table @ x.T).square().sum().backward()  # the trigger's gradient does not come in this one
            each(x).square().sum().backward()
        for (name, ours), alone in zip(model.named_parameters(), plain.parameters(), strict=True):
            dist.all_reduce(alone.grad)
            worst[name] = max(worst[name], relative_difference(ours.grad, alone.grad / dist.get_world_size()))
    return worst


@pytest.mark.parametrize("by_itself", [False, True])
def test_they_are_the_mean_of_all_backwards(by_itself: bool, ranks: Ranks) -> None:
    for worst in ranks(2).run(train, by_itself):
        assert max(worst.values()) < 1e-6, worst


def test_what_does_not_fit_is_named(single_rank_group: None) -> None:
    net = Net()
    with pytest.raises(ValueError, match=r"belong together.*pass both, or none"):
        ddp_compile(net, delay_all_reduce_named_params=[("table", net.table)])
    with pytest.raises(ValueError, match="belong together"):
        ddp_compile(net, param_to_hook_all_reduce=net.table)
    with pytest.raises(ReplicationError, match="names tables, which is not that parameter of the module"):
        ddp_compile(
            net, delay_all_reduce_named_params=[("tables", net.table)], param_to_hook_all_reduce=net.first.weight
        )
    net.scale.requires_grad_(False)
    with pytest.raises(ReplicationError, match=r"scale requires no gradient.*leave it out"):
        ddp_compile(
            net, delay_all_reduce_named_params=[("scale", net.scale)], param_to_hook_all_reduce=net.first.weight
        )
    delayed: Any = {
        "delay_all_reduce_named_params": [("table", net.table)],
        "param_to_hook_all_reduce": net.first.weight,
    }
    model: Any = ddp_compile(net, backend="eager", **delayed)
    with pytest.raises(ReplicationError, match=r"rank 0: delayed gradients of table inside a Join.*drop delay_all"):
        model.join_hook()
    plain = model.unwrap()
    plain(torch.ones(2, WIDTH)).sum().backward()
    assert plain.first.weight.grad is not None and plain.table.grad is not None
