"""A training step without values: fake tensors, a process group that sends nothing, graphs that are not compiled.

`OperatorTimes` says how long a device would take for it.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


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


def num_contributions(loss: Tensor) -> Counter[int]:
    """By ``id`` of each parameter, how many gradients the backward of a loss adds up for it."""
    counts: Counter[int] = Counter()
    seen, found = {loss.grad_fn}, [loss.grad_fn]
    while found:
        node = found.pop()
        for following, _ in node.next_functions if node is not None else ():
            if (variable := getattr(following, "variable", None)) is not None:
                counts[id(variable)] += 1
            elif following not in seen:
                seen.add(following)
                found.append(following)
    return counts


def own_error(error: BaseException) -> BaseException:
    """The error of the code that was traced, which Dynamo wraps in its own."""
    inner = error.__cause__ or (error.__context__ if type(error).__module__.startswith("torch._dynamo") else None)
    return error if inner is None else own_error(inner)


class OperatorTimes(TorchDispatchMode):
    """Inside, every operator advances a clock by the time of its operations or of its bytes, whichever is longer.

    Views take no time. Operators are not fused, so element-wise ones take longer than in compiled code.

    Args:
        flops_per_s: Floating-point operations per second; a multiplication with its addition counts as two.
        bytes_per_s: Rate of the device's memory.
        parameters: Index of each parameter, by its ``id``.
    """

    def __init__(self, flops_per_s: float, bytes_per_s: float, parameters: Mapping[int, int]) -> None:
        super().__init__()
        self.now_s = 0.0
        self.first_read_s: dict[int, float] = {}  #: when an operator first got a parameter, by its index
        self._flops_per_s = flops_per_s
        self._bytes_per_s = bytes_per_s
        self._parameters = parameters

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        for tensor in given:
            if (index := self._parameters.get(id(tensor))) is not None:
                self.first_read_s.setdefault(index, self.now_s)
        result = func(*args, **kwargs)
        if not func.is_view:
            made = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor)]
            count = flop_registry.get(func.overloadpacket)
            flops = count(*args, **kwargs, out_val=result) if count is not None else 0
            num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (*given, *made))
            self.now_s += max(flops / self._flops_per_s, num_bytes / self._bytes_per_s)
        return result
