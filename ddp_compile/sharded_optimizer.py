"""``shard_optimizer``: each rank keeps the optimizer states of its part of the parameters and steps that part."""

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Never, TypeVar

import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp_compile import torch_internals
from ddp_compile.errors import (
    RanksDifferError,
    ReplicationError,
    number_of,
    on_ranks,
    shorten_names,
    this_rank,
    with_article,
)
from ddp_compile.features.compatibility import Feature
from ddp_compile.module.mixin import ReplicatedModule, state_of
from ddp_compile.runtime.buckets.comm_algorithm import AlgorithmConfig
from ddp_compile.runtime.comm.collectives import ranks_unlike_rank_0
from ddp_compile.runtime.sharded.algorithm import ShardedAlgorithm
from ddp_compile.runtime.sharded.gradients import SHARED_MEMORY
from ddp_compile.runtime.sharded.optimizer import SteppedPieces
from ddp_compile.runtime.sharded.owners import Owners, choose_owners
from ddp_compile.runtime.sharded.parameters import ShardedParameters

OptimizersT = TypeVar("OptimizersT", bound=Optimizer | Sequence[Optimizer])

# Their effect on an element depends on that element's values alone, and on settings.
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
# Their effect on a parameter depends on all of it, and on no other parameter.
_WHOLE = (optim.Adafactor, optim.Muon)


_REMOVED = {
    "placement": "write elementwise=False instead of placement='whole'",
    "cost": "owners are chosen by Muon's operations or by elements, so leave it out",
    "allow_uneven": "uneven owners are a warning, so leave it out",
}


def shard_optimizer(
    optimizer: OptimizersT,
    model: nn.Module,
    *,
    elementwise: bool | None = None,
    master_weights: bool = False,
    overlap: bool = True,
    **removed: Never,
) -> OptimizersT:
    """Let each rank keep the states of its part of the parameters and step only that part.

    Backwards reduce each bucket to the ranks that step it, ``optimizer.step()`` steps this rank's part, and the other
    ranks' parts arrive during the next forward; as many bytes are sent as by an all-reduce. The training is the same,
    up to rounding. The optimizer stays the same object, with its groups, settings and schedulers. After the first
    backward its groups hold this rank's part of the parameters, and reading ``.grad`` of the model's parameters raises:
    clip with ``model.clip_grad_norm_()``, read with ``model.full_gradients()``. Call it on every rank, between two
    steps, before or after schedulers are made::

        model = ddp_compile(model)
        optimizer = shard_optimizer(torch.optim.AdamW(model.parameters()), model)

    or, with several optimizers, each of which steps once after each backward::

        muon, adamw = shard_optimizer([torch.optim.Muon(matrices), torch.optim.AdamW(others)], model)

    Optimizers that work element by element get one-dimensional pieces of parameters. The others get whole parameters:
    each has one owner, the rank that steps it. Owners are chosen so that the ranks have about the same work: Muon's
    floating-point operations, otherwise elements. If one rank still has much more than the others, a warning says so.

    ``optimizer.state_dict()``, called on every rank, returns whole states on the CPU, in the format of an optimizer
    that is not sharded; ``load_state_dict()`` takes that format, from any number of ranks. ``model.unwrap()`` and
    ``model.set_comm_algorithm()`` undo the sharding.

    Args:
        optimizer: One, or a list of several, which together hold every parameter that the model reduces, each in one of
            them. They may hold other parameters of the model, such as frozen ones. Known are torch's optimizers that
            work element by element (SGD, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop, Adagrad, Adadelta, ASGD),
            and Muon and Adafactor, which get whole parameters.
        model: Returned by ``ddp_compile``, with the default algorithm.
        elementwise: A promise for other optimizers. True: their effect on an element depends only on that element's
            parameter, gradient and states, and their states have the parameter's shape, or are numbers. False: they
            need whole parameters, and their effect on one depends only on it, its gradient and its states.
        master_weights: Step parameters of bfloat16 and float16 in float32, by a copy of this rank's part.
        overlap: Let parameters arrive after ``step()`` has returned. A few kinds of reads are not noticed then and need
            ``model.await_parameters()`` first: docs/sharded_optimizer.md lists them. If False, the last optimizer's
            step returns when all parameters are complete.
        **removed: Refused. For an argument that has gone, the error says what to write.

    Returns:
        ``optimizer`` itself, so the list if there are several.

    Raises:
        TypeError: Not an optimizer, or an unknown argument.
        ValueError: No optimizer.
        ReplicationError: The optimizer or the model is not of the kind above.
        RanksDifferError: On every rank, if the ranks' optimizers have other settings or parameters.
    """
    for name in removed:
        raise TypeError(f"shard_optimizer() does not take {name}=; {_REMOVED.get(name, 'leave it out')}")
    optimizers: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    _refuse_arguments(optimizers)
    if not isinstance(model, ReplicatedModule):
        raise ReplicationError(
            f"shard_optimizer: model is {with_article(type(model).__name__)} that is not replicated; call"
            " ddp_compile(model) first, and pass what it returns"
        )
    state = state_of(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    reduced = {id(parameter): i for i, parameter in enumerate(state.reducer.parameters)}
    of_class: dict[type[Optimizer], list[Optimizer]] = {}  # those that step whole parameters
    owners: Sequence[Owners] = ()
    refusal: ReplicationError | None = None
    try:
        for each in optimizers:
            _refuse_optimizer(each, elementwise)
        _refuse_model(model, state)
        _refuse_parameters(optimizers, names, state.reducer.parameters)
        for each in optimizers:
            if type(each) in _WHOLE or (type(each) not in _ELEMENTWISE and not elementwise):
                of_class.setdefault(type(each), []).append(each)
        # Jointly for those of one class, whose costs have the same unit.
        owners = [choose_owners(of_one, reduced, state.process_group.size()) for of_one in of_class.values()]
        settings = [(type(each).__name__, _settings_of(each, names)) for each in optimizers]
        described = f"{master_weights} {overlap} {owners} {settings}"
    except ReplicationError as error:  # not raised yet: the other ranks would wait for this one
        refusal, described = error, "refused"
    with state.monitor.calling("shard_optimizer"):
        different = ranks_unlike_rank_0(described.encode(), state.process_group, state.device)
        if refusal is not None:
            raise refusal
        if different:
            raise RanksDifferError(
                f"{this_rank()}: {on_ranks(different)}, the optimizers to be sharded have other settings or order of"
                " parameters than on rank 0, or are refused, or shard_optimizer was not called; make the same call on"
                " every rank"
            )
    for of_optimizer in owners:
        of_optimizer.warn_if_uneven(state.process_group)
    alive = weakref.ref(model)  # the model has the optimizer's pieces: a cycle would live until a collection
    parameters = ShardedParameters(
        state.reduced,
        [SteppedPieces(each, reduced, names, type(each) in (*_ELEMENTWISE, *_WHOLE)) for each in optimizers],
        owners,
        master_weights,
        overlap,
        lambda: _objection_to_moving(alive()),
    )
    state.set_comm_algorithm(_Sharded(parameters))
    return optimizer


def _objection_to_moving(model: nn.Module | None) -> str:
    """Name the trained parameters whose memory is shared, which a move into flat buffers would undo.

    The text is empty if none is, or if the model is gone. Plain attributes of modules are not checked:
    ``torch.nn.utils.spectral_norm`` has one on the memory of a parameter, and renews it in each forward.
    """
    if model is None:
        return ""
    state = state_of(model)
    with state.naming_parameters():
        shared = _on_one_storage(model, state.reduced)
    if shared:
        return (
            f"parameters share a storage, which sharding would undo: {'; '.join(map(', '.join, shared))}."
            " Register one Parameter in both places, or give each memory of its own: p.data = p.data.clone()"
        )
    if between_processes := [name for name, p in state.reduced.items() if p.device.type == "cpu" and p.is_shared()]:
        return f"parameters {shorten_names(between_processes)} lie in {SHARED_MEMORY}"
    return ""


def _on_one_storage(module: nn.Module, trained: Mapping[str, Parameter]) -> list[list[str]]:
    """Names of the tensors that share a storage with a trained parameter, for each such storage."""
    of_storage: dict[int, list[str]] = {}
    for name, parameter in trained.items():
        if parameter.numel() and (key := torch_internals.storage_key(parameter)) is not None:
            of_storage.setdefault(key, []).append(name)
    known = set(map(id, trained.values()))
    for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in tensors:
            if id(tensor) not in known and (key := torch_internals.storage_key(tensor)) in of_storage:
                of_storage[key].append(f"the {kind} {name}, which is not trained")
    return [names for names in of_storage.values() if len(names) > 1]


@dataclass(frozen=True, slots=True)
class _Sharded(AlgorithmConfig):
    parameters: ShardedParameters

    def build(self, process_group: dist.ProcessGroup) -> ShardedAlgorithm:
        return ShardedAlgorithm(process_group, self.parameters)


def _settings_of(optimizer: Optimizer, names: Mapping[int, str]) -> str:
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        | {"params": [names[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    # ``repr`` shows only four digits of a tensor.
    return repr(torch_internals.map_leaves(Tensor, lambda tensor: (tensor.dtype, tensor.tolist()), groups))


def _refuse_arguments(optimizers: Sequence[object]) -> None:
    for each in optimizers:
        if not isinstance(each, Optimizer):
            raise TypeError(f"optimizer={each!r} is not a torch.optim.Optimizer; make one of model.parameters()")
    if not optimizers:
        raise ValueError("optimizer=[] has no optimizer; pass one, or several in a list")


def _refuse_optimizer(optimizer: Optimizer, elementwise: bool | None) -> None:
    name = type(optimizer).__name__
    if "add_param_group" in vars(optimizer):
        raise ReplicationError(f"{this_rank()}: this {name} is sharded already; shard it once, for one model")
    if isinstance(optimizer, optim.LBFGS):
        raise ReplicationError(
            f"{this_rank()}: {name} cannot be sharded, since a step looks at all parameters at once; do not shard it"
        )
    for group in optimizer.param_groups if isinstance(optimizer, optim.Adafactor) else ():
        if group["eps"][0] is None and len({parameter.dtype for parameter in group["params"]}) > 1:
            raise ReplicationError(
                f"{this_rank()}: {name} with eps={group['eps']} derives a group's first epsilon from the dtype of the"
                " group's first parameter (torch 2.13), which differs between the ranks if a group has parameters of"
                " several dtypes; pass a number, eps=(1e-7, 1e-3), or make a group for each dtype"
            )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ReplicationError(f"{this_rank()}: {name} with differentiable=True cannot be sharded; leave that out")
    if type(optimizer) not in (*_ELEMENTWISE, *_WHOLE) and elementwise is None:
        raise ReplicationError(
            f"{this_rank()}: whether {type(optimizer).__module__}.{name} works element by element is unknown; pass"
            " elementwise=True if its effect on an element depends only on that element's parameter, gradient and"
            " states, or elementwise=False if it needs whole parameters and treats them one by one; otherwise do not"
            " shard it"
        )


def _refuse_model(model: nn.Module, state: Any) -> None:
    state.refuse_if_excluded(Feature.SHARDED_OPTIMIZER, "a sharded optimizer")
    if state.config.check_replicas == "repair":
        raise ReplicationError(
            f"{this_rank()}: shard_optimizer() cannot be used with check_replicas='repair': between the check and the"
            " repair a step gathers each rank's part, also that of a rank with wrong parameters. Pass 'raise'"
        )
    if objection := _objection_to_moving(model):
        raise ReplicationError(f"{this_rank()}: {objection}")
    if present := sum(parameter.grad is not None for parameter in state.reducer.parameters):
        raise ReplicationError(
            f"{this_rank()}: shard_optimizer was called while {number_of(present, 'parameter')} had a gradient; call it"
            " between two steps, after zero_grad()"
        )


def _refuse_parameters(optimizers: Sequence[Optimizer], names: Mapping[int, str], reduced: Sequence[Parameter]) -> None:
    number_of_optimizers = Counter(
        id(parameter) for each in optimizers for group in each.param_groups for parameter in group["params"]
    )
    if foreign := len(number_of_optimizers.keys() - names.keys()):
        raise ReplicationError(
            f"{this_rank()}: the optimizer has {number_of(foreign, 'parameter')} outside of the model; make"
            " optimizers of model.parameters(), and another one for the rest"
        )
    if twice := [names[parameter] for parameter, count in number_of_optimizers.items() if count > 1]:
        raise ReplicationError(
            f"{this_rank()}: in more than one optimizer: {shorten_names(twice)}; leave each parameter in one"
        )
    if missing := [names[id(parameter)] for parameter in reduced if id(parameter) not in number_of_optimizers]:
        raise ReplicationError(
            f"{this_rank()}: missing in the optimizer, although the model reduces their gradients:"
            f" {shorten_names(missing)}. Put all parameters into one optimizer, or pass all optimizers as a list,"
            " shard_optimizer([first, second], model); or freeze the others before ddp_compile, or name them in"
            " parameters_to_ignore"
        )
    of_model = set(map(id, reduced))
    for each in optimizers:
        if of_model.isdisjoint(id(parameter) for group in each.param_groups for parameter in group["params"]):
            raise ReplicationError(
                f"{this_rank()}: {type(each).__name__} has no parameter that the model reduces; leave it out"
            )


__all__ = ["shard_optimizer"]
