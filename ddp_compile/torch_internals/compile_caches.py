"""Keeps graphs out of AOTAutograd's cache if the cache would answer wrongly.

Note [Graphs kept out of AOTAutograd's cache]
*Floats that vary.* Dynamo passes a Python float that has had several values as a tensor and a symbol. If an operator
takes no symbol, AOTAutograd compiles the value into the graph, under a guard that it adds while it traces. Neither the
value nor the guard is in the key, and a hit does not restore the guard. So the cache returns a graph for another float,
which Dynamo then runs for all floats (pytorch/pytorch#194976; #197889 is open in torch 2.14). FXGraphCache is correct,
since its key is the graph including the value.

*Outputs that share memory.* AOTAutograd replays their views on the common base. Up to torch 2.13 the recorded view of a
matrix product comes back from a cache with sizes read from freed memory (pytorch/pytorch#185861).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch.utils import _pytree as pytree

from ddp_compile.torch_internals.tensors import free_symbols, storage_key

_LOSES_SIZES_OF_VIEWS = torch.__version__ < "2.14"


def right_cache_entries(gm: fx.GraphModule) -> AbstractContextManager[Any]:
    """Compile a graph without AOTAutograd's cache if the cache might answer wrongly.

    Source: ``aot_module_simplified`` of torch 2.13 (_functorch/aot_autograd.py), which asks for these settings first.
    """
    import torch._functorch.config as functorch_config

    varies = any(_depends_on_a_float(value) for node in gm.graph.nodes for value in _values(node))
    if not varies and not (_LOSES_SIZES_OF_VIEWS and _has_outputs_that_share_memory(gm)):
        return functorch_config.patch()
    return functorch_config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False)


def _depends_on_a_float(value: Any) -> bool:
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    return isinstance(value, SymFloat) or any(symbol_is_type(symbol, SymT.FLOAT) for symbol in free_symbols(value))


def _has_outputs_that_share_memory(gm: fx.GraphModule) -> bool:
    tensors = (value for node in gm.graph.output_node().all_input_nodes for value in _values(node))
    keys = [storage_key(tensor) for tensor in tensors if isinstance(tensor, Tensor)]
    known = [key for key in keys if key is not None]
    return len(set(known)) < len(known)


def _values(node: fx.Node) -> Iterator[Any]:
    for value in pytree.tree_leaves(node.meta.get("example_value")):
        if isinstance(value, Tensor | SymInt | SymFloat | SymBool):
            yield value
