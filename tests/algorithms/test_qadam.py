"""QAdam: alone beside Adam, and each step of several ranks beside the same arithmetic in one process."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from averages import batch, closure_of, error_of, micro_steps_of, train_step
from beside import is_same_everywhere, own_batch, seeded
from compression import DECAYED, DECOUPLED, WARMUP_STEPS, byte_grad_of, make_qadam
from in_ci import only
from models import Mlp, largest, loss_of, relative_difference
from rank_pool import on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from ways_to_train import regulariser_last, unscaled_and_clipped

from ddp_compile import RanksDifferError, ReplicationError, ddp_compile
from ddp_compile.optim import QAdam

STEPS = 7


class Before(NamedTuple):
    """Each parameter, by name, its momentum and its variance."""

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


@pytest.mark.parametrize(
    ("world_size", "split"), only([(3, "backward")], itertools.product((1, 2, 3, 4), ("forward", "backward")))
)
@on_ranks()
def test_steps_match_reference(world_size: int, split: str) -> None:
    torch.manual_seed(0)
    module = Mlp(17, 3)
    plain = copy.deepcopy(module)
    model, optimizer = make_qadam(module, backend="aot_eager", split=split)
    for step in range(STEPS):
        before = Before.of(model, optimizer)
        train_step(model, optimizer, step)
        ours = Before.of(model, optimizer)
        worst = differences(ours, expected_after(plain, model.bucket_plan, before, step))
        assert max(worst) < 2e-6, (step, worst)
        assert is_same_everywhere(torch.cat([tensor.reshape(-1) for part in ours for tensor in part.values()]))
    assert len(model.bucket_plan.buckets) > 1


# The ways in which people train, beside Adam with DistributedDataParallel, and bad input.


def both(make: Callable[[], nn.Module], warmup_steps: int, **settings: Any) -> list[tuple[Any, Any]]:
    """Two models with their optimizers: QAdam, and Adam with an all-reduce."""
    module, plain = seeded(make), seeded(make)
    optimizer = QAdam(module.parameters(), lr=1e-4, warmup_steps=warmup_steps)
    unused = {key: value for key, value in settings.items() if key == "find_unused_parameters"}
    settings = {"bucket_cap_mb": 0.001, "backend": "eager", **settings}
    model = ddp_compile(module, algorithm=optimizer.algorithm(), **settings)
    reference = DistributedDataParallel(plain, **unused)
    return [(model, optimizer), (reference, torch.optim.Adam(plain.parameters(), lr=1e-4))]


def difference_of_momenta(pairs: list[tuple[Any, Any]]) -> float:
    """The largest of a parameter that Adam has stepped."""
    (model, optimizer), (reference, adam) = pairs
    return largest(
        relative_difference(optimizer.state[p]["exp_avg"], adam.state[q]["exp_avg"])
        for p, q in zip(model.parameters(), reference.parameters(), strict=True)
        if q in adam.state
    )


class Branches(Mlp):
    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.layers[0](torch.tanh(self.layers[1 + branch](x)))


@pytest.mark.parametrize("set_to_none", only([True], [True, False]))
@on_ranks(2)
def test_unused_parameters(set_to_none: bool) -> None:
    """Ranks take different branches, or in some steps the same one, and no rank the last one."""
    pairs = both(lambda: Branches(33, 4), 4, find_unused_parameters=True)
    for step in range(8):
        x, branch = own_batch(step, 33, 6), 0 if step % 3 == 1 else (step + dist.get_rank()) % 2
        for each, its in pairs:
            its.zero_grad(set_to_none=set_to_none)
            loss_of(each(x, branch)).backward()
            its.step()
    assert difference_of_momenta(pairs) < 0.05
    (model, optimizer), (reference, adam) = pairs
    assert len(adam.state) == 6
    assert torch.equal(model.layers[3].weight, reference.module.layers[3].weight)
    assert model.layers[3].weight not in optimizer.state


def reduced_twice(model: Any, optimizer: Any, x: Tensor) -> None:
    """Two backwards, each of which is reduced."""
    for part in x.chunk(2):
        loss_of(model(part)).backward()
    optimizer.step()


def closure(model: Any, optimizer: Any, x: Tensor) -> None:
    assert optimizer.step(closure_of(model, optimizer, x)).item() > 0


def scaled(model: Any, optimizer: Any, x: Tensor) -> None:
    """With an overflow on rank 1 at first, so that no rank steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    num_steps = getattr(optimizer, "num_steps", None)
    for factor in (float("inf") if dist.get_rank() == 1 else 1.0, 1.0):
        assert getattr(optimizer, "num_steps", None) == num_steps
        optimizer.zero_grad()
        scaler.scale(loss_of(model(x)) * factor).backward()
        scaler.step(optimizer)
        scaler.update()


WAYS = [reduced_twice, closure, scaled]
WAYS_BEFORE_A_STEP = [regulariser_last, unscaled_and_clipped]


@on_ranks(2)
def test_gradients_after_warm_up() -> None:
    worst = {}
    for way in [*WAYS, *WAYS_BEFORE_A_STEP]:
        # A bucket of the regularized model is launched early, and again when the regularizer has come.
        settings = {"backend": "aot_eager", "split": "backward"} if way is regulariser_last else {}
        pairs = both(lambda: Mlp(17, 2), 2, **settings)
        for step in range(4):
            for model, optimizer in pairs:
                optimizer.zero_grad()
                if way in WAYS:
                    way(model, optimizer, own_batch(step, 17, 6))
                else:
                    way(model, own_batch(step, 17, 6), step)
                    optimizer.step()
        worst[way.__name__] = difference_of_momenta(pairs)
    assert all(each < 0.05 for each in worst.values()), worst  # what is forgotten, or counted twice, is off by more


@on_ranks(2)
def test_join() -> None:
    """Rank 1 has more batches; rank 0 then gives its momentum, and no gradient."""
    pairs = both(lambda: Mlp(17, 2), 2)
    for model, optimizer in pairs:
        with model.join(divide_by_initial_world_size=False):
            for step in range(3 + dist.get_rank()):
                optimizer.zero_grad()
                loss_of(model(own_batch(step, 17, 6))).backward()
                optimizer.step()
    assert dist.get_rank() == 0 or difference_of_momenta(pairs) < 0.05


@on_ranks(2)
def test_errors_of_parameters() -> None:
    rank, first, second = dist.get_rank(), nn.Linear(3, 3), nn.Linear(3, 3)

    def refusal(module: nn.Module, parameters: Any, kind: type[Exception] = ReplicationError, **settings: Any) -> str:
        algorithm = QAdam(parameters, **settings).algorithm()
        return error_of(kind, lambda: ddp_compile(module, algorithm=algorithm, backend="eager"))

    more = f"rank {rank}: QAdam has parameters that the model does not reduce: "
    both = [*first.parameters(), *second.parameters()]
    third, fourth = "parameter 2 of group 0, of shape (3, 3)", "parameter 3 of group 0, of shape (3,)"
    assert refusal(first, both).startswith(f"{more}{third}; {fourth}. ")
    assert refusal(first, [*first.named_parameters(), ("other", second.weight)]).startswith(f"{more}other. ")
    missing = f"rank {rank}: QAdam exchanges the momentum of its own parameters, but these of the model are not among"
    assert refusal(first, [first.weight]).startswith(f"{missing} them: bias. ")
    assert refusal(second, first.parameters()).startswith(f"{missing} them: weight, bias. Make one QAdam")
    of_one_rank = refusal(second, second.parameters() if rank == 0 else [second.weight], RanksDifferError)
    assert "to the parameters=none on rank 0 is" in of_one_rank and "bias" in of_one_rank
    warm_ups = refusal(second, second.parameters(), RanksDifferError, warmup_steps=1 + rank)
    assert "warmup_steps=1) on rank 0" in warm_ups and "warmup_steps=2) on rank 1" in warm_ups
    model = ddp_compile(first, algorithm=QAdam(first.parameters()).algorithm(), backend="eager")
    assert error_of(ReplicationError, lambda: model.set_comm_algorithm(QAdam(both).algorithm())).startswith(more)


@on_ranks(2)
def test_errors_of_steps() -> None:
    rank, module = dist.get_rank(), nn.Linear(3, 3)
    module.bias.requires_grad_(False)  # the optimizer may have frozen parameters

    def step(model: Any, optimizer: QAdam) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    optimizer = QAdam(module.parameters(), warmup_steps=1)
    model = ddp_compile(module, algorithm=optimizer.algorithm(), backend="eager")
    step(model, optimizer)
    step(model, optimizer)  # after warm-up
    model.unwrap()
    unwrapped = error_of(RuntimeError, lambda: step(module, optimizer))
    assert unwrapped.startswith(f"rank {rank}: step 3 of QAdam(warmup_steps=1): none of 2 ranks exchanges the momentum")
    again = QAdam(module.parameters(), warmup_steps=1)
    model = ddp_compile(module, algorithm=again.algorithm(), backend="eager")
    if rank == 1:
        for group in again.param_groups:  # as of another checkpoint
            group["num_steps"] = 1
    another = error_of(RanksDifferError, lambda: step(model, again))
    assert "gradients, in warm-up" in another and "momenta" in another


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"warmup_steps": 0}, r"QAdam\(warmup_steps=0\): pass a number of steps from 1 on"),
        ({"weight_decay": -1.0}, r"QAdam\(weight_decay=-1\.0\): pass 0 or more"),
        ({"betas": (0.9, 1.0)}, r"QAdam\(betas=\(0\.9, 1\.0\)\)"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], said: str) -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=said):
        QAdam(module.parameters(), **settings)
    with pytest.raises(ValueError, match=said if "warmup_steps" not in settings else "all groups"):
        QAdam([{"params": [module.weight], **settings}, {"params": [module.bias]}])


def test_zero_variance() -> None:
    parameter, late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = QAdam([parameter, late], lr=0.1, warmup_steps=2)
    for gradient in ([1.0, 0.0, 0.0], [1.0, 0.0, 2.0], [1e-3, 1e-3, 1e-3]):
        before = parameter.detach().clone()
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
    assert (parameter.detach() != before).tolist() == [True, False, True]
    late.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"step 4 of QAdam\(warmup_steps=2\).*parameter 1 of group 0, of shape"):
        optimizer.step()
    assert optimizer.num_steps == 3
    with pytest.raises(ValueError, match="after 3 steps: warm-up ended with step 2"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_groups_and_states() -> None:
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = QAdam(parameters[:1], warmup_steps=3)
    parameters[0].grad = torch.ones(3)
    optimizer.step()
    optimizer.add_param_group({"params": parameters[1:], "betas": (0.5, 0.6)})
    assert [group["num_steps"] for group in optimizer.param_groups] == [1, 1]
    copied = copy.deepcopy(optimizer)
    assert copied.num_steps == 1 and copied.param_groups[1]["betas"] == (0.5, 0.6)
    with pytest.raises(ValueError, match="group 0 has no num_steps, warmup_steps"):
        optimizer.load_state_dict(torch.optim.Adam(parameters).state_dict())
    parameters[0].grad = torch.eye(3)[0].to_sparse()
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0, of shape.* has a sparse gradient"):
        optimizer.step()
