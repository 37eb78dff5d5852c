"""Parameters whose gradients are averaged together, when that of another parameter has come."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from ddp_compile import torch_internals
from ddp_compile.config import DelayedParameters
from ddp_compile.errors import ReductionError, ReplicationError, shorten_names, this_rank
from ddp_compile.validation.description import with_sparse_gradients


def delayed_parameters(
    module: nn.Module, named: Iterable[tuple[str, Parameter]] | None, trigger: Parameter | None
) -> DelayedParameters:
    """What the arguments of ``ddp_compile`` say of them.

    Args:
        module: Has all of them.
        named: What ``delay_all_reduce_named_params`` was given.
        trigger: What ``param_to_hook_all_reduce`` was given.

    Raises:
        ValueError: One was given without the other.
        ReplicationError: A name is not that of the parameter in the module, or one has no gradient, or a sparse one, or
            is a DTensor.
    """
    named = list(named or ())  # which may be a generator
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
        if torch_internals.is_dtensor(parameter):
            raise ReplicationError(f"{name} is a DTensor, whose all-reduce cannot be delayed; leave it out")
    for name, parameter in [*named, ("param_to_hook_all_reduce", trigger)]:
        if not parameter.requires_grad:
            raise ReplicationError(f"{name} requires no gradient, so its all-reduce cannot be delayed; leave it out")
    sparse = with_sparse_gradients(module)
    if announced := [name for name, parameter in named if id(parameter) in sparse]:
        raise ReplicationError(
            f"{shorten_names(announced)}: sparse gradients cannot be delayed; leave them out, or make their layers with"
            " sparse=False"
        )
    return DelayedParameters(dict(named), trigger, _name_of(trigger, own))


def _name_of(parameter: Parameter, own: Mapping[str, Parameter]) -> str:
    return next((name for name, other in own.items() if other is parameter), "a parameter of another module")


class DelayedAllReduce:
    """Averages the gradients of some parameters at the end of each backward that brings a certain gradient.

    It is meant for parameters whose gradients come in several backwards before. ``no_sync`` makes no difference, and
    neither do other settings of the module. What one rank has no gradient of counts as zeros.

    Args:
        parameters: Which, and when.
        process_group: The ranks.

    Source: ``_delayed_all_reduce_hook`` of torch 2.13, nn/parallel/distributed.py, which nobody waits for.

    Note [Behind everything]
    The all-reduce comes at the end of the backward, since compiled code may bring the trigger's gradient before the
    others. It comes behind the ends of all reducers: a rank may meet the trigger's gradient before the first one that
    is reduced, and another rank after it, but all have to send the same things in the same order. So what the hook
    queues only queues the all-reduce, behind everything that the backward has queued. The end of a reentrant
    checkpoint, which is a backward inside the backward, is too early: what comes later would not be averaged.
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
                torch_internals.queue_backward_callback(alive._backward_ends)

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

    def refuse_optimizers_in_backward(self) -> None:
        """Raise a ReplicationError if ``_apply_optimizer_in_backward`` steps one before it is averaged."""
        if stepped := [name for name, p in self._parameters.items() if getattr(p, "_in_backward_optimizers", None)]:
            raise ReplicationError(
                f"{self._who}: _apply_optimizer_in_backward would step {shorten_names(stepped)} with this rank's own"
                " gradients, before they are averaged; step them behind the backward, or do not delay them"
            )

    def remove_hook(self) -> None:
        """Average nothing any more."""
        if self._handle is not None:
            self._handle.remove()

    def _backward_ends(self) -> None:
        if torch_internals.is_inside_backward():
            raise ReplicationError(
                f"{self._who}: the gradient of param_to_hook_all_reduce has come in a backward inside another one, of a"
                " reentrant checkpoint for example, behind which more gradients may come. Use use_reentrant=False, or"
                " give a parameter that is used outside of it"
            )
        torch_internals.queue_backward_callback(self._all_reduce)

    @torch.no_grad()
    def _all_reduce(self) -> None:
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_sparse:  # a functional embedding's, on this rank perhaps alone
                parameter.grad = parameter.grad.to_dense()
            alike.setdefault((parameter.dtype, parameter.device), []).append(parameter.grad)
        for gradients in alike.values():
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
        return f"{this_rank()}: delayed gradients of {shorten_names(list(self._parameters))}"
