"""An optimizer that steps this rank's pieces of parameters and converts their states."""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp_compile.errors import ReplicationError, this_rank
from ddp_compile.runtime.sharded.bucket import Piece, ShardedBucket
from ddp_compile.runtime.sharded.checkpoint import PIECES
from ddp_compile.runtime.sharded.gradients import GradientShard
from ddp_compile.runtime.sharded.parameters import ShardedParameters
from ddp_compile.runtime.sharded.states import Entry, ShardedStates


class SteppedPieces:
    """Makes an optimizer step this rank's pieces, bucket by bucket, and return whole states from ``state_dict()``.

    It uses the optimizer's hooks, which every caller of ``optimizer.step()`` runs, such as a scheduler's wrapper or a
    GradScaler. The hook before a step steps all buckets but the last, without hooks. Users' hooks run before the first
    bucket is stepped, and after the last.

    Args:
        optimizer: Stays the same object.
        numbers: Those of the model's reduced parameters, by ``id``.
        names: Of all the model's parameters, by ``id``.
        is_stepped_by_bucket: Whether its ``step`` may be called once for each bucket.
    """

    buckets: Sequence[ShardedBucket] = ()  #: those with a parameter of it, in the order in which they are stepped
    pieces: Sequence[Piece] = ()  #: of its reduced parameters, in plan order

    def __init__(
        self, optimizer: Optimizer, numbers: Mapping[int, int], names: Mapping[int, str], is_stepped_by_bucket: bool
    ) -> None:
        self.name = type(optimizer).__name__
        self._optimizer = optimizer
        self._numbers = numbers
        self._is_stepped_by_bucket = is_stepped_by_bucket
        self._whole: list[list[Parameter]] = [list(group["params"]) for group in optimizer.param_groups]
        #: Numbers of its reduced parameters.
        self.indices = frozenset(numbers[id(p)] for group in self._whole for p in group if id(p) in numbers)
        self._names = names
        self._params: list[list[Parameter]] = []  # pieces in place of the whole parameters of each group
        # What the optimizer steps at once: buckets, and this rank's non-empty pieces of them in each group.
        self._rounds: list[tuple[Sequence[ShardedBucket], list[list[Parameter]]]] = []
        self._shown = self._whole  # the groups' parameters now, unless a user has edited them
        self._guarded: list[tuple[Parameter, GradientShard]] = []  # gradients that are plain tensors during a step
        self._non_finite: list[Tensor] = []  # a GradScaler's flags since the last backward
        self._states: ShardedStates | None = None  # once there are pieces
        self._loading: dict[str, Any] | None = None  # states that come before there are pieces
        self._loaded: dict[str, Any] | None = None  # those that torch has taken
        self._handles: list[Any] = []
        self._attributes: list[str] = []  # of the optimizer, that it has from here

    def attach(self, parameters: ShardedParameters) -> None:
        """Take over the optimizer's steps and states."""
        self._parameters = parameters
        self._gradients, self._transfers = parameters.gradients, parameters.transfers
        optimizer = self._optimizer
        never_traced = torch.compiler.disable(reason="what ddp_compile does around an optimizer's step")
        before = optimizer.register_step_pre_hook(never_traced(self._step_begins))
        after = optimizer.register_step_post_hook(never_traced(self._step_ends))
        _move(after, last=False)
        self._handles = [
            before,
            after,
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
            optimizer.register_state_dict_post_hook(self._whole_state_dict, prepend=True),
            optimizer.register_load_state_dict_pre_hook(self._state_dict_of_pieces),
            optimizer.register_load_state_dict_post_hook(self._note_what_was_loaded),
        ]

        def register_step_pre_hook(hook: Callable[..., Any]) -> Any:
            handle = type(optimizer).register_step_pre_hook(optimizer, hook)
            _move(before, last=True)
            return handle

        self._add_attributes(
            {
                "add_param_group": _refuse_group,
                "zero_grad": self._zero_grad,
                "register_step_pre_hook": register_step_pre_hook,
                "__deepcopy__": _refuse_copy,
                "__reduce_ex__": _refuse_copy,
            }
        )

    def _add_attributes(self, attributes: Mapping[str, Any]) -> None:
        vars(self._optimizer).update(attributes)
        self._attributes += attributes

    def shard(self, buckets: Sequence[ShardedBucket]) -> None:
        """Step the pieces of these buckets, all of the module in plan order; called once, after the first backward."""
        mine = [bucket for bucket in buckets if not self.indices.isdisjoint(bucket.param_indices)]
        self.buckets = tuple(reversed(mine))  # about the order in which a forward reads them
        self.pieces = [piece for bucket in mine for piece in bucket.pieces if piece.index in self.indices]
        piece_of = {piece.index: piece for piece in self.pieces}
        entries = [
            [Entry(self._names[id(p)], p, piece_of.get(self._numbers.get(id(p), -1))) for p in of_group]
            for of_group in self._whole
        ]
        self._params = [
            [each.parameter if each.piece is None else each.piece.stepped for each in of_group] for of_group in entries
        ]
        of_rounds = [[bucket] for bucket in self.buckets] if self._is_stepped_by_bucket else [self.buckets]
        self._rounds = [(of_round, self._stepped_in(of_round)) for of_round in of_rounds]
        device = buckets[0].flat.device
        self._empty_gradients = {
            dtype: GradientShard.of(torch.empty(0, dtype=dtype, device=device), self._unscaled)
            for dtype in {piece.stepped.dtype for piece in self.pieces}
        }
        self._states = ShardedStates(self._optimizer, entries, mine, self._transfers)
        self._states.cut()
        self._show(self._params)
        if self._loaded is not None:  # again, since torch has cast the states to the dtypes of whole parameters
            settings = zip(self._optimizer.param_groups, self._loaded["param_groups"], strict=True)
            groups = [{**group, "params": loaded["params"]} for group, loaded in settings]
            self._optimizer.load_state_dict({**self._loaded, "param_groups": groups})
        self._add_attributes({PIECES: self})

    def _stepped_in(self, buckets: Sequence[ShardedBucket]) -> list[list[Parameter]]:
        """What is stepped with some buckets; parameters that are not reduced are stepped with the last one.

        Empty pieces are not: Adagrad, up to torch 2.12, has states only of what it was made with.
        """
        stepped = {id(piece.stepped) for bucket in buckets for piece in bucket.own_pieces}
        if self.buckets[-1] in buckets:
            stepped |= {id(p) for of_group in self._whole for p in of_group if id(p) not in self._numbers}
        return [[p for p in of_group if id(p) in stepped] for of_group in self._params]

    def detach(self, together: bool) -> None:
        """Step whole parameters again; if not all ranks are there, refuse to step."""
        self._restore_after_error()
        for handle in self._handles:
            handle.remove()
        for name in self._attributes:
            vars(self._optimizer).pop(name, None)
        if not self.buckets:
            return
        self.buckets, self.pieces, self._rounds = (), (), []
        if edit := self.edit():  # an error would leave the model half unwrapped
            warnings.warn(f"{this_rank()}: an edit is undone: {edit}", stacklevel=2)
        self._put(self._whole)
        if together:
            assert self._states is not None
            self._states.join()
        else:
            vars(self._optimizer).update(step=_refuse_step, state_dict=_refuse_step)
        self._states = None

    # The groups.

    def _show(self, params: list[list[Parameter]]) -> None:
        self._refuse_edits()
        self._put(params)

    def _put(self, params: list[list[Parameter]]) -> None:
        self._shown = params
        for group, of_group in zip(self._optimizer.param_groups, params, strict=False):
            group["params"] = list(of_group)  # a list of its own: edits are found by comparing it with ours

    def _refuse_edits(self) -> None:
        if edit := self.edit():
            raise ReplicationError(f"{this_rank()}: {edit}")

    def edit(self) -> str:
        """An error message if a user has changed the groups' parameters; empty otherwise."""
        present = [[id(parameter) for parameter in group["params"]] for group in self._optimizer.param_groups]
        if present == [list(map(id, of_group)) for of_group in self._shown]:
            return ""
        return (
            'group["params"], or the number of groups, of a sharded optimizer has been changed, but its parameters'
            " were divided among the ranks when it was sharded. Put back what was there; to leave parameters out, set"
            " their .grad to None after a backward, or make the groups before shard_optimizer"
        )

    # A step.

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        args, kwargs = _with_loss(args, kwargs)
        if not self.buckets:
            self._gradients.refuse_step_before_sharding()
            self._loaded = None  # the states are no longer what was loaded
            return args, kwargs
        self._restore_after_error()
        self._refuse_edits()
        self._parameters.step_begins(self)
        try:
            self._unguard_gradients()
            self._step_all_but_the_last()
        except BaseException:
            self._restore_after_error()
            raise
        return args, kwargs

    def _step_all_but_the_last(self) -> None:
        step = type(self._optimizer).step
        step_without_hooks = getattr(step, "__wrapped__", step)
        *others, (_, last) = self._rounds
        for buckets, params in others:
            self._show(params)
            step_without_hooks(self._optimizer)
            self._are_stepped(buckets)
        self._show(last)

    def _step_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.buckets:
            self._show(self._params)
            self._guard_gradients()
            self._are_stepped(self._rounds[-1][0])
            self._parameters.step_ends(self)

    def _are_stepped(self, buckets: Sequence[ShardedBucket]) -> None:
        for bucket in buckets:
            self._parameters.bucket_is_stepped(bucket, self)

    def _unguard_gradients(self) -> None:
        """Give the step, which may be compiled, plain tensors: compilers do not know the class."""
        for piece in self.pieces:
            if isinstance(gradient := piece.stepped.grad, GradientShard) and piece.is_own:
                self._guarded.append((piece.stepped, gradient))
                piece.stepped.grad = gradient.plain

    def _guard_gradients(self) -> None:
        for parameter, gradient in self._guarded:
            if parameter.grad is gradient.plain:  # an optimizer may have set it to None
                parameter.grad = gradient
        self._guarded = []

    def _restore_after_error(self) -> None:
        """Show all pieces again if a step has raised, after which torch does not call our hook."""
        if self.buckets and self._shown is not self._params:
            self._put(self._params)
        self._guard_gradients()

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """``optimizer.zero_grad``: also what the model's parameters, which it does not step, have accumulated."""
        self._restore_after_error()
        type(self._optimizer).zero_grad(self._optimizer, set_to_none)
        self._gradients.zero(set_to_none, self.indices)

    # Gradients.

    def accumulate(self, shards: Mapping[int, Tensor], reduced: Collection[int]) -> None:
        """Add reduced gradients to those of the pieces.

        Args:
            shards: This rank's shard of the gradients of each parameter's bucket, by the parameter's number.
            reduced: Numbers of the parameters that have a gradient on any rank. Empty pieces get one as well, so that
                a GradScaler finds gradients on every rank, and asks all.
        """
        self._non_finite = []
        for piece in self.pieces:
            if piece.index in reduced and piece.is_own:
                piece.accumulate(shards[piece.index], self._unscaled)
            elif piece.index in reduced and piece.stepped.grad is None:
                piece.stepped.grad = self._empty_gradients[piece.stepped.dtype]

    def _unscaled(self, found_non_finite: Tensor) -> None:
        """A GradScaler has looked at gradients: either all ranks step by them or none does."""
        first = self._names[id(self._whole[0][0])]
        what = f"GradScaler's check whether gradients of {self.name} ({first}, ...) are finite"
        with self._transfers.on_every_rank(what):
            self._transfers.all_reduce(found_non_finite, dist.ReduceOp.MAX)
        self._non_finite.append(found_non_finite.clone())  # GradScaler.update() adds up in it

    def is_left_out(self) -> bool:
        """Whether a GradScaler skips this optimizer's step, as it does on all ranks; the host waits to know."""
        return any(bool(flag.item()) for flag in self._non_finite)

    # States.

    def _before_states(self) -> None:
        """Before states are read or written: raise in the middle of a step, or if groups have been edited."""
        self._restore_after_error()
        self._parameters.refuse_half_a_step()
        self._refuse_edits()
        if of_none := [key for key in self._optimizer.state if not isinstance(key, Tensor)]:
            raise ReplicationError(
                f"{this_rank()}: {self.name} has the state {of_none[0]!r}, which belongs to no parameter, so it is"
                " unknown how to combine the ranks' values; keep it in a parameter's state, in a group, or in an"
                " attribute"
            )

    def _before_state_dict(self, optimizer: Optimizer) -> None:
        self._before_states()
        if self.buckets:  # reading ``optimizer.state[parameter]`` of a whole parameter makes an empty entry
            for parameter in [key for key, state in optimizer.state.items() if not state]:
                del optimizer.state[parameter]

    def _whole_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        if self._states is None:
            return None
        self._parameters.await_parameters()
        with self._transfers.on_every_rank("optimizer.state_dict()"):
            return self._states.whole(state_dict)

    def sharded_state_dict(self) -> dict[str, Any]:
        """See `ddp_compile.runtime.sharded.checkpoint.sharded_optimizer_state_dict`."""
        assert self._states is not None
        self._before_states()
        with self._transfers.on_every_rank("sharded_optimizer_state_dict()"):
            return self._states.parts()

    def load_sharded_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See `ddp_compile.runtime.sharded.checkpoint.load_sharded_optimizer_state_dict`."""
        assert self._states is not None
        self._optimizer.load_state_dict(self._states.by_number(state_dict))

    def _state_dict_of_pieces(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        self._before_states()
        if self._states is None:
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
        "add_param_group was called on a sharded optimizer, whose parameters were divided among the ranks when it was"
        " sharded. Add the group first, with all parameters that will be trained, and then call shard_optimizer"
    )


def _refuse_copy(*_args: Any) -> NoReturn:
    raise ReplicationError(
        "a sharded optimizer cannot be copied or pickled, since its pieces belong to the model; call"
        " optimizer.state_dict() on every rank, and load that into another optimizer"
    )


def _refuse_step(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise ReplicationError(
        "the optimizer was sharded for a model that was unwrapped after an error, and each rank has only its part of"
        " the states; make a new optimizer, and load a checkpoint"
    )


def _with_loss(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the closure, if there is one; in the step's arguments replace it by one that returns its result."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()

    def known() -> Any:
        return loss

    return ((args[0], known, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": known})
