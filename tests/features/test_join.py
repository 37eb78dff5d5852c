"""Ranks with fewer batches than others, inside ``Join``: as with DistributedDataParallel, step for step."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from beside import beside_plain, difference, own_batch, pair, seeded
from halves import Built, Halves
from in_ci import only
from models import Mlp, largest, loss_of, relative_difference
from rank_pool import Ranks, on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from ways_to_train import count_early

from ddp_compile import ReplicationError, ddp_compile

WIDTH = 33


class Model(nn.Module):
    """Four layers, buffers that training changes, and a branch that not every batch takes."""

    def __init__(self, has_branch: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.branch = nn.Linear(WIDTH, WIDTH) if has_branch else None

    def forward(self, x: Tensor, takes_branch: bool = False) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        x = self.norm(x)
        return self.branch(x) if self.branch is not None and takes_branch else x


def batches(count: int, epoch: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(10 * epoch + dist.get_rank())
    return (torch.randn(5, WIDTH, generator=generator) for _ in range(count))


def state_of(module: nn.Module) -> dict[str, Tensor]:
    plain = module.module if isinstance(module, DistributedDataParallel) else module
    return {name: value.clone() for name, value in plain.state_dict().items()}


def worst_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    return max(relative_difference(ours[name].float(), theirs[name].float()) for name in theirs)


def train(
    model: Any,
    counts: list[int],
    epoch: int,
    accumulate: bool = False,
    has_branch: bool = False,
    with_hook: bool = False,
    **join: Any,
) -> list[dict[str, Tensor]]:
    """One epoch; the model's state after each step of this rank, and at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states = []
    with model.join(**join):
        for step, x in enumerate(batches(counts[dist.get_rank()], epoch)):
            arguments = ((step + dist.get_rank()) % 2 == 0,) if has_branch else ()
            if accumulate and step % 2 == 0:
                with model.no_sync():
                    loss_of(model(x, *arguments)).backward()
                continue
            loss_of(model(x, *arguments)).backward()
            optimizer.step()
            optimizer.zero_grad()
            states.append(state_of(model))
    return [*states, state_of(model)]


def train_both(counts: list[int], arguments: dict[str, Any], split: str, **both: bool) -> None:
    """Parameters and buffers are DistributedDataParallel's after each step."""
    models = pair(lambda: Model(arguments.get("has_branch", False)), both, bucket_cap_mb=0.005, split=split)
    if arguments.get("with_hook"):
        for each in models:
            each.register_comm_hook(None, allreduce_hook)
    for epoch in range(3):
        # Another rank runs out first each time, and in the last epoch none does.
        rolled = counts[epoch:] + counts[:epoch] if epoch < 2 else [2] * len(counts)
        states = (train(each, rolled, epoch, **arguments) for each in models)
        assert largest(map(worst_difference, *states)) < 1e-6, epoch


#: Numbers of batches by rank, settings of both, and arguments of `train`.
UNEVEN: dict[str, tuple[list[int], dict[str, bool], dict[str, Any]]] = {
    "comm hook": ([3, 6], {}, {"with_hook": True}),
    "unused parameters": ([6, 3, 4], {"find_unused_parameters": True}, {"has_branch": True}),
    "static graph": ([3, 6], {"static_graph": True}, {}),
    "accumulation": ([6, 3, 4], {"broadcast_buffers": False}, {"accumulate": True}),
    "other divisor": ([3, 6], {"gradient_as_bucket_view": False}, {"divide_by_initial_world_size": False}),
    "no input": ([3, 0, 2], {}, {}),
}
IN_CI = ["unused parameters", "no input"]


@pytest.mark.parametrize("way", only(IN_CI, UNEVEN))
def test_uneven_inputs(way: str, split: str, ranks: Ranks) -> None:
    counts, settings, arguments = UNEVEN[way]
    ranks(len(counts)).run(train_both, counts, arguments, split, **settings)


@on_ranks(2)
def test_early_launch_beside_shadows() -> None:
    """Rank 0 has two batches fewer. In the last step of rank 1 a contribution comes too late."""
    model, reference = beside_plain(lambda: Mlp(WIDTH, 4), bucket_cap_mb=0.003, split="backward")
    launched, num_early = count_early(model), []
    with model.join():
        for step in range(3 + 2 * dist.get_rank()):
            launched.clear()
            for each in (model, reference):
                each.zero_grad()
                loss = loss_of(each(own_batch(step, WIDTH, 5)))
                if step == 4:
                    loss = loss + each.layers[1].weight.square().sum()
                loss.backward()
            num_early.append(len(launched))
            if step >= 3:  # rank 0 contributes zeros
                for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                    assert relative_difference(ours.grad, theirs.grad / 2) < 1e-6
    assert num_early == [3] * (3 + 2 * dist.get_rank())


class CountsSteps(Joinable):
    """A user's own Joinable: how many steps all ranks have done together."""

    join_device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def count(self, own: int = 1) -> None:
        if own:
            Join.notify_join_context(self)
        number = torch.tensor(own)
        dist.all_reduce(number)
        self.total += int(number)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        hook = JoinHook()
        hook.main_hook = lambda: self.count(0)  # type: ignore[method-assign]
        return hook

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return dist.group.WORLD


@on_ranks(2)
def test_other_joinables() -> None:
    models = pair(Model, bucket_cap_mb=0.005)
    for model in models:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        counter = CountsSteps()
        with Join([model, optimizer, counter], divide_by_initial_world_size=False):
            for x in batches(3 + 2 * dist.get_rank(), 0):
                optimizer.zero_grad()
                loss_of(model(x)).backward()
                optimizer.step()
                counter.count()  # after the first of them, which says that this rank still trains
        assert counter.total == 3 + 5
    assert worst_difference(*map(state_of, models)) < 1e-6


@on_ranks(2, eagerly=True)
def test_shadow_after_no_sync() -> None:
    models, x = pair(lambda: Model(True), {"find_unused_parameters": True}, backend="eager"), own_batch(0, WIDTH)
    for each in models:
        with each.join():
            with each.no_sync():
                each(x, dist.get_rank() == 0).sum().backward()
            if dist.get_rank() == 1:
                each(x).sum().backward()
        each(x).sum().backward()
    assert difference(*models) < 1e-6


@on_ranks(2, eagerly=True)
def test_calls_of_an_algorithm() -> None:
    model: Any = ddp_compile(nn.Linear(2, 2), backend="eager", algorithm=Built(Halves))
    calls = {name: mock.Mock() for name in ("before_forward", "after_backward")}
    with mock.patch.multiple(Halves, **calls), model.join():
        for _ in range(1 + 2 * dist.get_rank()):
            model(torch.ones(1, 2)).sum().backward()
    assert calls["before_forward"].mock_calls == [mock.call(True)] * 3
    assert calls["after_backward"].call_count == 3


@on_ranks(2, eagerly=True)
def test_state_after_join() -> None:
    model: Any = ddp_compile(nn.Linear(2, 2), backend="eager")
    assert isinstance(model, Joinable) and model.join_process_group is dist.group.WORLD
    for enable in (False, True):
        with model.join(enable=enable):
            model(torch.ones(1, 2)).sum().backward()
        assert not model._join_config.enable
    assert "_join_config" not in vars(model)
    plain = model.unwrap()
    assert not hasattr(plain, "join_hook") and not hasattr(plain, "_join_config")


@pytest.mark.parametrize("context", ["", "no_sync"])
@on_ranks(2, eagerly=True)
def test_second_forward_is_refused(context: str) -> None:
    model = ddp_compile(nn.Linear(2, 2), backend="eager")
    with (
        pytest.raises(ReplicationError, match="a second forward was called inside a Join before the backward of"),
        model.join(divide_by_initial_world_size=False),
    ):
        loss = model(torch.ones(1, 2)).sum()
        with getattr(model, context, nullcontext)():
            model(torch.ones(1, 2))
    loss.backward()


@torch.compiler.set_stance("force_eager")
def learn_without_input() -> None:
    model = ddp_compile(nn.Linear(2, 2), backend="eager", static_graph=True)
    with model.join():
        for _ in range(dist.get_rank()):
            model(torch.ones(1, 2)).sum().backward()


def test_static_graph_without_input(ranks: Ranks) -> None:
    without_input, _ = ranks(2).run_expecting_failures(learn_without_input, timeout_s=2.0)
    said = "static_graph=True learns from the first iteration, in which this rank has had no input"
    assert said in without_input.message


@on_ranks(2, eagerly=True)
def test_state_after_an_error() -> None:
    """Gradients inside a context that is not enabled are as with DistributedDataParallel."""
    said = ("Rank 0 exhausted all inputs.", "Detected at least one rank that exhausted inputs. Throwing")
    models, x = pair(lambda: nn.Linear(5, 5), backend="eager"), torch.ones(2, 5) * (1 + dist.get_rank())
    for each in models:
        with (
            pytest.raises(RuntimeError, match=said[dist.get_rank()]),
            each.join(divide_by_initial_world_size=False, throw_on_early_termination=True),
        ):
            for _ in range(1 + dist.get_rank()):
                with each.no_sync():
                    each(x).sum().backward()
        each.zero_grad()
        with each.join(enable=False):
            each(x).sum().backward()
    assert difference(*models) < 1e-6
    model = models[0]
    one, other = model(x), model(2 * x)  # nothing is left that would refuse a second forward
    (one.sum() + other.sum()).backward()
    assert not model._join_config.enable


@on_ranks(2)
def test_error_of_all_ranks() -> None:
    model = ddp_compile(seeded(lambda: Mlp(WIDTH, 4)), bucket_cap_mb=0.003, split="backward", backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"layers\.1\.\w+ got another gradient"), model.join():
        for step in range(3 + 2 * dist.get_rank()):
            if step == 4:  # its gradient is gone, so the bucket cannot be launched again
                handle = model.layers[1].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
            loss_of(model(torch.randn(5, WIDTH))).backward()
    if dist.get_rank() == 1:
        handle.remove()
    model.zero_grad()
    loss_of(model(torch.randn(5, WIDTH))).backward()


@torch.compiler.set_stance("force_eager")
def raise_while_the_other_shadows() -> None:
    model = ddp_compile(nn.Linear(2, 2), backend="eager")
    with model.join():
        for step in range(1 + 2 * dist.get_rank()):
            loss = model(torch.ones(1, 2)).sum()
            if step == 2:
                raise ValueError("a bad batch")
            loss.backward()


def test_rank_that_raises_while_another_shadows(ranks: Ranks) -> None:
    shadow, raising = ranks(2).run_expecting_failures(raise_while_the_other_shadows, timeout_s=2.0)
    assert raising.message == "a bad batch"
    assert "the all-reduce of bucket 0" in shadow.message and "training forward 3 has returned" in shadow.message
