"""Parameters that a forward does not use: with ``find_unused_parameters`` all is as with DistributedDataParallel."""

import contextlib
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from beside import difference, difference_to_mean, own_batch, pair, train_beside
from models import assert_buckets_launched_early, largest, relative_difference
from rank_pool import on_ranks
from torch import Tensor, nn
from ways_to_train import note_launches

from ddp_compile import GradientArrivalError, ddp_compile
from ddp_compile.algorithms import ByteGrad

pytestmark = pytest.mark.usefixtures("each_split")

WIDTH = 17
NUM_STEPS = 4


@dataclass
class Loss:
    value: Tensor


class Branches(nn.Module):
    """A trunk, one of several branches, and a head; which branch is an attribute."""

    def __init__(self, returns: str = "tensor") -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.branch = 0
        self.returns = returns

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.branches[self.branch](self.trunk(x)))
        y = self.head(x)
        return {"unused": None, "losses": [Loss(y), (x,)]} if self.returns == "containers" else y


def backward(model: Any, x: Tensor, step: int = 0) -> None:
    outputs = model(x)
    (outputs["losses"][0].value if isinstance(outputs, dict) else outputs).square().sum().backward()


def branches(returns: str = "tensor", both: dict[str, Any] | None = None, **settings: Any) -> tuple[Any, Any]:
    """Ours and DistributedDataParallel's, with several buckets."""
    both = {"bucket_cap_mb": 0.001, "find_unused_parameters": True, **(both or {})}
    return pair(lambda: Branches(returns), both, **settings)


def choose(branch: int, *models: nn.Module) -> None:
    for model in models:
        getattr(model, "module", model).branch = branch


class Case(NamedTuple):
    returns: str = "tensor"
    as_view: bool = True
    set_to_none: bool = True
    ours: dict[str, Any] = {}  # noqa: RUF012 - only read
    tolerance: float = 1e-6


LONG = {"inductor": [pytest.mark.long, pytest.mark.inductor]}
CASES = {
    "copied and zeroed": Case(as_view=False, set_to_none=False),
    "in containers": Case("containers"),
    "in eight bits": Case(ours={"algorithm": ByteGrad()}, tolerance=0.05),
    "inductor": Case("containers", ours={"backend": "inductor"}, tolerance=1e-5),
}


@pytest.mark.parametrize("case", [pytest.param(CASES[name], id=name, marks=LONG.get(name, [])) for name in CASES])
@on_ranks(2)
def test_branches_by_rank(case: Case) -> None:
    """Branches 0 and 1 by rank, then both ranks the same, then a branch that only one rank ever uses."""
    models, rank = branches(case.returns, {"gradient_as_bucket_view": case.as_view}, **case.ours), dist.get_rank()
    chosen = [rank % 2, 0, 1, 2 if rank == 0 else 1, 1 - rank % 2, 0]

    def step_of(model: Any, x: Tensor, step: int) -> None:
        choose(chosen[step], model)
        backward(model, x)

    differences = train_beside(models, step_of, len(chosen), width=WIDTH, set_to_none=case.set_to_none, lr=0.1)
    assert largest(differences) < case.tolerance
    assert_buckets_launched_early(models[0])
    assert all(p.grad is None for p in models[0].branches[3].parameters())


@on_ranks(3)
def test_unused_gradient_keeps_every_bit() -> None:
    """The gradient of a branch that no rank uses anymore stays as it is, in its memory."""
    ours, _ = branches(both={"gradient_as_bucket_view": True})
    choose(1, ours)
    backward(ours, own_batch(0, WIDTH))
    kept = [p.grad for p in ours.branches[1].parameters()]
    values = [gradient.clone() for gradient in kept]
    choose(0, ours)
    for step in range(3):
        backward(ours, own_batch(1 + step, WIDTH))
    for parameter, old, value in zip(ours.branches[1].parameters(), kept, values, strict=True):
        assert parameter.grad is old and torch.equal(old, value)


@on_ranks(2)
def test_used_inside_no_sync() -> None:
    """One rank uses a branch in a micro-batch that is not reduced: the iteration after it still has to send it."""

    def step_of(model: Any, _x: Tensor, step: int) -> None:
        for micro_batch in range(3):
            choose(2 if micro_batch == 0 and dist.get_rank() == 0 else 0, model)
            with model.no_sync() if micro_batch < 2 else contextlib.nullcontext():
                backward(model, own_batch(3 * step + micro_batch, WIDTH))

    assert largest(train_beside(branches(), step_of, width=WIDTH)) < 1e-6


@on_ranks(2)
def test_two_forwards() -> None:
    """A forward whose outputs are discarded marks nothing. If two forwards come before a backward, both count."""
    ours, theirs = branches()
    x = own_batch(0, WIDTH)
    choose(1, ours)
    ours(x)
    choose(0, ours, theirs)
    for model in (ours, theirs):
        backward(model, x)
    assert difference(ours, theirs) < 1e-6
    whole = theirs.module
    for model in (ours, whole):
        model.zero_grad()
        losses = []
        for branch in (1, 2):
            choose(branch, model)
            losses.append(model(x).square().sum())
        sum(losses).backward()
    assert difference_to_mean(ours, whole) < 1e-6


@on_ranks(2)
def test_output_outside_of_the_loss() -> None:
    """Its parameters were reached and get nothing. Run eagerly: a compiled graph returns zeros for them."""
    ours, _ = branches("containers", backend="eager")
    outputs = ours(torch.randn(4, WIDTH))
    outputs["losses"][1][0].sum().backward()
    ours(torch.randn(4, WIDTH))
    assert all(p.grad is None for p in ours.head.parameters()) and ours.trunk.weight.grad is not None


class SparseBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.embeds = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(x)
        return y + self.embedding(torch.arange(4)) if self.embeds else y


@on_ranks(2)
def test_sparse_gradient_of_one_rank() -> None:
    model = ddp_compile(SparseBranch(), backend="aot_eager", find_unused_parameters=True)
    model.embeds = dist.get_rank() == 0
    model(torch.ones(4, WIDTH)).sum().backward()
    expected = torch.zeros(11, WIDTH)
    expected[:4] = 0.5
    assert model.embedding.weight.grad.is_sparse and torch.equal(model.embedding.weight.grad.to_dense(), expected)
    model.zero_grad()
    model.embeds = False
    model(torch.ones(4, WIDTH)).sum().backward()
    assert model.embedding.weight.grad is None


@on_ranks(2)
def test_gradient_from_outside(each_split: str) -> None:
    """The loss uses a parameter that the module's outputs do not lead to: every rank has the mean, or an error."""
    ours, _ = branches()
    weight = ours.branches[3].weight
    x = torch.full((4, WIDTH), 1.0 + dist.get_rank())
    said = r"branches\.3\.weight got a gradient after its bucket had been launched without one"
    try:
        (ours(x).square().sum() + weight.square().sum() * (1 + dist.get_rank())).backward()
    except GradientArrivalError as error:
        assert re.search(said, str(error))
    else:
        assert relative_difference(weight.grad, 3 * weight.detach()) < 1e-6


# skip_all_reduce_unused_params: buckets that no rank uses are not sent, and all else is as without it.

SKIPS = {"skip_all_reduce_unused_params": True}


def names_in(bucket: Any) -> list[str]:
    return [gradient.fqn for gradient in bucket.spec.gradients]


@on_ranks(2)
def test_skip_unused() -> None:
    models = branches(both={**SKIPS, "bucket_cap_mb": 0.0005})
    choose(1, *models)
    launched, sent = note_launches(models[0], names_in), []

    def step_of(model: Any, x: Tensor, step: int) -> None:
        launched.clear()
        with model.no_sync():
            backward(model, 2 * x)
        backward(model, x)
        if model is models[0]:
            sent.append(sorted(name for names in launched for name in names if name.startswith("branches")))

    assert largest(train_beside(models, step_of, NUM_STEPS, width=WIDTH, lr=0.1)) < 1e-6
    assert len(sent[0]) == 8  # the ranks have not exchanged anything yet
    assert sent[1:] == [["branches.1.bias", "branches.1.weight"]] * (NUM_STEPS - 1)


@on_ranks(2)
def test_skip_unused_but_used_by_one_rank() -> None:
    """DistributedDataParallel's ranks would wait for each other forever: the reference sends everything."""
    models = branches(both={"bucket_cap_mb": 0.0005}, **SKIPS)
    choose(dist.get_rank(), *models)
    launched = note_launches(models[0], names_in)
    for num_steps in (NUM_STEPS - 1, 1):
        launched.clear()
        assert largest(train_beside(models, backward, num_steps, width=WIDTH)) < 1e-6
    assert sum(map(len, launched)) == 2 * (2 + 2)


@on_ranks(2)
def test_skipped_but_used_later() -> None:
    """In the third step one rank takes a branch that no rank has used."""
    rank = dist.get_rank()
    ours, theirs = branches(both={**SKIPS, "bucket_cap_mb": 0.0005})
    choose(1, ours, theirs)
    for step in range(4):
        choose(3 if step == 2 and rank == 1 else 1, ours)
        ours.zero_grad()
        with pytest.raises(GradientArrivalError) if step == 2 else contextlib.nullcontext() as raised:
            backward(ours, own_batch(step, WIDTH))
        if step == 2:
            message = str(raised.value)
    assert message.startswith(f"rank {rank}: branches.3.weight, branches.3.bias got a gradient, on this rank or")
    assert "replicate the module again without that setting" in message
    for each in (ours, theirs):  # the ranks are in step
        each.zero_grad()
        backward(each, own_batch(4, WIDTH))
    assert difference(ours, theirs) < 1e-6


def test_skip_unused_without_find_unused(single_rank_group: None) -> None:
    with pytest.warns(UserWarning, match="skip_all_reduce_unused_params=True has no effect without find_unused"):
        ddp_compile(nn.Linear(2, 2), skip_all_reduce_unused_params=True, backend="eager")
