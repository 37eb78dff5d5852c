"""``ddp_compile(module)``: the module itself becomes data parallel and compiled, in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ddp_compile.comm_hooks import builtin_hook
from ddp_compile.errors import ReplicationError
from ddp_compile.features.uneven_inputs import JoinOne
from ddp_compile.module.ddp_attributes import bound_to
from ddp_compile.module.explanation import explain
from ddp_compile.module.replicate_state import ReplicateState
from ddp_compile.module.state_dict_prefixes import without_wrapper_prefixes
from ddp_compile.plan.spec import BucketPlan
from ddp_compile.runtime.algorithms.comm_hook import CommHook
from ddp_compile.runtime.buckets.comm_algorithm import AlgorithmConfig, CommAlgorithm

STATE = "_ddp_compile_state"


class ReplicatedModule(nn.Module):
    """What ``ddp_compile`` adds to a module's class. Do not make one yourself: call ``ddp_compile(module)``."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # ``type(model)(...)``, and slices of an nn.Sequential, mean the user's class.
        return original_class(cls)(*args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep a user's ``__init_subclass__``, a registry for example, from hearing of the class made here."""

    def __repr__(self) -> str:
        return f"{state_of(self).describe()}: {super().__repr__()}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return state_of(self).call(self, args, kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: backwards of forwards made inside are not reduced.

        The first backward of a forward made outside reduces everything accumulated until then.
        """
        state = state_of(self)
        before, state.requires_sync = state.requires_sync, False
        try:
            yield
        finally:
            state.requires_sync = before

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Train on uneven inputs: a rank that has no batch left contributes zeros until all others have none.

        Inside, every forward with gradients has its backward before the next forward. At the end every rank has the
        parameters and buffers of one that has trained longest. With other Joinables, a ZeroRedundancyOptimizer for
        example, use ``torch.distributed.algorithms.Join([model, optimizer])``.

        Args:
            divide_by_initial_world_size: Divide by the number of all ranks, or of those that still train.
            enable: False for nothing of it.
            throw_on_early_termination: Raise a RuntimeError on every rank as soon as one has no batch left.

        Raises:
            ReplicationError: The algorithm communicates parameters, or another module's `join` is around; inside, a
                second forward before a backward, or with ``static_graph`` a rank without any batch.
        """
        return JoinOne(
            self,
            state_of(self).uneven_inputs,
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What ``torch.distributed.algorithms.Join`` calls on a rank that has no input left.

        Args:
            kwargs: ``divide_by_initial_world_size``, as in `join`; those of other Joinables are ignored.
        """
        state = state_of(self)
        state.delayed.refuse_join()
        state.sharded.refuse_join()
        return state.uneven_inputs.hook(kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """Where ``Join`` counts the ranks that still train."""
        return state_of(self).uneven_inputs.device

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
        """Whether backwards of the forwards to come are reduced, as with DistributedDataParallel; `no_sync` clears it.

        For loops that set it: ``model.require_backward_grad_sync = micro_step == last``.
        """
        return state_of(self).requires_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        state_of(self).requires_sync = bool(value)

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether gradients are reduced only when `finalize_backward` has been called behind a backward.

        False unless it is set, as with torch 2.15's DistributedDataParallel; set it between two steps. What runs
        between the backward and `finalize_backward` has the last reductions behind it, an optimizer step over other
        parameters for example. The gradients are not to be touched meanwhile, nor used: an optimizer step over them
        takes this rank's own, which no error tells.
        """
        return state_of(self).reducer.finalizes_manually

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        state_of(self).reducer.require_manual_finalization(bool(required))

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether `finalize_backward` has to be called behind the backward, and not in a hook inside it: always."""
        return self.require_manual_backward_finalization

    def finalize_backward(self) -> None:
        """Wait for the reductions of the backward that has returned; afterwards each ``.grad`` is the mean.

        To be called once behind each backward that is reduced, where `require_manual_backward_finalization` is set.

        Raises:
            RuntimeError: Nothing waits for it: it is not set, no such backward has come, or not returned.
            ReductionError: A reduction failed or timed out.
            GradientArrivalError: A gradient came too late to be in the mean.
        """
        state_of(self).reducer.finalize_manually()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook`` reduce the buckets in place of the all-reduce, as with DistributedDataParallel.

        Hooks of ``torch.distributed.algorithms.ddp_comm_hooks`` and of `ddp_compile.comm_hooks` can be given, and
        functions of your own. Register the same one on every rank, at any time but inside a backward. After the first
        backward, registering waits for the other ranks to do so as well.

        Args:
            state: Passed to the hook with every bucket; for most hooks a process group, None being the default one.
            hook: ``hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]``. It is called with each
                bucket in plan order, outside of ``no_sync`` only, at world size 1 too. ``bucket.buffer()`` is the sum
                of this rank's gradients, which nothing has been divided by, of shape (n,) and the gradients' dtype; for
                an embedding with ``sparse=True``, its sparse gradient. The future holds the reduced gradients: the
                buffer itself or another floating tensor of its shape. Or a ``torch.distributed.BuiltinCommHookType``,
                which reduces over the module's own process group unless ``state`` is another.

        Raises:
            TypeError: The hook is not callable, or not with a state and a bucket.
            ValueError: The annotation of the bucket or of the result is of another type.
            RuntimeError: A hook is registered already, another algorithm reduces, or a backward has not been completed.
            RanksDifferError: After the first backward, another rank registered another hook, or none in time.
        """
        process_group = state_of(self).process_group
        if (builtin := builtin_hook(hook)) is not None:
            hook, state = builtin, process_group if state is None else state
        state_of(self).algorithms.register_comm_hook(CommHook(hook, state, process_group))

    @property
    def comm_algorithm(self) -> CommAlgorithm:
        """How the ranks communicate now: a comm hook that was registered, or what ``algorithm=`` has built.

        Its ``state_dict()`` belongs into this rank's checkpoint beside those of the module and the optimizer.
        """
        return state_of(self).reducer.algorithm

    def set_comm_algorithm(
        self, algorithm: AlgorithmConfig, optimizers: Sequence[torch.optim.Optimizer] | None = None
    ) -> None:
        """Communicate in another way from the next forward on; on every rank between the same two steps.

        Where parameters may differ between the ranks, they become the mean over them first. What the algorithm before
        had learnt is lost.

        Args:
            algorithm: As for ``ddp_compile``.
            optimizers: From an algorithm by which ranks differ to one that averages gradients: all optimizers of the
                module, whose states become the mean as well. Otherwise equal gradients would make different steps.

        Raises:
            TypeError: Not an `AlgorithmConfig`.
            ValueError: A setting that does not fit the ranks.
            RuntimeError: A backward has not been completed, the algorithm does not take the module's gradients, or
                ``optimizers`` is missing.
            RanksDifferError: After the first backward, another rank sets another one, or none in time; or the states of
                optimizers do not have the same parts on all ranks.
        """
        state_of(self).algorithms.set_algorithm(algorithm, optimizers)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the module's own; with a sharded optimizer also the gradients of its pieces."""
        state = state_of(self)
        with state.naming_parameters():
            super().zero_grad(set_to_none)
        state.reducer.algorithm.sharding.zero_gradients(set_to_none)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``, with a sharded optimizer too, on every rank.

        Args:
            max_norm: The largest norm there may be.
            norm_type: Order of the norm, ``float("inf")`` for the largest value; above zero with a sharded optimizer.
            error_if_nonfinite: Raise a RuntimeError if the norm is infinite or NaN.

        Returns:
            The norm of all gradients before, of all ranks' parts, shape (); with a sharded optimizer at least float32.

        Source: ``clip_grad_norm_`` of torch 2.13, nn/utils/clip_grad.py, which is called where nothing is sharded.
        """
        sharding = state_of(self).reducer.algorithm.sharding
        return sharding.clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite)

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """The mean gradient of each parameter that has one, by name; with a sharded optimizer too, on every rank.

        Returns:
            New tensors of the parameters' shapes.
        """
        state = state_of(self)
        return state.reducer.algorithm.sharding.full_gradients(state.parameters.named)

    def await_parameters(self) -> None:
        """Return when all parameters are complete; with an accelerator, when the current stream waits for them.

        A step of a sharded optimizer leaves them on their way. Calls of the module, `state_dict`, `load_state_dict`,
        `parameters`, `named_parameters`, copies of the module, and most uses of a parameter wait by themselves; call
        this before others, a fork or a transform of torch.func over parameters that you hold. Without a sharded
        optimizer it returns at once.

        Raises:
            ReductionError: A rank has not come to the same step.
            ReplicationError: The step has raised before its end.
        """
        state_of(self).await_parameters()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As the module's own, after `await_parameters`; ``parameters()`` calls it."""
        if not torch.compiler.is_compiling():  # a forward that is compiled waits by itself
            self.await_parameters()
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own, after `await_parameters`."""
        self.await_parameters()
        return super().state_dict(*args, **kwargs)

    def _register_buffer_comm_hook(
        self, state: object, hook: Callable[..., Any], comm_hook_location: Any = "POST_FORWARD"
    ) -> None:
        """Let ``hook(state, buffers)`` do what the broadcast of buffers does, as with DistributedDataParallel.

        It is called for each forward whose backward is to be reduced, with the buffers by their names. Futures that it
        returns in a list are waited for when that backward ends. Register the same one on every rank.

        Args:
            state: Passed to the hook.
            hook: Any function of both.
            comm_hook_location: ``PRE_FORWARD`` or ``POST_FORWARD``, a member of DistributedDataParallel's enumeration
                or its name: whether it is called before the forward or behind it.

        Raises:
            TypeError: The hook is not callable.
            ValueError: There is no such location.
        """
        state_of(self).buffers.register_hook(state, hook, comm_hook_location)

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        """Step inside ``backward()``, as with DistributedDataParallel; gradients stay where they are.

        Args:
            optim: Class of an optimizer of which torch has a functional form: SGD, Adam, AdamW and others.
            args: Its arguments but for the parameters.
            optim_params: The parameters to step; None for all that are reduced.
            kwargs: Its keyword arguments.

        Raises:
            ValueError: torch has no functional form of it, or the module does not reduce one of the parameters.
        """
        state_of(self).optimizers.register(optim, optim_params, args, kwargs)

    @property
    def bucket_plan(self) -> BucketPlan:
        """The plan the module reduces by; until the first synchronised backward has sealed it, the plan so far."""
        builder = state_of(self).builder
        return builder.sealed or builder.propose()

    def explain(self) -> str:
        """The bucket table, how each graph was cut, which cuts were declined, and what could not be compiled."""
        return explain(state_of(self), self.bucket_plan)

    def unwrap(self) -> nn.Module:
        """Make the module what it was before ``ddp_compile``, and return it.

        Parameters and gradients keep their values; nothing is reduced or compiled any more. Where an algorithm lets
        parameters differ between the ranks, all ranks unwrap together, and parameters become the mean over them; states
        of optimizers stay each rank's own. After a backward that raised in the middle of an iteration, gradients become
        None: some had been averaged, and others had not.
        """
        state = state_of(self)
        state.reducer.remove_hooks()
        state.delayed.remove_hook()
        state.sharded.detach()
        state.regions.remove()
        state.parameters.release()
        delattr(self, STATE)
        self.__class__ = original_class(type(self))
        # Last: where other ranks are gone, this raises.
        state.reducer.algorithm.detach(together=state.reducer.is_between_steps)
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As the module's own; the prefixes of DistributedDataParallel and torch.compile are taken off first.

        Raises:
            ValueError: ``assign=True``, which would replace the parameters that are being reduced.
        """
        if kwargs.get("assign", False) or True in args[1:2]:
            raise ValueError(
                "load_state_dict(assign=True) would put new parameters in the place of those ddp_compile reduces;"
                " load before ddp_compile(module), or with assign=False"
            )
        self.await_parameters()
        state_of(self).reducer.algorithm.before_load()
        return super().load_state_dict(without_wrapper_prefixes(state_dict, self), *args, **kwargs)

    def _replicate_for_data_parallel(self) -> nn.Module:
        # DataParallel calls it for each of its devices, in threads.
        raise ReplicationError(
            "DataParallel cannot copy a module that ddp_compile has replicated; start one process for each device, with"
            " torchrun, and train the module without DataParallel"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        plain = copy.deepcopy(_plain_shell(self), memo)
        memo[id(self)] = plain
        return plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The reduction of later protocols names the class of the object at hand, which is not the plain one.
        return _plain_shell(self).__reduce_ex__(1)


# Not a base class: its metaclass could conflict with that of a user's module.
Joinable.register(ReplicatedModule)


def original_class(replicated: Any) -> Any:
    """The user's class that a replicated one was made of."""
    return replicated._ddp_compile_original


def state_of(module: nn.Module) -> ReplicateState:
    """What a replicated module carries."""
    return module.__dict__[STATE]


def _plain_shell(module: nn.Module) -> nn.Module:
    """A module of the original class with the same attributes, parameters and submodules, but nothing of ours."""
    state_of(module).await_parameters()
    shell: nn.Module = object.__new__(original_class(type(module)))
    shell.__dict__.update({name: bound_to(shell, module, v) for name, v in module.__dict__.items() if name != STATE})
    return shell
