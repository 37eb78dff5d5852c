"""The optimizer's side of `ddp_compile.runtime.sharded.algorithm`: steps, and states, of pieces."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp_compile.errors import ReplicationError, this_rank
from ddp_compile.runtime.sharded.algorithm import ShardedAlgorithm
from ddp_compile.runtime.sharded.sharded_bucket import ShardedBucket
from ddp_compile.runtime.sharded.sharded_checkpoints import register, unregister
from ddp_compile.runtime.sharded.sharded_gradients import GradientShard
from ddp_compile.runtime.sharded.sharded_states import ShardedStates


class SteppedPieces:
    """Lets an optimizer step this rank's pieces, bucket by bucket, and speak of whole parameters in its state_dict.

    Hooks do it, so that whoever calls ``optimizer.step()``, a scheduler's wrapper or a GradScaler, comes by here. What
    comes before the hooked step are the steps of all buckets but the last, without their hooks. Hooks of others run
    outside of ours: before the first bucket is stepped, and behind the last.

    Args:
        optimizer: The optimizer.
        numbers: Of the reduced parameters, by ``id``.
        names: Of all parameters, by ``id``.
        is_stepped_by_bucket: Whether its step may be called for some of its parameters after others.
        objection: Says what keeps the parameters from being moved into flat buffers, if anything.
    """

    algorithm: ShardedAlgorithm

    def __init__(
        self,
        optimizer: Optimizer,
        numbers: Mapping[int, int],
        names: Mapping[int, str],
        is_stepped_by_bucket: bool,
        objection: Callable[[], str],
    ) -> None:
        self._optimizer = optimizer
        self._numbers = numbers
        self._is_stepped_by_bucket = is_stepped_by_bucket
        self._objection = objection
        self._whole: list[list[Parameter]] = [list(group["params"]) for group in optimizer.param_groups]
        self._fqns = [names[id(parameter)] for group in self._whole for parameter in group]
        self._names: list[list[str] | None] = [group.get("param_names") for group in optimizer.param_groups]
        self._buckets: Sequence[ShardedBucket] = ()  # in the order in which they are stepped
        self._params: list[list[Parameter]] = []  # of each group
        self._params_of_bucket: list[list[list[Parameter]]] = []
        self._shown = self._whole  # what the groups have now, unless a user has edited them
        self._guarded: list[tuple[Parameter, GradientShard]] = []  # gradients that are plain tensors during a step
        self._states: ShardedStates | None = None
        self._loading: dict[str, Any] | None = None  # states that come before there are pieces
        self._loaded: dict[str, Any] | None = None  # those that torch has taken
        self._handles: list[Any] = []

    # What is stepped.

    def attach(self) -> None:
        """See `ddp_compile.runtime.sharded.algorithm.StepsPieces`."""
        optimizer = self._optimizer
        never_traced = torch.compiler.disable(reason="what ddp_compile does around an optimizer's step")
        before = optimizer.register_step_pre_hook(never_traced(self._step_begins))
        after = optimizer.register_step_post_hook(never_traced(self._step_ends))
        _move(after, last=False)
        self._handles = [
            before,
            after,
            optimizer.register_state_dict_pre_hook(self._forget_what_was_read),
            optimizer.register_state_dict_post_hook(self._whole_state_dict, prepend=True),
            optimizer.register_load_state_dict_pre_hook(self._state_dict_of_pieces),
            optimizer.register_load_state_dict_post_hook(self._note_what_was_loaded),
        ]

        def register_step_pre_hook(hook: Callable[..., Any]) -> Any:
            handle = type(optimizer).register_step_pre_hook(optimizer, hook)
            _move(before, last=True)
            return handle

        vars(optimizer).update(
            add_param_group=_refuse_group,
            zero_grad=self._zero_grad,
            register_step_pre_hook=register_step_pre_hook,
            __deepcopy__=_refuse_copy,
            __reduce_ex__=_refuse_copy,
        )

    def before_sharding(self) -> None:
        """See `ddp_compile.runtime.sharded.algorithm.StepsPieces`."""
        with self.algorithm.on_every_rank("the first backward with a sharded optimizer"):
            of_all = self.algorithm.transfers.objects_of_all(self._edit() or self._objection())
        for rank, objection in enumerate(of_all):
            if objection:
                raise ReplicationError(f"rank {rank}: {objection}")

    def shard(self, buckets: Sequence[ShardedBucket]) -> None:
        """See `ddp_compile.runtime.sharded.algorithm.StepsPieces`."""
        self._buckets = tuple(reversed(buckets))  # about the order in which a forward reads them
        self._divide({piece.index: piece.stepped for bucket in buckets for piece in bucket.pieces})
        transfers = self.algorithm.transfers
        self._states = ShardedStates(self._optimizer, self._numbers, self._whole, buckets, transfers)
        self._states.cut(self._loaded)
        self._loaded = None
        self._show(self._params)
        register(self._optimizer, self)

    def _divide(self, pieces: Mapping[int, Parameter]) -> None:
        """Find out what each group has of each bucket; what is not sharded is stepped with the last one."""
        of_bucket = {index: place for place, bucket in enumerate(self._buckets) for index in bucket.param_indices}
        self._params, self._params_of_bucket = [], [[[] for _ in self._whole] for _ in self._buckets]
        for number, whole in enumerate(self._whole):
            stepped, places = [], []
            for place, parameter in enumerate(whole):
                index = self._numbers.get(id(parameter))
                mine = parameter if index is None else pieces.get(index)
                if mine is not None:
                    stepped.append(mine)
                    places.append(place)
                    bucket = len(self._buckets) - 1 if index is None else of_bucket[index]
                    self._params_of_bucket[bucket][number].append(mine)
            self._params.append(stepped)
            if (names := self._names[number]) is not None:
                self._optimizer.param_groups[number]["param_names"] = [names[place] for place in places]
        # Not to be stepped bucket by bucket: Adagrad, up to torch 2.12, has states of what it was made with alone.
        self._params[0] += [piece.stepped for piece in self.algorithm.witnesses]

    def detach(self, together: bool) -> None:
        """See `ddp_compile.runtime.sharded.algorithm.StepsPieces`."""
        self._restore_behind_error()
        for handle in self._handles:
            handle.remove()
        for name in ("add_param_group", "zero_grad", "register_step_pre_hook", "__deepcopy__", "__reduce_ex__"):
            vars(self._optimizer).pop(name, None)
        unregister(self._optimizer)
        if not self._buckets:
            return
        self._buckets = ()
        if edit := self._edit():  # no error, which would leave the model half of what it was
            warnings.warn(f"{this_rank()}: this is undone: {edit}", stacklevel=2)
        self._put(self._whole)
        for group, names in zip(self._optimizer.param_groups, self._names, strict=False):
            if names is not None:
                group["param_names"] = names
        if together:
            assert self._states is not None
            self._states.join()
        else:
            vars(self._optimizer).update(step=_refuse_step, state_dict=_refuse_step)

    def _show(self, params: list[list[Parameter]]) -> None:
        self._refuse_edits()
        self._put(params)

    def _put(self, params: list[list[Parameter]]) -> None:
        self._shown = params
        for group, of_group in zip(self._optimizer.param_groups, params, strict=False):
            group["params"] = list(of_group)  # what users do to the list is compared with ours

    def _refuse_edits(self) -> None:
        if edit := self._edit():
            raise ReplicationError(f"{this_rank()}: {edit}")

    def _edit(self) -> str:
        """What a user has made of the groups' parameters, which nobody could tell from the pieces; empty if nothing."""
        present = [[id(parameter) for parameter in group["params"]] for group in self._optimizer.param_groups]
        if present == [list(map(id, of_group)) for of_group in self._shown]:
            return ""
        return (
            'group["params"], or the number of groups, of a sharded optimizer has been changed, where the ranks have'
            " parts of the parameters that it was sharded with. Put back what was there; to leave parameters out, set"
            " their .grad to None behind a backward, or make the groups before shard_optimizer"
        )

    # A step.

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        args, kwargs = _with_loss(args, kwargs)
        if not self._buckets:
            self.algorithm.refuse_step_before_sharding()
            return args, kwargs
        self._restore_behind_error()
        self._refuse_edits()
        self.algorithm.step_begins()
        try:
            self._unguard_gradients()
            if self._is_stepped_by_bucket:
                self._step_all_but_the_last()
        except BaseException:
            self._restore_behind_error()
            raise
        return args, kwargs

    def _step_all_but_the_last(self) -> None:
        step = type(self._optimizer).step
        step_without_hooks = getattr(step, "__wrapped__", step)
        for bucket, params in zip(self._buckets[:-1], self._params_of_bucket, strict=False):
            self._show(params)
            step_without_hooks(self._optimizer)
            self.algorithm.bucket_is_stepped(bucket)
        self._show(self._params_of_bucket[-1])

    def _step_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._buckets:
            self._show(self._params)
            self._guard_gradients()
            for bucket in self._buckets[-1:] if self._is_stepped_by_bucket else self._buckets:
                self.algorithm.bucket_is_stepped(bucket)
            self.algorithm.step_ends()

    def _unguard_gradients(self) -> None:
        """Nobody but the step asks now, which may be compiled; compilers do not know the class."""
        for parameter in (parameter for of_group in self._params for parameter in of_group):
            if isinstance(gradient := parameter.grad, GradientShard):
                self._guarded.append((parameter, gradient))
                parameter.grad = gradient.plain

    def _guard_gradients(self) -> None:
        for parameter, gradient in self._guarded:
            if parameter.grad is gradient.plain:  # an optimizer may have set it to None
                parameter.grad = gradient
        self._guarded = []

    def _restore_behind_error(self) -> None:
        """A step that has raised, where hooks behind it are not called, has left what it was to see."""
        if self._buckets and self._shown is not self._params:
            self._put(self._params)
        self._guard_gradients()

    def _refuse_states_of_now(self) -> None:
        """Before states are read or written: raise where they are not those of the groups behind a step."""
        self._restore_behind_error()
        self.algorithm.gathered.refuse_half_a_step()
        self._refuse_edits()

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """``optimizer.zero_grad``: also of what the model's parameters have accumulated, which it does not step."""
        self._restore_behind_error()
        type(self._optimizer).zero_grad(self._optimizer, set_to_none)
        self.algorithm.zero_gradients(set_to_none)

    # Checkpoints.

    def _forget_what_was_read(self, optimizer: Optimizer) -> None:
        """Reading ``optimizer.state[parameter]`` of a parameter that is in no group makes an empty entry."""
        self._refuse_states_of_now()
        if self._buckets:
            for parameter in [key for key, state in optimizer.state.items() if not state]:
                del optimizer.state[parameter]

    def _whole_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        if self._states is None or not self._buckets:
            return None
        self.algorithm.await_parameters()
        with self.algorithm.on_every_rank("optimizer.state_dict()"):
            return self._states.whole(state_dict, self._names)

    def sharded_state_dict(self) -> dict[str, Any]:
        """See `ddp_compile.runtime.sharded.sharded_checkpoints.sharded_optimizer_state_dict`."""
        assert self._states is not None
        self._refuse_states_of_now()
        with self.algorithm.on_every_rank("sharded_optimizer_state_dict()"):
            return self._states.parts(self._fqns)

    def load_sharded_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See `ddp_compile.runtime.sharded.sharded_checkpoints.load_sharded_optimizer_state_dict`."""
        assert self._states is not None
        self._refuse_states_of_now()
        self._states.load_parts(state_dict, self._fqns)

    def _state_dict_of_pieces(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        self._refuse_states_of_now()
        if self._states is None or not self._buckets:
            self._loading = state_dict  # torch casts states to the dtype of whole parameters; pieces may have another
            return None
        return self._states.of_pieces(state_dict)

    def _note_what_was_loaded(self, optimizer: Optimizer) -> None:
        self._loaded, self._loading = self._loading, None


def _move(handle: Any, last: bool) -> None:
    """Let a hook of an optimizer run after, or before, all others of its kind."""
    hooks = handle.hooks_dict_ref()
    if hooks is not None:
        hooks.move_to_end(handle.id, last=last)


def _refuse_group(_group: Any) -> NoReturn:
    raise ReplicationError(
        "add_param_group of an optimizer that is sharded: the ranks have parts of the parameters that it was sharded"
        " with. Add the group first, with all parameters that will be trained, and then call shard_optimizer"
    )


def _refuse_copy(*_args: Any) -> NoReturn:
    raise ReplicationError(
        "an optimizer that is sharded cannot be copied or pickled, as its pieces belong to the model; save"
        " optimizer.state_dict(), on every rank, and load it into another one"
    )


def _refuse_step(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise ReplicationError(
        "the optimizer was sharded for a model that has been unwrapped behind an error, and each rank has the states of"
        " its part alone; make a new optimizer, and load a checkpoint"
    )


def _with_loss(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a step with its closure, if there is one, called and replaced by what it has returned."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()

    def known() -> Any:
        return loss

    return ((args[0], known, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": known})
