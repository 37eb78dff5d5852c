"""What ``.grad`` is where a gradient has been reduced to shards: of a parameter, and of the piece that is stepped.

Note [Gradients in shards]
Behind a backward no rank has a parameter's whole gradient, only the pieces in its own shards. A ``.grad`` of None would
let ``clip_grad_norm_`` over the model's parameters clip nothing, without a word. So ``.grad`` of a parameter is a
`HiddenGradient`, which has the gradient's shape and no values: whoever reads it is told where to look. ``.grad`` of a
piece is a `GradientShard`, whose norm would be that of this rank alone, and so is refused, as is any other question
about all of its elements: ranks that skip steps by their own answers part ways. What a GradScaler asks, whether all is
finite, is answered for all ranks alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import get_total_norm

from ddp_compile import torch_internals
from ddp_compile.errors import ReplicationError
from ddp_compile.runtime.sharding.shard_transfers import ShardTransfers

# What is asked of all elements at once, and what people ask before they leave a step out.
_OF_ALL_ELEMENTS = frozenset(
    {
        "norm",
        "vector_norm",
        "linalg_vector_norm",
        "linalg_norm",
        "_foreach_norm",
        "_foreach_max",
        "all",
        "allclose",
        "amax",
        "amin",
        "any",
        "dot",
        "equal",
        "isfinite",
        "isinf",
        "isnan",
        "item",
        "max",
        "mean",
        "min",
        "std",
        "sum",
        "var",
    }
)


class HiddenGradient(Tensor):
    """Stands for a gradient of which this rank has parts only; any use of its values raises a ReplicationError.

    Args:
        parameter: Has the shape, dtype and device.
        fqn: Its name.
        rank: This rank.
    """

    fqn: str
    rank: int

    @staticmethod
    def __new__(cls, parameter: Tensor, fqn: str, rank: int) -> HiddenGradient:
        hidden: HiddenGradient = torch_internals.wrapper_subclass(
            cls, parameter.shape, parameter.stride(), parameter.dtype, parameter.device
        )
        hidden.fqn, hidden.rank = fqn, rank
        return hidden

    def __init__(self, parameter: Tensor, fqn: str, rank: int) -> None:
        """Nothing is left to do."""

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        return f"HiddenGradient({self.fqn}, {list(self.shape)}, {self.dtype}: reduced to shards)"

    def share_memory_(self) -> NoReturn:
        """No operator, but a copy of memory that is not there: ``module.share_memory()`` would end the process."""
        raise ReplicationError(
            f"rank {self.rank}: share_memory() and the gradient of {self.fqn}, which is reduced to shards. A sharded"
            " optimizer cannot write memory that is shared: let other processes have a copy of the model, written"
            " behind steps: copy.load_state_dict(model.state_dict())"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub says what a disabled one is
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        hidden = next(value for value in _flattened(args, kwargs or {}) if isinstance(value, HiddenGradient))
        where = f"rank {hidden.rank}: {func} of the gradient of {hidden.fqn}, which is reduced to shards"
        if func is torch.ops.aten.add_.Tensor:
            raise ReplicationError(
                f"{where}: a second backward behind one that has been reduced, without a forward of the module between."
                " Call model(x) before each backward, or all forwards but the last one inside model.no_sync()"
            )
        raise ReplicationError(
            f"{where}: no rank has all of it. Clip with model.clip_grad_norm_(max_norm), read with"
            " model.full_gradients(), zero with optimizer.zero_grad() or model.zero_grad()"
        )


class HiddenGradients:
    """Those of all parameters of a module.

    Args:
        parameters: That are reduced, by their numbers.
        names: What the module calls them.
        rank: This rank.
    """

    def __init__(self, parameters: Sequence[Parameter], names: Sequence[str], rank: int) -> None:
        self._parameters = parameters
        self._hidden = [HiddenGradient(p, name, rank) for p, name in zip(parameters, names, strict=True)]
        self._present: set[int] = set()  # numbers of those that stand in ``.grad``, unless a user has changed it
        self._rank = rank

    def hide(self, indices: Iterable[int]) -> None:
        """Let ``.grad`` of these parameters be hidden ones."""
        for index in indices:
            self._parameters[index].grad = self._hidden[index]
            self._present.add(index)

    @property
    def present(self) -> list[int]:
        """Numbers of the parameters whose ``.grad`` is one."""
        return [index for index in self._present if self._parameters[index].grad is self._hidden[index]]

    def zero_others(self, set_to_none: bool) -> None:
        """Zero what this rank has accumulated and not reduced."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None and parameter.grad is not self._hidden[index]:
                if set_to_none:
                    parameter.grad = None
                else:
                    parameter.grad.zero_()

    def take_away(self) -> None:
        """Let no ``.grad`` be one, so that gradients can be accumulated."""
        for index in self._present:
            if self._parameters[index].grad is self._hidden[index]:
                self._parameters[index].grad = None
        self._present.clear()

    def set_to_none(self) -> list[int]:
        """The numbers of parameters whose hidden ``.grad`` a user has replaced by None.

        Raises:
            ReplicationError: One was replaced by something else.
        """
        edited = []
        for index in self._present:
            gradient = self._parameters[index].grad
            if gradient is None:
                edited.append(index)
            elif gradient is not self._hidden[index]:
                raise ReplicationError(
                    f"rank {self._rank}: .grad of {self._hidden[index].fqn} has been set behind a backward that has"
                    " reduced it to shards, where no step would see it. Change gradients before they are reduced, by"
                    " hooks on the parameter, or scale those of optimizer.param_groups, which are this rank's parts"
                )
        return edited

    def refuse_others(self) -> None:
        """Raise a ReplicationError where a parameter has a gradient that is not hidden."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None and index not in self._present:
                raise ReplicationError(
                    f"rank {self._rank}: optimizer.step() and a gradient of this rank alone, of backwards inside of"
                    " model.no_sync(), which a sharded optimizer has no parts of; end the accumulation with a backward"
                    " outside of it, or drop the gradients with model.zero_grad()"
                )


class GradientShard(Tensor):
    """The part of a gradient that this rank steps by: a tensor that no question about all elements may be asked."""

    plain: Tensor  #: The same memory as a plain tensor, which compilers take.
    #: Gives what is called with the flag of a GradScaler, and makes it the same on all ranks. Weak, since the garbage
    #: collector does not look into ``.grad``: a cycle through it would stay for good.
    unscaled: weakref.WeakMethod[Callable[[Tensor], None]]

    @classmethod
    def of(cls, values: Tensor, unscaled: Callable[[Tensor], None]) -> GradientShard:
        """The same values on the same memory.

        Args:
            values: Shape (n,).
            unscaled: A bound method, called when a GradScaler has unscaled gradients, with its flag. Its object is not
                kept.
        """
        shard: GradientShard = values.as_subclass(cls)
        shard.plain = values
        shard.unscaled = weakref.WeakMethod(unscaled)
        return shard

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _OF_ALL_ELEMENTS:
            raise ReplicationError(
                f"{name} of gradients that are reduced to shards would be that of this rank's part alone, and another"
                " one on each rank; clip with model.clip_grad_norm_(max_norm), which returns the norm over all ranks,"
                " and look at model.full_gradients()"
            )
        with torch_internals.as_plain_tensors():
            result = func(*args, **(kwargs or {}))
            if func is torch_internals.UNSCALE:
                gradients, found_non_finite = args[:2]
                unscaled = next(each for each in gradients if isinstance(each, GradientShard)).unscaled()
                assert unscaled is not None  # the optimizer, whose gradients these are, keeps it
                unscaled(found_non_finite)
        return result


def norm_over_ranks(
    pieces: Sequence[Tensor], norm_type: float, parameters: Sequence[Tensor], transfers: ShardTransfers
) -> Tensor:
    """The norm of all gradients of all ranks together; to be called on every rank.

    Args:
        pieces: What this rank steps.
        norm_type: Order of the norm, above zero; may be infinite.
        parameters: Of all ranks' pieces.
        transfers: Between the ranks.

    Returns:
        Shape (), of at least float32, the same bits on every rank.

    Raises:
        ValueError: The order is not above zero.
    """
    if not norm_type > 0:
        raise ValueError(
            f"norm_type={norm_type}: with a sharded optimizer the order of a norm is above zero; for another one ask"
            " torch.nn.utils.get_total_norm(model.full_gradients().values(), norm_type)"
        )
    dtype = reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)  # pieces may differ in it
    gradients = [piece.grad.as_subclass(Tensor) for piece in pieces if piece.grad is not None]
    # A norm of norms, each in a place of its own: a sum keeps what is not finite, as a maximum over the ranks need not.
    norms = torch.zeros(transfers.world_size, dtype=dtype, device=parameters[0].device)
    norms[transfers.rank] = get_total_norm(gradients, norm_type)
    transfers.sum_over_ranks(norms)
    return torch.linalg.vector_norm(norms, norm_type)


def _flattened(*values: Any) -> Any:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flattened(*value)
        elif isinstance(value, dict):
            yield from _flattened(*value.values())
        else:
            yield value
