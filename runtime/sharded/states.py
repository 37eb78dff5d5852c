"""The states of a sharded optimizer: cut into pieces, and assembled again."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp_compile import torch_internals
from ddp_compile.errors import ReplicationError
from ddp_compile.runtime.sharded.bucket import Piece, ShardedBucket
from ddp_compile.runtime.sharded.checkpoint import PartOfTensor
from ddp_compile.runtime.sharded.transfers import ShardTransfers


class ShardedStates:
    """Converts between states of whole parameters and states of this rank's pieces.

    If a parameter is cut, each of its states is a tensor of its shape, which is cut alike, or a number, which every
    rank keeps. States of a parameter that one rank owns may be anything.

    Args:
        optimizer: Steps the pieces.
        numbers: Those of the optimizer's reduced parameters, by ``id``.
        whole: The parameters of each group before it was sharded.
        buckets: All that have one of these parameters.
        transfers: Among all ranks.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        numbers: Mapping[int, int],
        whole: Sequence[Sequence[Parameter]],
        buckets: Sequence[ShardedBucket],
        transfers: ShardTransfers,
    ) -> None:
        self._optimizer = optimizer
        self._whole = [(parameter, numbers.get(id(parameter))) for group in whole for parameter in group]
        self._sizes = [len(group) for group in whole]
        self._buckets = buckets
        self._transfers = transfers
        self._bucket_of = {index: bucket for bucket in buckets for index in bucket.param_indices}
        own = set(numbers.values())
        self._pieces = {piece.index: piece for bucket in buckets for piece in bucket.pieces if piece.index in own}
        self._place_of = {}  # among the whole parameters, by ``id``
        for place, (parameter, index) in enumerate(self._whole):
            mine = self._pieces[index].stepped if index in self._pieces else parameter
            self._place_of[id(mine)] = place

    def cut(self) -> None:
        """Move the states of whole parameters to the pieces."""
        states = self._optimizer.state
        for parameter, index in self._whole:
            if index is not None and (state := states.pop(parameter, None)) and index in self._pieces:
                states[self._pieces[index].stepped] = self._cut(index, state)

    def _by_place(self, state_dict: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        return {place: state_dict["state"][key] for place, key in enumerate(saved) if key in state_dict["state"]}

    def join(self) -> None:
        """Move the states of the pieces back to whole parameters; called on every rank."""
        states = self._optimizer.state
        gathered = self._gather_all(on_device=True)
        for piece in self._pieces.values():
            states.pop(piece.stepped, None)
        for parameter, index in self._whole:
            if index is not None and index in gathered:
                stepped = self._bucket_of[index].stepped_dtype
                states[parameter] = torch_internals.map_leaves(
                    Tensor, partial(_as_state_of, parameter, stepped), gathered[index]
                )

    def whole(self, state_dict: Mapping[str, Any], names: Sequence[list[str] | None]) -> dict[str, Any]:
        """Convert a state_dict of this rank's pieces to one of whole parameters; called on every rank."""
        places = range(len(self._whole))
        groups = [
            {**group, **({} if of_group is None else {"param_names": list(of_group)}), "params": params}
            for group, of_group, params in zip(state_dict["param_groups"], names, self._grouped(places), strict=True)
        ]
        return {**state_dict, "state": self._states_by(places, self._gather_all()), "param_groups": groups}

    def parts(self, names: Sequence[str]) -> dict[str, Any]:
        """States by parameter names, with a `PartOfTensor` for each tensor that is cut; called on every rank."""
        described = self._describe_all()
        parts = {index: self._parts_of(index, described[index]) for index in described}
        groups = [
            {**_settings_of(group), "params": params}
            for group, params in zip(self._optimizer.param_groups, self._grouped(names), strict=True)
        ]
        return {"state": self._states_by(names, parts), "param_groups": groups}

    def _states_by(self, keys: Iterable[Any], sharded: Mapping[int, dict[str, Any]]) -> dict[Any, Any]:
        states = {}
        for key, (parameter, index) in zip(keys, self._whole, strict=True):
            if state := self._optimizer.state.get(parameter) if index is None else sharded.get(index):
                states[key] = state
        return states

    def _grouped(self, keys: Iterable[Any]) -> list[list[Any]]:
        remaining = iter(keys)
        return [list(itertools.islice(remaining, size)) for size in self._sizes]

    def of_pieces(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a state_dict of whole parameters to one of this rank's pieces; torch refuses what does not fit."""
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != self._sizes:
            raise ValueError(
                f"the state_dict has groups of {[len(group['params']) for group in groups]} parameters, but the"
                f" optimizer's have {self._sizes}; load the state_dict() of an optimizer over the same parameters"
            )
        saved = self._by_place(state_dict)
        states, new_groups, numbers = {}, [], itertools.count()
        for group, present in zip(groups, self._optimizer.param_groups, strict=True):
            own = {next(numbers): self._place_of.get(id(parameter)) for parameter in present["params"]}
            for number, place in own.items():
                if place is not None and (state := saved.get(place)) is not None:
                    index = self._whole[place][1]
                    states[number] = state if index is None else self._cut(index, state)
            names = {"param_names": present["param_names"]} if "param_names" in present else {}
            new_groups.append({**group, **names, "params": list(own)})
        return {**state_dict, "state": states, "param_groups": new_groups}

    def load_parts(self, state_dict: Mapping[str, Any], names: Sequence[str]) -> None:
        """Use the states and settings in the result of `parts`."""
        states = self._optimizer.state
        for name, (_, index) in zip(names, self._whole, strict=True):
            if index in self._pieces and name in state_dict["state"]:
                piece = self._pieces[index].stepped
                for key, value in state_dict["state"][name].items():
                    if isinstance(value, PartOfTensor):
                        states[piece][key] = value.local
                    else:
                        present = next(torch_internals.tensors_in(states[piece].get(key)), None)
                        device = torch.device("cpu") if present is None else present.device
                        states[piece][key] = torch_internals.map_leaves(
                            Tensor, partial(Tensor.to, device=device), value
                        )
        for group, loaded in zip(self._optimizer.param_groups, state_dict["param_groups"], strict=True):
            group.update(_settings_of(loaded))

    def _parts_of(self, index: int, described: Mapping[str, Any]) -> dict[str, Any]:
        piece, whole = self._pieces.get(index), self._bucket_of[index].place_of(index)
        state = {} if piece is None else self._optimizer.state.get(piece.stepped, {})
        begin = 0 if piece is None else piece.begin
        return {
            key: PartOfTensor(state.get(key), begin, whole, value) if _is_cut(value) else value
            for key, value in described.items()
        }

    def _cut(self, index: int, state: Mapping[str, Any]) -> dict[str, Any]:
        """A piece's part of the states of a whole parameter, in the dtypes in which torch would load them."""
        piece, bucket = self._pieces[index], self._bucket_of[index]
        shape, low = bucket.place_of(index).shape, bucket.flat.dtype
        cut = {}
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.shape == shape:
                is_own = not value.is_floating_point() or (bucket.has_owner(index) and value.dtype != low)
                dtype = value.dtype if is_own else piece.stepped.dtype
                cut[key] = bucket.part_of(piece, value).to(piece.stepped.device, dtype)
            elif isinstance(value, Tensor) and value.dim() and not bucket.has_owner(index):
                raise ValueError(
                    f"state {key} of {bucket.name_of(index)} has shape {list(value.shape)}, but the parameter has shape"
                    f" {list(shape)}, so the state cannot be cut into shards"
                )
            else:
                cut[key] = torch_internals.map_leaves(Tensor, partial(_as_state_of, piece.stepped, low), value)
        return cut

    def _gather_all(self, on_device: bool = False) -> dict[int, dict[str, Any]]:
        """States of whole parameters by their numbers, tensors on the CPU.

        Args:
            on_device: Numbers that optimizers keep on the parameters' device stay there.
        """
        gathered = self._describe_all(on_device)
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

    def _describe_all(self, on_device: bool = False) -> dict[int, dict[str, Any]]:
        """The states of all ranks' pieces, with the dtype of each tensor that is cut in its place.

        Args:
            on_device: See `_gather_all`.
        """
        described: dict[int, dict[str, Any]] = {}
        for of_rank in self._transfers.objects_of_all(self._describe()):
            described |= of_rank
        device = self._buckets[0].flat.device if on_device else torch.device("cpu")
        moved: dict[int, dict[str, Any]] = torch_internals.map_leaves(
            _OnDevice, lambda number: number.tensor.to(device), described
        )
        return moved

    def _describe(self) -> dict[int, dict[str, Any]]:
        described: dict[int, dict[str, Any]] = {}
        for index, piece in self._pieces.items():
            bucket = self._bucket_of[index]
            for key, value in self._optimizer.state.get(piece.stepped, {}).items():
                is_cut = self._state_to_cut(key, piece) is not None
                for tensor in torch_internals.tensors_in(value) if not (is_cut or bucket.has_owner(index)) else ():
                    if tensor.dim():
                        raise ReplicationError(
                            f"state {key} of the piece of {bucket.name_of(index)} has a tensor of shape"
                            f" {list(tensor.shape)}, but the piece has shape {list(piece.stepped.shape)}, so it is"
                            " unknown how to combine it with the other ranks' tensors"
                        )
                described.setdefault(index, {})[key] = (
                    value.dtype if is_cut else torch_internals.map_leaves(Tensor, _sent, value)
                )
        return described


@dataclass(frozen=True, slots=True)
class _OnDevice:
    """A number that an optimizer keeps on the parameters' device, on the CPU while it is sent to other ranks."""

    tensor: Tensor


def _sent(tensor: Tensor) -> Tensor | _OnDevice:
    copy = tensor.cpu().clone()
    return copy if tensor.dim() or tensor.device.type == "cpu" else _OnDevice(copy)


def _as_state_of(parameter: Parameter, other: torch.dtype | None, value: Tensor) -> Tensor:
    """A copy of a state for a parameter: numbers as they are, tensors of dtype ``other`` in the parameter's dtype."""
    if not value.dim():
        return value.clone()
    return value.to(parameter.device, parameter.dtype if value.dtype == other else value.dtype, copy=True)


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _is_cut(value: Any) -> bool:
    return isinstance(value, torch.dtype)
