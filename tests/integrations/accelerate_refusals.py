"""What an accelerator or a model cannot be used with, on a rank of a pool: each returns the error."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from accelerate import DistributedDataParallelKwargs
from accelerate.utils import DistributedType
from accelerate_ranks import SETTINGS, new_accelerator, new_model
from torch import nn

from ddp_compile import ddp_compile
from ddp_compile.algorithms import LocalSGD
from ddp_compile.integrations import accelerate as integration
from ddp_compile.integrations.accelerate import use


def one_process() -> None:
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
        del os.environ[name]
    use(new_accelerator())


def other_kind(kind: str) -> Callable[[], None]:
    def use_it() -> None:
        accelerator = new_accelerator()
        accelerator.state.distributed_type = DistributedType(kind)  # what their plugins set, which need GPUs
        use(accelerator)

    return use_it


def parallelism_config() -> None:
    accelerator = new_accelerator()
    accelerator.state.parallelism_config = object()
    use(accelerator)


def fp8() -> None:
    accelerator = new_accelerator()
    accelerator.state._mixed_precision = "fp8"
    use(accelerator)


def too_old() -> None:
    oldest, integration.OLDEST = integration.OLDEST, "99.0"
    try:
        use(new_accelerator())
    finally:
        integration.OLDEST = oldest


def compiled_by_accelerate() -> None:
    use(new_accelerator(dynamo_backend="inductor"))


def used_twice() -> None:
    use(use(new_accelerator()), bucket_cap_mb=1)


def prepared_before_use() -> None:
    accelerator = new_accelerator()
    accelerator.prepare(new_model())
    use(accelerator)


def no_accelerator() -> None:
    use(new_model())


def process_group() -> None:
    use(new_accelerator(), process_group=torch.distributed.group.WORLD)


def replicated_before() -> None:
    use(new_accelerator()).prepare(ddp_compile(new_model(), backend="eager"))


def replicated_inside() -> None:
    use(new_accelerator()).prepare(nn.Sequential(ddp_compile(new_model(), backend="eager"), nn.Linear(3, 3)))


def replicated_behind() -> None:
    ddp_compile(use(new_accelerator(), **SETTINGS).prepare(new_model()))


def prepared_by_accelerate_alone() -> None:
    new_accelerator().prepare(ddp_compile(new_model(), backend="eager"))(torch.randn(4, 6))


def contradiction() -> None:
    handler = DistributedDataParallelKwargs(bucket_cap_mb=5)
    use(new_accelerator(kwargs_handlers=[handler]), bucket_cap_mb=1).prepare(new_model())


def dim_of_ddp() -> None:
    use(new_accelerator(kwargs_handlers=[DistributedDataParallelKwargs(dim=1)])).prepare(new_model())


def ranks_that_differ() -> None:
    use(new_accelerator(), algorithm=LocalSGD(period=2), **SETTINGS).prepare(new_model())


CASES: dict[str, Callable[[], None]] = {
    "one process": one_process,
    "FSDP": other_kind("FSDP"),
    "DeepSpeed": other_kind("DEEPSPEED"),
    "Megatron-LM": other_kind("MEGATRON_LM"),
    "parallelism_config": parallelism_config,
    "fp8": fp8,
    "too old": too_old,
    "compiled by Accelerate": compiled_by_accelerate,
    "used twice": used_twice,
    "prepared before use()": prepared_before_use,
    "no Accelerator": no_accelerator,
    "process_group": process_group,
    "replicated before": replicated_before,
    "replicated inside": replicated_inside,
    "replicated behind": replicated_behind,
    "prepared by Accelerate alone": prepared_by_accelerate_alone,
    "a contradiction": contradiction,
    "dim": dim_of_ddp,
    "ranks that differ": ranks_that_differ,
}


def refuse_all() -> dict[str, str]:
    """The errors of all cases on this rank, "Type: message"; empty where there was none."""
    return {name: error_of(case) for name, case in CASES.items()}


def error_of(case: Callable[[], Any]) -> str:
    before = dict(os.environ)
    try:
        case()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.environ.update(before)
    return ""
