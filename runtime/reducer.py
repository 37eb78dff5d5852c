"""The reducer: counts gradients as they arrive, sends full buckets in plan order, hands the means back.

Note [Correctness belongs to the reducer]
The reducer counts arrivals and trusts no graph split. Whatever is compiled, broken, eager or skipped, a bucket leaves
when all its gradients are there, and buckets leave in plan order on every rank. Splits only decide how early that is.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ddp_compile import torch_internals
from ddp_compile.bucket_plan import PlanBuilder
from ddp_compile.errors import RanksDifferError, ReductionError
from ddp_compile.runtime import refusals
from ddp_compile.runtime.agreement import agree_on_plan, verify_comm_hooks_agree
from ddp_compile.runtime.bucket_buffer import BucketBuffer, BucketState
from ddp_compile.runtime.comm_hooks import CommHook
from ddp_compile.runtime.optional_gradients import OptionalGradients, StaticGraph
from ddp_compile.runtime.reducer_state import ReducerSettings, ReducerState

log = logging.getLogger(__name__)


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
        self._progress = settings.progress
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
        self._comm_hook: CommHook | None = None
        self._comm_hook_name = "none"
        self._optional: OptionalGradients | None = None
        if settings.static_graph or settings.find_unused_parameters:
            names = [gradient.fqn for gradient in builder.gradients]
            kind = StaticGraph if settings.static_graph else OptionalGradients
            self._optional = kind(self.parameters, names, process_group)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_hook_for(weakref.ref(self), index))
            for index, parameter in enumerate(self.parameters)
        ]
        self._all_hooks = [torch_internals.post_accumulate_grad_hooks(parameter) for parameter in self.parameters]

    def register_comm_hook(self, hook: CommHook) -> None:
        """Let a hook reduce the buckets, and divide, from the next backward on.

        Raises:
            RuntimeError: A hook is registered already, or a backward has not been completed.
            RanksDifferError: After the first backward, another rank registered another hook or none.
        """
        if self._comm_hook is not None:
            raise refusals.second_comm_hook(self.rank, hook.name, self._comm_hook.name)
        if self.state not in (ReducerState.ARMED, ReducerState.LOCAL):
            raise refusals.comm_hook_in_backward(self.rank, hook.name)
        if self.builder.sealed is not None:
            self._progress.agree_on_comm_hook(hook.name)
        self._comm_hook, self._comm_hook_name = hook, hook.name
        self.builder.leave_no_gaps()
        if self.builder.sealed is not None:
            for bucket, spec in zip(self.buckets, self.builder.sealed.buckets, strict=True):
                bucket.lay_out_as(spec)

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
        # A hook of the user's, on the gradient of this rank, has to have run before the bucket leaves.
        torch_internals.run_last(self._all_hooks, self._hooks)
        if synchronize:
            self.state = ReducerState.ARMED
            self._forward_since_round = True
            self._arrived_before_plan.clear()
        elif not self._forward_since_round:
            # The backward of a synchronised forward that is still to come is not called off by this one.
            self.state = ReducerState.LOCAL

    def search_unused_parameters(self, outputs: Any) -> None:
        """After a synchronised forward, find the parameters that no backward from its outputs can reach.

        Args:
            outputs: What the forward returned.
        """
        if self._optional is not None:
            self._optional.search(outputs)

    def mark_parameter_ready(self, index: int) -> None:
        """Note that a parameter's gradient has been accumulated into ``.grad`` for this backward.

        Raises:
            GradientArrivalError: It had arrived before in the same round, or was taken for unused.
        """
        if self._is_one_of_many(index):
            return
        if self._optional is not None:
            self._optional.note(index)
        if self.state is ReducerState.LOCAL:
            return
        if not self.buckets and not self._forward_since_round:
            self._arrived_before_plan.add(index)
            self._call_back_at_the_end(self._finalize_backward_without_plan)
            return
        self._enter_backward(index)
        bucket = self._bucket_of_parameter[index]
        if self._optional is not None and self._optional.settles(index, bucket.state is not BucketState.COLLECTING):
            return
        if index in self._handed_over:
            self._check_single_contributor(index)
            return
        if index not in bucket.missing:
            raise refusals.arrived_twice(self.rank, self._fqn(index))
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
            raise refusals.bucket_in_parts(self.rank, bucket.describe())
        if self._optional is not None:
            for spec in bucket.spec.gradients:
                self._optional.note(spec.index)
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
            if not self._complete_without_the_missing():
                # Another backward may bring the rest, but nobody may meet a gradient that is still being reduced.
                self._wait_for_launched()
                self._progress.backward_is_incomplete()
                self.state = ReducerState.INCOMPLETE
                return
        self._wait_for_launched()
        self._progress.compare()
        try:
            untouched = frozenset() if self._optional is None else self._optional.unused_on_all_ranks()
        except ReductionError as error:
            raise self._progress.report_failure(error) from error.__cause__
        if self._sends:
            for bucket in self.buckets:
                if bucket.state is BucketState.LAUNCHED:
                    bucket.hand_over(untouched)
        self._reset()

    def remove_hooks(self) -> None:
        """Stop listening to the parameters."""
        for hook in self._hooks:
            hook.remove()

    # What follows is private.

    def _is_one_of_many(self, index: int) -> bool:
        """Count a gradient that neither begins a round nor completes a bucket, as most do, in few steps."""
        if self.state is not ReducerState.REDUCING or self._optional is not None:
            return False
        missing = self._bucket_of_parameter[index].missing
        if index not in missing or len(missing) == 1:
            return False
        if torch_internals.current_graph_task_id() not in self._tasks_with_callback:
            return False
        missing.discard(index)
        return True

    @property
    def _sends(self) -> bool:
        # A comm hook is called on a single rank as well, as DistributedDataParallel's is.
        return self.world_size > 1 or self._comm_hook is not None

    def _enter_backward(self, arriving: int | None = None) -> None:
        if self.state is ReducerState.FAILED:
            self._refuse_after_an_exception()
        if self.state is ReducerState.ARMED:
            self._progress.backward_begins(self._forward_since_round)
        if not self.buckets:
            self._seal_plan()
        self.state = ReducerState.REDUCING
        self._call_back_at_the_end(self.finalize_backward)
        if self._optional is not None and (absent := self._optional.absent_from_the_start(arriving)):
            self._go_on_without(absent)

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
            self._progress.backward_begins(after_forward=False)
            self._seal_plan()
            self.state = ReducerState.REDUCING
            if self._optional is not None:
                for index in arrived:
                    self._optional.settles(index, has_left=False)
            for bucket in self.buckets:
                self._complete_with_what_is_there(bucket)
            self.finalize_backward()

    def _seal_plan(self) -> None:
        device = self.parameters[0].device
        proposed = self.builder.propose()
        try:
            verify_comm_hooks_agree(self._comm_hook_name, self.process_group, device)
            plan = agree_on_plan(proposed, self.process_group, device)
        except RanksDifferError:
            raise
        except RuntimeError as error:
            failure = refusals.no_plan_to_agree_on(self.rank, proposed.buckets[0].gradients, error)
            raise self._progress.report_failure(failure) from error
        self.builder.seal(plan)
        as_view = self.settings.gradient_as_bucket_view
        self.buckets = [
            BucketBuffer(spec, [self.parameters[g.index] for g in spec.gradients], as_view) for spec in plan.buckets
        ]
        self._bucket_of_parameter = [self.buckets[plan.bucket_of_parameter[i]] for i in range(len(self.parameters))]
        log.info("rank %d: plan %s sealed, %d buckets", self.rank, plan.digest, len(plan.buckets))
        self.settings.on_plan_sealed(plan)

    def _complete(self, bucket: BucketBuffer, gradients: Sequence[Tensor], from_graph: bool = False) -> None:
        if self._sends:
            with torch_internals.profiled_range(f"ddp_compile::bucket_{bucket.spec.index}_ready"):
                bucket.flatten(gradients, scale=1.0 if self._comm_hook else 1.0 / self.world_size)
                if self.settings.gradient_as_bucket_view and not from_graph and not bucket.spec.is_sparse:
                    bucket.point_gradients_at_views(self._unused())
        bucket.state = BucketState.READY
        try:
            self._launch_ready_buckets()
        except ReductionError as error:  # of a comm hook, which may wait for the bucket before
            raise self._progress.report_failure(error) from error.__cause__

    def _launch_ready_buckets(self, skip: bool = False) -> None:
        """Launch what can leave in plan order; with ``skip``, the next bucket will not leave in this round."""
        if skip:
            self._count_launch()
        while self._num_launched < len(self.buckets):
            bucket = self.buckets[self._num_launched]
            if bucket.state is not BucketState.READY:
                return
            if self._sends:
                assert self.builder.sealed is not None
                is_last = bucket is self.buckets[-1]
                self._progress.bucket_leaves(is_last, self.builder.sealed, self._comm_hook_name)
                with torch_internals.profiled_range(f"ddp_compile::bucket_{bucket.spec.index}_launch"):
                    bucket.launch(self.process_group, self._comm_hook, is_last)
            bucket.state = BucketState.LAUNCHED
            self._count_launch()

    def _count_launch(self) -> None:
        self._num_launched += 1
        if self._num_launched == len(self.buckets) and self._optional is not None:
            if self._comm_hook is not None:
                self._comm_hook.settle()
            self._optional.exchange()

    def _complete_without_the_missing(self) -> bool:
        """At the end of a backward, complete the buckets that may leave without the gradients they miss.

        Returns:
            Whether the round is over: False if it has to wait for another backward.
        """
        if self._optional is not None:
            missing = {index for bucket in self.buckets for index in bucket.missing}
            absent = self._optional.absent_at_the_end(missing)
            if absent is not None:
                self._go_on_without(absent)
                for bucket in self.buckets:
                    if bucket.state is BucketState.COLLECTING:  # what came to it was not counted
                        self._complete_with_what_is_there(bucket)
                return True
        if self._forward_since_round:
            return False
        self._complete_with_means()
        return True

    def _go_on_without(self, absent: Iterable[int]) -> None:
        """Let buckets no longer wait for these parameters, which contribute what they hold, or zeros."""
        assert self._optional is not None
        waiting = sorted(index for index in absent if index in self._bucket_of_parameter[index].missing)
        self._optional.unused.update(waiting)
        for index in waiting:
            if self._bucket_of_parameter[index].arrive(index):
                self._complete_with_what_is_there(self._bucket_of_parameter[index])

    def _unused(self) -> Set[int]:
        return frozenset() if self._optional is None else self._optional.unused

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
        self._complete(bucket, self._contributions(bucket))

    def _contributions(self, bucket: BucketBuffer) -> list[Tensor]:
        unused = self._unused()
        gradients = []
        for position, parameter in enumerate(bucket.parameters):
            gradient = parameter.grad
            if unused and bucket.spec.gradients[position].index in unused:
                gradient = bucket.contribution_of_unused(position) if self._sends else parameter
            elif gradient is None:
                raise refusals.gradient_gone(self.rank, bucket.spec.gradients[position].fqn)
            gradients.append(gradient)
        return gradients

    def _wait_for_launched(self) -> None:
        if self.state is ReducerState.REDUCING:
            self._progress.buckets_are_awaited()
        for bucket in self.buckets:
            try:
                with torch_internals.profiled_range(f"ddp_compile::bucket_{bucket.spec.index}_wait"):
                    bucket.wait()
            except ReductionError as error:  # a comm hook's own
                raise self._progress.report_failure(error, f", bucket {bucket.spec.index}") from error.__cause__
            except RuntimeError as error:
                failure = refusals.all_reduce_failed(self.rank, bucket.describe(), error)
                raise self._progress.report_failure(failure, f", bucket {bucket.spec.index}") from error

    def _refuse_after_an_exception(self) -> NoReturn:
        # What this rank launched may wait for ever for ranks that stopped elsewhere, so it is not waited for.
        self.state = ReducerState.FAILED
        raise refusals.out_of_step(self.rank)

    def _refuse_missing_gradients(self) -> NoReturn:
        missing = [self._fqn(index) for bucket in self.buckets for index in sorted(bucket.missing)]
        try:
            self._wait_for_launched()
        finally:
            self._reset()
        raise refusals.missing_gradients(self.rank, missing, len(self.parameters), self.settings.static_graph)

    def _reset(self) -> None:
        for bucket in self.buckets:
            bucket.reset()
        self.state = ReducerState.ARMED
        self._num_launched = 0
        self._forward_since_round = False
        self._tasks_with_callback.clear()
        self._handed_over.clear()
        self._progress.round_ends()
        if self._optional is not None:
            self._optional.begin_round()

    def _check_single_contributor(self, index: int) -> None:
        """A gradient that a graph handed over must be the only one; see docs/architecture.md, "Handing over early"."""
        handed_over, stored = self._handed_over[index], self.parameters[index].grad
        if stored is not None and stored.data_ptr() == handed_over.data_ptr():
            return
        raise refusals.contributor_after_launch(self.rank, self._fqn(index))

    def _fqn(self, index: int) -> str:
        return self.builder.gradients[index].fqn


def _hook_for(reducer: weakref.ref[Reducer], index: int) -> Callable[[Tensor], None]:
    # A strong reference would make a cycle through C++ (parameter, hook, reducer, parameter) that gc cannot see.
    def hook(_parameter: Tensor) -> None:
        alive = reducer()
        if alive is not None:
            alive.mark_parameter_ready(index)

    return hook
