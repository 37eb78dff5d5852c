"""Communication of ranks through the store: fingerprints, statuses, stores that do not answer, and one that many ask.

Most ranks here are threads of one process, or turns of one thread, that communicate through one store.
"""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_compile.errors import RanksDifferError
from ddp_compile.plan.spec import BucketPlan
from ddp_compile.runtime.desync import comparison, gathering, rank_status
from ddp_compile.runtime.desync.agreement_points import AgreementPoints, ForwardsLeftOut
from ddp_compile.runtime.desync.gathering import Gathering
from ddp_compile.runtime.desync.group_store import GroupStore, StoreLostError
from ddp_compile.runtime.desync.model_order import ModelOrder
from ddp_compile.runtime.desync.rank_status import RankStatus, RankStatuses, format_rank_statuses

PLAN = BucketPlan(())


def store_of(store: Any, world_size: int = 2) -> GroupStore:
    group: Any = SimpleNamespace(size=lambda: world_size, rank=lambda: 0, get_group_store=lambda: store)
    return GroupStore(group, "test/")


def written_in_python(**methods: Any) -> GroupStore:
    store = SimpleNamespace(has_extended_api=lambda: True, clone=lambda: store, **methods)
    return store_of(store)


def points_of(store: GroupStore, rank: int, world_size: int = 2) -> AgreementPoints:
    """Of a model that is the only one of its process group."""
    return AgreementPoints(ModelOrder(store), ModelOrder(store, "own/"), "Linear", rank, range(world_size), "raise")


def run_iteration(points: AgreementPoints, after_forward: bool = True) -> None:
    points.begins_after_forward = after_forward
    points.last_bucket_is_launched(PLAN, "none", is_shared=True)


def on_threads(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each function returns or raises, each on its own thread."""
    with ThreadPoolExecutor(len(functions)) as threads:
        futures = [threads.submit(function) for function in functions]
    return [future.exception() or future.result() for future in futures]


def test_table_of_ranks() -> None:
    waiting = "waiting for bucket 0 of iteration 2: failed"
    statuses = [
        RankStatus(waiting, 7.0, True),
        RankStatus(waiting, 6.5, True),
        None,
        RankStatus("after iteration 1", 11.0, False),
    ]
    assert format_rank_statuses(dict(enumerate(statuses)), now=10.0) == (
        "Where each rank was when it last posted, and for how long it had been there:\n"
        "  ranks  since         where\n"
        "  0-1    3.0 to 3.5 s  waiting for bucket 0 of iteration 2: failed\n"
        "  2                    never posted\n"
        "  3      0.0 s         after iteration 1"
    )


def test_backwards_in_another_order() -> None:
    """Each of three forwards has two outputs with a graph, and one that has none."""
    forwards, x = ForwardsLeftOut(), torch.ones(2, requires_grad=True)
    outputs = [(x * 2, x + 1) for _ in range(3)]
    for each in outputs:
        forwards.watch([*each, torch.ones(1)])
    for forward, output, num_left_out in ((0, 0, 0), (0, 1, 0), (2, 1, 1), (1, 0, 0)):
        outputs[forward][output].sum().backward()
        assert forwards.num_left_out == num_left_out


def test_watched_forward_keeps_no_graph_alive() -> None:
    forwards = ForwardsLeftOut()
    saved = torch.ones(2, requires_grad=True) * 1
    kept = weakref.ref(saved)
    forwards.watch([saved.square()])
    del saved
    gc.collect()
    assert kept() is None


def two_ranks() -> list[AgreementPoints]:
    store = dist.HashStore()
    return [points_of(store_of(store), rank) for rank in range(2)]


def compare_all(ranks: list[AgreementPoints]) -> list[Exception | None]:
    """What each rank raises; each on a thread of its own, as they wait for each other's fingerprints."""

    def compare(points: AgreementPoints) -> None:
        try:
            points.compare()
        finally:
            points.iteration_ends(points.iteration_number + 1)

    return on_threads([functools.partial(compare, points) for points in ranks])


def two_models_on_each_rank() -> list[list[AgreementPoints]]:
    store, ranks = dist.HashStore(), []
    for rank in range(2):
        order = ModelOrder(store_of(store))
        owns = {model: ModelOrder(order.store, f"own/{model}/") for model in "ab"}
        ranks.append([AgreementPoints(order, own, model, rank, range(2), "raise") for model, own in owns.items()])
    return ranks


def test_models_with_own_groups() -> None:
    ranks = two_models_on_each_rank()
    for number in range(1, 9):
        for second in range(2):
            of_iteration = [models[(rank + second) % 2] for rank, models in enumerate(ranks)]
            for points in of_iteration:
                points.last_bucket_is_launched(PLAN, "none", is_shared=False)
        for model in range(2):
            assert compare_all([models[model] for models in ranks]) == [None, None], number


def test_model_that_rests() -> None:
    ranks = two_models_on_each_rank()
    for number in range(1, 9):
        for rank, models in enumerate(ranks):
            run_iteration(models[number == 5], after_forward=not (rank == 1 and number == 5))
        errors = compare_all([models[number == 5] for models in ranks])
        assert all(errors) == (number == 8)
    assert "backwards without a forward before them of model 2 (b): 0 on rank 0, 1 on rank 1" in str(errors[0])


def test_backward_that_sends_nothing() -> None:
    ranks = two_ranks()
    run_iteration(ranks[0])
    ranks[1].begins_after_forward = False
    ranks[1].iteration_ends(ranks[1].iteration_number)
    run_iteration(ranks[1])
    assert compare_all(ranks) == [None, None]
    assert [points.iteration_number for points in ranks] == [2, 2]


def test_silent_rank_stops_nobody(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(comparison, "ANSWER_LIMIT_S", 0.05)
    points, _ = two_ranks()
    for _ in range(10):
        run_iteration(points)
        points.compare()
        points.iteration_ends(points.iteration_number + 1)
    said = [message for message in caplog.messages if "posted nothing" in message]
    assert len(said) == 3 and "at the end of iteration 1: 1." in said[0]
    assert "some rank did not answer 3 times" in caplog.text


def test_a_rank_that_is_late_now_and_then_is_compared(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(comparison, "ANSWER_LIMIT_S", 0.05)
    early, late = two_ranks()
    for number in range(12):
        run_iteration(early)
        is_late = number in (0, 3, 7, 11)
        if is_late:
            early.compare()
        run_iteration(late)
        for points in (late,) if is_late else (early, late):
            points.compare()
        for points in (early, late):
            points.iteration_ends(points.iteration_number + 1)
    assert "did not answer 3 times" not in caplog.text


def test_a_late_rank_finds_what_the_others_have_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it alone would raise, or repair parameters. The next agreement point finds the difference."""
    early, late = two_ranks()
    run_iteration(early)
    with monkeypatch.context() as patch:
        patch.setattr(comparison, "ANSWER_LIMIT_S", 0.05)
        early.compare()
    run_iteration(late, after_forward=False)
    late.compare()
    for points in (early, late):
        points.iteration_ends(points.iteration_number + 1)
        run_iteration(points)
    assert all(isinstance(error, RanksDifferError) for error in compare_all([early, late]))


def test_stopped_store_is_asked_once() -> None:
    goes_on = threading.Event()
    used: list[str] = []
    store = written_in_python(add=lambda key, amount: goes_on.wait(), set=lambda key, value: used.append(key))
    try:
        started = time.monotonic()
        with pytest.raises(StoreLostError, match="no answer within"):
            store.ask(lambda: store._store.add("key", 1), limit_s=0.1)
        with pytest.raises(StoreLostError, match="no answer within"):
            store.add("key", 1)
        store.post("key", "value")
        assert time.monotonic() - started < 2 and not used
    finally:
        goes_on.set()


def test_table_without_a_store() -> None:
    def breaks(key: str, value: str) -> None:
        raise RuntimeError("Broken pipe\nframe #0: c10::Error")

    for store, said in ((written_in_python(set=breaks), "Broken pipe"), (store_of(None), "the process group has none")):
        statuses = RankStatuses(store, 0, range(2))
        statuses.note("iteration", 3, " is over")
        statuses.fail(": failed")
        assert f"is gone ({said})" in statuses.report()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A post to `posts` takes 20 ms of it."""
    clock, posts = SimpleNamespace(now=0.0), list[str]()

    def post(key: str, value: str) -> None:
        posts.append(value)
        clock.now += 0.02

    of_clock = SimpleNamespace(perf_counter=lambda: clock.now, time=lambda: clock.now, sleep=time.sleep)
    monkeypatch.setattr(rank_status, "time", of_clock)
    clock.posts, clock.statuses = posts, RankStatuses(written_in_python(set=post), 0, range(2))
    return clock


def test_posts_take_little_time(clock: SimpleNamespace) -> None:
    for number in range(100_000):
        clock.now += 0.001
        clock.statuses.note("iteration", number)
    in_posts_s = 0.02 * len(clock.posts)
    assert 0.0009 * clock.now < in_posts_s < 0.001 * clock.now + 4 * 0.02


def test_waiting_for_all_is_always_posted(clock: SimpleNamespace) -> None:
    for number in range(100):
        clock.statuses.note("iteration", number)
    assert len(clock.posts) < 10
    clock.statuses.note("in measure() before iteration", 100)
    assert "measure" not in clock.posts[-1]
    clock.statuses.note("in measure() before iteration", 100, waits_for_all=True)
    assert clock.posts[-1].endswith("in measure() before iteration 100")


def test_first_failure_is_reported_at_once() -> None:
    shared = dist.HashStore()
    mine, theirs = (RankStatuses(store_of(shared), rank, range(2)) for rank in range(2))
    theirs.note("training forward", 7)
    mine.fail(", bucket 0: failed")
    theirs.fail(": raised KeyError: 'x'")
    theirs.fail(": raised something that came of it")
    started = time.monotonic()
    table = mine.report()
    assert "before the first forward, bucket 0: failed\n" in table
    assert table.endswith("training forward 7: raised KeyError: 'x'")
    assert time.monotonic() - started < rank_status.WAIT_FOR_OTHERS_S  # all have failed: nobody is waited for


# Many ranks and one store, and the rank that reads for all; see Note [One rank reads].

NUM_RANKS = 64


class CountingStore:
    """A connection that all ranks share. It counts what it asks the server for, once for each key."""

    def __init__(self) -> None:
        self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.num_asked = 0

    def clone(self) -> CountingStore:
        return self

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.num_asked += max(1, len(args[0])) if args and isinstance(args[0], list) else 1
            return getattr(self._server, name)(*args)

        return call


def test_table_of_many_ranks() -> None:
    counting = CountingStore()
    ranks = [RankStatuses(store_of(counting, NUM_RANKS), rank, range(NUM_RANKS)) for rank in range(NUM_RANKS)]
    for number in range(2):
        counting.num_asked = 0
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


def test_fingerprints_of_many_ranks() -> None:
    counting = CountingStore()
    ranks = [points_of(store_of(counting, NUM_RANKS), rank, NUM_RANKS) for rank in range(NUM_RANKS)]
    for rank, points in enumerate(ranks):
        run_iteration(points, after_forward=rank != 3)
    counting.num_asked = 0
    errors = on_threads([points.compare for points in ranks])
    for error in errors:
        assert isinstance(error, RanksDifferError) and "at the end of iteration 1 " in str(error)
        assert "1 on rank 3, 0 on ranks 0-2, 4-63" in str(error)
    assert counting.num_asked < 60 * NUM_RANKS


def gathering_of(store: Any, num_ranks: int, rank: int) -> Gathering:
    connection = store_of(store)
    connection.post(f"post/{rank}", str(rank))
    return Gathering(connection, "posts", [f"post/{other}" for other in range(num_ranks)])


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

    def end_of_report(statuses: RankStatuses, begins_after_s: float) -> float:
        time.sleep(begins_after_s)
        statuses.report()
        return time.monotonic()

    ends = [functools.partial(end_of_report, owner, 0.0), functools.partial(end_of_report, other, 0.5)]
    stayed_until, read_at = on_threads(ends)
    assert read_at - 0.3 < stayed_until < read_at + 2.0


def test_owner_of_store_does_not_stay_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_status, "WAIT_FOR_OTHERS_S", 0.1)
    monkeypatch.setattr(rank_status, "OWNER_STAYS_S", 0.4)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    owner = RankStatuses(store_of(server), 0, range(2))
    owner.fail(": failed")
    started = time.monotonic()
    assert "never posted" in owner.report()
    assert 0.5 <= time.monotonic() - started < 3
