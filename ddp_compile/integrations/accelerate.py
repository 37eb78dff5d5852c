"""Hugging Face Accelerate and Trainer: ``accelerator.prepare`` replicates with ``ddp_compile``.

Note [A class of the accelerator's own]
`Accelerator.prepare_model` constructs DistributedDataParallel, and Accelerate has no extension point there. So the
accelerator gets a class derived from its own, which overrides the few methods that require a DistributedDataParallel.
All others use methods that a replicated module has (``no_sync``), or take any module.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

try:
    import accelerate
except ImportError as error:
    raise ImportError(
        "ddp_compile.integrations.accelerate needs Hugging Face Accelerate: pip install accelerate"
    ) from error
from accelerate.utils import DistributedType, DynamoBackend, compare_versions

from ddp_compile.api import ddp_compile
from ddp_compile.errors import ReplicationError, this_rank, with_article
from ddp_compile.features.compatibility import Feature, in_force, refuse_if_excluded
from ddp_compile.functions import no_sync, unwrap
from ddp_compile.integrations.token_counts import TokenCounts, has_counts
from ddp_compile.module.mixin import ReplicatedModule, state_of

OLDEST = "1.0.0"

UsedT = TypeVar("UsedT")

_USED_WITH = "_ddp_compile_use"  # attribute of an accelerator: the arguments of `ddp_compile`
_CREATES = "create_accelerator_and_postprocess"  # Trainer's method that makes its accelerators


def use(accelerator: UsedT, *, gather_counts: bool = False, **arguments: Any) -> UsedT:
    """Make ``accelerator.prepare`` replicate models with ``ddp_compile`` instead of DistributedDataParallel.

    Call it before anything is prepared::

        accelerator = use(Accelerator(mixed_precision="bf16"), bucket_cap_mb=25)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    With Hugging Face Trainer, call ``use(trainer)`` before ``trainer.train()``. The prepared model is the model itself;
    `Accelerator.unwrap_model` returns it as it is, still replicated.

    Args:
        accelerator: An accelerator with several processes, on CPUs or GPUs, started by ``accelerate launch`` or
            torchrun. Or a Trainer, for its accelerator and those that it makes for the trials of a hyperparameter
            search.
        gather_counts: Whether Trainer gathers the number of tokens before each step for its
            ``average_tokens_across_devices``. If not, the numbers travel beside the step, and it gathers them only for
            losses that are not proportional to 1 / ``num_items_in_batch``.
        arguments: The arguments of `ddp_compile`, except ``process_group`` and ``device_mesh``. If the accelerator was
            given a DistributedDataParallelKwargs, or Trainer made one, its settings and its comm hook are used too.

    Returns:
        ``accelerator`` itself.

    Raises:
        TypeError: Neither an Accelerator nor a Trainer, or an argument that cannot be given here.
        ReplicationError: The accelerator trains in another way, has one process, compiles itself, or has already
            prepared models; or Accelerate is too old. Raised when a model is prepared: it was replicated before, an
            argument contradicts DistributedDataParallelKwargs, or the ranks have states that no checkpoint of
            Accelerate holds.
    """
    for name in ("process_group", "device_mesh"):
        if arguments.get(name) is not None:
            raise TypeError(
                f"use() does not take {name}: Accelerate distributes data over all its processes, and gradients are"
                f" averaged over the same processes; drop {name}"
            )
    if "log_communication" in arguments:
        raise TypeError(
            "use() no longer takes log_communication: call model.measure(steps=None) once the model is prepared, and"
            " add model.comm_stats().scalars() to what you log"
        )
    if isinstance(accelerator, accelerate.Accelerator):
        _use_accelerator(accelerator, arguments)
    elif hasattr(accelerator, _CREATES):
        _use_trainer(accelerator, arguments)
        if not gather_counts and has_counts(accelerator):
            TokenCounts(accelerator)
    else:
        raise TypeError(
            f"use() needs an accelerate.Accelerator or a Trainer, not {with_article(type(accelerator).__name__)}"
        )
    return accelerator


def _use_accelerator(accelerator: accelerate.Accelerator, arguments: dict[str, Any]) -> None:
    if reason := _objection(accelerator):
        raise ReplicationError(f"{this_rank()}: {reason}")
    accelerator.__dict__[_USED_WITH] = arguments
    original: Any = type(accelerator)
    accelerator.__class__ = _replicating_class(original)


def _use_trainer(trainer: Any, arguments: dict[str, Any]) -> None:
    _use_accelerator(trainer.accelerator, arguments)
    create = getattr(trainer, _CREATES)

    @functools.wraps(create)
    def create_and_use() -> None:
        create()
        _use_accelerator(trainer.accelerator, arguments)

    setattr(trainer, _CREATES, create_and_use)


def _objection(accelerator: accelerate.Accelerator) -> str:
    """Why an accelerator cannot replicate with ddp_compile, and the way out; empty if it can."""
    if compare_versions("accelerate", "<", OLDEST):
        return f"accelerate {accelerate.__version__} is older than {OLDEST}; pip install -U accelerate"
    if isinstance(accelerator, _ReplicatesModels):
        return "use() was called twice on this accelerator; call it once, with all arguments"
    kind = accelerator.distributed_type
    if kind == DistributedType.NO:
        return (
            "the accelerator has one process (DistributedType.NO), so there is nothing to average; start the script"
            " with accelerate launch or torchrun --nproc-per-node 2, on CPUs with torchrun and Accelerator(cpu=True),"
            " for Trainer TrainingArguments(use_cpu=True); or leave out use()"
        )
    if kind not in (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        return (
            f"the accelerator has distributed_type={kind.value}, which shards or reduces itself, or has devices that"
            " were not tried; leave out its plugin, or its setting in accelerate config, or leave out use()"
        )
    if getattr(accelerator, "parallelism_config", None) is not None:
        return (
            "the accelerator has a parallelism_config, which lays out its ranks itself; leave out parallelism_config,"
            " or use()"
        )
    if accelerator.mixed_precision == "fp8":
        return "mixed_precision='fp8' converts layers with its own library; use 'bf16', or leave out use()"
    backend = accelerator.state.dynamo_plugin.backend
    if backend != DynamoBackend.NO:
        return (
            f"the accelerator compiles itself (dynamo_backend={backend.value}; torch_compile=True of TrainingArguments"
            " sets it), and so does ddp_compile; drop it, and pass backend= and mode= to use()"
        )
    if accelerator._models:
        names = ", ".join(type(model).__name__ for model in accelerator._models)
        return f"the accelerator has already prepared {names}; call use() before accelerator.prepare()"
    return ""


class _ReplicatesModels:
    """Overrides methods of an accelerator; see Note [A class of the accelerator's own]."""

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        accelerator: Any = self
        if isinstance(model, ReplicatedModule) and not getattr(model, "_is_accelerate_prepared", False):
            raise ReplicationError(
                f"{this_rank()}: ddp_compile has replicated this {type(model).__name__} before accelerator.prepare();"
                " leave out that call, and pass its arguments to use()"
            )
        # Moves it to its device and into autocast. In evaluation mode Accelerate does not wrap it.
        model = super().prepare_model(model, device_placement, evaluation_mode=True)  # type: ignore[misc]
        # Trainer prepares its model in each train() and evaluate().
        is_done = isinstance(model, ReplicatedModule)
        if evaluation_mode or is_done or not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        handler = accelerator.ddp_handler
        ddp_compile(model, **_with_handler(accelerator.__dict__[_USED_WITH], handler))
        _refuse_states_of_ranks(model)
        if handler is not None:
            handler.register_comm_hook(model)
        return model

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Like Accelerate's, which divides losses by the number of micro-batches, but not if they are counted."""
        accelerator: Any = self
        # Each once, although Accelerate may have prepared it again.
        models = dict.fromkeys(model for model in accelerator._models if isinstance(model, ReplicatedModule))
        if any(state_of(model).reducer.normalizer.awaits_backward for model in models):
            if len(models) > 1:  # whose loss it is cannot be told
                raise ReplicationError(
                    f"{this_rank()}: accelerator.backward() divides losses by gradient_accumulation_steps, except those"
                    f" that model.normalize_by() has counted, and one of {len(models)} models awaits such a backward;"
                    " call loss.backward() instead, and divide the losses of the others yourself"
                )
            loss = loss * accelerator.gradient_accumulation_steps
        super().backward(loss, **kwargs)  # type: ignore[misc]

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Like Accelerate's, which would call the model's own method ``no_sync`` if there is one."""
        if isinstance(model, ReplicatedModule):
            return no_sync(model)
        return super().no_sync(model)  # type: ignore[misc]

    @contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Like Accelerate's: reduce the next backward although its forward ran inside ``no_sync``."""
        if isinstance(model, ReplicatedModule):  # it is not replicated if nothing in it is trained
            state_of(model).reducer.prepare_for_backward(True)
            state_of(model).monitor.forwards.announce_backward()
        yield


def _with_handler(arguments: Mapping[str, Any], handler: Any) -> dict[str, Any]:
    """The arguments of `use`, and those that a DistributedDataParallelKwargs sets."""
    of_handler = handler.to_kwargs() if handler is not None else {}
    for name in arguments.keys() & of_handler.keys():
        if arguments[name] != of_handler[name]:
            raise ReplicationError(
                f"{this_rank()}: use() was given {name}={arguments[name]!r} and DistributedDataParallelKwargs"
                f" {name}={of_handler[name]!r}; pass it once (Trainer takes the latter from ddp_{name} in"
                " TrainingArguments)"
            )
    return {**of_handler, **arguments}


def _refuse_states_of_ranks(model: Any) -> None:
    algorithm = model.comm_algorithm
    present = in_force(state_of(model), algorithm)
    if algorithm.state_dict():
        present[Feature.KEEPS_STATE] = f"the {algorithm.name}"
    try:
        refuse_if_excluded(Feature.ACCELERATE, "use()", present)
    except ReplicationError:
        unwrap(model)
        raise


@functools.cache
def _replicating_class(original: Any) -> Any:
    return type(original.__name__, (_ReplicatesModels, original), {"__module__": original.__module__})
