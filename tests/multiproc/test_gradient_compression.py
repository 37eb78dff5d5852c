"""Gradients that travel in fewer bytes: ByteGrad, and a dtype of the wire, beside the arithmetic of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from in_ci import only
from models import Mlp, largest, loss_of, relative_difference
from rank_pool import RankPool, on_ranks
from test_training_patterns import PATTERNS
from test_training_patterns import train as train_pattern
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ReplicationError, ddp_compile, torch_internals
from ddp_compile.algorithms import AlgorithmConfig, ByteGrad, GradientAllReduce
from ddp_compile.kernels import minmax_u8_compress, minmax_u8_decompress

Ranks = Callable[[int], RankPool]
HALF = GradientAllReduce(wire_dtype=torch.float16)
BRAIN = GradientAllReduce(wire_dtype=torch.bfloat16)
ALGORITHMS: list[AlgorithmConfig] = [ByteGrad(), HALF, BRAIN]


class Step(NamedTuple):
    """One bucket in one step of one rank.

    Args:
        own: What the plain module computes on this rank, shape (n,).
        reduced: The same places of ``.grad``.
        sent_bytes: By all collectives of this step.
    """

    own: Tensor
    reduced: Tensor
    sent_bytes: int


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


def train(algorithm: AlgorithmConfig, width: int, dtype: torch.dtype, split: str) -> list[list[Step]]:
    """What happened to each bucket of the plan, in each step."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return _train(algorithm, width, dtype, split, SentBytes(monkeypatch))


def _train(algorithm: AlgorithmConfig, width: int, dtype: torch.dtype, split: str, sent: SentBytes) -> list[list[Step]]:
    torch.manual_seed(3)
    plain = Mlp(width, 4).to(dtype)
    model = ddp_compile(
        copy.deepcopy(plain), algorithm=algorithm, bucket_cap_mb=0.003, split=split, backend="aot_eager"
    )
    steps = []
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        x = torch.randn(6, width, dtype=dtype)
        sent.count = 0
        for each in (plain, model):
            each.zero_grad()
            loss_of(each(x)).backward()
        steps.append([])
        for bucket in model.bucket_plan.buckets:
            flats = [
                torch.cat([module.get_parameter(gradient.fqn).grad.reshape(-1) for gradient in bucket.gradients])
                for module in (plain, model)
            ]
            steps[-1].append(Step(*flats, sent.count))
        with torch.no_grad():  # both go on from the same weights
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                p -= 0.1 * q.grad
                q.copy_(p)
    return steps


def by_bucket(results: list[list[list[Step]]]) -> list[list[Step]]:
    """For each bucket of each step what all ranks say of it."""
    return [list(ranks) for step in zip(*results, strict=True) for ranks in zip(*step, strict=True)]


def coded(values: Tensor, num_chunks: int = 1) -> Tensor:
    out = torch.empty(values.shape, dtype=torch.float32)
    if values.numel():
        minmax_u8_decompress(minmax_u8_compress(values, num_chunks, implementation="reference"), out)
    return out


def byte_grad_of(flats: list[Tensor]) -> Tensor:
    """In one process, for whole buckets: each rank adds what the others send to its own chunk, and sends the sum."""
    own = [flat * (1.0 / len(flats)) for flat in flats]
    sent = [coded(each, len(flats)) for each in own]
    chunk_numel = -(-len(own[0]) // len(flats))
    sums = []
    for rank in range(len(flats)):
        chunk = slice(rank * chunk_numel, (rank + 1) * chunk_numel)
        total = own[rank][chunk].float()
        for other, each in enumerate(sent):
            total = total if other == rank else total + each[chunk]
        sums.append(coded(total))
    return torch.cat(sums).to(flats[0].dtype)


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
def test_byte_grad_is_the_arithmetic_of_one_process(
    world_size: int, width: int, dtype: torch.dtype, split: str, ranks: Ranks
) -> None:
    for bucket in by_bucket(ranks(world_size).run(train, ByteGrad(), width, dtype, split)):
        expected = byte_grad_of([each.own for each in bucket]) if world_size > 1 else bucket[0].own
        for each in bucket:
            assert torch.equal(each.reduced, expected)


@pytest.mark.parametrize("world_size", only([3], [2, 3, 4]))
def test_byte_grad_sends_a_quarter_of_the_bytes_and_headers(world_size: int, ranks: Ranks) -> None:
    for steps in ranks(world_size).run(train, ByteGrad(), 33, torch.float32, "forward"):
        for step in steps:
            chunks = [-(-len(bucket.own) // world_size) for bucket in step]
            rows = [16 * -(-(8 + chunk) // 16) for chunk in chunks]  # minimum, maximum, codes, up to 16 bytes
            assert step[0].sent_bytes == sum(2 * (world_size - 1) * row for row in rows)


@pytest.mark.parametrize(("algorithm", "digits"), only([(BRAIN, 1e-2)], [(HALF, 2e-3), (BRAIN, 1e-2)]))
def test_a_dtype_of_the_wire_keeps_its_digits(algorithm: GradientAllReduce, digits: float, ranks: Ranks) -> None:
    for bucket in by_bucket(ranks(3).run(train, algorithm, 33, torch.float32, "backward")):
        mean = torch.stack([each.own for each in bucket]).mean(0)
        for each in bucket:
            assert 0 < relative_difference(each.reduced, mean) < digits
            assert torch.equal(each.reduced, bucket[0].reduced)


# The biases before a BatchNorm have no gradient but what rounding leaves, of which nothing relative can be said.
OTHERS = ["two_forwards_with_batch_norm"]
PATTERNS_IN_CI = ["watched_inside_no_sync", "gradients_replaced_in_between"]


OTHER_PATTERNS = [name for name in PATTERNS if name not in (*PATTERNS_IN_CI, *OTHERS)]


def train_in_all_ways(names: list[str]) -> dict[str, float]:
    return {name: train_pattern(name) for name in names}


@pytest.mark.parametrize("patterns", only([PATTERNS_IN_CI], [PATTERNS_IN_CI, OTHER_PATTERNS]), ids=len)
@pytest.mark.parametrize("algorithm", only([ByteGrad()], ALGORITHMS), ids=repr)
def test_it_trains_in_every_way_that_an_all_reduce_does(
    algorithm: AlgorithmConfig, patterns: list[str], each_split: str, monkeypatch: pytest.MonkeyPatch, ranks: Ranks
) -> None:
    defaults = ddp_compile.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "algorithm", algorithm)
    for worst in ranks(2).run(train_in_all_ways, patterns):
        # What is not reduced, or twice, is off by half or more. NaN is less than nothing.
        assert all(each < 0.15 for each in worst.values()), worst


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(33, 33) for _ in range(4))

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.layers[0](torch.tanh(self.layers[1 + branch](x)))


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_parameters_may_be_unused() -> None:
    """Ranks take other branches, and nobody the last one: the largest difference, and whether that has no gradient."""
    torch.manual_seed(3)
    plain = Branches()
    model = ddp_compile(
        copy.deepcopy(plain), algorithm=ByteGrad(), find_unused_parameters=True, bucket_cap_mb=0.003, backend="eager"
    )
    reference = DistributedDataParallel(plain, find_unused_parameters=True)
    worst = 0.0
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        x, branch = torch.randn(6, 33), (step + dist.get_rank()) % 2
        for each in (reference, model):
            each.zero_grad()
            loss_of(each(x, branch)).backward()
        used = [(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True) if q.grad is not None]
        worst = largest([worst, *(relative_difference(p.grad, q.grad) for p, q in used)])
    is_none = model.layers[3].weight.grad is None
    assert worst < 0.05 and is_none


@pytest.mark.parametrize("divide_by_initial_world_size", only([False], [False, True]))
@pytest.mark.parametrize("algorithm", only([ByteGrad()], ALGORITHMS), ids=repr)
@on_ranks(2)
def test_inputs_may_be_uneven(algorithm: AlgorithmConfig, divide_by_initial_world_size: bool) -> None:
    """Rank 1 has more batches than rank 0: the largest difference to DistributedDataParallel's gradients."""
    torch.manual_seed(3)
    module = Mlp(33, 4)
    reference = DistributedDataParallel(copy.deepcopy(module))
    model = ddp_compile(module, algorithm=algorithm, bucket_cap_mb=0.003, backend="aot_eager")
    seen: list[list[Tensor]] = [[], []]
    for each, gradients in zip((model, reference), seen, strict=True):
        with each.join(divide_by_initial_world_size=divide_by_initial_world_size):
            for step in range(2 + 3 * dist.get_rank()):
                torch.manual_seed(10 * step + dist.get_rank())
                each.zero_grad()
                loss_of(each(torch.randn(6, 33))).backward()
                gradients += [p.grad.clone() for p in each.parameters()]
    assert largest([relative_difference(ours, theirs) for ours, theirs in zip(*seen, strict=True)]) < 0.05


@pytest.mark.parametrize("value", only([float("-inf")], [float("inf"), float("-inf")]))
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_what_is_not_finite_stays_so_on_every_rank(algorithm: AlgorithmConfig, value: float) -> None:
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


def fit(algorithm: AlgorithmConfig, seed: int) -> float:
    """The loss on what was not trained with."""
    torch.manual_seed(seed)
    teacher, module = Mlp(9, 2), Mlp(9, 3)
    model = ddp_compile(module, algorithm=algorithm, backend="eager", split="none")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(100 * seed + dist.get_rank())
    for _ in range(150):
        x = torch.randn(16, 9)
        optimizer.zero_grad()
        (model(x) - teacher(x).detach()).square().mean().backward()
        optimizer.step()
    torch.manual_seed(seed)
    x = torch.randn(500, 9)
    return (model(x) - teacher(x)).square().mean().item()


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
@on_ranks(2)
def test_losses_are_those_of_an_all_reduce(seed: int) -> None:
    all_reduced, *others = [fit(algorithm, seed) for algorithm in (GradientAllReduce(), *ALGORITHMS)]
    assert all(each < 1.05 * all_reduced for each in others), (all_reduced, others)


@on_ranks(2)
def test_what_it_does_not_take_is_refused_by_name() -> None:
    said = []
    for module in (nn.Linear(2, 2).double(), nn.Embedding(4, 2, sparse=True)):
        with pytest.raises(ReplicationError) as refused:
            ddp_compile(module, algorithm=ByteGrad())
        said.append(str(refused.value))
    model = ddp_compile(nn.Linear(2, 2), algorithm=ByteGrad())
    with pytest.raises(RuntimeError) as already:
        model.register_comm_hook(None, lambda state, bucket: None)
    rank = dist.get_rank()
    (double, sparse, hook) = [*said, str(already.value)]
    assert double.startswith(
        f"rank {rank}: the ByteGrad all-reduce takes gradients of float32, bfloat16, float16, and of float64 are"
        " weight, bias."
    )
    assert sparse.startswith(f"rank {rank}: the ByteGrad all-reduce takes no sparse gradients")
    assert "but the ByteGrad all-reduce reduces" in hook


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, "float16"])
def test_a_wire_dtype_that_there_is_not_is_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"pass torch\.float16 or torch\.bfloat16"):
        GradientAllReduce(wire_dtype=dtype)


@torch.compiler.set_stance("force_eager")
def float16_range(value: float) -> float:
    model = ddp_compile(nn.Linear(1, 1, bias=False), algorithm=HALF, backend="eager")
    model(torch.tensor([[value]])).sum().backward()
    return model.weight.grad.item()


@pytest.mark.parametrize(("value", "expected"), [(30000.0, 30000.0), (40000.0, float("inf")), (2.0**-23, 2.0**-23)])
def test_the_factor_is_split_around_the_sum(value: float, expected: float, ranks: Ranks) -> None:
    """With four ranks by 2 before and 2 behind it; the smallest number of float16 is 2**-24."""
    assert ranks(4).run(float16_range, value) == pytest.approx([expected] * 4, rel=1e-2)
