"""The pretend accelerator: the device ``acc`` and the process group backend ``accl``, for processes without one.

`load` registers both in this process, for good: `torch.accelerator` finds the device from then on, and autograd has
threads for it. So it must come before the first backward, and not in a process that runs other tests.
"""

import importlib
import sys
import types
from typing import Any

import compiled_device
import torch
import torch.distributed as dist

DEVICE = "acc"
BACKEND = "accl"
#: For `torch.distributed.init_process_group`.
BACKENDS = f"cpu:gloo,{DEVICE}:{BACKEND}"


def load() -> Any:
    """Compile the device if need be, and register two of it and its backend.

    Its streams can be reached by `torch.accelerator` and `torch.Stream` only, as those of torch's own reference device:
    ``torch.acc`` has no ``Stream``, ``Event``, ``current_stream`` and ``stream``, as ``torch.cuda`` does.

    Returns:
        The extension module. ``counts()`` has numbers of host waits, poisoned blocks and calls of record_stream;
        ``set_pauses(longest_us, one_of)`` lets streams pause before one of so many tasks, by default 500 us at most
        before every eighth.
    """
    folder = str(compiled_device.folder())
    if folder not in sys.path:
        sys.path.append(folder)
    torch.utils.rename_privateuse1_backend(DEVICE)
    extension().register_hooks()
    torch._register_device_module(DEVICE, _device_module(extension()))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=[DEVICE])
    return extension()


def register_with_inductor() -> None:
    """Let inductor compile for the device. `torch._inductor.config.fallback_by_default` must be on meanwhile.

    The device's operators are then started one by one. Kernels of inductor's own would run on the CPU at once, in the
    order of no stream.
    """
    from torch._dynamo.device_interface import CpuInterface, register_interface_for_device
    from torch._inductor.codegen import common
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    class Interface(CpuInterface):
        """Says nothing of streams, since generated code enters none."""

    common.register_backend_for_device(DEVICE, CppScheduling, PythonWrapperCodegen)
    common.register_device_op_overrides(DEVICE, common.DeviceOpOverrides())
    for name in (DEVICE, *(f"{DEVICE}:{index}" for index in range(extension().num_devices()))):
        register_interface_for_device(name, Interface)


def extension() -> Any:
    """The extension module, after `load`."""
    return importlib.import_module(compiled_device.MODULE)


def _make_group(options: Any, _backend_options: object) -> Any:
    store = dist.PrefixStore(BACKEND, options.store)
    gloo = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, options.timeout)
    return extension().Group(gloo, options.group_rank, options.group_size)


def _device_module(extension: Any) -> types.ModuleType:
    """``torch.acc``."""
    module: Any = types.ModuleType(f"torch.{DEVICE}")

    def index_of(device: Any = None) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return extension.current_device() if index is None else index

    class device:
        """Inside, another device is the current one."""

        def __init__(self, device: Any) -> None:
            self._index, self._previous = index_of(device), -1

        def __enter__(self) -> None:
            self._previous = torch.accelerator.current_device_index()
            torch.accelerator.set_device_index(self._index)

        def __exit__(self, *_: object) -> None:
            torch.accelerator.set_device_index(self._previous)

    module.device = device
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.device_count = extension.num_devices
    module.current_device = extension.current_device
    module.set_device = lambda device: torch.accelerator.set_device_index(index_of(device))
    module.synchronize = lambda device=None: torch.accelerator.synchronize(index_of(device))
    # Random operators run on the CPU.
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return module
