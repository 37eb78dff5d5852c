"""What up to 4,096 ranks ask their store for, on one machine.

    python tests/scale/scale.py [--ranks 64,512,4096]

Each rank is a thread with its own connection to one TCPStore server, 128 ranks to a process. Counted are requests, one
for each key, and bytes of keys and values, for the rank that asks most and for all ranks together. Times are longer
than those of ranks with processors of their own, since all share this machine with the server; so no wait for an answer
ends before `ANSWER_LIMIT_S`.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

import torch.distributed as dist
from store_ranks import CountingStore, on_threads, points_of, run_iteration, store_of
from tabulate import tabulate

from ddp_compile.errors import RanksDifferError
from ddp_compile.plan.packing import plan_buckets
from ddp_compile.plan.spec import GradientSpec
from ddp_compile.runtime.desync import agreement_points, gathering
from ddp_compile.runtime.desync.group_store import GroupStore
from ddp_compile.runtime.desync.rank_status import RankStatuses

ANSWER_LIMIT_S = 120.0
RANKS_OF_A_PROCESS = 128
#: A thread of a rank needs little; thousands of the usual stacks would be gigabytes.
_STACK_BYTES = 256 * 1024


class Part(NamedTuple):
    """What one rank does in a scene."""

    before: Callable[[], Any]  #: waits for nobody
    after: Callable[[], Any]  #: when all ranks have done that
    is_right: Callable[[Any], bool]  #: given what ``after`` returned or raised


class Traffic(NamedTuple):
    """What ranks asked a store for."""

    what: str
    ranks: int
    most_asked: int  #: by one rank
    asked: int  #: by all ranks
    most_bytes: int
    num_bytes: int
    seconds: float  #: from when all have done the first part


def agreement_point(store: GroupStore, rank: int, number: int) -> Part:
    points = points_of(store, rank, number)
    return Part(partial(run_iteration, points), points.compare, lambda result: result is None)


def agreement_point_where_rank_1_differs(store: GroupStore, rank: int, number: int) -> Part:
    points = points_of(store, rank, number)
    return Part(
        partial(run_iteration, points, after_forward=rank != 1),
        points.compare,
        lambda error: (
            isinstance(error, RanksDifferError) and f"1 on rank 1, 0 on ranks 0, 2-{number - 1}" in str(error)
        ),
    )


def failure_report(store: GroupStore, rank: int, number: int) -> Part:
    """A bucket fails on all ranks, which then report where they were."""
    statuses = RankStatuses(store, rank, range(number))
    store.ends_here = False  # the server is in no rank's process

    def fail() -> None:
        statuses.note("waiting for the buckets of iteration", 7 + (rank == 1))
        statuses.fail(", bucket 0: failed")

    return Part(
        fail, statuses.report, lambda table: f"0, 2-{number - 1} " in table and "iteration 8, bucket 0" in table
    )


SCENES: tuple[Callable[[GroupStore, int, int], Part], ...] = (
    agreement_point,
    agreement_point_where_rank_1_differs,
    failure_report,
)


def be_ranks(port: int, ranks: range, number: int, all_here: Any, counts: Any) -> None:
    """One process of ranks: plays the scenes, and sends what each rank asked for, and the seconds."""
    logging.disable(logging.WARNING)
    threading.stack_size(_STACK_BYTES)
    agreement_points.ANSWER_LIMIT_S = gathering.ANSWER_LIMIT_S = ANSWER_LIMIT_S  # type: ignore[attr-defined]
    GroupStore.ask.__defaults__ = (ANSWER_LIMIT_S,)
    # A connection takes tenths of a second, most of which it waits.
    connections = on_threads([partial(dist.TCPStore, "127.0.0.1", port, is_master=False)] * len(ranks))
    for scene in SCENES:
        prefixed = [dist.PrefixStore(scene.__name__, connection) for connection in connections]
        counting = [CountingStore(each, is_shared=True) for each in prefixed]
        parts = [scene(store_of(store, number), rank, number) for store, rank in zip(counting, ranks, strict=True)]
        for store, part in zip(counting, parts, strict=True):
            store.forget()  # what was asked for when the model was made
            part.before()
        all_here.wait()
        began = time.perf_counter()
        results = on_threads([part.after for part in parts])
        seconds = time.perf_counter() - began
        wrong = [str(result) for part, result in zip(parts, results, strict=True) if not part.is_right(result)]
        all_here.wait()
        counts.put((scene.__name__, [(each.num_asked, each.num_bytes) for each in counting], seconds, wrong[:1]))


def simulate(number: int) -> list[Traffic]:
    """What each scene takes with so many ranks.

    Raises:
        RuntimeError: A rank was told something else than what happened.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "ddp_compile", "__main__"])
    shares = [range(number)[begin : begin + RANKS_OF_A_PROCESS] for begin in range(0, number, RANKS_OF_A_PROCESS)]
    all_here, counts = context.Barrier(len(shares)), context.Queue()
    processes = [
        context.Process(target=be_ranks, args=(server.port, share, number, all_here, counts)) for share in shares
    ]
    for process in processes:
        process.start()
    told = [counts.get(timeout=4 * ANSWER_LIMIT_S) for _ in shares for _ in SCENES]
    for process in processes:
        process.join()
    return [
        _traffic(scene.__name__, number, [each[1:] for each in told if each[0] == scene.__name__]) for scene in SCENES
    ]


def _traffic(what: str, number: int, told: list[Any]) -> Traffic:
    for _, _, wrong in told:
        if wrong:
            raise RuntimeError(f"{what}, {number} ranks: a rank was told {wrong[0]}")
    asked, sent = zip(*(each for counted, _, _ in told for each in counted), strict=True)
    return Traffic(what, number, max(asked), sum(asked), max(sent), sum(sent), max(seconds for _, seconds, _ in told))


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
    rows = [traffic for number in map(int, arguments.ranks.split(",")) for traffic in simulate(number)]
    print(tabulate(rows, headers=Traffic._fields, floatfmt=".2f"))
    print(f"plan of 300 gradients, broadcast once: {plan_bytes(300)} bytes")


if __name__ == "__main__":
    main()
