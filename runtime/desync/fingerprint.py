"""What has to be equal on all ranks at an agreement point, and the text of an error where it is not."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

from ddp_compile.runtime.rank_names import name_values


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """What one rank has done up to an iteration.

    Args:
        plan: Digest and generation of its bucket plan.
        algorithm: Name of the way in which it reduces.
        forwards_left_out: Training forwards that no backward has reached, although it has reached later ones.
        backwards_repeated: Iterations that no forward came before.
    """

    plan: str
    algorithm: str
    forwards_left_out: int
    backwards_repeated: int

    def digest(self, iteration_number: int) -> str:
        """Equal for two ranks where their fingerprints of an iteration are equal."""
        return hashlib.sha256(f"{iteration_number} {self.to_json()}".encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Fingerprint:
        return cls(**json.loads(text))


class _Field(NamedTuple):
    what: str
    way_out: str


_FIELDS = {
    "plan": _Field("bucket plan", "Call ddp_compile and register_comm_hook alike on every rank"),
    "algorithm": _Field(
        "way to reduce", "Pass the same algorithm, or register the same comm hook between the same two steps"
    ),
    "forwards_left_out": _Field(
        "training forwards without a backward",
        "Call a backward for each of them on every rank, and put a forward that needs none into torch.no_grad() or"
        " model.no_sync()",
    ),
    "backwards_repeated": _Field(
        "backwards without a forward before them", "Call backward equally often on every rank"
    ),
}


def describe_differences(fingerprints: Sequence[Fingerprint]) -> str | None:
    """What differs between the ranks, the fewest ranks first, and what to do about it; None where nothing does.

    Args:
        fingerprints: By rank.
    """
    differences, ways_out = [], []
    for name, field in _FIELDS.items():
        values = [getattr(fingerprint, name) for fingerprint in fingerprints]
        if len(set(values)) > 1:
            differences.append(f"{field.what}: {name_values(values)}")
            ways_out.append(field.way_out)
    return f"{'; '.join(differences)}. {'. '.join(ways_out)}" if differences else None
