"""The operators by which compiled code and a reducer tell each other how far they are.

Note [What bucket_ready tells compilers]
The operator is declared to write into the gradients, and never does. From the declaration a compiler concludes all
that is needed: the operator has an effect and may not be removed, what it is given has to be complete when it runs, and
the graph's outputs are still those tensors, so that no copy is made. A functional operator would have to return new
tensors, since a result must not share memory with an argument that it does not name; and inductor removes an operator
that neither writes nor returns anything.

What an operator only reads, a scheduler may compute at the very end, and the operator with it: inductor does, since a
gradient that nothing but the output needs takes memory from its computation on. So the operator is also declared to
write into a value that the rest of the backward goes on from, ``held``, which therefore comes after it.

``move_bucket`` is for gradients that nobody adds to, by the promise of ``static_graph``: what the graph returns in
their places lies in the reducer's flat buffer, and they themselves need no memory from then on. Its results share no
memory with its arguments: where the bucket cannot be launched yet, they are copies. As inductor takes no operator that
both writes and returns a list, ``hold_back`` does the writing into ``held``. Alone, it keeps what it is given as
``moved`` from being freed before ``held`` is computed.

``await_parameters`` is the dual of ``bucket_ready``, in forwards: it returns when parameters are complete that are
written behind an optimizer's step. It is declared to write into the parameters, so that whatever reads them comes after
it; and into ``held``, a value computed before, without which a scheduler may wait at once for all of them.

The operators find their reducer by number: compiled code that was read from a cache knows no Python object.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

# cudagraph_unsafe: a collective is started, at another moment in each step, which no recorded graph can repeat.
_LIBRARY = torch.library.Library("ddp_compile", "FRAGMENT")
_LIBRARY.define(
    "bucket_ready(Tensor(a!)[] gradients, int reducer, int[] parameters, Tensor(b!)[] held) -> ()",
    tags=(torch.Tag.cudagraph_unsafe,),
)
# strides: of each result, one list after the other; those of a gradient are up to the compiler.
_LIBRARY.define(
    "move_bucket(Tensor[] gradients, int[] strides, int reducer, int[] parameters) -> Tensor[]",
    tags=(torch.Tag.cudagraph_unsafe,),
)
_LIBRARY.define("hold_back(Tensor[] moved, Tensor(a!)[] held) -> ()")
_LIBRARY.define(
    "await_parameters(Tensor(a!)[] parameters, int reducer, int[] param_indices, Tensor(b!)[] held) -> ()",
    tags=(torch.Tag.cudagraph_unsafe,),
)


class ReceivesBuckets(Protocol):
    """What takes whole buckets in: a reducer."""

    @property
    def gathers_parameters(self) -> bool: ...

    def mark_bucket_ready(self, parameters: Sequence[int], gradients: Sequence[Tensor]) -> None: ...

    def move_bucket(self, parameters: Sequence[int], gradients: Sequence[Tensor]) -> Sequence[Tensor]: ...

    def ignore_computed_buckets(self, buckets: Sequence[tuple[int, ...]]) -> None: ...

    def await_parameters(self, param_indices: Sequence[int]) -> None: ...


_receivers: weakref.WeakValueDictionary[int, ReceivesBuckets] = weakref.WeakValueDictionary()
_ordinals = itertools.count()


def next_reducer_ordinal() -> int:
    """A number for one ``ddp_compile`` call: equal in every process that makes the same calls in the same order.

    It stands in compiled code and in the keys of compile caches, so that two models with one plan share no entry.
    """
    return next(_ordinals)


def register_receiver(ordinal: int, receiver: ReceivesBuckets) -> None:
    """Let operators with this number call ``receiver``, for as long as somebody else keeps it alive."""
    _receivers[ordinal] = receiver


def gathers_parameters(reducer: int) -> bool:
    """Whether parameters may still be written when a forward begins; the same on every rank.

    Args:
        reducer: Number of the receiver.
    """
    receiver = _receivers.get(reducer)
    return receiver is not None and receiver.gathers_parameters


def await_before(compiled: Callable[..., Any], param_indices: Sequence[int], reducer: int) -> Callable[..., Any]:
    """Let a graph, or a part of one, wait for its parameters before it runs.

    Args:
        compiled: The compiled graph.
        param_indices: Numbers of the reduced parameters that it reads.
        reducer: Number of the receiver.

    Returns:
        What to call in its place.
    """
    if not param_indices:
        return compiled
    numbers = tuple(param_indices)

    def run(*arguments: Any) -> Any:
        _await_parameters((), reducer, numbers, ())
        return compiled(*arguments)

    return run


def watch_parameters(
    compiled: Callable[..., Any],
    example_inputs: Sequence[Any],
    parameter_of_input: Mapping[int, int],
    buckets: Sequence[tuple[int, ...]],
    reducer: int,
) -> Callable[..., Any]:
    """Tell the reducer where a graph runs for other parameters than those it was compiled for.

    Dynamo gives one graph to all instances of a class, if they are frames of their own, and the numbers in it are those
    of the first. One parameter of each bucket is looked at; where two instances share that one, the reducer finds out
    by the gradients. A parameter that is part of the graph itself cannot be another, and is not looked at.

    Args:
        compiled: The compiled graph.
        example_inputs: What it was compiled for, parameters included.
        parameter_of_input: Index of the reduced parameter at each position among them.
        buckets: The parameters of each bucket that the graph's backward computes.
        reducer: Number of the receiver.

    Returns:
        What to call in the graph's place.
    """
    position_of = {parameter: position for position, parameter in parameter_of_input.items()}
    found = ([position_of[index] for index in param_indices if index in position_of] for param_indices in buckets)
    watched = [positions[0] for positions in found if positions]
    # Not the parameters themselves: Dynamo keeps what it was given for good.
    numbers = [id(example_inputs[position]) for position in watched]

    def run(*arguments: Any) -> Any:
        for position, number in zip(watched, numbers, strict=True):
            if id(arguments[position]) != number:
                receiver = _receivers.get(reducer)
                if receiver is not None:
                    receiver.ignore_computed_buckets(buckets)
                break
        return compiled(*arguments)

    return run


def _bucket_ready(gradients: Sequence[Tensor], reducer: int, parameters: Sequence[int], held: Sequence[Tensor]) -> None:
    receiver = _receivers.get(reducer)
    if receiver is not None:
        receiver.mark_bucket_ready(parameters, gradients)


def _bucket_ready_fake(
    gradients: Sequence[Tensor], reducer: int, parameters: Sequence[int], held: Sequence[Tensor]
) -> None:
    """No result to describe."""


def _move_bucket(
    gradients: Sequence[Tensor], strides: Sequence[int], reducer: int, parameters: Sequence[int]
) -> list[Tensor]:
    receiver = _receivers.get(reducer)
    if receiver is not None:
        return list(receiver.move_bucket(parameters, gradients))
    copies = _move_bucket_fake(gradients, strides, reducer, parameters)
    return [copy.copy_(gradient) for copy, gradient in zip(copies, gradients, strict=True)]


def _move_bucket_fake(
    gradients: Sequence[Tensor], strides: Sequence[int], reducer: int, parameters: Sequence[int]
) -> list[Tensor]:
    remaining = iter(strides)
    return [
        gradient.new_empty_strided(gradient.shape, list(itertools.islice(remaining, gradient.dim())))
        for gradient in gradients
    ]


def _hold_back(moved: Sequence[Tensor], held: Sequence[Tensor]) -> None:
    """Nothing is done; what counts is that it comes before whatever reads ``held`` next."""


def _await_parameters(
    parameters: Sequence[Tensor], reducer: int, param_indices: Sequence[int], held: Sequence[Tensor]
) -> None:
    receiver = _receivers.get(reducer)
    if receiver is not None:
        receiver.await_parameters(param_indices)


def _await_parameters_fake(
    parameters: Sequence[Tensor], reducer: int, param_indices: Sequence[int], held: Sequence[Tensor]
) -> None:
    """No result to describe."""


_LIBRARY.impl("bucket_ready", _bucket_ready, "CompositeExplicitAutograd")
_LIBRARY.impl("move_bucket", _move_bucket, "CompositeExplicitAutograd")
_LIBRARY.impl("hold_back", _hold_back, "CompositeExplicitAutograd")
_LIBRARY.impl("await_parameters", _await_parameters, "CompositeExplicitAutograd")
torch.library.register_fake("ddp_compile::bucket_ready", _bucket_ready_fake, lib=_LIBRARY)
torch.library.register_fake("ddp_compile::move_bucket", _move_bucket_fake, lib=_LIBRARY)
torch.library.register_fake("ddp_compile::hold_back", _hold_back, lib=_LIBRARY)
torch.library.register_fake("ddp_compile::await_parameters", _await_parameters_fake, lib=_LIBRARY)

#: What stands in graphs.
BUCKET_READY = torch.ops.ddp_compile.bucket_ready.default
MOVE_BUCKET = torch.ops.ddp_compile.move_bucket.default
HOLD_BACK = torch.ops.ddp_compile.hold_back.default
AWAIT_PARAMETERS = torch.ops.ddp_compile.await_parameters.default
#: Those of backwards.
OPERATORS = (BUCKET_READY, MOVE_BUCKET, HOLD_BACK)
