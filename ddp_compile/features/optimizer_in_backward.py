"""Optimizer steps inside ``backward()``: torch's ``_apply_optimizer_in_backward``, and ``_register_fused_optim``.

DistributedDataParallel steps bucket by bucket while the backward runs. Here all steps come after the last bucket has
been reduced, but before ``backward()`` returns, since the rest of a compiled backward may need the old parameters.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.nn import Parameter


class OptimizersInBackward:
    """Takes steps at the end of each iteration.

    Source: ``_setup_in_backward_optimizers`` and ``_register_fused_optim`` of torch 2.13, nn/parallel/distributed.py.
    """

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self._parameters = dict(parameters)
        self._functional: list[tuple[Any, Collection[Parameter]]] = []
        self._stepped: list[Parameter] = []

    @property
    def are_registered(self) -> bool:
        return bool(self._functional or with_steps(self._parameters))

    def adopt(self) -> None:
        """Before the first backward, take over from the hooks that ``_apply_optimizer_in_backward`` has set."""
        self._stepped = [self._parameters[name] for name in with_steps(self._parameters)]
        if self._stepped:
            from torch.distributed import optim  # takes a second

            handles: Any = optim.apply_optimizer_in_backward.param_to_optim_hook_handle_map
            for parameter in self._stepped:
                for handle in handles.get(parameter, ()):
                    handle.remove()

    def register(
        self, optimizer: type, parameters: Iterable[Parameter] | None, arguments: tuple[Any, ...], keywords: Any
    ) -> None:
        from torch.distributed import optim  # takes a second

        functional = optim.as_functional_optim(optimizer, *arguments, **keywords)
        chosen = set(self._parameters.values()) if parameters is None else set(parameters)
        if not chosen <= set(self._parameters.values()):
            raise ValueError("optim_params has parameters that this module does not reduce; leave those out")
        self._functional.append((functional, chosen))

    def step(self) -> None:
        """Take the steps; every ``.grad`` is the mean over the ranks."""
        for parameter in self._stepped:
            if parameter.grad is not None:
                for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
                    optimizer.step()
                parameter.grad = None
        for functional, chosen in self._functional:
            with torch.no_grad():
                for parameter in self._parameters.values():
                    if parameter in chosen and parameter.grad is not None:
                        functional.step_param(parameter, parameter.grad)


def with_steps(parameters: Mapping[str, Parameter]) -> list[str]:
    """The names of the parameters that ``_apply_optimizer_in_backward`` steps."""
    return [name for name, parameter in parameters.items() if getattr(parameter, "_in_backward_optimizers", None)]
