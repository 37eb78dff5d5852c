"""The states of a sharded optimizer: cut into pieces, and put together again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp_compile.errors import ReplicationError
from ddp_compile.runtime.sharded.shard_transfers import ShardTransfers
from ddp_compile.runtime.sharded.sharded_bucket import ShardedBucket
from ddp_compile.runtime.sharded.sharded_checkpoints import PartOfTensor


class ShardedStates:
    """Converts between states of whole parameters and states of this rank's pieces.

    A state is a tensor of the parameter's shape, of which a piece has its elements, or a number, of which it has a
    copy.

    Args:
        optimizer: Has the states.
        numbers: Of the parameters that are sharded, by ``id``.
        whole: The parameters of each group before it was sharded.
        buckets: The buckets.
        transfers: Sends shards.
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
        self._whole = [parameter for group in whole for parameter in group]
        self._numbers = [numbers.get(id(parameter)) for parameter in self._whole]
        self._sizes = [len(group) for group in whole]
        self._buckets = buckets
        self._transfers = transfers
        self._pieces = {piece.index: (piece, bucket) for bucket in buckets for piece in bucket.pieces}

    def cut(self, loaded: Mapping[str, Any] | None) -> None:
        """Let the pieces have their parts of the states that whole parameters have.

        Args:
            loaded: The state_dict that the states are from, in whatever dtype they have there; None if there is none.
        """
        states = self._optimizer.state
        saved = {} if loaded is None else self._by_parameter(loaded)
        for parameter, index in zip(self._whole, self._numbers, strict=True):
            if index is not None and (state := states.pop(parameter, None)) and index in self._pieces:
                stepped = self._pieces[index][0].stepped
                loaded_state = saved.get(parameter, {})
                if all(_is_as_loaded(state, loaded_state)):
                    dtype = parameter.dtype
                    state = {k: _loaded_for(stepped, value, loaded_state[k], dtype) for k, value in state.items()}
                states[stepped] = self._cut(index, state)

    def _by_parameter(self, loaded: Mapping[str, Any]) -> dict[Parameter, dict[str, Any]]:
        saved = [key for group in loaded["param_groups"] for key in group["params"]]
        return {
            parameter: loaded["state"][key]
            for parameter, key in zip(self._whole, saved, strict=True)
            if key in loaded["state"]
        }

    def join(self) -> None:
        """Let whole parameters have their states again; on every rank at once."""
        states = self._optimizer.state
        whole = self._gather()
        present = set(map(id, self._whole))
        for parameter in [parameter for parameter in states if id(parameter) not in present]:
            del states[parameter]  # of pieces
        for parameter, index in zip(self._whole, self._numbers, strict=True):
            if index is not None and index in whole:
                stepped = next(b for b in self._buckets if index in b.param_indices).stepped_dtype
                states[parameter] = {
                    key: value.to(parameter.device, parameter.dtype if value.dtype == stepped else None)
                    if isinstance(value, Tensor) and value.dim()
                    else value
                    for key, value in whole[index].items()
                }

    def whole(self, state_dict: Mapping[str, Any], names: Sequence[list[str] | None]) -> dict[str, Any]:
        """A state_dict with the states and numbers of whole parameters; on every rank at once.

        Args:
            state_dict: What the optimizer says of this rank's pieces.
            names: What its groups call the parameters, if anything.
        """
        gathered = self._gather()
        states = {}
        for place, (parameter, index) in enumerate(zip(self._whole, self._numbers, strict=True)):
            state = self._optimizer.state.get(parameter) if index is None else gathered.get(index)
            if state:
                states[place] = state
        groups, first = [], 0
        for group, size, of_group in zip(state_dict["param_groups"], self._sizes, names, strict=True):
            of_names = {} if of_group is None else {"param_names": list(of_group)}
            groups.append({**group, **of_names, "params": list(range(first, first + size))})
            first += size
        return {**state_dict, "state": states, "param_groups": groups}

    def of_pieces(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """A state_dict of this rank's pieces from one of whole parameters; what does not fit is torch's to refuse."""
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != self._sizes:
            raise ValueError(
                f"the state_dict has groups of {[len(group['params']) for group in groups]} parameters, and the"
                f" optimizer of {self._sizes}; load what state_dict() of an optimizer over the same parameters returned"
            )
        saved = [key for group in groups for key in group["params"]]
        place_of = {id(parameter): place for place, parameter in enumerate(self._whole)}
        for piece_place, (piece, bucket) in self._pieces.items():
            whole = bucket.parameters[bucket.param_indices.index(piece_place)]
            place_of[id(piece.stepped)] = place_of[id(whole)]
        states, new_groups, number = {}, [], 0
        for group, present in zip(groups, self._optimizer.param_groups, strict=True):
            numbers = []
            for parameter in present["params"]:
                if (place := place_of.get(id(parameter))) is not None:
                    index = self._numbers[place]
                    state = state_dict["state"].get(saved[place])
                    if state is not None:
                        states[number] = state if index is None else self._cut(index, state)
                numbers.append(number)
                number += 1
            names = {"param_names": present["param_names"]} if "param_names" in present else {}
            new_groups.append({**group, **names, "params": numbers})
        return {**state_dict, "state": states, "param_groups": new_groups}

    def parts(self, names: Sequence[str]) -> dict[str, Any]:
        """States by names, of which tensors are represented by this rank's part; on every rank at once.

        Args:
            names: Of all whole parameters, in the order of the groups.
        """
        described = self._described()
        states = {}
        for name, parameter, index in zip(names, self._whole, self._numbers, strict=True):
            state = self._optimizer.state.get(parameter) if index is None else self._parts_of(index, described)
            if state:
                states[name] = state
        groups, first = [], 0
        for group, size in zip(self._optimizer.param_groups, self._sizes, strict=True):
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            groups.append({**settings, "params": list(names[first : first + size])})
            first += size
        return {"state": states, "param_groups": groups}

    def load_parts(self, state_dict: Mapping[str, Any], names: Sequence[str]) -> None:
        """Take over what is no part of a tensor from what `parts` has returned; parts lie in the states themselves."""
        for name, index in zip(names, self._numbers, strict=True):
            if index in self._pieces and name in state_dict["state"]:
                piece, _bucket = self._pieces[index]
                for key, value in state_dict["state"][name].items():
                    if not isinstance(value, PartOfTensor):
                        self._optimizer.state[piece.stepped][key] = value
        for group, loaded in zip(self._optimizer.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in loaded.items() if key not in ("params", "param_names")})

    def _parts_of(self, index: int, described: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        bucket = next(bucket for bucket in self._buckets if index in bucket.param_indices)
        piece = self._pieces[index][0] if index in self._pieces else None
        state = {} if piece is None else self._optimizer.state.get(piece.stepped, {})
        begin, whole = 0 if piece is None else piece.begin, bucket.place_of(index)
        return {
            key: PartOfTensor(state.get(key), begin, whole, value) if _is_cut(value) else value
            for key, value in described.get(index, {}).items()
        }

    def _described(self) -> dict[int, dict[str, Any]]:
        """What `_describe` says of all pieces."""
        described: dict[int, dict[str, Any]] = {}
        for of_rank in self._transfers.objects_of_all(self._describe()):
            described |= of_rank
        return described

    def _cut(self, index: int, state: Mapping[str, Any]) -> dict[str, Any]:
        piece, bucket = self._pieces[index]
        shape = bucket.parameters[bucket.param_indices.index(index)].shape
        cut = {}
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                if value.shape != shape:
                    raise ValueError(
                        f"state {key} of {bucket.name_of(index)} has the shape {list(value.shape)}, and the parameter"
                        f" {list(shape)}: it cannot be cut into shards"
                    )
                dtype = piece.stepped.dtype if value.is_floating_point() else value.dtype
                cut[key] = bucket.cut(piece, value).to(piece.stepped.device, dtype)
            else:
                cut[key] = value.clone() if isinstance(value, Tensor) else value
        return cut

    def _gather(self) -> dict[int, dict[str, Any]]:
        """States of whole parameters by their numbers, tensors on the CPU."""
        described = self._described()
        return {
            index: state for bucket in self._buckets for index, state in self._gather_bucket(bucket, described).items()
        }

    def _gather_bucket(self, bucket: ShardedBucket, described: Mapping[int, Any]) -> dict[int, dict[str, Any]]:
        states = {index: dict(described[index]) for index in bucket.param_indices if index in described}
        kinds = {(key, value) for state in states.values() for key, value in state.items() if _is_cut(value)}
        for key, dtype in sorted(kinds, key=repr):
            shards = torch.zeros_like(bucket.flat, dtype=dtype)
            own = bucket.shard_of(shards)
            for piece in bucket.pieces:
                value = self._optimizer.state.get(piece.stepped, {}).get(key)
                if isinstance(value, Tensor) and value.dim():
                    piece.of_shard(own).copy_(value)
            self._transfers.all_gather(shards).wait()
            for index, value in bucket.assemble(shards.cpu()).items():
                if states.get(index, {}).get(key) == dtype:
                    states[index][key] = value
        return states

    def _describe(self) -> dict[int, dict[str, Any]]:
        """Of this rank's pieces: the dtype of what is cut, and whatever is not."""
        described: dict[int, dict[str, Any]] = {}
        for index, (piece, bucket) in self._pieces.items():
            for key, value in self._optimizer.state.get(piece.stepped, {}).items():
                if isinstance(value, Tensor) and value.dim() and value.shape != piece.stepped.shape:
                    raise ReplicationError(
                        f"state {key} of the piece of {bucket.name_of(index)} has the shape {list(value.shape)}, and"
                        f" the piece {list(piece.stepped.shape)}, so it cannot be put together with the other ranks'"
                    )
                is_cut = isinstance(value, Tensor) and value.dim()
                whole = value.cpu().clone() if isinstance(value, Tensor) and not is_cut else value
                described.setdefault(index, {})[key] = value.dtype if is_cut else whole
        return described


def _is_as_loaded(state: Mapping[str, Any], loaded: Mapping[str, Any]) -> Iterator[bool]:
    """Whether a state is what was loaded but for its dtype, for each of its parts: no step has come since."""
    yield state.keys() == loaded.keys()
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield isinstance(loaded.get(key), Tensor) and torch.equal(value, loaded[key].to(value.device, value.dtype))


def _loaded_for(stepped: Parameter, value: Any, loaded: Any, dtype: torch.dtype) -> Any:
    """The state that torch would have loaded for ``stepped``, which may have another dtype than the parameter.

    Args:
        stepped: The parameter's piece.
        value: The state that torch has loaded for the parameter. It casts all but the number of steps.
        loaded: The state as it was saved.
        dtype: The parameter's.
    """
    is_cast = isinstance(value, Tensor) and value.dtype == dtype != loaded.dtype
    return loaded.to(value.device, stepped.dtype) if is_cast else value


def _is_cut(value: Any) -> bool:
    return isinstance(value, torch.dtype)
