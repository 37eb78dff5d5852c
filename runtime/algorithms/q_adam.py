"""QAdam's communication: gradients at first, and momenta in eight bits a value from then on.

Note [Gradients that bring the mean momentum]
After warm-up, each rank sends the momentum that its own gradient would give, m_r = b1 m + (1 - b1) g_r; the optimizer
needs the mean, q. ``.grad`` then becomes (q - b1 m) / (1 - b1), the one gradient from which Adam computes q. So
``.grad`` is a gradient in all steps, and operations on gradients keep their meaning. Another backward adds to it and is
reduced again, a GradScaler divides it by its scale, it can be clipped, and it may be zero for a parameter that no rank
has used. A momentum in its place would be right only with one reduction in each step, and with nothing between the
reduction and the step. This needs no memory, and the new momentum is q up to the rounding of its dtype.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ddp_compile.algorithms import AlgorithmConfig, AllReduceInChain, Bucket, CollectiveChain, local_tensors
from ddp_compile.errors import shorten_names
from ddp_compile.runtime.algorithms.byte_grad import ByteGradAlgorithm


class HasMomenta(Protocol):
    """The part of `ddp_compile.optim.QAdam` that the exchange needs."""

    param_groups: list[dict[str, Any]]
    exchange: weakref.ref[MomentumExchange] | None

    @property
    def warmup_steps(self) -> int: ...

    @property
    def in_warmup(self) -> bool: ...

    def momenta_of(self, parameters: Sequence[Parameter]) -> list[Tensor | None]: ...

    def name_of(self, group: int, number: int) -> str: ...


class MomentumExchange(CollectiveChain):
    """An all-reduce of gradients in warm-up, and then ByteGrad's reduction of momenta.

    Launching does not change the optimizer, so a bucket may be launched twice.
    """

    traits = ByteGradAlgorithm.traits

    def __init__(self, process_group: dist.ProcessGroup, optimizer: HasMomenta) -> None:
        super().__init__(process_group)
        self._optimizer = optimizer
        self._in_warmup = AllReduceInChain(process_group)
        self._afterward = ByteGradAlgorithm(process_group)
        self._group_numbers: dict[Parameter, int] = {}

    @property
    def name(self) -> str:  # type: ignore[override]
        """Includes the phase, so that ranks detect mismatches."""
        what = "gradients, in warm-up" if self._optimizer.in_warmup else "momenta"
        return f"QAdam exchange of {what} (warmup_steps={self._optimizer.warmup_steps})"

    @property
    def num_collectives(self) -> int:  # type: ignore[override]
        """Changes only in an optimizer's step, so between two iterations."""
        return (self._in_warmup if self._optimizer.in_warmup else self._afterward).num_collectives

    def objection(self, parameters: Mapping[str, Parameter]) -> str:
        """Every parameter must be one of the optimizer's, which may also have frozen ones."""
        groups = self._optimizer.param_groups
        owned = {p: (i, j) for i, group in enumerate(groups) for j, p in enumerate(group["params"])}
        if missing := [name for name, parameter in parameters.items() if parameter not in owned]:
            return (
                "QAdam exchanges the momentum of its own parameters, but these of the model are not among"
                f" them: {shorten_names(missing)}. Make one QAdam of all parameters of each model, or name them in"
                " parameters_to_ignore"
            )
        reduced = set(parameters.values())
        if others := [self._optimizer.name_of(*at) for p, at in owned.items() if p.requires_grad and p not in reduced]:
            return (
                f"QAdam has parameters that the model does not reduce: {'; '.join(others[:8])}. Their momentum would"
                " differ between the ranks: give them to an optimizer of their own"
            )
        return ""

    def attach(self, parameters: Mapping[str, Parameter]) -> None:
        """Make a process group of its own, which warm-up uses too, and exchange for the optimizer."""
        self.take_own_group(parameters)
        self._in_warmup.process_group = self._afterward.process_group = self.process_group
        groups = self._optimizer.param_groups
        self._group_numbers = {p: number for number, group in enumerate(groups) for p in group["params"]}
        self._optimizer.exchange = weakref.ref(self)

    def detach(self, together: bool) -> None:
        """No longer exchange for the optimizer."""
        if self._optimizer.exchange is not None and self._optimizer.exchange() is self:
            self._optimizer.exchange = None

    def reduce(self, bucket: Bucket) -> Iterator[dist.Work]:
        if self._optimizer.in_warmup:
            yield from self._in_warmup.reduce(bucket)
            return
        share = 1.0 / self.process_group.size()  # gradients arrive divided by the number of ranks as well
        for beta1, part in self._parts(bucket).items():
            torch._foreach_mul_(part.places, 1 - beta1)
            if part.momenta:
                torch._foreach_add_(part.places_of_momenta, part.momenta, alpha=beta1 * share)
        yield from self._afterward.reduce(bucket)
        for beta1, part in self._parts(bucket).items():
            if part.momenta:
                torch._foreach_sub_(part.places_of_momenta, part.momenta, alpha=beta1)
            torch._foreach_div_(part.places, 1 - beta1)

    def _parts(self, bucket: Bucket) -> dict[float, _Part]:
        """The parts of the bucket, by the decay of their momentum."""
        parts: dict[float, _Part] = {}
        momenta = self._optimizer.momenta_of(bucket.parameters)
        for parameter, place, momentum in zip(bucket.parameters, bucket.places, momenta, strict=True):
            group = self._optimizer.param_groups[self._group_numbers[parameter]]
            part = parts.setdefault(group["betas"][0], _Part([], [], []))
            part.places.append(place)
            if momentum is not None:  # before the first gradient it is zero
                part.places_of_momenta.append(place)
                part.momenta.extend(local_tensors([momentum]))
        return parts


class _Part(NamedTuple):
    """The parameters of a bucket whose momenta decay at the same rate."""

    places: list[Tensor]  #: views of the flat buffer
    places_of_momenta: list[Tensor]  #: those of parameters that have a momentum
    momenta: list[Tensor]  #: in the optimizer's own memory


@dataclass(frozen=True, kw_only=True, slots=True)
class QAdamAlgorithm(AlgorithmConfig):
    """The algorithm of an optimizer; see `ddp_compile.optim.QAdam.algorithm`."""

    optimizer: HasMomenta

    def build(self, process_group: dist.ProcessGroup) -> MomentumExchange:
        return MomentumExchange(process_group, self.optimizer)
