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

    After ``limit_s`` it returns the smallest so far, since a candidate whose ranks wait for each other in vain takes a
    timeout.
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
