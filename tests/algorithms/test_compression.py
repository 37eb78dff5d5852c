"""Gradients sent in fewer bytes, reduced inside nodes first, or added up at their owner, beside one process."""

import copy
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from averages import on_nodes
from beside import is_same_everywhere, of_all_ranks, own_batch, seeded
from compression import byte_grad_of
from in_ci import only
from models import Mlp, loss_of, relative_difference
from rank_pool import on_ranks
from torch import Tensor, nn

from ddp_compile import ReplicationError, ddp_compile, torch_internals
from ddp_compile.algorithms import AlgorithmConfig, ByteGrad, GradientAllReduce

HALF = GradientAllReduce(wire_dtype=torch.float16)
BRAIN = GradientAllReduce(wire_dtype=torch.bfloat16)
ALGORITHMS: list[AlgorithmConfig] = [ByteGrad(), HALF, BRAIN]


class SentBytes:
    """What this rank sends in the collectives that the algorithms call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.others = dist.get_world_size() - 1
        to_all, gather = dist.all_to_all_single, torch_internals.all_gather_single

        def all_to_all(output: Tensor, sent: Tensor, **settings: Any) -> Any:
            self.count += sent.nbytes * self.others // (self.others + 1)
            return to_all(output, sent, **settings)

        def all_gather(output: Tensor, sent: Tensor, group: Any) -> Any:
            self.count += sent.nbytes * self.others  # by a ring
            return gather(output, sent, group)

        monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
        monkeypatch.setattr(torch_internals, "all_gather_single", all_gather)


def flat_gradients(module: nn.Module, bucket: Any) -> Tensor:
    return torch.cat([module.get_parameter(gradient.fqn).grad.reshape(-1) for gradient in bucket.gradients])


def train(
    algorithm: AlgorithmConfig, width: int, dtype: torch.dtype = torch.float32, split: str = "backward"
) -> Iterator[tuple[int, list[tuple[Tensor, Tensor]]]]:
    """For each step the bytes that this rank has sent, and for each bucket all ranks' own gradients, and ours."""
    plain = seeded(lambda: Mlp(width, 4).to(dtype))
    settings: Any = {"bucket_cap_mb": 0.003, "split": split, "backend": "aot_eager"}
    model = ddp_compile(copy.deepcopy(plain), algorithm=algorithm, **settings)
    with pytest.MonkeyPatch.context() as monkeypatch:
        sent = SentBytes(monkeypatch)
        for step in range(3):
            x = own_batch(step, width, 6).to(dtype)
            sent.count = 0
            for each in (plain, model):
                each.zero_grad()
                loss_of(each(x)).backward()
            buckets = model.bucket_plan.buckets
            own = [of_all_ranks(flat_gradients(plain, bucket).float()).to(dtype) for bucket in buckets]
            yield sent.count, [(each, flat_gradients(model, bucket)) for each, bucket in zip(own, buckets, strict=True)]
            with torch.no_grad():  # both continue from the same weights
                for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                    p -= 0.1 * q.grad
                    q.copy_(p)


@pytest.mark.parametrize(
    ("world_size", "width", "dtype"),
    only(
        [(3, 7, torch.bfloat16)],
        [
            (1, 7, torch.float32),
            (2, 33, torch.float32),
            (3, 7, torch.bfloat16),
            (3, 33, torch.float16),
            (4, 7, torch.float32),
            (5, 2, torch.float32),  # fewer values than fill a chunk for each rank
        ],
    ),
)
@on_ranks()
def test_byte_grad_matches_one_process(world_size: int, width: int, dtype: torch.dtype, split: str) -> None:
    for sent_bytes, buckets in train(ByteGrad(), width, dtype, split):
        for own, reduced in buckets:
            assert torch.equal(reduced, byte_grad_of(list(own)) if world_size > 1 else own[0])
        chunks = [-(-len(reduced) // world_size) for _, reduced in buckets]
        rows = [16 * -(-(8 + chunk) // 16) for chunk in chunks]  # minimum, maximum, codes, up to 16 bytes
        assert sent_bytes == sum(2 * (world_size - 1) * row for row in rows)


@pytest.mark.parametrize(("algorithm", "digits"), only([(BRAIN, 1e-2)], [(HALF, 2e-3), (BRAIN, 1e-2)]))
@on_ranks(3)
def test_wire_dtype_keeps_its_digits(algorithm: GradientAllReduce, digits: float) -> None:
    for _, buckets in train(algorithm, 33):
        for own, reduced in buckets:
            assert 0 < relative_difference(reduced, own.mean(0)) < digits
            assert is_same_everywhere(reduced)


@pytest.mark.parametrize("value", only([float("-inf")], [float("inf"), float("-inf")]))
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
@on_ranks(2, eagerly=True)
def test_non_finite_gradients_on_every_rank(algorithm: AlgorithmConfig, value: float) -> None:
    torch.manual_seed(3)
    model = ddp_compile(nn.Linear(5, 5), algorithm=algorithm, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    x = torch.randn(4, 5)
    if dist.get_rank() == 1:
        x[0, 0] = value
    scaler.scale(model(x).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (bool(model.weight.grad[:, 0].isfinite().any()), scaler.get_scale()) == (False, 4.0)


@on_ranks(4, eagerly=True)
def test_factor_is_split_around_the_sum() -> None:
    """With four ranks by 2 before and 2 after it; the smallest number of float16 is 2**-24."""
    for value, expected in ((30000.0, 30000.0), (40000.0, float("inf")), (2.0**-23, 2.0**-23)):
        model = ddp_compile(nn.Linear(1, 1, bias=False), algorithm=HALF, backend="eager")
        model(torch.tensor([[value]])).sum().backward()
        assert model.weight.grad.item() == pytest.approx(expected, rel=1e-2)


# Reduction inside nodes first: nodes of equal and of other sizes, simulated by what a launcher tells the ranks.

INSIDE_NODES = GradientAllReduce(hierarchical=True)
HALF_INSIDE_NODES = GradientAllReduce(hierarchical=True, wire_dtype=torch.float16)
BYTE_GRAD = ByteGrad(hierarchical=True)
SUMS_INSIDE_NODES = GradientAllReduce(sum_dtype=torch.float32, hierarchical=True)
NARROW_INSIDE_NODES = GradientAllReduce(wire_dtype=torch.bfloat16, sum_dtype=torch.float32, hierarchical=True)
TOLERANCES = {INSIDE_NODES: 1e-6, HALF_INSIDE_NODES: 2e-3, BYTE_GRAD: 0.03}
TOLERANCES |= {SUMS_INSIDE_NODES: 1e-5, NARROW_INSIDE_NODES: 5e-3}
TWO_AND_TWO, ONE_AND_THREE = [2, 2], [1, 3]
EVERYONE = [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("sizes", "algorithm", "members"),
    only(
        [
            (ONE_AND_THREE, INSIDE_NODES, EVERYONE),
            (TWO_AND_TWO, BYTE_GRAD, [1, 2, 3]),
            (TWO_AND_TWO, SUMS_INSIDE_NODES, EVERYONE),
            (TWO_AND_TWO, NARROW_INSIDE_NODES, EVERYONE),
        ],
        itertools.product([TWO_AND_TWO, ONE_AND_THREE, [4]], TOLERANCES, [EVERYONE, [1, 2, 3], [0, 3], [2, 3]]),
    ),
    ids=str,
)
@on_ranks(4)
def test_hierarchical_mean(sizes: list[int], algorithm: AlgorithmConfig, members: list[int]) -> None:
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return
    plain = seeded(lambda: Mlp(17, 4))
    settings: Any = {"bucket_cap_mb": 0.002, "backend": "aot_eager"}
    with on_nodes(*sizes):
        model = ddp_compile(copy.deepcopy(plain), algorithm=algorithm, process_group=group, **settings)
    for step in range(3):
        for each in (plain, model):
            each.zero_grad()
            loss_of(each(own_batch(step, 17, 6))).backward()
    for bucket in model.bucket_plan.buckets:
        reduced = flat_gradients(model, bucket)
        own, ours = (of_all_ranks(each, group) for each in (flat_gradients(plain, bucket), reduced))
        assert relative_difference(reduced, own.mean(0)) < TOLERANCES[algorithm]
        assert (ours == reduced).all()


@on_ranks(4)
def test_byte_grad_compresses_sums_of_nodes() -> None:
    plain = seeded(lambda: nn.Linear(33, 5))
    with on_nodes(2, 2):
        model = ddp_compile(copy.deepcopy(plain), algorithm=BYTE_GRAD, backend="eager")
    for each in (plain, model):
        loss_of(each(own_batch(0, 33, 6))).backward()
    (bucket,) = model.bucket_plan.buckets
    scaled = 0.25 * of_all_ranks(flat_gradients(plain, bucket))
    # Of two nodes, whose sums are divided already: the reference divides them by 2 again.
    expected = byte_grad_of([2 * (scaled[0] + scaled[1]), 2 * (scaled[2] + scaled[3])])
    assert torch.equal(flat_gradients(model, bucket), expected)


# Sums at the owner: the bits of one process that adds up in the order of ranks.

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
    factor = 1.0 if wire == dtype else 2.0 ** (size.bit_length() - 1)
    divided = (gradients.to(wide) * (1.0 / size)).to(dtype)
    sent = (divided.to(wide) * factor).to(wire).to(torch.promote_types(wire, FLOAT32))
    return (functools.reduce(torch.add, sent) * (1.0 / factor)).to(wire).to(dtype)


@pytest.mark.parametrize("world_size", only([3], [1, 2, 3, 4, 8]))
@pytest.mark.parametrize(
    ("algorithm", "dtype"),
    only(
        [(NARROW, FLOAT32), (NARROW, BFLOAT16)],
        [
            (NARROW, FLOAT32),
            (NARROW, FLOAT16),
            (NARROW, BFLOAT16),
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


@on_ranks(2)
def test_refused_models() -> None:
    said = f"rank {dist.get_rank()}: the ByteGrad all-reduce takes gradients of float32, bfloat16, float16, and refuses"
    with pytest.raises(ReplicationError, match=rf"{said} weight, bias \(float64\)."):
        ddp_compile(nn.Linear(2, 2).double(), algorithm=ByteGrad())
    said = f"rank {dist.get_rank()}: the gradient all-reduce with sums at the owner takes"
    with pytest.raises(ReplicationError, match=rf"{said}.*refuses weight, bias \(complex64\)"):
        ddp_compile(nn.Linear(2, 2).to(torch.complex64), algorithm=REPRODUCIBLE)
    model = ddp_compile(nn.Linear(2, 2), algorithm=REPRODUCIBLE)
    with pytest.raises(ReplicationError, match=r"comm hook .* cannot be used with the .*sums at the owner"):
        model.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    with pytest.raises(ReplicationError, match=r"sparse"):
        ddp_compile(nn.Embedding(3, 2, sparse=True), algorithm=REPRODUCIBLE)
