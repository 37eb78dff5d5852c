"""Ranks as threads of one process that communicate through one store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from ddp_compile.plan.spec import BucketPlan
from ddp_compile.runtime.desync.agreement_points import AgreementPoints
from ddp_compile.runtime.desync.group_store import GroupStore
from ddp_compile.runtime.desync.model_order import ModelOrder

PLAN = BucketPlan(())


def store_of(store: Any, world_size: int = 2) -> GroupStore:
    group: Any = SimpleNamespace(size=lambda: world_size, rank=lambda: 0, get_group_store=lambda: store)
    return GroupStore(group, "test/")


def points_of(store: GroupStore, rank: int, world_size: int = 2) -> AgreementPoints:
    """Of a model that is the only one of its process group."""
    return AgreementPoints(ModelOrder(store), ModelOrder(store, "own/"), "Linear", rank, range(world_size))


def run_iteration(points: AgreementPoints, after_forward: bool = True) -> None:
    points.begins_after_forward = after_forward
    points.last_bucket_is_launched(PLAN, "none", is_shared=True)


def on_threads(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each function returns or raises, each on its own thread."""
    results: list[Any] = [None] * len(functions)

    def run(place: int) -> None:
        try:
            results[place] = functions[place]()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
