"""Parameters are averaged: torchrun --standalone --nproc-per-node 2 examples/parameter_algorithm.py"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp_compile import ddp_compile
from ddp_compile.algorithms import AlgorithmConfig, ParameterAverage, Traits, average_over


class SlowMomentumAlgorithm(ParameterAverage):
    """Wang et al. 2019 (arXiv 1910.00643): after each interval, the way to the mean is a step with momentum."""

    traits = Traits(payload="parameters", takes_dtypes=(torch.float32,))

    def __init__(self, process_group, interval, momentum):
        super().__init__(process_group, interval)
        self.name, self.momentum = f"slow momentum of {momentum} every {interval} steps", momentum  # ranks compare it

    def attach(self, parameters):
        super().attach(parameters)  # makes self.group, and self.parameters, which copies them to flat buffers and back
        self.before, self.slow = self.kept = torch.stack(self.parameters.new() * 2)  # of one dtype and device
        self.parameters.read([self.before])

    def after_step(self, optimizers):  # on every rank, also if its step was skipped
        average_over(self.group, self.parameters, self.name)
        self.parameters.read([mean := torch.empty_like(self.before)])
        self.before -= self.slow.mul_(self.momentum).add_(self.before - mean)
        self.parameters.write([self.before])

    def state_dict(self):
        return {**super().state_dict(), "kept": self.kept.clone()}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.kept.copy_(state["kept"])


@dataclass(frozen=True)
class SlowMomentum(AlgorithmConfig):
    interval: int = 10
    momentum: float = 0.5

    def build(self, process_group):
        return SlowMomentumAlgorithm(process_group, self.interval, self.momentum)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = ddp_compile(torch.nn.Linear(50, 10), algorithm=SlowMomentum(), backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(101):
        optimizer.zero_grad()
        (loss := (model(x := torch.randn(64, 50) + dist.get_rank()) - x[:, :10]).square().mean()).backward()
        optimizer.step()  # calls after_step
    print(f"rank {dist.get_rank()}: loss {loss.item():.4f}, sum of all weights {model.weight.sum().item():.6f}")
    dist.destroy_process_group()
