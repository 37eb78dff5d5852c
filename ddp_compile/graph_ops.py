"""The operators by which compiled code calls the reducer.

Note [What bucket_ready tells compilers]
The operator is declared to write to the gradients, but never does. The declaration tells a compiler all that is needed:
the operator has an effect and must not be removed, its arguments must be complete when it runs, and the graph's outputs
are still those tensors, so no copy is made. A functional operator would have to return new tensors, since a result must
not share memory with an undeclared argument. And inductor removes an operator that neither writes nor returns anything.

A scheduler may delay an operator that only reads, and the computation of its arguments, to the very end. Inductor does,
since a gradient that only the output needs takes memory once it is computed. So the operator is also declared to write
to ``held``, a value that the rest of the backward depends on and so comes after it.

``move_bucket`` is for gradients that nothing will be added to, as ``static_graph`` promises. The graph returns views of
the reducer's flat buffer instead, and the gradients themselves can be freed. Its results share no memory with its
arguments: if the bucket cannot be launched yet, they are copies. Inductor accepts no operator that both writes and
returns a list, so ``hold_back`` is declared to write to ``held``. It also keeps its argument ``moved`` from being freed
before ``held`` is computed.

``await_parameters`` is the dual of ``bucket_ready`` in forwards: it returns when parameters that are being gathered
after an optimizer's step are complete. It is declared to write to the parameters, so that all readers come after it. It
is also declared to write to ``held``, a value computed earlier, without which a scheduler may wait for all parameters
at once.

The operators find their reducer by number, since compiled code from a cache knows no Python object.
"""

import itertools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("ddp_compile", "FRAGMENT")
for _schema in (
    "bucket_ready(Tensor(a!)[] gradients, int reducer_id, int[] parameters, Tensor(b!)[] held) -> ()",
    # strides: those of all results, concatenated; the compiler chooses the strides of the gradients.
    "move_bucket(Tensor[] gradients, int[] strides, int reducer_id, int[] parameters) -> Tensor[]",
    "hold_back(Tensor[] moved, Tensor(a!)[] held) -> ()",
    "await_parameters(Tensor(a!)[] parameters, int reducer_id, int[] param_indices, Tensor(b!)[] held) -> ()",
):
    # A recorded CUDA graph cannot repeat collectives or waits. It also copies its inputs into memory of its own. So
    # hold_back must stay outside too: inside, copies would take the place of the views that move_bucket returned.
    _LIBRARY.define(_schema, tags=(torch.Tag.cudagraph_unsafe,))


class ReceivesBuckets(Protocol):
    """The interface of a reducer for the operators."""

    @property
    def gathers_parameters(self) -> bool: ...

    def mark_bucket_ready(self, parameters: Sequence[int], gradients: Sequence[Tensor]) -> None: ...

    def move_bucket(self, parameters: Sequence[int], gradients: Sequence[Tensor]) -> Sequence[Tensor]: ...

    def ignore_computed_buckets(self, buckets: Sequence[tuple[int, ...]]) -> None: ...

    def await_parameters(self, param_indices: Sequence[int]) -> None: ...


_receivers: weakref.WeakValueDictionary[int, ReceivesBuckets] = weakref.WeakValueDictionary()
_reducer_ids = itertools.count()


def next_reducer_id() -> int:
    """A number for one ``ddp_compile`` call, equal in every process that makes the same calls in the same order.

    It is part of compiled code and of cache keys, so that two models with equal plans share no cache entry.
    """
    return next(_reducer_ids)


def register_receiver(reducer_id: int, receiver: ReceivesBuckets) -> None:
    """Make operators with this number call ``receiver``, which is not kept alive."""
    _receivers[reducer_id] = receiver


def gathers_parameters(reducer_id: int) -> bool:
    """Whether parameters may still be gathered when a forward begins; the same on every rank."""
    receiver = _receivers.get(reducer_id)
    return receiver is not None and receiver.gathers_parameters


def await_before(compiled: Callable[..., Any], param_indices: Collection[int], reducer_id: int) -> Callable[..., Any]:
    """Wrap a compiled graph, or a part of one: the wrapper waits for the reduced parameters that the graph reads."""
    if not param_indices:
        return compiled
    numbers = tuple(param_indices)

    def run(*arguments: Any) -> Any:
        _await_parameters((), reducer_id, numbers, ())
        return compiled(*arguments)

    return run


def watch_parameters(
    compiled: Callable[..., Any],
    example_inputs: Sequence[Any],
    parameter_of_input: Mapping[int, int],
    buckets: Sequence[tuple[int, ...]],
    reducer_id: int,
) -> Callable[..., Any]:
    """Wrap a compiled graph: the wrapper tells the reducer if the graph runs for parameters of another module.

    Dynamo uses one graph for all instances of a class that are separate frames, with the parameter indices of the first
    instance. The wrapper compares one parameter of each bucket. If two instances share that one, the reducer notices by
    the gradients. Parameters that are attributes of the graph cannot change, and are not compared.

    ``parameter_of_input`` has the index of the reduced parameter at each position among the inputs, and ``buckets`` the
    parameters of each bucket that the graph's backward computes.
    """
    position_of = {parameter: position for position, parameter in parameter_of_input.items()}
    found = ([position_of[index] for index in param_indices if index in position_of] for param_indices in buckets)
    watched = [positions[0] for positions in found if positions]
    # Not the parameters themselves: Dynamo keeps compiled code, and everything that it refers to, forever.
    numbers = [id(example_inputs[position]) for position in watched]

    def run(*arguments: Any) -> Any:
        for position, number in zip(watched, numbers, strict=True):
            if id(arguments[position]) != number:
                if (receiver := _receivers.get(reducer_id)) is not None:
                    receiver.ignore_computed_buckets(buckets)
                break
        return compiled(*arguments)

    return run


def _bucket_ready(
    gradients: Sequence[Tensor], reducer_id: int, parameters: Sequence[int], held: Sequence[Tensor]
) -> None:
    if (receiver := _receivers.get(reducer_id)) is not None:
        receiver.mark_bucket_ready(parameters, gradients)


def _move_bucket(
    gradients: Sequence[Tensor], strides: Sequence[int], reducer_id: int, parameters: Sequence[int]
) -> list[Tensor]:
    if (receiver := _receivers.get(reducer_id)) is not None:
        return list(receiver.move_bucket(parameters, gradients))
    copies = _move_bucket_fake(gradients, strides, reducer_id, parameters)
    return [copy.copy_(gradient) for copy, gradient in zip(copies, gradients, strict=True)]


def _move_bucket_fake(
    gradients: Sequence[Tensor], strides: Sequence[int], reducer_id: int, parameters: Sequence[int]
) -> list[Tensor]:
    remaining = iter(strides)
    return [
        gradient.new_empty_strided(gradient.shape, list(itertools.islice(remaining, gradient.dim())))
        for gradient in gradients
    ]


def _await_parameters(
    parameters: Sequence[Tensor], reducer_id: int, param_indices: Sequence[int], held: Sequence[Tensor]
) -> None:
    if (receiver := _receivers.get(reducer_id)) is not None:
        receiver.await_parameters(param_indices)


def _do_nothing(*_: Any) -> None:
    """The fakes of operators without results; also ``hold_back``, whose only effect is its place in a graph."""


_IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {  # and fakes
    "bucket_ready": (_bucket_ready, _do_nothing),
    "move_bucket": (_move_bucket, _move_bucket_fake),
    "hold_back": (_do_nothing, _do_nothing),
    "await_parameters": (_await_parameters, _do_nothing),
}
for _name, (_function, _fake) in _IMPLEMENTATIONS.items():
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ddp_compile::{_name}", _fake, lib=_LIBRARY)

BUCKET_READY = torch.ops.ddp_compile.bucket_ready.default
MOVE_BUCKET = torch.ops.ddp_compile.move_bucket.default
HOLD_BACK = torch.ops.ddp_compile.hold_back.default
AWAIT_PARAMETERS = torch.ops.ddp_compile.await_parameters.default
