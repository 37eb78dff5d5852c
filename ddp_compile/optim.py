"""QAdam: an optimizer, and how it communicates: gradients at first, and momenta in eight bits a value from then on.

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp_compile.algorithms import AlgorithmConfig, AllReduceInChain, Bucket, CollectiveChain, local_tensors
from ddp_compile.errors import shorten_names, this_rank
from ddp_compile.runtime.algorithms.byte_grad import ByteGradAlgorithm
from ddp_compile.runtime.algorithms.parameter_average import refuse_interval

__all__ = ["QAdam"]

# Settings of the optimizer as a whole. They are in each group, so that every kind of checkpoint contains them.
_OF_ALL_GROUPS = ("num_steps", "warmup_steps")


class QAdam(Optimizer):
    """Adam that sends eight bits a value: it averages gradients at first, and compressed momenta later.

    The first ``warmup_steps`` steps are those of ``torch.optim.Adam``, bit for bit. Then the variance v is frozen, and
    the mean of the ranks' momenta, compressed as by ``ByteGrad()``, replaces the momentum::

        optimizer = QAdam(model.parameters(), lr=1e-3, warmup_steps=1000)
        model = ddp_compile(model, algorithm=optimizer.algorithm())

    ``warmup_steps`` must be large enough for v to settle: several times 1 / (1 - b2), or a fifth of the training.

    - The bias of v is corrected by the number of steps that v has seen, at most ``warmup_steps``. If all steps counted,
      as in the original, each step would grow until it is 1 / sqrt(1 - b2^warmup_steps) times as large: 3.2 times with
      100 steps and b2 = 0.999.
    - Elements whose gradients were all zero in warm-up have no variance, such as rows of an embedding that no batch of
      warm-up contained. They do not move, except by decoupled weight decay: divided by ``eps`` alone, the compression's
      rounding of zeros would move them without bound.
    - ``weight_decay`` applies in all steps.
    - ``.grad`` is a gradient in all steps: Note [Gradients that bring the mean momentum] in ``ddp_compile/optim.py``.
      After warm-up its rounding is that of the momentum divided by 1 - b1, which ``clip_grad_norm_`` includes in the
      norm. With a GradScaler, the larger its scale, the more of the eight bits go to the gradient instead of the
      momentum, as with ``ByteGrad()``.

    It has the state of Adam, and a step needs as much memory as a step of ``torch.optim.Adam(foreach=True)``.
    ``state_dict()`` holds everything needed to resume bit for bit, on any number of ranks.

    Args:
        params: As for any optimizer: parameters, named ones, or groups. Each group may have its own settings except
            ``warmup_steps``.
        lr: Learning rate.
        betas: Decay of momentum and of variance in each step.
        eps: Added to the root of the variance.
        weight_decay: Added to the gradient, times the parameter.
        warmup_steps: Number of steps before the variance is frozen.
        decoupled_weight_decay: The parameter shrinks by ``lr * weight_decay`` instead, as with AdamW.

    Raises:
        ValueError: A setting is out of range.

    Source: QAdam of Bagua (Gan et al. 2021, arXiv 2107.01499), which is 1-bit Adam (Tang et al. 2021, arXiv 2102.02888)
    with eight bits; without what Bagua loses: the gradient of the first step after warm-up, weight decay, and the betas
    of all groups except one.
    """

    #: The exchange of its momenta; alive while a model is replicated with `algorithm`.
    exchange: weakref.ref[MomentumExchange] | None = None

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        warmup_steps: int = 100,
        decoupled_weight_decay: bool = False,
    ) -> None:
        refuse_interval("QAdam", "warmup_steps", warmup_steps)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "warmup_steps": warmup_steps,
            "num_steps": 0,
        }
        super().__init__(params, defaults)

    @property
    def num_steps(self) -> int:
        """Number of completed steps."""
        return int(self.param_groups[0]["num_steps"])

    @property
    def warmup_steps(self) -> int:
        """Number of steps before the variance is frozen."""
        return int(self.param_groups[0]["warmup_steps"])

    @property
    def in_warmup(self) -> bool:
        """Whether the next step is an ordinary step of Adam."""
        return self.num_steps < self.warmup_steps

    def algorithm(self) -> QAdamAlgorithm:
        """For ``ddp_compile(model, algorithm=...)``. The optimizer must have all parameters of the model."""
        return QAdamAlgorithm(optimizer=self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like any optimizer's, but not after warm-up, when no variance can be learned.

        Raises:
            ValueError: A setting is out of range, or warm-up is over.
        """
        shared = self.param_groups[0] if self.param_groups else self.defaults
        _refuse_settings({**self.defaults, **param_group}, shared["warmup_steps"])
        if shared["num_steps"] >= shared["warmup_steps"]:
            raise ValueError(
                f"QAdam.add_param_group() after {shared['num_steps']} steps: warm-up ended with step"
                f" {shared['warmup_steps']}, so new parameters could no longer learn their variance. Add them earlier,"
                " or make a new QAdam of all parameters"
            )
        super().add_param_group(param_group)
        self.param_groups[-1].update({name: shared[name] for name in _OF_ALL_GROUPS})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Like any optimizer's. All ranks load the same state, between two steps.

        Raises:
            ValueError: It is another optimizer's.
        """
        for number, group in enumerate(state_dict["param_groups"]):
            if missing := [name for name in _OF_ALL_GROUPS if name not in group]:
                raise ValueError(
                    f"QAdam.load_state_dict(): group {number} has no {', '.join(missing)}, so it is the state of"
                    " another optimizer; load the result of QAdam.state_dict()"
                )
        super().load_state_dict(dict(state_dict))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step once over all parameters that have a gradient.

        Args:
            closure: Computes the loss and the gradients again.

        Returns:
            The closure's return value.

        Raises:
            RuntimeError: After warm-up, with several ranks, no model exchanges the momentum, or a parameter got its
                first gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_unprepared()
        for group in self.param_groups:
            for parameters in _by_kind(p for p in group["params"] if p.grad is not None):
                self._step(group, parameters)
        is_last_of_warmup = self.num_steps + 1 == self.warmup_steps
        for group in self.param_groups:
            group["num_steps"] += 1
        if is_last_of_warmup:
            for state in self.state.values():
                # No later step moves these elements: a momentum divided by infinity is zero.
                state["exp_avg_sq"].masked_fill_(state["exp_avg_sq"] == 0, float("inf"))
        return loss

    def _step(self, group: Mapping[str, Any], parameters: list[Any]) -> None:
        """The same operations as those of ``torch.optim.Adam(foreach=True)``, in the same order."""
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        states = [self._state_of(parameter) for parameter in parameters]
        momenta = [state["exp_avg"] for state in states]
        variances = [state["exp_avg_sq"] for state in states]
        gradients: Any = [parameter.grad for parameter in parameters]
        if group["weight_decay"] and group["decoupled_weight_decay"]:
            torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        elif group["weight_decay"]:
            gradients = torch._foreach_add(gradients, parameters, alpha=group["weight_decay"])
        torch._foreach_lerp_(momenta, gradients, 1 - beta1)
        for state in states:
            state["step"] += 1
        if self.in_warmup:
            torch._foreach_mul_(variances, beta2)
            torch._foreach_addcmul_(variances, gradients, gradients, 1 - beta2)
            for state in states:
                state["exp_avg_sq_step"] += 1
        del gradients
        denominators: Any = torch._foreach_sqrt(variances)
        torch._foreach_div_(denominators, [(1 - beta2 ** state["exp_avg_sq_step"]) ** 0.5 for state in states])
        torch._foreach_add_(denominators, group["eps"])
        sizes = [-lr / (1 - beta1 ** state["step"]) for state in states]
        torch._foreach_addcdiv_(parameters, momenta, denominators, sizes)

    def _state_of(self, parameter: Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            # Numbers, not tensors: loading casts a tensor to the dtype of its parameter.
            state["step"] = state["exp_avg_sq_step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def name_of(self, group: int, number: int) -> str:
        """A parameter in an error: its name if it has one, or its place."""
        names = self.param_groups[group].get("param_names")
        if names:
            return str(names[number])
        shape = tuple(self.param_groups[group]["params"][number].shape)
        return f"parameter {number} of group {group}, of shape {shape}"

    def _refuse_unprepared(self) -> None:
        """Raise a RuntimeError, before anything is written, if the next step cannot be taken."""
        of = f"step {self.num_steps + 1} of QAdam(warmup_steps={self.warmup_steps})"
        without_state = []
        for number, group in enumerate(self.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is not None and parameter.grad.is_sparse:
                    raise RuntimeError(f"{of}: {self.name_of(number, place)} has a sparse gradient; use sparse=False")
                if parameter.grad is not None and not self.state.get(parameter):
                    without_state.append(self.name_of(number, place))
        if self.in_warmup:
            return
        if without_state:
            raise RuntimeError(
                f"{of}: the first gradient of {shorten_names(without_state)} came after warm-up, so there is no"
                " variance to divide by. Raise warmup_steps until every parameter has been used, or freeze them"
            )
        is_exchanged = self.exchange is not None and self.exchange() is not None
        if not is_exchanged and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                f"{this_rank()}: {of}: none of {dist.get_world_size()} ranks exchanges the momentum with the others."
                " Train model = ddp_compile(model, algorithm=optimizer.algorithm()), or use torch.optim.Adam"
            )


def _refuse_settings(group: Mapping[str, Any], warmup_steps: int) -> None:
    """Raise a ValueError if the settings of a group are out of range."""
    for name in ("lr", "eps", "weight_decay"):
        if not group[name] >= 0:
            raise ValueError(f"QAdam({name}={group[name]!r}): pass 0 or more")
    betas = group["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"QAdam(betas={betas!r}): pass two numbers from 0 to less than 1")
    if group["warmup_steps"] != warmup_steps:
        raise ValueError(
            f"QAdam: a group has warmup_steps={group['warmup_steps']!r}, but QAdam has warmup_steps={warmup_steps}, and"
            " all groups are sent in the same way; pass it to QAdam alone"
        )


def _by_kind(parameters: Iterable[Parameter]) -> Iterable[list[Parameter]]:
    """Lists of one device and dtype each, as one kernel takes them."""
    kinds: dict[Any, list[Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    return kinds.values()


class MomentumExchange(CollectiveChain):
    """An all-reduce of gradients in warm-up, and then ByteGrad's reduction of momenta.

    Launching does not change the optimizer, so a bucket may be launched twice.
    """

    traits = ByteGradAlgorithm.traits

    def __init__(self, process_group: dist.ProcessGroup, optimizer: QAdam) -> None:
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
        for parameter, place in zip(bucket.parameters, bucket.places, strict=True):
            group = self._optimizer.param_groups[self._group_numbers[parameter]]
            part = parts.setdefault(group["betas"][0], _Part([], [], []))
            part.places.append(place)
            if state := self._optimizer.state.get(parameter):  # before the first gradient the momentum is zero
                part.places_of_momenta.append(place)
                part.momenta.extend(local_tensors([state["exp_avg"]]))
        return parts


class _Part(NamedTuple):
    """The parameters of a bucket whose momenta decay at the same rate."""

    places: list[Tensor]  #: views of the flat buffer
    places_of_momenta: list[Tensor]  #: those of parameters that have a momentum
    momenta: list[Tensor]  #: in the optimizer's own memory


@dataclass(frozen=True, kw_only=True, slots=True)
class QAdamAlgorithm(AlgorithmConfig):
    """The algorithm of an optimizer; see `QAdam.algorithm`."""

    optimizer: QAdam

    def build(self, process_group: dist.ProcessGroup) -> MomentumExchange:
        return MomentumExchange(process_group, self.optimizer)
