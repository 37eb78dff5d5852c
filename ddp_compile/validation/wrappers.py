"""Wrappers that themselves reduce, shard or compile, or that train adapters, inside a replicated module or around it.

They are recognized by the names of their classes, since some are slow to import.
"""

import itertools
import os
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import torch_internals
from ddp_compile.errors import ReplicationError, shorten_names, this_rank, with_article

_REDUCES = "its gradients are already reduced; use one of the two"
_SHARDS = (
    "it reduces and shards its gradients itself. To shard over one dimension of a mesh and average over another, which"
    " FSDP2 calls HSDP, leave out ddp_compile: fully_shard(module, mesh=mesh['replicas', 'parts'])"
)
_PASS_INSIDE = "pass the module inside it, its .module"

#: By class name: the advice when `ddp_compile` is given one.
_INSTEAD: Mapping[str, str] = {
    "DistributedDataParallel": _PASS_INSIDE,
    "DataParallel": _PASS_INSIDE,
    "DeepSpeedEngine": _PASS_INSIDE,
    "FullyShardedDataParallel": _SHARDS,
    "ReplicateModule": _REDUCES,  # torch.distributed._composable.replicate_with_fsdp
    "FSDPModule": _SHARDS,
    "DDP": _REDUCES,  # what torch.distributed._composable.replicate derives a module's class from
    "OptimizedModule": "ddp_compile compiles itself; pass the module inside it, its ._orig_mod, instead",
    "ReplicatedModule": "replicate the outermost module only",
    "ScriptModule": "Dynamo cannot trace TorchScript; use the Python module",
}
_SHARDING = frozenset({"FullyShardedDataParallel", "FSDPModule", "ReplicateModule"})
_REDUCING = _SHARDING | {"DistributedDataParallel", "DataParallel", "DeepSpeedEngine", "DDP"}


def refuse_wrappers_inside(module: nn.Module) -> None:
    """Raise a ReplicationError for a module that is or holds a wrapper.

    Allowed are submodules of TorchScript, and compiled ones, if ``torch.compiler.disable`` keeps Dynamo out of them.
    """
    for name, submodule in module.named_modules():
        kind = _kind_of(type(submodule))
        is_left = kind in ("OptimizedModule", "ScriptModule") and torch_internals.is_disabled_for_dynamo(submodule)
        if kind is None or (name and is_left):
            continue
        where = f"submodule {name}" if name else "the module"
        shards = ""
        if kind in _SHARDING:
            names = [f"{name}.{each}" if name else each for each, _ in submodule.named_parameters()]
            shards = f", which shards {shorten_names(names)}"
        raise ReplicationError(f"{this_rank()}: {where} is {with_article(kind)}{shards}; {_INSTEAD[kind]}")


def reducing_wrappers_inside(module: nn.Module) -> list[str]:
    """The submodules that themselves reduce or shard gradients, as in "layers.0 is an FSDPModule"."""
    return [
        f"{name or 'the module'} is {with_article(str(kind))}"
        for name, submodule in module.named_modules()
        if (kind := _kind_of(type(submodule))) in _REDUCING
    ]


def refuse_wrapper_around(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """During a call of the module, refuse a caller that reduces the same gradients or trains adapters of PEFT.

    A wrapper whose forward merely calls the module, a frozen teacher for example, is allowed.
    """
    for wrapper in itertools.chain([module], _calling_modules()):
        if wrapper is not module and _trains_adapters(wrapper, module):
            raise adapters_after_replication()
        kind = _kind_of(type(wrapper))
        if kind not in _REDUCING or not (taken := _taken_by(wrapper, kind, module, parameters)):
            continue
        raise ReplicationError(
            f"{this_rank()}: the module that ddp_compile has replicated {'is' if wrapper is module else 'is called by'}"
            f" {with_article(kind)}, which also takes {len(taken)} of its {len(parameters)} parameters ({taken[0]},"
            f" ...), so their gradients would be reduced twice, or not at all. Train the module without {kind}, around"
            " it or around a module that contains it. With Accelerate, leave out ddp_compile, and call"
            " ddp_compile.integrations.accelerate.use(accelerator) before accelerator.prepare(model); with Lightning,"
            " leave it out and pass Trainer(strategy=ddp_compile.integrations.lightning.DDPCompileStrategy())"
        )


def adapters_after_replication() -> ReplicationError:
    """PEFT added adapters to a replicated module, or trains prompts around one."""
    return ReplicationError(
        f"{this_rank()}: PEFT has added adapters to a module that ddp_compile has replicated, which would not average"
        " their gradients; add them first: ddp_compile(get_peft_model(model, config))"
    )


def _trains_adapters(wrapper: nn.Module, module: nn.Module) -> bool:
    """Whether a wrapper is a PeftModel that trains parameters outside the module that it calls."""
    if not any(base.__name__ == "PeftModel" and base.__module__.startswith("peft.") for base in type(wrapper).__mro__):
        return False
    inside = set(map(id, module.parameters()))
    return any(parameter.requires_grad and id(parameter) not in inside for parameter in wrapper.parameters())


def _kind_of(cls: type) -> str | None:
    """The wrapper that a class is or derives from."""
    for base in cls.__mro__:
        if base.__name__ in _INSTEAD and base.__module__.split(".")[0] in ("torch", "deepspeed", "ddp_compile"):
            return base.__name__
    return None


def _taken_by(
    wrapper: nn.Module, kind: str | None, module: nn.Module, parameters: Mapping[str, nn.Parameter]
) -> list[str]:
    """The names of the parameters whose gradients a wrapper reduces or shards."""
    if kind in _SHARDING:
        # It replaces parameters, permanently or during a forward, except in modules that it ignores.
        if not any(submodule is module for submodule in wrapper.modules()):
            return []
        present = set(map(id, module.parameters()))
        return [name for name, parameter in parameters.items() if id(parameter) not in present]
    named, ignored = wrapper.named_parameters(), set[str]()
    if isinstance(wrapper, DistributedDataParallel):
        named, ignored = wrapper.module.named_parameters(), wrapper.parameters_to_ignore
    held = {id(parameter) for name, parameter in named if parameter.requires_grad and name not in ignored}
    return [name for name, parameter in parameters.items() if id(parameter) in held]


_NN, _DISTRIBUTED = (os.path.join(os.path.dirname(torch.__file__), part) for part in ("nn", "distributed"))
_FORWARDS = frozenset(
    {
        os.path.join(_NN, "parallel", "distributed.py"),
        os.path.join(_NN, "parallel", "data_parallel.py"),
        os.path.join(_DISTRIBUTED, "fsdp", "fully_sharded_data_parallel.py"),
    }
)


def _calling_modules() -> Iterator[nn.Module]:
    """The modules whose calls led here, innermost first, including compiled ones.

    Note [Frames whose locals are read]
    Before Python 3.13, a frame keeps the values that ``f_locals`` has returned for as long as it lives, so the frame of
    a training loop would keep the tensors of a step until the loop ends. So only frames of torch are read, which end
    with the call.
    """
    seen: set[int] = set()
    for frame in torch_internals.frames():
        if frame.f_code.co_filename in _FORWARDS or torch_internals.is_module_call(frame.f_code):
            caller = frame.f_locals.get("self")
            if isinstance(caller, nn.Module) and id(caller) not in seen:
                seen.add(id(caller))
                yield caller
