"""The reducer: the steps of a module, and what other code asks or sets between two of them."""

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ddp_compile.errors import ReplicationError, this_rank
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.comm_algorithm import CommAlgorithm
from ddp_compile.runtime.buckets.gradients import drop_gradients
from ddp_compile.runtime.comm import error_messages
from ddp_compile.runtime.comm.step_records import NoRecords
from ddp_compile.runtime.host_memory import keep_freed_memory
from ddp_compile.runtime.lifecycle import Phase, State
from ddp_compile.runtime.step import Step


class Reducer(Step):
    """Averages the gradients of one module over the ranks of a process group.

    `Step`, whose arguments it takes, has what happens in a step, in order.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if any(parameter.is_cpu for parameter in self.parameters):
            keep_freed_memory()

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets in plan order; none until the plan is sealed."""
        return self._set.buckets

    @property
    def used_by_nobody(self) -> Set[int]:
        """Parameters of which no rank had a gradient, where that is allowed: in the last iteration that told."""
        return self._policy.used_by_nobody

    @property
    def iteration_number(self) -> int:
        """Number of the iteration that is under way or comes next."""
        return self._set.iteration.number

    @property
    def is_within_iteration(self) -> bool:
        """Whether a forward of the iteration has come, or parameters may be arriving for it."""
        phase = self._lifecycle.phase
        return phase != Phase(State.ARMED, False) or (self.gathers_parameters and bool(self.buckets))

    # The algorithm.

    @property
    def algorithm(self) -> CommAlgorithm:
        return self._queue.algorithm

    def agree_on_algorithm(self, algorithm: CommAlgorithm, always: bool = False) -> None:
        """Before `set_algorithm`, check that all ranks are about to call it. This changes nothing.

        If ``always``, it also compares before the first backward, which otherwise compares by itself. Raises a
        RuntimeError if a backward has not been completed, and after the first backward a RanksDifferError if another
        rank does something else.
        """
        if not self.is_between_steps:
            raise error_messages.algorithm_in_backward(algorithm.name)
        if self.buckets or always:
            self._monitor.agree_on_algorithm(algorithm.name)

    def set_algorithm(self, algorithm: CommAlgorithm) -> None:
        """Use another algorithm from the next backward on. Nothing of the previous one may be under way."""
        self._queue.algorithm = algorithm
        algorithm.sharding.record_into(self._queue.records)
        self._set.lay_out_as(algorithm.traits.layout, algorithm.sharding.owners)

    @property
    def gathers_parameters(self) -> bool:
        """Whether parameters may still be written when a forward begins."""
        return self.algorithm.sharding.gathers_parameters

    def await_parameters(self, param_indices: Sequence[int]) -> None:
        """Return when these parameters, which compiled code is about to read, are complete."""
        self.algorithm.sharding.await_parameters(param_indices)

    def clip_grad_norm_(
        self,
        rest: Sequence[Tensor],
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
        optimizer: Optimizer | None,
    ) -> Tensor:
        """See ``ReplicatedModule.clip_grad_norm_``. ``rest`` are the module's parameters that are in no bucket."""
        if self._lifecycle.phase.state is State.LAUNCHED:
            raise error_messages.not_finalized("model.clip_grad_norm_()")
        total, since = None, self._queue.records.block_begins()
        if optimizer is None:
            total = self.algorithm.sharding.clip_grad_norm_(rest, max_norm, norm_type, error_if_nonfinite)
        if total is None:
            total = self._norm.clip(rest, max_norm, norm_type, error_if_nonfinite, optimizer)
        self._queue.records.block_ends(since, "clips")
        return total

    # Settings.

    def ignore_computed_buckets(self, buckets: Sequence[tuple[int, ...]]) -> None:
        """Leave these buckets, given by their parameters, to their hooks: graphs also run for other parameters."""
        self._early.ignored.update(buckets)

    def record_into(self, records: NoRecords) -> None:
        """From now on, tell these records of what happens."""
        self._queue.records = records
        self.algorithm.sharding.record_into(records)

    def require_manual_finalization(self, required: bool) -> None:
        """Set `finalizes_manually`; raises RuntimeError while a backward has not been completed."""
        if not self.is_between_steps:
            raise error_messages.manual_finalization_in_backward(required)
        self.finalizes_manually = required

    @contextmanager
    def leaving_no_trace(self, call: str) -> Iterator[None]:
        """Afterward, forwards inside ``no_sync`` count as if not called. Raises a ReplicationError during a step."""
        before = self._lifecycle.phase
        if not self.is_between_steps or before.after_forward:
            raise ReplicationError(
                f"{this_rank()}: {call} was called after a forward with gradients, whose backward is still expected, or"
                " inside a step; call it between two steps, and put forwards without a backward into torch.no_grad()"
            )
        try:
            yield
        finally:
            self._lifecycle.phase = before

    # Inside ``Join``; see `ddp_compile.features.uneven_inputs`.

    def refuse_second_forward(self) -> None:
        """Raise a ReplicationError if the backward of a synchronized forward has not come."""
        if self._lifecycle.phase.state is State.LAUNCHED:
            raise error_messages.not_finalized("a forward")
        if self._lifecycle.phase == Phase(State.ARMED, True):
            raise error_messages.second_forward_in_join()

    def enter_join(self, divisor: int) -> None:
        """From now on divide by this, and compare no fingerprints, since the ranks do different things on purpose."""
        self._queue.divisor = divisor
        self._monitor.is_paused = True

    def leave_join(self) -> None:
        """Undo this: all ranks train again."""
        self._queue.divisor = self._queue.world_size
        self._monitor.is_paused = False

    # The end.

    def remove_hooks(self) -> None:
        """Remove all hooks, and drop the gradients of an iteration that an exception cut short.

        Some of them are means and some are this rank's own, and a reduction under way may still write to them.
        """
        self._hooks.remove()
        self._is_removed = True  # a later backward may still contain the operators
        if self._lifecycle.phase.state in (State.REDUCING, State.LAUNCHED, State.FAILED):
            drop_gradients(self.parameters)
