"""Ranks as threads of one process that communicate through one store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

from ddp_compile.plan.spec import BucketPlan
from ddp_compile.runtime.desync.agreement_points import AgreementPoints
from ddp_compile.runtime.desync.group_store import GroupStore
from ddp_compile.runtime.desync.model_order import ModelOrder

PLAN = BucketPlan(())


class CountingStore:
    """A rank's own connection to a store. It counts what it asks the server for, once for each key.

    Args:
        store: The server's.
        is_shared: Whether all ranks use this connection.
    """

    def __init__(self, store: Any, is_shared: bool = False) -> None:
        self._store = store
        self._is_shared = is_shared
        self.num_asked = 0
        self.num_bytes = 0  #: of keys and values, there and back

    def clone(self) -> CountingStore:
        return self if self._is_shared else CountingStore(self._store.clone())

    def forget(self) -> None:
        self.num_asked = self.num_bytes = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*args: Any) -> Any:
            answer = method(*args)
            keys = args[0] if args and isinstance(args[0], list) else args[:1]
            self.num_asked += max(1, len(keys))
            self.num_bytes += sum(map(_num_bytes, chain(keys, args[1:])))
            self.num_bytes += sum(map(_num_bytes, answer if isinstance(answer, list) else [answer]))
            return answer

        return call


def _num_bytes(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes) else 8


def group_of(store: Any, world_size: int = 2) -> Any:
    """What a `GroupStore` needs of a process group."""
    return SimpleNamespace(size=lambda: world_size, rank=lambda: 0, get_group_store=lambda: store)


def store_of(store: Any, world_size: int = 2) -> GroupStore:
    return GroupStore(group_of(store, world_size), "test/")


def points_of(store: GroupStore, rank: int, world_size: int = 2) -> AgreementPoints:
    """Of a model that is the only one of its process group."""
    return AgreementPoints(ModelOrder(store), ModelOrder(store, "own/"), "Linear", rank, range(world_size), "raise")


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
