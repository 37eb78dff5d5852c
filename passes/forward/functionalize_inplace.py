"""Turns in-place arithmetic on intermediate tensors into out-of-place arithmetic if the difference cannot be seen."""

import operator
from typing import Any

import torch
from torch import Tensor, fx

from ddp_compile import torch_internals
from ddp_compile.passes.analysis.cut_constraints import mode_regions
from ddp_compile.passes.analysis.graph_nodes import aliases_by_storage, example_value, is_input, positions, target_name
from ddp_compile.passes.pipeline import PassContext, PassResult

# In-place form -> out-of-place form.
_OPERATORS: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
_METHODS = {"add_": "add", "sub_": "sub", "mul_": "mul", "div_": "div"}


def functionalize_inplace_pass(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
    """Make ``x += y`` create a new tensor if the old value is not used later under another name.

    No cut may separate a write from its target. So a residual stream that every block adds to in place would keep the
    whole model in one partition. AOTAutograd makes the same change, but only inside a partition.

    before::

        x = linear(a, w1)
        x_1 = iadd(x, b)
        y = linear(x_1, w2)

    after::

        x = linear(a, w1)
        x_1 = add(x, b)
        y = linear(x_1, w2)
    """
    position = positions(gm)
    storages = aliases_by_storage(gm)
    regions = mode_regions(gm)
    num_changed = 0
    for node, at in position.items():
        if node.target not in _OPERATORS and node.target not in _METHODS:
            continue
        written = node.args[0]
        if not isinstance(written, fx.Node) or not _makes_the_same_tensor(node, written):
            continue
        key = torch_internals.storage_key(example_value(written))
        earlier = [alias for alias in storages.get(key, ()) if position[alias] < at] if key is not None else []
        # If a mode such as no_grad was entered in between, the new tensor would lose the old one's history.
        if regions[node] != regions[written] or not _is_sole_name(node, written, earlier, position):
            continue
        node.target = _OPERATORS[node.target] if node.op == "call_function" else _METHODS[str(node.target)]
        node.meta["was_inplace"] = True
        # Later uses of the old name read the new tensor. The recorded values still share storage, so views of either
        # count as views of both when cuts are placed.
        for user in [user for user in written.users if position[user] > at]:
            user.replace_input_with(written, node)
        num_changed += 1
    return PassResult(gm, num_changed)


def _makes_the_same_tensor(node: fx.Node, written: fx.Node) -> bool:
    """Whether the out-of-place form gives the same dtype, shape and strides."""
    target = example_value(written)
    if not isinstance(target, Tensor) or not torch_internals.is_plain_tensor(target) or len(node.args) != 2:
        return False
    if is_input(written) or "out" in node.kwargs or not target.is_contiguous():
        return False
    other = node.args[1]
    value = example_value(other) if isinstance(other, fx.Node) else other
    if isinstance(value, Tensor):
        return torch_internals.is_plain_tensor(value) and torch.result_type(target, value) == target.dtype
    # True division of integers would give floats. Floating dtypes do not change.
    return target.is_floating_point() and isinstance(value, int | float | torch.SymInt | torch.SymFloat)


def _is_sole_name(node: fx.Node, written: fx.Node, earlier: list[fx.Node], position: dict[fx.Node, int]) -> bool:
    if written not in earlier or any(target_name(user) == "register_hook" for user in written.users):
        return False
    for alias in earlier:
        if is_input(alias):
            return False
        last_use = max((position[user] for user in alias.users), default=-1)
        if alias is not written and last_use >= position[node]:
            return False
    return True
