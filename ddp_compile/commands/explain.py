"""``python -m ddp_compile explain``: what ``model.explain()`` would say after some steps, without ranks and memory.

Note [Steps without values]
The module's parameters are fake tensors. One forward and one backward run inside ``no_sync``, so that nothing is
reduced: Dynamo, the passes and AOTAutograd work as in training, and hooks see in which order the gradients come. From
that follows what the reducer would do: it seals the plan in the first backward, repacks the eager tail before the
second forward (`BucketSet.rebuild_once`), and launches a bucket inside the compiled backward once it has seen that all
its gradients came from one place (Note [Launched before AccumulateGrad]).
"""

from __future__ import annotations

import argparse
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddp_compile import torch_internals
from ddp_compile.api import ddp_compile
from ddp_compile.errors import with_article
from ddp_compile.functions import is_replicated
from ddp_compile.module.explanation import explain
from ddp_compile.module.launches import MORE_THAN_ONE_PLACE
from ddp_compile.module.mixin import original_class, state_of
from ddp_compile.module.replicate_state import ReplicateState
from ddp_compile.plan.spec import BucketPlan
from ddp_compile.report.explanation import Explanation
from ddp_compile.report.explanation_html import format_page
from ddp_compile.runtime.comm import error_messages
from ddp_compile.validation.named_functions import load_function

log = logging.getLogger(__name__)

_RETURNS = "return a module, (module, inputs), (module, args, kwargs) or (module, args, kwargs, loss)"

_PLAIN_MODULE = "return the module as it is: this command calls ddp_compile itself"
#: What to do instead of what a user's code has done, by the name of a function that it called, or a word of its error.
_WAYS_OUT = {
    "init_process_group": "leave it out: this command makes a process group of --world-size ranks that sends nothing",
    "ddp_compile": _PLAIN_MODULE,
    "UninitializedParameter": "give every module its sizes, nn.Linear(8, 4) instead of nn.LazyLinear(4): a lazy module"
    " has no parameters before its first forward",
}


class TracingError(Exception):
    """The user's code, or tracing it, raised; the message says where."""


class _Step(NamedTuple):
    """A training step: the loss of ``module(*args, **kwargs)``."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments to its parser."""
    parser.add_argument("function", metavar="module:function", help=f"a function without arguments; it must {_RETURNS}")
    parser.add_argument("--world-size", type=int, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument(
        "--split", choices=("auto", "forward", "backward", "none"), default="auto", help="as in ddp_compile()"
    )
    parser.add_argument("--bucket-cap-mb", type=float, metavar="MIB", help="as in ddp_compile()")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page of the explanation, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the explanation as JSON, too")


def run(arguments: argparse.Namespace) -> int:
    """Trace, print the explanation, write files. Returns the exit status: 2 for wrong input or code that raises."""
    try:
        if arguments.world_size < 1:
            raise ValueError(f"--world-size {arguments.world_size} is no number of ranks; pass 2 or more")
        for path in filter(None, [arguments.html, arguments.json]):
            if not path.parent.is_dir():
                raise ValueError(f"{path} cannot be written, since there is no folder {path.parent}; make it first")
        settings = {"split": arguments.split, "bucket_cap_mb": arguments.bucket_cap_mb}
        explanation = explain_function(arguments.function, arguments.world_size, settings)
    except (ValueError, TracingError) as error:
        print(f"explain: {error}", file=sys.stderr)
        return 2
    print(explanation)
    if arguments.html is not None:
        arguments.html.write_text(format_page(explanation), "utf-8")
    if arguments.json is not None:
        arguments.json.write_text(explanation.to_json(), "utf-8")
    return 0


def explain_function(name: str, world_size: int, settings: Mapping[str, Any]) -> Explanation:
    """Trace a step of the module that a user's function makes, and explain what ddp_compile would do with it.

    Args:
        name: ``module:function``; the function returns what ``docs/explain.md`` says.
        world_size: Number of ranks.
        settings: Arguments of ``ddp_compile``.

    Raises:
        ValueError: There is no such function, or it returns something else, or settings are out of range.
        TracingError: The user's code raised, or cannot be traced.
    """
    if torch.distributed.is_initialized():
        raise ValueError("a process group exists already; call destroy_process_group() first, or start another process")
    function = _loaded(name)
    with torch_internals.fake_process_group(world_size), torch_internals.quiet_fake_mode() as fake_mode:
        with _raising_at(f"{name}()"), fake_mode:
            returned = function()
        step = _step(name, returned, fake_mode)
        with _raising_at(f"ddp_compile() of the module of {name}", passes=ValueError):
            backend = torch_internals.traced_only()
            # Parameters without values are not sent.
            module: Any = ddp_compile(step.module, backend=backend, init_sync=False, **settings)
        explanation = _explain_step(module, step, fake_mode)
        module.unwrap()
    ours = ("backend=", "init_sync=")
    return replace(explanation, settings=tuple(said for said in explanation.settings if not said.startswith(ours)))


def _loaded(name: str) -> Callable[[], Any]:
    with _raising_at(f"importing {name}", passes=ValueError):
        return load_function("function", name, ())


def _step(name: str, returned: Any, fake_mode: Any) -> _Step:
    """The training step that a user's function has returned, with fake tensors."""
    module, *rest = returned if isinstance(returned, tuple) else (returned,)
    if is_replicated(module):
        raise ValueError(f"{name} returns a module that is replicated already; {_PLAIN_MODULE}")
    args: Any = rest[0] if rest else ()
    kwargs: Any = rest[1] if len(rest) > 1 else {}
    loss: Any = rest[2] if len(rest) > 2 else _sum_of_outputs
    if len(rest) == 1 and isinstance(args, Mapping):
        args, kwargs = (), args
    args = tuple(args) if isinstance(args, tuple | list) else (args,)
    if not isinstance(module, nn.Module) or len(rest) > 3 or not isinstance(kwargs, Mapping) or not callable(loss):
        kinds = ", ".join(type(each).__name__ for each in (module, *rest))
        raise ValueError(f"{name} returns {f'({kinds})' if rest else with_article(kinds)}; it must {_RETURNS}")
    torch_internals.make_fake(module, fake_mode)
    args, kwargs = torch_internals.fake_tensors((args, dict(kwargs)), fake_mode)
    return _Step(module.train(), args, kwargs, loss)


def _sum_of_outputs(outputs: Any) -> Tensor:
    tensors = [each for each in torch_internals.tensors_in(outputs) if each.requires_grad]
    return torch.stack([tensor.sum() for tensor in tensors]).sum() if len(tensors) != 1 else tensors[0].sum()


def _explain_step(module: Any, step: _Step, fake_mode: Any) -> Explanation:
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
        with _raising_at("the forward"):
            outputs = module(*step.args, **step.kwargs)
        with _raising_at("the loss"):
            loss = step.loss(outputs)
            counts = torch_internals.num_contributions(loss)
        with _raising_at("the backward"):
            loss.backward()
    if missing := {name: p for index, (name, p) in enumerate(state.reduced.items()) if index not in order}:
        log.warning("%s", error_messages.missing_gradients(missing, len(parameters), static_graph=False))
    plan = _sealed_plan(state, list(order))
    are_from_one_place = [counts[id(p)] == 1 and not have for p, have in zip(parameters, have_hooks, strict=True)]
    watched = {
        bucket.index: None if all(are_from_one_place[g.index] for g in bucket.gradients) else MORE_THAN_ONE_PLACE
        for bucket in plan.buckets
    }
    return explain(state, plan, original_class(type(module)).__name__, watched)


def _sealed_plan(state: ReplicateState, order: list[int]) -> BucketPlan:
    """The plan from the second step on, given the order in which gradients came in the first one."""
    plan = state.builder.propose()
    if any(bucket.frame is None for bucket in plan.buckets) and order:
        state.builder.seal(plan)
        plan = state.builder.reorder_tail(order)
    return plan


@contextmanager
def _raising_at(where: str, passes: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Turn what the user's code raises into a `TracingError` with that error and the user's line."""
    try:
        yield
    except passes:
        raise
    except Exception as error:
        frames = [*traceback.extract_tb(error.__traceback__), *getattr(error, "real_stack", ())]  # Dynamo's is last
        said = "".join(traceback.format_exception_only(torch_internals.own_error(error))).rstrip()
        first = next((i for i, frame in enumerate(frames) if torch_internals.is_of_users(frame.filename)), len(frames))
        called = {frame.name for frame in frames[first:]}
        ways_out = [way for word, way in _WAYS_OUT.items() if word in called or f" {word} " in said]
        places = [frame for frame in frames if torch_internals.is_of_users(frame.filename)]
        lines = ["; ".join([f"{where} raised, on fake tensors, which have no values", *ways_out]), said]
        lines += [f"at {place.filename}:{place.lineno}: {place.line}" for place in places[-1:]]
        raise TracingError("\n".join(lines)) from error
