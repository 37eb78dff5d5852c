"""Asynchronous model averaging: a thread averages the parameters now and then, and no rank waits for another."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ddp_compile import torch_internals
from ddp_compile.errors import ReductionError, ReplicationError, this_rank
from ddp_compile.kernels import average_into
from ddp_compile.kernels.executors import KERNEL_DTYPES
from ddp_compile.runtime.algorithms.all_reduce import AllReduce
from ddp_compile.runtime.algorithms.averaging_thread import AveragingThread, Standing
from ddp_compile.runtime.algorithms.flat_parameters import FlatParameters, average_over
from ddp_compile.runtime.algorithms.optimizer_steps import OptimizerSteps
from ddp_compile.runtime.algorithms.parameter_gate import ParameterGate
from ddp_compile.runtime.algorithms.peers import refuse_interval, refuse_state_of_another
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.comm_algorithm import AlgorithmConfig, CommAlgorithm, Pending, Traits
from ddp_compile.runtime.comm import error_messages
from ddp_compile.runtime.comm.process_groups import group_of
from ddp_compile.runtime.comm.rank_names import format_ranks
from ddp_compile.runtime.comm.streams import Event, has_streams


class AsyncModelAverageAlgorithm(CommAlgorithm):
    """Gradient all-reduce for some steps; then each rank trains by itself, and a thread averages the parameters.

    One round of the thread: c = x, while x may change; S = the sum of all ranks' c; x += S / n - c, between two of the
    steps of this rank; so nothing that was trained meanwhile is lost. Then it sleeps.

    It is a context manager, which resumes and aborts. Where an exception leaves it, nothing is agreed on any more.

    Args:
        process_group: All ranks.
        sync_interval_ms: See `AsyncModelAverage`.
        warmup_steps: See `AsyncModelAverage`.

    Source: Bagua (Gan et al. 2021, arXiv 2107.01499). There the lock does not hold back an optimizer's step, whose
    update is lost where the average is written at the same time; forwards without backward block the thread for ever;
    evaluations count as steps; and resuming in the warm-up ends averaging for good.
    """

    traits = Traits(payload="both", takes_sparse=False, takes_dtypes=KERNEL_DTYPES, in_step=False)

    def __init__(self, process_group: dist.ProcessGroup, sync_interval_ms: float, warmup_steps: int) -> None:
        self.name = f"asynchronous model average (every {sync_interval_ms} ms after {warmup_steps} steps)"
        self._process_group = process_group
        self._all_reduce = AllReduce(process_group)
        self._interval_s = sync_interval_ms / 1000
        self._warmup_steps = warmup_steps
        self._num_steps = 0
        self._is_aborted = False
        self._averager: AveragingThread | None = None
        self.num_rounds = 0  #: how many averages this rank has taken so far
        self._pending: tuple[list[Tensor], list[Tensor]] | None = None  # copies and totals, not applied yet

    @property
    def sends_gradients(self) -> bool:
        """Whether it is one of the first steps."""
        return self._num_steps < self._warmup_steps

    # What the reducer calls.

    def attach(self, parameters: Sequence[Parameter]) -> None:
        """Take a process group of its own, and hear of optimizers from now on."""
        self._device = parameters[0].device
        ranks = dist.get_process_group_ranks(self._process_group)
        self._group = group_of(ranks, self._process_group, self._device)
        self._hosts = self._group
        if has_streams(self._device):  # messages then wait for no device, and a killed rank is noticed by gloo
            self._hosts = group_of(ranks, self._process_group, self._device, backend="gloo")
        self._parameters = FlatParameters(parameters)
        self._gate = ParameterGate(self._device, self._parameters.versions, self._written_outside)
        self._steps = OptimizerSteps(parameters, self._step_begins, self._step_ends)

    def detach(self, together: bool) -> None:
        """See `CommAlgorithm.detach`."""
        self._steps.stop()
        if together:
            self._stop()
        else:
            self._let_go()

    def launch(self, bucket: Bucket, is_last: bool) -> Pending:
        """See `CommAlgorithm.launch`."""
        return self._all_reduce.launch(bucket, is_last)

    def before_forward(self) -> None:
        """Keep the parameters as they are until the backward has ended.

        Raises:
            ReductionError: Averaging has failed since.
        """
        self._raise_failure()
        if not self._steps.forward_begins(self.name):
            self._gate.leave("step")  # one that has raised
        self._gate.enter_once("backward")

    def before_local_forward(self) -> None:
        """As `before_forward`: of micro-batches, until the last one's backward has ended or a step was taken."""
        self.before_forward()

    def after_forward(self, as_one_graph: bool) -> None:
        """Its stream may be another one than the backward's, or no backward follows it."""
        self._gate.note_reads()

    def after_backward(self) -> None:
        """Count the step, and begin to average behind the last one of the warm-up.

        Raises:
            ReductionError: Averaging has failed since.
        """
        self._num_steps += 1
        self._steps.iteration_ends()
        self._gate.leave("backward")
        self._raise_failure()
        self._start()

    def before_load(self) -> None:
        """See `CommAlgorithm.before_load`."""
        if self._averager is not None:
            raise ReplicationError(
                f"{this_rank()}: load_state_dict() while the {self.name} goes on, which would move"
                " what is loaded by what was there before. On every rank: model.comm_algorithm.abort(), load,"
                " model.comm_algorithm.resume()"
            )

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """See `CommAlgorithm.evaluation`."""
        self._gate.enter("evaluation")
        try:
            yield
        finally:
            self._gate.leave("evaluation")

    def state_dict(self) -> dict[str, Any]:
        """The number of steps. A checkpoint is best taken while averaging is aborted."""
        return {"algorithm": type(self).__name__, "num_steps": self._num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `CommAlgorithm.load_state_dict`."""
        refuse_state_of_another(self, state)
        self.before_load()
        self._num_steps = state["num_steps"]

    # What users call.

    def abort(self) -> None:
        """Stop averaging, and leave all ranks with the same parameters; to be called on every rank, by its trainer.

        Returns when all ranks have called it; until then the others are averaged with this one. Further calls do
        nothing. Steps that follow are this rank's own, until `resume`.

        Raises:
            ReductionError: Averaging has failed, or a rank has not called it within the process group's timeout.
        """
        self._is_aborted = True
        self._stop()

    def resume(self) -> None:
        """Average again, from the end of the warm-up on; to be called on every rank. Further calls do nothing."""
        self._is_aborted = False
        self._start()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around what writes into parameters and is no step of a ``torch.optim.Optimizer``: no average meets it.

        Raises:
            ReductionError: Parameters have been written outside of it.
        """
        self._gate.enter("writing")
        try:
            yield
        finally:
            self._gate.leave("writing")

    def __enter__(self) -> AsyncModelAverageAlgorithm:
        self.resume()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.abort()
        else:
            self._let_go()

    def _start(self) -> None:
        if self._averager is None and not (self._is_aborted or self.sends_gradients or self._group.size() == 1):
            self._gate.writer_begins()
            limit_s = torch_internals.group_timeout(self._group, self._device).total_seconds()
            self._averager = AveragingThread(self, self._hosts, self._device, self._interval_s, limit_s)

    def _stop(self) -> None:
        """With all ranks."""
        averager, self._averager = self._averager, None
        if averager is None:
            return
        self._gate.writer_ends()  # between two steps
        missing = averager.stop()
        self._raise_failure_of(averager)
        if missing:
            raise ReductionError(
                f"{this_rank()}: the {self.name} cannot end, as ranks {format_ranks(missing)} have"
                " not called abort() within the process group's timeout. Call it on every rank behind its last step; or"
                " look for the error of a rank that trains no more"
            )
        average_over(self._group, self._parameters, self._failed)

    def _let_go(self) -> None:
        """Take part in no further round; the other ranks are told so, and raise."""
        averager, self._averager = self._averager, None
        if averager is not None:
            averager.end_alone(Standing.HAS_LEFT)

    # What the thread calls.

    @property
    def has_pending(self) -> bool:
        """Whether a round waits for the trainer to leave the parameters."""
        return self._pending is not None

    def round(self, since: Event) -> None:
        """Add up the ranks' copies.

        Args:
            since: Writes after this event may be missing from a copy, or only partly in it. That does no harm, because
                the same copy is added up and subtracted.
        """
        copies, totals = self._parameters.new(), self._parameters.new()
        with since.reads_racing():
            self._parameters.read(copies)
        for copied, total in zip(copies, totals, strict=True):
            total.copy_(copied)
            dist.all_reduce(total, group=self._group)
        self._pending = copies, totals

    def apply_within(self, limit_s: float) -> None:
        """Take the average as soon as the trainer lets the parameters be, or not yet."""
        if self._pending is not None:
            self._gate.write(self._apply, limit_s)

    def _apply(self) -> None:
        assert self._pending is not None
        flats = self._parameters.new()
        self._parameters.read(flats)
        for flat, copied, total in zip(flats, *self._pending, strict=True):
            average_into(flat, total, copied, self._group.size())
        self._parameters.write(flats)
        self._pending = None
        self.num_rounds += 1

    # What optimizers call.

    def _step_begins(self) -> None:
        self._gate.enter_once("step")

    def _step_ends(self) -> None:
        self._gate.leave("step")
        self._gate.leave("backward")  # of micro-batches

    def _written_outside(self) -> ReductionError:
        return error_messages.parameters_written_outside(self.name)

    def _raise_failure(self) -> None:
        if self._averager is not None:
            self._raise_failure_of(self._averager)

    def _raise_failure_of(self, averager: AveragingThread) -> None:
        if averager.gone:
            raise error_messages.ranks_gone(self.name, averager.gone)
        if isinstance(averager.failure, ReductionError):
            raise averager.failure
        if averager.failure is not None:
            raise self._failed(averager.failure) from averager.failure

    def _failed(self, error: Exception) -> ReductionError:
        return error_messages.exchange_failed(self.name, error)


@dataclass(frozen=True, kw_only=True, slots=True)
class AsyncModelAverage(AlgorithmConfig):
    """Every rank trains by itself, and a thread on each averages the parameters of all of them now and then.

    No rank waits for a slower one. It is for data as an endless stream: ranks take as many steps as they can. It takes
    four copies of the parameters while a round lasts, and none between. ``model.comm_algorithm`` has ``abort()`` and
    ``resume()``: before a checkpoint or at the end, abort on every rank, which leaves all with the same parameters.
    What writes into parameters and is no step of an optimizer, clamping for example, goes into ``with
    model.comm_algorithm.writing():``.

    Args:
        sync_interval_ms: Milliseconds from the end of one round to the begin of the next.
        warmup_steps: In how many steps gradients are averaged first, as by ``GradientAllReduce()``.

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
        """See `AlgorithmConfig.build`."""
        return AsyncModelAverageAlgorithm(process_group, self.sync_interval_ms, self.warmup_steps)
