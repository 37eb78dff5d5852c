"""DiLoCo: every rank takes many steps by itself; then an outer optimizer steps by the ranks' mean parameter change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp_compile.algorithms import (
    AlgorithmConfig,
    FlatParameters,
    Traits,
    all_reduce,
    average_over,
    streams,
    wait_for,
)
from ddp_compile.errors import ReductionError, shorten_names, this_rank
from ddp_compile.runtime.algorithms.parameter_average import ParameterAverage, refuse_interval

#: If nothing has written to any parameter by then, no optimizer steps them; a scaler would not skip so many steps.
_STEPS_WITHOUT_OPTIMIZER = 100


class DiLoCoAlgorithm(ParameterAverage):
    """Each fragment of the model has an outer copy g of its parameters x, and an outer momentum m.

    Once in every H steps, each rank sends its delta g - x. With d, the mean delta of the ranks, m becomes
    momentum m + d, and g becomes g - lr (d + momentum m). Then x becomes (1 - alpha) g + alpha x. These are the
    operations of ``torch.optim.SGD(nesterov=True)`` with d as the gradient, in the parameters' dtype. The first cycle
    begins after warm-up, in which gradients are averaged.
    """

    def __init__(self, process_group: dist.ProcessGroup, config: DiLoCo) -> None:
        super().__init__(process_group, warmup_steps=config.warmup_steps)
        self._config = config
        has_warmup = config.warmup_steps > 0
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        self.traits = Traits(
            payload="both" if has_warmup else "parameters", takes_sparse=not has_warmup, takes_dtypes=dtypes
        )
        self.name = str(config)
        self._begins_anew = False  # the ranks' parameters may differ, and g and m do not belong to them

    def objection(self, parameters: Mapping[str, Parameter]) -> str:
        """There must be as many parameters as fragments."""
        if len(parameters) >= self._config.fragments:
            return ""
        return (
            f"DiLoCo(fragments={self._config.fragments}) has more fragments than the model has parameters to reduce,"
            f" {len(parameters)}; pass at most that many"
        )

    def attach(self, parameters: Mapping[str, Parameter]) -> None:
        """Make a process group, and the outer copies and momenta of each fragment."""
        super().attach(parameters)
        self._named = dict(parameters)
        self._stepped: set[int] = set()  # ids of parameters that optimizers have stepped
        self._versions = self.parameters.versions()
        parts = cut(list(parameters.values()), self._config.fragments)
        self._fragments = [
            _Fragment(part, self._config, self._config.sync_every * (number + 1) // len(parts), self.group, self.name)
            for number, part in enumerate(parts)
        ]

    @property
    def meets_others(self) -> bool:
        """Whether a fragment is sent or received after this step."""
        if self.sends_gradients:
            return False
        step = self.num_steps + 1 - self._warmup_steps
        begins = self._begins_anew or self._warmup_has_ended
        return begins or any(fragment.acts_after(step) for fragment in self._fragments)

    @property
    def _warmup_has_ended(self) -> bool:
        """Whether this is the first step after warm-up."""
        return 0 < self._warmup_steps == self.num_steps

    def after_backward(self) -> None:
        if self._begins_anew or self._warmup_has_ended:
            self._begin_anew()
        super().after_backward()

    @torch.no_grad()
    def after_step(self, optimizers: Sequence[Optimizer]) -> None:
        self._refuse_other_parameters(optimizers)
        for fragment in self._fragments:
            fragment.act(self.num_steps - self._warmup_steps)

    def finish_exchanges(self) -> None:
        for fragment in self._fragments:
            fragment.finish()

    def before_load(self) -> None:
        """Restart from the ranks' mean, unless g and m are loaded after the module's parameters."""
        self._begins_anew = True

    def _begin_anew(self) -> None:
        self.finish_exchanges()
        average_over(self.group, self.parameters, self.name)
        for fragment in self._fragments:
            fragment.begin_anew()
        self._begins_anew = False

    def _refuse_other_parameters(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise if parameters have gradients but no optimizer; not if a scaler has skipped the optimizer's steps."""
        self._stepped |= {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
        left = {name: p.grad for name, p in self._named.items() if p.grad is not None and id(p) not in self._stepped}
        are_wanted = bool(left) and all(bool(g.isfinite().all()) for g in left.values())
        are_wanted = are_wanted and any(bool(g.any()) for g in left.values())
        are_idle = not self._stepped and self.num_steps >= _STEPS_WITHOUT_OPTIMIZER
        if are_wanted or (are_idle and self.parameters.versions() == self._versions):
            raise ReductionError(
                f"{this_rank()}: {self.num_steps} steps of the {self.name} are over, but no torch.optim.Optimizer has"
                f" stepped these parameters: {shorten_names(list(left or self._named))}. Give all parameters of the"
                " model to optimizers; or freeze these with requires_grad_(False) before ddp_compile, or name them in"
                " parameters_to_ignore"
            )

    def state_dict(self) -> dict[str, Any]:
        """The fragments and the number of steps. Every rank calls it."""
        state = super().state_dict()
        self.finish_exchanges()
        fragments = [fragment.state_dict() for fragment in self._fragments]
        flags = {"begins_anew": self._begins_anew, "is_in_warmup": self._is_in_warmup}
        return {**state, **flags, "fragments": fragments}

    @property
    def _is_in_warmup(self) -> bool:
        return self.sends_gradients or self._warmup_has_ended

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume; load the module's parameters first."""
        super().load_state_dict(state)
        self.finish_exchanges()
        for fragment, given in zip(self._fragments, state["fragments"], strict=True):
            fragment.load_state_dict(given)
        # With another warmup_steps, g and m may be out of date, or the ranks' parameters may differ.
        self._begins_anew = state["begins_anew"] or state["is_in_warmup"] != self._is_in_warmup

    def refuse_state(self, state: Mapping[str, Any]) -> None:
        super().refuse_state(state)
        own = [_shapes_of(fragment.kept) for fragment in self._fragments]
        if own != [_shapes_of(each) for each in state["fragments"]]:
            raise ValueError(
                f"{this_rank()}: the {self.name} was given the state of other parameters or fragments; load it into the"
                " algorithm whose state_dict() it is"
            )


class _Fragment:
    """A part of the model that takes its outer steps at its own time; ``offset`` is the first step that sends it."""

    def __init__(
        self, parameters: Sequence[Parameter], config: DiLoCo, offset: int, group: dist.ProcessGroup, name: str
    ) -> None:
        self._parameters, self._config, self._offset = FlatParameters(parameters), config, offset
        self._group, self._name = group, name
        self._deltas: list[Tensor] | None = None  # this rank's, which become the mean of all
        self._works: list[Any] = []  # after which they are that
        self._before, self._momentum = self._parameters.copies(), self._parameters.new()

    def acts_after(self, step: int) -> bool:
        """Whether it sends or receives after this step, counted from 1 after warm-up."""
        return self._age(step) in (0, self._config.fragment_sync_delay)

    def _age(self, step: int) -> int | None:
        """The number of steps since it was sent; None if it never was."""
        return None if step < self._offset else (step - self._offset) % self._config.sync_every

    def act(self, step: int) -> None:
        """Send and receive what is to be after this step."""
        age = self._age(step)
        if age == 0:
            self._send()
        if age == self._config.fragment_sync_delay and self._deltas is not None:
            self._apply()

    def _send(self) -> None:
        now, size = self._parameters.copies(), self._group.size()
        self._deltas = [before.float() - x.float() for before, x in zip(self._before, now, strict=True)]
        if size > 1:
            self._deltas = [delta.mul_(1 / size).to(self._config.wire_dtype) for delta in self._deltas]
            self._works = [all_reduce(delta, self._group) for delta in self._deltas]

    def finish(self) -> None:
        """Receive what is under way."""
        if self._deltas is not None:
            wait_for(self._works, self._name)
            streams.used_here(self._deltas)  # another stream may have allocated them, at an earlier step
            self._works = []

    def _apply(self) -> None:
        """The outer step."""
        self.finish()
        assert self._deltas is not None
        config, new = self._config, self._parameters.copies()
        for before, momentum, delta, x in zip(self._before, self._momentum, self._deltas, new, strict=True):
            gradient = delta.to(before.dtype)
            momentum.mul_(config.outer_momentum).add_(gradient)
            before.add_(gradient.add(momentum, alpha=config.outer_momentum), alpha=-config.outer_lr)
            x.copy_(before.lerp(x, config.fragment_update_alpha) if config.fragment_update_alpha else before)
        self._deltas = None
        self._parameters.write(new)

    def begin_anew(self) -> None:
        """Set g to the parameters, and all else to zero."""
        self._parameters.read(self._before)
        self._deltas, self._momentum = None, self._parameters.new()

    @property
    def kept(self) -> dict[str, list[Tensor]]:
        return {"before": self._before, "momentum": self._momentum}

    def state_dict(self) -> dict[str, Any]:
        """Copies; with the mean over the ranks if it was received but not applied. Nothing may be under way."""
        mean = None if self._deltas is None else [delta.clone() for delta in self._deltas]
        return {**{key: [flat.clone() for flat in flats] for key, flats in self.kept.items()}, "mean": mean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of the same shapes."""
        for key, flats in self.kept.items():
            for flat, given in zip(flats, state[key], strict=True):
                flat.copy_(given)
        device = self._before[0].device
        self._deltas = None if state["mean"] is None else [delta.to(device, copy=True) for delta in state["mean"]]


def cut(parameters: Sequence[Parameter], count: int) -> list[list[Parameter]]:
    """Cut a list into parts with about equally many values; none is empty."""
    total, seen, parts = sum(parameter.numel() for parameter in parameters), 0, list[list[Parameter]]()
    for number, parameter in enumerate(parameters):
        must_cut = len(parameters) - number == count - len(parts)
        if must_cut or (len(parts) < count and seen * count >= total * len(parts)):
            parts.append([])
        parts[-1].append(parameter)
        seen += parameter.numel()
    return parts


def _shapes_of(state: Mapping[str, Any]) -> dict[str, list[torch.Size]]:
    return {key: [flat.shape for flat in state[key]] for key in ("before", "momentum")}


@dataclass(frozen=True, kw_only=True, slots=True)
class DiLoCo(AlgorithmConfig):
    """Every rank trains by itself with any optimizer; after many steps, an outer optimizer steps by the mean change.

    With H = ``sync_every`` it sends H times less than an all-reduce of gradients in float32; H = 100 to 500 is usual.
    The outer optimizer is ``torch.optim.SGD(nesterov=True)``. It takes memory for two copies of the parameters.
    Parameters are averaged as soon as the optimizer has stepped, so an evaluation after that step sees the same
    parameters on every rank. The arguments are named as those of ``torchft.local_sgd.DiLoCo``, where it has them.

    Args:
        sync_every: Number of steps from one outer step to the next, of each fragment.
        fragments: Number of parts of the model, cut in the order of registration, with about equally many values. They
            are sent one after the other, evenly spread over the ``sync_every`` steps.
        fragment_sync_delay: Number of steps that the ranks take while a fragment is under way; less than
            ``sync_every``.
        fragment_update_alpha: Weight of this rank's own parameters when the outer step's result is mixed with them,
            from 0 to 1. With a delay, 0 drops the steps of the meantime.
        wire_dtype: Of the deltas that are sent: ``torch.float32`` or ``torch.bfloat16``.
        outer_lr: Learning rate of the outer optimizer.
        outer_momentum: Its Nesterov momentum; 0 with ``outer_lr=1`` averages parameters. The defaults are for cycles of
            hundreds of steps; cycles of 10 steps did better with ``outer_lr=1`` and ``outer_momentum=0.5``.
        warmup_steps: Number of steps in which gradients are averaged first, as by ``GradientAllReduce()``. The paper's
            models had been trained so for about a quarter of all steps.

    Raises:
        ValueError: A setting is out of range.

    Source: Douillard et al. 2023, DiLoCo (arXiv 2311.08105), with its outer settings as defaults; Douillard et al.
        2025, Streaming DiLoCo (arXiv 2501.18512) for fragments, delay and alpha.
    """

    sync_every: int
    fragments: int = 1
    fragment_sync_delay: int = 0
    fragment_update_alpha: float = 0.0
    wire_dtype: torch.dtype = torch.float32
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        refuse_interval("DiLoCo", "sync_every", self.sync_every)
        refuse_interval("DiLoCo", "fragments", self.fragments)
        refuse_interval("DiLoCo", "fragment_sync_delay", self.fragment_sync_delay, least=0)
        refuse_interval("DiLoCo", "warmup_steps", self.warmup_steps, least=0)
        if self.fragment_sync_delay >= self.sync_every:
            raise ValueError(
                f"DiLoCo(fragment_sync_delay={self.fragment_sync_delay}) must be less than"
                f" sync_every={self.sync_every}, since a fragment is received before it is sent again"
            )
        if self.wire_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"DiLoCo(wire_dtype={self.wire_dtype!r}): pass torch.float32 or torch.bfloat16; to hide the transfer,"
                " pass fragments and fragment_sync_delay"
            )
        for name, most in (("fragment_update_alpha", 1.0), ("outer_lr", math.inf), ("outer_momentum", 1.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
                raise ValueError(f"DiLoCo({name}={value!r}): pass a number from 0 to {most}")

    def build(self, process_group: dist.ProcessGroup) -> DiLoCoAlgorithm:
        return DiLoCoAlgorithm(process_group, self)
