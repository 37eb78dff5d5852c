"""The bucket boundaries that end a step as early as possible.

Note [Optimal boundaries]
Gradients keep the order in which they become ready, so a plan is a set of boundaries. Note [The model of a step] says
when a step ends. If each bucket has one transfer, the best boundaries are found exactly. Let S(i) be the bytes of the
first i gradients, R(i) the time at which all of them are ready, and F(c, i) the earliest end of c transfers that carry
them. With a last bucket of gradients j + 1 to i,

    F(c, i) = min over j of  max(H(c - 1, j), R(i) + c launch_s) + latency + s_per_byte (S(i) - S(j)),

where H(c, j) is the least of F(1, j) to F(c, j). H takes a schedule of fewer launches for one of c. That delays it
without need, but it also counts itself under its own number.

Only two j matter. H grows with j, since a schedule without its last gradients is one of a shorter prefix. Among the j
with H(c - 1, j) <= R(i) + c launch_s, the largest is best, since it leaves the least to send. For all others, the term
is H(c - 1, j) - s_per_byte S(j), and a constant. That grows with j too, since each gradient takes at least its bytes to
send. So the smallest of these j is best. Each c thus takes a few operations on arrays. If a c improves no F(c, i), no
larger one does, since its launches are later.

A sharded optimizer has two transfers a bucket, a reduce-scatter and an all-gather. For it, `fastest_plan` compares
capacities.
"""

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ddp_compile.plan.costs import Costs
from ddp_compile.plan.packing import by_kind, kind_of, pack
from ddp_compile.plan.schedule import predict
from ddp_compile.plan.spec import BucketPlan, BucketSpec, GradientSpec, renumbered

#: Capacities to compare: from all gradients in one bucket down to a 1024th of their bytes, by factors of sqrt(2).
_NUM_CAPS = 21
#: With more changes of the kind, a bucket for each of them is too small to be part of a good plan.
_MOST_CHANGES = 48


def fastest_plan(gradients: Iterable[GradientSpec], costs: Costs) -> BucketPlan:
    """The plan with the shortest predicted step: of many capacities, and with one transfer a bucket the optimum.

    With gradients of several dtypes or devices it need not be the optimum. Two plans are tried besides the capacities:
    one whose boundaries are optimal for each kind alone, and one with a boundary wherever the kind changes.
    """
    order = sorted(gradients, key=lambda each: (costs.ready_s[each.index], -each.index))
    total = sum(gradient.num_bytes for gradient in order)
    caps = [max(1, int(total / 2 ** (i / 2))) for i in range(_NUM_CAPS)]
    buckets_of_plans = [pack(order, [cap], "padded", frame=0) for cap in caps]
    if costs.gather is None:
        place = {gradient.index: i for i, gradient in enumerate(order)}
        is_mixed = len(_changes(order)) > _MOST_CHANGES
        for parts in [by_kind(order)] if is_mixed else [[order], by_kind(order)]:
            cut = [bucket for part in parts for bucket in _cut(part, costs)]
            buckets_of_plans.append(sorted(cut, key=lambda bucket: place[bucket.gradients[-1].index]))
    plans = [BucketPlan(renumbered(buckets)) for buckets in buckets_of_plans]
    return min(plans, key=lambda plan: predict(plan, costs).step_s)


def _cut(gradients: Sequence[GradientSpec], costs: Costs) -> list[BucketSpec]:
    """The optimal buckets of gradients that are alone, with a boundary wherever the kind changes."""
    buckets = []
    for begin, end in itertools.pairwise([0, *optimal_ends(gradients, costs, _changes(gradients))]):
        bucket = BucketSpec(0, tuple(gradients[begin:end]), 1, frame=0)
        buckets.append(replace(bucket, cap_bytes=max(1, bucket.num_bytes)))
    return buckets


def _changes(gradients: Sequence[GradientSpec]) -> list[int]:
    """Numbers of the gradients that are of another kind than the one before."""
    pairs = itertools.pairwise(map(kind_of, gradients))
    return [i for i, (before, kind) in enumerate(pairs, start=1) if before != kind]


def optimal_ends(gradients: Sequence[GradientSpec], costs: Costs, opens: Collection[int] = ()) -> list[int]:
    """For each bucket, the number of gradients up to its end, so that the step ends as early as possible.

    See Note [Optimal boundaries]. The gradients are in launch order, and ``costs`` are with one transfer a bucket.
    Gradients whose numbers are in ``opens`` must not share a bucket with the one before.
    """
    assert costs.gather is None
    count, sizes = len(gradients), [BucketSpec(0, (gradient,), 1).num_bytes for gradient in gradients]
    ready = itertools.accumulate((costs.ready_s[gradient.index] for gradient in gradients), max)
    sent = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.float64)
    ready_s = torch.tensor([0.0, *ready], dtype=torch.float64)
    # The least j so that gradients j + 1 to i may share a bucket.
    begins = set(opens)
    first = torch.tensor([0, *itertools.accumulate((i if i in begins else 0 for i in range(count)), max)])
    sending_s, last = costs.reduce.s_per_byte * sent, torch.arange(-1, count)
    held_s = torch.full_like(sent, torch.inf)  # H
    held_s[0] = 0.0
    chosen_of: list[tuple[int, Tensor]] = []  # for each c, the first i that it improves, and the j of each i from there
    begin = 1
    for number in itertools.count(1):
        if begin > count:
            break
        launched_s = ready_s[begin:] + number * costs.launch_s
        busy = torch.searchsorted(held_s, launched_s, right=True)
        choices = [torch.maximum(first[begin:], torch.minimum(last[begin:], j)) for j in (busy - 1, busy)]
        begins_s = [torch.maximum(held_s[j], launched_s) - sending_s[j] for j in choices]
        end_s = torch.minimum(*begins_s) + costs.reduce.latency_s + sending_s[begin:]
        is_better = end_s < held_s[begin:]
        if not is_better.any():
            break
        chosen = torch.where(begins_s[1] < begins_s[0], choices[1], choices[0])
        chosen_of.append((begin, torch.where(is_better, chosen, -1)))
        held_s[begin:] = torch.where(is_better, end_s, held_s[begin:])
        # With one more launch, only schedules that extend one improved just now can end earlier: others launch later.
        begin += int(is_better.nonzero()[0, 0]) + 1
    ends, end = [], count
    for begin, chosen in reversed(chosen_of):
        if end >= begin and (j := int(chosen[end - begin])) >= 0:
            ends.append(end)
            end = j
    return ends[::-1]
