"""Questions about single nodes of a Dynamo graph: their values, and whether they alias or write."""

import inspect
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from ddp_compile import torch_internals

# Names of views and casts of one tensor: methods, functions of torch, or ATen operators. The result has the same
# values, or some of them, so its gradient is the tensor's gradient except for shape and dtype.
_VIEWS = """
    T mT H _get_data_attr adjoint alias as_strided broadcast_to chunk clone contiguous detach diagonal dsplit expand
    expand_as flatten getattr getitem hsplit imag movedim moveaxis narrow permute ravel real reshape select slice split
    split_with_sizes squeeze swapaxes swapdims t tensor_split transpose unbind unflatten unfold unsafe_chunk
    unsafe_split unsqueeze view view_as view_as_complex view_as_real vsplit
"""
_CASTS = "bfloat16 double float half to type type_as"
_VIEW_OR_CAST_NAMES = frozenset(_VIEWS.split() + _CASTS.split())

# Functions that write to arguments although neither their name nor a keyword says so, with the names and positions of
# these arguments.
_RUNNING_STATISTICS = (("running_mean", 1), ("running_var", 2))
_HIDDEN_WRITES: dict[Any, tuple[tuple[str, int], ...]] = {
    F.batch_norm: _RUNNING_STATISTICS,
    F.instance_norm: _RUNNING_STATISTICS,
    torch.batch_norm: (("running_mean", 3), ("running_var", 4)),
    torch.instance_norm: (("running_mean", 3), ("running_var", 4)),
}
# Lookups that renormalize the rows they read if a largest norm is given, and its position.
_RENORMALIZING_LOOKUPS: dict[Any, int] = {F.embedding: 3, F.embedding_bag: 4}

# Not imatmul: tensors have no such method, so ``x @= w`` makes a new tensor.
_AUGMENTED = "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift"
_INPLACE_OPERATORS = frozenset(_AUGMENTED.split())

# In-place by name only: they do not change values.
_NOT_A_WRITE = frozenset({"requires_grad_", "rename_", "share_memory_"})

_PLAIN_CONSTANTS = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.memory_format)
_MISSING = object()


def example_value(node: fx.Node) -> Any:
    """The (fake) value Dynamo or AOTAutograd recorded for a node; a private marker if `has_example_value` is false."""
    return node.meta.get("example_value", node.meta.get("val", _MISSING))


def has_example_value(node: fx.Node) -> bool:
    return example_value(node) is not _MISSING


def is_constant(node: fx.Node) -> bool:
    """Whether the node's value is a plain Python constant that Dynamo has guarded the graph on."""
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


def positions(gm: fx.GraphModule) -> dict[fx.Node, int]:
    """The place of each node in the graph's node list."""
    return {node: i for i, node in enumerate(gm.graph.nodes)}


def is_input(node: fx.Node) -> bool:
    """Whether a node is an argument or an attribute of the graph."""
    return node.op in ("placeholder", "get_attr")


def is_expanded(tensor: Tensor) -> bool:
    """Whether elements of a tensor share memory."""
    return any(isinstance(stride, int) and stride == 0 for stride in tensor.stride())


def is_view_or_cast(node: fx.Node) -> bool:
    """Whether a node only changes the shape, strides or dtype of its tensor arguments, and computes nothing."""
    return node.op in ("call_function", "call_method") and target_name(node) in _VIEW_OR_CAST_NAMES


def requires_grad(node: fx.Node) -> bool:
    """Whether a gradient can flow through the node; True if Dynamo recorded no value, or not the whole tensor.

    Inside ``torch.vmap`` and ``torch.func.grad`` the recorded tensor belongs to the innermost level. It may require no
    gradient although the tensor of an outer level does.
    """
    if not has_example_value(node):
        return True
    return any(tensor.requires_grad or not torch_internals.is_plain_tensor(tensor) for tensor in tensors_in(node))


def written_arguments(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments that a node writes to."""
    if node.op not in ("call_function", "call_method"):
        return
    written = list(_written_values(node))
    if "out" in node.kwargs:
        written.append(node.kwargs["out"])
    # A torch._foreach_ operator writes to lists of tensors.
    yield from (leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, fx.Node))


def returns_what_it_writes(node: fx.Node) -> fx.Node | None:
    """The tensor that an in-place operation writes to and returns; None for every other node."""
    if node.op not in ("call_function", "call_method") or isinstance(node.target, HigherOrderOperator):
        return None
    for target in written_arguments(node):
        value, result = example_value(target), example_value(node)
        if not isinstance(value, Tensor) or not isinstance(result, Tensor):
            continue
        # Shared memory is not enough: ``rows += 1`` on a SymInt makes a new value, ``transpose_`` another shape.
        is_same = value.shape == result.shape and value.dtype == result.dtype and value.stride() == result.stride()
        if is_same and torch_internals.storage_key(value) == torch_internals.storage_key(result) is not None:
            return target
    return None


def was_inplace(node: fx.Node) -> bool:
    """Whether a node makes a new tensor although its recorded value is in an old one's memory:
    `functionalize_inplace_pass`."""
    return bool(node.meta.get("was_inplace"))


def aliases_by_storage(gm: fx.GraphModule) -> dict[int, list[fx.Node]]:
    """The nodes whose values are in each storage, in graph order."""
    storages: dict[int, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        for key in dict.fromkeys(map(torch_internals.storage_key, tensors_in(node))):
            if key is not None:
                storages.setdefault(key, []).append(node)
    return storages


def aliases_of(node: fx.Node, storages: Mapping[int, Sequence[fx.Node]]) -> list[fx.Node]:
    """A node and those whose values are in its memory, by `aliases_by_storage`."""
    keys = [key for key in map(torch_internals.storage_key, tensors_in(node)) if key is not None]
    return list(dict.fromkeys([node, *(alias for key in keys for alias in storages[key])]))


def _written_values(node: fx.Node) -> Iterator[Any]:
    target, name = node.target, target_name(node)
    if isinstance(target, HigherOrderOperator):
        yield from _written_by_bodies(node, name)
    elif isinstance(target, OpOverload | OpOverloadPacket):
        yield from _written_by_schema(node, target)
    elif target in _HIDDEN_WRITES:
        for keyword, position in _HIDDEN_WRITES[target]:
            yield _argument(node, keyword, position)
    elif target in _RENORMALIZING_LOOKUPS:
        if _argument(node, "max_norm", _RENORMALIZING_LOOKUPS[target]) is not None:
            yield _argument(node, "weight", 1)
    elif target is operator.setitem or _is_inplace_by_name(name) or _is_inplace_activation(node):
        yield _first_argument(node)


def _argument(node: fx.Node, keyword: str, position: int) -> Any:
    return node.kwargs.get(keyword, node.args[position] if position < len(node.args) else None)


def _first_argument(node: fx.Node) -> Any:
    """The first argument, which may be given as the keyword ``input`` or ``self``."""
    if node.args:
        return node.args[0]
    named = [node.kwargs[name] for name in ("input", "self") if name in node.kwargs]
    return named or list(node.all_input_nodes)


def _is_inplace_by_name(name: str) -> bool:
    if name.strip("_") in _INPLACE_OPERATORS:
        return True
    return name.endswith("_") and not name.endswith("__") and name not in _NOT_A_WRITE


def _written_by_schema(node: fx.Node, target: OpOverload | OpOverloadPacket) -> Iterator[Any]:
    # All overloads of a packet write to the same arguments.
    overloads = [target] if isinstance(target, OpOverload) else [getattr(target, name) for name in target.overloads()]
    for overload in overloads:
        for i, argument in enumerate(overload._schema.arguments):
            if argument.is_write:
                yield _argument(node, argument.name, i)


def _written_by_bodies(node: fx.Node, name: str) -> Iterator[Any]:
    """The arguments of a higher-order operator that the graphs it calls write to."""
    # Wrappers of user-defined kernels have no graph, and may write to any argument.
    if "triton" in name or "functionalize" in name:
        yield from node.all_input_nodes
        return
    if name == "invoke_leaf_function":  # (function, fake function, structure, "1,2" for those written, *arguments)
        written = node.args[3]
        yield from (node.args[4 + int(i)] for i in written.split(",") if i) if isinstance(written, str) else ()
        return
    operands = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node)]
    bodies = [body for body in map(_graph_module_of, operands) if body is not None]
    tensors = [operand for operand in operands if _graph_module_of(operand) is None]
    for body in bodies:
        inputs = body.graph.find_nodes(op="placeholder")
        for inner in body.graph.nodes:
            for target in written_arguments(inner):
                for source in _inputs_in_memory_of(target):
                    # Operands are lifted in the order of the body's inputs, after any of the operator's own.
                    position = inputs.index(source) - len(inputs)
                    yield tensors[position] if -position <= len(tensors) else tensors


def _inputs_in_memory_of(node: fx.Node) -> set[fx.Node]:
    """The placeholders that a node may share memory with."""
    if node.op == "placeholder":
        return {node}
    if not is_view_or_cast(node) and not any(True for _ in written_arguments(node)):
        return set()
    return set[fx.Node]().union(*(_inputs_in_memory_of(argument) for argument in node.all_input_nodes))


def _graph_module_of(node: fx.Node) -> fx.GraphModule | None:
    if node.op != "get_attr" or node.graph.owning_module is None:
        return None
    value: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        value = getattr(value, name, None)
    return value if isinstance(value, fx.GraphModule) else None


def _is_inplace_activation(node: fx.Node) -> bool:
    """Whether ``inplace=True`` is given, by keyword or as the last positional argument."""
    if "inplace" in node.kwargs:
        return bool(node.kwargs["inplace"])
    is_functional = getattr(node.target, "__module__", None) == "torch.nn.functional"
    return is_functional and len(node.args) > 1 and node.args[-1] is True and _takes_inplace_last(node)


def _takes_inplace_last(node: fx.Node) -> bool:
    try:
        names = list(inspect.signature(node.target).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # builtins without a signature take no positional inplace flag
        return False
    return len(node.args) <= len(names) and names[len(node.args) - 1] == "inplace"
