"""What must be equal on all ranks at an agreement point, and the words for differences."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import NamedTuple

from ddp_compile.runtime.comm.rank_names import name_values


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelFingerprint:
    """What one model has done on one rank up to an iteration.

    Args:
        plan: Digest and generation of its bucket plan.
        algorithm: Name of the algorithm that reduces it.
        forwards_left_out: Training forwards that no backward reached although a backward reached a later one.
        backwards_repeated: Iterations without a forward since the previous one.
    """

    plan: str
    algorithm: str
    forwards_left_out: int
    backwards_repeated: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """What the models that share a process group have done on one rank.

    Args:
        number: The number of iterations of all models.
        models: The models that had an iteration since the last agreement point, by name.
        order: Digest of the order in which the models have sent gradients and buffers.
        latest: The latest messages in order, such as "the gradients of model 1 (Linear)"; empty if there is only one
            model.
    """

    number: int
    models: dict[str, ModelFingerprint]
    order: str
    latest: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Equal for two ranks if their fingerprints are."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Fingerprint:
        fields = json.loads(text)
        models = {name: ModelFingerprint(**done) for name, done in fields["models"].items()}
        return cls(number=fields["number"], models=models, order=fields["order"], latest=tuple(fields["latest"]))


class _Field(NamedTuple):
    what: str
    way_out: str


_FIELDS = {
    "plan": _Field("bucket plan", "Call ddp_compile and register_comm_hook in the same way on every rank"),
    "algorithm": _Field(
        "way to reduce", "Pass the same algorithm, or register the same comm hook between the same two steps"
    ),
    "forwards_left_out": _Field(
        "training forwards without a backward",
        "Call a backward for each of them on every rank, and put a forward that needs none into torch.no_grad() or"
        " model.no_sync()",
    ),
    "backwards_repeated": _Field(
        "backwards without a forward before them", "Call backward the same number of times on every rank"
    ),
}

ORDER_WAY_OUT = (
    "Call the forwards and backwards of the models in the same order on every rank, or give each model a process group"
    " of its own"
)


def describe_differences(fingerprints: Mapping[int, Fingerprint]) -> str | None:
    """The differences between the ranks, the fewest ranks first, and the ways out; None if there are no differences.

    Args:
        fingerprints: By global rank.
    """
    differences, ways_out = [], []
    first = next(iter(fingerprints.values()))
    if len({fingerprint.order for fingerprint in fingerprints.values()}) > 1:
        differences.append(_describe_order(first, fingerprints))
        ways_out.append(ORDER_WAY_OUT)
    for model in first.models:
        done = {rank: theirs.models[model] for rank, theirs in fingerprints.items() if model in theirs.models}
        if len(done) < len(fingerprints):
            continue  # the order, described above, says that some rank ran another model's iteration here
        for name, field in _FIELDS.items():
            values = {rank: getattr(theirs, name) for rank, theirs in done.items()}
            if len(set(values.values())) > 1:
                of_model = f" of {model}" if first.latest else ""
                differences.append(f"{field.what}{of_model}: {name_values(values)}")
                ways_out.append(field.way_out)
    return f"{'; '.join(differences)}. {'. '.join(dict.fromkeys(ways_out))}" if differences else None


def _describe_order(first: Fingerprint, fingerprints: Mapping[int, Fingerprint]) -> str:
    """The first of the latest messages that differs between the ranks."""
    for back in range(min(len(theirs.latest) for theirs in fingerprints.values()), 0, -1):
        sent = {rank: theirs.latest[-back] for rank, theirs in fingerprints.items()}
        if len(set(sent.values())) > 1:
            later = first.latest[len(first.latest) - back + 1 :]
            number = first.number - sum("gradients" in each for each in later)
            return f"iteration {number} of the process group paired different messages: {name_values(sent)}"
    return "the models of the process group have sent in different orders"
