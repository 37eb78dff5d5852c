"""`ManagedAllReduce` over replicas that come and go, with a manager that has the protocol of torchft's.

tests/integrations/test_torchft.py does it with torchft itself.
"""

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside import is_same_everywhere, seeded
from fake_manager import FakeManager
from in_ci import only
from models import largest, relative_difference
from rank_pool import on_ranks
from torch import Tensor, nn
from ways_to_train import train as train_way

from ddp_compile import MissingGradientError, ReductionError, ddp_compile
from ddp_compile.integrations.torchft import ManagedAllReduce

WIDTH = 8


def make_net(depth: int = 3) -> nn.Sequential:
    """Layers of several sizes, so that buckets that are packed in another order have other sizes."""
    sizes = [WIDTH, 5, 3, 2, 1][: depth + 1]
    return nn.Sequential(*(nn.Linear(before, after) for before, after in itertools.pairwise(sizes)))


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    torch.manual_seed(100 * step + rank)
    return model(torch.randn(4, WIDTH)).square().mean()


def replicate(net: nn.Module, group: dist.ProcessGroup, manager: FakeManager, **settings: Any) -> Any:
    settings = {"backend": "aot_eager", "bucket_cap_mb": 0.0001, "first_bucket_cap_mb": 0.0001, **settings}
    return ddp_compile(net, process_group=group, algorithm=ManagedAllReduce(manager), **settings)


def own_groups(size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Of this rank's replica, which has ``size`` ranks, and of the ranks in its place in all replicas."""
    world = range(dist.get_world_size())
    replicas = [dist.new_group([rank for rank in world if rank // size == r]) for r in range(len(world) // size)]
    places = [dist.new_group([rank for rank in world if rank % size == p]) for p in range(size)]
    rank = dist.get_rank()
    return replicas[rank // size], places[rank % size]


def expected(net: nn.Module, step: int, ranks: range) -> list[Tensor]:
    """The mean of the gradients of these ranks, in one process."""
    copied = copy.deepcopy(net)
    torch.stack([loss_of(copied, step, rank) for rank in ranks]).mean().backward()
    return [parameter.grad for parameter in copied.parameters()]


def worst_difference(model: nn.Module, gradients: list[Tensor]) -> float:
    return largest(relative_difference(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


def train_step(model: Any, manager: FakeManager, plain: nn.Module, step: int, ranks: range, heals: bool) -> float:
    """Train to the parameters of ``plain``; returns the largest difference to the gradients of these ranks alone."""
    model.zero_grad()
    loss_of(model, step, dist.get_rank()).backward()
    gradients = expected(plain, step, ranks)
    assert manager.should_commit()
    if heals:
        model.load_state_dict(plain.state_dict())
    for ours in model.parameters():
        ours.data -= 0.1 * ours.grad
    return worst_difference(model, gradients)


@on_ranks(4, eagerly=True)
def test_replica_goes_and_comes() -> None:
    """Two replicas of two ranks. The second one is gone in step 2; in step 3 another one heals in its place."""
    own, across = own_groups(2)
    itself, _ = own_groups(1)
    is_second = dist.get_rank() >= 2
    manager, net = FakeManager(), seeded(make_net)
    model = replicate(net, own, manager)
    plain = seeded(make_net)  # what the first replica has before each step
    for step in range(6):
        if step == 3 and is_second:
            manager, net = FakeManager(), seeded(make_net, seed=4)
            model = replicate(net, own, manager)
        is_whole, heals = step not in (2, 3), step == 3 and is_second
        if step != 2 or not is_second:
            manager.start_quorum(
                itself if step == 2 else across, num=2 if is_whole else 1, heals_to=step if heals else None
            )
            worst = train_step(model, manager, plain, step, range(4 if is_whole else 2), heals)
            assert worst < 1e-5, (step, worst)
        state = [net.state_dict()]
        dist.broadcast_object_list(state, src=0)
        plain.load_state_dict(state[0])
    assert all(is_same_everywhere(parameter) for parameter in net.parameters())


#: Of the second replica: settings, layers, the manager's step; and the error.
DIFFERENCES: dict[str, tuple[dict[str, Any], int, int, str]] = {
    "buckets": ({"bucket_cap_mb": 1.0, "first_bucket_cap_mb": 1.0}, 3, 0, "the replicas differ: bucket plan [0-9a-f]"),
    "models": ({}, 2, 0, r"number of parameters (6|4) here, from 4 to 6 in the replicas that take part; of values"),
    "steps": ({}, 3, 1, r"the replicas differ: step (0|1) here, from 0 to 1 in the replicas that"),
}


@pytest.mark.parametrize("differs", DIFFERENCES)
@on_ranks(2, eagerly=True)
def test_replicas_that_differ(differs: str) -> None:
    settings, depth, step, said = DIFFERENCES[differs]
    own, across = own_groups(1)
    manager = FakeManager()
    if dist.get_rank() == 0:
        settings, depth, step = {}, 3, 0
    model, manager.step = replicate(seeded(lambda: make_net(depth)), own, manager, **settings), step
    manager.start_quorum(across)
    with pytest.raises(ReductionError, match=said):
        loss_of(model, 0, 0).backward()
    assert manager.num_sent == 1


@on_ranks(4, eagerly=True)
def test_parameters_that_differ() -> None:
    """torchft may give the ranks of a replica the parameters of different replicas."""
    own, across = own_groups(2)
    manager = FakeManager()
    manager.start_quorum(across)
    net = seeded(make_net)
    model = replicate(net, own, manager)
    if dist.get_rank() == 3:
        net[1].bias.data[0] += 1e-6
    with pytest.raises(ReductionError, match="differ: checksum of param"):
        loss_of(model, 0, 0).backward()


@on_ranks(2, eagerly=True)
def test_healing_replica_that_differs() -> None:
    """It ends before it sends a bucket. The other one does not commit the step, and can go on."""
    own, across = own_groups(1)
    manager, heals = FakeManager(), dist.get_rank() == 1
    manager.start_quorum(across, num=1, heals_to=0 if heals else None)
    model = replicate(seeded(lambda: make_net(2 if heals else 3)), own, manager)
    if heals:
        with pytest.raises(ReductionError, match="number of parameters 4 here, from 6 to 6 in the replicas"):
            loss_of(model, 0, 0).backward()
        assert manager.num_sent == 1
        dist.destroy_process_group(across)  # as if the process ended
        return
    loss_of(model, 0, 0).backward()
    assert not manager.should_commit()
    model.zero_grad()
    manager.start_quorum(own)
    loss_of(model, 0, 0).backward()
    assert manager.should_commit()


@on_ranks(2, eagerly=True)
def test_error_of_the_manager() -> None:
    """The step is not committed; in the next one the replicas compare again before they send buckets."""
    own, across = own_groups(1)
    manager = FakeManager()
    model = replicate(seeded(make_net), own, manager)
    manager.start_quorum(across)
    manager.report_error(RuntimeError("connection reset"))
    loss_of(model, 0, 0).backward()
    assert not manager.should_commit() and manager.num_sent == 0
    model.zero_grad()
    manager.start_quorum(across)
    loss_of(model, 0, dist.get_rank()).backward()
    assert manager.should_commit() and manager.num_sent == len(model.bucket_plan.buckets) + 2
    assert worst_difference(model, expected(seeded(make_net), 0, range(2))) < 1e-5


@on_ranks(2, eagerly=True)
def test_missing_bucket() -> None:
    own, across = own_groups(1)
    manager = FakeManager()
    manager.start_quorum(across)
    net = seeded(make_net)
    model = replicate(net, own, manager)
    loss_of(model, 0, 0).backward()
    model.zero_grad()
    with pytest.raises(MissingGradientError, match=r"no forward before this backward, and it leaves out .* of bucket"):
        net[0].weight.sum().backward()  # no forward says that other gradients will come


@on_ranks(2, eagerly=True)
def test_two_models() -> None:
    own, across = own_groups(1)
    manager = FakeManager()
    manager.start_quorum(across)
    first, second = (replicate(seeded(make_net, seed), own, manager) for seed in (3, 4))
    (loss_of(first, 0, dist.get_rank()) + loss_of(second, 0, dist.get_rank())).backward()
    for model, seed in ((first, 3), (second, 4)):
        assert worst_difference(model, expected(seeded(make_net, seed), 0, range(2))) < 1e-5


def test_no_manager() -> None:
    with pytest.raises(TypeError, match=r"manager=None is a NoneType; pass a torchft\.Manager"):
        ManagedAllReduce(None)  # type: ignore[arg-type]


# Gradients that accumulate, come twice, or change after the backward. The other replicas do not know of a bucket that
# would have to be launched again, so none may be launched early.
WAYS_IN_CI = ["accumulate_in_no_sync", "contributor_that_appears_on_one_rank"]


@pytest.mark.parametrize("way", only(WAYS_IN_CI, [*WAYS_IN_CI, "unscaled_and_clipped"]))
@on_ranks(2)
def test_ways_to_train(way: str) -> None:
    own, across = own_groups(1)
    manager = FakeManager()
    manager.start_quorum(across)
    trained = train_way(way, algorithm=ManagedAllReduce(manager), process_group=own, split="backward")
    assert trained.worst < 1e-5 and manager.should_commit()
