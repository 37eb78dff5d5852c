"""Reduction inside nodes first: nodes of equal and of other sizes, simulated by what a launcher tells the ranks."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from in_ci import only
from models import Mlp, loss_of, relative_difference
from rank_pool import RankPool, on_ranks
from test_gradient_compression import byte_grad_of
from torch import Tensor

from ddp_compile import RanksDifferError, ddp_compile
from ddp_compile.algorithms import AlgorithmConfig, ByteGrad, GradientAllReduce

Ranks = Callable[[int], RankPool]
ALL_REDUCE = GradientAllReduce(hierarchical=True)
HALF = GradientAllReduce(hierarchical=True, wire_dtype=torch.float16)
BYTE_GRAD = ByteGrad(hierarchical=True)
TWO_AND_TWO, ONE_AND_THREE = [2, 2], [1, 3]


def tell_nodes(monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> None:
    """As a launcher does on nodes with so many ranks each."""
    places = [place for size in sizes for place in range(size)]
    monkeypatch.setenv("LOCAL_RANK", str(places[dist.get_rank()]))


def gradients_of_a_step(
    algorithm: AlgorithmConfig, sizes: list[int], members: list[int]
) -> tuple[Tensor, Tensor] | None:
    """This rank's own, and what has become of them, in plan order; None on ranks that are no members."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        tell_nodes(monkeypatch, sizes)
        group = dist.new_group(members)
        if dist.get_rank() not in members:
            return None
        torch.manual_seed(3)
        plain = Mlp(17, 4)
        model = ddp_compile(
            copy.deepcopy(plain), algorithm=algorithm, process_group=group, bucket_cap_mb=0.002, backend="aot_eager"
        )
        for step in range(3):
            torch.manual_seed(10 * step + dist.get_rank())
            x = torch.randn(6, 17)
            for each in (plain, model):
                each.zero_grad()
                loss_of(each(x)).backward()
        names = [gradient.fqn for bucket in model.bucket_plan.buckets for gradient in bucket.gradients]
        own, reduced = (
            torch.cat([module.get_parameter(name).grad.reshape(-1) for name in names]) for module in (plain, model)
        )
        return own, reduced


TOLERANCES = {ALL_REDUCE: 1e-6, HALF: 2e-3, BYTE_GRAD: 0.03}
EVERYONE = [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("sizes", "algorithm", "members"),
    only(
        [(ONE_AND_THREE, ALL_REDUCE, EVERYONE), (TWO_AND_TWO, BYTE_GRAD, [1, 2, 3])],
        itertools.product([TWO_AND_TWO, ONE_AND_THREE, [4]], TOLERANCES, [EVERYONE, [1, 2, 3], [0, 3], [2, 3]]),
    ),
    ids=str,
)
def test_it_is_the_mean_over_all_ranks_however_nodes_divide_them(
    sizes: list[int], algorithm: AlgorithmConfig, members: list[int], ranks: Ranks
) -> None:
    found = [each for each in ranks(4).run(gradients_of_a_step, algorithm, sizes, members) if each is not None]
    mean = torch.stack([own for own, _ in found]).mean(0)
    for _, reduced in found:
        assert relative_difference(reduced, mean) < TOLERANCES[algorithm]
        assert torch.equal(reduced, found[0][1])


def one_bucket_of_a_linear_layer() -> tuple[Tensor, Tensor]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        tell_nodes(monkeypatch, TWO_AND_TWO)
        torch.manual_seed(3)
        plain = torch.nn.Linear(33, 5)
        model = ddp_compile(copy.deepcopy(plain), algorithm=BYTE_GRAD, backend="eager")
        torch.manual_seed(dist.get_rank())
        x = torch.randn(6, 33)
        for each in (plain, model):
            loss_of(each(x)).backward()
        names = [gradient.fqn for gradient in model.bucket_plan.buckets[0].gradients]
        own, reduced = (
            torch.cat([module.get_parameter(name).grad.reshape(-1) for name in names]) for module in (plain, model)
        )
        return own, reduced


def test_byte_grad_compresses_the_sums_of_nodes(ranks: Ranks) -> None:
    found = ranks(4).run(one_bucket_of_a_linear_layer)
    scaled = [own * 0.25 for own, _ in found]
    # Of two nodes, whose sums are divided already: the reference divides them by 2 again.
    expected = byte_grad_of([2 * (scaled[0] + scaled[1]), 2 * (scaled[2] + scaled[3])])
    for _, reduced in found:
        assert torch.equal(reduced, expected)


@pytest.mark.parametrize("value", [None, "first"])
@on_ranks(2)
def test_nodes_that_are_not_known_are_an_error_on_every_rank(value: str | None) -> None:
    with pytest.raises(ValueError) as raised, pytest.MonkeyPatch.context() as monkeypatch:
        tell_nodes(monkeypatch, [2])
        if dist.get_rank() == 1:
            monkeypatch.setenv("LOCAL_RANK", value) if value else monkeypatch.delenv("LOCAL_RANK")
        ddp_compile(torch.nn.Linear(2, 2), algorithm=ALL_REDUCE)
    rank = dist.get_rank()
    message = str(raised.value)
    assert message.startswith(f"rank {rank}: the hierarchical gradient all-reduce has to know")
    assert "LOCAL_RANK is no number on rank 1." in message


@on_ranks(2)
def test_ranks_have_to_agree_on_it() -> None:
    with pytest.raises(RanksDifferError) as raised, pytest.MonkeyPatch.context() as monkeypatch:
        tell_nodes(monkeypatch, [2])
        ddp_compile(torch.nn.Linear(2, 2), algorithm=GradientAllReduce(hierarchical=dist.get_rank() == 0))
    assert "hierarchical gradient all-reduce" in str(raised.value)
