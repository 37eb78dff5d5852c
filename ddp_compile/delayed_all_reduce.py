"""Parameters whose gradients are averaged together, when that of another parameter has come."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from ddp_compile import torch_internals
from ddp_compile.config import DelayedParameters
from ddp_compile.errors import ReductionError, ReplicationError
from ddp_compile.plan.spec import shorten_names


def delayed_parameters(
    module: nn.Module, named: Sequence[tuple[str, Parameter]] | None, trigger: Parameter | None
) -> DelayedParameters:
    """What the arguments of ``ddp_compile`` say of them.

    Args:
        module: Has all of them.
        named: What ``delay_all_reduce_named_params`` was given.
        trigger: What ``param_to_hook_all_reduce`` was given.

    Raises:
        ValueError: One was given without the other.
        ReplicationError: A name is not that of the parameter in the module, or one can have no gradient.
    """
    if (not named) != (trigger is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce belong together: the gradients of the first are"
            " averaged when that of the second has come; pass both, or none"
        )
    if not named or trigger is None:
        return DelayedParameters()
    own = dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in named:
        if own.get(name) is not parameter:
            raise ReplicationError(
                f"delay_all_reduce_named_params names {name}, which is not that parameter of the module; pass pairs of"
                " module.named_parameters()"
            )
    for name, parameter in [*named, ("param_to_hook_all_reduce", trigger)]:
        if not parameter.requires_grad:
            raise ReplicationError(f"{name} requires no gradient, so its all-reduce cannot be delayed; leave it out")
    return DelayedParameters(dict(named), trigger)


class DelayedAllReduce:
    """Averages the gradients of some parameters at the end of each backward that brings a certain gradient.

    It is meant for parameters whose gradients come in several backwards before. ``no_sync`` makes no difference, and
    neither do other settings of the module. What one rank has no gradient of counts as zeros.

    Args:
        parameters: Which, and when.
        process_group: The ranks.

    Source: ``_delayed_all_reduce_hook`` of torch 2.13, nn/parallel/distributed.py, which nobody waits for. At the end
    of the backward, since compiled code may bring the trigger's gradient before the others.
    """

    def __init__(self, parameters: DelayedParameters, process_group: dist.ProcessGroup) -> None:
        self._parameters = dict(parameters.named)
        self._process_group = process_group
        self._handle: RemovableHandle | None = None
        # Through C++ a parameter's hook leads to the parameter, in a circle that gc cannot see.
        this = weakref.ref(self)

        def has_come(_parameter: Tensor) -> None:
            alive = this()
            if alive is not None:
                torch_internals.queue_backward_callback(alive._all_reduce)

        if parameters.trigger is not None:
            register = parameters.trigger.register_post_accumulate_grad_hook
            self._handle = torch_internals.register_own(register, has_come)

    def refuse_join(self) -> None:
        """Raise a ReplicationError if there are any: a rank without input left does not know when they come."""
        if self._parameters:
            raise ReplicationError(
                f"{self._who} inside a Join: ranks that have no input left could not know when they come. Train on as"
                " many batches on every rank, or drop delay_all_reduce_named_params"
            )

    def remove_hook(self) -> None:
        """Average nothing any more."""
        if self._handle is not None:
            self._handle.remove()

    @torch.no_grad()
    def _all_reduce(self) -> None:
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        by_dtype = attrgetter("dtype")
        parameters = sorted(self._parameters.values(), key=lambda parameter: str(parameter.dtype))
        for _, group in itertools.groupby(parameters, by_dtype):
            gradients = [parameter.grad for parameter in group if parameter.grad is not None]
            if any(gradient.is_sparse for gradient in gradients):
                raise ReplicationError(f"{self._who}: sparse gradients cannot be delayed; leave their parameters out")
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).div_(self._process_group.size())
            try:
                dist.all_reduce(flat, group=self._process_group)
            except RuntimeError as error:
                raise ReductionError(
                    f"{self._who}: their all-reduce failed. Another rank has raised, exited, or not come to its"
                    f" backward within the process group's timeout; look for its error. ({error})"
                ) from error
            sizes = [gradient.numel() for gradient in gradients]
            for gradient, mean in zip(gradients, flat.split(sizes), strict=True):
                gradient.copy_(mean.view(gradient.shape))

    @property
    def _who(self) -> str:
        return f"rank {self._process_group.rank()}: delayed gradients of {shorten_names(list(self._parameters))}"
