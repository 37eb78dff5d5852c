"""The arguments of ``torch.compile`` in one ``ddp_compile`` call."""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ddp_compile import torch_internals

_DEFAULTS = {"backend": "inductor", "mode": None, "fullgraph": False, "dynamic": None, "options": None}


class CompileSettings:
    """The arguments of ``torch.compile``, and the functions made with them; a ValueError names a wrong argument."""

    def __init__(
        self,
        backend: str | Callable[..., Any],
        mode: str | None,
        fullgraph: bool,
        dynamic: bool | None,
        options: Mapping[str, Any] | None,
    ) -> None:
        if not isinstance(backend, str) and not callable(backend):
            raise ValueError(f"backend={backend!r} is neither a name nor a function; pass for example 'inductor'")
        if dynamic not in (None, True, False):
            raise ValueError(f"dynamic={dynamic!r} is not known; pass True, False or None")
        if isinstance(backend, str) and backend not in torch.compiler.list_backends(exclude_tags=()):
            close = difflib.get_close_matches(backend, torch.compiler.list_backends(exclude_tags=()), n=1)
            meant = f"did you mean {close[0]!r}? Or " if close else ""
            usual = ", ".join(sorted(["eager", "aot_eager", *torch.compiler.list_backends()]))  # not all for debugging
            raise ValueError(f"backend={backend!r} is not known; {meant}pass a function or one of {usual}")
        if options and options.get("keep_output_stride") is False:
            raise ValueError(
                "options={'keep_output_stride': False} cannot be used: values that cross between parts of a graph are"
                " described by strides that inductor has to keep; drop it"
            )
        if isinstance(backend, str) and mode is not None and mode not in torch_internals.known_modes():
            raise ValueError(f"mode={mode!r} is not known; pass one of {', '.join(torch_internals.known_modes())}")
        try:
            self.inner = torch_internals.inner_backend(backend, mode, dict(options) if options else None, dynamic)
        except RuntimeError as error:
            raise ValueError(f"options={options!r} are refused by backend={backend!r}: {error}") from error
        self.fullgraph = fullgraph
        self.dynamic = dynamic
        given = dict(
            zip(_DEFAULTS, (getattr(backend, "__name__", backend), mode, fullgraph, dynamic, options), strict=True)
        )
        #: Those that differ from their defaults, as in a call.
        self.chosen = [f"{name}={value!r}" for name, value in given.items() if value != _DEFAULTS[name]]

    def compile(
        self, function: Callable[..., Any], backend: Callable[..., Any], num_modules: int | None = None
    ) -> Callable[..., Any]:
        """``torch.compile`` of a function with these settings, to be called with as many regions; None: one module."""
        return torch_internals.compile_isolated(
            function, backend=backend, fullgraph=self.fullgraph, dynamic=self.dynamic, num_modules=num_modules
        )
