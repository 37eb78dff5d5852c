"""Making failing recipes smaller."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fuzz.recipe import Recipe, smaller
from fuzz.verdict import FAILED, Verdict

Judge = Callable[[Sequence[Recipe]], list[Verdict]]


def shrink(recipe: Recipe, judge: Judge, outcome: str = FAILED, at_once: int = 8) -> tuple[Recipe, Verdict]:
    """The smallest recipe that still comes to ``outcome``, found by leaving one thing out at a time, greedily.

    Args:
        recipe: A recipe that comes to ``outcome``.
        judge: Verdicts of several recipes.
        outcome: What has to stay.
        at_once: How many candidates are judged in one call.
    """
    (verdict,) = judge([recipe])
    while True:
        candidates = list(dict.fromkeys(smaller(recipe)))
        for start in range(0, len(candidates), at_once):
            some = candidates[start : start + at_once]
            kept = next(((r, v) for r, v in zip(some, judge(some), strict=True) if v.outcome == outcome), None)
            if kept is not None:
                recipe, verdict = kept
                break
        else:
            return recipe, verdict
