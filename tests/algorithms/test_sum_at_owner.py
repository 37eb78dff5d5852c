"""Gradients that are added up at their owner: the bits of one process that adds up in the order of ranks."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from averages import on_nodes
from beside import of_all_ranks, own_batch, seeded
from in_ci import only
from models import Mlp, loss_of, relative_difference
from rank_pool import on_ranks
from torch import Tensor, nn

from ddp_compile import ReplicationError, ddp_compile
from ddp_compile.algorithms import GradientAllReduce

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
NARROW = GradientAllReduce(wire_dtype=BFLOAT16, sum_dtype=FLOAT32)
REPRODUCIBLE = GradientAllReduce(reproducible=True)

PLANS: list[dict[str, Any]] = [
    {"bucket_cap_mb": 0.0005, "split": "forward"},
    {"bucket_cap_mb": 0.003, "split": "backward"},
    {"bucket_cap_mb": 0.002, "regions": [nn.Linear]},
    {"bucket_cap_mb": 0.001, "split": "auto", "static_graph": True},
    {"bucket_cap_mb": 25, "split": "none"},
]


def sum_of(gradients: Tensor, algorithm: GradientAllReduce, dtype: torch.dtype) -> Tensor:
    """The mean of all ranks' gradients, shape (ranks, n), as the algorithm rounds it."""
    size, wire, wide = len(gradients), algorithm.wire_dtype or dtype, torch.promote_types(dtype, FLOAT32)
    factor = 1.0 if algorithm.wire_dtype is None else 2.0 ** (size.bit_length() - 1)
    divided = (gradients.to(wide) * (1.0 / size)).to(dtype)
    sent = (divided.to(wide) * factor).to(wire).to(torch.promote_types(wire, FLOAT32))
    return (functools.reduce(torch.add, sent) * (1.0 / factor)).to(wire).to(dtype)


@pytest.mark.parametrize("world_size", only([3], [1, 2, 3, 4, 8]))
@pytest.mark.parametrize(
    ("algorithm", "dtype"),
    only(
        [(NARROW, FLOAT32)],
        [
            (NARROW, FLOAT32),
            (NARROW, FLOAT16),
            (GradientAllReduce(wire_dtype=FLOAT16, reproducible=True), FLOAT32),
            (GradientAllReduce(sum_dtype=FLOAT32), BFLOAT16),
            (REPRODUCIBLE, BFLOAT16),
            (REPRODUCIBLE, FLOAT32),
            (REPRODUCIBLE, torch.float64),
        ],
    ),
    ids=str,
)
@on_ranks()
def test_bits_of_every_plan(world_size: int, algorithm: GradientAllReduce, dtype: torch.dtype) -> None:
    plain = seeded(lambda: Mlp(17, 5).to(dtype))
    for settings in PLANS:
        model = ddp_compile(copy.deepcopy(plain), algorithm=algorithm, backend="aot_eager", **settings)
        for step in range(3):
            batch = own_batch(step, 17, 6).to(dtype)
            model.zero_grad()
            loss_of(model(batch)).backward()
            reduced = [p.grad.flatten() for p in model.parameters()]
            model.zero_grad()
            with model.no_sync():  # this rank's own gradients, whose bits depend on what was compiled
                loss_of(model(batch)).backward()
            for p, q in zip(model.parameters(), reduced, strict=True):
                own = of_all_ranks(p.grad.flatten().double()).to(dtype)
                assert torch.equal(q, sum_of(own, algorithm, dtype) if world_size > 1 else own[0])
            model.zero_grad()


@pytest.mark.parametrize("wire_dtype", [BFLOAT16, None])
@on_ranks(4)
def test_hierarchical(wire_dtype: torch.dtype | None) -> None:
    plain = seeded(lambda: nn.Linear(33, 5))
    with on_nodes(2, 2):
        algorithm = GradientAllReduce(wire_dtype=wire_dtype, sum_dtype=FLOAT32, hierarchical=True)
        model = ddp_compile(copy.deepcopy(plain), algorithm=algorithm, backend="eager")
    for step in range(3):  # from the second one on, without a copy if gradients travel in their own dtype
        for each in (plain, model):
            each.zero_grad()
            loss_of(each(own_batch(step, 33, 6))).backward()
    reduced = model.weight.grad.flatten()
    assert relative_difference(reduced, of_all_ranks(plain.weight.grad.flatten()).mean(0)) < 5e-3
    assert (of_all_ranks(reduced) == reduced).all()


@on_ranks(2)
def test_refused_models() -> None:
    said = f"rank {dist.get_rank()}: the gradient all-reduce with sums at the owner takes"
    with pytest.raises(ReplicationError, match=rf"{said}.*refuses weight, bias \(complex64\)"):
        ddp_compile(nn.Linear(2, 2).to(torch.complex64), algorithm=REPRODUCIBLE)
    model = ddp_compile(nn.Linear(2, 2), algorithm=REPRODUCIBLE)
    with pytest.raises(ReplicationError, match=r"comm hook .* cannot be used with the .*sums at the owner"):
        model.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    with pytest.raises(ReplicationError, match=r"sparse"):
        ddp_compile(nn.Embedding(3, 2, sparse=True), algorithm=REPRODUCIBLE)
