"""Lightning: ``Trainer(strategy=DDPCompileStrategy())`` instead of ``Trainer(strategy="ddp")``."""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

try:
    import lightning
except ImportError as error:
    raise ImportError("ddp_compile.integrations.lightning needs Lightning: pip install lightning") from error
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torchmetrics import Metric, MetricCollection

from ddp_compile.api import argument_names, ddp_compile
from ddp_compile.config import refuse_unknown_arguments
from ddp_compile.errors import ReplicationError, shorten_names, this_rank, with_article
from ddp_compile.features.compatibility import Feature
from ddp_compile.functions import is_replicated, no_sync, unwrap
from ddp_compile.module.mixin import state_of
from ddp_compile.module.module_checks import names_to_ignore
from ddp_compile.validation.torch_version import release_of

#: The oldest Lightning that was tested.
OLDEST = "2.5"


class _Steps(nn.Module):
    """The module that is replicated instead of the LightningModule: calling it runs a step of the LightningModule.

    The LightningModule itself is not replicated, so ``self(batch)`` inside a step is part of the step.
    """

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, step: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, step)(*args, **kwargs)

    @property
    def training(self) -> bool:
        """The mode of the LightningModule, which Lightning restores after an evaluation."""
        module = self._modules.get("module")
        return module is None or module.training

    @training.setter
    def training(self, mode: bool) -> None:
        """Does nothing, since ``train()`` also sets the mode of the LightningModule."""


class DDPCompileStrategy(DDPStrategy):
    """Trains a LightningModule with `ddp_compile.ddp_compile` instead of DistributedDataParallel.

    ``training_step`` is compiled, and so is ``validation_step`` while fitting. With manual optimization the steps run
    eagerly, and the gradients of ``manual_backward`` are averaged.

    Args:
        **settings: The settings of ``DDPStrategy``, such as ``process_group_backend`` and ``ddp_comm_hook``, but with
            the arguments of `ddp_compile.ddp_compile` instead of those of DistributedDataParallel.

    Raises:
        TypeError: An unknown argument.
        ReplicationError: This Lightning is too old.
    """

    strategy_name = "ddp_compile"
    model: nn.Module | None  # the LightningModule; from `configure_ddp` on, its `_Steps`

    def __init__(self, **settings: Any) -> None:
        if release_of(lightning.__version__) < release_of(OLDEST):
            raise ReplicationError(
                f"DDPCompileStrategy needs Lightning {OLDEST} or newer, but this is {lightning.__version__}; run pip"
                f" install 'lightning>={OLDEST}'"
            )
        super().__init__(**settings)
        self._untraced = ExitStack()
        taken = argument_names()
        refuse_unknown_arguments({n: value for n, value in self._ddp_kwargs.items() if n not in taken}, taken)

    def configure_ddp(self) -> None:
        """Replicate the LightningModule; raises a ReplicationError if that cannot be done, or has been done."""
        module = self.model
        if not isinstance(module, LightningModule):
            raise ReplicationError(
                f"{this_rank()}: the strategy was given {with_article(type(module).__name__)} instead of the"
                " LightningModule, perhaps by a precision plugin that converts modules; leave out that plugin, or use"
                ' strategy="ddp"'
            )
        self._refuse(module)
        settings = dict(self._ddp_kwargs)
        ignored = names_to_ignore(module, settings.get("parameters_to_ignore", ()))
        settings["parameters_to_ignore"] = [f"module.{name}" for name in ignored]
        if delayed := settings.get("delay_all_reduce_named_params"):
            settings["delay_all_reduce_named_params"] = [(f"module.{name}", parameter) for name, parameter in delayed]
        model = ddp_compile(_Steps(module), **settings)
        assert is_replicated(model)
        if (hook := self._ddp_comm_hook) is not None:
            wrap = self._ddp_comm_wrapper
            model.register_comm_hook(self._ddp_comm_state, hook if wrap is None else wrap(hook))
        for owner, name in _python_methods(module):
            self._untraced.enter_context(_untraced(owner, name))
        self.model = model

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Let the LightningModule make its optimizers. Raises a ReplicationError if one of them is sharded."""
        super().setup_optimizers(trainer)
        if isinstance(self.model, _Steps):
            state_of(self.model).refuse_if_excluded(Feature.LIGHTNING, "DDPCompileStrategy")

    def _refuse(self, module: LightningModule) -> None:
        for name, submodule in module.named_modules():
            if is_replicated(submodule):
                raise ReplicationError(
                    f"{this_rank()}: {name or 'the LightningModule'} is already replicated; leave out ddp_compile(...),"
                    " since DDPCompileStrategy calls it with its own arguments"
                )
        if parts := [name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]:
            raise ReplicationError(
                f"{this_rank()}: {shorten_names(parts)} are DTensors, but a checkpoint of this strategy would hold only"
                " rank 0's part of them; use Lightning's ModelParallelStrategy or FSDPStrategy"
            )
        if getattr(module, "_compiler_ctx", None) is not None:
            raise ReplicationError(
                f"{this_rank()}: the Trainer was given torch.compile(module); pass it the module itself, and the"
                " arguments of torch.compile to DDPCompileStrategy(mode=..., dynamic=...)"
            )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The training step, compiled unless the module optimizes manually."""
        with self.precision_plugin.train_step_context():
            return self._run("training_step", args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The validation step, compiled while fitting."""
        with self.precision_plugin.val_step_context():
            return self._run("validation_step", args, kwargs)

    def _run(self, step: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module, model = self.lightning_module, self.model
        assert module is not None and model is not None
        if isinstance(model, _Steps):
            if step != "training_step" or module.automatic_optimization:
                return model(step, *args, **kwargs)
            # Any number of backwards may come inside it.
            state_of(model).broadcast_buffers("training step")
        return getattr(module, step)(*args, **kwargs)

    def on_validation_start(self) -> None:
        """Give all ranks rank 0's buffers, which a checkpoint holds, for validation, as with ``strategy="ddp"``."""
        if isinstance(self.model, _Steps):
            state_of(self.model).broadcast_buffers("validation")

    def pre_backward(self, closure_loss: Tensor) -> None:
        """With manual optimization, prepare for a backward, since the module was not called for it."""
        assert self.lightning_module is not None
        if isinstance(self.model, _Steps) and not self.lightning_module.automatic_optimization:
            state_of(self.model).prepare_for_backward_of(self.model, closure_loss)

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients locally in all micro-batches of a step except the last."""
        return no_sync(self.model) if isinstance(self.model, _Steps) else nullcontext()

    def teardown(self) -> None:
        """Unwrap the LightningModule."""
        self._untraced.close()
        model = self.model
        try:
            if isinstance(model, _Steps):
                self.model = self.lightning_module
                unwrap(model)
        finally:
            super().teardown()


def _python_methods(module: LightningModule) -> Iterator[tuple[nn.Module, str]]:
    """Methods that Dynamo must not trace: they count calls, so it would compile the step again for each count."""
    for name in ("log", "log_dict", "optimizers", "lr_schedulers"):
        yield module, name
    for submodule in module.modules():
        if isinstance(submodule, Metric | MetricCollection):
            for name in ("forward", "update", "compute", "reset"):
                yield submodule, name


@contextmanager
def _untraced(owner: nn.Module, name: str) -> Iterator[None]:
    own = vars(owner).get(name)
    setattr(owner, name, _Untraced(owner, name))
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


class _Untraced:
    """A method that Dynamo calls without tracing it. Copies and pickles of its owner have the plain method."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        self._owner = owner
        self._name = name
        self._method = getattr(owner, name)
        functools.update_wrapper(self, self._method)

    @torch.compiler.disable(reason="it runs in Python")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(*args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self._owner, self._name)  # on the copy, which does not have this attribute yet
