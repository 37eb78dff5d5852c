"""What a step would take with other buckets, a sharded optimizer, or another algorithm.

Note [What the predictions leave out]
Codecs, casts and copies take no time, and communication does not slow down computation. So ByteGrad and bfloat16 are
predicted too fast where the computation has no capacity to spare. Memory is that of gradients and optimizer states,
with Adam's two states in the gradients' dtype, and what an algorithm adds at most by the table of docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ddp_compile.plan.costs import Collective, Computation, Costs, Link
from ddp_compile.plan.packing import pack
from ddp_compile.plan.planner import Capacities, LeastTime, Planner
from ddp_compile.plan.schedule import loads_of, predict
from ddp_compile.plan.spec import BucketPlan, GradientSpec, renumbered

_MIB = 2**20
#: Fixed capacities to compare, in MiB.
_CAPS_MIB = (1, 5, 100)
#: States of an optimizer, in multiples of the gradients' bytes.
_STATES = 2
#: The steps between two averages of LocalSGD.
_PERIOD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A predicted way to train.

    Args:
        name: What is trained with.
        code: The line that switches it on.
        is_exact: Whether the gradients are those of an all-reduce in their own dtype.
        step_s: Length of a step.
        exposed_s: Part of it in which the computation waits for communication.
        memory_bytes: Of gradients, optimizer states and what the algorithm adds, on one rank.
        efficiency: Length of a step on one rank alone, divided by that of this step.
        plan: The optimal plan; None if the buckets are those of capacities.
    """

    name: str
    code: str
    is_exact: bool
    step_s: float
    exposed_s: float
    memory_bytes: float
    efficiency: float
    plan: BucketPlan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is trained.

    Args:
        gradients: By index.
        computation: Of one step.
        default_caps_bytes: Capacities if nothing is set.
        collective: A measured all-reduce; None to take that of the link.
        largest_bytes: See `LeastTime`.
    """

    gradients: Sequence[GradientSpec]
    computation: Computation
    default_caps_bytes: tuple[int, ...]
    collective: Collective | None = None
    largest_bytes: int | None = None

    @property
    def num_bytes(self) -> int:
        return sum(gradient.num_bytes for gradient in self.gradients)

    @property
    def alone_s(self) -> float:
        """A step on one rank alone."""
        backward_s = max(self.computation.ready_s)
        return backward_s + self.computation.forward_s + self.computation.step_s_per_byte * self.num_bytes

    def plan(self, planner: Planner) -> BucketPlan:
        """A plan of the gradients in the order in which they become ready."""
        order = sorted(self.gradients, key=lambda each: (self.computation.ready_s[each.index], -each.index))
        return BucketPlan(renumbered(pack(order, planner, "padded", frame=0)))


def predictions(model: Model, link: Link) -> Iterator[Prediction]:
    """All ways to train, the default first."""
    reduce = model.collective or link.all_reduce()
    costs = model.computation.with_transfers(reduce)
    default = Capacities(model.default_caps_bytes)
    replicated = (1 + _STATES) * model.num_bytes
    yield _bucketed(model, costs, default, "default buckets", "ddp_compile(model)", replicated)
    for mib in _CAPS_MIB:
        code = f"ddp_compile(model, bucket_cap_mb={mib})"
        caps = Capacities((min(_MIB, mib * _MIB), mib * _MIB))
        yield _bucketed(model, costs, caps, f"buckets of {mib} MiB", code, replicated)
    code = 'ddp_compile(model, bucket_plan="FILE")'
    yield _bucketed(model, costs, LeastTime(costs, model.largest_bytes), "optimal boundaries", code, replicated)
    yield from _sharded(model, link, default)
    dtypes = {gradient.dtype for gradient in model.gradients}
    if dtypes == {"float32"}:
        yield from _compressed(model, reduce, default, replicated)
    yield from _averaging(model, link, reduce, replicated)


def _bucketed(model: Model, costs: Costs, planner: Planner, name: str, code: str, memory_bytes: float) -> Prediction:
    plan = model.plan(planner)
    schedule = predict(loads_of(plan, costs), costs)
    return Prediction(
        name=name,
        code=code,
        is_exact=True,
        step_s=schedule.step_s,
        exposed_s=schedule.exposed_s,
        memory_bytes=memory_bytes,
        efficiency=model.alone_s / schedule.step_s,
        plan=plan if isinstance(planner, LeastTime) else None,
    )


def _sharded(model: Model, link: Link, default: Planner) -> Iterator[Prediction]:
    shards = link.shards()
    if model.collective is not None:  # half of an all-reduce
        shards = Collective(latency_s=model.collective.latency_s / 2, s_per_byte=model.collective.s_per_byte / 2)
    costs = model.computation.with_transfers(shards, shards, link.world_size)
    memory_bytes = (1 + _STATES / link.world_size) * model.num_bytes
    code = "shard_optimizer(optimizer, model)"
    yield _bucketed(model, costs, default, "sharded optimizer", code, memory_bytes)
    code = f'ddp_compile(model, bucket_plan="FILE"); {code}'
    name = "sharded optimizer, optimal boundaries"
    yield _bucketed(model, costs, LeastTime(costs, model.largest_bytes), name, code, memory_bytes)


def _compressed(model: Model, reduce: Collective, default: Planner, replicated: float) -> Iterator[Prediction]:
    """Fewer bytes for each gradient. ByteGrad takes two collectives a bucket, each with the latency of half a one."""
    for name, code, wire, more in (
        ("bfloat16 wire", "GradientAllReduce(wire_dtype=torch.bfloat16)", 0.5, 0.46),
        ("ByteGrad", "ByteGrad()", 0.25, 0.56),
    ):
        costs = model.computation.with_transfers(
            Collective(latency_s=reduce.latency_s, s_per_byte=reduce.s_per_byte * wire)
        )
        memory_bytes = replicated + more * model.num_bytes
        found = _bucketed(model, costs, default, name, f"ddp_compile(model, algorithm={code})", memory_bytes)
        yield replace(found, is_exact=False)


def _averaging(model: Model, link: Link, reduce: Collective, replicated: float) -> Iterator[Prediction]:
    """Averages of parameters instead of gradients."""
    num_buckets = len(model.plan(Capacities(model.default_caps_bytes)).buckets)
    computed_s, hides_s = model.alone_s, max(model.computation.ready_s) + model.computation.forward_s
    # The ranks of a node share its link, and each sends its parameters to a rank of another node.
    sent_s = num_buckets * link.latency_s + model.num_bytes * link.ranks_per_node / link.bytes_per_second
    averaged_s = num_buckets * reduce.latency_s + model.num_bytes * reduce.s_per_byte
    ring = ("ring (Decentralized)", 'Decentralized(peer_selection="shift_one")', max(0.0, sent_s - hides_s), 2.0)
    local = (f"LocalSGD, every {_PERIOD} steps", f"LocalSGD(period={_PERIOD})", averaged_s / _PERIOD, 0.87)
    # A measured all-reduce does not tell what a message between two ranks takes.
    for name, code, exposed_s, more in (ring, local) if model.collective is None else (local,):
        yield Prediction(
            name=name,
            code=f"ddp_compile(model, algorithm={code})",
            is_exact=False,
            step_s=computed_s + exposed_s,
            exposed_s=exposed_s,
            memory_bytes=replicated + more * model.num_bytes,
            efficiency=computed_s / (computed_s + exposed_s),
        )
