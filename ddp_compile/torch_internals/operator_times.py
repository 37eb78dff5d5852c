"""How long a device would take for what runs, by the operations and bytes of each operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


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
