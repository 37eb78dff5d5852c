"""The benchmark's ``--tokens`` and ``--clip``: every implementation trains what one process trains."""

import time

import pytest
import torch
import torch.distributed as dist
from beside import gathered
from rank_pool import on_ranks
from simulated_groups import SLOW, simulated_group

from ddp_compile.bench.implementations import implementation_named
from ddp_compile.bench.loss_scale import BlockingCount, num_tokens
from ddp_compile.bench.settings import Case, WorkloadSettings
from ddp_compile.bench.training import Training, make_optimizers
from ddp_compile.bench.workloads import Workload, make_workload

# Every step's gradients are larger, so all are clipped.
SETTINGS = WorkloadSettings(model="gpt-small", depth=1, width=64, batch_size=2, clip=0.1, tokens=True)
MICRO_BATCHES, STEPS = 2, 3


def workload() -> Workload:
    made = make_workload(SETTINGS)
    return made._replace(model=made.model.double())  # a step of float32 is no larger than its rounding


@pytest.mark.long
@on_ranks(2, eagerly=True)
def test_trains_the_mean_over_tokens() -> None:
    for name in ("ddp-eager", "functional", "ddp_compile-forward", "ddp_compile-sharded"):
        ours, reference = workload(), workload()
        built = implementation_named(name)(ours.model, Case(implementation=name))
        training = Training(built, ours.model, ours, SETTINGS, dist.get_rank(), MICRO_BATCHES)
        of_ranks = gathered(training.batches)
        (optimizer,) = make_optimizers("sgd", reference.model)
        for step in range(STEPS):
            training.step()
            first = step * MICRO_BATCHES
            whole = [batch for batches in of_ranks for batch in batches[first : first + MICRO_BATCHES]]
            losses = [reference.loss(reference.model(inputs), targets) for inputs, targets in whole]
            counts = [num_tokens(targets) for _, targets in whole]
            assert len(set(map(int, counts))) == len(counts)
            (sum(losses) / sum(counts)).backward()
            norm = torch.nn.utils.clip_grad_norm_(reference.model.parameters(), SETTINGS.clip)
            assert norm > SETTINGS.clip
            optimizer.step()
            optimizer.zero_grad()
        mine, theirs, before = (
            torch.nn.utils.parameters_to_vector(w.model.parameters()) for w in (ours, reference, workload())
        )
        assert (mine - theirs).norm() < 1e-9 * (theirs - before).norm(), name
        last = slice(MICRO_BATCHES - 1, None, MICRO_BATCHES)
        assert training.mean_loss() == pytest.approx((sum(losses[last]) / sum(counts[last])).item(), rel=1e-9)


def test_blocking_count_takes_the_latency_of_a_simulated_link() -> None:
    targets = torch.tensor([[1, 2, -100], [3, -100, -100]])
    with simulated_group(SLOW):
        scale = BlockingCount()
        start = time.perf_counter()
        scale.begin_step([targets])
        assert time.perf_counter() - start >= SLOW.alpha_s
    # The pretended ranks have as many tokens each, and the mean over the ranks divides by their number.
    assert scale.scaled(torch.tensor(6.0), targets) == 2
