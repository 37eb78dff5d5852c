"""Replacements for DistributedDataParallel in torch's tests of it."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ddp_compile
from ddp_compile.module.mixin import ReplicatedModule

#: Whether this process has made one of them, so that the test is a test of DistributedDataParallel.
made_one = False

#: The backend that `Replicated` compiles with.
backend = "aot_eager"

#: As the tests put modules onto the CPU that they mean for GPUs.
_OF_GPUS = ("device_ids", "output_device")

#: Attributes and methods that the tests ask for, and that are the replicated module's here.
_READ_OFF = (
    *("bucket_bytes_cap_list", "device_mesh", "process_group", "no_sync", "register_comm_hook", "join"),
    *("_register_buffer_comm_hook", "_register_fused_optim"),
)


def _without_gpus(arguments: dict[str, Any]) -> dict[str, Any]:
    global made_one
    made_one = True
    return {name: value for name, value in arguments.items() if name not in _OF_GPUS}


class DDPOnCPU(DistributedDataParallel):
    """DistributedDataParallel itself."""

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        super().__init__(module, **_without_gpus(arguments))


class Replicated(nn.Module, Joinable):
    """``ddp_compile(module)`` with DistributedDataParallel's spelling: see docs/ddp_parity.md.

    There, the module is wrapped, so that names begin with "module."; here, it stays the user's own. The internals of
    DistributedDataParallel are not imitated: a test that uses them fails with an AttributeError.
    """

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        super().__init__()
        given = _without_gpus(arguments)
        given.pop("check_reduction", None)  # without effect there as well
        for theirs, ours in (("bucket_cap_mb_list", "bucket_cap_mb"), ("forward_sync_buffers", "broadcast_buffers")):
            if given.get(theirs) is not None:
                given[ours] = given.pop(theirs)
        given["parameters_to_ignore"] = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        # Tests wrap a module again after they have used its first wrapper.
        self._replicate(module.unwrap() if isinstance(module, ReplicatedModule) else module, given)

    def _replicate(self, module: nn.Module, arguments: dict[str, Any]) -> None:
        self.module: Any = ddp_compile(module, backend=backend, **arguments)
        self._arguments = arguments

    def _replicate_again(self, **arguments: Any) -> None:
        self._replicate(self.module.unwrap(), {**self._arguments, **arguments})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name) if name in _READ_OFF else super().__getattr__(name)

    # A pickled module is plain: who loads it calls ddp_compile again.
    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._replicate(self.module, self._arguments)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: Any, names: Iterable[str]) -> None:
        module._ddp_params_and_buffers_to_ignore = list(names)

    def _set_static_graph(self) -> None:
        self._replicate_again(static_graph=True)

    def _update_process_group(self, group: Any) -> None:
        self._replicate_again(process_group=group)

    def _remove_autograd_hooks(self) -> None:
        self.module.unwrap()

    @property
    def require_backward_grad_sync(self) -> bool:
        return self.module.require_backward_grad_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.module.require_backward_grad_sync = value

    def _register_builtin_comm_hook(self, hook: Any) -> None:
        self.module.register_comm_hook(None, hook)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return self.module.join_hook(**kwargs)

    @property
    def join_device(self) -> Any:
        return self.module.join_device

    @property
    def join_process_group(self) -> Any:
        return self.module.join_process_group

    @property
    def _join_config(self) -> Any:
        return self.module._join_config

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        if "_modules" in self.__dict__ and "module" in self._modules:  # Joinable sets one before there is a module
            self.module._join_config = config
