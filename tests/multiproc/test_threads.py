"""Forwards and backwards in several threads of each rank, beside DistributedDataParallel in as many."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Queue
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from models import Mlp, loss_of
from rank_pool import RankPool, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ddp_compile

pytestmark = pytest.mark.usefixtures("each_split")

Ranks = Callable[[int], RankPool]
Result = TypeVar("Result")
WIDTH, NUM_STEPS, THREAD_TIMEOUT_S = 9, 5, 60
CAP_MB = 0.0005  # about a layer


def replicate(by_ddp: bool, seed: int = 1, **settings: Any) -> Any:
    torch.manual_seed(seed)
    model = Mlp(width=WIDTH, num_layers=4)
    if by_ddp:
        return DistributedDataParallel(model, **settings)
    return ddp_compile(model, bucket_cap_mb=CAP_MB, **{"backend": "aot_eager", **settings})


def own_batch(step: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + 10 * step + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator)


def gradients(model: nn.Module) -> list[list[float]]:
    return [parameter.grad.flatten().tolist() for parameter in model.parameters()]


def in_threads(*functions: Callable[[], Result]) -> list[Result]:
    """What each function returns in a thread of its own; raises what the first of them raised."""
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(place: int) -> None:
        try:
            results[place] = functions[place]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(THREAD_TIMEOUT_S)
    if errors:
        raise errors[0]
    assert len(results) == len(functions), "a thread did not end"
    return [results[place] for place in range(len(functions))]


def in_a_thread(function: Callable[[], Result]) -> Result:
    return in_threads(function)[0]


def in_changing_threads(by_ddp: bool) -> list[list[list[float]]]:
    """Forward, backward or both in another thread; the first forward, which compiles, too."""
    model = replicate(by_ddp)
    seen = []
    for step in range(2 * NUM_STEPS):
        x = own_batch(step)
        model.zero_grad()
        loss = in_a_thread(lambda x=x: loss_of(model(x))) if step % 4 in (0, 2) else loss_of(model(x))
        if step % 4 in (0, 1):
            in_a_thread(loss.backward)
        else:
            loss.backward()
        seen.append(gradients(model))
    return seen


def two_in_two_threads(by_ddp: bool) -> list[list[list[list[float]]]]:
    """Each with a process group of its own, since collectives of two threads come in no order."""
    models = [replicate(by_ddp, seed, process_group=dist.new_group()) for seed in (0, 1)]

    def train(seed: int) -> list[list[list[float]]]:
        model, seen = models[seed], []
        for step in range(NUM_STEPS):
            model.zero_grad()
            loss_of(model(own_batch(step, seed))).backward()
            seen.append(gradients(model))
        return seen

    return in_threads(lambda: train(0), lambda: train(1))


def evaluates_in_a_loader(by_ddp: bool) -> list[list[list[float]]]:
    """A thread prepares batches with the module itself, while the main one trains it."""
    model = replicate(by_ddp)
    prepared: Queue[Tensor] = Queue(maxsize=2)

    def prepare() -> None:
        for step in range(NUM_STEPS):
            with torch.no_grad():
                # Not DistributedDataParallel itself, which would broadcast its buffers, if it had some.
                made = (model.module if by_ddp else model)(own_batch(step))
            prepared.put(own_batch(step) + 0 * made)

    def train() -> list[list[list[float]]]:
        seen = []
        for _ in range(NUM_STEPS):
            model.zero_grad()
            loss_of(model(prepared.get(timeout=THREAD_TIMEOUT_S))).backward()
            seen.append(gradients(model))
        return seen

    return in_threads(train, prepare)[0]  # type: ignore[return-value]


WAYS = {
    "changing threads": in_changing_threads,
    "two models": two_in_two_threads,
    "a loader's thread": evaluates_in_a_loader,
}


#: torch.compile of any two modules does.
DYNAMO_CRASHES = pytest.mark.skipif(torch.__version__ < "2.12", reason="Dynamo of torch 2.11 crashes in two threads")


@pytest.mark.parametrize(
    "way",
    [
        "changing threads",
        pytest.param("two models", marks=DYNAMO_CRASHES),
        pytest.param("a loader's thread", marks=[DYNAMO_CRASHES, pytest.mark.long]),
    ],
)
@on_ranks(2)
def test_gradients_are_ddps(way: str) -> None:
    ours = WAYS[way](False)
    theirs = WAYS[way](True)
    assert ours == theirs
