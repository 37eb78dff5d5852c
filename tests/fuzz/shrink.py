"""Making failing recipes smaller."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from fuzz.recipe import smaller
from fuzz.verdict import Verdict

Judge = Callable[[Sequence[Any]], list[Verdict]]


def shrink(recipe: Any, judge: Judge, at_once: int = 8, limit_s: float = 300.0) -> tuple[Any, Verdict]:
    """The smallest recipe that still fails with the same symptom, found by leaving one thing out at a time, greedily.

    Args:
        recipe: A recipe that fails.
        judge: Verdicts of several recipes.
        at_once: How many candidates are judged in one call.
        limit_s: After so many seconds, the smallest one so far will do: where ranks wait for each other in vain, each
            candidate takes as long as their process group waits.
    """
    (verdict,) = judge([recipe])
    symptom = verdict.symptom()
    end = time.monotonic() + limit_s
    while True:
        candidates = list(dict.fromkeys(smaller(recipe)))
        for start in range(0, len(candidates), at_once):
            if time.monotonic() > end:
                return recipe, verdict
            some = candidates[start : start + at_once]
            kept = next(((r, v) for r, v in zip(some, judge(some), strict=True) if v.symptom() == symptom), None)
            if kept is not None:
                recipe, verdict = kept
                break
        else:
            return recipe, verdict
