"""The table of features that exclude each other, and the error for them.

A feature is something that a user switches on. Properties of parameters (sparse, DTensor, dtype) are not features: an
algorithm's traits and `CommAlgorithm.objection` say which parameters it takes. docs/feature_compatibility.md is
generated from this table, and tests/features/test_feature_pairs.py tries every pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from ddp_compile.errors import ReplicationError, shorten_names, this_rank
from ddp_compile.features.optimizer_in_backward import with_steps
from ddp_compile.runtime.algorithms.all_reduce import AllReduce
from ddp_compile.runtime.algorithms.comm_hook import CommHook
from ddp_compile.runtime.buckets.comm_algorithm import CommAlgorithm

if TYPE_CHECKING:
    from ddp_compile.module.replicate_state import ReplicateState


class Feature(Enum):
    """A feature. Its value is its name in the docs."""

    SPLIT = '`split=` other than `"auto"`'
    REGIONS = "`regions=`"
    MODE = "`mode=`"
    OPTIONS = "`options=`"
    PROCESS_GROUP = "`process_group=`"
    DEVICE_MESH = "`device_mesh=`"
    BUFFERS = "`broadcast_buffers=True`, if the module has buffers"
    COPIED_GRADIENTS = "`gradient_as_bucket_view=False`"
    LAZY_BUCKETS = "`lazy_bucket_allocation=True`"
    FIND_UNUSED = "`find_unused_parameters=True`"
    SKIP_UNUSED = "`skip_all_reduce_unused_params=True`"
    STATIC_GRAPH = "`static_graph=True`"
    DELAYED = "`delay_all_reduce_named_params=`"
    ALGORITHM = "`algorithm=` other than `GradientAllReduce()`"
    AVERAGES = "an algorithm that averages parameters"
    ASYNC = "`AsyncModelAverage()`, or an algorithm with `Traits(in_step=False)`"
    NO_SHADOWS = "an algorithm with `Traits(takes_shadows=False)`"
    BEYOND_GROUP = "`integrations.torchft.ManagedAllReduce()`, or an algorithm with `Traits(beyond_group=True)`"
    KEEPS_STATE = "an algorithm with a `state_dict()`"
    COMM_HOOK = "`register_comm_hook()`"
    BUFFER_HOOK = "`_register_buffer_comm_hook()`"
    SHARDED_OPTIMIZER = "`shard_optimizer()`"
    STEPS_IN_BACKWARD = "optimizer steps inside `backward()`"
    DELAYED_STEPS = "optimizer steps inside `backward()` over delayed parameters"
    MANUAL_FINALIZATION = "`require_manual_backward_finalization`"
    NO_SYNC = "`no_sync()`"
    NORMALIZE = "`normalize_by()`"
    JOIN = "`join()`"
    ACCELERATE = "`integrations.accelerate.use()`"
    LIGHTNING = "`integrations.lightning.DDPCompileStrategy()`"


class Exclusion(NamedTuple):
    """A feature, others that it excludes for one reason, the reason, and the way out."""

    feature: Feature
    others: tuple[Feature, ...]
    reason: str
    way_out: str


# fmt: off
EXCLUSIONS = (
    Exclusion(
        Feature.SPLIT, (Feature.REGIONS,),
        "all regions of a class share the code compiled for one of them, so it is never cut, and buckets are launched"
        " after the backward of each region",
        "Drop split, or regions"),
    Exclusion(
        Feature.MODE, (Feature.OPTIONS,),
        "a mode is a set of options",
        "Pass one of them"),
    Exclusion(
        Feature.PROCESS_GROUP, (Feature.DEVICE_MESH,),
        "each names the ranks to average over",
        "Pass one of them"),
    Exclusion(
        Feature.ASYNC, (Feature.FIND_UNUSED, Feature.STATIC_GRAPH, Feature.SKIP_UNUSED, Feature.DELAYED,
                        Feature.BUFFERS),
        "with such an algorithm no rank waits for another in a step, but this would make them wait",
        "Leave it out, or pass another algorithm"),
    Exclusion(
        Feature.BEYOND_GROUP, (Feature.FIND_UNUSED, Feature.STATIC_GRAPH, Feature.SKIP_UNUSED, Feature.DELAYED,
                               Feature.JOIN),
        "with such an algorithm gradients are also reduced with ranks outside of the process group, but this is decided"
        " or reduced inside of it",
        "Leave it out"),
    Exclusion(
        Feature.BEYOND_GROUP, (Feature.STEPS_IN_BACKWARD, Feature.ACCELERATE, Feature.LIGHTNING),
        "with such an algorithm a training loop learns after the backward whether the reduction has succeeded, and may"
        " step only then",
        "Write the training loop yourself, and step after the backward"),
    Exclusion(
        Feature.NORMALIZE, (Feature.AVERAGES, Feature.BEYOND_GROUP),
        "gradients are divided by a count when they are added up over the ranks of the process group, but here they"
        " are not, or not over these ranks alone",
        "Divide the loss by this rank's own count, or pass another algorithm"),
    Exclusion(
        Feature.COMM_HOOK, (Feature.ALGORITHM, Feature.COMM_HOOK),
        "a hook can only replace the default all-reduce",
        "Keep one of the two; to change it, replicate the module again: ddp_compile(model.unwrap(), ...)"),
    Exclusion(
        Feature.SHARDED_OPTIMIZER, (Feature.ALGORITHM, Feature.COMM_HOOK, Feature.DELAYED,
                                    Feature.STEPS_IN_BACKWARD),
        "a sharded optimizer itself reduces all gradients to shards, and must be the first to step",
        "Leave out one or the other"),
    Exclusion(
        Feature.SHARDED_OPTIMIZER, (Feature.SHARDED_OPTIMIZER,),
        "the first call shards all parameters of a model",
        "Pass all optimizers to one call, shard_optimizer([first, second], model)"),
    Exclusion(
        Feature.DELAYED, (Feature.DELAYED_STEPS,),
        "such a step would take this rank's own gradients, before they are averaged",
        "Step them after the backward, or do not delay them"),
    Exclusion(
        Feature.JOIN, (Feature.AVERAGES, Feature.NO_SHADOWS, Feature.SHARDED_OPTIMIZER),
        "a rank that has no input left contributes zeros as gradients, but has no parameters or shards to contribute",
        "Give every rank the same number of batches, or train with GradientAllReduce() and an optimizer that is not"
        " sharded"),
    Exclusion(
        Feature.JOIN, (Feature.DELAYED,),
        "a rank that has no input left cannot know when those gradients come",
        "Give every rank the same number of batches, or drop delay_all_reduce_named_params"),
    Exclusion(
        Feature.JOIN, (Feature.JOIN,),
        "a rank that has no input left could shadow only one of the two",
        "Write one torch.distributed.algorithms.Join([first, second]) around both"),
    Exclusion(
        Feature.ACCELERATE, (Feature.AVERAGES, Feature.KEEPS_STATE),
        "each rank has its own parameters or states, but a checkpoint of Accelerate or Trainer holds those of one"
        " rank",
        "Drop algorithm=, or call ddp_compile(model, algorithm=...) in your own training loop"),
    Exclusion(
        Feature.LIGHTNING, (Feature.SHARDED_OPTIMIZER,),
        "Lightning clips, logs and saves whole gradients and states",
        "Leave shard_optimizer out"),
)
# fmt: on


def in_force(state: ReplicateState, algorithm: CommAlgorithm) -> dict[Feature, str]:
    """The features that a replicated module has, or is to have with this algorithm, each as an error names it."""
    config, delayed = state.config, list(state.config.delayed.named)
    flags = {
        Feature.FIND_UNUSED: "find_unused_parameters",
        Feature.SKIP_UNUSED: "skip_all_reduce_unused_params",
        Feature.STATIC_GRAPH: "static_graph",
    }
    found = {feature: f"{name}=True" for feature, name in flags.items() if getattr(config, name)}
    if state.buffers.synchronized():
        found[Feature.BUFFERS] = "broadcast_buffers=True"
    if delayed:
        found[Feature.DELAYED] = f"delay_all_reduce_named_params ({shorten_names(delayed)})"
    if state.optimizers.are_registered:
        found[Feature.STEPS_IN_BACKWARD] = "optimizer steps inside backward()"
    if stepped := with_steps(config.delayed.named):
        found[Feature.DELAYED_STEPS] = f"_apply_optimizer_in_backward of {shorten_names(stepped)}"
    if state.normalizes:
        found[Feature.NORMALIZE] = "normalize_by()"
    if state.uneven_inputs.config.enable:
        found[Feature.JOIN] = "join()"
    return found | _features_of(algorithm, state.process_group.size())


def _features_of(algorithm: CommAlgorithm, num_ranks: int) -> dict[Feature, str]:
    said, traits = f"the {algorithm.name}", algorithm.traits
    if isinstance(algorithm, AllReduce):
        return {}
    if isinstance(algorithm, CommHook):
        return {Feature.COMM_HOOK: said}
    if algorithm.sharding.gathers_parameters:
        return {Feature.SHARDED_OPTIMIZER: said}
    is_so = {
        Feature.ALGORITHM: True,
        Feature.AVERAGES: traits.payload != "gradients",
        Feature.ASYNC: not traits.in_step and num_ranks > 1,
        Feature.NO_SHADOWS: not traits.takes_shadows,
        Feature.BEYOND_GROUP: traits.beyond_group,
    }
    return {feature: said for feature, holds in is_so.items() if holds}


def refuse_if_excluded(feature: Feature, said: str, present: Mapping[Feature, str]) -> None:
    """Raise a ReplicationError if one of the ``present`` features excludes this one, which the user ``said`` so."""
    for exclusion in EXCLUSIONS:
        if feature is exclusion.feature:
            _refuse(exclusion, said, [present[other] for other in exclusion.others if other in present])
        elif feature in exclusion.others and exclusion.feature in present:
            _refuse(exclusion, said, [present[exclusion.feature]])


def refuse_pairs(features: Mapping[Feature, str]) -> None:
    """Refuse present features that exclude each other, like `refuse_if_excluded`."""
    for exclusion in EXCLUSIONS:
        if exclusion.feature in features:
            others = [other for other in exclusion.others if other in features and other is not exclusion.feature]
            _refuse(exclusion, features[exclusion.feature], [features[other] for other in others])


def _refuse(exclusion: Exclusion, said: str, others: list[str]) -> None:
    if others:
        raise ReplicationError(
            f"{this_rank()}: {said} cannot be used with {' and '.join(dict.fromkeys(others))}: {exclusion.reason}."
            f" {exclusion.way_out}"
        )
