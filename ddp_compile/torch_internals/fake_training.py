"""A training step without values: fake tensors, a process group that sends nothing, graphs that are not compiled."""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn


@contextmanager
def fake_process_group(world_size: int) -> Iterator[None]:
    """Inside, this process is rank 0 of a default process group whose other ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend, too

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def quiet_fake_mode() -> Iterator[Any]:
    """Gives a mode in which tensors are made without memory. Real ones become fake when an operator gets them.

    Inside, torch does not log operators that raise for fake tensors, nor values that they lack, since such errors reach
    the caller.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    logs = [logging.getLogger(f"torch.{name}") for name in ("_subclasses.fake_tensor", "_dynamo.variables.tensor")]
    before = [log.disabled for log in logs]
    try:
        for log in logs:
            log.disabled = True
        yield FakeTensorMode(allow_non_fake_inputs=True)
    finally:
        for log, was_disabled in zip(logs, before, strict=True):
            log.disabled = was_disabled


def make_fake(module: nn.Module, fake_mode: Any) -> None:
    """Replace the parameters and buffers of a module that was made outside the fake mode."""
    for submodule in module.modules():
        for tensors in (submodule._parameters, submodule._buffers):
            for name, value in tensors.items():
                tensors[name] = fake_tensors(value, fake_mode)


def fake_tensors(values: Any, fake_mode: Any) -> Any:
    """A pytree with fake tensors for the real ones; the same one for the same tensor."""
    from torch._subclasses.fake_tensor import FakeTensor

    def fake(value: Any) -> Any:
        is_real = isinstance(value, Tensor) and not isinstance(value, FakeTensor | nn.UninitializedParameter)
        return fake_mode.from_tensor(value) if is_real else value

    return pytree.tree_map(fake, values)


def traced_only() -> Callable[..., Any]:
    """The backend inductor without its last stage: it makes forward and backward graphs, and they run uncompiled."""
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    def run_as_it_is(graph: fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
        return make_boxed_func(graph.forward)

    return functools.partial(compile_fx, inner_compile=run_as_it_is)


def own_error(error: BaseException) -> BaseException:
    """The error of the code that was traced, which Dynamo wraps in its own."""
    inner = error.__cause__ or (error.__context__ if type(error).__module__.startswith("torch._dynamo") else None)
    return error if inner is None else own_error(inner)
