"""The harness's training loop and its models."""

import bench_entries
import pytest
import torch
from in_ci import only

from ddp_compile import ddp_compile
from ddp_compile.bench.implementations import IMPLEMENTATIONS, Implementation
from ddp_compile.bench.rank_process import bucket_bytes
from ddp_compile.bench.settings import Case, WorkloadSettings
from ddp_compile.bench.training import NUM_BATCHES, Training, make_optimizers
from ddp_compile.bench.workloads import WORKLOADS, Workload, make_workload

pytestmark = pytest.mark.usefixtures("single_rank_group")
SETTINGS = WorkloadSettings(model="tiny")


def training_of(workload: Workload, micro_batches: int = 1) -> Training:
    implementation = Implementation(forward=workload.model)
    return Training(implementation, workload.model, workload, SETTINGS, 0, micro_batches)


def test_it_trains_as_a_bare_loop_does() -> None:
    torch.manual_seed(0)
    workload = Workload(*bench_entries.tiny())
    torch.manual_seed(0)
    reference = bench_entries.tiny()[0]
    training = training_of(workload, micro_batches=2)
    (optimizer,) = make_optimizers("sgd", reference)
    for step in range(5):
        training.step()
        for micro_batch in range(2):
            inputs, targets = training.batches[(2 * step + micro_batch) % NUM_BATCHES]
            workload.loss(reference(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(workload.model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", WORKLOADS)
def test_models_train(name: str) -> None:
    workload = make_workload(WorkloadSettings(model=name, depth=4, width=64, batch_size=2))
    training = training_of(workload)
    training.step()
    assert training.loss is not None and training.loss.isfinite()
    again = make_workload(WorkloadSettings(model=name, depth=4, width=64, batch_size=2))
    fresh = [parameter.clone() for parameter in again.model.parameters()]
    changed = [not torch.equal(a, b) for a, b in zip(workload.model.parameters(), fresh, strict=True)]
    assert sum(changed) > len(changed) / 2


@pytest.mark.parametrize("cap", only([2.0, 25.0], [2.0, 5.0, 25.0]))
def test_peers_and_bound_have_the_buckets_that_ours_has(cap: float) -> None:
    """Another first bucket would be launched earlier or later, and the comparison would be one of settings."""
    case = Case(implementation="ddp-eager", bucket_cap_mb=cap)
    model, make_batch, loss = make_workload(WorkloadSettings(model="gpt-small", batch_size=1))
    peer = IMPLEMENTATIONS["ddp-eager"](model, case).forward
    inputs, targets = make_batch(torch.Generator().manual_seed(0))
    for _ in range(3):  # the reducer rebuilds its buckets before the second forward, and then logs them
        loss(peer(inputs), targets).backward()
    theirs = [int(size) for size in peer._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")]

    replicated = ddp_compile(
        make_workload(WorkloadSettings(model="gpt-small")).model, bucket_cap_mb=cap, backend="eager"
    )
    loss(replicated(inputs), targets).backward()
    assert [bucket.num_bytes for bucket in replicated.bucket_plan.buckets] == theirs
    # The bound knows the order of registration only, in which the embeddings at the end come the other way round.
    alone = bucket_bytes(model, cap)
    assert alone[:-2] == theirs[: len(alone) - 2] and sum(alone) == sum(theirs)
