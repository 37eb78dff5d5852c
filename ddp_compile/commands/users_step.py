"""The training step that a user's function returns, on fake tensors."""

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddp_compile import torch_internals
from ddp_compile.commands.arguments import RETURNS
from ddp_compile.errors import with_article
from ddp_compile.functions import is_replicated
from ddp_compile.torch_internals import fake_training

_PLAIN_MODULE = "return the module as it is: this command calls ddp_compile itself"
#: Ways out of errors, by the name of a function that the user's code called, or by a word of the error.
_WAYS_OUT = {
    "init_process_group": "leave it out: this command makes a process group of --world-size ranks that sends nothing",
    "ddp_compile": _PLAIN_MODULE,
    "UninitializedParameter": "give every module its sizes, nn.Linear(8, 4) instead of nn.LazyLinear(4): a lazy module"
    " has no parameters before its first forward",
}


class TracingError(Exception):
    """The user's code raised, or could not be traced; the message says where."""


class UsersStep(NamedTuple):
    """A training step: the loss of ``module(*args, **kwargs)``."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor]


def users_step(name: str, returned: Any, fake_mode: Any) -> UsersStep:
    """The training step that a user's function returned, with fake tensors."""
    module, *rest = returned if isinstance(returned, tuple) else (returned,)
    if is_replicated(module):
        raise ValueError(f"{name} returns a module that is already replicated; {_PLAIN_MODULE}")
    args: Any = rest[0] if rest else ()
    kwargs: Any = rest[1] if len(rest) > 1 else {}
    loss: Any = rest[2] if len(rest) > 2 else _sum_of_outputs
    if len(rest) == 1 and isinstance(args, Mapping):
        args, kwargs = (), args
    args = tuple(args) if isinstance(args, tuple | list) else (args,)
    if not isinstance(module, nn.Module) or len(rest) > 3 or not isinstance(kwargs, Mapping) or not callable(loss):
        kinds = ", ".join(type(each).__name__ for each in (module, *rest))
        raise ValueError(f"{name} returns {f'({kinds})' if rest else with_article(kinds)}; it must {RETURNS}")
    fake_training.make_fake(module, fake_mode)
    args, kwargs = fake_training.fake_tensors((args, dict(kwargs)), fake_mode)
    return UsersStep(module.train(), args, kwargs, loss)


def _sum_of_outputs(outputs: Any) -> Tensor:
    tensors = [each for each in torch_internals.tensors_in(outputs) if each.requires_grad]
    return torch.stack([tensor.sum() for tensor in tensors]).sum() if len(tensors) != 1 else tensors[0].sum()


@contextmanager
def raising_at(where: str, passes: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Turn an error of the user's code into a `TracingError` that quotes the error and the user's line."""
    try:
        yield
    except passes:
        raise
    except Exception as error:
        frames = [*traceback.extract_tb(error.__traceback__), *getattr(error, "real_stack", ())]  # Dynamo's is last
        said = "".join(traceback.format_exception_only(fake_training.own_error(error))).rstrip()
        first = next((i for i, frame in enumerate(frames) if torch_internals.is_of_users(frame.filename)), len(frames))
        called = {frame.name for frame in frames[first:]}
        ways_out = [way for word, way in _WAYS_OUT.items() if word in called or f" {word} " in said]
        places = [frame for frame in frames if torch_internals.is_of_users(frame.filename)]
        lines = ["; ".join([f"{where} raised, on fake tensors, which have no values", *ways_out]), said]
        lines += [f"at {place.filename}:{place.lineno}: {place.line}" for place in places[-1:]]
        raise TracingError("\n".join(lines)) from error
