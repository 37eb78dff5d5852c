"""What one rank does wrong, the others must hear of: by name, and within the group's timeout."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from in_ci import only
from models import Mlp, loss_of
from rank_pool import RankPool, on_ranks
from torch import nn

from ddp_compile import MissingGradientError, RanksDifferError, ReductionError, ddp_compile
from ddp_compile.runtime.comm import collectives

Ranks = Callable[[int], RankPool]


def different_width() -> None:
    ddp_compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 + dist.get_rank())))


def different_dtype() -> None:
    ddp_compile(nn.Linear(4, 4, dtype=torch.float64 if dist.get_rank() else torch.float32))


def different_freezing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].bias.requires_grad_(dist.get_rank() == 0)
    ddp_compile(model)


def different_depth() -> None:
    ddp_compile(
        nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(1 + dist.get_rank())]), broadcast_buffers=False
    )


def different_strides() -> None:
    convolution = nn.Conv2d(3, 2, 3)
    ddp_compile(convolution.to(memory_format=torch.channels_last) if dist.get_rank() else convolution)


def different_sparsity() -> None:
    ddp_compile(nn.Embedding(9, 4, sparse=dist.get_rank() == 1))


def different_buffers() -> None:
    ddp_compile(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4 + dist.get_rank(), affine=False)))


def different_settings() -> None:
    ddp_compile(nn.Linear(4, 4), find_unused_parameters=dist.get_rank() == 1)


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (different_settings, "find_unused_parameters=False on rank 0 is find_unused_parameters=True on rank 1"),
        (
            different_width,
            "parameter 1.weight: float32[4, 4] on cpu on rank 0 is parameter 1.weight: float32[5, 4] on cpu on rank 1",
        ),
        (
            different_dtype,
            "parameter weight: float32[4, 4] on cpu on rank 0 is parameter weight: float64[4, 4] on cpu on rank 1",
        ),
        (
            different_freezing,
            "parameter 1.bias: float32[4] on cpu on rank 0 is parameter 1.bias: float32[4] on cpu frozen on rank 1",
        ),
        (different_depth, "parameter 1.weight: float32[4, 4] on cpu, which rank 0 does not have, exists on rank 1"),
        (different_strides, "float32[2, 3, 3, 3] with strides [27, 1, 9, 3] on cpu on rank 1"),
        (different_sparsity, "is parameter weight: float32[9, 4] on cpu with sparse gradient on rank 1"),
        (different_buffers, "buffer 1.running_mean: float32[4] on rank 0 is buffer 1.running_mean: float32[5]"),
    ],
)
def test_different_models_are_refused_on_every_rank_by_name(
    build: Callable[[], None], named: str, ranks: Ranks
) -> None:
    failures = ranks(2).run_expecting_failures(build)
    for rank, failure in enumerate(failures):
        assert failure.kind == "RanksDifferError"
        assert f"rank {rank}:" in failure.message and named in failure.message


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@on_ranks(2)
def test_a_parameter_without_gradient_is_named_at_the_next_forward() -> None:
    with pytest.raises(MissingGradientError) as raised:
        model = ddp_compile(HalfUsed(), backend="eager")
        for _ in range(2):
            loss_of(model(torch.randn(2, 4))).backward()
    message = str(raised.value)
    assert "spare.weight" in message and "spare.bias" in message
    assert "used.weight" not in message
    assert "requires_grad_(False)" in message and "parameters_to_ignore" in message


def raise_in_forward(raising_rank: int, step: int) -> None:
    model = ddp_compile(Mlp(width=8, num_layers=2), backend="eager")
    for each in range(step + 1):
        if each == step and dist.get_rank() == raising_rank:
            raise KeyError("bad sample")
        loss_of(model(torch.randn(2, 8))).backward()


@pytest.mark.parametrize(("raising_rank", "step"), only([(1, 1)], [(0, 0), (1, 0), (1, 1)]))
def test_a_rank_that_raises_lets_the_others_fail_naming_the_bucket(raising_rank: int, step: int, ranks: Ranks) -> None:
    started = time.monotonic()
    results = ranks(2).run_expecting_failures(raise_in_forward, raising_rank, step, timeout_s=4.0)
    assert results[raising_rank].kind == "KeyError"
    waiting = results[1 - raising_rank]
    assert waiting.kind == "ReductionError"
    assert "bucket 0" in waiting.message and "layers.1.bias" in waiting.message
    assert time.monotonic() - started < 60


def skip_the_backward_on_rank_1() -> str:
    model = ddp_compile(Mlp(width=8, num_layers=2), backend="eager")
    loss_of(model(torch.randn(2, 8))).backward()
    loss = loss_of(model(torch.randn(2, 8)))
    if dist.get_rank() == 1:
        time.sleep(5)
        return "skipped"
    loss.backward()
    return "came through"


@pytest.mark.long  # `test_waiting_ranks` names what a rank does that others wait for, and the test above the bucket
def test_a_rank_that_skips_its_backward_times_the_others_out_naming_the_bucket(ranks: Ranks) -> None:
    waiting, skipping = ranks(2).run_expecting_failures(skip_the_backward_on_rank_1, timeout_s=3.0)
    assert skipping == "skipped"
    assert waiting.kind == "ReductionError"
    assert "rank 0" in waiting.message and "bucket 0" in waiting.message


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("user error in backward")


class FailsAtLayer(Mlp):
    """A graph break before each layer, so that some buckets have been launched when the backward fails."""

    fails_at: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            torch._dynamo.graph_break()
            x = torch.tanh(layer(FailsInBackward.apply(x) if i == self.fails_at else x))
        return x


def go_on_after_an_exception_in_backward() -> tuple[str, bool]:
    model = ddp_compile(FailsAtLayer(width=8, num_layers=4), bucket_cap_mb=1e-4, backend="eager")
    torch.manual_seed(dist.get_rank())
    x = torch.randn(2, 8, requires_grad=True)
    loss_of(model(x)).backward()
    model.fails_at = 1 + dist.get_rank()
    with pytest.raises(ValueError, match="user error in backward"):
        loss_of(model(x)).backward()
    for _ in range(2):
        with pytest.raises(ReductionError, match="the last backward raised") as refused:
            model(x)
    model.fails_at = None
    model = ddp_compile(model.unwrap(), process_group=dist.new_group(), bucket_cap_mb=1e-4, backend="eager")
    model.zero_grad()
    loss_of(model(x)).backward()
    mean = model.layers[0].weight.grad.clone()
    dist.all_reduce(mean, group=model._ddp_compile_state.process_group)
    return str(refused.value), torch.equal(mean / dist.get_world_size(), model.layers[0].weight.grad)


def test_after_an_exception_in_backward_the_ranks_go_on_in_a_new_group(ranks: Ranks) -> None:
    pool = ranks(2)
    for said, is_mean in pool.run(go_on_after_an_exception_in_backward):
        assert "process_group=torch.distributed.new_group()" in said
        assert is_mean
    pool.close()  # what the first group still waits for must not meet the next test


def buffers_after_forward() -> list[float]:
    model = ddp_compile(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), backend="eager", fullgraph=True)
    model[1].running_mean.fill_(dist.get_rank() + 1.0)
    model[1].momentum = 0.0
    loss_of(model(torch.randn(3, 4))).backward()
    after_training = float(model[1].running_mean[0])
    model[1].running_mean.fill_(dist.get_rank() + 1.0)
    with model.no_sync():
        model(torch.randn(3, 4))
    after_no_sync = float(model[1].running_mean[0])
    model.eval()
    with torch.no_grad():
        model(torch.randn(3, 4))
    after_no_grad = float(model[1].running_mean[0])
    model(torch.randn(3, 4))
    return [after_training, after_no_sync, after_no_grad, float(model[1].running_mean[0])]


def test_buffers_come_from_rank_0_before_synchronised_forwards_with_gradients_only(ranks: Ranks) -> None:
    assert ranks(2).run(buffers_after_forward) == [[1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 2.0, 1.0]]


@on_ranks(2)
def test_sparse_gradients_are_averaged() -> None:
    torch.manual_seed(dist.get_rank())
    embedding = nn.Embedding(50, 6, sparse=True)
    model = ddp_compile(
        nn.Sequential(embedding, nn.Linear(6, 6), nn.Linear(6, 3, dtype=torch.float32)), backend="eager"
    )
    tokens = torch.randint(0, 50, (4,))
    loss_of(model(tokens)).backward()
    assert embedding.weight.grad.is_sparse
    ours = embedding.weight.grad.to_dense()
    plain = model.unwrap()
    plain.zero_grad()
    loss_of(plain(tokens)).backward()
    theirs = embedding.weight.grad.to_dense()
    dist.all_reduce(theirs)
    assert float((ours - theirs / dist.get_world_size()).abs().max()) < 1e-7


class ToDtype(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.to(self.layer.weight.dtype))


@on_ranks(2)
def test_parameters_of_two_dtypes_travel_in_buckets_of_their_own() -> None:
    torch.manual_seed(dist.get_rank())
    half, full = nn.Linear(6, 6, dtype=torch.bfloat16), nn.Linear(6, 6)
    model = ddp_compile(nn.Sequential(nn.Linear(6, 6), ToDtype(half), ToDtype(full)), backend="aot_eager")
    x = torch.randn(4, 6)
    loss_of(model(x)).backward()
    ours = [p.grad.float() for p in model.parameters()]
    plain = model.unwrap()
    plain.zero_grad()
    loss_of(plain(x)).backward()
    worst = 0.0
    for mine, p in zip(ours, plain.parameters(), strict=True):
        dist.all_reduce(p.grad)
        worst = max(worst, float((mine - p.grad.float() / 2).norm() / p.grad.float().norm()))
    dtypes = sorted({str(p.grad.dtype) for p in plain.parameters()})
    assert dtypes == ["torch.bfloat16", "torch.float32"]
    assert worst < 1e-2


def _verify_algorithms_agree(algorithm: str, group: dist.ProcessGroup, device: torch.device) -> None:
    collectives.verify_algorithms_agree(algorithm, group, device, "model 1 (Linear)")


@on_ranks(2)
def test_what_is_told_of_different_models_does_not_grow_with_them() -> None:
    """Bytes of each all-gather on this rank, and what it raised."""
    num_lines = 10_000
    group, device = dist.distributed_c10d._get_default_group(), torch.device("cpu")
    gathered, said = [], []
    all_gather = dist.all_gather

    def counting(tensors: list[torch.Tensor], tensor: torch.Tensor, **kwargs: Any) -> Any:
        gathered.append(sum(each.numel() * each.element_size() for each in tensors))
        return all_gather(tensors, tensor, **kwargs)

    lines = [f"parameter {i}: float32[4]" for i in range(num_lines)]
    if dist.get_rank() == 1:
        lines[num_lines // 2] = "x" * 10**5
    collectives.dist = SimpleNamespace(**{**vars(dist), "all_gather": counting})
    try:
        for check, what in (
            (collectives.verify_modules_agree, lines),
            (_verify_algorithms_agree, "h" * 10_000 + str(dist.get_rank())),
        ):
            try:
                check(what, group, device)
            except RanksDifferError as error:
                said.append(str(error))
    finally:
        collectives.dist = dist
    rank = dist.get_rank()
    assert max(gathered) <= 2 * 256
    models, hooks = said
    assert models.startswith(f"rank {rank}: ") and len(models) < 3000
    assert "parameter 5000: float32[4] on rank 0 is xxx" in models and "on rank 1. Build" in models
    assert hooks.count("hhh... (") == 2 and "on rank 0, " in hooks and len(hooks) < 1000
