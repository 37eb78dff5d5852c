"""The methods that a module gains when it is replicated."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ddp_compile.errors import ReplicationError
from ddp_compile.features.compatibility import Feature, in_force, refuse_if_excluded
from ddp_compile.features.uneven_inputs import JoinOne
from ddp_compile.module.replicate_state import REPLICATE_ANEW, ReplicateState
from ddp_compile.plan.spec import BucketPlan
from ddp_compile.runtime.algorithms.comm_hook import CommHook, builtin_hook
from ddp_compile.runtime.buckets import step_watch
from ddp_compile.runtime.buckets.comm_algorithm import AlgorithmConfig, CommAlgorithm

if TYPE_CHECKING:
    from ddp_compile.features.measurement import Measurement
    from ddp_compile.report.explanation import Explanation
    from ddp_compile.report.steps import Step

STATE = "_ddp_compile_state"


class ReplicatedModule(nn.Module):
    """The methods that ``ddp_compile`` adds to a module's class. Do not construct it: call ``ddp_compile(module)``."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # ``type(model)(...)`` and slices of an nn.Sequential give the user's class.
        return original_class(cls)(*args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Hide the class made here from a user's ``__init_subclass__``, for example a registry."""

    def __repr__(self) -> str:
        return f"{state_of(self).describe()}: {super().__repr__()}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return state_of(self).call(self, args, kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """See `ddp_compile.no_sync`."""
        return state_of(self).setting("requires_sync", False)

    def warm_up(self, *args: Any, timeout_s: float = 3600.0, **kwargs: Any) -> None:
        """Compile forward and backward now, on every rank by itself, and return when all ranks have.

        The first step compiles otherwise, and a rank with an empty compile cache may keep the others waiting in a
        collective for longer than its timeout, after which NCCL's watchdog ends them. This sends nothing before all
        ranks are done: they meet through the store of the process group. Parameters, gradients, buffers, optimizers and
        torch's random states stay as they were; other side effects of the forward and of users' hooks remain. Call it
        in training mode, in the autocast context of training, with inputs of the shapes of training. The loss is not
        part of it.

        Args:
            *args: Inputs of the forward.
            timeout_s: How long to wait for the other ranks, in seconds.
            **kwargs: Inputs of the forward.

        Raises:
            ReplicationError: It is called inside a step, after a forward whose backward is still expected, or under
                ``no_grad``; or no output has a gradient.
            RanksDifferError: Another rank did not call it in time.
        """
        from ddp_compile.features.warm_up import warm_up

        warm_up(state_of(self), self, args, kwargs, timeout_s)

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """Train on uneven inputs: a rank that has no batch left contributes zeros until the others have none.

        Inside, every forward with gradients needs its backward before the next forward. At the end every rank has the
        parameters and buffers of a rank that trained longest. With other Joinables, such as a ZeroRedundancyOptimizer,
        use ``torch.distributed.algorithms.Join([model, optimizer])``.

        Args:
            divide_by_initial_world_size: Divide by the number of all ranks. False divides by the number of ranks that
                still train.
            enable: False turns the context off.
            throw_on_early_termination: Raise a RuntimeError on every rank as soon as one has no batch left.

        Raises:
            ReplicationError: A feature of the module excludes it (docs/feature_compatibility.md), or this is inside the
                `join` of another module. Inside the context, if a second forward comes before a backward, or with
                ``static_graph`` if a rank has no batch at all.
        """
        return JoinOne(
            self,
            state_of(self).uneven_inputs,
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook that ``torch.distributed.algorithms.Join`` calls on a rank that has no input left.

        It takes ``divide_by_initial_world_size``, as `join`; arguments of other Joinables are ignored.
        """
        state = state_of(self)
        present = in_force(state, state.reducer.algorithm)
        present.pop(Feature.JOIN, None)  # left by a context that was constructed but not entered
        refuse_if_excluded(Feature.JOIN, "Join", present)
        return state.uneven_inputs.hook(kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """The device on which ``Join`` counts the ranks that still train."""
        return state_of(self).device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The ranks of ``Join``."""
        return state_of(self).process_group

    @property
    def _join_config(self) -> Any:
        return state_of(self).uneven_inputs.config

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        state_of(self).uneven_inputs.configure(config)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backwards of later forwards are reduced, as with DistributedDataParallel; `no_sync` clears it.

        For loops that set it: ``model.require_backward_grad_sync = micro_step == last``.
        """
        return state_of(self).requires_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        state_of(self).requires_sync = bool(value)

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether `finalize_backward` must be called after each reduced backward.

        False unless set, as in DistributedDataParallel of torch 2.15; set it between two steps. Code between the
        backward and `finalize_backward` overlaps with the last reductions, for example an optimizer step over other
        parameters. It must neither change nor use the gradients: an optimizer step over them uses this rank's own,
        without an error.
        """
        return state_of(self).reducer.finalizes_manually

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        state_of(self).reducer.require_manual_finalization(bool(required))

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether `finalize_backward` must be called after the backward; never in a hook inside it."""
        return self.require_manual_backward_finalization

    def finalize_backward(self) -> None:
        """Wait for the reductions of the backward that has returned. Afterward each ``.grad`` is the mean.

        If `require_manual_backward_finalization` is set, call it once after each reduced backward.

        Raises:
            RuntimeError: It is not set, or no reduced backward has returned.
            ReductionError: A reduction failed or timed out.
            GradientArrivalError: A gradient came too late to be in the mean.
        """
        state_of(self).reducer.finalize_manually()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook`` reduce the buckets instead of the all-reduce, as with DistributedDataParallel.

        The hook may be one of ``torch.distributed.algorithms.ddp_comm_hooks``, or your own.
        Register the same hook on every rank, at any time except inside a backward. After the first backward, this waits
        until the other ranks register it too.

        Args:
            state: Passed to the hook with every bucket; for most hooks a process group, None for the default group.
            hook: ``hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]``. It is called with each
                bucket in plan order, only outside ``no_sync``, at world size 1 too. ``bucket.buffer()`` holds this
                rank's gradients, not divided, of shape (n,) and the gradients' dtype; for an embedding with
                ``sparse=True``, its sparse gradient. The future holds the reduced gradients: the buffer itself or
                another floating tensor of its shape. Or a ``torch.distributed.BuiltinCommHookType``, which reduces over
                the module's own process group unless ``state`` is another one.

        Raises:
            TypeError: The hook cannot be called with a state and a bucket.
            ValueError: The annotation of the bucket or of the result is of another type.
            RuntimeError: A hook is registered already, or a backward has not been completed.
            ReplicationError: Another algorithm, or a sharded optimizer, reduces the buckets.
            RanksDifferError: After the first backward, another rank registered another hook, or none in time.
        """
        process_group = state_of(self).process_group
        if (builtin := builtin_hook(hook)) is not None:
            hook, state = builtin, process_group if state is None else state
        state_of(self).register_comm_hook(CommHook(hook, state, process_group))

    @property
    def comm_algorithm(self) -> CommAlgorithm:
        """The current algorithm: a registered comm hook, or the one that ``algorithm=`` built.

        Save its ``state_dict()`` in this rank's checkpoint, together with those of the module and the optimizer.
        """
        return state_of(self).reducer.algorithm

    def set_comm_algorithm(self, algorithm: AlgorithmConfig, optimizers: None = None) -> None:
        """Use another algorithm from the next forward on. Call this on every rank between the same two steps.

        If parameters may differ between the ranks, they become the mean over the ranks first. The state of the previous
        algorithm is lost.

        Args:
            algorithm: As for ``ddp_compile``. After one that averages parameters it cannot be one that averages
                gradients, since the states of the ranks' optimizers differ.
            optimizers: No longer taken; their states were once averaged.

        Raises:
            TypeError: Not an `AlgorithmConfig`, or ``optimizers`` are given.
            ValueError: A setting that does not fit the ranks.
            RuntimeError: A backward has not been completed, or the algorithm does not take the module's gradients,
                excludes another feature, or cannot follow the previous one.
            RanksDifferError: After the first backward, another rank sets another algorithm, or none in time.
        """
        if optimizers is not None:
            raise TypeError(f"set_comm_algorithm() takes no optimizers; to send gradients again, {REPLICATE_ANEW}")
        state_of(self).set_comm_algorithm(algorithm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Like the module's own; with a sharded optimizer, it also zeroes the gradients of its pieces."""
        state = state_of(self)
        with state.naming_parameters():
            super().zero_grad(set_to_none)
        state.reducer.algorithm.sharding.zero_gradients(set_to_none)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> torch.Tensor:
        """Scale all gradients to a norm of at most ``max_norm``. With a sharded optimizer, call it on every rank.

        Flat buffers are read and multiplied as a whole.

        Args:
            max_norm: The largest norm that is allowed.
            norm_type: Order of the norm, ``float("inf")`` for the largest value; above zero with a sharded optimizer.
            error_if_nonfinite: Raise a RuntimeError if the norm is infinite or NaN.
            optimizer: A fused optimizer of torch that steps all of the gradients next. It clips them as it reads them,
                through its ``grad_scale``, which saves a pass over the gradients. Until its step has ended, ``.grad``
                is not clipped, unless it has to be done at once: gradients of float64, DTensors, another order.

        Returns:
            The norm of all gradients before scaling, over the parts of all ranks, shape (); with a sharded optimizer,
            in float32 or more.

        Raises:
            RuntimeError: With ``error_if_nonfinite``, the norm is infinite or NaN.
            ValueError: The optimizer is sharded, takes no ``grad_scale`` as fused ones do, or does not step all
                gradients of this module alone.
            ReductionError: `finalize_backward` has not been called.

        Source: ``clip_grad_norm_`` of torch 2.13, nn/utils/clip_grad.py, which is called for other orders than 2 and
        infinity, and for gradients outside of flat buffers.
        """
        state = state_of(self)
        return state.reducer.clip_grad_norm_(state.not_reduced, max_norm, norm_type, error_if_nonfinite, optimizer)

    def normalize_by(self, count: float | torch.Tensor, loss: torch.Tensor | None = None) -> None:
        """Divide the gradients of a step by the sum of all counts, over its micro-batches and over the ranks.

        Call it once before the backward of each micro-batch, whose loss is a *sum*, over tokens for example; inside
        `no_sync` if the forward is. After the last backward of the step every ``.grad`` is what one process would get
        from the mean over the whole batch, however the ranks share it. If all counts are zero, so are the gradients.
        Once called, call it in every step, on every rank::

            loss = cross_entropy(model(x), y, ignore_index=-100, reduction="sum")
            model.normalize_by((y != -100).sum(), loss=loss)
            loss.backward()

        Args:
            count: What the loss is summed over: a number, or a tensor of shape () on the module's device, which the
                host does not read there.
            loss: The micro-batch's loss, a tensor of shape (), for `mean_loss`. Pass it always or never.

        Raises:
            ValueError: The count is negative or infinite, or a tensor has another shape or device.
            ReplicationError: The algorithm averages parameters, or gradients with other ranks than those of the process
                group; or the call comes twice for one backward. In the backward: gradients were not zeroed before the
                step.
            RanksDifferError: In the backward, on every rank: some rank has not called it, or not for all micro-batches
                of the step. On a device with streams the gradients are NaN, and the error comes at agreement points.
        """
        state_of(self).normalize_by(count, loss)

    @property
    def mean_loss(self) -> torch.Tensor:
        """The loss of the last step whose counts are known, a mean over all micro-batches and ranks: float64, shape ().

        NaN if all counts are zero, or if a rank has passed no loss.

        Raises:
            RuntimeError: This rank has passed no loss to `normalize_by`.
        """
        return state_of(self).reducer.normalizer.mean_loss

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """The mean gradient of each parameter that has one, by name. With a sharded optimizer, call it on every rank.

        Returns:
            New tensors of the parameters' shapes.
        """
        state = state_of(self)
        return state.reducer.algorithm.sharding.full_gradients(state.parameters.named)

    def check_replicas_of(self, *optimizers: torch.optim.Optimizer, buffers: bool = False) -> None:
        """At agreement points, also compare the states of these optimizers, and the buffers; see ``check_replicas``.

        Call it on every rank, with the same arguments; a later call replaces them, so one without arguments ends it.
        Tensors and integers among the states of reduced parameters are compared, at the cost of as many bytes of
        parameters.

        Args:
            *optimizers: Optimizers of this module's parameters, whose states are whole on every rank.
            buffers: Compare the module's buffers. Leave it False if ranks update them from their own data, as BatchNorm
                does between two broadcasts.

        Raises:
            TypeError: Something else than an optimizer is passed.
            ValueError: ``check_replicas`` is ``"repair"`` or False.
            ReplicationError: An optimizer is sharded, or steps no reduced parameter; a state or a buffer is sparse,
                quantized, nested or without data; or the ranks' parameters may differ, as with a comm hook. What
                becomes so later is raised at the next agreement point, but for a comm hook, which ends the comparison.
        """
        state = state_of(self)
        algorithm = state.reducer.algorithm
        if not algorithm.traits.has_equal_replicas:
            raise ReplicationError(f"check_replicas_of() compares nothing with the {algorithm.name}; leave it out")
        state.monitor.replicas.also_compare(optimizers, state.buffers.tensors if buffers else dict, state.reduced)

    def await_parameters(self) -> None:
        """Return when all parameters are complete; on an accelerator, when the current stream waits for them.

        After a step of a sharded optimizer, parameters are still being gathered. Calls of the module, `state_dict`,
        `load_state_dict`, `parameters`, `named_parameters`, copies of the module, and most uses of a parameter wait
        automatically. Call this before other uses: a fork, or a transform of torch.func over parameters that you hold.
        Without a sharded optimizer it returns at once.

        Raises:
            ReductionError: A rank has not reached the same step.
            ReplicationError: The step raised before its end.
        """
        state_of(self).await_parameters()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Like the module's own, after `await_parameters`; ``parameters()`` calls it."""
        if not torch.compiler.is_compiling():  # a compiled forward waits itself
            self.await_parameters()
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Like the module's own, after `await_parameters`."""
        self.await_parameters()
        return super().state_dict(*args, **kwargs)

    def _register_buffer_comm_hook(
        self, state: object, hook: Callable[..., Any], comm_hook_location: Any = "POST_FORWARD"
    ) -> None:
        """Replace the broadcast of buffers by ``hook(state, buffers)``, as with DistributedDataParallel.

        It is called before or after each forward whose backward is to be reduced, with a mapping from name to buffer:
        ``PRE_FORWARD`` or ``POST_FORWARD``, a member of DistributedDataParallel's enumeration, or its name. If it
        returns a list of futures, the end of that backward waits for them. Register the same hook on every rank.
        """
        state_of(self).buffers.register_hook(state, hook, comm_hook_location)

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """Step inside ``backward()``, as with DistributedDataParallel; gradients are kept.

        ``optim`` is the class of an optimizer that has a functional form in torch: SGD, Adam, AdamW and others. It gets
        the other arguments, and ``optim_params``, or all parameters that are reduced.
        """
        state_of(self).refuse_if_excluded(Feature.STEPS_IN_BACKWARD, "_register_fused_optim")
        state_of(self).optimizers.register(optim, optim_params, args, kwargs)

    @property
    def bucket_plan(self) -> BucketPlan:
        """The plan that the module reduces by. Until the first reduced backward seals it, the plan so far."""
        return state_of(self).plan

    def explain(self) -> Explanation:
        """See `ddp_compile.explain`."""
        return state_of(self).explain()

    def measure(self, steps: int | None = 20) -> Measurement:
        """Record when each bucket is ready, launched, transferred and waited for; see docs/look_inside.md.

        Call it on every rank, between the same two steps; it waits for the others. It begins with the next step and
        ends in the backward that completes the last one::

            measurement = model.measure(steps=20)
            ...  # train
            print(measurement.report())

        Args:
            steps: How many steps to record. None: all until ``measurement.stop()``, of which the last 100 are kept.

        Returns:
            The measurement. It is a context manager too, which stops at its end.

        Raises:
            ValueError: ``steps`` is not a positive integer.
            ReplicationError: A backward has not been completed, another measurement records, the process group is
                destroyed, or the algorithm's ranks do not wait for each other.
            RanksDifferError: Another rank measures other steps, or none within the process group's timeout.
        """
        from ddp_compile.features.measurement import Measurement

        state = state_of(self)
        state.measurement = Measurement(state, steps)
        return state.measurement

    def comm_stats(self) -> Step | None:
        """The last step that `measure` has recorded, on this rank alone: ``str(step)`` is one line for a log.

        Nothing is sent. A rank alone cannot tell a transfer from the wait for a late rank; the report can. On an
        accelerator this may be the step before the last one, since the device is not waited for.

        Returns:
            The step; None if none has been recorded, for example without `measure`.
        """
        measurement = state_of(self).measurement
        return None if measurement is None else measurement.last_step()

    def unwrap(self) -> nn.Module:
        """See `ddp_compile.unwrap`."""
        state = state_of(self)
        state.reducer.algorithm.sharding.refuse_missing_steps()
        if state.measurement is not None:
            state.measurement.abandon()
        state.reducer.remove_hooks()
        state.delayed.remove_hook()
        state.regions.remove()
        state.parameters.release()
        delattr(self, STATE)
        self.__class__ = original_class(type(self))
        # Last, since it raises if other ranks are gone.
        step_watch.detach(state.reducer.algorithm, together=state.reducer.is_between_steps)
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Like the module's own, after removing the prefixes that DistributedDataParallel and torch.compile add.

        Raises:
            ValueError: ``assign=True`` was passed, which would replace the reduced parameters.
        """
        self._before_load(kwargs.get("assign", False) or True in args[1:2])
        return super().load_state_dict(_without_prefixes(state_dict, self), *args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: Any, local_metadata: Any, *args: Any, **kwargs: Any
    ) -> None:
        # Called by torch, also if a module that contains this one loads.
        self._before_load(local_metadata.get("assign_to_params_buffers", False))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)

    def _before_load(self, assign: bool) -> None:
        if assign:
            raise ValueError(
                "load_state_dict(assign=True) would replace the parameters that ddp_compile reduces with new ones;"
                " load before ddp_compile(module), or with assign=False"
            )
        self.await_parameters()
        state_of(self).reducer.algorithm.before_load()

    def _replicate_for_data_parallel(self) -> nn.Module:
        # Called by DataParallel for each of its devices.
        raise ReplicationError(
            "DataParallel cannot copy a module that ddp_compile has replicated; start one process for each device, with"
            " torchrun, and train the module without DataParallel"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        plain = copy.deepcopy(_plain_shell(self), memo)
        memo[id(self)] = plain
        return plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Later protocols would store this object's class instead of the plain one.
        return _plain_shell(self).__reduce_ex__(1)


# Not a base class, since its metaclass could conflict with that of a user's module.
Joinable.register(ReplicatedModule)


def original_class(replicated: Any) -> Any:
    """The user's class from which a replicated one was made."""
    return replicated._ddp_compile_original


def state_of(module: nn.Module) -> ReplicateState:
    """What a replicated module carries."""
    return module.__dict__[STATE]


def _plain_shell(module: nn.Module) -> nn.Module:
    """A module of the original class with the same attributes, parameters and submodules, without our additions."""
    state_of(module).await_parameters()
    shell: nn.Module = object.__new__(original_class(type(module)))
    for name, value in module.__dict__.items():
        if name != STATE:
            # Bound methods, such as a ``forward`` that Accelerate wraps, would refer a copy back to the module.
            is_bound = isinstance(value, MethodType) and value.__self__ is module
            shell.__dict__[name] = MethodType(value.__func__, shell) if is_bound else value
    return shell


def _without_prefixes(state_dict: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """The same entries under the module's own names, if all of them have a wrapper's prefixes."""
    if not isinstance(state_dict, Mapping) or not all(isinstance(key, str) for key in state_dict):
        return state_dict  # torch raises
    own = module.state_dict().keys()
    stripped: Any = OrderedDict(state_dict)
    # Version numbers of the modules that wrote the entries, which modules use to migrate old entries.
    metadata = getattr(state_dict, "_metadata", None)
    while stripped and own.isdisjoint(stripped):
        prefix = next((p for p in ("module", "_orig_mod") if all(key.startswith(f"{p}.") for key in stripped)), None)
        if prefix is None:
            break
        stripped = OrderedDict((key.removeprefix(f"{prefix}."), value) for key, value in stripped.items())
        if metadata is not None:
            below = {key: value for key, value in metadata.items() if key.split(".")[0] == prefix}
            metadata = OrderedDict((key.removeprefix(prefix).lstrip("."), value) for key, value in below.items())
    if own.isdisjoint(stripped):
        return state_dict  # of another module: the error should have the names in the checkpoint
    if metadata is not None:
        stripped._metadata = metadata
    return stripped
