"""What has to be equal on all ranks at an agreement point, and the text of an error where it is not."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

from ddp_compile.runtime.comm.rank_names import name_values


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelFingerprint:
    """What one model has done on one rank up to an iteration.

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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """What the models that share a process group have done on one rank.

    Args:
        number: Of iterations, of all models.
        models: Those that had an iteration since the agreement point before, by name.
        order: Digest of the order in which all models have sent gradients and buffers.
        latest: What was sent latest, in order, "the gradients of model 1 (Linear)"; empty if there is only one model.
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

ORDER_WAY_OUT = (
    "Call the forwards and backwards of the models in one order on every rank, or give each model a process group of"
    " its own"
)


def describe_differences(fingerprints: Sequence[Fingerprint]) -> str | None:
    """What differs between the ranks, the fewest ranks first, and what to do about it; None where nothing does.

    Args:
        fingerprints: By rank.
    """
    differences, ways_out = [], []
    if len({fingerprint.order for fingerprint in fingerprints}) > 1:
        differences.append(_describe_order(fingerprints))
        ways_out.append(ORDER_WAY_OUT)
    for model in fingerprints[0].models:
        done = [theirs.models[model] for theirs in fingerprints if model in theirs.models]
        if len(done) < len(fingerprints):
            continue  # the order, described above, says that this model's iteration was another's on some rank
        for name, field in _FIELDS.items():
            values = [getattr(fingerprint, name) for fingerprint in done]
            if len(set(values)) > 1:
                of_model = f" of {model}" if fingerprints[0].latest else ""
                differences.append(f"{field.what}{of_model}: {name_values(values)}")
                ways_out.append(field.way_out)
    return f"{'; '.join(differences)}. {'. '.join(dict.fromkeys(ways_out))}" if differences else None


def _describe_order(fingerprints: Sequence[Fingerprint]) -> str:
    """The first of the latest messages in which the ranks differ."""
    for back in range(min(len(theirs.latest) for theirs in fingerprints), 0, -1):
        sent = [theirs.latest[-back] for theirs in fingerprints]
        if len(set(sent)) > 1:
            later = fingerprints[0].latest[len(fingerprints[0].latest) - back + 1 :]
            number = fingerprints[0].number - sum("gradients" in each for each in later)
            return f"iteration {number} of the process group paired different messages: {name_values(sent)}"
    return "the models of the process group have sent in different orders"
