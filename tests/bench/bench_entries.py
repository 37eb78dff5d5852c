"""Models and implementations that tests of the harness name as ``bench_entries:function``."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_compile import ddp_compile
from ddp_compile.bench.implementations import Implementation
from ddp_compile.bench.settings import Case

DELAY_S = 0.1


def tiny() -> tuple:
    def make_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(8, 256, generator=generator), torch.randn(8, 256, generator=generator)

    # Only products: for anything else inductor would need a C++ compiler for seconds, in each case of each rank.
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(2))), make_batch, F.mse_loss


def delayed(model: nn.Module, case: Case) -> Implementation:
    def forward(inputs: Tensor) -> Tensor:
        time.sleep(DELAY_S)
        return model(inputs)

    return Implementation(forward=forward)


def replicated(model: nn.Module, case: Case) -> Implementation:
    ours = ddp_compile(model, backend="eager", bucket_cap_mb=case.bucket_cap_mb)
    return Implementation(forward=ours, no_sync=ours.no_sync)


def fails_at_once(model: nn.Module, case: Case) -> Implementation:
    raise RuntimeError("this implementation cannot be built")


def fails_later(model: nn.Module, case: Case) -> Implementation:
    calls = 0

    def forward(inputs: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        # After the first steps, in the middle of the rounds, and on one rank only.
        if calls > 7 and dist.get_rank() == 1:
            raise RuntimeError("this implementation breaks down")
        return model(inputs)

    return Implementation(forward=forward)


def dies(model: nn.Module, case: Case) -> Implementation:
    if dist.get_rank() == 1:
        print("the last words of rank 1", flush=True)
        os._exit(7)
    return Implementation(forward=model)


def hangs(model: nn.Module, case: Case) -> Implementation:
    Path(os.environ["STARTED_FILE"]).touch()
    time.sleep(600)
    raise AssertionError("never comes here")
