"""One context around every call in which a rank starts a collective or waits for the other ranks.

Note [Errors between ranks]
torch raises a bare RuntimeError if a collective fails. It becomes a ReductionError that says what has failed and to
look at the other ranks. A ReductionError, this one or an algorithm's own, is reported: the other ranks read where this
one failed, and its message gets a table of where every rank is. Other errors of ours pass unchanged, since every rank
raises them at the same place.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

from ddp_compile import torch_internals
from ddp_compile.errors import DDPCompileError, ReductionError
from ddp_compile.runtime.comm import error_messages
from ddp_compile.runtime.comm.step_records import Kind, NoRecords


class Reporter(Protocol):
    """A `DesyncMonitor`, which is defined in a higher layer."""

    def report_failure(self, error: ReductionError, what: str = "") -> ReductionError: ...


class Exchange:
    """A context that translates and reports errors, names a range in the profiler, and records a wait.

    See Note [Errors between ranks].

    Args:
        failed: What has failed, in the error that takes the place of a RuntimeError; or a function that makes this
            error. None if a RuntimeError inside is no collective's, but of a user's code: it passes unchanged.
        reporter: Reports each ReductionError. None inside algorithms, since the reducer reports their errors.
        where: Added to the step that this rank is in when the failure is reported: ", bucket 0".
        profiled: Name of a range in the profiler; none if empty.
        records: Told of the wait, if there is one inside.
        transfer: Kind and bucket of the transfer that is waited for. None if the wait is for no single one.
    """

    __slots__ = ("_failed", "_range", "_records", "_reporter", "_since", "_transfer", "_where")

    def __init__(
        self,
        failed: str | Callable[[RuntimeError], ReductionError] | None,
        reporter: Reporter | None = None,
        *,
        where: str = "",
        profiled: str = "",
        records: NoRecords | None = None,
        transfer: tuple[Kind, int] | None = None,
    ) -> None:
        self._failed, self._reporter, self._where = failed, reporter, where
        self._range: AbstractContextManager[Any] | None = torch_internals.profiled_range(profiled) if profiled else None
        self._records, self._transfer = records, transfer
        self._since: Any = None

    def __enter__(self) -> None:
        if self._range is not None:
            self._range.__enter__()
        if self._records is not None:
            kind_and_bucket, records = self._transfer, self._records
            self._since = records.wait_begins(*kind_and_bucket) if kind_and_bucket else records.block_begins()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._records is not None and error is None:
            (self._records.wait_ends if self._transfer else self._records.block_ends)(self._since)
        if self._range is not None:
            self._range.__exit__(kind, error, traceback)
        if isinstance(error, ReductionError):
            if self._reporter is not None:
                raise self._reporter.report_failure(error, self._where) from error.__cause__
        elif isinstance(error, RuntimeError) and not isinstance(error, DDPCompileError) and self._failed is not None:
            if isinstance(self._failed, str):
                failure = error_messages.exchange_failed(self._failed, error)
            else:
                failure = self._failed(error)
            if self._reporter is not None:
                failure = self._reporter.report_failure(failure, self._where)
            raise failure from error
