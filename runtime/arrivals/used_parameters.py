"""Which parameters a backward uses, according to the autograd graph and to the gradients that came."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ddp_compile import torch_internals


class UsedParameters:
    """The parameters that got gradients on this rank since the last synchronized backward.

    Args:
        parameters: In registration order, which is that of their numbers.

    Source: ``search_unused_parameters`` and ``local_used_map_`` of torch 2.13, csrc/distributed/c10d/reducer.cpp.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._index_of = {id(parameter): i for i, parameter in enumerate(parameters)}
        self._used_here: set[int] = set()

    def note(self, index: int) -> None:
        """A parameter has got a gradient, inside ``no_sync`` or not."""
        self._used_here.add(index)

    def unreached_from(self, outputs: Any) -> set[int]:
        """The parameters to which the autograd graph of the outputs does not lead.

        Args:
            outputs: What a forward returned: tensors in containers that pytree knows, and in dataclasses.
        """
        reached = {self._index_of.get(id(leaf)) for leaf in _leaves_of(torch_internals.tensors_in(outputs))}
        return {index for index in self._index_of.values() if index not in reached}

    def take(self) -> bytearray:
        """A flag for each parameter, 1 if it was used since the last call."""
        flags = bytearray(len(self._index_of))
        for index in self._used_here:
            flags[index] = 1
        self._used_here.clear()
        return flags


def _leaves_of(tensors: Iterator[Tensor]) -> Iterator[Tensor]:
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
