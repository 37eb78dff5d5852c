"""Gradients and buffers over five SGD steps, against eager DistributedDataParallel."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import difference, is_same_everywhere
from in_ci import only
from models import (
    CASES,
    ROWS_PER_RANK,
    assert_buckets_launched_early,
    global_batch,
    largest,
    loss_of,
    make_model,
    relative_difference,
)
from rank_pool import on_ranks
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ddp_compile

NUM_STEPS = 5


def train_both_ways(case: str, backend: str, cap_mb: float, split: str, **settings: Any) -> float:
    """Largest relative difference of any gradient or buffer; the gradients of all ranks are the same."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = ddp_compile(make_model(case), bucket_cap_mb=cap_mb, backend=backend, split=split, **settings)
    with_ddp = DistributedDataParallel(make_model(case))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.02) for m in (model, with_ddp)]
    worst = [0.0]
    for step in range(NUM_STEPS):
        batch = global_batch(case, step, world_size)
        share = batch[rank * ROWS_PER_RANK : (rank + 1) * ROWS_PER_RANK]
        for each, optimizer in zip((model, with_ddp), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(each(share)).backward()
        assert all(is_same_everywhere(parameter.grad) for parameter in model.parameters())
        worst.append(difference(model, with_ddp))
        buffers = zip(model.buffers(), with_ddp.buffers(), strict=True)
        worst += [relative_difference(ours.float(), theirs.float()) for ours, theirs in buffers]
        for optimizer in optimizers:
            optimizer.step()
    assert_buckets_launched_early(model)
    return largest(worst)


# Each model once, one of them on three ranks.
IN_CI = [("mlp", "backward", 3), ("gpt", "backward", 2), ("cnn_batch_norm", "forward", 2)]


@pytest.mark.parametrize(
    ("case", "split", "world_size"), only(IN_CI, itertools.product(CASES, ("forward", "backward"), (2, 3)))
)
@on_ranks()
def test_gradients_are_ddps(case: str, world_size: int, split: str) -> None:
    # Two summands give the same bits in any order; with three, a ring starts elsewhere when buckets differ.
    assert train_both_ways(case, "aot_eager", 0.005, split) <= (0.0 if world_size == 2 else 1e-5)


# In CI the case that takes no C++ kernels, which the compiler needs most of a minute for. With a static graph gradients
# move into the flat buffers; `test_memory` has that in CI.
PRODUCTS = ("forward", "products", 0.05, False)
UNDER_INDUCTOR = [
    PRODUCTS,
    ("forward", "gpt", 0.1, False),
    ("forward", "cnn_batch_norm", 0.02, False),
    ("backward", "products", 0.05, False),
    ("backward", "products", 0.05, True),
    ("backward", "gpt", 0.1, False),
    ("backward", "cnn_batch_norm", 0.02, False),
]


@pytest.mark.inductor
@pytest.mark.parametrize(("split", "case", "cap_mb", "static_graph"), only([PRODUCTS], UNDER_INDUCTOR))
@on_ranks(2)
def test_gradients_under_inductor(case: str, cap_mb: float, split: str, static_graph: bool) -> None:
    assert train_both_ways(case, "inductor", cap_mb, split, static_graph=static_graph) < 1e-5
