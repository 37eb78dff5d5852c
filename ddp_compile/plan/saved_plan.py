"""Loads a saved plan, and checks that it fits the model."""

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ddp_compile.errors import number_of
from ddp_compile.plan.spec import BucketPlan, GradientSpec

#: Differences that an error shows.
_SHOWN = 5


class SavedPlan(NamedTuple):
    """The plan of ``bucket_plan=``, or why it cannot be used."""

    plan: BucketPlan | None
    error: str  #: why the model cannot use the file; empty if it can, or if there is none

    def describe(self) -> str:
        """A text that ranks compare: equal plans give equal texts."""
        return self.error or ("none" if self.plan is None else self.plan.digest)


def load_for(path: str | os.PathLike[str] | None, gradients: Sequence[GradientSpec]) -> SavedPlan:
    """Load the plan of a file, and check that it is for these gradients."""
    if path is None:
        return SavedPlan(None, "")
    try:
        plan = BucketPlan.load(path)
    except ValueError as error:
        return SavedPlan(None, str(error))
    setting, difference = f"bucket_plan={os.fspath(path)!r}", difference_between(plan, gradients)
    if difference is not None:
        said = f"{setting} is the plan of another model: {difference}. Pass a plan that was saved with this model, or"
        return SavedPlan(None, f"{said} leave bucket_plan out")
    theirs = _reduce_dtype(gradient for bucket in plan.buckets for gradient in bucket.gradients)
    ours = _reduce_dtype(gradients)
    if theirs != ours:
        said = f"{setting} was saved with reduce_dtype={theirs}, and this model has reduce_dtype={ours}; pass"
        return SavedPlan(None, f"{said} reduce_dtype={theirs}, or leave bucket_plan out")
    return SavedPlan(plan, "")


def difference_between(plan: BucketPlan, gradients: Sequence[GradientSpec]) -> str | None:
    """How a plan's model differs from the model with these gradients; None if it does not.

    Owners may differ, since they are chosen after the plan has been loaded. So may ``reduce_dtype``.
    """
    theirs = {gradient.fqn: gradient for bucket in plan.buckets for gradient in bucket.gradients}
    ours = {gradient.fqn: gradient for gradient in gradients}
    found = [
        f"{name}: {_described(theirs.get(name))} in the plan, {_described(ours.get(name))} in the model"
        for name in dict.fromkeys([*ours, *theirs])
        if _described(theirs.get(name)) != _described(ours.get(name))
    ]
    if not found:
        moved = next((name for name in ours if theirs[name].index != ours[name].index), None)
        if moved is None:
            return None
        found = [f"{moved} is parameter {theirs[moved].index} in the plan and {ours[moved].index} in the model"]
    more = f"; and {number_of(len(found) - _SHOWN, 'more difference')}" if len(found) > _SHOWN else ""
    return "; ".join(found[:_SHOWN]) + more


def _described(gradient: GradientSpec | None) -> str:
    if gradient is None:
        return "missing"
    dtype, sparse = gradient.param_dtype or gradient.dtype, ", sparse" if gradient.is_sparse else ""
    return f"{dtype}, {number_of(gradient.numel, 'element')}, on {gradient.device}{sparse}"


def _reduce_dtype(gradients: Iterable[GradientSpec]) -> str:
    """What ``reduce_dtype`` was for these gradients, as code; "None" if it changed none of them."""
    return next((f"torch.{gradient.dtype}" for gradient in gradients if gradient.param_dtype is not None), "None")
