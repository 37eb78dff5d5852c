"""What a step would take with other buckets, or with a sharded optimizer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddp_compile.plan.costs import Costs
from ddp_compile.plan.optimum import fastest_plan
from ddp_compile.plan.packing import plan_buckets
from ddp_compile.plan.schedule import predict
from ddp_compile.plan.spec import BucketPlan, GradientSpec

#: Fixed capacities to compare, in MiB.
_CAPS_MIB = (1, 5, 25, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A predicted way to train."""

    name: str  #: what is trained with
    code: str  #: the line that switches it on; "FILE" stands for a saved plan
    step_s: float  #: length of a step
    exposed_s: float  #: part of it in which the computation waits for communication
    is_sharded: bool  #: whether it is with a sharded optimizer
    plan: BucketPlan | None = None  #: the plan to save; None if the capacities say it all


def scenarios(
    gradients: Sequence[GradientSpec], costs: Costs, world_size: int, default_caps_bytes: Sequence[int]
) -> Iterator[Scenario]:
    """Every way to train that has been compared with measured steps, the default first.

    ``costs`` have an all-reduce for each bucket; ``default_caps_bytes`` are the capacities if nothing is set.
    """

    def scenario(name: str, code: str, plan: BucketPlan, costs: Costs, is_saved: bool = False) -> Scenario:
        step_s, exposed_s = predict(plan, costs)
        is_sharded, kept = costs.gather is not None, plan if is_saved else None
        return Scenario(name=name, code=code, step_s=step_s, exposed_s=exposed_s, is_sharded=is_sharded, plan=kept)

    order = sorted(gradients, key=lambda each: (costs.ready_s[each.index], -each.index))
    default = plan_buckets(order, default_caps_bytes)
    yield scenario("default buckets", "ddp_compile(model)", default, costs)
    for mib in _CAPS_MIB:
        plan = plan_buckets(order, [2**20, mib * 2**20])
        yield scenario(f"buckets of {mib} MiB", f"ddp_compile(model, bucket_cap_mb={mib})", plan, costs)
    code = 'ddp_compile(model, bucket_plan="FILE")'
    yield scenario("best boundaries", code, fastest_plan(order, costs), costs, is_saved=True)
    costs = costs.sharded(world_size)
    sharded = "shard_optimizer(optimizer, model)"
    yield scenario("sharded optimizer", sharded, default, costs)
    name = "sharded optimizer, best buckets"
    yield scenario(name, f"{code}; {sharded}", fastest_plan(order, costs), costs, is_saved=True)


def alone_s(gradients: Sequence[GradientSpec], costs: Costs) -> float:
    """A step on one rank alone."""
    stepped_s = costs.step_s_per_byte * sum(gradient.num_bytes for gradient in gradients)
    return max(costs.ready_s) + costs.forward_s + stepped_s
