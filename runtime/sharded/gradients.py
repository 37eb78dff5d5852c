"""What ``.grad`` of parameters and of pieces is after gradients have been reduced to shards.

Note [Gradients in shards]
After a backward no rank has a parameter's whole gradient, only the pieces in its own shards. If ``.grad`` were None,
``clip_grad_norm_`` over the model's parameters would silently clip nothing. So ``.grad`` of a parameter is a
`HiddenGradient`, which has the gradient's shape and no values: any use of it raises, and names the call to make
instead. It stands there for as long as the pieces have gradients, except during a forward, whose compiler looks at
``.grad``, and during a backward, which adds to it. A forward may have no backward, if it computes a metric for example,
so the end of the forward brings it back, and the first gradient of the backward removes it again. A user may set it to
None or zero it, which then happens to the pieces' gradients as well.

``.grad`` of a piece is a `GradientShard`. Questions about all of its elements, its norm for example, are refused: each
rank would get another answer, and ranks that skip steps by their own answers part ways. What a GradScaler asks, whether
all elements are finite, is answered alike on all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
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

#: Number of a piece that belongs to no parameter, see `SteppedPieces`.
WITNESS = -1
#: What AccumulateGrad calls; the second with ``create_graph=True``.
_ACCUMULATIONS = (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor)


class HiddenGradient(Tensor):
    """Stands for a gradient of which this rank has parts only; any use of its values raises a ReplicationError."""

    number: int  #: of the parameter
    fqn: str
    is_zeroed: bool  #: a user has called ``zero_()``
    owner: weakref.ref[ShardedGradients]  #: weak for the reason of `GradientShard.unscaled`

    @staticmethod
    def __new__(cls, parameter: Tensor, number: int, fqn: str, owner: ShardedGradients) -> HiddenGradient:
        hidden: HiddenGradient = torch_internals.wrapper_subclass(
            cls, parameter.shape, parameter.stride(), parameter.dtype, parameter.device
        )
        hidden.number, hidden.fqn, hidden.is_zeroed = number, fqn, False
        hidden.owner = weakref.ref(owner)
        return hidden

    def __init__(self, parameter: Tensor, number: int, fqn: str, owner: ShardedGradients) -> None:
        """Nothing is left to do."""

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        return f"HiddenGradient({self.fqn}, {list(self.shape)}, {self.dtype}: reduced to shards)"

    def share_memory_(self) -> NoReturn:
        """Not an operator: without this, ``module.share_memory()`` would copy memory that is not there, and crash."""
        raise ReplicationError(
            f"{this_rank()}: share_memory() and the gradient of {self.fqn}, which is reduced to shards. A sharded"
            " optimizer cannot write memory that is shared: let other processes have a copy of the model, written"
            " after steps: copy.load_state_dict(model.state_dict())"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub says what a disabled one is
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        hidden = next(each for each in torch_internals.tensors_in((args, kwargs)) if isinstance(each, HiddenGradient))
        if func is torch.ops.aten.zero_.default:
            hidden.is_zeroed = True
            return hidden
        if func in _ACCUMULATIONS and (owner := hidden.owner()) is not None and owner.accumulate(hidden, args[1]):
            return hidden if func is torch.ops.aten.add_.Tensor else args[1].clone()
        raise ReplicationError(
            f"{this_rank()}: {func} of the gradient of {hidden.fqn}, which is reduced to shards: no rank has all of it."
            " Clip with model.clip_grad_norm_(max_norm), read with model.full_gradients(), zero with"
            " optimizer.zero_grad() or model.zero_grad()"
        )


class ShardedGradients:
    """Those of a module: of its reduced parameters, hidden, and of this rank's pieces; Note [Gradients in shards]."""

    def __init__(self, parameters: Sequence[Parameter], names: Sequence[str]) -> None:
        torch_internals.never_compile(HiddenGradient.__torch_dispatch__)  # backwards inside compiled code call it
        self.pieces: Sequence[Piece] = ()  #: of this rank
        self._parameters = parameters
        pairs = zip(parameters, names, strict=True)
        self._hidden = [HiddenGradient(p, index, name, self) for index, (p, name) in enumerate(pairs)]
        #: Numbers of the parameters whose pieces have gradients, on the ranks that have a piece; only to be read.
        self.reduced: set[int] = set()
        self._shown: set[int] = set()
        # From a step on, until new gradients come: versions of the pieces' gradients, and what is not zeroed since.
        self._stepped_versions: dict[Piece, int] = {}
        self._not_zeroed: set[int] = set()
        self._makes_way = False  # for a backward: a forward has ended since the last one that was reduced

    def show(self, new: Set[int]) -> None:
        """These parameters have been reduced: set ``.grad`` of all that have been, but not over later gradients."""
        self.reduced |= new
        self._show(index for index in self.reduced if index in new or self._parameters[index].grad is None)
        self._makes_way = False
        self._stepped_versions = {}
        self._not_zeroed = set()

    def forward_ends(self) -> None:
        """Bring back what `remove` took away before the forward, which may have no backward."""
        self._show(index for index in self.reduced if self._parameters[index].grad is None)
        self._makes_way = True

    def _show(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._hidden[index].is_zeroed = False
            self._parameters[index].grad = self._hidden[index]
            self._shown.add(index)

    def before_backward(self) -> None:
        """A backward has brought its first gradients: hide nothing, unless no forward came before it."""
        self.take_edits(in_backward=True)
        if self._makes_way:
            self.remove()

    def accumulate(self, hidden: HiddenGradient, gradient: Tensor) -> bool:
        """If it is AccumulateGrad that adds to a hidden gradient: set ``.grad`` as if there had been none.

        Returns:
            Whether it is.

        Raises:
            ReplicationError: No forward came before this backward.
        """
        parameter = self._parameters[hidden.number]
        if not torch_internals.is_accumulating_into(parameter):
            return False
        self.before_backward()
        if parameter.grad is hidden:
            raise ReplicationError(
                f"{this_rank()}: the gradient of {hidden.fqn} is reduced to shards, and a second backward adds to it"
                " without a forward of the module between. Call model(x) before each backward, or all forwards but the"
                " last one inside model.no_sync()"
            )
        parameter.grad = torch.empty_like(parameter).copy_(gradient.to_dense())
        return True

    def remove(self) -> None:
        """Set ``.grad`` to None where it is hidden."""
        for index in self._shown:
            if self._parameters[index].grad is self._hidden[index]:
                self._parameters[index].grad = None
        self._shown.clear()

    def zero(self, set_to_none: bool, indices: Collection[int] | None = None) -> None:
        """Zero the pieces' gradients, and what this rank has accumulated and not reduced.

        Args:
            indices: Numbers of the parameters whose gradients are meant; all if None.
        """
        indices = range(len(self._parameters)) if indices is None else indices
        for piece in self.pieces:
            if piece.index in indices:
                piece.zero(set_to_none)
        for index in indices:
            parameter, hidden = self._parameters[index], self._hidden[index]
            hidden.is_zeroed = False
            self._not_zeroed.discard(index)
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None and parameter.grad is not hidden:
                parameter.grad.zero_()
        if set_to_none:
            self._shown.difference_update(indices)
            self.reduced.difference_update(indices)

    def take_edits(self, in_backward: bool = False) -> None:
        """Let what a user has done to hidden gradients happen to the pieces' as well.

        Args:
            in_backward: Whether a backward adds to what is in their place now, which will be reduced then.

        Raises:
            ReplicationError: One was replaced, and no step would see that.
        """
        gone, zeroed = set(), set()
        for index in self._shown:
            hidden, gradient = self._hidden[index], self._parameters[index].grad
            if gradient is None or (in_backward and gradient is not hidden):
                gone.add(index)
            elif gradient is not hidden:
                raise ReplicationError(
                    f"{this_rank()}: .grad of {hidden.fqn} has been set after a backward that has reduced it to"
                    " shards, where no step would see it. Change gradients before they are reduced, by hooks on the"
                    " parameter, or scale those of optimizer.param_groups, which are this rank's parts; zero them with"
                    " optimizer.zero_grad() or model.zero_grad()"
                )
            elif hidden.is_zeroed:
                hidden.is_zeroed = False
                zeroed.add(index)
        self.reduced -= gone
        self._shown -= gone
        self._not_zeroed -= gone | zeroed
        for piece in self.pieces if gone or zeroed else ():
            if piece.index in gone or piece.index in zeroed:
                piece.zero(set_to_none=piece.index in gone)

    def before_reading(self, what: str) -> None:
        """The user's call ``what`` uses the pieces' gradients: take edits, and refuse what is not reduced.

        Raises:
            ReplicationError: A parameter has a gradient that is not hidden.
        """
        self.take_edits()
        for parameter, hidden in zip(self._parameters, self._hidden, strict=True):
            if parameter.grad is not None and parameter.grad is not hidden:
                raise ReplicationError(
                    f"{this_rank()}: {what} and a gradient of this rank alone, of backwards inside of"
                    " model.no_sync(), which a sharded optimizer has no parts of; end the accumulation with a backward"
                    " outside of it, or drop the gradients with model.zero_grad()"
                )

    def refuse_step_before_sharding(self) -> None:
        """Raise if the optimizer, which is not sharded yet, would step by gradients that are not reduced.

        Zeros pass: `torch.distributed.checkpoint.state_dict` steps by them to let the optimizer make its states.
        """
        if any(p.grad is not None and p.grad.to_dense().any() for p in self._parameters):
            self.before_reading("optimizer.step()")

    def note_step(self, pieces: Iterable[Piece], indices: Set[int]) -> None:
        """An optimizer has stepped by its pieces' gradients, or a GradScaler has asked whether to skip the step.

        Args:
            indices: Numbers of its parameters.
        """
        gradients = {piece: piece.stepped.grad for piece in pieces}
        self._stepped_versions |= {piece: g._version for piece, g in gradients.items() if g is not None}
        self._not_zeroed |= self.reduced & indices

    def is_stale(self, piece: Piece) -> bool:
        """Whether the gradient of a piece is unchanged since a step."""
        gradient = piece.stepped.grad
        return gradient is not None and gradient._version == self._stepped_versions.get(piece)

    def refuse_stale(self, pieces: Sequence[Piece], indices: Set[int]) -> None:
        """Raise if a gradient is unchanged since a step: whether the user meant to keep it cannot be known.

        A rank without a piece of a parameter raises as well. It cannot see whether a user has zeroed the piece itself,
        but takes it for zeroed if the witnesses have been.

        Args:
            pieces: Of one optimizer on this rank, and its witnesses.
            indices: Numbers of its parameters that have been reduced now.
        """
        unchanged = {piece.index for piece in pieces if self.is_stale(piece)}
        stale = unchanged & indices
        if WITNESS in unchanged:
            stale |= (self._not_zeroed & indices) - {piece.index for piece in pieces}
        if stale:
            raise ReplicationError(
                f"{this_rank()}: a backward has ended, and the gradient of {self._hidden[min(stale)].fqn} from before"
                " the last step, taken or skipped, has not been zeroed. Call optimizer.zero_grad() or"
                " model.zero_grad() for each step"
            )

    def replace(self, gradients: Mapping[int, Tensor]) -> None:
        """Set ``.grad`` to whole gradients for good, unless a user has set it; add local gradients that came since."""
        set_by_user = {i for i in self._shown if self._parameters[i].grad is not self._hidden[i]}
        zeroed = {i for i in self._shown if self._hidden[i].is_zeroed}
        self.remove()
        for index in gradients.keys() - set_by_user:
            parameter = self._parameters[index]
            gradient = gradients[index].zero_() if index in zeroed else gradients[index]
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self.reduced.clear()


class GradientShard(Tensor):
    """The part of a gradient that this rank steps by; refuses questions about all elements."""

    plain: Tensor  #: The same memory as a plain tensor, which compilers take.
    #: Called with the flag of a GradScaler, to make it the same on all ranks. Weak, since the garbage collector does
    #: not look into ``.grad``, so that a cycle through it would never be freed.
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
    """The norm of the gradients of all ranks' pieces; to be called on every rank.

    Returns:
        Shape (), of at least float32, the same bits on every rank.
    """
    if not norm_type > 0:
        raise ValueError(
            f"norm_type={norm_type}: with a sharded optimizer the order of a norm is above zero; for another one ask"
            " torch.nn.utils.get_total_norm(model.full_gradients().values(), norm_type)"
        )
    dtype = reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)  # pieces may differ in it
    gradients = [piece.grad.as_subclass(Tensor) for piece in pieces if piece.grad is not None and piece.numel()]
    # The norm of the ranks' norms, each in a place of its own: a sum keeps infinities and NaNs, a maximum may not.
    norms = torch.zeros(transfers.world_size, dtype=dtype, device=parameters[0].device)
    norms[transfers.rank] = get_total_norm(gradients, norm_type)
    transfers.all_reduce(norms)
    return torch.linalg.vector_norm(norms, norm_type)
