"""Questions about single nodes of a Dynamo graph: what value they have, whether they alias or write."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload

# Names under which a view or cast of one tensor appears in a graph: as a method, as a function of torch, or as an ATen
# operator. The result holds the same values, so its gradient is the tensor's own but for shape and dtype.
_VIEWS = """
    T mT H adjoint alias as_strided broadcast_to chunk clone contiguous detach diagonal expand expand_as flatten getattr
    getitem movedim moveaxis narrow permute reshape select slice split split_with_sizes squeeze swapaxes swapdims t
    tensor_split transpose unbind unflatten unsafe_chunk unsafe_split unsqueeze view view_as
"""
_CASTS = "bfloat16 double float half to type type_as"
_VIEW_OR_CAST_NAMES = frozenset(_VIEWS.split() + _CASTS.split())

# Functions that write into an argument although neither their name nor a keyword says so: position of the argument.
_HIDDEN_WRITES = {"batch_norm": (1, 2), "instance_norm": (1, 2)}

_AUGMENTED = "iadd isub imul imatmul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift"
_INPLACE_OPERATORS = frozenset(_AUGMENTED.split())

# In-place by name only: they change no value.
_NOT_A_WRITE = frozenset({"requires_grad_", "retain_grad", "rename_", "share_memory_", "__init__"})

_PLAIN_CONSTANTS = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.memory_format)
_MISSING = object()


def example_value(node: fx.Node) -> Any:
    """The (fake) value Dynamo recorded for a node, or `MISSING`."""
    return node.meta.get("example_value", _MISSING)


def has_example_value(node: fx.Node) -> bool:
    return example_value(node) is not _MISSING


def is_constant(node: fx.Node) -> bool:
    """Whether Dynamo specialised the node's value to a plain Python constant, on which the graph is guarded."""
    return node.op in ("call_function", "call_method") and isinstance(example_value(node), _PLAIN_CONSTANTS)


def tensors_in(node: fx.Node) -> list[Tensor]:
    """The tensors in a node's example value."""
    return [leaf for leaf in pytree.tree_leaves(example_value(node)) if isinstance(leaf, Tensor)]


def target_name(node: fx.Node) -> str:
    """The bare name of what a node calls: ``linear``, ``add_``, ``copy_`` for ``aten.copy_.default``."""
    if isinstance(node.target, str):
        return node.target.rpartition(".")[2]
    if isinstance(node.target, OpOverload):
        return node.target._schema.name.rpartition("::")[2]
    return getattr(node.target, "__name__", str(node.target))


def is_view_or_cast(node: fx.Node) -> bool:
    """Whether a node only looks at its tensor arguments in another shape, stride or dtype."""
    return node.op in ("call_function", "call_method") and target_name(node) in _VIEW_OR_CAST_NAMES


def requires_grad(node: fx.Node) -> bool:
    """Whether a gradient can flow through the node; True where Dynamo recorded nothing."""
    if not has_example_value(node):
        return True
    return any(tensor.requires_grad for tensor in tensors_in(node))


def written_arguments(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments of a node that it writes into."""
    if node.op not in ("call_function", "call_method"):
        return
    name = target_name(node)
    candidates: list[Any] = []
    if isinstance(node.target, OpOverload):
        candidates = _written_by_schema(node, node.target)
    elif isinstance(node.target, HigherOrderOperator):
        # The wrappers of user-defined kernels write into what they are given.
        candidates = list(node.all_input_nodes) if "triton" in name or "functionalize" in name else []
    elif node.target is operator.setitem or name in _INPLACE_OPERATORS:
        candidates = [node.args[0]]
    elif name.endswith("_") and not name.endswith("__") and name not in _NOT_A_WRITE and node.args:
        # A torch._foreach_ operator writes into a list of tensors.
        candidates = [node.args[0]]
    elif _is_inplace_activation(node):
        candidates = [node.args[0]]
    elif name in _HIDDEN_WRITES:
        positional = [node.args[i] for i in _HIDDEN_WRITES[name] if i < len(node.args)]
        candidates = [*positional, node.kwargs.get("running_mean"), node.kwargs.get("running_var")]
    if "out" in node.kwargs:
        candidates.append(node.kwargs["out"])
    yield from (leaf for leaf in pytree.tree_leaves(candidates) if isinstance(leaf, fx.Node))


def _written_by_schema(node: fx.Node, op: OpOverload) -> list[Any]:
    written = []
    for i, argument in enumerate(op._schema.arguments):
        if argument.is_write:
            written.append(node.kwargs[argument.name] if argument.name in node.kwargs else _positional(node, i))
    return written


def _positional(node: fx.Node, i: int) -> Any:
    return node.args[i] if i < len(node.args) else None


def _is_inplace_activation(node: fx.Node) -> bool:
    """``relu(x, inplace=True)`` and its like, the flag given by keyword or, last, by position."""
    if "inplace" in node.kwargs:
        return bool(node.kwargs["inplace"])
    is_functional = getattr(node.target, "__module__", None) == "torch.nn.functional"
    return is_functional and len(node.args) > 1 and node.args[-1] is True and _takes_inplace_last(node)


def _takes_inplace_last(node: fx.Node) -> bool:
    import inspect

    try:
        names = list(inspect.signature(node.target).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # builtins without a signature take no inplace flag by position
        return False
    return len(node.args) <= len(names) and names[len(node.args) - 1] == "inplace"
