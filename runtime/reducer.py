"""The reducer: counts gradients as they arrive, sends full buckets in plan order, hands the means back.

Note [Correctness belongs to the reducer]
The reducer counts arrivals and trusts no graph split. Whatever is compiled, broken, eager or skipped, a bucket leaves
when all its gradients are there, and buckets leave in plan order on every rank. Splits only decide how early that is.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NoReturn

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ddp_compile import torch_internals
from ddp_compile.bucket_plan import BucketPlan, PlanBuilder
from ddp_compile.errors import GradientArrivalError, MissingGradientError, ReductionError
from ddp_compile.runtime.agreement import agree_on_plan
from ddp_compile.runtime.bucket_buffer import BucketBuffer, BucketState

log = logging.getLogger(__name__)


class ReducerState(Enum):
    """What the reducer makes of the next gradient.

    ========== ================================================= ==========
    from       on                                                to
    ========== ================================================= ==========
    ARMED      a forward inside no_sync, no other one before it  LOCAL
    LOCAL      a forward outside of no_sync                      ARMED
    ARMED      the first gradient of a backward                  REDUCING
    REDUCING   the end of a backward, all buckets have left      ARMED
    REDUCING   the end of a backward, some gradients missing     INCOMPLETE
    INCOMPLETE the first gradient of another backward            REDUCING
    INCOMPLETE a forward: MissingGradientError                   ARMED
    REDUCING   a forward: the backward had raised                FAILED
    ========== ================================================= ==========
    """

    ARMED = auto()  #: it starts a round
    LOCAL = auto()  #: it stays on this rank
    REDUCING = auto()  #: it belongs to the round that has started
    INCOMPLETE = auto()  #: a backward has ended before all gradients had arrived; another one may bring them
    FAILED = auto()  #: a backward has raised in the middle of a round: this rank may be out of step with the others


@dataclass(frozen=True, kw_only=True, slots=True)
class ReducerSettings:
    """What a reducer needs to know beside its parameters.

    Args:
        gradient_as_bucket_view: See `BucketBuffer`.
        on_plan_sealed: Called once, on every rank, with the plan all ranks agreed on.
    """

    gradient_as_bucket_view: bool
    on_plan_sealed: Callable[[BucketPlan], None]


class Reducer:
    """Averages the gradients of one module over the ranks of a process group.

    Args:
        parameters: The parameters to reduce, in registration order, as ``builder.gradients`` lists them.
        builder: The module's plan; sealed at the first synchronised backward, before anything is launched.
        process_group: The ranks to average over.
        settings: See `ReducerSettings`.

    Source: the life of a backward (prepare, mark ready, launch in order, finalise in an engine callback) is that of
    ``Reducer`` in torch 2.13, csrc/distributed/c10d/reducer.cpp.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        builder: PlanBuilder,
        process_group: dist.ProcessGroup,
        settings: ReducerSettings,
    ) -> None:
        self.parameters = tuple(parameters)
        self.builder = builder
        self.process_group = process_group
        self.settings = settings
        self.rank = process_group.rank()
        self.world_size = process_group.size()
        self.state = ReducerState.ARMED
        self.buckets: list[BucketBuffer] = []
        self._bucket_of_parameter: list[BucketBuffer] = []
        self._num_launched = 0
        self._tasks_with_callback: set[int] = set()
        # A backward without a synchronised forward before it, of a regulariser for example, may reach a part only.
        self._forward_since_round = False
        self._arrived_before_plan: set[int] = set()
        self._handed_over: dict[int, Tensor] = {}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_hook_for(weakref.ref(self), index))
            for index, parameter in enumerate(self.parameters)
        ]

    def prepare_for_backward(self, synchronize: bool) -> None:
        """Say before a forward whether a backward that follows it is to be reduced.

        Args:
            synchronize: False inside ``no_sync``: gradients accumulate locally.

        Raises:
            MissingGradientError: The backward before left parameters without a gradient.
            ReductionError: The backward before raised after its reduction had started.
        """
        if self.state in (ReducerState.REDUCING, ReducerState.FAILED):
            self._refuse_after_an_exception()
        if self.state is ReducerState.INCOMPLETE:
            self._refuse_missing_gradients()
        for parameter, hook in zip(self.parameters, self._hooks, strict=True):
            # A hook of the user's, on the gradient of this rank, has to have run before the bucket leaves.
            torch_internals.run_last(parameter, hook)
        if synchronize:
            self.state = ReducerState.ARMED
            self._forward_since_round = True
            self._arrived_before_plan.clear()
        elif not self._forward_since_round:
            # The backward of a synchronised forward that is still to come is not called off by this one.
            self.state = ReducerState.LOCAL

    def mark_parameter_ready(self, index: int) -> None:
        """Note that a parameter's gradient has been accumulated into ``.grad`` for this backward.

        Raises:
            GradientArrivalError: It had arrived before in the same round.
        """
        if self.state is ReducerState.LOCAL:
            return
        if not self.buckets and not self._forward_since_round:
            self._arrived_before_plan.add(index)
            self._call_back_at_the_end(self._finalize_backward_without_plan)
            return
        self._enter_backward()
        bucket = self._bucket_of_parameter[index]
        if index in self._handed_over:
            self._check_single_contributor(index)
            return
        if index not in bucket.missing:
            raise GradientArrivalError(
                f"rank {self.rank}: the gradient of {self._fqn(index)} arrived twice before all others had arrived."
                " Either a reentrant checkpoint runs over shared weights: use use_reentrant=False; or one of several"
                " backwards does not reach every parameter: add the losses up, or put all but the last into no_sync()"
            )
        if bucket.arrive(index):
            self._complete_with_what_is_there(bucket)

    def mark_bucket_ready(self, index: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Take a whole bucket from compiled code, before AccumulateGrad has seen its gradients.

        Args:
            index: Which bucket of the sealed plan.
            gradients: Its gradients in the order of ``plan.buckets[index].gradients``, of the parameters' shapes and
                dtypes. They are copied to the flat buffer, together with what earlier backwards left in ``.grad``.

        Returns:
            What the compiled backward has to return in place of the gradients, for AccumulateGrad to store.

        Raises:
            GradientArrivalError: The bucket, or part of it, had arrived before in the same round.
            ValueError: The bucket is sparse.
        """
        if self.state is ReducerState.LOCAL:
            return list(gradients)
        self._enter_backward()
        bucket = self.buckets[index]
        if bucket.spec.is_sparse:
            raise ValueError(f"{bucket.describe()} is sparse; only its parameter's own hook can hand it over")
        if len(bucket.missing) != len(bucket.parameters):
            raise GradientArrivalError(f"rank {self.rank}: {bucket.describe()} was handed over after a part of it")
        accumulated = [parameter.grad for parameter in bucket.parameters]
        gradients = [g if old is None else old + g for g, old in zip(gradients, accumulated, strict=True)]
        for gradient, parameter, spec in zip(gradients, bucket.parameters, bucket.spec.gradients, strict=True):
            parameter.grad = None
            # Another tensor on the same memory: the engine must be able to steal the gradient itself.
            self._handed_over[spec.index] = gradient.detach()
        bucket.missing.clear()
        self._complete(bucket, gradients, from_graph=True)
        return gradients

    def finalize_backward(self) -> None:
        """Wait for every bucket and hand its gradients over; runs when a backward pass has ended.

        A reentrant checkpoint ends passes inside the backward; only when every bucket has left is the backward over.

        Raises:
            ReductionError: An all-reduce failed or timed out.
        """
        if self.state is not ReducerState.REDUCING:
            return  # a pass inside this one has seen the last gradient
        if self._num_launched < len(self.buckets):
            if torch_internals.is_inside_backward():
                return
            if self._forward_since_round:
                # Another backward may bring the rest, but nobody may meet a gradient that is still being reduced.
                self._wait_for_launched()
                self.state = ReducerState.INCOMPLETE
                return
            self._complete_with_means()
        self._wait_for_launched()
        if self.world_size > 1:
            for bucket in self.buckets:
                if bucket.state is BucketState.LAUNCHED:
                    bucket.hand_over()
        self._reset()

    def remove_hooks(self) -> None:
        """Stop listening to the parameters."""
        for hook in self._hooks:
            hook.remove()

    # What follows is private.

    def _enter_backward(self) -> None:
        if self.state is ReducerState.FAILED:
            self._refuse_after_an_exception()
        if not self.buckets:
            self._seal_plan()
        self.state = ReducerState.REDUCING
        self._call_back_at_the_end(self.finalize_backward)

    def _call_back_at_the_end(self, callback: Callable[[], None]) -> None:
        task = torch_internals.current_graph_task_id()
        if task not in self._tasks_with_callback:
            # The callback belongs to the innermost pass, so each pass that brings gradients queues one.
            self._tasks_with_callback.add(task)
            torch_internals.queue_backward_callback(callback)

    def _finalize_backward_without_plan(self) -> None:
        """End a backward that came before any call of the module.

        Either somebody calls ``module.forward`` or a method of their own: all gradients are there, and are reduced. Or
        it was a regulariser: its gradients stay where they are, and are reduced together with those of the first round.
        """
        if torch_internals.is_inside_backward():
            return
        self._tasks_with_callback.clear()
        arrived, self._arrived_before_plan = self._arrived_before_plan, set()
        if len(arrived) == len(self.parameters):
            self._seal_plan()
            self.state = ReducerState.REDUCING
            for bucket in self.buckets:
                self._complete_with_what_is_there(bucket)
            self.finalize_backward()

    def _seal_plan(self) -> None:
        device = self.parameters[0].device
        proposed = self.builder.propose()
        try:
            plan = agree_on_plan(proposed, self.process_group, device)
        except RuntimeError as error:
            first = proposed.buckets[0].gradients
            raise ReductionError(
                f"rank {self.rank}: no rank 0 to agree on the bucket plan with, before bucket 0 ({first[0].fqn}, ...,"
                f" {first[-1].fqn}) could leave. Another rank has raised, exited, or not come to its backward within"
                f" the process group's timeout; look for its error. ({error})"
            ) from error
        self.builder.seal(plan)
        as_view = self.settings.gradient_as_bucket_view
        self.buckets = [
            BucketBuffer(spec, [self.parameters[g.index] for g in spec.gradients], as_view) for spec in plan.buckets
        ]
        self._bucket_of_parameter = [self.buckets[plan.bucket_of_parameter[i]] for i in range(len(self.parameters))]
        log.info("rank %d: plan %s sealed, %d buckets", self.rank, plan.digest, len(plan.buckets))
        self.settings.on_plan_sealed(plan)

    def _complete(self, bucket: BucketBuffer, gradients: Sequence[Tensor], from_graph: bool = False) -> None:
        if self.world_size > 1:
            with torch_internals.profiled_range(f"ddp_compile::bucket_{bucket.spec.index}_ready"):
                bucket.flatten(gradients, scale=1.0 / self.world_size)
                if self.settings.gradient_as_bucket_view and not from_graph and not bucket.spec.is_sparse:
                    bucket.point_gradients_at_views()
        bucket.state = BucketState.READY
        self._launch_ready_buckets()

    def _launch_ready_buckets(self, skip: bool = False) -> None:
        """Launch what can leave in plan order; with ``skip``, the next bucket will not leave in this round."""
        if skip:
            self._num_launched += 1
        while self._num_launched < len(self.buckets):
            bucket = self.buckets[self._num_launched]
            if bucket.state is not BucketState.READY:
                return
            if self.world_size > 1:
                with torch_internals.profiled_range(f"ddp_compile::bucket_{bucket.spec.index}_launch"):
                    bucket.launch(self.process_group)
            bucket.state = BucketState.LAUNCHED
            self._num_launched += 1

    def _complete_with_means(self) -> None:
        """Complete the round of a backward without a forward before it, of a regulariser for example.

        Parameters that it did not reach hold the mean of the round before, and the mean of means is the mean. A bucket
        with a parameter that holds none stays as it is: its gradients will be reduced in the next round.
        """
        for bucket in self.buckets[self._num_launched :]:
            if bucket.missing and all(parameter.grad is not None for parameter in bucket.parameters):
                self._complete_with_what_is_there(bucket)
            self._launch_ready_buckets(skip=bucket.state is BucketState.COLLECTING)

    def _complete_with_what_is_there(self, bucket: BucketBuffer) -> None:
        bucket.missing.clear()
        self._complete(bucket, [self._gradient_of(gradient.index) for gradient in bucket.spec.gradients])

    def _wait_for_launched(self) -> None:
        for bucket in self.buckets:
            try:
                with torch_internals.profiled_range(f"ddp_compile::bucket_{bucket.spec.index}_wait"):
                    bucket.wait()
            except RuntimeError as error:
                raise ReductionError(
                    f"rank {self.rank}: the all-reduce of {bucket.describe()} failed. Another rank has raised, exited,"
                    " or not come to its backward within the process group's timeout; look for its error."
                    f" ({error})"
                ) from error

    def _refuse_after_an_exception(self) -> NoReturn:
        # What this rank launched may wait for ever for ranks that stopped elsewhere, so it is not waited for.
        self.state = ReducerState.FAILED
        raise ReductionError(
            f"rank {self.rank}: the last backward raised after its reduction had started, so the ranks may be out of"
            " step, and going on could average gradients of different steps. Start again from a checkpoint; or, if"
            " every rank has caught the error, let every rank go on in a new group:"
            " model = ddp_compile(model.unwrap(), process_group=torch.distributed.new_group(), ...)"
        )

    def _refuse_missing_gradients(self) -> NoReturn:
        missing = [self._fqn(index) for bucket in self.buckets for index in sorted(bucket.missing)]
        try:
            self._wait_for_launched()
        finally:
            self._reset()
        raise MissingGradientError(
            f"rank {self.rank}: {len(missing)} of {len(self.parameters)} parameters got no gradient in the last"
            f" backward: {', '.join(missing)}. Their buckets never left, and .grad is not averaged. Let every"
            " parameter take part in the loss, freeze unused ones with requires_grad_(False) before ddp_compile, or"
            " name them in parameters_to_ignore"
        )

    def _reset(self) -> None:
        for bucket in self.buckets:
            bucket.reset()
        self.state = ReducerState.ARMED
        self._num_launched = 0
        self._forward_since_round = False
        self._tasks_with_callback.clear()
        self._handed_over.clear()

    def _check_single_contributor(self, index: int) -> None:
        """A gradient that a graph handed over must be the only one; see docs/architecture.md, "Handing over early"."""
        handed_over, stored = self._handed_over[index], self.parameters[index].grad
        if stored is not None and stored.data_ptr() == handed_over.data_ptr():
            return
        raise GradientArrivalError(
            f"rank {self.rank}: {self._fqn(index)} got another gradient after the compiled backward had handed its"
            " bucket over, for example from a regulariser outside the model; the reduced gradient lacks it"
        )

    def _gradient_of(self, index: int) -> Tensor:
        gradient = self.parameters[index].grad
        if gradient is None:
            raise GradientArrivalError(
                f"rank {self.rank}: the gradient of {self._fqn(index)} was set to None before it was averaged, perhaps"
                " by a hook that steps an optimizer inside the backward; step after the backward"
            )
        return gradient

    def _fqn(self, index: int) -> str:
        return self.builder.gradients[index].fqn


def _hook_for(reducer: weakref.ref[Reducer], index: int) -> Callable[[Tensor], None]:
    # A strong reference would make a cycle through C++ (parameter, hook, reducer, parameter) that gc cannot see.
    def hook(_parameter: Tensor) -> None:
        alive = reducer()
        if alive is not None:
            alive.mark_parameter_ready(index)

    return hook
