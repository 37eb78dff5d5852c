"""Texts of the runtime's errors: what happened, on which rank, to which parameters, and what to do about it."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from ddp_compile.errors import (
    GradientArrivalError,
    MissingGradientError,
    ParametersChangedError,
    RanksDifferError,
    ReductionError,
    ReplicationError,
    name_values,
    this_rank,
)

# Collectives that fail.


def look_elsewhere(where: str, error: Exception) -> str:
    """What may have gone wrong on another rank."""
    return (
        f"Another rank has raised, exited, or not reached {where} within the process group's timeout; look for its"
        f" error. ({error})"
    )


def reduction_failed(what: str, error: RuntimeError) -> ReductionError:
    """The reduction of a bucket, or of the message at the end of an iteration, failed."""
    return ReductionError(f"{this_rank()}: the all-reduce of {what} failed. {look_elsewhere('its backward', error)}")


def exchange_failed(name: str, error: Exception) -> ReductionError:
    """Something other than a reduction of gradients failed."""
    return ReductionError(f"{this_rank()}: the {name} failed. {look_elsewhere('the same step', error)}")


def nothing_to_wait_for(name: str, bucket: str, returned: object) -> TypeError:
    """``launch`` of a user's algorithm returned no `Pending`."""
    return TypeError(
        f"{this_rank()}: launch() of the {name} returned {returned!r} for {bucket}; return an object with wait() and"
        " result(), such as the work of a collective with async_op=True"
    )


# Ranks that differ.


def algorithms_differ(described: str) -> RanksDifferError:
    return RanksDifferError(
        f"{this_rank()}: the ranks reduce in different ways: {described}. Pass the same algorithm on every rank, and"
        " call register_comm_hook with the same hook on every rank, between the same two steps"
    )


def counts_differ(described: str) -> RanksDifferError:
    return RanksDifferError(
        f"{this_rank()}: the ranks do not divide by the same counts. In this step model.normalize_by() was"
        f" {described}. Call it on every rank before the backward of every micro-batch of a step, with 0"
        " where there is nothing to count, or in no micro-batch of any rank"
    )


def warm_ups_differ(described: str, timeout_s: float) -> RanksDifferError:
    return RanksDifferError(
        f"{this_rank()}: model.warm_up(timeout_s={timeout_s:g}) did not end on every rank: {described}. Call it on"
        " every rank between the same two steps; a rank that raised has the cause, and one that is late may need more"
        " time"
    )


def measurements_differ(described: str) -> RanksDifferError:
    return RanksDifferError(
        f"{this_rank()}: not every rank measures: {described}. Call model.measure() with the same arguments on every"
        " rank, between the same two steps, and stop() too; the report is the same on every rank, so let one print it"
    )


def measured_models_differ(models: Mapping[int, str]) -> RanksDifferError:
    return RanksDifferError(
        f"{this_rank()}: the ranks are in the exchange of different models' records: {name_values(models)}. End the"
        " steps of the models, or call stop(), in the same order on every rank; their gradients are as they should be"
    )


def ranks_out_of_step(iteration_number: int, difference: str) -> RanksDifferError:
    return RanksDifferError(
        f"{this_rank()}: at the end of iteration {iteration_number} the ranks are out of step. {difference}. Gradients"
        " of different steps may have been averaged since the previous agreement point: start again from a checkpoint"
    )


def out_of_step() -> ReductionError:
    return ReductionError(
        f"{this_rank()}: the last backward raised after its reduction had started, so the ranks may be out of step, and"
        " continuing could average gradients of different steps. Start again from a checkpoint; or, if every rank has"
        " caught the error, continue on every rank in a new group: model = ddp_compile(model.unwrap(),"
        " process_group=torch.distributed.new_group(), ...)"
    )


# Gradients that do not come.


def missing_gradients(missing: Mapping[str, Tensor], num_parameters: int, static_graph: bool) -> MissingGradientError:
    frozen = [name for name, parameter in missing.items() if not parameter.requires_grad]
    why = (
        f" Of these, {len(frozen)} were frozen after ddp_compile: {', '.join(frozen)}. Freeze them before it, or"
        " replicate the module again: model = ddp_compile(model.unwrap(), ...)."
        if frozen
        else ""
    )
    advice = (
        "With static_graph=True, a parameter that gets a gradient in the first iteration must get one in every"
        " iteration: drop static_graph, or pass find_unused_parameters=True instead"
        if static_graph
        else "Pass find_unused_parameters=True; or use every parameter in the loss, freeze unused ones with"
        " requires_grad_(False) before ddp_compile, or name them in parameters_to_ignore"
    )
    return MissingGradientError(
        f"{this_rank()}: {len(missing)} of {num_parameters} parameters got no gradient in the last backward:"
        f" {', '.join(missing)}. Their buckets were never launched, and .grad is not averaged.{why} {advice}"
    )


def left_out(bucket: str) -> MissingGradientError:
    return MissingGradientError(
        f"{this_rank()}: there was no forward before this backward, and it leaves out gradients of {bucket}. Ranks"
        " outside of the process group cannot know that, and wait for the bucket. Call the module before each backward"
    )


def parameters_changed(changes: Sequence[str]) -> ParametersChangedError:
    """Args: changes: Such as "added: adapter.weight"."""
    return ParametersChangedError(
        f"{this_rank()}: the parameters are not those that ddp_compile has replicated, and their gradients would not be"
        f" averaged: {'; '.join(changes)}. Make such changes before ddp_compile, or replicate the module again after"
        " them: model = ddp_compile(model.unwrap(), ...)"
    )


# Gradients that come at the wrong time, or are not what they should be.


def arrived_twice(name: str) -> GradientArrivalError:
    return GradientArrivalError(
        f"{this_rank()}: the gradient of {name} arrived twice before all others had arrived. Either a reentrant"
        " checkpoint runs over shared weights: use use_reentrant=False, or static_graph=True; or one of several"
        " backwards does not reach every parameter: add up the losses, or put all backwards but the last into"
        " no_sync()"
    )


def arrived_unused(name: str, static_graph: bool) -> GradientArrivalError:
    reason = (
        "it got none in the first iteration, and static_graph=True promises that this does not change; drop"
        " static_graph"
        if static_graph
        else "no path led to it from the module's outputs, or its path had brought an undefined gradient before. It is"
        " used outside the module's forward, inside a reentrant checkpoint, or by several backwards: use it in the"
        " forward, pass use_reentrant=False, add up the losses, or drop find_unused_parameters"
    )
    return GradientArrivalError(
        f"{this_rank()}: {name} got a gradient after its bucket had been launched without one, because {reason}"
    )


def used_after_all(names: Sequence[str]) -> GradientArrivalError:
    """With ``skip_all_reduce_unused_params``, a parameter was used that no rank had used in the first iteration."""
    return GradientArrivalError(
        f"{this_rank()}: {', '.join(names)} got a gradient, on this rank or another one, but none in the first"
        " iteration. skip_all_reduce_unused_params=True promises that unused parameters stay unused, so their"
        " gradients have not been averaged. Every rank has raised this: set the gradients to zero, and replicate the"
        " module again without that setting: ddp_compile(model.unwrap(), ...)"
    )


def contributor_after_launch(names: Sequence[str], has_moved: bool) -> GradientArrivalError:
    """Gradients came after a compiled backward had handed over, or moved, buckets that cannot be launched again."""
    if has_moved:
        reason = "static_graph=True, which promises that all iterations are alike, frees their memory"
    else:
        reason = "some rank no longer holds its own gradients of them, for example because a hook has set .grad to None"
    return GradientArrivalError(
        f"{this_rank()}: {', '.join(names)} got another gradient, on this rank or another one, after the compiled"
        " backward had handed over the bucket, for example from a regularizer outside the model or a hook that returns"
        f" another gradient. The reduced gradients lack it, and the buckets cannot be launched again, because {reason}."
        " Every rank has raised this: set the gradients to zero and repeat the step, in which those buckets will wait"
        " for all gradients; or pass split='forward'"
    )


def gradient_with_graph(name: str) -> GradientArrivalError:
    return GradientArrivalError(
        f"{this_rank()}: the gradient of {name} requires a gradient itself, because of create_graph=True, but its mean"
        " over the ranks does not lead back to the ranks' gradients. Compute the gradients that the loss contains with"
        " torch.autograd.grad(..., create_graph=True), and call backward() on the loss without create_graph"
    )


# Calls at the wrong time.


def algorithm_in_backward(name: str) -> RuntimeError:
    return RuntimeError(
        f"{this_rank()}: the {name} cannot take over while a backward has not been completed; register a hook, or set"
        " an algorithm, before the first backward or between two steps"
    )


def not_finalized(what: str) -> ReductionError:
    """Args: what: What came before ``finalize_backward()``."""
    return ReductionError(
        f"{this_rank()}: {what} before finalize_backward(): with require_manual_backward_finalization = True the"
        " reductions of a backward are under way until model.finalize_backward() waits for them. Call it once after"
        " each backward that is reduced, before the gradients are used. If an optimizer has stepped since, it has used"
        " gradients that are not averaged: start again from a checkpoint"
    )


def half_in_no_sync(is_reduced: bool) -> str:
    """A warning: of a forward and its backward, only one was called inside ``no_sync``."""
    backward = "inside no_sync() is reduced" if is_reduced else "outside no_sync() is not reduced"
    forward = "outside" if is_reduced else "inside"
    return (
        f"{this_rank()}: a backward {backward}, since its forward was {forward}: the forward decides. Put forward and"
        " backward of a micro-batch both inside, or both outside"
    )


def manual_finalization_in_backward(required: bool) -> RuntimeError:
    return RuntimeError(
        f"{this_rank()}: require_manual_backward_finalization = {required} was set while a backward has not been"
        " completed; set it before a forward, or after finalize_backward()"
    )


def second_forward_in_join() -> ReplicationError:
    return ReplicationError(
        f"{this_rank()}: a second forward was called inside a Join before the backward of the first one: ranks that"
        " have no input left join one backward for each forward. Call backward after each forward. Put forwards"
        " without a backward into torch.no_grad(), and forwards whose gradients accumulate into model.no_sync()"
    )
