"""Asynchronous model average: a thread averages the parameters from time to time, and no rank waits for another."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ddp_compile.algorithms import AlgorithmConfig, OptimizerSteps, Traits, average_over, host_group, streams
from ddp_compile.errors import ReductionError, ReplicationError, format_ranks, this_rank
from ddp_compile.kernels import average_into
from ddp_compile.kernels.executors import KERNEL_DTYPES
from ddp_compile.runtime.algorithms.averaging_thread import AveragingThread, Standing
from ddp_compile.runtime.algorithms.parameter_average import ParameterAverage, refuse_interval
from ddp_compile.runtime.algorithms.parameter_gate import ParameterGate


class AsyncModelAverageAlgorithm(ParameterAverage):
    """Gradient all-reduce in warm-up; then each rank trains by itself, and a thread averages the parameters.

    In a round, the thread copies the parameters x to c, while x may change. S is the sum of c over all n ranks. Between
    two steps of this rank, the thread adds S / n - c to x. So the rank keeps its own updates since the copy. Then the
    thread sleeps.

    As a context manager it resumes and aborts. If an exception leaves the context, this rank leaves the averaging, and
    the others raise.

    Source: Bagua (Gan et al. 2021, arXiv 2107.01499). There, an optimizer's step does not take the lock, so its update
        is lost if the average is written at the same time. A forward without a backward blocks the thread forever.
        Evaluations count as steps. Resuming during warm-up ends averaging for good.
    """

    traits = Traits(payload="both", takes_sparse=False, takes_dtypes=KERNEL_DTYPES, in_step=False)

    def __init__(self, process_group: dist.ProcessGroup, sync_interval_ms: float, warmup_steps: int) -> None:
        super().__init__(process_group, warmup_steps=warmup_steps)
        self.name = f"asynchronous model average (every {sync_interval_ms} ms after {warmup_steps} steps)"
        self._interval_s = sync_interval_ms / 1000
        self._is_aborted = False
        self._averager: AveragingThread | None = None
        self.num_rounds = 0  #: how many averages this rank has taken so far
        self._pending: tuple[list[Tensor], list[Tensor]] | None = None  # copies and sums that are not applied yet

    # What the reducer calls.

    def attach(self, parameters: Mapping[str, Parameter]) -> None:
        super().attach(parameters)
        self._hosts = host_group(self.group, self.device, own=False)  # gloo notices a killed rank
        self._gate = ParameterGate(self.device, self.parameters.versions, self._written_outside)
        self._steps = _GatedSteps(list(parameters.values()), self._gate)

    def detach(self, together: bool) -> None:
        self._steps.stop()
        if together:
            self._stop()
        else:
            self._let_go()

    def before_forward(self, synchronize: bool) -> None:
        """Keep the parameters as they are until the backward has ended; raises if averaging has failed."""
        self._raise_failure(self._averager)
        if not self._steps.is_inside_step(self.name):
            self._gate.leave("step")  # a step that raised
        self._gate.enter_once("backward")

    def after_backward(self) -> None:
        """Start to average after the last step of warm-up; raises if averaging has failed."""
        super().after_backward()
        self._steps.iteration_ends()
        self._gate.leave("backward")
        self._raise_failure(self._averager)
        self._start()

    def before_load(self) -> None:
        if self._averager is not None:
            raise ReplicationError(
                f"{this_rank()}: load_state_dict() was called while the {self.name} is running, which would mix the"
                " loaded parameters with the previous ones. On every rank: model.comm_algorithm.abort(), load,"
                " model.comm_algorithm.resume()"
            )

    def using_parameters(self, trains: bool) -> AbstractContextManager[None]:
        return self._noting_reads() if trains else self._gate.inside("evaluation")

    @contextmanager
    def _noting_reads(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._gate.note_reads()  # the backward may run on another stream, or not follow at all

    def refuse_state(self, state: Mapping[str, Any]) -> None:
        super().refuse_state(state)
        self.before_load()

    # What users call.

    def abort(self) -> None:
        """Stop averaging, and leave all ranks with the same parameters.

        Call it on every rank, in the thread that trains. It returns when all ranks have called it; until then averaging
        continues. Further calls do nothing. From then until `resume`, each rank steps by itself.

        Raises:
            ReductionError: Averaging has failed, or a rank has not called it within the process group's timeout.
        """
        self._is_aborted = True
        self._stop()

    def resume(self) -> None:
        """Average again, after warm-up. Call it on every rank. Further calls do nothing."""
        self._is_aborted = False
        self._start()

    def writing(self) -> AbstractContextManager[None]:
        """A context for writes to parameters that are no steps of a ``torch.optim.Optimizer``: it excludes averages.

        Raises:
            ReductionError: Parameters have been written outside of it.
        """
        return self._gate.inside("writing")

    def __enter__(self) -> Self:
        self.resume()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.abort()
        else:
            self._let_go()

    def _start(self) -> None:
        if self._averager is None and not (self._is_aborted or self.sends_gradients or self.group.size() == 1):
            self._gate.writer_begins()
            self._averager = AveragingThread(self, self._hosts, self._interval_s)

    def _stop(self) -> None:
        averager, self._averager = self._averager, None
        if averager is None:
            return
        self._gate.writer_ends()  # between two steps
        missing = averager.stop()
        self._raise_failure(averager)
        if missing:
            raise ReductionError(
                f"{this_rank()}: the {self.name} cannot end, because ranks {format_ranks(missing)} have not called"
                " abort() within the process group's timeout. Call it on every rank after its last step; or look for"
                " the error of a rank that no longer trains"
            )
        average_over(self.group, self.parameters, self.name)

    def _let_go(self) -> None:
        """Leave the averaging, and tell the other ranks, which raise."""
        averager, self._averager = self._averager, None
        if averager is not None:
            averager.end_alone(Standing.HAS_LEFT)

    # What the thread calls.

    @property
    def has_pending(self) -> bool:
        return self._pending is not None

    def round(self, since: streams.Event) -> None:
        """Add up the ranks' copies.

        Args:
            since: A copy may hold writes after this event completely, partly, or not at all. That does no harm, since
                the same copy is added up and subtracted.
        """
        copies, totals = self.parameters.new(), self.parameters.new()
        with since.reads_racing():
            self.parameters.read(copies)
        for copied, total in zip(copies, totals, strict=True):
            total.copy_(copied)
            dist.all_reduce(total, group=self.group)
        self._pending = copies, totals

    def apply_within(self, limit_s: float) -> None:
        """Apply the average as soon as the training thread leaves the parameters, if it does so within the limit."""
        if self._pending is not None:
            self._gate.write(self._apply, limit_s)

    def _apply(self) -> None:
        assert self._pending is not None
        flats = self.parameters.copies()
        for flat, copied, total in zip(flats, *self._pending, strict=True):
            average_into(flat, total, copied, self.group.size())
        self.parameters.write(flats)
        self._pending = None
        self.num_rounds += 1

    def _written_outside(self) -> ReductionError:
        return ReductionError(
            f"{this_rank()}: parameters were written outside an optimizer's step while the {self.name} is running,"
            " which may write its average at the same time. On every rank, write to them inside `with"
            " model.comm_algorithm.writing():`, or between model.comm_algorithm.abort() and resume(); start again from"
            " a checkpoint"
        )

    def _raise_failure(self, averager: AveragingThread | None) -> None:
        if averager is None:
            return
        if averager.gone:
            who = "; ".join(f"rank {rank} {how}" for rank, how in averager.gone.items())
            raise ReductionError(
                f"{this_rank()}: the {self.name} has ended, because {who} without model.comm_algorithm.abort(). Look"
                " for that rank's error; if there is none, call abort() on every rank after its last step"
            )
        if averager.failure is not None:
            raise averager.failure


class _GatedSteps(OptimizerSteps):
    """Keeps averages from being written during a step."""

    def __init__(self, parameters: Sequence[Parameter], gate: ParameterGate) -> None:
        super().__init__(parameters)
        self._gate = gate

    def step_begins(self) -> None:
        self._gate.enter_once("step")

    def step_ends(self) -> None:
        self._gate.leave("step")
        self._gate.leave("backward")  # of micro-batches


@dataclass(frozen=True, kw_only=True, slots=True)
class AsyncModelAverage(AlgorithmConfig):
    """Every rank trains by itself, and a thread on each averages the parameters of all ranks from time to time.

    No rank waits for a slower one. This suits endless streams of data, since ranks take as many steps as they can. A
    round needs memory for four copies of the parameters; between rounds none are kept. Before a checkpoint and at the
    end, call ``model.comm_algorithm.abort()`` on every rank, which leaves the same parameters on all of them;
    ``resume()`` continues. Put writes to parameters outside an optimizer's step, such as clamping, into ``with
    model.comm_algorithm.writing():``.

    Args:
        sync_interval_ms: Milliseconds from the end of one round to the start of the next.
        warmup_steps: Number of steps in which gradients are averaged first, as by ``GradientAllReduce()``.

    Raises:
        ValueError: A number is out of range.
    """

    sync_interval_ms: float = 500
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        most = 1000 * threading.TIMEOUT_MAX
        if isinstance(self.sync_interval_ms, bool) or not 0 < self.sync_interval_ms <= most:
            raise ValueError(
                f"AsyncModelAverage(sync_interval_ms={self.sync_interval_ms!r}): pass milliseconds above 0, at most"
                f" {most:.0f}"
            )
        refuse_interval("AsyncModelAverage", "warmup_steps", self.warmup_steps, least=0)

    def build(self, process_group: dist.ProcessGroup) -> AsyncModelAverageAlgorithm:
        return AsyncModelAverageAlgorithm(process_group, self.sync_interval_ms, self.warmup_steps)
