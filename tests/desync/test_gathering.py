"""The number of questions of many ranks to one store, and the rank that reads for all; see Note [One rank reads]."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist
from store_ranks import CountingStore, on_threads, points_of, run_iteration, store_of

from ddp_compile.errors import RanksDifferError
from ddp_compile.runtime.desync import gathering, rank_status
from ddp_compile.runtime.desync.gathering import Gathering
from ddp_compile.runtime.desync.group_store import GroupStore
from ddp_compile.runtime.desync.rank_status import RankStatuses

NUM_RANKS = 128


@pytest.fixture
def asked() -> tuple[list[GroupStore], CountingStore]:
    """Stores of many ranks on one server, and the connection that they share."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    counting = CountingStore(server, is_shared=True)
    return [store_of(counting, NUM_RANKS) for _ in range(NUM_RANKS)], counting


def test_table_of_many_ranks(asked: Any) -> None:
    stores, counting = asked
    ranks = [RankStatuses(store, rank, range(NUM_RANKS)) for rank, store in enumerate(stores)]
    for number in range(2):
        counting.forget()
        for rank, statuses in enumerate(ranks):
            statuses.note("waiting for the buckets of iteration", 7 + number)
            statuses.fail(f", bucket {rank % 2}: failed")
        tables = on_threads([statuses.report for statuses in ranks])
        for table in tables:
            rows = table.splitlines()[2:]
            assert [row.split("iteration ")[1] for row in rows] == [
                f"{7 + number}, bucket {i}: failed" for i in range(2)
            ]
            assert all(row.split("  ")[1].count(",") == NUM_RANKS // 2 - 1 for row in rows)
        assert counting.num_asked < 60 * NUM_RANKS  # and not NUM_RANKS**2, a few times


def test_fingerprints_of_many_ranks(asked: Any) -> None:
    stores, counting = asked
    ranks = [points_of(store, rank, NUM_RANKS) for rank, store in enumerate(stores)]
    for rank, points in enumerate(ranks):
        run_iteration(points, after_forward=rank != 3)
    counting.forget()
    errors = on_threads([points.compare for points in ranks])
    for error in errors:
        assert isinstance(error, RanksDifferError) and "at the end of iteration 1 " in str(error)
        assert "1 on rank 3, 0 on ranks 0-2, 4-127" in str(error)
    assert counting.num_asked < 60 * NUM_RANKS


def gathering_of(store: Any, num_ranks: int, rank: int) -> Gathering:
    connection = store_of(store)
    connection.post(f"post/{rank}", str(rank))
    return Gathering(connection, "posts", [f"post/{other}" for other in range(num_ranks)])


def _both_are_there(found: dict[str, str]) -> bool:
    return len(found) == 2


def test_later_ticket_reads_again() -> None:
    shared = dist.HashStore()
    first, second = (gathering_of(shared, 2, rank) for rank in range(2))
    told = [gathering.summary(0.0, _both_are_there, lambda found: str(sorted(found))) for gathering in (first, second)]
    assert told == ["['post/0', 'post/1']"] * 2
    store_of(shared).post("post/1", "anew")
    assert second.summary(0.0, _both_are_there, lambda found: found["post/1"]) == "anew"


@pytest.mark.parametrize(("num_ranks", "told"), [(64, "what it reads itself"), (65, None)])
def test_reader_that_is_gone(num_ranks: int, told: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "ANSWER_LIMIT_S", 0.05)
    shared = dist.HashStore()
    store_of(shared).add("posts/tickets", 1)
    late = gathering_of(shared, num_ranks, 1)
    assert late.summary(0.0, bool, lambda found: "what it reads itself") == told


def test_summary_is_truncated() -> None:
    told = gathering_of(dist.HashStore(), 1, 0).summary(0.0, bool, lambda found: "x" * 10**6)
    assert told is not None and len(told) < 17_000 and told.endswith("x ...")


def test_owner_of_store_stays() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    owner, other = (RankStatuses(store_of(dist.PrefixStore("g", server)), rank, range(2)) for rank in range(2))
    other._store.ends_here = False
    assert owner._store.ends_here
    for statuses in (owner, other):
        statuses.fail(": failed")
    read_at: list[float] = []

    def report_late() -> None:
        time.sleep(0.5)
        other.report()
        read_at.append(time.monotonic())

    thread = threading.Thread(target=report_late)
    thread.start()
    owner.report()
    stayed_until = time.monotonic()
    thread.join()
    assert read_at[0] - 0.3 < stayed_until < read_at[0] + 2.0


def test_owner_of_store_does_not_stay_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_status, "WAIT_FOR_OTHERS_S", 0.1)
    monkeypatch.setattr(rank_status, "OWNER_STAYS_S", 0.4)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    owner = RankStatuses(store_of(server), 0, range(2))
    owner.fail(": failed")
    started = time.monotonic()
    assert "never posted" in owner.report()
    assert 0.5 <= time.monotonic() - started < 3
