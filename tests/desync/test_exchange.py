"""The context around every wait for other ranks: which errors it translates and reports, and what it records."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddp_compile.errors import RanksDifferError, ReductionError
from ddp_compile.runtime.comm import error_messages
from ddp_compile.runtime.comm.exchange import Exchange
from ddp_compile.runtime.comm.step_records import NoRecords


class Reporter:
    def report_failure(self, error: ReductionError, what: str = "") -> ReductionError:
        return ReductionError(f"{error}{what}, reported")


class Records(NoRecords):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def block_begins(self) -> Any:
        return "since"

    def block_ends(self, since: Any) -> None:
        self.calls.append(since)

    def wait_begins(self, kind: Any, index: int) -> Any:
        return kind, index

    def wait_ends(self, transfer: Any) -> None:
        self.calls.append(transfer)


def raised_in(exchange: Exchange, error: Exception) -> BaseException:
    with pytest.raises(Exception) as raised, exchange:
        raise error
    return raised.value


def test_errors_are_translated_and_reported() -> None:
    lost = RuntimeError("connection closed")
    error = raised_in(Exchange("average", Reporter(), where=", bucket 0"), lost)
    assert isinstance(error, ReductionError) and error.__cause__ is lost
    assert str(error).startswith("this process: the average failed. Another rank")
    assert str(error).endswith("(connection closed), bucket 0, reported")
    of_bucket = Exchange(lambda failed: error_messages.reduction_failed("bucket 0", failed))
    assert str(raised_in(of_bucket, lost)).startswith("this process: the all-reduce of bucket 0 failed.")
    of_algorithm = ReductionError("miscounted")
    of_algorithm.__cause__ = lost
    error = raised_in(Exchange(None, Reporter()), of_algorithm)
    assert str(error) == "miscounted, reported" and error.__cause__ is lost


@pytest.mark.parametrize(
    ("failed", "error"),
    [("average", RanksDifferError("of all ranks")), ("average", KeyError("of a user")), (None, RuntimeError("user's"))],
)
def test_other_errors_pass(failed: str | None, error: Exception) -> None:
    assert raised_in(Exchange(failed, Reporter()), error) is error


def test_waits_are_recorded_and_profiled() -> None:
    records = Records()
    with torch.profiler.profile() as profile:
        with Exchange("average", records=records, profiled="a wait"):
            pass
        with Exchange("average", records=records, transfer=("reduce", 3)):
            pass
    raised_in(Exchange("average", records=records), RuntimeError("lost"))  # which has no end
    assert records.calls == ["since", ("reduce", 3)]
    assert [event.name for event in profile.events() if event.name == "a wait"] == ["a wait"]
