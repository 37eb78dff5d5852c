"""What up to 4,096 ranks ask their store for, in one process whose clock stands still while it computes.

    python tests/scale/scale.py [--ranks 64,512,4096]

Each rank is a thread, of which one runs at a time: the one whose answer, or end of a pause, comes next. The store's
server answers one request after the other, and takes `REQUEST_S` for each and `KEY_S` for each key. Counted are keys
that are asked for, and bytes of keys and values, for the rank that asks most and for all ranks together.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "desync"))

import torch.distributed as dist
from store_ranks import CountingStore, group_of, on_threads, points_of, run_iteration
from tabulate import tabulate

from ddp_compile.errors import RanksDifferError
from ddp_compile.plan.packing import plan_buckets
from ddp_compile.plan.spec import GradientSpec
from ddp_compile.runtime.desync import gathering
from ddp_compile.runtime.desync.group_store import GroupStore
from ddp_compile.runtime.desync.rank_status import RankStatuses

#: What a TCPStore's server takes, several times what it took on an idle machine; and a message there and back.
REQUEST_S, KEY_S, MESSAGE_S = 20e-6, 1e-6, 100e-6
#: A thread of a rank needs little; thousands of the usual stacks would be gigabytes.
_STACK_BYTES = 256 * 1024


class Clock:
    """Stands in for the module ``time``: sleeping threads wake in the order of their times, one at a time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._sleeping: list[tuple[float, int, threading.Semaphore]] = []
        self._numbers = itertools.count()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        turn = self._wake_after(seconds)
        self._give_turn()
        turn.acquire()

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """What each function returns or raises, each on its own thread."""
        turns = [self._wake_after(0.0) for _ in functions]

        def take_part(turn: threading.Semaphore, function: Callable[[], Any]) -> Any:
            turn.acquire()
            try:
                return function()
            finally:
                self._give_turn()

        self._give_turn()
        return on_threads([partial(take_part, turn, each) for turn, each in zip(turns, functions, strict=True)])

    def _wake_after(self, seconds: float) -> threading.Semaphore:
        turn = threading.Semaphore(0)
        heapq.heappush(self._sleeping, (self.now + seconds, next(self._numbers), turn))
        return turn

    def _give_turn(self) -> None:
        if self._sleeping:
            self.now, _, turn = heapq.heappop(self._sleeping)
            turn.release()


class Server:
    """A store, and when it is free to answer."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.store = clock, dist.HashStore()
        self._free_at = 0.0

    def serve(self, num_keys: int) -> float:
        """When a request of now is answered."""
        self._free_at = max(self._free_at, self.clock.now) + REQUEST_S + KEY_S * num_keys
        return self._free_at


class RankStore(GroupStore):
    """A rank's store, whose answers take time of the simulation."""

    def __init__(self, server: Server, number: int) -> None:
        self.counting = CountingStore(server.store, is_shared=True)
        self._server = server
        super().__init__(group_of(self.counting, number), "test/")

    def post(self, key: str, value: str) -> None:
        super().post(key, value)
        self._server.serve(1)

    def ask(self, question: Callable[[], Any], limit_s: float = 0.0) -> Any:
        before = self.counting.num_asked
        answer = question()
        clock = self._server.clock
        clock.sleep(self._server.serve(self.counting.num_asked - before) - clock.now + MESSAGE_S)
        return answer


class Part(NamedTuple):
    """What one rank does in a scene."""

    before: Callable[[], Any]
    after: Callable[[], Any]  #: when all ranks have done that
    is_right: Callable[[Any], bool]  #: given what ``after`` returned or raised


class Traffic(NamedTuple):
    """What ranks asked a store for."""

    what: str
    ranks: int
    most_keys: int  #: asked for by one rank
    keys: int  #: by all ranks
    most_bytes: int
    num_bytes: int
    seconds: float  #: until every rank knew, by the simulation's clock


def agreement_point(store: RankStore, rank: int, number: int) -> Part:
    points = points_of(store, rank, number)
    return Part(partial(run_iteration, points), points.compare, lambda result: result is None)


def rank_1_differs(store: RankStore, rank: int, number: int) -> Part:
    """As `agreement_point`, but rank 1 has left out a forward."""
    points, what = points_of(store, rank, number), f"1 on rank 1, 0 on ranks 0, 2-{number - 1}"
    return Part(
        partial(run_iteration, points, after_forward=rank != 1),
        points.compare,
        lambda error: isinstance(error, RanksDifferError) and what in str(error),
    )


def failure_report(store: RankStore, rank: int, number: int) -> Part:
    """A bucket fails on all ranks, which then report where they were."""
    statuses = RankStatuses(store, rank, range(number))

    def fail() -> None:
        statuses.note("waiting for the buckets of iteration", 7 + (rank == 1))
        statuses.fail(", bucket 0: failed")

    return Part(fail, statuses.report, lambda table: f"0, 2-{number - 1} " in table and "8, bucket 0: failed" in table)


SCENES = (agreement_point, rank_1_differs, failure_report)


def simulate(scene: Callable[[RankStore, int, int], Part], number: int) -> Traffic:
    """What a scene takes with so many ranks.

    Raises:
        RuntimeError: A rank was told something else than what happened.
    """
    clock, time = Clock(), gathering.time
    server = Server(clock)
    stores = [RankStore(server, number) for _ in range(number)]
    gathering.time = clock  # type: ignore[assignment]
    stack_bytes = threading.stack_size(_STACK_BYTES)
    try:
        parts = [scene(store, rank, number) for rank, store in enumerate(stores)]
        for store in stores:
            store.counting.forget()  # what was asked for when the model was made
        clock.run([part.before for part in parts])
        began = clock.now
        results = clock.run([part.after for part in parts])
    finally:
        threading.stack_size(stack_bytes)
        gathering.time = time
    for part, result in zip(parts, results, strict=True):
        if not part.is_right(result):
            raise RuntimeError(f"{scene.__name__} of {number} ranks: a rank was told {result!r}")
    keys, sent = zip(*((store.counting.num_asked, store.counting.num_bytes) for store in stores), strict=True)
    return Traffic(scene.__name__, number, max(keys), sum(keys), max(sent), sum(sent), clock.now - began)


def plan_bytes(num_gradients: int) -> int:
    """Bytes of the plan that rank 0 broadcasts, which do not depend on the number of ranks."""
    gradients = [
        GradientSpec(i, f"layers.{i}.attention.weight", 2**20, "float32", "cuda") for i in range(num_gradients)
    ]
    return len(plan_buckets(gradients, 25 * 2**20).to_json())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="64,512,4096")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    numbers = [*map(int, arguments.ranks.split(","))]
    rows = [simulate(scene, number) for scene in SCENES for number in numbers]
    print(tabulate(rows, headers=Traffic._fields, floatfmt=".3f"))
    print(f"plan of 300 gradients, broadcast once: {plan_bytes(300)} bytes")


if __name__ == "__main__":
    main()
