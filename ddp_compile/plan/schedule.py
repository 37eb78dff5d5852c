"""How long a step takes with the buckets of a plan.

Note [The model of a step]
A step is one period of the training loop, from the beginning of a backward to that of the next one.

1. The backward computes. The k-th launch delays everything after it by ``launch_s``, so the k-th bucket is launched at
   ``ready_s + k launch_s``.
2. Transfers run in launch order, one at a time: each begins when it is launched and the link is free. The backward
   returns when the last one is done.
3. The optimizer steps. A sharded one steps the buckets in reverse launch order, which is about the order in which the
   forward reads parameters, and launches the gather of each after its step, which takes ``launch_s`` again.
4. The forward computes. With gathers, each of which begins when it is launched and the link is free, it stops before a
   parameter whose gather is not done.

Computation and communication do not slow each other down, and all ranks are alike.
"""

from typing import NamedTuple

from ddp_compile.errors import number_of
from ddp_compile.plan.costs import Costs
from ddp_compile.plan.spec import BucketPlan


class Prediction(NamedTuple):
    """A predicted step."""

    step_s: float  #: its length
    exposed_s: float  #: the part of it in which the computation waits for communication


def predict(plan: BucketPlan, costs: Costs) -> Prediction:
    """The step with this plan (Note [The model of a step]); raises a ValueError if the costs are of another model."""
    if len(plan.bucket_of_parameter) != len(costs.ready_s):
        raise ValueError(
            f"the plan has {number_of(len(plan.bucket_of_parameter), 'parameter')}, and the costs are for"
            f" {len(costs.ready_s)}; pass the costs of the same model"
        )
    ready_s, reduced_s, launches_s = 0.0, 0.0, len(plan.buckets) * costs.launch_s
    for number, bucket in enumerate(plan.buckets, start=1):
        ready_s = max(ready_s, *(costs.ready_s[gradient.index] for gradient in bucket.gradients))
        reduced_s = max(reduced_s, ready_s + number * costs.launch_s) + costs.reduce.time_s(bucket.num_bytes)
    reduced_s = max(reduced_s, ready_s + launches_s)
    exposed_s = reduced_s - (ready_s + launches_s)
    stepped_s = reduced_s + costs.step_s_per_byte * plan.num_bytes
    if costs.gather is not None:
        stepped_s += launches_s
        gathered_s = launched_s = reduced_s
        late_s = 0.0  # of the forward, at its end
        for bucket in reversed(plan.buckets):
            launched_s += costs.step_s_per_byte * bucket.num_bytes + costs.launch_s
            gathered_s = max(gathered_s, launched_s) + costs.gather.time_s(bucket.num_bytes)
            needed_s = min(costs.needed_s[gradient.index] for gradient in bucket.gradients)
            late_s = max(late_s, gathered_s - stepped_s - needed_s)
        exposed_s += late_s
        stepped_s += late_s
    return Prediction(stepped_s + costs.forward_s, exposed_s)
