"""The harness's training loop and its models."""

from __future__ import annotations

import gc

import bench_entries
import pytest
import torch
from in_ci import only
from torch import Tensor, nn

from ddp_compile import ddp_compile
from ddp_compile.bench.implementations import IMPLEMENTATIONS, Implementation
from ddp_compile.bench.profiling import live_bytes, peak_live_bytes
from ddp_compile.bench.rank_process import bucket_bytes
from ddp_compile.bench.settings import Case, WorkloadSettings
from ddp_compile.bench.training import NUM_BATCHES, Training, make_optimizers, timed_steps
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


def test_records_add_up() -> None:
    training = training_of(Workload(*bench_entries.tiny()), micro_batches=3)
    records = timed_steps(training, 1, 20)
    assert len(records) == 20 and training.num_steps == 21
    assert all(min(record.forward_s, record.backward_s, record.optimizer_s) > 0 for record in records)
    gaps = [record.step_s - record.forward_s - record.backward_s - record.optimizer_s for record in records]
    # What was left out would be missing in every step; in most of them the processor may be elsewhere for a while.
    assert 0 <= min(gaps) < 1e-4


def test_peak_counts_what_is_live_at_once() -> None:
    """4 MiB of parameters, as much of gradients, and activations of a known size that die in the backward."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(1024, 1024))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight).exp()

    batch = torch.zeros(2048, 1024)  # 8 MiB
    workload = Workload(Wide(), lambda _: (batch, batch), lambda output, _: output.mean())
    training = training_of(workload)
    training.step()
    parameters = list(workload.model.parameters())
    gc.collect()
    elsewhere = live_bytes(()) - batch.nbytes - parameters[0].nbytes  # what other tests have left
    peak = (peak_live_bytes(training, parameters) - elsewhere) / 2**20
    # Parameters 4, batch 8, the result of exp that the backward needs 8, its gradient 8 and the one before it 8.
    assert peak == pytest.approx(4 + 8 + 8 + 8 + 8, abs=2)


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


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer='lion' is not known; pass one of sgd, adamw, muon"):
        make_optimizers("lion", nn.Linear(1, 1))


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
