"""Whether a saved plan is one of a model: `difference_between`."""

from dataclasses import replace

from plans import gradients

from ddp_compile.plan.packing import plan_buckets
from ddp_compile.plan.saved_plan import difference_between


def test_a_plan_in_another_order_of_registration_is_refused() -> None:
    plan = plan_buckets(gradients(1, 2), 100)
    assert difference_between(plan, gradients(1, 2)) is None
    assert difference_between(plan, [replace(g, owner=1) for g in gradients(1, 2)]) is None
    first, second = gradients(1, 2)
    swapped = [replace(second, index=0), replace(first, index=1)]
    assert difference_between(plan, swapped) == "p1 is parameter 1 in the plan and 0 in the model"
