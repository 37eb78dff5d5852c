"""Parameters whose gradients are averaged together after another parameter's gradient has come."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from ddp_compile import torch_internals
from ddp_compile.config import DelayedParameters, ReplicateConfig
from ddp_compile.errors import ReplicationError, shorten_names, this_rank
from ddp_compile.runtime.comm import error_messages
from ddp_compile.runtime.comm.exchange import Exchange
from ddp_compile.runtime.normalizer import Normalizer
from ddp_compile.validation.description import with_sparse_gradients


def delayed_parameters(
    module: nn.Module, named: Iterable[tuple[str, Parameter]] | None, trigger: Parameter | None
) -> DelayedParameters:
    """Check the two arguments of ``ddp_compile``; raises ValueError or ReplicationError, which names the parameter."""
    named = list(named or ())  # may be a generator
    if (not named) != (trigger is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce belong together: the gradients of the first"
            " are averaged when the gradient of the second has come; pass both, or neither"
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
    trigger_name = next((name for name, other in own.items() if other is trigger), "a parameter of another module")
    return DelayedParameters(dict(named), trigger, trigger_name)


class DelayedAllReduce:
    """Averages the gradients of some parameters at the end of each backward that brings the trigger's gradient.

    Their own gradients may have come in several earlier backwards. ``no_sync`` and other settings of the module make no
    difference. If a rank lacks a gradient, it contributes zeros.

    Source: ``_delayed_all_reduce_hook`` of torch 2.13, nn/parallel/distributed.py, which nobody waits for.

    Note [Last of all]
    The all-reduce comes at the end of the backward, since compiled code may bring the trigger's gradient before the
    others. It also comes after the ends of all reducers: the trigger's gradient may arrive before the first reduced
    gradient on one rank and after it on another, but all ranks must send in the same order. So the hook queues a
    callback that in turn queues the all-reduce, after everything that the backward has queued. The end of a reentrant
    checkpoint, which is a backward inside the backward, is too early: later gradients would be left out.
    """

    def __init__(self, config: ReplicateConfig, process_group: dist.ProcessGroup, normalizer: Normalizer) -> None:
        self._normalizer = normalizer
        self._reduce_dtype, parameters = config.reduce_dtype, config.delayed
        self._parameters = dict(parameters.named)
        self._process_group = process_group
        self._handle: RemovableHandle | None = None
        if parameters.trigger is not None:
            register = parameters.trigger.register_post_accumulate_grad_hook
            # A parameter holds its hooks in C++, where gc cannot see a cycle.
            self._handle = torch_internals.register_own(register, torch_internals.while_alive(self._has_come))

    def remove_hook(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _has_come(self, _trigger: Tensor) -> None:
        torch_internals.queue_backward_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        if torch_internals.is_inside_backward():
            raise ReplicationError(
                f"{this_rank()}: {self._what}: the gradient of param_to_hook_all_reduce has come in a backward inside"
                " another one, of a reentrant checkpoint for example, after which more gradients may come. Use"
                " use_reentrant=False, or give a parameter that is used outside it"
            )
        torch_internals.queue_backward_callback(self._all_reduce)

    # Not decorated with no_grad: Dynamo skips the code of callbacks, and all decorated functions share theirs.
    def _all_reduce(self) -> None:
        with torch.no_grad():
            self._all_reduce_each_dtype()

    def _all_reduce_each_dtype(self) -> None:
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_sparse:  # of a functional embedding, perhaps on this rank alone
                parameter.grad = parameter.grad.to_dense()
            alike.setdefault((parameter.dtype, parameter.device), []).append(parameter.grad)
        factor = self._normalizer.factor_of_delayed(self._what)
        for gradients in alike.values():
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            if self._reduce_dtype is not None and flat.dtype in (torch.bfloat16, torch.float16):
                flat = flat.to(self._reduce_dtype)
            flat.mul_(factor)
            with Exchange(lambda error: error_messages.reduction_failed(self._what, error)):
                dist.all_reduce(flat, group=self._process_group)
            sizes = [gradient.numel() for gradient in gradients]
            for gradient, mean in zip(gradients, flat.split(sizes), strict=True):
                gradient.copy_(mean.view(gradient.shape))

    @property
    def _what(self) -> str:
        return f"delayed gradients of {shorten_names(list(self._parameters))}"
