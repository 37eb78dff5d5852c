"""What ``model.measure()`` says where the truth is known: layers that sleep, on a simulated link."""

import time
from statistics import fmean, median
from typing import Any

import pytest
import torch
from in_ci import only
from simulated_groups import WORLD_SIZE, simulated_group
from torch import Tensor, nn

from ddp_compile import ddp_compile, shard_optimizer
from ddp_compile.bench.simulated_link import LinkModel

pytestmark = pytest.mark.alone
NUM_LAYERS, NUMEL = 4, 1000
FORWARD_S, BACKWARD_S = 0.010, 0.040
WARM_UP, STEPS = 3, 5


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        ctx.save_for_backward(weight)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(BACKWARD_S)
        return gradients[0], torch.zeros_like(ctx.saved_tensors[0])


class SleepyLayers(nn.Module):
    """Each layer has one parameter, and sleeps in its forward and in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(NUMEL)) for _ in range(NUM_LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = Sleep.apply(x, weight)
        return x


@torch.compiler.set_stance("force_eager")
@pytest.mark.parametrize(
    ("transfer_s", "sharded"), only([(0.060, False), (0.060, True)], [(0.060, False), (0.040, False), (0.060, True)])
)
def test_exposed_and_transferred_time_are_right(transfer_s: float, sharded: bool) -> None:
    passes = 1 if sharded else 2  # a reduce-scatter sends half of an all-reduce
    sent = passes * 4 * NUMEL * (WORLD_SIZE - 1) / WORLD_SIZE
    link = LinkModel(world_size=WORLD_SIZE, alpha_s=0.0, bytes_per_second=sent / transfer_s)
    with simulated_group(link):
        model: Any = ddp_compile(SleepyLayers(), bucket_cap_mb=4 * NUMEL / 2**20, backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if sharded:
            optimizer = shard_optimizer(optimizer, model)
        x = torch.ones(1, requires_grad=True)
        for number in range(WARM_UP + STEPS):
            if number == WARM_UP:
                measurement = model.measure(steps=None)
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        measurement.stop()
        report = measurement.report()
        model.unwrap()
    # The first bucket is ready after one layer. Gathers begin with the optimizer's step, and an eager forward waits.
    gathers_s = NUM_LAYERS * transfer_s if sharded else 0.0
    exposed_s = BACKWARD_S + NUM_LAYERS * max(transfer_s, BACKWARD_S) + gathers_s - NUM_LAYERS * BACKWARD_S
    found = {
        "exposed": (exposed_s, [step.exposed_s for step in report.steps]),
        "communication": (gathers_s + NUM_LAYERS * transfer_s, [step.communication_s for step in report.steps]),
        "transfer": (
            transfer_s,
            [fmean(step.transfer_s(bucket.index) for bucket in report.buckets) for step in report.steps],
        ),
    }
    for what, (true_s, said_s) in found.items():
        assert median(said_s) == pytest.approx(true_s, rel=0.1), what
