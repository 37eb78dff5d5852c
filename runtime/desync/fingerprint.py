"""What must be equal on all ranks at an agreement point, and the words for differences."""

import dataclasses
import json
from collections.abc import Mapping
from typing import NamedTuple, Self

from ddp_compile.errors import name_values


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelFingerprint:
    """What one model has done on one rank up to an iteration."""

    plan: str  #: digest and generation
    algorithm: str  #: name of the algorithm that reduces it
    forwards_left_out: int  #: training forwards that no backward has reached, although one has reached a later forward
    backwards_repeated: int  #: iterations without a forward since the previous one
    local_steps: int  #: optimizer steps with gradients of backwards inside ``no_sync``

    @property
    def mark(self) -> int:
        """What is compared in every message of the ranks, one byte; usually another one if anything was left out."""
        return (self.forwards_left_out + 7 * self.backwards_repeated + 31 * self.local_steps) % 256


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """What the models that share a process group have done on one rank."""

    number: int  #: how many iterations all models have had
    models: dict[str, ModelFingerprint]  #: those that had an iteration since the last agreement point, by name
    order: str  #: digest of the order in which all models have sent gradients and buffers
    latest: tuple[str, ...]  #: the latest messages, "the gradients of model 1 (Linear)"; empty with one model

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
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
    "local_steps": _Field(
        "optimizer steps with gradients from no_sync, which were not averaged",
        "Call the last backward before each optimizer step outside model.no_sync() on every rank",
    ),
}

ORDER_WAY_OUT = (
    "Call the forwards and backwards of the models in the same order on every rank, or give each model a process group"
    " of its own"
)


def describe_differences(fingerprints: Mapping[int, Fingerprint]) -> str | None:
    """The differences between the ranks, the fewest ranks first, and what to do about them; None without any."""
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
