"""The states of a sharded optimizer: cut into pieces, and assembled again."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp_compile import torch_internals
from ddp_compile.errors import ReplicationError
from ddp_compile.runtime.sharded.bucket import Piece, ShardedBucket
from ddp_compile.runtime.sharded.checkpoint import PartOfTensor
from ddp_compile.runtime.sharded.transfers import ShardTransfers


class Entry(NamedTuple):
    """A parameter of a sharded optimizer."""

    name: str
    parameter: Parameter
    piece: Piece | None  #: None if the parameter is not reduced


class ShardedStates:
    """Converts between states of whole parameters and states of this rank's pieces.

    If a parameter is cut, each of its states is a tensor of its shape, which is cut alike, or a number, which every
    rank keeps. States of a parameter that one rank owns may be anything. ``buckets`` are all that have one of the
    parameters in ``groups``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        groups: Sequence[Sequence[Entry]],
        buckets: Sequence[ShardedBucket],
        transfers: ShardTransfers,
    ) -> None:
        self._optimizer = optimizer
        self._groups = groups
        self._entries = [entry for group in groups for entry in group]
        self._buckets = buckets
        self._transfers = transfers

    def cut(self) -> None:
        """Move the states of whole parameters to the pieces."""
        states = self._optimizer.state
        for _, parameter, piece in self._entries:
            if piece is not None and (state := states.pop(parameter, None)) and piece.is_own:
                states[piece.stepped] = self._cut(piece, state)

    def join(self) -> None:
        """Move the states of the pieces back to whole parameters; called on every rank."""
        states = self._optimizer.state
        items = [item for state in states.values() for item in state.items()]
        numbers = [(key, t) for key, value in items for t in torch_internals.tensors_in(value) if not t.dim()]
        devices = {key: number.device for key, number in numbers}
        gathered = self._gather_all()
        for _, parameter, piece in self._entries:
            if piece is None:
                continue
            states.pop(piece.stepped, None)
            for key, value in gathered.get(piece.index, {}).items():
                own = partial(_as_state_of, parameter, piece.stepped.dtype, devices.get(key))
                states[parameter][key] = torch_internals.map_leaves(Tensor, own, value)

    def whole(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a state_dict of this rank's pieces to one of whole parameters; called on every rank."""
        gathered = self._gather_all()
        states = self._states_by(range(len(self._entries)), lambda piece: gathered.get(piece.index, {}))
        return {**state_dict, "state": states}

    def parts(self) -> dict[str, Any]:
        """States by parameter names, with a `PartOfTensor` for each tensor that is cut; called on every rank."""
        described = self._describe_all()

        def parts_of(piece: Piece) -> dict[str, Any]:
            own = self._optimizer.state.get(piece.stepped, {})
            return {
                key: PartOfTensor.of(own.get(key), piece.begin, piece.place, value) if _is_cut(value) else value
                for key, value in described.get(piece.index, {}).items()
            }

        groups = [
            {key: value for key, value in group.items() if key != "param_names"} | {"params": [e.name for e in entries]}
            for group, entries in zip(self._optimizer.param_groups, self._groups, strict=True)
        ]
        return {"state": self._states_by([entry.name for entry in self._entries], parts_of), "param_groups": groups}

    def _states_by(self, keys: Iterable[Any], of_piece: Callable[[Piece], dict[str, Any]]) -> dict[Any, Any]:
        states = {
            key: self._optimizer.state.get(parameter) if piece is None else of_piece(piece)
            for key, (_, parameter, piece) in zip(keys, self._entries, strict=True)
        }
        return {key: state for key, state in states.items() if state}

    def of_pieces(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a state_dict of whole parameters, or of parts of them, to one of this rank's pieces.

        torch refuses what does not fit.
        """
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        states = dict(state_dict["state"])
        for number, (_, _, piece) in zip(numbers, self._entries, strict=False):
            if piece is not None and (state := states.pop(number, None)) is not None and piece.is_own:
                states[number] = self._cut(piece, state)
        return {**state_dict, "state": states}

    def by_number(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the result of `parts` to what `of_pieces` takes."""
        number_of = {entry.name: number for number, entry in enumerate(self._entries)}
        groups = [
            {**group, "params": [number_of[name] for name in group["params"]]} for group in state_dict["param_groups"]
        ]
        states = {number_of[name]: state for name, state in state_dict["state"].items()}
        return {"state": states, "param_groups": groups}

    def _cut(self, piece: Piece, state: Mapping[str, Any]) -> dict[str, Any]:
        """A piece's part of the states of a whole parameter, in the dtypes in which torch would load them."""
        shape, low, has_owner = piece.place.shape, piece.place.dtype, piece.spec.owner is not None
        cut = {}
        for key, value in state.items():
            if isinstance(value, PartOfTensor):
                cut[key] = value.local
            elif isinstance(value, Tensor) and value.dim() and value.shape == shape:
                is_own = not value.is_floating_point() or (has_owner and value.dtype != low)
                dtype = value.dtype if is_own else piece.stepped.dtype
                cut[key] = piece.part_of(value).to(piece.stepped.device, dtype)
            elif isinstance(value, Tensor) and value.dim() and not has_owner:
                raise ValueError(
                    f"state {key} of {piece.spec.fqn} has shape {list(value.shape)}, but the parameter has shape"
                    f" {list(shape)}, so the state cannot be cut into shards"
                )
            else:
                cut[key] = torch_internals.map_leaves(Tensor, partial(_as_state_of, piece.stepped, low, None), value)
        return cut

    def _gather_all(self) -> dict[int, dict[str, Any]]:
        """States of whole parameters by their numbers, tensors on the CPU."""
        gathered = self._describe_all()
        for bucket in self._buckets:
            described = {index: dict(gathered[index]) for index in bucket.param_indices if index in gathered}
            kinds = {(key, value) for state in described.values() for key, value in state.items() if _is_cut(value)}
            for key, dtype in sorted(kinds, key=repr):
                whole = bucket.gather_whole(partial(self._state_to_cut, key), dtype, torch.device("cpu"))
                for index, state in described.items():
                    if state.get(key) == dtype:
                        gathered[index][key] = whole[index]
        return gathered

    def _state_to_cut(self, key: str, piece: Piece) -> Tensor | None:
        value = self._optimizer.state.get(piece.stepped, {}).get(key)
        is_cut = isinstance(value, Tensor) and value.dim() and value.shape == piece.stepped.shape
        return value if is_cut else None

    def _describe_all(self) -> dict[int, dict[str, Any]]:
        """The states of all ranks' pieces, with the dtype of each tensor that is cut in its place."""
        described: dict[int, dict[str, Any]] = {}
        for of_rank in self._transfers.objects_of_all(self._describe()):
            described |= of_rank
        return described

    def _describe(self) -> dict[int, dict[str, Any]]:
        described: dict[int, dict[str, Any]] = {}
        for piece in (entry.piece for entry in self._entries if entry.piece is not None):
            for key, value in self._optimizer.state.get(piece.stepped, {}).items():
                is_cut = self._state_to_cut(key, piece) is not None
                for tensor in torch_internals.tensors_in(value) if not is_cut and piece.spec.owner is None else ():
                    if tensor.dim():
                        raise ReplicationError(
                            f"state {key} of the piece of {piece.spec.fqn} has a tensor of shape"
                            f" {list(tensor.shape)}, but the piece has shape {list(piece.stepped.shape)}, so it is"
                            " unknown how to combine it with the other ranks' tensors"
                        )
                described.setdefault(piece.index, {})[key] = (
                    value.dtype if is_cut else torch_internals.map_leaves(Tensor, lambda t: t.cpu().clone(), value)
                )
        return described


def _as_state_of(parameter: Parameter, other: torch.dtype, of_numbers: torch.device | None, value: Tensor) -> Tensor:
    """A copy of a state for a parameter: tensors of dtype ``other`` in the parameter's dtype, numbers as they are.

    Numbers come to the device ``of_numbers``; None leaves them where they are.
    """
    if not value.dim():
        return value.to(of_numbers or value.device, copy=True)
    return value.to(parameter.device, parameter.dtype if value.dtype == other else value.dtype, copy=True)


def _is_cut(value: Any) -> bool:
    return isinstance(value, torch.dtype)
