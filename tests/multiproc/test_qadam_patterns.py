"""QAdam in the ways in which people train, beside Adam with DistributedDataParallel, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Mlp, largest, loss_of, relative_difference
from rank_pool import RankPool, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import RanksDifferError, ReplicationError, ddp_compile
from ddp_compile.optim import QAdam

Ranks = Callable[[int], RankPool]
WARMUP_STEPS = 2


def batch(step: int) -> Tensor:
    torch.manual_seed(10 * step + dist.get_rank())
    return torch.randn(6, 17)


def both(**settings: Any) -> list[tuple[Any, Any]]:
    """Two models with their optimizers: of QAdam, and of Adam with an all-reduce."""
    torch.manual_seed(0)
    module, plain = Mlp(17, 2), Mlp(17, 2)
    plain.load_state_dict(module.state_dict())
    optimizer = QAdam(module.parameters(), lr=1e-4, warmup_steps=WARMUP_STEPS)
    settings = {"bucket_cap_mb": 0.001, "backend": "eager", **settings}
    model = ddp_compile(module, algorithm=optimizer.algorithm(), **settings)
    return [(model, optimizer), (DistributedDataParallel(plain), torch.optim.Adam(plain.parameters(), lr=1e-4))]


def difference_of_momenta(pairs: list[tuple[Any, Any]]) -> float:
    """The largest of a parameter."""
    (model, optimizer), (reference, adam) = pairs
    return largest(
        relative_difference(optimizer.state[p]["exp_avg"], adam.state[q]["exp_avg"])
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    )


def reduced_twice(model: Any, optimizer: Any, x: Tensor) -> None:
    """Two backwards, each of which is reduced."""
    for part in x.chunk(2):
        loss_of(model(part)).backward()
    optimizer.step()


def regularised(model: Any, optimizer: Any, x: Tensor) -> None:
    loss_of(model(x)).backward()
    (0.1 * next(model.parameters()).square().sum()).backward()
    optimizer.step()


def closure(model: Any, optimizer: Any, x: Tensor) -> None:
    def compute() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        return loss

    assert optimizer.step(compute).item() > 0


def scaled(model: Any, optimizer: Any, x: Tensor) -> None:
    """With an overflow on rank 1 at first, by which no rank steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    num_steps = getattr(optimizer, "num_steps", None)
    for factor in (float("inf") if dist.get_rank() == 1 else 1.0, 1.0):
        assert getattr(optimizer, "num_steps", None) == num_steps
        optimizer.zero_grad()
        scaler.scale(loss_of(model(x)) * factor).backward()
        scaler.step(optimizer)
        scaler.update()


def scaled_and_clipped(model: Any, optimizer: Any, x: Tensor) -> None:
    (1024 * loss_of(model(x))).backward()
    for parameter in model.parameters():
        parameter.grad.div_(1024)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


WAYS = [reduced_twice, regularised, closure, scaled, scaled_and_clipped]


@on_ranks(2)
def test_gradients_keep_their_meaning_after_warm_up() -> None:
    """Differences of momenta after steps in both phases."""
    worst = {}
    for way in WAYS:
        # There a bucket is launched early, and again when the regulariser has come.
        pairs = both(backend="aot_eager", split="backward") if way is regularised else both()
        for step in range(WARMUP_STEPS + 2):
            for model, optimizer in pairs:
                optimizer.zero_grad()
                way(model, optimizer, batch(step))
        worst[way.__name__] = difference_of_momenta(pairs)
    assert all(each < 0.05 for each in worst.values()), worst  # what is forgotten, or counted twice, is off by more


def train_uneven() -> float:
    """Rank 1 has more batches: the difference of momenta there."""
    pairs = both()
    for model, optimizer in pairs:
        with model.join(divide_by_initial_world_size=False):
            for step in range(WARMUP_STEPS + 1 + dist.get_rank()):
                optimizer.zero_grad()
                loss_of(model(batch(step))).backward()
                optimizer.step()
    return difference_of_momenta(pairs)


def test_inputs_may_be_uneven(ranks: Ranks) -> None:
    """A rank without input gives its momentum, and no gradient."""
    _, worst = ranks(2).run(train_uneven)
    assert worst < 0.05


def message_of(kind: type[Exception], function: Callable[[], Any]) -> str:
    with pytest.raises(kind) as raised:
        function()
    return str(raised.value)


@on_ranks(2)
def test_bad_input_is_refused_on_every_rank() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    both = QAdam([*first.parameters(), *second.parameters()])
    one = QAdam([first.weight])
    named = QAdam([*first.named_parameters(), ("other", second.weight)])
    frozen = nn.Linear(3, 3)
    said = {
        "optimizer has more": message_of(ReplicationError, lambda: ddp_compile(first, algorithm=both.algorithm())),
        "with a name": message_of(ReplicationError, lambda: ddp_compile(first, algorithm=named.algorithm())),
        "model has more": message_of(ReplicationError, lambda: ddp_compile(first, algorithm=one.algorithm())),
    }
    mine = QAdam(first.parameters(), warmup_steps=1)
    ddp_compile(first, algorithm=mine.algorithm(), backend="eager")
    said["two models"] = message_of(ReplicationError, lambda: ddp_compile(second, algorithm=mine.algorithm()))
    said["set later"] = message_of(ReplicationError, lambda: first.set_comm_algorithm(both.algorithm()))  # type: ignore[operator]
    differs = QAdam(second.parameters() if dist.get_rank() == 0 else [second.weight])
    said["one rank"] = message_of(RanksDifferError, lambda: ddp_compile(second, algorithm=differs.algorithm()))
    warmups = QAdam(second.parameters(), warmup_steps=1 + dist.get_rank())
    said["warm-ups"] = message_of(RanksDifferError, lambda: ddp_compile(second, algorithm=warmups.algorithm()))

    def step(model: Any, optimizer: QAdam) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    step(first, mine)
    step(first, mine)  # after warm-up
    first.unwrap()  # type: ignore[operator]
    said["unwrapped"] = message_of(RuntimeError, lambda: step(first, mine))
    frozen.bias.requires_grad_(False)
    beside = QAdam(frozen.parameters())
    ddp_compile(frozen, algorithm=beside.algorithm(), backend="eager")  # frozen parameters are no matter
    again = QAdam(first.parameters(), warmup_steps=1)
    model = ddp_compile(first, algorithm=again.algorithm(), backend="eager")
    if dist.get_rank() == 1:
        for group in again.param_groups:  # as of another checkpoint
            group["num_steps"] = 1
    said["another step"] = message_of(RanksDifferError, lambda: step(model, again))
    rank = dist.get_rank()
    more = f"rank {rank}: QAdam has parameters that the model does not reduce: "
    assert said["optimizer has more"].startswith(
        f"{more}parameter 2 of group 0, of shape (3, 3); parameter 3 of group 0, of shape (3,). "
    )
    assert said["with a name"].startswith(f"{more}other. ")
    missing = f"rank {rank}: QAdam exchanges the momentum of its own parameters, and these of the model are not"
    assert said["model has more"].startswith(f"{missing} among them: bias. ")
    assert said["two models"].startswith(f"{missing} among them: weight, bias. Make one QAdam")
    assert said["set later"].startswith(more)
    assert "against the parameters=nothing on rank 0 is" in said["one rank"] and "bias" in said["one rank"]
    assert "warmup_steps=1) on rank 0" in said["warm-ups"] and "warmup_steps=2) on rank 1" in said["warm-ups"]
    assert said["unwrapped"].startswith(
        f"rank {rank}: step 3 of QAdam(warmup_steps=1): of 2 ranks none exchanges the momentum"
    )
    assert "gradients, in warm-up" in said["another step"] and "momenta" in said["another step"]
