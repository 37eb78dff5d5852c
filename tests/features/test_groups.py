"""Models in groups of some ranks, with their own collectives, or in several threads: as with DDP."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from beside import own_batch, seeded
from models import Mlp, loss_of
from rank_pool import Ranks
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ddp_compile

pytestmark = pytest.mark.usefixtures("each_split")

Gradients = list[list[float]]
Result = TypeVar("Result")
WIDTH, NUM_STEPS = 9, 4


class AllReduced(nn.Module):
    """Averages outputs of all layers but the last over a group, like a synchronized BatchNorm; so does its backward."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if layer is not self.layers[-1]:
                x = all_reduce(x, group=self._group) / dist.get_world_size(self._group)
        return x


def replicate(by_ddp: bool, group: Any = None, seed: int = 1, make: Callable[[], nn.Module] | None = None) -> Any:
    model = seeded(make or (lambda: Mlp(WIDTH, 4)), seed)
    if by_ddp:
        return DistributedDataParallel(model, process_group=group)
    return ddp_compile(model, process_group=group, bucket_cap_mb=0.0005, backend="aot_eager")  # about a layer


def gradients(*models: nn.Module) -> Gradients:
    return [parameter.grad.flatten().tolist() for model in models for parameter in model.parameters()]


def train(models: Sequence[Any], loss: Callable[[Tensor], Tensor]) -> list[Gradients]:
    seen = []
    for step in range(NUM_STEPS):
        for model in models:
            model.zero_grad()
        loss(own_batch(step, WIDTH)).backward()
        seen.append(gradients(*models))
    return seen


def on_two_of_three(by_ddp: bool) -> list[Gradients]:
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return []
    model = replicate(by_ddp, group)
    return train([model], lambda x: loss_of(model(x)))


def in_two_groups_that_share_a_rank(by_ddp: bool) -> list[Gradients]:
    """Rank 1 trains both models, one after the other."""
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    mine = [number for number, ranks in enumerate(([0, 1], [1, 2])) if dist.get_rank() in ranks]
    models = [replicate(by_ddp, groups[number], number) for number in mine]
    return [each for model in models for each in train([model], lambda x, model=model: loss_of(model(x)))]


def in_one_backward(by_ddp: bool) -> list[Gradients]:
    """Two models in two groups of all ranks, and one backward through both."""
    models = [replicate(by_ddp, dist.new_group(), number) for number in (0, 1)]
    return train(models, lambda x: loss_of(models[0](x)) + loss_of(models[1](x)))


def with_collectives_in_its_group(by_ddp: bool) -> list[Gradients]:
    """Two models in one group, in which the collectives of both have one order on all ranks."""
    own = dist.group.WORLD
    models = [replicate(by_ddp, own, 2, lambda: AllReduced(own)), replicate(by_ddp, own)]
    return train(models, lambda x: loss_of(models[1](models[0](x))))


def in_threads(*functions: Callable[[], Result]) -> list[Result]:
    """The result of each function, run in its own thread; raises the first exception."""
    threads = ThreadPoolExecutor(len(functions))
    futures = [threads.submit(function) for function in functions]
    threads.shutdown(wait=False)
    return [future.result(timeout=60) for future in futures]


def in_changing_threads(by_ddp: bool) -> list[Gradients]:
    """Forward, backward or both in another thread; the first forward, which compiles, too."""
    model = replicate(by_ddp)
    seen = []
    for step in range(2 * NUM_STEPS):
        x = own_batch(step, WIDTH)
        model.zero_grad()
        loss = in_threads(lambda x=x: loss_of(model(x)))[0] if step % 4 in (0, 2) else loss_of(model(x))
        in_threads(loss.backward) if step % 4 in (0, 1) else loss.backward()
        seen.append(gradients(model))
    return seen


def two_in_two_threads(by_ddp: bool) -> list[list[Gradients]]:
    """Each with its own process group, since collectives of two threads have no order."""
    models = [replicate(by_ddp, dist.new_group(), seed) for seed in (0, 1)]
    batches = [[own_batch(100 * seed + step, WIDTH) for step in range(NUM_STEPS)] for seed in (0, 1)]

    def train_one(seed: int) -> list[Gradients]:
        seen = []
        for x in batches[seed]:
            models[seed].zero_grad()
            loss_of(models[seed](x)).backward()
            seen.append(gradients(models[seed]))
        return seen

    return in_threads(lambda: train_one(0), lambda: train_one(1))


#: Number of ranks, and how they train.
WAYS: dict[str, tuple[int, Callable[[bool], Any]]] = {
    "on two of three": (3, on_two_of_three),
    "in two groups that share a rank": (3, in_two_groups_that_share_a_rank),
    "in one backward": (2, in_one_backward),
    "with collectives in its group": (2, with_collectives_in_its_group),
    "in changing threads": (2, in_changing_threads),
    "in two threads": (2, two_in_two_threads),
}
#: Dynamo of torch 2.11 refuses collectives in a graph (the error is in compile/test_compile_failures.py), and
#: crashes if two threads compile any two modules.
NOT_WITH_2_11 = pytest.mark.skipif(torch.__version__ < "2.12", reason="Dynamo of torch 2.11 cannot do it")


def marks_of(way: str) -> list[pytest.MarkDecorator]:
    old = any(word in way for word in ("collectives", "two threads"))
    return [*([NOT_WITH_2_11] if old else []), *([pytest.mark.long] if "share a rank" in way else [])]


def both(way: str) -> tuple[Any, Any]:
    return WAYS[way][1](False), WAYS[way][1](True)


@pytest.mark.parametrize("way", [pytest.param(way, marks=marks_of(way)) for way in WAYS])
def test_groups_and_threads(ranks: Ranks, way: str) -> None:
    for rank, (ours, theirs) in enumerate(ranks(WAYS[way][0]).run(both, way)):
        assert ours == theirs
        assert bool(ours) != (way == "on two of three" and rank == 2)
