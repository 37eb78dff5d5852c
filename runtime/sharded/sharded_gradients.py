"""What ``.grad`` is where a gradient has been reduced to shards: of a parameter, and of the piece that is stepped.

Note [Gradients in shards]
Behind a backward no rank has a parameter's whole gradient, only the pieces in its own shards. A ``.grad`` of None would
let ``clip_grad_norm_`` over the model's parameters clip nothing, without a word. So ``.grad`` of a parameter is a
`HiddenGradient`, which has the gradient's shape and no values: whoever reads it is told where to look. ``.grad`` of a
piece is a `GradientShard`, whose norm would be that of this rank alone, and so is refused, as is any other question
about all of its elements: ranks that skip steps by their own answers part ways. What a GradScaler asks, whether all is
finite, is answered for all ranks alike.

Note [Hidden gradients make way]
A hidden gradient stands in ``.grad`` for as long as the pieces have gradients, but where it would be in the way: in a
forward, whose compiler looks at ``.grad``, and in a backward, which adds to it. A forward may have no backward, that of
a metric for example; so behind it the hidden ones stand there again, and leave when the backward comes. Where that one
is reduced, all of them do so at its first gradient. Where it is not, inside ``no_sync``, each does in front of the
parameter's AccumulateGrad, and the others stay. What a user does to ``.grad`` in between is looked for whenever pieces
are about to be used.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import reduce
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import get_total_norm

from ddp_compile import torch_internals
from ddp_compile.errors import ReplicationError, this_rank
from ddp_compile.runtime.sharded.shard_transfers import ShardTransfers

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
    is_zeroed: bool  #: a user has called ``zero_()``

    @staticmethod
    def __new__(cls, parameter: Tensor, fqn: str, rank: int) -> HiddenGradient:
        hidden: HiddenGradient = torch_internals.wrapper_subclass(
            cls, parameter.shape, parameter.stride(), parameter.dtype, parameter.device
        )
        hidden.fqn, hidden.rank, hidden.is_zeroed = fqn, rank, False
        return hidden

    def __init__(self, parameter: Tensor, fqn: str, rank: int) -> None:
        """Nothing is left to do."""

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        return f"HiddenGradient({self.fqn}, {list(self.shape)}, {self.dtype}: reduced to shards)"

    def share_memory_(self) -> NoReturn:
        """No operator, but a copy of memory that is not there: ``module.share_memory()`` would end the process."""
        raise ReplicationError(
            f"{this_rank()}: share_memory() and the gradient of {self.fqn}, which is reduced to shards. A sharded"
            " optimizer cannot write memory that is shared: let other processes have a copy of the model, written"
            " behind steps: copy.load_state_dict(model.state_dict())"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub says what a disabled one is
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        hidden = next(value for value in _flattened(args, kwargs or {}) if isinstance(value, HiddenGradient))
        if func is torch.ops.aten.zero_.default:
            hidden.is_zeroed = True
            return hidden
        if func is torch.ops.aten.add_.Tensor:
            raise hidden.second_backward(func)
        raise ReplicationError(
            f"{hidden._place(func)}: no rank has all of it. Clip with model.clip_grad_norm_(max_norm), read with"
            " model.full_gradients(), zero with optimizer.zero_grad() or model.zero_grad()"
        )

    def second_backward(self, what: object) -> ReplicationError:
        """What to raise where a backward would add to it."""
        return ReplicationError(
            f"{self._place(what)}: a second backward behind one that has been reduced, without a forward of the module"
            " between. Call model(x) before each backward, or all forwards but the last one inside model.no_sync()"
        )

    def _place(self, what: object) -> str:
        return f"{this_rank()}: {what} of the gradient of {self.fqn}, which is reduced to shards"


class HiddenGradients:
    """Those of all parameters of a module; see Note [Hidden gradients make way].

    Args:
        parameters: That are reduced, by their numbers.
        names: What the module calls them.
        rank: This rank.
    """

    def __init__(self, parameters: Sequence[Parameter], names: Sequence[str], rank: int) -> None:
        self._parameters = parameters
        self._hidden = [HiddenGradient(p, name, rank) for p, name in zip(parameters, names, strict=True)]
        self._reduced: set[int] = set()  # numbers of the parameters whose pieces have gradients
        self._shown: set[int] = set()  # those of them whose ``.grad`` is a hidden one, unless a user has changed it
        self._aside: set[int] = set()  # those of them whose ``.grad`` is what came behind, of this rank alone
        self._dropped: set[int] = set()  # those whose ``.grad`` a user had set to None when the next one came
        self._makes_way = False  # a forward has come since they were reduced, whose backward may bring more
        self._prehooks: dict[int, Any] = {}
        self._rank = rank

    @property
    def reduced(self) -> Set[int]:
        """Numbers of the parameters whose pieces have gradients, on the ranks that have a piece."""
        return self._reduced

    def hide(self, indices: Iterable[int]) -> None:
        """These parameters have been reduced: let ``.grad`` of all that have been be hidden ones."""
        new = set(indices)
        self._reduced |= new
        self._aside -= new
        self._makes_way = False
        self._show(index for index in self._reduced if index in new or self._parameters[index].grad is None)

    def before_forward(self) -> None:
        """Let no ``.grad`` be one: compilers look at it."""
        for index in self._shown:
            if self._parameters[index].grad is self._hidden[index]:
                self._parameters[index].grad = None
        self._shown.clear()

    def after_forward(self) -> None:
        """Nobody knows whether a backward will follow: let them stand there again, and make way for one."""
        self._makes_way = True
        self._show(
            index
            for index in self._reduced
            if index not in self._aside and index not in self._dropped and self._parameters[index].grad is None
        )
        for index in self._shown - self._prehooks.keys():
            node = torch_internals.accumulator_of(self._parameters[index])
            self._prehooks[index] = torch_internals.register_own(
                node.register_prehook, _prehook(weakref.ref(self), index)
            )

    def before_backward(self) -> None:
        """The first gradient of a backward has come that will be reduced: nothing must meet what has no values.

        Raises:
            ReplicationError: No forward has come before it.
        """
        shown = [index for index in self._shown if self._parameters[index].grad is self._hidden[index]]
        if shown and not self._makes_way:
            raise self._hidden[shown[0]].second_backward("a backward begins")
        self.before_forward()
        self._aside.clear()

    def _show(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._hidden[index].is_zeroed = False
            self._parameters[index].grad = self._hidden[index]
            self._shown.add(index)

    def _make_way(self, index: int, is_defined: bool) -> None:
        """AccumulateGrad is about to add to ``.grad`` of a parameter."""
        if self._makes_way and index in self._shown:
            gradient = self._parameters[index].grad
            if gradient is None:
                self._dropped.add(index)
            elif gradient is self._hidden[index]:
                self._parameters[index].grad = None
            if gradient is None or gradient is self._hidden[index]:
                self._shown.discard(index)
                if is_defined:
                    self._aside.add(index)

    def zero_others(self, set_to_none: bool) -> None:
        """Zero what this rank has accumulated and not reduced."""
        for index, parameter in enumerate(self._parameters):
            self._hidden[index].is_zeroed = False  # so are the pieces' gradients
            if parameter.grad is not None and parameter.grad is not self._hidden[index]:
                if set_to_none:
                    parameter.grad = None
                else:
                    parameter.grad.zero_()

    def forget(self) -> None:
        """Pieces have no gradients any more: let no ``.grad`` be a hidden one."""
        self.before_forward()
        self._reduced.clear()
        self._aside.clear()
        self._dropped.clear()

    def adopt_edits(self) -> tuple[set[int], set[int]]:
        """What a user has done to ``.grad`` of parameters that have been reduced.

        Returns:
            The numbers of those that were set to None, and of those that were zeroed: each is told once.

        Raises:
            ReplicationError: One was replaced by something else.
        """
        gone = set(self._dropped)
        zeroed = {index for index in self._reduced if self._hidden[index].is_zeroed}
        for index in zeroed:
            self._hidden[index].is_zeroed = False
        for index in self._shown | self._aside:
            gradient = self._parameters[index].grad
            if gradient is None:
                gone.add(index)
            elif gradient is not self._hidden[index] and index in self._shown:
                raise ReplicationError(
                    f"{this_rank()}: .grad of {self._hidden[index].fqn} has been set behind a backward that has"
                    " reduced it to shards, where no step would see it. Change gradients before they are reduced, by"
                    " hooks on the parameter, or scale those of optimizer.param_groups, which are this rank's parts"
                )
        for numbers in (self._reduced, self._shown, self._aside):
            numbers -= gone
        self._dropped.clear()
        return gone, zeroed

    def refuse_others(self, what: str) -> None:
        """Raise a ReplicationError where a parameter has a gradient that is not hidden.

        Args:
            what: What the user has called.
        """
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None and parameter.grad is not self._hidden[index]:
                raise ReplicationError(
                    f"{this_rank()}: {what} and a gradient of this rank alone, of backwards inside of"
                    " model.no_sync(), which a sharded optimizer has no parts of; end the accumulation with a backward"
                    " outside of it, or drop the gradients with model.zero_grad()"
                )

    def replace(self, gradients: Mapping[int, Tensor]) -> None:
        """Let ``.grad`` be whole gradients, for good, but where a user has set it.

        Args:
            gradients: By number of the parameter.
        """
        for index, gradient in gradients.items():
            parameter, hidden = self._parameters[index], self._hidden[index]
            if hidden.is_zeroed:
                gradient.zero_()
            if parameter.grad is hidden:
                parameter.grad = gradient
            elif parameter.grad is not None and index in self._aside:
                parameter.grad.add_(gradient)
        self.forget()
        for handle in self._prehooks.values():
            handle.remove()
        self._prehooks.clear()


def _prehook(owner: weakref.ref[HiddenGradients], index: int) -> Callable[[tuple[Any, ...]], None]:
    def prehook(gradients: tuple[Any, ...]) -> None:
        if (alive := owner()) is not None:
            alive._make_way(index, gradients[0] is not None)

    return prehook


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
    gradients = [piece.grad.as_subclass(Tensor) for piece in pieces if piece.grad is not None and piece.numel()]
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
