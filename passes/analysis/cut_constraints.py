"""The places at which a forward graph must not be cut.

Note [Held cuts]
A cut at position c makes all nodes before node c one partition and the rest another. AOTAutograd compiles each
separately and sees only the values that cross. A cut is held, that is, refused, if

- a value would cross that cannot be an input or output of a partition: a SymFloat (a varying float argument,
  ``.item()``), a tuple, a tensor subclass, an opaque object. Tensors, SymInts and plain constants may cross.
- a mode is on that the next partition could not enter again: grad mode off, inference mode, functorch levels. Autocast
  is allowed, since `partition_graph` leaves and re-enters it.
- a hook on an intermediate value's gradient would be separated from the value, and would see only the part of the
  gradient from later partitions; ``as_strided`` would be separated from the tensor whose storage it reads; or
  ``torch.autograd.grad`` from what it differentiates.
- a write would be separated from its target. Partitions get example inputs that share no memory, so a write to one of
  two views would not reach the other, and a tensor that a compiled partition saved for its backward would have changed
  by the time it is used.
- a value would cross that shares another value's memory and cannot be made again from it: see Note [Views across a cut]
  in `views`. A view that can be made again does not hold a cut.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator

from ddp_compile import torch_internals
from ddp_compile.passes.analysis.graph_nodes import (
    aliases_by_storage,
    aliases_of,
    example_value,
    has_example_value,
    is_constant,
    is_input,
    positions,
    target_name,
    written_arguments,
)
from ddp_compile.passes.analysis.views import ViewTrees, is_only_view


class HeldCuts(NamedTuple):
    """Cuts from position ``first`` to ``last``, inclusive, are held because of ``reason``."""

    first: int
    last: int
    reason: str


def find_held_cuts(gm: fx.GraphModule) -> list[HeldCuts]:
    """All reasons against cuts in one Dynamo graph; see Note [Held cuts]."""
    return [
        *_values_that_cannot_cross(gm),
        *_regions_that_stay_whole(gm),
        *_writes_after_views(gm),
        *_ties_to_a_value(gm),
        *_values_of_one_storage(gm),
    ]


def _last_use(node: fx.Node, position: dict[fx.Node, int]) -> int:
    return max((position[user] for user in node.users), default=position[node])


def _values_that_cannot_cross(gm: fx.GraphModule) -> list[HeldCuts]:
    held = []
    position = positions(gm)
    # Dynamo records a value for every input and tensor. A graph built by hand may have none, and is trusted.
    is_dynamos = all(has_example_value(node) for node in gm.graph.find_nodes(op="placeholder"))
    for node, at in position.items():
        is_known = has_example_value(node) or is_dynamos
        if node.op in ("get_attr", "output") or not node.users or not is_known or _may_cross(node):
            continue
        kind = type(example_value(node)).__name__ if has_example_value(node) else "value unknown to Dynamo"
        held.append(HeldCuts(at + 1, _last_use(node, position), f"{node.name}, a {kind}, cannot cross partitions"))
    return held


def _may_cross(node: fx.Node) -> bool:
    if is_constant(node) or is_autocast_enter(node):
        return True
    value = example_value(node)
    if isinstance(value, Tensor):
        return torch_internals.is_plain_tensor(value)
    return value is None or isinstance(value, torch.SymInt)


# Words in the names of functions that open and close a region, such as ``_record_function_enter_new``,
# ``_exit_inference_mode``, ``_saved_tensors_hooks_push``, ``_vmap_increment_nesting``.
_REGION_WORDS = {"enter": "exit", "push": "pop", "increment": "decrement"}


def mode_regions(gm: fx.GraphModule) -> dict[fx.Node, tuple[str, ...]]:
    """The modes that are on when each node runs, outermost first, named after the node that opened them.

    Switches without an end have fixed names: ``grad_off`` is open until grad mode is on again.
    """
    regions: dict[fx.Node, tuple[str, ...]] = {}
    stack: list[str] = []
    for node in gm.graph.nodes:
        if node.op == "call_function":
            _update_region_stack(node, stack)
        regions[node] = tuple(stack)
    return regions


def is_grad_off(regions: Sequence[str]) -> bool:
    """Whether grad mode is off in these `mode_regions`."""
    return "grad_off" in regions


def _update_region_stack(node: fx.Node, stack: list[str]) -> None:
    name = target_name(node)
    if node.target is torch._C._set_grad_enabled:
        _switch(stack, "grad_off", is_on=node.args[0] is False)
    elif name == "_sdpa_kernel":
        # Called with the kernels to allow, and later with the kernels that were allowed before.
        _switch(stack, "sdpa_kernel", is_on=not torch_internals.allows_same_attention_kernels(node.args[0]))
    for opens, closes in _REGION_WORDS.items():
        words = name.split("_")
        if opens in words:
            stack.append(node.name)
        elif closes in words:
            # Most closing calls take the opening call's result; others close the innermost region of their kind.
            openers = [argument.name for argument in node.all_input_nodes if argument.name in stack]
            openers += [region for region in reversed(stack) if opens in region.split("_")]
            if openers:
                stack.remove(openers[0])


def _switch(stack: list[str], mode: str, is_on: bool) -> None:
    """Switch a mode that does not nest."""
    if mode in stack:
        stack.remove(mode)
    if is_on:
        stack.append(mode)


def is_autocast_enter(node: fx.Node) -> bool:
    """Whether the node opens an autocast region, which a cut may leave and enter again."""
    return node.op == "call_function" and node.target is torch.amp.autocast_mode._enter_autocast


def _regions_that_stay_whole(gm: fx.GraphModule) -> list[HeldCuts]:
    autocast = {node.name for node in gm.graph.nodes if is_autocast_enter(node)}
    whole = [[region for region in regions if region not in autocast] for regions in mode_regions(gm).values()]
    held = []
    for is_inside, run in itertools.groupby(range(len(whole)), key=lambda at: bool(whole[at])):
        places = list(run)
        if is_inside:
            # The node after these closes the region, so a cut right before it is still inside.
            reason = f"the region opened by {whole[places[0]][0]} stays whole"
            held.append(HeldCuts(places[0] + 1, places[-1] + 1, reason))
    return held


def _ties_to_a_value(gm: fx.GraphModule) -> list[HeldCuts]:
    position = positions(gm)
    held = []
    for node, at in position.items():
        name = target_name(node)
        if node.target is torch.autograd.grad:
            held.append(HeldCuts(0, at, f"{node.name} differentiates what is before it"))
        if node.op not in ("call_function", "call_method") or name not in ("register_hook", "as_strided"):
            continue
        what = "is a hook on the gradient of" if name == "register_hook" else "reads the storage of"
        for value in node.all_input_nodes:
            if not is_input(value) and position[value] + 1 <= at:
                held.append(HeldCuts(position[value] + 1, at, f"{node.name} {what} {value.name}"))
    return held


def _values_of_one_storage(gm: fx.GraphModule) -> list[HeldCuts]:
    """Values that share the memory of an earlier one and cannot be made again as views of it."""
    position = positions(gm)
    regions = mode_regions(gm)
    trees = ViewTrees(gm, regions)
    last_use: dict[fx.Node, int] = {}
    for node in position:
        root = trees.root(node)
        last_use[root] = max(last_use.get(root, 0), _last_use(node, position))
    held = []
    for roots in trees.roots_in_storage:
        for first, second in itertools.combinations(roots, 2):
            if is_input(second):
                continue
            reason = f"{second.name} shares the memory of {first.name} and cannot be made again as a view of it"
            made_again = is_only_view(second) and not is_grad_off(regions[second])
            held.append(HeldCuts(*_held_for_both(first, second, made_again, position, last_use), reason))
    return [interval for interval in held if interval.first <= interval.last]


def _held_for_both(
    first: fx.Node, second: fx.Node, made_again: bool, position: dict[fx.Node, int], last_use: dict[fx.Node, int]
) -> tuple[int, int]:
    """The cuts that make a partition return both, or take the first as input and return the second.

    AOTAutograd makes an output in an input's memory again from the input. Unless it may be ``made_again`` like that, a
    hook on its gradient, its own backward, or ``no_grad`` around a view would be lost.
    """
    if not made_again:
        is_returned = last_use[second] == len(position) - 1
        return position[first if is_returned and not is_input(first) else second] + 1, last_use[second]
    return position[second] + 1, -1 if is_input(first) else min(last_use[first], last_use[second])


def _writes_after_views(gm: fx.GraphModule) -> list[HeldCuts]:
    position = positions(gm)
    storages = aliases_by_storage(gm)
    held = []
    for node, at in position.items():
        for target in written_arguments(node):
            held.extend(_held_by_write(node, at, aliases_of(target, storages), position))
    return held


def _held_by_write(writer: fx.Node, at: int, aliases: list[fx.Node], position: dict[fx.Node, int]) -> list[HeldCuts]:
    held = [
        HeldCuts(position[alias] + 1, min(_last_use(alias, position), at), f"{writer.name} writes into {alias.name}")
        for alias in aliases
        if not is_input(alias) and position[alias] < at
    ]
    inputs = [alias for alias in aliases if is_input(alias)]
    if inputs:
        # An input is the same tensor in every partition, so only readers of its old value matter.
        own = set(aliases)
        users = {user for alias in aliases for user in alias.users if not _only_views(user, own)}
        first_read = min((position[user] for user in users), default=at)
        held.append(HeldCuts(first_read + 1, at, f"{writer.name} writes into {inputs[0].name}"))
    return [interval for interval in held if interval.first <= interval.last]


def _only_views(node: fx.Node, aliases: set[fx.Node]) -> bool:
    """Whether a user of a written tensor is a view of it, or an in-place operation, whose result is a view.

    Not a higher-order operator, since a checkpoint that writes also recomputes from its inputs in the backward.
    """
    if isinstance(node.target, HigherOrderOperator):
        return False
    return node in aliases or any(target in aliases for target in written_arguments(node))
