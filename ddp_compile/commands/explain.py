"""``python -m ddp_compile explain``: what ``model.explain()`` would say after some steps, without ranks or memory.

Note [Steps without values]
The module's parameters are fake tensors. One forward and one backward run inside ``no_sync``, so that nothing is
reduced: Dynamo, the passes and AOTAutograd work as in training, and hooks see in which order the gradients come. From
that follows what the reducer would do: it seals the plan in the first backward, repacks the eager tail at its end
(`BucketSet.rebuild_once`), and launches a bucket inside the compiled backward once it has seen that all its gradients
came from one place (Note [Launched before AccumulateGrad]).
"""

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ddp_compile import torch_internals
from ddp_compile.api import ddp_compile
from ddp_compile.commands.users_step import TracingError, UsersStep, raising_at, users_step
from ddp_compile.config import caps_from_mib, in_mib
from ddp_compile.module.explanation import TOO_EARLY, explain
from ddp_compile.module.mixin import state_of
from ddp_compile.module.replicate_state import ReplicateState
from ddp_compile.plan.spec import BucketPlan
from ddp_compile.report.explanation import Explanation
from ddp_compile.runtime.comm import error_messages
from ddp_compile.torch_internals import fake_training
from ddp_compile.validation.named_functions import load_function

log = logging.getLogger(__name__)


def run(arguments: argparse.Namespace) -> int:
    """Trace, print the explanation, write files. Returns the exit status: 2 for wrong input or code that raises."""
    try:
        if arguments.world_size < 1:
            raise ValueError(f"--world-size {arguments.world_size} must be at least 1; pass 2 or more")
        if arguments.html is not None:
            raise ValueError(f"--html {arguments.html} is no longer an argument; pass --json, or redirect the output")
        if arguments.json is not None and not arguments.json.parent.is_dir():
            raise ValueError(f"--json {arguments.json} cannot be written: no folder {arguments.json.parent}; create it")
        settings = {"split": arguments.split, "bucket_cap_mb": arguments.bucket_cap_mb}
        if arguments.device is not None and arguments.bucket_cap_mb is None:
            caps = caps_from_mib(None, 1.0, arguments.device, arguments.world_size)
            settings["bucket_cap_mb"] = [cap / 2**20 for cap in caps]
        explanation = explain_function(arguments.function, arguments.world_size, settings)
    except (ValueError, TracingError) as error:
        print(f"explain: {error}", file=sys.stderr)
        return 2
    print(explanation)
    if arguments.bucket_cap_mb is None:
        device = arguments.device or explanation.plan.buckets[0].gradients[0].device
        caps = caps_from_mib(None, 1.0, device, arguments.world_size)
        print(f"assumed capacities: {in_mib(caps)}, the default for {device}; --device and --bucket-cap-mb have others")
    if arguments.json is not None:
        arguments.json.write_text(explanation.to_json(), "utf-8")
    return 0


def explain_function(name: str, world_size: int, settings: Mapping[str, Any]) -> Explanation:
    """Trace a training step of the module that a user's function returns, and explain what ddp_compile would do.

    ``name`` is ``module:function``, see `RETURNS`; ``settings`` are arguments of ``ddp_compile``. Raises a ValueError
    if there is no such function, it returns something else, or settings are out of range. Raises a TracingError if the
    user's code raised, or cannot be traced.
    """
    if torch.distributed.is_initialized():
        raise ValueError("there is a process group already; call destroy_process_group() first, or use a new process")
    with raising_at(f"importing {name}", passes=ValueError):
        function = load_function("function", name, ())
    with fake_training.fake_process_group(world_size), fake_training.quiet_fake_mode() as fake_mode:
        with raising_at(f"{name}()"), fake_mode:
            returned = function()
        step = users_step(name, returned, fake_mode)
        with raising_at(f"ddp_compile() of the module of {name}", passes=ValueError):
            backend = fake_training.traced_only()
            # Parameters without values are not sent.
            module: Any = ddp_compile(step.module, backend=backend, init_sync=False, **settings)
        explanation = _explain_step(module, step, fake_mode)
        module.unwrap()
    ours = ("backend=", "init_sync=")
    return replace(explanation, settings=tuple(said for said in explanation.settings if not said.startswith(ours)))


def _explain_step(module: Any, step: UsersStep, fake_mode: Any) -> Explanation:
    """See Note [Steps without values]."""
    state = state_of(module)
    order: dict[int, None] = {}

    def note(index: int) -> None:
        order.pop(index, None)
        order[index] = None

    parameters = list(state.reduced.values())
    have_hooks = [torch_internals.has_gradient_hooks(parameter) for parameter in parameters]
    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: note(index))
    with module.no_sync(), fake_mode:
        no_inputs = "" if step.args or step.kwargs else " without inputs (to pass some, return (module, inputs))"
        with raising_at(f"the forward{no_inputs}"):
            outputs = module(*step.args, **step.kwargs)
        with raising_at("the loss"):
            loss = step.loss(outputs)
            counts = Counter(map(id, torch_internals.leaves_of([loss])))
        with raising_at("the backward"):
            loss.backward()
    unused = set(range(len(parameters))) - order.keys()
    if missing := {name: p for index, (name, p) in enumerate(state.reduced.items()) if index in unused}:
        log.warning("%s", error_messages.missing_gradients(missing, len(parameters), static_graph=False))
    plan = _sealed_plan(state, list(order))
    are_from_one_place = [counts[id(p)] == 1 and not have for p, have in zip(parameters, have_hooks, strict=True)]
    of_hooks = {
        bucket.index: TOO_EARLY
        for bucket in plan.buckets
        if not all(are_from_one_place[g.index] for g in bucket.gradients)
    }
    return explain(state, plan, of_hooks, unused)


def _sealed_plan(state: ReplicateState, order: list[int]) -> BucketPlan:
    """The plan from the second step on, given the order in which gradients came in the first one."""
    plan = state.builder.propose()
    if any(bucket.frame is None for bucket in plan.buckets) and order:
        state.builder.seal(plan)
        plan = state.builder.reorder_tail(order)
    return plan
