"""The states of a sharded optimizer: cut into pieces, and put together again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

    A state of a parameter that is cut is a tensor of its shape, of which a piece has its elements, or a number, which
    it copies. States of a parameter that a rank owns may be anything. ``whole`` are the parameters of each group before
    it was sharded, ``numbers`` those of the sharded ones by ``id``; ``buckets`` have all of these.
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

    def cut(self, loaded: Mapping[str, Any] | None) -> None:
        """Give the pieces their parts of the states of whole parameters, which were ``loaded`` unless that is None."""
        states = self._optimizer.state
        saved = {} if loaded is None else self._by_place(loaded)
        for place, (parameter, index) in enumerate(self._whole):
            if index is not None and (state := states.pop(parameter, None)) and index in self._pieces:
                stepped, of_saved = self._pieces[index].stepped, saved.get(place, {})
                state = {k: _loaded_for(stepped, v, of_saved.get(k), parameter.dtype) for k, v in state.items()}
                states[stepped] = self._cut(index, state)

    def _by_place(self, state_dict: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        return {place: state_dict["state"][key] for place, key in enumerate(saved) if key in state_dict["state"]}

    def join(self) -> None:
        """Give whole parameters their states again; to be called on every rank."""
        states = self._optimizer.state
        gathered = self._gather_all(on_device=True)
        for piece in self._pieces.values():
            states.pop(piece.stepped, None)
        for parameter, index in self._whole:
            if index is not None and index in gathered:
                stepped = self._bucket_of[index].stepped_dtype
                states[parameter] = {
                    key: _mapped(value, partial(_as_state_of, parameter, stepped))
                    for key, value in gathered[index].items()
                }

    def whole(self, state_dict: Mapping[str, Any], names: Sequence[list[str] | None]) -> dict[str, Any]:
        """A state_dict of whole parameters from one of this rank's pieces; to be called on every rank."""
        places = range(len(self._whole))
        groups = [
            {**group, **({} if of_group is None else {"param_names": list(of_group)}), "params": params}
            for group, of_group, params in zip(state_dict["param_groups"], names, self._grouped(places), strict=True)
        ]
        return {**state_dict, "state": self._states_by(places, self._gather_all()), "param_groups": groups}

    def parts(self, names: Sequence[str]) -> dict[str, Any]:
        """States by names, with this rank's part in the place of each tensor; to be called on every rank."""
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
        """A state_dict of this rank's pieces from one of whole parameters; torch refuses what does not fit."""
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != self._sizes:
            raise ValueError(
                f"the state_dict has groups of {[len(group['params']) for group in groups]} parameters, and the"
                f" optimizer of {self._sizes}; load what state_dict() of an optimizer over the same parameters returned"
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
        """Take over the numbers and settings in the result of `parts`; its tensors lie in the states themselves."""
        states = self._optimizer.state
        for name, (_, index) in zip(names, self._whole, strict=True):
            if index is None or name not in state_dict["state"]:
                continue
            state = states.get(self._pieces[index].stepped, {}) if index in self._pieces else {}
            for key, value in state_dict["state"][name].items():
                if isinstance(value, PartOfTensor):
                    value.refuse_if_replaced()
                elif index in self._pieces:
                    state[key] = _paired(value, state.get(key), _on_device_of)
        for group, loaded in zip(self._optimizer.param_groups, state_dict["param_groups"], strict=True):
            group.update(_settings_of(loaded))

    def _parts_of(self, index: int, described: Mapping[str, Any]) -> dict[str, Any]:
        piece, whole = self._pieces.get(index), self._bucket_of[index].place_of(index)
        state = {} if piece is None else self._optimizer.state.get(piece.stepped, {})
        begin = 0 if piece is None else piece.begin
        return {
            key: PartOfTensor(state.get(key), begin, whole, value, partial(self._is_still, index, key))
            if _is_cut(value)
            else value
            for key, value in described.items()
        }

    def _is_still(self, index: int, key: str, value: Tensor | None) -> bool:
        """Whether this rank's part of a state is still this tensor."""
        piece = self._pieces.get(index)
        state = None if piece is None else self._optimizer.state.get(piece.stepped, {}).get(key)
        return state is value

    def _cut(self, index: int, state: Mapping[str, Any]) -> dict[str, Any]:
        """A piece's part of the states of a whole parameter, in the dtypes that torch would load them in."""
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
                    f"state {key} of {bucket.name_of(index)} has the shape {list(value.shape)}, and the parameter"
                    f" {list(shape)}: it cannot be cut into shards"
                )
            else:
                cut[key] = _mapped(value, partial(_as_state_of, piece.stepped, low))
        return cut

    def _gather_all(self, on_device: bool = False) -> dict[int, dict[str, Any]]:
        """States of whole parameters by their numbers, tensors on the CPU.

        Args:
            on_device: Numbers that are on the parameters' device stay there.
        """
        described, cpu = self._describe_all(on_device), torch.device("cpu")
        gathered: dict[int, dict[str, Any]] = {}
        for bucket in self._buckets:
            gathered |= {index: dict(described[index]) for index in bucket.param_indices if index in described}
            for index, key, value in self._gather(bucket, described, cpu):
                gathered[index][key] = value
        return gathered

    def _gather(
        self, bucket: ShardedBucket, described: Mapping[int, Mapping[str, Any]], device: torch.device
    ) -> Iterator[tuple[int, str, Any]]:
        """The states of a bucket's whole parameters, one after the other, from what `_describe_all` returns."""
        kinds = {
            (key, value)
            for index in bucket.param_indices
            for key, value in described.get(index, {}).items()
            if _is_cut(value)
        }
        for key, dtype in sorted(kinds, key=repr):
            for index, value in bucket.gather_whole(partial(self._state_to_cut, key), dtype, device).items():
                if described.get(index, {}).get(key) == dtype:
                    yield index, key, value
        for index in bucket.param_indices:
            for key, value in described.get(index, {}).items():
                if not _is_cut(value):
                    yield index, key, value

    def _state_to_cut(self, key: str, piece: Piece) -> Tensor | None:
        value = self._optimizer.state.get(piece.stepped, {}).get(key)
        is_cut = isinstance(value, Tensor) and value.dim() and value.shape == piece.stepped.shape
        return value if is_cut else None

    def _describe_all(self, on_device: bool = False, owned: bool = True) -> dict[int, dict[str, Any]]:
        """Of all ranks' pieces: the dtype of each tensor that is cut, and all other values.

        Args:
            on_device: See `_gather_all`.
            owned: Of the pieces with an owner too.
        """
        described: dict[int, dict[str, Any]] = {}
        for of_rank in self._transfers.objects_of_all(self._describe(owned)):
            described |= of_rank
        device = self._buckets[0].flat.device if on_device else torch.device("cpu")
        return _mapped(described, lambda value: value.tensor.to(device) if isinstance(value, _OnDevice) else value)

    def objection(self) -> str:
        """Why states cannot be put together; empty if they can be."""
        try:
            self._describe(owned=False)
        except ReplicationError as error:
            return str(error)
        return ""

    def _describe(self, owned: bool) -> dict[int, dict[str, Any]]:
        described: dict[int, dict[str, Any]] = {}
        for index, piece in self._pieces.items():
            bucket, of_piece = self._bucket_of[index], described.setdefault(index, {})
            if bucket.has_owner(index) and not owned:
                continue
            for key, value in self._optimizer.state.get(piece.stepped, {}).items():
                if self._state_to_cut(key, piece) is not None:
                    of_piece[key] = value.dtype
                    continue
                for tensor in torch_internals.tensors_in(value) if not bucket.has_owner(index) else ():
                    if tensor.dim():
                        raise ReplicationError(
                            f"state {key} of the piece of {bucket.name_of(index)} has a tensor of shape"
                            f" {list(tensor.shape)}, and the piece {list(piece.stepped.shape)}, so it cannot be put"
                            " together with the other ranks'"
                        )
                of_piece[key] = _mapped(value, _sent)
        return {index: of_piece for index, of_piece in described.items() if of_piece}


@dataclass(frozen=True, slots=True)
class _OnDevice:
    """A number that an optimizer keeps on the parameters' device, as it is sent to other ranks: on the CPU."""

    tensor: Tensor


def _sent(tensor: Tensor) -> Tensor | _OnDevice:
    copy = tensor.cpu().clone()
    return copy if tensor.dim() or tensor.device.type == "cpu" else _OnDevice(copy)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """A state with its tensors replaced, which may be in lists and dicts."""
    if isinstance(value, Tensor | _OnDevice):
        return function(value)
    if isinstance(value, dict):
        return {key: _mapped(each, function) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, function) for each in value)
    return value


def _as_state_of(parameter: Parameter, other: torch.dtype | None, value: Tensor) -> Tensor:
    """A copy of a state for a parameter: numbers as they are, tensors of the dtype ``other`` in the parameter's."""
    if not value.dim():
        return value.clone()
    return value.to(parameter.device, parameter.dtype if value.dtype == other else value.dtype, copy=True)


def _paired(value: Any, other: Any, function: Callable[[Any, Any], Any]) -> Any:
    """A state with what is no container replaced, by a function that also gets what ``other`` has in its place."""
    if isinstance(value, dict) and isinstance(other, dict):
        return {key: _paired(each, other.get(key), function) for key, each in value.items()}
    if type(value) in (list, tuple) and type(other) is type(value) and len(other) == len(value):
        return type(value)(_paired(each, its, function) for each, its in zip(value, other, strict=True))
    return function(value, other)


def _on_device_of(loaded: Any, present: Any) -> Any:
    return loaded.to(present.device) if isinstance(present, Tensor) and isinstance(loaded, Tensor) else loaded


def _loaded_for(stepped: Parameter, value: Any, loaded: Any, dtype: torch.dtype) -> Any:
    """The state that torch would have loaded for ``stepped``, not for a parameter of another dtype.

    When torch loaded the state, it cast everything but the number of steps; ``loaded`` is from before that.
    """

    def choose(value: Any, loaded: Any) -> Any:
        is_cast = isinstance(value, Tensor) and isinstance(loaded, Tensor) and value.dtype == dtype != loaded.dtype
        return loaded.to(value.device, stepped.dtype) if is_cast else value

    return _paired(value, loaded, choose)


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _is_cut(value: Any) -> bool:
    return isinstance(value, torch.dtype)
