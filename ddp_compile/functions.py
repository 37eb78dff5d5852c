"""Methods of replicated modules as functions, which type checkers know and a module's own names never hide."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from ddp_compile.errors import ReplicationError, with_article
from ddp_compile.module.mixin import ReplicatedModule

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from ddp_compile.report.explanation import Explanation

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def is_replicated(model: object) -> TypeIs[ReplicatedModule]:
    """Whether ``ddp_compile`` has replicated a module, and nothing has unwrapped it since.

    After ``assert is_replicated(model)``, type checkers know all methods of ``model``.

    Args:
        model: Anything. A module that merely holds a replicated one is not replicated.
    """
    return isinstance(model, ReplicatedModule)


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Accumulate gradients locally: backwards of forwards made inside are not reduced.

    The first backward of a forward outside reduces everything that has accumulated.

    Args:
        model: A module that ``ddp_compile`` has returned.

    Returns:
        A context.

    Raises:
        ReplicationError: The module is not replicated.
    """
    return ReplicatedModule.no_sync(_replicated(model, "no_sync"))


def explain(model: nn.Module) -> Explanation:
    """The bucket plan, how each graph was cut and why not, what is launched early, and what could not be compiled.

    Args:
        model: A module that ``ddp_compile`` has returned.

    Returns:
        Data, see `Explanation`. ``print`` shows it as text, and ``to_json()`` returns it for programs.

    Raises:
        ReplicationError: The module is not replicated.
    """
    return ReplicatedModule.explain(_replicated(model, "explain"))


def unwrap(model: ModuleT) -> ModuleT:
    """Undo ``ddp_compile``; parameters and gradients keep their values.

    Nothing is reduced or compiled from now on. If the algorithm lets parameters differ between the ranks, all ranks
    must unwrap together, and the parameters become the mean over the ranks; optimizer states remain each rank's own.
    With a sharded optimizer all ranks must unwrap together too; its process groups are destroyed.
    After a backward that raised in the middle of an iteration, gradients become None, since only some had been
    averaged.

    Args:
        model: A module that ``ddp_compile`` has returned.

    Returns:
        ``model`` itself.

    Raises:
        ReplicationError: The module is not replicated.
    """
    ReplicatedModule.unwrap(_replicated(model, "unwrap"))
    return model


def _replicated(model: nn.Module, function: str) -> ReplicatedModule:
    if not is_replicated(model):
        raise ReplicationError(
            f"{function}: model is {with_article(type(model).__name__)} that is not replicated; call ddp_compile(model)"
            " first, and pass what it returned"
        )
    return model
