"""Which parameters take part in a backward: on this rank by its autograd graph, on any rank by a bitmap."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor
from torch.nn import Parameter


class UsedParameters:
    """The parameters that got gradients since the last synchronised backward, and those that did on any rank.

    Args:
        parameters: In registration order; they are spoken of by their number.
        process_group: The ranks that exchange what they used.

    Source: ``search_unused_parameters`` and ``all_reduce_local_used_map`` of torch 2.13's
    csrc/distributed/c10d/reducer.cpp.
    """

    def __init__(self, parameters: Sequence[Parameter], process_group: dist.ProcessGroup) -> None:
        self._index_of = {id(parameter): i for i, parameter in enumerate(parameters)}
        self._device = parameters[0].device
        self._process_group = process_group
        self._used_here: set[int] = set()
        self._map: Tensor | None = None
        self._work: dist.Work | None = None

    def note(self, index: int) -> None:
        """Parameter ``index`` has got a gradient, inside ``no_sync`` or not."""
        self._used_here.add(index)

    def unreached_from(self, outputs: Any) -> set[int]:
        """The parameters to which no path leads in the autograd graph of the outputs.

        Args:
            outputs: What a forward returned: tensors in containers that pytree knows, and in dataclasses.
        """
        reached = {self._index_of.get(id(leaf)) for leaf in _leaves_behind(tensors_in(outputs))}
        return {index for index in self._index_of.values() if index not in reached}

    def launch_exchange(self) -> None:
        """Start to add up over the ranks who used what; every rank calls it once in a round, after its last bucket."""
        used = torch.zeros(len(self._index_of), dtype=torch.int32, device="cpu", pin_memory=self._device.type == "cuda")
        used[list(self._used_here)] = 1
        # A new host tensor for each round: the copy may be late, and must not read the map of the next one.
        self._map = used.to(self._device, non_blocking=True)
        if self._process_group.size() > 1:
            self._work = dist.all_reduce(self._map, group=self._process_group, async_op=True)

    def used_by_nobody(self) -> frozenset[int]:
        """Wait for the exchange, and begin anew.

        Raises:
            RuntimeError: The all-reduce failed or timed out.
        """
        assert self._map is not None
        if self._work is not None:
            self._work.wait()
        unused = frozenset((self._map == 0).nonzero().flatten().tolist())
        self._map = self._work = None
        self._used_here.clear()
        return unused


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in a value: in lists, tuples, dicts and whatever else pytree knows, and in fields of dataclasses."""
    for leaf in pytree.tree_iter(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from tensors_in(getattr(leaf, field.name, None))


def _leaves_behind(tensors: Iterator[Tensor]) -> Iterator[Tensor]:
    """The leaf tensors into which a backward from these tensors would accumulate."""
    seen: set[Any] = set()
    nodes: list[Any] = []
    for tensor in tensors:
        if tensor.grad_fn is not None:
            nodes.append(tensor.grad_fn)
        elif tensor.requires_grad:
            yield tensor
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            yield node.variable
        nodes.extend(following for following, _ in node.next_functions if following is not None)
