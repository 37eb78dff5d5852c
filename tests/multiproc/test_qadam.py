"""QAdam, each step beside the same arithmetic in one process that stands for all ranks."""

from __future__ import annotations

import copy
import hashlib
import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from in_ci import only
from models import Mlp, loss_of, relative_difference
from rank_pool import RankPool, on_ranks
from test_gradient_compression import SentBytes, byte_grad_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ddp_compile
from ddp_compile.algorithms import GradientAllReduce
from ddp_compile.optim import QAdam

Ranks = Callable[[int], RankPool]
WARMUP_STEPS = 3
STEPS = 7
DECAYED = {"betas": (0.9, 0.99), "weight_decay": 0.05}
DECOUPLED = {"betas": (0.8, 0.95), "weight_decay": 0.1, "decoupled_weight_decay": True, "lr": 0.02}


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    named = dict(module.named_parameters())
    weights = [p for name, p in named.items() if name.endswith("weight")]
    return [{"params": weights, **DECAYED}, {"params": [p for p in named.values() if p.dim() == 1], **DECOUPLED}]


def make(module: nn.Module, **settings: Any) -> tuple[Any, QAdam]:
    optimizer = QAdam(groups_of(module), lr=0.01, warmup_steps=WARMUP_STEPS)
    settings = {"bucket_cap_mb": 0.001, "backend": "eager", **settings}
    return ddp_compile(module, algorithm=optimizer.algorithm(), **settings), optimizer


def batch(rank: int, step: int, micro_step: int) -> Tensor:
    torch.manual_seed(10_000 * rank + 10 * step + micro_step)
    return torch.randn(5, 17)


def micro_steps_of(step: int) -> int:
    return 2 if step % 3 == 2 else 1


def train_step(model: Any, optimizer: QAdam, step: int) -> None:
    optimizer.zero_grad()
    for micro_step in range(micro_steps_of(step)):
        with nullcontext() if micro_step == micro_steps_of(step) - 1 else model.no_sync():
            loss_of(model(batch(dist.get_rank(), step, micro_step))).backward()
    optimizer.step()


class Before(NamedTuple):
    """Of each parameter, by name.

    Args:
        values: Itself.
        momenta: Its momentum.
        variances: Its variance.
    """

    values: dict[str, Tensor]
    momenta: dict[str, Tensor]
    variances: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, optimizer: QAdam) -> Before:
        named = {name: p.detach().clone() for name, p in model.named_parameters()}
        states = {name: optimizer.state.get(p) for name, p in model.named_parameters()}
        kept = [
            {name: state[key].clone() if state else torch.zeros_like(named[name]) for name, state in states.items()}
            for key in ("exp_avg", "exp_avg_sq")
        ]
        return cls(named, *kept)


def gradients_of_rank(module: nn.Module, before: Before, rank: int, step: int) -> dict[str, Tensor]:
    """What a rank has accumulated, at these parameters."""
    plain = copy.deepcopy(module)
    plain.load_state_dict(before.values)
    for micro_step in range(micro_steps_of(step)):
        loss_of(plain(batch(rank, step, micro_step))).backward()
    return {name: p.grad for name, p in plain.named_parameters()}


def expected_after(module: nn.Module, plan: Any, before: Before, step: int) -> Before:
    """One step of QAdam, as it is written down."""
    size = dist.get_world_size()
    own = [gradients_of_rank(module, before, rank, step) for rank in range(size)]
    settings = {name: DECAYED if name.endswith("weight") else DECOUPLED for name in before.values}
    after = Before({}, {}, {})
    if step < WARMUP_STEPS:
        gradients = {name: sum(each[name] for each in own) / size for name in before.values}
    else:
        means: dict[str, Tensor] = {}
        for bucket in plan.buckets:
            names = [gradient.fqn for gradient in bucket.gradients]
            flats = []
            for each in own:
                beta1 = [settings[name]["betas"][0] for name in names]
                mixed = [b * before.momenta[n] + (1 - b) * each[n] for n, b in zip(names, beta1, strict=True)]
                flats.append(torch.cat([m.reshape(-1) for m in mixed]))
            flat = byte_grad_of(flats) if size > 1 else flats[0]
            sizes = [before.values[name].numel() for name in names]
            means |= dict(zip(names, flat.split(sizes), strict=True))
    for name, value in before.values.items():
        (beta1, beta2), decay = settings[name]["betas"], settings[name]["weight_decay"]
        lr = settings[name].get("lr", 0.01)
        if settings[name] is DECOUPLED:
            value, decay = value - lr * decay * value, 0.0
        if step < WARMUP_STEPS:
            gradient = gradients[name] + decay * value
            momentum = beta1 * before.momenta[name] + (1 - beta1) * gradient
            variance = beta2 * before.variances[name] + (1 - beta2) * gradient**2
        else:
            momentum = means[name].view(value.shape) + (1 - beta1) * decay * value
            variance = before.variances[name]
        num_squares = min(step + 1, WARMUP_STEPS)
        root = variance.sqrt() / (1 - beta2**num_squares) ** 0.5 + 1e-8
        after.values[name] = value - lr / (1 - beta1 ** (step + 1)) * momentum / root
        after.momenta[name] = momentum
        after.variances[name] = variance
    return after


def differences(ours: Before, expected: Before) -> list[float]:
    """Of values, momenta and variances: the largest of an element, relative to the largest element."""
    return [
        max(((a[name] - b[name]).abs().max() / b[name].abs().max()).item() for name in a)
        for a, b in zip(ours, expected, strict=True)
    ]


def digest(ours: Before) -> str:
    everything = torch.cat([tensor.reshape(-1) for part in ours for tensor in part.values()])
    return hashlib.sha256(everything.numpy().tobytes()).hexdigest()


class Trained(NamedTuple):
    """What one rank has seen.

    Args:
        worst: Largest differences of values, momenta, variances.
        digests: Of all of these, in each step.
        is_frozen: Whether the variance is the same in every bit after warm-up.
        sent_bytes: In each step, but by what all-reduces.
        bucket_numels: Elements of each bucket of the plan.
    """

    worst: list[float]
    digests: list[str]
    is_frozen: bool
    sent_bytes: list[int]
    bucket_numels: list[int]


def train_beside_reference(split: str) -> Trained:
    torch.manual_seed(0)
    module = Mlp(17, 3)
    plain = copy.deepcopy(module)
    model, optimizer = make(module, backend="aot_eager", split=split)
    # Before it needs one: in warm-up there is one collective for a bucket.
    assert dist.get_world_size() == 1 or model.comm_algorithm.process_group is not dist.group.WORLD
    worst, digests, sent_bytes = [0.0] * 3, [], []
    variances: dict[str, Tensor] = {}
    is_frozen = True
    with pytest.MonkeyPatch.context() as monkeypatch:
        sent = SentBytes(monkeypatch)
        for step in range(STEPS):
            before = Before.of(model, optimizer)
            sent.count = 0
            train_step(model, optimizer, step)
            sent_bytes.append(sent.count)
            ours = Before.of(model, optimizer)
            expected = expected_after(plain, model.bucket_plan, before, step)
            worst = [max(pair) for pair in zip(worst, differences(ours, expected), strict=True)]
            digests.append(digest(ours))
            if step == WARMUP_STEPS - 1:
                variances = ours.variances
            elif step >= WARMUP_STEPS:
                is_frozen &= all(torch.equal(ours.variances[name], kept) for name, kept in variances.items())
    numels = [sum(gradient.numel for gradient in bucket.gradients) for bucket in model.bucket_plan.buckets]
    return Trained(worst, digests, is_frozen, sent_bytes, numels)


@pytest.mark.parametrize(
    ("world_size", "split"),
    only(
        [(3, "backward")],
        [(world_size, split) for world_size in (1, 2, 3, 4) for split in ("forward", "backward")],
    ),
)
def test_every_step_is_that_of_the_reference(world_size: int, split: str, ranks: Ranks) -> None:
    results = ranks(world_size).run(train_beside_reference, split)
    for result in results:
        assert max(result.worst) < 2e-6, result.worst
        assert result.digests == results[0].digests
        assert len(set(result.digests)) == STEPS
        assert result.is_frozen and len(result.bucket_numels) > 1
        chunks = [-(-numel // world_size) for numel in result.bucket_numels]
        byte_grads = sum(2 * (world_size - 1) * 16 * -(-(8 + chunk) // 16) for chunk in chunks)
        assert result.sent_bytes == [0] * WARMUP_STEPS + [byte_grads] * (STEPS - WARMUP_STEPS)


@on_ranks(2)
def test_it_goes_on_from_a_checkpoint_bit_for_bit() -> None:
    torch.manual_seed(0)
    module = Mlp(17, 2)
    checkpoints = {}
    model, optimizer = make(copy.deepcopy(module))
    for step in range(STEPS):
        buffer = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], buffer)
        checkpoints[step] = buffer
        train_step(model, optimizer, step)
    expected = Before.of(model, optimizer)
    same = []
    for begin in (1, WARMUP_STEPS, 5):
        checkpoints[begin].seek(0)
        weights, state = torch.load(checkpoints[begin])
        resumed, resumed_optimizer = make(copy.deepcopy(module))
        resumed.load_state_dict(weights)
        resumed_optimizer.load_state_dict(state)
        for step in range(begin, STEPS):
            train_step(resumed, resumed_optimizer, step)
        found = Before.of(resumed, resumed_optimizer)
        same.append(digest(found) == digest(expected) and resumed_optimizer.num_steps == STEPS)
    assert same == [True] * 3


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(4))

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.layers[0](torch.tanh(self.layers[1 + branch](x)))


@pytest.mark.parametrize("set_to_none", only([True], [True, False]))
@on_ranks(2)
def test_parameters_may_be_unused(set_to_none: bool) -> None:
    """Beside Adam with an all-reduce: differences of momenta, whether what nobody uses is as it was, and has no state.

    Ranks take other branches, in some steps all of them the same one, and nobody the last one.
    """
    torch.manual_seed(3)
    plain = Branches()
    module = copy.deepcopy(plain)
    optimizer = QAdam(module.parameters(), lr=1e-4, warmup_steps=4)
    settings: dict[str, Any] = {"find_unused_parameters": True, "bucket_cap_mb": 0.0005, "backend": "eager"}
    model: Any = ddp_compile(module, algorithm=optimizer.algorithm(), **settings)
    reference = DistributedDataParallel(plain, find_unused_parameters=True)
    adam = torch.optim.Adam(reference.parameters(), lr=1e-4)
    for step in range(8):
        torch.manual_seed(10 * step + dist.get_rank())
        x, branch = torch.randn(6, 9), 0 if step % 3 == 1 else (step + dist.get_rank()) % 2
        for each, its in ((model, optimizer), (reference, adam)):
            its.zero_grad(set_to_none=set_to_none)
            loss_of(each(x, branch)).backward()
            its.step()
    worst = [
        relative_difference(optimizer.state[p]["exp_avg"], adam.state[q]["exp_avg"])
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
        if q in adam.state
    ]
    unused = model.layers[3].weight
    stays = torch.equal(unused, plain.layers[3].weight)
    has_no_state = unused not in optimizer.state
    assert len(worst) == 6 and max(worst) < 0.05, worst
    assert stays and has_no_state


def fit(compresses: bool, seed: int) -> float:
    """The loss on what was not trained with, of a task with noise.

    Without any, gradients shrink to the end, and a variance that is frozen before makes steps too small, compressed or
    not.
    """
    torch.manual_seed(seed)
    teacher, module = Mlp(9, 2), Mlp(9, 3)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    algorithm: Any = GradientAllReduce()
    if compresses:
        optimizer = ours = QAdam(module.parameters(), lr=0.01, warmup_steps=60)
        algorithm = ours.algorithm()
    model = ddp_compile(module, algorithm=algorithm, backend="eager", split="none")
    torch.manual_seed(100 * seed + dist.get_rank())
    for _ in range(300):
        x = torch.randn(16, 9)
        optimizer.zero_grad()
        noise = 0.3 * torch.randn(16, 9)
        (model(x) - teacher(x).detach() - noise).square().mean().backward()
        optimizer.step()
    torch.manual_seed(seed)
    x = torch.randn(500, 9)
    return (model(x) - teacher(x)).square().mean().item()


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
@on_ranks(2)
def test_the_loss_is_that_of_adam_with_an_all_reduce(seed: int) -> None:
    ours = fit(True, seed)
    adams = fit(False, seed)
    assert ours < 1.05 * adams, (ours, adams)
