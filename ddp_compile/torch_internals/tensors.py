"""Fake tensors, symbolic sizes, shared memory, and kinds of tensors."""

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
    """The fake tensor mode of the current compilation; a new one outside Dynamo."""
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensorMode

    return detect_fake_mode(example_inputs) or FakeTensorMode()


def to_fake(value: Any, fake_mode: Any) -> Any:
    """A fake tensor for a real one, with the symbolic sizes that Dynamo chose; any other value itself."""
    from torch._dynamo.utils import to_fake_tensor
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
        return to_fake_tensor(value, fake_mode)
    return value


def fake_like(example: Any, fake_mode: Any) -> Any:
    """A new fake tensor with the size, strides, dtype, device and requires_grad of an ``example_value``.

    Example values of Dynamo's graphs belong to an earlier fake mode with the same shape environment, so their symbolic
    sizes stay valid. Running the partition on fakes instead would make new unbacked symbols.
    """
    if not isinstance(example, Tensor):
        return example
    with fake_mode:
        fake = torch.empty_strided(example.size(), example.stride(), dtype=example.dtype, device=example.device)
    return fake.requires_grad_(example.requires_grad)


def call_with_fakes(operator: Callable[..., Any], *arguments: Any) -> Any:
    """The result of an operator for fake tensors, in their fake mode."""
    with fake_mode_of(arguments):
        return operator(*arguments)


def is_plain_tensor(value: Tensor) -> bool:
    """Whether `fake_like` can describe a (fake) tensor: strided, no subclass, no lazy conjugation or negation."""
    from torch._subclasses.fake_tensor import FakeTensor

    return (
        type(value) in (Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
        and not torch._C._functorch.is_functorch_wrapped_tensor(value)
        and value.layout is torch.strided
        and not value.is_conj()
        and not value.is_neg()
    )


def is_dtensor(value: object) -> "TypeGuard[DTensor]":
    module = sys.modules.get("torch.distributed.tensor")  # not imported here, which takes long
    return module is not None and isinstance(value, module.DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, after waiting for it; any other tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    local = tensor._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def local_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The `local_tensor` of each."""
    return list(map(local_tensor, tensors))


def has_equal_parts(value: Any) -> bool:
    """Whether the ranks hold equal-sized parts of a DTensor; True for anything else."""
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
    """The sympy symbol of a SymInt; None for an expression or any other value."""
    import sympy  # type: ignore[import-untyped]

    if isinstance(value, torch.SymInt) and isinstance(value.node.expr, sympy.Symbol):
        return value.node.expr
    return None


def storage_key(tensor: Tensor) -> int | None:
    """Equal for two (fake) tensors if and only if they share storage; None for a tensor without its own storage."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or not torch._C._has_storage(tensor):
        return None
    return key_of_storage(tensor.untyped_storage())


#: The `storage_key` of tensors in a storage; no Python function, since it is called for each gradient.
key_of_storage: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of dense tensors of one dtype in row-major order; of a single tensor, perhaps a view."""
    flat: Tensor = torch._utils._flatten_dense_tensors(tensors)
    return flat


#: Makes a sparse tensor that uses the memory of its indices and values, the fourth and fifth argument.
SPARSE_FROM_PARTS = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default


def num_references(tensors: Sequence[Any]) -> list[int]:
    """The number of references to each tensor, from Python and C++, including those of the list."""
    references = list(map(sys.getrefcount, tensors))
    if _references_from_cpp_show():
        return references
    return list(map(operator.add, references, (0 if t is None else t._use_count() for t in tensors)))


@functools.cache
def _references_from_cpp_show() -> bool:
    """Whether a reference from C++ counts like one from Python, as in torch 2.11.0 to 2.15.0."""
    parameter, gradient = torch.nn.Parameter(torch.zeros(1, device="cpu")), torch.zeros(1, device="cpu")
    alone = sys.getrefcount(gradient)
    parameter.grad = gradient
    return sys.getrefcount(gradient) > alone


def num_storage_uses(storage_keys: Sequence[int]) -> list[int]:
    """The number of tensors and storage objects on each storage, given by `storage_key`. It must be alive."""
    return list(map(torch._C._storage_Use_Count, storage_keys))


def allows_same_attention_kernels(backends: Any) -> bool:
    """Whether ``sdpa_kernel`` with these backends changes nothing now."""
    from torch.nn.attention import _cur_sdpa_kernel_backends

    return set(backends) == set(_cur_sdpa_kernel_backends())


def wrapper_subclass(
    cls: Any, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Any:
    """A tensor of a subclass without memory."""
    return Tensor._make_wrapper_subclass(cls, tuple(shape), strides=tuple(strides), dtype=dtype, device=device)


def as_plain_tensors() -> AbstractContextManager[Any]:
    """Inside, torch calls no ``__torch_function__`` of subclasses."""
    return torch._C.DisableTorchFunctionSubclass()


#: ``__torch_function__`` of classes that do not define one, such as Parameter.
NO_TORCH_FUNCTION = torch._C._disabled_torch_function_impl

#: A GradScaler calls it with gradients, a flag that is set to 1 if one is not finite, and a factor.
UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_


def sparse_values(tensor: Tensor) -> Tensor:
    """The stored values of a sparse tensor; one index may have several."""
    return tensor._values()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in a pytree, in fields of dataclasses too."""
    return (leaf for leaf in _leaves_in(value) if isinstance(leaf, Tensor))


def map_leaves(kind: type | tuple[type, ...], function: Callable[[Any], Any], values: Any) -> Any:
    """The same pytree with the results of ``function`` in place of its leaves of this kind."""
    return pytree.tree_map_only(kind, function, values)


def may_hide_tensors(value: Any) -> bool:
    """Whether `tensors_in` may miss some: the pytree holds an object whose class it does not know."""
    return not all(isinstance(leaf, _WITHOUT_HIDDEN_TENSORS) for leaf in _leaves_in(value))


_WITHOUT_HIDDEN_TENSORS = (Tensor, type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def _leaves_in(value: Any) -> Iterator[Any]:
    for leaf in pytree.tree_iter(value):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type | Tensor):
            for field in dataclasses.fields(leaf):
                yield from _leaves_in(getattr(leaf, field.name, None))
        else:
            yield leaf
