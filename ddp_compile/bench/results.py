"""The measurements of a run, and their summary."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ddp_compile.bench.implementations import COMMUNICATION, EAGER, LOCAL
from ddp_compile.bench.settings import Case, Prepared, Profiled, StepRecord


@dataclass
class CaseResult:
    """Everything measured of one case."""

    case: Case
    cold: Prepared | None = None  #: first steps with empty compile caches, of the slowest rank; None if they failed
    warm: Prepared | None = None  #: first steps of new processes with the caches of ``cold``
    peak_bytes: int | None = None  #: the most bytes that were live at the same time, on the rank with the most
    #: For each link, for each round, the steps of the case's turn.
    rounds: dict[str, list[list[StepRecord]]] = field(default_factory=dict)
    #: For each link, bytes that rank 0's interface sent for one step.
    sent_bytes: dict[str, float] = field(default_factory=dict)
    profiles: dict[str, Profiled] = field(default_factory=dict)  #: for each link, a profiled step of rank 0
    loss: float | None = None  #: mean over the ranks, or over their tokens, of the last step's loss
    error: str | None = None  #: one line; None if nothing has failed
    traceback: str = ""  #: of the rank that failed first

    def steps(self, link: str) -> list[StepRecord]:
        return [step for turn in self.rounds.get(link, []) for step in turn]

    def median(self, link: str, name: str = "step_s") -> float:
        """Median over all timed steps, in seconds."""
        return statistics.median(getattr(step, name) for step in self.steps(link))


@dataclass(frozen=True, kw_only=True, slots=True)
class SummaryRow:
    """One link and case; times in milliseconds unless the name says otherwise, None if not measured.

    ``bound_ms`` is the ideal overlap of this run's own compute alone and communication alone, see `ideal_step_s`;
    ``exposed_ms`` is the step's time beyond compute alone. ``ratio_to_best_peer`` is the median over rounds of the
    ratio to the fastest peer on that link, ``ratio_low`` and ``ratio_high`` its 95 % interval. Compile seconds are the
    time of the first steps beyond that of as many steady ones.
    """

    link: str
    implementation: str
    mode: str
    bucket_cap_mb: float
    no_sync_every: int
    achieved_gbit: float | None = None
    step_ms: float | None = None
    step_ms_p25: float | None = None
    step_ms_p75: float | None = None
    num_steps: int | None = None
    ratio_to_best_peer: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    bound_ms: float | None = None
    ratio_to_bound: float | None = None
    exposed_ms: float | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None
    optimizer_ms: float | None = None
    cpu_ms: float | None = None
    peak_mib: float | None = None
    cold_compile_s: float | None = None
    warm_compile_s: float | None = None
    graphs: int | None = None
    all_reduces: int | None = None
    payload_mib: float | None = None
    sent_mib: float | None = None
    loss: float | None = None
    status: str = "ok"
    error: str = ""


SUMMARY_COLUMNS = [f.name for f in fields(SummaryRow)]
IDENTITY_COLUMNS = ["link", *(f.name for f in fields(Case))]


def ideal_step_s(local: CaseResult, communication: CaseResult, link: str, on_cpu: bool = True) -> float:
    """Length of a step that hides as much communication as can be hidden, in seconds.

    Communication can overlap with the backward that is followed by an optimizer step, but its processor work takes time
    from a core that computes: max(forward + max(backward, communication) + optimizer, compute + CPU seconds of the
    communication). With several micro-batches only the last backward counts in the first term. If an accelerator
    computes, the second term does not apply.
    """
    compute = local.median(link)
    backward = local.median(link, "backward_s") / local.case.no_sync_every
    alone = communication.median(link)
    hidden = compute - backward + max(backward, alone)
    return max(hidden, compute + communication.median(link, "cpu_s")) if on_cpu else hidden


def median_ratio(rounds: Sequence[list[StepRecord]], others: Sequence[list[StepRecord]]) -> tuple[float, float, float]:
    """Median over rounds of the ratio of the rounds' median steps, and its 95 % interval."""
    return median_and_interval(
        statistics.median(step.step_s for step in ours) / statistics.median(step.step_s for step in theirs)
        for ours, theirs in zip(rounds, others, strict=True)
    )


def median_and_interval(values: Iterable[float]) -> tuple[float, float, float]:
    """The median, and a 95 % interval for the median of the values' distribution.

    The interval is between order statistics, whatever the distribution: each value is above the true median with
    probability one half. With fewer than six values it is the whole range, which covers less than 95 %.
    """
    ordered = sorted(values)
    n = len(ordered)
    below, tail = 0, 0.5**n
    while tail + math.comb(n, below + 1) * 0.5**n <= 0.025 and below + 1 < n // 2:
        below += 1
        tail += math.comb(n, below) * 0.5**n
    return statistics.median(ordered), ordered[below], ordered[n - 1 - below]


def summarize(
    results: Sequence[CaseResult],
    links: Sequence[str],
    achieved: dict[str, float],
    peers: Sequence[str],
    on_cpu: bool = True,
) -> list[SummaryRow]:
    """One row for each link and case, the failed ones included.

    Args:
        results: All cases; ``local`` and ``communication`` among them.
        links: Names of the links, in the order of the table.
        achieved: Gbit/s that all-reduces of large messages reached, by link.
        peers: Names of the implementations that the others are compared with.
        on_cpu: The ranks compute on CPU cores, see `ideal_step_s`.
    """
    rows = []
    for link in links:
        most = max((len(result.rounds.get(link, [])) for result in results), default=0)
        # A failed case has fewer rounds, and is not compared.
        measured = [result for result in results if most and len(result.rounds.get(link, [])) == most]
        for result in results:
            best = _best_peer(result, measured, link, peers)
            bound = _bound(result, measured, link, on_cpu)
            rows.append(
                _row(result, link, achieved.get(link), best, bound) if result in measured else _failed_row(result, link)
            )
    return rows


def _best_peer(
    result: CaseResult, measured: Sequence[CaseResult], link: str, peers: Sequence[str]
) -> CaseResult | None:
    """The peer with the shortest step, whatever its capacity and mode, that does the same number of micro-batches."""
    candidates = [other for other in measured if other.case.implementation in peers]
    same = [other for other in candidates if other.case.no_sync_every == result.case.no_sync_every]
    return min(same, key=lambda other: other.median(link), default=None)


def _bound(
    result: CaseResult, measured: Sequence[CaseResult], link: str, on_cpu: bool
) -> tuple[CaseResult, float] | None:
    """Compute alone in the case's mode, and the ideal step with the case's buckets."""
    case = result.case
    local = _find(measured, LOCAL, mode=case.mode) or _find(measured, LOCAL)
    communication = _find(measured, COMMUNICATION, bucket_cap_mb=case.bucket_cap_mb)
    if local is None or communication is None:
        return None
    return local, ideal_step_s(local, communication, link, on_cpu)


def _find(measured: Sequence[CaseResult], implementation: str, **settings: object) -> CaseResult | None:
    for result in measured:
        case = result.case
        if case.implementation == implementation and all(getattr(case, k) == v for k, v in settings.items()):
            return result
    return None


def _failed_row(result: CaseResult, link: str) -> SummaryRow:
    figures = _figures_of_the_case(result, link)
    return SummaryRow(**identity(result.case, link), **figures, status="failed", error=result.error or "not measured")


def identity(case: Case, link: str) -> dict[str, Any]:
    """Values of `IDENTITY_COLUMNS`."""
    return {"link": link, **asdict(case)}


def _row(
    result: CaseResult,
    link: str,
    achieved: float | None,
    best: CaseResult | None,
    bound: tuple[CaseResult, float] | None,
) -> SummaryRow:
    case = result.case
    figures: dict[str, Any] = {"step_ms": 1000 * result.median(link), "num_steps": len(result.steps(link))}
    steps = [1000 * step.step_s for step in result.steps(link)]
    quartiles = statistics.quantiles(steps, n=4, method="inclusive") if len(steps) > 1 else steps * 3
    figures |= {"step_ms_p25": quartiles[0], "step_ms_p75": quartiles[2]}
    for name in ("forward", "backward", "optimizer", "cpu"):
        figures[f"{name}_ms"] = 1000 * result.median(link, f"{name}_s")
    if best is not None and case.implementation not in (LOCAL, COMMUNICATION):
        ratio = median_ratio(result.rounds[link], best.rounds[link])
        figures |= {"ratio_to_best_peer": ratio[0], "ratio_low": ratio[1], "ratio_high": ratio[2]}
    if bound is not None and case.implementation not in (LOCAL, COMMUNICATION):
        local, ideal_s = bound
        figures |= {"bound_ms": 1000 * ideal_s, "ratio_to_bound": result.median(link) / ideal_s}
        if case.implementation not in EAGER:  # its computation differs from the compiled one
            figures["exposed_ms"] = 1000 * (result.median(link) - local.median(link))
    figures |= _figures_of_the_case(result, link)
    # A failure after the last round, in a profile or a warm start, leaves the timings valid.
    return SummaryRow(**identity(case, link), **figures, achieved_gbit=achieved, error=result.error or "")


def _figures_of_the_case(result: CaseResult, link: str) -> dict[str, Any]:
    profile = result.profiles.get(link)
    return {
        "peak_mib": None if result.peak_bytes is None else result.peak_bytes / 2**20,
        "cold_compile_s": _compile_s(result.cold),
        "warm_compile_s": _compile_s(result.warm),
        "graphs": None if result.cold is None else result.cold.num_graphs,
        "all_reduces": None if profile is None else profile.num_all_reduces,
        "payload_mib": None if profile is None or profile.payload_bytes is None else profile.payload_bytes / 2**20,
        "sent_mib": result.sent_bytes[link] / 2**20 if link in result.sent_bytes else None,
        "loss": result.loss,
    }


def _compile_s(prepared: Prepared | None) -> float | None:
    """The time of the first steps beyond that of as many steady ones; the shortest of them counts as steady."""
    if prepared is None or prepared.num_graphs == 0:
        return None
    return sum(prepared.warmup_s) - len(prepared.warmup_s) * min(prepared.warmup_s)
