"""Tensors without values, sizes that are symbols, and what memory tensors share."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.utils._pytree as pytree
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def fake_mode_of(example_inputs: Sequence[Any]) -> Any:
    """The fake tensor mode the current compile uses, or a new one outside of Dynamo."""
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensorMode

    return detect_fake_mode(example_inputs) or FakeTensorMode()


def to_fake(value: Any, fake_mode: Any) -> Any:
    """A fake tensor of ``fake_mode`` for a real one, with the symbolic sizes Dynamo chose; other values unchanged."""
    from torch._dynamo.utils import to_fake_tensor
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
        return to_fake_tensor(value, fake_mode)
    return value


def fake_like(example: Any, fake_mode: Any) -> Any:
    """A new fake tensor with the size, strides, dtype, device and requires_grad of an ``example_value``.

    The example values of Dynamo's graph belong to an earlier fake mode that shares the shape environment, so their
    symbolic sizes stay valid. Running the partition again instead would make new unbacked symbols.
    """
    if not isinstance(example, Tensor):
        return example
    with fake_mode:
        fake = torch.empty_strided(example.size(), example.stride(), dtype=example.dtype, device=example.device)
    return fake.requires_grad_(example.requires_grad)


def call_with_fakes(operator: Callable[..., Any], *arguments: Any) -> Any:
    """What an operator returns for fake tensors, in their own fake mode."""
    with fake_mode_of(arguments):
        return operator(*arguments)


def num_bytes_hint(value: Tensor) -> int:
    """Bytes of a (fake) tensor's elements; for symbolic sizes, those of the inputs the graph was traced with."""
    numel: Any = value.numel()
    if isinstance(numel, torch.SymInt):
        numel = numel.node.hint or 0  # None for a size that depends on data
    return int(numel) * value.element_size()


def is_plain_tensor(value: Tensor) -> bool:
    """A strided tensor (real or fake) `fake_like` can stand in for: no subclass, no lazy conjugation or negation."""
    from torch._subclasses.fake_tensor import FakeTensor

    return (
        type(value) in (Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
        and not torch._C._functorch.is_functorch_wrapped_tensor(value)
        and value.layout is torch.strided
        and not value.is_conj()
        and not value.is_neg()
    )


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # who has not imported it has none, and it takes long
    return module is not None and isinstance(value, module.DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """What of a DTensor lies on this rank, once it is complete; any other tensor itself."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    local = tensor._local_tensor if is_dtensor(tensor) else tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def has_equal_parts(value: Any) -> bool:
    """Whether the ranks hold equally large parts of a DTensor; True for anything else."""
    if not is_dtensor(value):
        return True
    num_parts = math.prod(
        size for size, each in zip(value.device_mesh.shape, value.placements, strict=True) if not each.is_replicate()
    )
    return value.numel() == num_parts * value._local_tensor.numel()


def free_symbols(value: Any) -> list[Any]:
    """The sympy symbols in the sizes, strides and storage offset of a tensor, or in a SymInt, in a stable order."""
    from torch.fx.experimental.symbolic_shapes import free_symbols as symbols_of

    return sorted(symbols_of(value), key=str)


def symbol_bound_by(value: Any) -> Any | None:
    """The sympy symbol that a SymInt is, or None where it is an expression or no SymInt."""
    import sympy  # type: ignore[import-untyped]

    if isinstance(value, torch.SymInt) and isinstance(value.node.expr, sympy.Symbol):
        return value.node.expr
    return None


def storage_key(tensor: Tensor) -> int | None:
    """Equal for two (fake) tensors exactly where they share storage; None for tensors that have none of their own."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or not torch._C._has_storage(tensor):
        return None
    return key_of_storage(tensor.untyped_storage())


def key_of_storage(storage: torch.UntypedStorage) -> int:
    """The `storage_key` of the tensors in it."""
    return storage._cdata


#: Makes a sparse tensor on the memory of its indices and values, the fourth and fifth argument.
SPARSE_FROM_PARTS = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default


def num_references(tensors: Sequence[Any]) -> list[int]:
    """How many references there are to each tensor, from Python and from C++.

    To be compared with what this function said of another list of tensors, as a list counts itself.
    """
    references = list(map(sys.getrefcount, tensors))
    if _references_from_cpp_show():
        return references
    return list(map(operator.add, references, (0 if t is None else t._use_count() for t in tensors)))


@functools.cache
def _references_from_cpp_show() -> bool:
    """Whether a tensor that C++ holds as well has one reference more, as in torch 2.11.0 to 2.15.0."""
    parameter, gradient = torch.nn.Parameter(torch.zeros(1, device="cpu")), torch.zeros(1, device="cpu")
    alone = sys.getrefcount(gradient)
    parameter.grad = gradient
    return sys.getrefcount(gradient) > alone


def num_storage_uses(storage_keys: Sequence[int]) -> list[int]:
    """How many tensors and storage objects there are on each storage, given by its `storage_key`; it must be alive."""
    return list(map(torch._C._storage_Use_Count, storage_keys))


def allows_same_attention_kernels(backends: Any) -> bool:
    """Whether ``sdpa_kernel`` with these backends changes nothing now."""
    from torch.nn.attention import _cur_sdpa_kernel_backends

    return set(backends) == set(_cur_sdpa_kernel_backends())


def wrapper_subclass(
    cls: Any, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Any:
    """A tensor of a subclass, without memory."""
    return Tensor._make_wrapper_subclass(cls, tuple(shape), strides=tuple(strides), dtype=dtype, device=device)


def as_plain_tensors() -> AbstractContextManager[Any]:
    """Inside, no ``__torch_function__`` of a subclass is called."""
    return torch._C.DisableTorchFunctionSubclass()


#: ``__torch_function__`` of classes that have none, Parameter among them.
NO_TORCH_FUNCTION = torch._C._disabled_torch_function_impl

#: What a GradScaler calls with gradients, a flag that becomes 1 where one is not finite, and what to multiply by.
UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_


def sparse_values(tensor: Tensor) -> Tensor:
    """The values of a sparse tensor as they are stored, those of one index perhaps in several places."""
    return tensor._values()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in a value: in lists, tuples, dicts and whatever else pytree knows, and in fields of dataclasses."""
    for leaf in pytree.tree_iter(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from tensors_in(getattr(leaf, field.name, None))
