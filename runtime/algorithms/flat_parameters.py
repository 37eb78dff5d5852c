"""Copies of all parameters of a module in flat buffers."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_compile import torch_internals
from ddp_compile.kernels import flatten_scale, unflatten
from ddp_compile.kernels.contract.layout import is_non_overlapping_and_dense
from ddp_compile.runtime.comm.transfers import all_reduce, wait_for

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class FlatParameters:
    """Copies parameters into one flat buffer for each dtype and device, and back.

    The parameters keep their storages. Views into a common one would save a copy of the parameters, but compilers check
    each pair of tensors that share memory, and libraries that save one tensor would save all of the storage.

    Args:
        parameters: Dense tensors of real dtypes; of a DTensor, its part on this rank is copied.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in parameters:
            self._kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)

    def new(self) -> list[Tensor]:
        """Buffers for all parameters, filled with zeros."""
        return [
            torch.zeros(sum(map(torch.numel, _local(parameters))), dtype=dtype, device=device)
            for (dtype, device), parameters in self._kinds.items()
        ]

    def read(self, flats: Sequence[Tensor]) -> None:
        """Copy the parameters into buffers of `new`."""
        for flat, parameters in zip(flats, self._kinds.values(), strict=True):
            flatten_scale(_local(parameters), flat, 1.0)

    def copies(self) -> list[Tensor]:
        """The parameters in buffers of `new`."""
        flats = self.new()
        self.read(flats)
        return flats

    def write(self, flats: Sequence[Tensor]) -> None:
        """Copy buffers of `new` into the parameters."""
        for flat, parameters in zip(flats, self._kinds.values(), strict=True):
            unflatten(flat, _local(parameters))

    def blocks(self, numel: int) -> list[list[list[Tensor]]] | None:
        """The parameters' own memory, in the order of the buffers.

        Returns:
            For each buffer its blocks, the last one shorter; each is a list of one-dimensional pieces of parameters.
            None if a parameter has gaps in its memory.
        """
        of_kinds = []
        for parameters in self._kinds.values():
            blocks: list[list[Tensor]] = []
            room = 0
            for parameter in filter(Tensor.numel, _local(parameters)):
                if not is_non_overlapping_and_dense(parameter):
                    return None
                memory = parameter.as_strided((parameter.numel(),), (1,))
                while len(memory):
                    if room == 0:
                        blocks.append([])
                        room = numel
                    blocks[-1].append(memory[:room])
                    memory, room = memory[room:], room - len(blocks[-1][-1])
            of_kinds.append(blocks)
        return of_kinds

    def versions(self) -> list[int]:
        """The parameters' version numbers, of which each write to a parameter changes one, except through ``.data``."""
        return [parameter._version for parameters in self._kinds.values() for parameter in parameters]


def _local(parameters: Sequence[Tensor]) -> list[Tensor]:
    return torch_internals.local_tensors([parameter.detach() for parameter in parameters])


def average_over(group: dist.ProcessGroup, parameters: FlatParameters, name: str) -> None:
    """Replace the parameters by their mean over a group, with the same bits on every rank.

    Args:
        group: Every rank of it calls this.
        parameters: As many values on every rank.
        name: As for `wait_for`.

    Raises:
        ReductionError: A rank is gone, or has not come within the group's timeout.
    """
    if group.size() == 1:
        return
    flats = parameters.copies()
    for flat in flats:
        flat.mul_(1 / group.size())
    wait_for([all_reduce(flat, group) for flat in flats], name)
    parameters.write(flats)
