"""Algorithms that send a bucket by several collectives: in one order on all ranks, and errors that name them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from in_ci import only
from models import Mlp, largest, loss_of, relative_difference
from rank_pool import RankPool, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ReductionError, ddp_compile
from ddp_compile.algorithms import AlgorithmConfig, Bucket, ByteGrad, CollectiveChain, CommAlgorithm

Ranks = Callable[[int], RankPool]


class Miscounted(CollectiveChain):
    """Two collectives, one behind the other, of which ``num_collectives`` need not know."""

    name = "all-reduce of twice the half"

    def __init__(self, process_group: dist.ProcessGroup, num_collectives: int) -> None:
        super().__init__(process_group)
        self.num_collectives = num_collectives

    def reduce(self, bucket: Bucket) -> Iterator[dist.Work]:
        for _ in range(2):
            bucket.flat.div_(dist.get_world_size())
            yield dist.all_reduce(bucket.flat, async_op=True)


@dataclass(frozen=True)
class Count(AlgorithmConfig):
    num_collectives: int

    def build(self, process_group: dist.ProcessGroup) -> CommAlgorithm:
        return Miscounted(process_group, self.num_collectives)


def train_with_a_chain(num_collectives: int) -> float:
    torch.manual_seed(3)
    module = Mlp(9, 3)
    reference = DistributedDataParallel(copy.deepcopy(module))
    model = ddp_compile(
        module, algorithm=Count(num_collectives), bucket_cap_mb=0.0003, backend="eager", split="forward"
    )
    torch.manual_seed(dist.get_rank())
    x = torch.randn(4, 9)
    for each in (model, reference):
        loss_of(each(x)).backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return largest([relative_difference(p.grad, q.grad / dist.get_world_size()) for p, q in pairs])


def test_a_chain_of_ones_own(ranks: Ranks) -> None:
    assert largest(ranks(2).run(train_with_a_chain, 2)) < 1e-6


class Raises(Miscounted):
    def reduce(self, bucket: Bucket) -> Iterator[dist.Work]:
        yield dist.all_reduce(bucket.flat, async_op=True)
        raise ValueError("no idea what comes next")


@dataclass(frozen=True)
class Raising(AlgorithmConfig):
    def build(self, process_group: dist.ProcessGroup) -> CommAlgorithm:
        return Raises(process_group, 2)


@on_ranks(2)
def test_an_error_in_reduce_is_not_taken_for_one_of_another_rank() -> None:
    with pytest.raises(ReductionError) as raised:
        model = ddp_compile(Mlp(9, 3), algorithm=Raising(), bucket_cap_mb=0.0003, backend="eager", split="none")
        loss_of(model(torch.randn(4, 9))).backward()
    rank = dist.get_rank()
    message = str(raised.value)
    assert message.startswith(f"rank {rank}: reduce() of the all-reduce of twice the half raised Value")
    assert "bucket 0" in message and "Another rank" not in message


class Uncounted(CollectiveChain):
    name = "uncounted"

    def reduce(self, bucket: Bucket) -> Iterator[dist.Work]:
        yield dist.all_reduce(bucket.flat, async_op=True)


@dataclass(frozen=True)
class Count0(AlgorithmConfig):
    def build(self, process_group: dist.ProcessGroup) -> CommAlgorithm:
        return Uncounted(process_group)


def test_a_chain_says_how_many_collectives_it_has(single_rank_group: None) -> None:
    with pytest.raises(TypeError, match="Uncounted has no num_collectives"):
        ddp_compile(nn.Linear(2, 2), algorithm=Count0())


class WithPenalty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(8, 8, bias=False)
        self.penalised = nn.Parameter(torch.randn(8, 8))

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@pytest.mark.parametrize("width", only([8], [8, 40]))
@on_ranks(2)
def test_two_modules_in_one_backward(width: int) -> None:
    """In one backward, in which the first gradient of the iteration is another module's on each rank."""
    algorithm = ByteGrad()
    torch.manual_seed(3)
    plain = [WithPenalty(), nn.Linear(width, 8, bias=False)]
    models = [ddp_compile(copy.deepcopy(each), algorithm=algorithm, backend="eager", split="none") for each in plain]
    differences = []
    for step in range(5):
        torch.manual_seed(10 * step + dist.get_rank())
        x, y = torch.randn(4, 8), torch.randn(4, width)
        for first, second in (plain, models):
            first.zero_grad()
            second.zero_grad()
            penalty_comes_first = dist.get_rank() == 1 and step >= 2
            penalty = first.penalised.square().sum() if penalty_comes_first else None
            losses = first(x).square().sum() + second(y).square().sum()
            (losses + (first.penalised.square().sum() if penalty is None else penalty)).backward()
        for ours, own in zip(models, plain, strict=True):
            for p, q in zip(ours.parameters(), own.parameters(), strict=True):
                dist.all_reduce(q.grad)
                differences.append(relative_difference(p.grad, q.grad / dist.get_world_size()))
    assert largest(differences) < 0.05


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size()


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    @torch.compiler.disable
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return SumOverRanks.apply(self.first(x)), self.second(x)


@on_ranks(2)
def test_collectives_of_the_backward_itself() -> None:
    """One for both outputs, or one for each; that of the first output has an all-reduce of its own."""
    torch.manual_seed(3)
    plain = TwoOutputs()
    model = ddp_compile(copy.deepcopy(plain), algorithm=ByteGrad(), backend="eager", split="none", bucket_cap_mb=1e-4)
    differences = []
    for step in range(4):
        torch.manual_seed(10 * step + dist.get_rank())
        x = torch.randn(3, 8)
        for module in (model, plain):
            module.zero_grad()
        losses = [output.square().sum() for output in model(x)]
        for loss in [sum(losses)] if step < 2 else losses[::-1]:
            loss.backward()
        sum(output.square().sum() for output in plain(x)).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            dist.all_reduce(q.grad)
            differences.append(relative_difference(p.grad, q.grad / dist.get_world_size()))
    assert largest(differences) < 0.05


@pytest.mark.parametrize(("num_collectives", "yielded"), [(1, "more"), (3, "fewer")])
def test_a_chain_that_was_miscounted_is_an_error(num_collectives: int, yielded: str, ranks: Ranks) -> None:
    for rank, failure in enumerate(ranks(2).run_expecting_failures(train_with_a_chain, num_collectives)):
        assert failure.kind == "ReductionError"
        assert failure.message.startswith(
            f"rank {rank}: reduce() of the all-reduce of twice the half yielded {yielded}"
        )
        assert f"than num_collectives = {num_collectives} for bucket" in failure.message


def leave_in_the_middle() -> None:
    """Rank 1 does not come to its second backward."""
    model = ddp_compile(Mlp(33, 4), algorithm=ByteGrad(), bucket_cap_mb=0.003, backend="eager", split="none")
    for step in range(2 - dist.get_rank()):
        torch.manual_seed(step)
        loss_of(model(torch.randn(6, 33))).backward()


def test_a_rank_that_does_not_come_is_named_with_the_bucket(ranks: Ranks) -> None:
    waiting, _ = ranks(2).run_expecting_failures(leave_in_the_middle, timeout_s=3.0)
    assert waiting.kind == "ReductionError"
    assert waiting.message.startswith("rank 0: the all-reduce of bucket 0 (")
