"""``shard_optimizer``: each rank keeps the states of its part of the parameters, and steps that part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp_compile.errors import RanksDifferError, ReplicationError
from ddp_compile.module import ReplicatedModule, state_of
from ddp_compile.plan.spec import shorten_names
from ddp_compile.runtime.algorithms.all_reduce import AllReduce
from ddp_compile.runtime.algorithms.base import AlgorithmConfig
from ddp_compile.runtime.algorithms.sharded import ShardedAlgorithm
from ddp_compile.runtime.collectives import ranks_unlike_rank_0
from ddp_compile.runtime.rank_names import format_ranks
from ddp_compile.runtime.sharding.sharded_bucket import ShardedBucket
from ddp_compile.sharded_checkpoints import register, unregister
from ddp_compile.sharded_states import ShardedStates

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

# What each of them does to an element depends on that element's values alone, and on settings.
_ELEMENTWISE = (
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)
_BY_NAME = {
    "Adafactor": "looks at rows and columns of whole matrices",
    "LBFGS": "looks at all parameters at once, and calls its closure several times in a step",
    "Muon": "looks at whole matrices",
    "SparseAdam": "takes sparse gradients, which cannot be cut into shards",
}


def shard_optimizer(
    optimizer: OptimizerT, model: nn.Module, *, elementwise: bool = False, master_weights: bool = False
) -> OptimizerT:
    """Let each rank keep the states of its part of the parameters and step that part alone.

    Backwards reduce each bucket to one shard for each rank, ``optimizer.step()`` steps this rank's, and the others'
    come behind the next forward, while it computes; as many bytes travel as with an all-reduce. It is the same
    training. The optimizer stays the same object, with its groups, settings and schedulers. From the end of the first
    backward on its groups hold pieces of parameters, one-dimensional, and ``.grad`` of the model's parameters raises
    when it is read: clip with ``model.clip_grad_norm_()``, look with ``model.full_gradients()``. Call it on every rank,
    between two steps, before or after schedulers are made::

        model = ddp_compile(model)
        optimizer = ddp_compile.shard_optimizer(torch.optim.AdamW(model.parameters()), model)

    ``optimizer.state_dict()``, on every rank at once, has the format of an optimizer that is not sharded, on the CPU;
    ``load_state_dict()`` takes it, from any number of ranks. ``model.unwrap()`` and ``model.set_comm_algorithm()`` undo
    it.

    Args:
        optimizer: Over all parameters that the model reduces, and others of the model's, such as frozen ones, at most.
            Of torch's those that work element by element: SGD, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop,
            Adagrad, Adadelta, ASGD.
        model: What ``ddp_compile`` has returned, with the default algorithm.
        elementwise: Promise for another optimizer that what it does to an element depends on nothing but that element's
            parameter, gradient and states, which have the parameter's shape, or are numbers.
        master_weights: Step parameters of bfloat16 and float16 in float32, by a copy of this rank's part.

    Returns:
        ``optimizer`` itself.

    Raises:
        TypeError: Not an optimizer.
        ReplicationError: The optimizer or the model is not of the kind above; says what to do.
        RanksDifferError: On every rank, if the ranks' optimizers have other settings or parameters.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer={optimizer!r} is not a torch.optim.Optimizer; make one of model.parameters()")
    if not isinstance(model, ReplicatedModule):
        raise ReplicationError(
            f"shard_optimizer: model is a {type(model).__name__} that is not replicated; call ddp_compile(model) first,"
            " and pass what it returns"
        )
    state = state_of(model)
    rank = state.process_group.rank()
    _refuse_optimizer(optimizer, elementwise, rank)
    _refuse_model(state, rank)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    reduced = {id(parameter): i for i, parameter in enumerate(state.reducer.parameters)}
    _refuse_parameters(optimizer, names, state.reducer.parameters, rank)
    described = f"{type(optimizer).__name__} {master_weights} {_settings_of(optimizer, names)}".encode()
    if different := ranks_unlike_rank_0(described, state.process_group, state.device):
        raise RanksDifferError(
            f"rank {rank}: the optimizers that are to be sharded have other settings, or parameters in another order,"
            f" on ranks {format_ranks(different)} than on rank 0; make them alike on every rank"
        )
    sharded = _ShardedOptimizer(optimizer, reduced, names, is_stepped_by_bucket=type(optimizer) in _ELEMENTWISE)
    names_of_reduced = [gradient.fqn for gradient in state.builder.gradients]
    state.algorithms.set_algorithm(_Sharded(sharded, names_of_reduced, master_weights), None)
    return optimizer


class _Sharded(AlgorithmConfig):
    """What `AlgorithmSwitch` builds the algorithm of."""

    def __init__(self, optimizer: _ShardedOptimizer, names: Sequence[str], master_weights: bool) -> None:
        self._optimizer = optimizer
        self._names = names
        self._master_weights = master_weights

    def build(self, process_group: dist.ProcessGroup) -> ShardedAlgorithm:
        """See `AlgorithmConfig.build`."""
        algorithm = ShardedAlgorithm(process_group, self._optimizer, self._names, self._master_weights)
        self._optimizer.algorithm = algorithm
        return algorithm


class _ShardedOptimizer:
    """Lets an optimizer step this rank's pieces, bucket by bucket, and speak of whole parameters in its state_dict.

    Hooks do it, so that whoever calls ``optimizer.step()``, a scheduler's wrapper or a GradScaler, comes by here. What
    comes before the hooked step are the steps of all buckets but the last, without their hooks.

    Args:
        optimizer: The optimizer.
        numbers: Of the reduced parameters, by ``id``.
        names: Of all parameters, by ``id``.
        is_stepped_by_bucket: Whether its step may be called for some of its parameters after others.
    """

    algorithm: ShardedAlgorithm

    def __init__(
        self, optimizer: Optimizer, numbers: Mapping[int, int], names: Mapping[int, str], is_stepped_by_bucket: bool
    ) -> None:
        self._optimizer = optimizer
        self._numbers = numbers
        self._is_stepped_by_bucket = is_stepped_by_bucket
        self._whole: list[list[Parameter]] = [list(group["params"]) for group in optimizer.param_groups]
        self._fqns = [names[id(parameter)] for group in self._whole for parameter in group]
        self._names: list[list[str] | None] = [group.get("param_names") for group in optimizer.param_groups]
        self._buckets: Sequence[ShardedBucket] = ()  # in the order in which they are stepped
        self._params: list[list[Parameter]] = []  # of each group
        self._params_of_bucket: list[list[list[Parameter]]] = []
        self._states: ShardedStates | None = None
        never_traced = torch.compiler.disable(reason="what ddp_compile does around an optimizer's step")
        self._handles = [
            optimizer.register_step_pre_hook(never_traced(self._step_begins)),
            optimizer.register_step_post_hook(never_traced(self._step_ends)),
            optimizer.register_state_dict_post_hook(self._whole_state_dict),
            optimizer.register_load_state_dict_pre_hook(self._state_dict_of_pieces),
        ]
        vars(optimizer)["add_param_group"] = _refuse_group

    # What is stepped.

    def shard(self, buckets: Sequence[ShardedBucket]) -> None:
        """See `ddp_compile.runtime.algorithms.sharded.StepsPieces`."""
        self._buckets = tuple(reversed(buckets))  # about the order in which a forward reads them
        pieces = {piece.index: piece for bucket in buckets for piece in bucket.pieces}
        transfers = self.algorithm.transfers
        self._states = ShardedStates(self._optimizer, self._numbers, self._whole, buckets, transfers)
        self._states.cut()
        of_bucket = {index: place for place, bucket in enumerate(self._buckets) for index in bucket.param_indices}
        everyone = range(len(self._buckets))
        self._params, self._params_of_bucket = [], [[[] for _ in self._whole] for _ in everyone]
        for number, whole in enumerate(self._whole):
            stepped, names = [], []
            for place, parameter in enumerate(whole):
                index = self._numbers.get(id(parameter))
                mine = parameter if index is None else pieces[index].stepped if index in pieces else None
                if mine is not None:
                    stepped.append(mine)
                    names.append(place)
                    bucket = len(self._buckets) - 1 if index is None else of_bucket[index]
                    self._params_of_bucket[bucket][number].append(mine)
            self._params.append(stepped)
            group = self._optimizer.param_groups[number]
            if (all_names := self._names[number]) is not None:
                group["param_names"] = [all_names[place] for place in names]
        witnesses = [piece.stepped for piece in self.algorithm.witnesses]
        self._params[0] += witnesses
        self._params_of_bucket[-1][0] += witnesses
        self._show(self._params)
        register(self._optimizer, self)

    def unshard(self) -> None:
        """See `ddp_compile.runtime.algorithms.sharded.StepsPieces`."""
        assert self._states is not None
        self._show(self._whole)
        for group, names in zip(self._optimizer.param_groups, self._names, strict=True):
            if names is not None:
                group["param_names"] = names
        self._states.join()
        for handle in self._handles:
            handle.remove()
        del vars(self._optimizer)["add_param_group"]
        unregister(self._optimizer)
        self._buckets = ()

    def _show(self, params: Sequence[list[Parameter]]) -> None:
        for group, of_group in zip(self._optimizer.param_groups, params, strict=True):
            group["params"] = of_group

    # A step.

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        args, kwargs = _with_loss(args, kwargs)
        if not self._buckets:
            self.algorithm.refuse_step_before_sharding()
            return args, kwargs
        self._show(self._params)  # a step before may have raised
        self.algorithm.step_begins()
        if self._is_stepped_by_bucket:
            step = type(optimizer).step
            step_without_hooks = getattr(step, "__wrapped__", step)
            for bucket, params in zip(self._buckets[:-1], self._params_of_bucket, strict=False):
                self._show(params)
                step_without_hooks(optimizer)
                self.algorithm.bucket_is_stepped(bucket)
            self._show(self._params_of_bucket[-1])
        return args, kwargs

    def _step_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._buckets:
            self._show(self._params)
            for bucket in self._buckets[-1:] if self._is_stepped_by_bucket else self._buckets:
                self.algorithm.bucket_is_stepped(bucket)
            self.algorithm.step_ends()

    # Checkpoints.

    def _whole_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        if self._states is None or not self._buckets:
            return None
        self.algorithm.await_parameters()
        return self._states.whole(state_dict, self._names)

    def sharded_state_dict(self) -> dict[str, Any]:
        """See `ddp_compile.sharded_checkpoints.sharded_optimizer_state_dict`."""
        assert self._states is not None
        return self._states.parts(self._fqns)

    def load_sharded_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See `ddp_compile.sharded_checkpoints.load_sharded_optimizer_state_dict`."""
        assert self._states is not None
        self._states.load_parts(state_dict, self._fqns)

    def _state_dict_of_pieces(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        if self._states is None or not self._buckets:
            return None
        return self._states.of_pieces(state_dict)


def _refuse_group(_group: Any) -> None:
    raise ReplicationError(
        "add_param_group of an optimizer that is sharded: the ranks have parts of the parameters that it was sharded"
        " with. Add the group first, with all parameters that will be trained, and then call shard_optimizer"
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


def _settings_of(optimizer: Optimizer, names: Mapping[int, str]) -> str:
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        | {"params": [names[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return repr(groups)


def _refuse_optimizer(optimizer: Optimizer, elementwise: bool, rank: int) -> None:
    name = type(optimizer).__name__
    if "add_param_group" in vars(optimizer):
        raise ReplicationError(f"rank {rank}: this {name} is sharded already; shard it once, for one model")
    if name in _BY_NAME:
        raise ReplicationError(
            f"rank {rank}: {name} cannot be sharded by elements, since it {_BY_NAME[name]}; train with it as it is, or"
            " shard an optimizer that works element by element, such as AdamW"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ReplicationError(f"rank {rank}: a {name} with differentiable=True cannot be sharded; leave that out")
    if type(optimizer) not in _ELEMENTWISE and not elementwise:
        raise ReplicationError(
            f"rank {rank}: whether {type(optimizer).__module__}.{name} works element by element is not known; pass"
            " elementwise=True if what it does to an element depends on nothing but that element's parameter, gradient"
            " and states, or train with it as it is"
        )


def _refuse_model(state: Any, rank: int) -> None:
    algorithm = state.reducer.algorithm
    if isinstance(algorithm, ShardedAlgorithm):
        raise ReplicationError(
            f"rank {rank}: the model has a sharded optimizer already, which steps all of its parameters; put these"
            " into groups of one optimizer"
        )
    conflicts = [] if isinstance(algorithm, AllReduce) else [f"the {algorithm.name}"]
    if state.config.delayed.named:
        conflicts.append("delay_all_reduce_named_params")
    if state.sharded.describe():
        conflicts.append("submodules of fully_shard")
    if state.optimizers.are_registered:
        conflicts.append("optimizer steps inside backward()")
    if conflicts:
        raise ReplicationError(
            f"rank {rank}: an optimizer cannot be sharded together with {', '.join(conflicts)}; leave out one or the"
            " other"
        )
    if present := [parameter for parameter in state.reducer.parameters if parameter.grad is not None]:
        raise ReplicationError(
            f"rank {rank}: {len(present)} parameters have gradients, which are no shards; call shard_optimizer between"
            " two steps, behind zero_grad()"
        )


def _refuse_parameters(optimizer: Optimizer, names: Mapping[int, str], reduced: Sequence[Parameter], rank: int) -> None:
    present = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if foreign := len(present - names.keys()):
        raise ReplicationError(
            f"rank {rank}: the optimizer has {foreign} parameters that the model does not have; make one optimizer of"
            " model.parameters(), and another one for the rest"
        )
    if missing := [names[id(parameter)] for parameter in reduced if id(parameter) not in present]:
        raise ReplicationError(
            f"rank {rank}: the model reduces parameters that the optimizer does not have: {shorten_names(missing)}. Put"
            " all of them into one optimizer, freeze the others before ddp_compile, or name them in"
            " parameters_to_ignore"
        )


__all__ = ["shard_optimizer"]
