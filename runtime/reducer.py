"""The reducer: counts gradients as they arrive, sends full buckets in plan order, hands the means back.

Note [Correctness belongs to the reducer]
The reducer counts arrivals and trusts no graph split. Whatever is compiled, broken, eager or skipped, a bucket leaves
when all its gradients are there, and buckets leave in plan order on every rank. Splits only decide how early that is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.profiler import record_function

from ddp_compile import torch_internals
from ddp_compile.bucket_plan import BucketPlan, PlanBuilder
from ddp_compile.errors import GradientArrivalError, MissingGradientError, ReductionError
from ddp_compile.runtime.agreement import agree_on_plan
from ddp_compile.runtime.bucket_buffer import BucketBuffer, BucketState

log = logging.getLogger(__name__)


class ReducerState(Enum):
    """What the reducer expects next."""

    IDLE = auto()  #: no gradient of the current round has arrived
    REDUCING = auto()  #: a backward is running, or has ended before all gradients had arrived


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
        self.state = ReducerState.IDLE
        self.buckets: list[BucketBuffer] = []
        self._bucket_of_parameter: list[BucketBuffer] = []
        self._expects_backward = False
        self._num_launched = 0
        self._callback_tasks: set[int] = set()
        self._ended_incomplete = False
        self._handed_over: dict[int, Tensor] = {}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook_for(index))
            for index, parameter in enumerate(self.parameters)
        ]

    def prepare_for_backward(self, synchronize: bool) -> None:
        """Say before a forward whether the backward that follows it is to be reduced.

        Args:
            synchronize: False inside ``no_sync``: gradients accumulate locally.

        Raises:
            MissingGradientError: The backward before left parameters without a gradient.
        """
        if self.state is ReducerState.REDUCING:
            self._recover()
        self._expects_backward = synchronize

    def mark_parameter_ready(self, index: int) -> None:
        """Note that a parameter's gradient has been accumulated into ``.grad`` for this backward.

        Raises:
            GradientArrivalError: It had arrived before in the same backward.
        """
        if not self._expects_backward:
            return
        self._enter_backward()
        bucket = self._bucket_of_parameter[index]
        if index in self._handed_over:
            self._check_single_contributor(index)
            return
        if index not in bucket.missing:
            raise GradientArrivalError(
                f"rank {self.rank}: the gradient of {self._fqn(index)} arrived twice in one backward. A reentrant"
                " checkpoint over shared weights does this; use torch.utils.checkpoint with use_reentrant=False"
            )
        if bucket.arrive(index):
            self._complete(bucket, [_gradient_of(parameter) for parameter in bucket.parameters])

    def mark_bucket_ready(self, index: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Take a whole bucket from compiled code, before AccumulateGrad has seen its gradients.

        Args:
            index: Which bucket of the sealed plan.
            gradients: Its gradients in the order of ``plan.buckets[index].gradients``, of the parameters' shapes and
                dtypes. They are copied to the flat buffer, together with what earlier backwards left in ``.grad``.

        Returns:
            What the compiled backward has to return in place of the gradients, for AccumulateGrad to store.

        Raises:
            GradientArrivalError: The bucket, or part of it, had arrived before in the same backward.
        """
        self._enter_backward()
        bucket = self.buckets[index]
        if len(bucket.missing) != len(bucket.parameters):
            raise GradientArrivalError(f"rank {self.rank}: {bucket.describe()} was handed over after part had arrived")
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
        if self.state is ReducerState.IDLE:
            return  # an inner pass has seen the last gradient; this is the end of a pass around it
        if self._num_launched < len(self.buckets):
            self._ended_incomplete = True
            return
        for bucket in self.buckets:
            self._wait(bucket)
            if self.world_size > 1:
                bucket.hand_over()
        self._reset()

    def detach(self) -> None:
        """Stop listening to the parameters."""
        for hook in self._hooks:
            hook.remove()

    # What follows is private.

    def _hook_for(self, index: int) -> Callable[[Tensor], None]:
        return lambda _parameter: self.mark_parameter_ready(index)

    def _enter_backward(self) -> None:
        if self.state is ReducerState.IDLE:
            if not self.buckets:
                self._seal_plan()
            self.state = ReducerState.REDUCING
        task = torch_internals.current_graph_task_id()
        if task not in self._callback_tasks:
            # The callback belongs to the innermost pass, so each pass that brings gradients queues one.
            self._callback_tasks.add(task)
            self._ended_incomplete = False
            torch_internals.queue_backward_callback(self.finalize_backward)

    def _seal_plan(self) -> None:
        device = self.parameters[0].device
        plan = agree_on_plan(self.builder.propose(), self.process_group, device)
        self.builder.seal(plan)
        self.buckets = [
            BucketBuffer(
                spec, [self.parameters[g.index] for g in spec.gradients], self.settings.gradient_as_bucket_view
            )
            for spec in plan.buckets
        ]
        self._bucket_of_parameter = [self.buckets[plan.bucket_of_parameter[i]] for i in range(len(self.parameters))]
        log.info("rank %d: plan %s sealed, %d buckets", self.rank, plan.digest, len(plan.buckets))
        self.settings.on_plan_sealed(plan)

    def _complete(self, bucket: BucketBuffer, gradients: Sequence[Tensor], from_graph: bool = False) -> None:
        if self.world_size > 1:
            with record_function(f"ddp_compile::bucket_{bucket.spec.index}_ready"):
                bucket.flatten(gradients, scale=1.0 / self.world_size)
                if self.settings.gradient_as_bucket_view and not from_graph and not bucket.spec.is_sparse:
                    bucket.point_gradients_at_views()
        bucket.state = BucketState.READY
        self._launch_ready_buckets()

    def _launch_ready_buckets(self) -> None:
        while self._num_launched < len(self.buckets):
            bucket = self.buckets[self._num_launched]
            if bucket.state is not BucketState.READY:
                return
            if self.world_size > 1:
                with record_function(f"ddp_compile::bucket_{bucket.spec.index}_launch"):
                    bucket.launch(self.process_group)
            bucket.state = BucketState.LAUNCHED
            self._num_launched += 1

    def _wait(self, bucket: BucketBuffer) -> None:
        if bucket.work is None:
            return
        try:
            with record_function(f"ddp_compile::bucket_{bucket.spec.index}_wait"):
                bucket.work.wait()
        except RuntimeError as error:
            raise ReductionError(
                f"rank {self.rank}: the all-reduce of {bucket.describe()} failed. Another rank has raised, exited, or"
                f" not come to its backward within the process group's timeout; look for its error. ({error})"
            ) from error

    def _recover(self) -> None:
        """Bring an unfinished backward to an end at the next forward."""
        incomplete = self._ended_incomplete
        missing = [self._fqn(index) for bucket in self.buckets for index in sorted(bucket.missing)]
        try:
            for bucket in self.buckets:
                self._wait(bucket)
        finally:
            self._reset()
        if not incomplete:
            log.warning("rank %d: the last backward raised; its gradients are incomplete and not averaged", self.rank)
            return
        raise MissingGradientError(
            f"rank {self.rank}: {len(missing)} of {len(self.parameters)} parameters got no gradient in the last"
            f" backward: {', '.join(missing)}. Their buckets never left, and .grad is not averaged. Let every"
            " parameter take part in the loss, freeze unused ones with requires_grad_(False) before ddp_compile, or"
            " name them in parameters_to_ignore"
        )

    def _reset(self) -> None:
        for bucket in self.buckets:
            bucket.reset()
        self.state = ReducerState.IDLE
        self._num_launched = 0
        self._ended_incomplete = False
        self._callback_tasks.clear()
        self._handed_over.clear()

    def _check_single_contributor(self, index: int) -> None:
        """See design note "Launching before AccumulateGrad": a gradient handed over by a graph must be the only one."""
        handed_over, stored = self._handed_over[index], self.parameters[index].grad
        if stored is not None and stored.data_ptr() == handed_over.data_ptr():
            return
        raise GradientArrivalError(
            f"rank {self.rank}: {self._fqn(index)} got another gradient after the compiled backward had handed its"
            " bucket over, for example from a regulariser outside the model; the reduced gradient lacks it"
        )

    def _fqn(self, index: int) -> str:
        return self.builder.gradients[index].fqn


def _gradient_of(parameter: Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


__all__ = ["Reducer", "ReducerSettings", "ReducerState"]
