"""Communication of ranks through the store: fingerprints, statuses, and stores that do not answer."""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from store_ranks import PLAN, on_threads, points_of, run_iteration, store_of

from ddp_compile.errors import RanksDifferError, format_ranks, name_values
from ddp_compile.runtime.desync import comparison, rank_status
from ddp_compile.runtime.desync.agreement_points import AgreementPoints, ForwardsLeftOut
from ddp_compile.runtime.desync.fingerprint import Fingerprint, ModelFingerprint
from ddp_compile.runtime.desync.group_store import StoreLostError
from ddp_compile.runtime.desync.model_order import ModelOrder, is_agreement_point
from ddp_compile.runtime.desync.rank_status import RankStatus, RankStatuses, format_rank_statuses


def fingerprint(number: int = 4, latest: tuple[str, ...] = (), **changes: Any) -> Fingerprint:
    done = ModelFingerprint(
        **{
            "plan": "p",
            "algorithm": "all-reduce",
            "forwards_left_out": 0,
            "backwards_repeated": 0,
            "local_steps": 0,
            **changes,
        }
    )
    order = str(hash(latest))
    return Fingerprint(number=number, models={"model 1 (Linear)": done}, order=order, latest=latest)


def test_ranks_in_words() -> None:
    for ranks, text in (([3], "3"), ([0, 1, 2, 5], "0-2, 5"), ([1, 3, 4], "1, 3-4"), ([], "")):
        assert format_ranks(ranks) == text
    assert name_values(dict(enumerate([0, 0, 1, 0]))) == "1 on rank 2, 0 on ranks 0-1, 3"
    assert name_values({3: "a", 5: "b"}) == "a on rank 3, b on rank 5"


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


class Forward:
    """A forward with two outputs that have a graph, and one that has none."""

    def __init__(self, forwards: ForwardsLeftOut) -> None:
        x = torch.ones(2, requires_grad=True)
        self.forwards = forwards
        self.outputs = (x * 2, x + 1)
        forwards.watch([*self.outputs, torch.ones(1)])

    def backward(self, output: int = 0) -> int:
        """Number of forwards left out, as reported to the other ranks before the backward has ended."""
        self.outputs[output].sum().backward(retain_graph=True)
        return self.forwards.num_left_out


def test_backwards_in_another_order() -> None:
    forwards = ForwardsLeftOut()
    first, second, third = Forward(forwards), Forward(forwards), Forward(forwards)
    assert first.backward() == 0
    assert first.backward(output=1) == 0
    assert third.backward(output=1) == 1
    assert second.backward() == 0


def test_watched_forward_keeps_no_graph_alive() -> None:
    forwards = ForwardsLeftOut()
    forwards.watch([torch.ones(2)])  # which has none, and does not count
    assert Forward(forwards).backward() == 0
    x = torch.ones(2, requires_grad=True)
    saved = x * 1
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


def test_difference_is_found_at_the_next_point() -> None:
    ranks = two_ranks()
    for number in range(1, 5):
        run_iteration(ranks[0])
        run_iteration(ranks[1], after_forward=number != 3)
        errors = compare_all(ranks)
        if number < 4:
            assert errors == [None, None]
    for error in errors:
        assert isinstance(error, RanksDifferError)
        assert "at the end of iteration 4" in str(error) and "0 on rank 0, 1 on rank 1" in str(error)


def two_models_on_each_rank() -> list[tuple[AgreementPoints, AgreementPoints]]:
    store = dist.HashStore()
    orders = [ModelOrder(store_of(store)) for _ in range(2)]
    owns = [[ModelOrder(order.store, f"own/{model}/") for model in "ab"] for order in orders]
    return [
        tuple(
            AgreementPoints(order, own, model, rank, range(2), "raise")
            for model, own in zip("ab", owns[rank], strict=True)
        )  # type: ignore[misc]
        for rank, order in enumerate(orders)
    ]


@pytest.mark.parametrize("at", [1, 3, 4, 8, 9, 31])
def test_models_in_another_order(at: int) -> None:
    """Of which there is one in the same iteration of the process group on every rank."""
    ranks = two_models_on_each_rank()
    for number in range(1, 65):
        of_iteration = [models[(number + (rank == 1 and number >= at)) % 2] for rank, models in enumerate(ranks)]
        for points in of_iteration:
            run_iteration(points)
        errors = compare_all(of_iteration)
        if any(errors):
            break
    assert number == next(n for n in range(at, 65) if is_agreement_point(n))
    for error in errors:
        assert isinstance(error, RanksDifferError)
        assert f"iteration {at} of the process group paired different messages: the gradients of model" in str(error)


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


class StoppedStore:
    """A store whose server has been stopped: a question waits until the test is over."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def clone(self) -> StoppedStore:
        return self

    def has_extended_api(self) -> bool:
        return True

    def set(self, key: str, value: str) -> None:
        raise AssertionError("a store that has not answered is used again")

    def add(self, key: str, amount: int) -> int:
        self.goes_on.wait()
        return 0


def test_stopped_store_is_asked_once() -> None:
    stopped = StoppedStore()
    store = store_of(stopped)
    try:
        started = time.monotonic()
        with pytest.raises(StoreLostError, match="no answer within"):
            store.ask(lambda: stopped.add("key", 1), limit_s=0.1)
        with pytest.raises(StoreLostError, match="no answer within"):
            store.add("key", 1)
        store.post("key", "value")
        assert time.monotonic() - started < 2
    finally:
        stopped.goes_on.set()


class BrokenStore:
    def clone(self) -> BrokenStore:
        return self

    def has_extended_api(self) -> bool:
        return True

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("Broken pipe\nframe #0: c10::Error")


def test_broken_store() -> None:
    store = store_of(BrokenStore())
    statuses = RankStatuses(store, 0, range(2))
    statuses.note("iteration", 3, " is over")
    statuses.fail(": failed")
    assert "is gone (Broken pipe)" in statuses.report()


def test_group_without_store() -> None:
    store = store_of(None)
    with pytest.raises(StoreLostError, match="the process group has none"):
        store.add("key", 1)
    assert "is gone (the process group has none)" in RankStatuses(store, 0, range(2)).report()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(
        rank_status, "time", SimpleNamespace(perf_counter=lambda: clock.now, time=lambda: clock.now, sleep=time.sleep)
    )
    return clock


class CountingStore(BrokenStore):
    """A post takes 20 ms."""

    def __init__(self, clock: SimpleNamespace) -> None:
        self.clock, self.posts = clock, list[str]()

    def set(self, key: str, value: str) -> None:
        self.posts.append(value)
        self.clock.now += 0.02


def test_posts_take_little_time(clock: SimpleNamespace) -> None:
    store = CountingStore(clock)
    statuses = RankStatuses(store_of(store), 0, range(2))
    for number in range(100_000):
        clock.now += 0.001
        statuses.note("iteration", number)
    in_posts_s = 0.02 * len(store.posts)
    assert 0.0009 * clock.now < in_posts_s < 0.001 * clock.now + 4 * 0.02


def test_waiting_for_all_is_always_posted(clock: SimpleNamespace) -> None:
    store = CountingStore(clock)
    statuses = RankStatuses(store_of(store), 0, range(2))
    for number in range(100):
        statuses.note("iteration", number)
    assert len(store.posts) < 10
    statuses.note("in measure() before iteration", 100)
    assert "measure" not in store.posts[-1]
    statuses.note("in measure() before iteration", 100, waits_for_all=True)
    assert store.posts[-1].endswith("in measure() before iteration 100")


def test_report_reads_the_store() -> None:
    shared = dist.HashStore()
    mine, theirs = RankStatuses(store_of(shared), 0, range(2)), RankStatuses(store_of(shared), 1, range(2))
    theirs.note("training forward", 7)
    mine.note("waiting for the buckets of iteration", 6)
    mine.fail(", bucket 0: failed")
    lines = mine.report().splitlines()
    assert lines[2].endswith("waiting for the buckets of iteration 6, bucket 0: failed") and lines[3].endswith(
        "training forward 7"
    )
    theirs.fail(": raised KeyError: 'x'")
    theirs.fail(": raised something that came of it")
    started = time.monotonic()
    assert mine.report().endswith("training forward 7: raised KeyError: 'x'")
    assert time.monotonic() - started < rank_status.WAIT_FOR_OTHERS_S  # all have failed: nobody is waited for
