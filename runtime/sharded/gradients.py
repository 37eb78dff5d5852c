"""``.grad`` of parameters and of pieces after gradients have been reduced to shards.

Note [Gradients in shards]
After a backward no rank has a parameter's whole gradient, only the pieces in its own shards. If ``.grad`` were None,
``clip_grad_norm_`` over the model's parameters would silently clip nothing. So ``.grad`` of a parameter is a
`HiddenGradient`, which has the gradient's shape and no values: any use of it raises, and names the call to make
instead. It is there as long as the pieces have gradients, except during a forward, whose compiler looks at ``.grad``,
and during a backward, which sets it. A forward may have no backward, if it computes a metric for example, so gradients
are hidden again when it ends. A user may set ``.grad`` to None or zero it, which then happens to the pieces as well.

``.grad`` of a piece is a `GradientShard`. Questions about all of its elements, its norm for example, are refused: each
rank would get another answer, and ranks that skip steps by their own answers diverge. A GradScaler's question, whether
all elements are finite, gets the same answer on all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from functools import reduce
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import get_total_norm

from ddp_compile import torch_internals
from ddp_compile.errors import ReplicationError, this_rank
from ddp_compile.runtime.sharded.transfers import ShardTransfers

if TYPE_CHECKING:
    from ddp_compile.runtime.sharded.bucket import Piece

# Functions whose result depends on all elements, and by which people decide to skip a step.
# fmt: off
_OF_ALL_ELEMENTS = frozenset((
    "norm", "vector_norm", "linalg_vector_norm", "linalg_norm", "_foreach_norm", "_foreach_max", "all", "allclose",
    "amax", "amin", "any", "dot", "equal", "isfinite", "isinf", "isnan", "item", "max", "mean", "min", "std", "sum",
    "var",
))
# fmt: on

#: Why parameters and gradients must not lie in it, and the way out.
SHARED_MEMORY = (
    "memory that other processes share, which a sharded optimizer does not write. Give each parameter memory of its"
    " own, p.data = p.data.clone(), and other processes a copy of the model, updated after steps:"
    " copy.load_state_dict(model.state_dict()); or send them p.detach().clone()"
)

#: What AccumulateGrad calls; the second with ``create_graph=True``.
_ACCUMULATIONS = (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)


class HiddenGradient(Tensor):
    """Stands for a gradient of which this rank has parts only; any use of its values raises a ReplicationError."""

    number: int  #: of the parameter
    fqn: str
    owner: weakref.ref[ShardedGradients]  #: weak for the reason of `GradientShard.unscaled`

    @classmethod
    def of(cls, parameter: Tensor, number: int, fqn: str, owner: ShardedGradients) -> HiddenGradient:
        """The one of a parameter."""
        hidden: HiddenGradient = torch_internals.wrapper_subclass(
            cls, parameter.shape, parameter.stride(), parameter.dtype, parameter.device
        )
        hidden.number, hidden.fqn, hidden.owner = number, fqn, weakref.ref(owner)
        return hidden

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        return f"HiddenGradient({self.fqn}, {list(self.shape)}, {self.dtype}: reduced to shards)"

    def share_memory_(self) -> NoReturn:
        """Not an operator: without this, ``module.share_memory()`` would copy memory that is not there, and crash."""
        raise ReplicationError(
            f"{this_rank()}: {self.fqn}.grad, which exists only as shards, cannot be moved into {SHARED_MEMORY}"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub says what a disabled one is
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        hidden = next(each for each in torch_internals.tensors_in((args, kwargs)) if isinstance(each, HiddenGradient))
        owner = hidden.owner()
        if func is torch.ops.aten.zero_.default and owner is not None:
            owner.pieces[hidden.number].zero(set_to_none=False)
            return hidden
        if func in _ACCUMULATIONS and owner is not None and owner.accumulate(hidden, args[1]):
            return hidden if func is torch.ops.aten.add_.Tensor else args[1].clone()
        raise ReplicationError(
            f"{this_rank()}: {func} was called on {hidden.fqn}.grad, which is reduced to shards: no rank has all of it."
            " Clip with model.clip_grad_norm_(max_norm), read with model.full_gradients(), zero with"
            " optimizer.zero_grad() or model.zero_grad()"
        )


class ShardedGradients:
    """``.grad`` of a module's reduced parameters, hidden, and of this rank's pieces; Note [Gradients in shards]."""

    def __init__(self, parameters: Sequence[Parameter], names: Sequence[str]) -> None:
        torch_internals.never_compile(HiddenGradient.__torch_dispatch__)  # backwards inside compiled code call it
        self.pieces: Mapping[int, Piece] = {}  #: by the parameter's number, once the parameters are sharded
        self._parameters = parameters
        pairs = zip(parameters, names, strict=True)
        self._hidden = [HiddenGradient.of(p, index, name, self) for index, (p, name) in enumerate(pairs)]
        self._in_place: set[int] = set()  # numbers of the parameters whose ``.grad`` was set to a hidden gradient

    def hide(self, new: Set[int] = frozenset()) -> None:
        """Hide the gradients of the pieces that have one.

        ``new`` are the numbers of the parameters that have been reduced now. Of the others, local gradients stay.
        """
        for index, piece in self.pieces.items():
            if index in new or (piece.stepped.grad is not None and self._parameters[index].grad is None):
                self._parameters[index].grad = self._hidden[index]
                self._in_place.add(index)

    def make_way(self, in_backward: bool = False) -> None:
        """Before a forward, and at the first gradient of a backward: set ``.grad`` to None where it is hidden."""
        self.take_edits(in_backward)
        for index in self._in_place:
            self._parameters[index].grad = None
        self._in_place.clear()

    def accumulate(self, hidden: HiddenGradient, gradient: Tensor) -> bool:
        """If AccumulateGrad adds to a hidden gradient, set ``.grad`` as if there had been none; else return False."""
        parameter = self._parameters[hidden.number]
        if not torch_internals.is_accumulating_into(parameter):
            return False
        self.make_way(in_backward=True)
        parameter.grad = torch.empty_like(parameter).copy_(gradient.to_dense())
        return True

    def zero(self, set_to_none: bool, indices: Collection[int]) -> None:
        """Zero the gradients of these parameters' pieces, and local ones that have not been reduced."""
        for index in indices:
            parameter, hidden = self._parameters[index], self._hidden[index]
            if index in self.pieces:
                self.pieces[index].zero(set_to_none)
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None and parameter.grad is not hidden:
                parameter.grad.zero_()
        if set_to_none:
            self._in_place.difference_update(indices)

    def take_edits(self, in_backward: bool = False) -> None:
        """Set ``.grad`` of the pieces to None where users have done so with the hidden gradients.

        ``in_backward`` tells whether AccumulateGrad may have added to what a user had set ``.grad`` to. Raises a
        ReplicationError if it was set to something else, which no step would see.
        """
        for index in list(self._in_place):
            hidden, gradient = self._hidden[index], self._parameters[index].grad
            if gradient is hidden:
                continue
            if gradient is not None and not in_backward:
                raise ReplicationError(
                    f"{this_rank()}: .grad of {hidden.fqn} was set after a backward had reduced it to shards, where no"
                    " step would see it. Change gradients before they are reduced, by hooks on the parameter, or scale"
                    " those of optimizer.param_groups, which are this rank's parts; zero them with"
                    " optimizer.zero_grad() or model.zero_grad()"
                )
            self.pieces[index].zero(set_to_none=True)
            self._in_place.remove(index)

    def before_reading(self, what: str) -> None:
        """The user's call ``what`` is about to use the pieces' gradients: take edits, and refuse local gradients."""
        self.take_edits()
        for parameter, hidden in zip(self._parameters, self._hidden, strict=True):
            if parameter.grad is not None and parameter.grad is not hidden:
                raise ReplicationError(
                    f"{this_rank()}: {what} was called while {hidden.fqn}.grad holds a local gradient, which has not"
                    " been reduced: from model.no_sync(), or from a backward without a forward of the module. End the"
                    " accumulation with a forward and backward outside of no_sync(), or drop the gradients with"
                    " model.zero_grad()"
                )

    def refuse_step_before_sharding(self) -> None:
        """Raise if the optimizer, which is not sharded yet, would step by gradients that are not reduced.

        Zeros pass: `torch.distributed.checkpoint.state_dict` steps by them to let the optimizer make its states.
        """
        if any(p.grad is not None and p.grad.to_dense().any() for p in self._parameters):
            self.before_reading("optimizer.step()")

    def give_back(self, gradients: Mapping[int, Tensor]) -> None:
        """Set ``.grad`` to whole gradients, by number, and hide none from now on; local gradients are added."""
        self.make_way()
        for index, gradient in gradients.items():
            parameter = self._parameters[index]
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


class GradientShard(Tensor):
    """A piece's gradient; refuses questions about all elements."""

    plain: Tensor  #: The same memory as a plain tensor, which compilers take.
    #: Called with the flag of a GradScaler, to make it the same on all ranks. Weak, since the garbage collector does
    #: not look into ``.grad`` and would never free a cycle through it.
    unscaled: weakref.WeakMethod[Callable[[Tensor], None]]

    @classmethod
    def of(cls, values: Tensor, unscaled: Callable[[Tensor], None]) -> GradientShard:
        """The same values, shape (n,), on the same memory; ``unscaled`` is a bound method."""
        shard: GradientShard = values.as_subclass(cls)
        shard.plain = values
        shard.unscaled = weakref.WeakMethod(unscaled)
        return shard

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _OF_ALL_ELEMENTS:
            raise ReplicationError(
                f"{name} was called on gradients that are reduced to shards. It would see this rank's part alone and"
                " differ between the ranks; clip with model.clip_grad_norm_(max_norm), which returns the norm over all"
                " ranks, and read model.full_gradients()"
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
    """The norm of the gradients of all ranks' pieces; called on every rank.

    It has shape (), a dtype of at least float32, and the same bits on every rank.
    """
    if not norm_type > 0:
        raise ValueError(
            f"norm_type={norm_type} must be above zero with a sharded optimizer; for other orders call"
            " torch.nn.utils.get_total_norm(model.full_gradients().values(), norm_type)"
        )
    dtype = reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)  # pieces may differ in it
    gradients = [piece.grad.as_subclass(Tensor) for piece in pieces if piece.grad is not None and piece.numel()]
    # The norm of the ranks' norms, each in a place of its own: a sum keeps infinities and NaNs, a maximum may not.
    norms = torch.zeros(transfers.world_size, dtype=dtype, device=parameters[0].device)
    norms[transfers.rank] = get_total_norm(gradients, norm_type)
    transfers.all_reduce(norms)
    return torch.linalg.vector_norm(norms, norm_type)
