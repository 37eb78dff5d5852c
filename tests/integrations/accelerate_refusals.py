"""Accelerators and models that are refused on a rank of a pool, each with its error."""

import os
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
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


def with_state(**state: Any) -> Callable[[], None]:
    """Use an accelerator in a state that plugins would set, which need GPUs."""

    def use_it() -> None:
        accelerator = new_accelerator()
        for name, value in state.items():
            setattr(accelerator.state, name, value)
        use(accelerator)

    return use_it


def too_old() -> None:
    with patch.object(integration, "OLDEST", "99.0"):
        use(new_accelerator())


def prepared_before_use() -> None:
    accelerator = new_accelerator()
    accelerator.prepare(new_model())
    use(accelerator)


def with_kwargs(use_settings: dict[str, Any], **kwargs: Any) -> None:
    use(new_accelerator(kwargs_handlers=[DistributedDataParallelKwargs(**kwargs)]), **use_settings).prepare(new_model())


def used() -> Accelerator:
    return use(new_accelerator(), **SETTINGS)


def count_one_of_two_models() -> None:
    accelerator = used()
    models = [accelerator.prepare(new_model()) for _ in range(2)]
    models[0].normalize_by(4)
    accelerator.backward(models[0](torch.ones(4, 6)).sum())


def replicated() -> nn.Module:
    return ddp_compile(new_model(), backend="eager")


CASES: list[tuple[Callable[[], Any], str]] = [
    (one_process, r"rank .: .*one process \(DistributedType.NO\).*cpu=True.*leave out use\(\)"),
    (with_state(distributed_type=DistributedType("FSDP")), "distributed_type=FSDP, which shards.*leave out its plugin"),
    (with_state(distributed_type=DistributedType("DEEPSPEED")), "distributed_type=DEEPSPEED"),
    (with_state(distributed_type=DistributedType("MEGATRON_LM")), "distributed_type=MEGATRON_LM"),
    (with_state(parallelism_config=object()), "parallelism_config.*leave out parallelism_config"),
    (with_state(_mixed_precision="fp8"), "mixed_precision='fp8'.*use 'bf16'"),
    (too_old, r"accelerate \d.* is older than 99.0; pip install -U accelerate"),
    (
        lambda: use(new_accelerator(dynamo_backend="inductor")),
        r"dynamo_backend=INDUCTOR; torch_compile=True of TrainingArguments.*pass backend=",
    ),
    (lambda: use(used(), bucket_cap_mb=1), r"use\(\) was called twice"),
    (prepared_before_use, r"has already prepared Sequential; call use\(\) before"),
    (lambda: use(new_model()), "TypeError: .*an accelerate.Accelerator or a Trainer, not a Sequential"),
    (lambda: use(new_accelerator(), process_group=torch.distributed.group.WORLD), "TypeError: .*drop process_group"),
    (lambda: use(new_accelerator(), log_communication=True), "TypeError: .*add model.comm_stats"),
    (lambda: used().prepare(replicated()), r"replicated this Sequential before accelerator.prepare\(\); leave out"),
    (
        lambda: used().prepare(nn.Sequential(replicated(), nn.Linear(3, 3))),
        "submodule 0 is a ReplicatedModule; replicate the outermost module only",
    ),
    (lambda: ddp_compile(used().prepare(new_model())), r"ddp_compile\(\) was called twice on this module"),
    (
        lambda: new_accelerator().prepare(replicated())(torch.randn(4, 6)),
        r"is called by a DistributedDataParallel.*accelerate.use\(accelerator\) before",
    ),
    (
        lambda: with_kwargs({"bucket_cap_mb": 1}, bucket_cap_mb=5),
        "bucket_cap_mb=1 and DistributedDataParallelKwargs bucket_cap_mb=5; pass it once",
    ),
    (count_one_of_two_models, r"one of 2 models awaits such a backward; call loss.backward\(\) instead"),
    (lambda: with_kwargs({}, dim=1), "TypeError: .*does not take dim=1; drop dim"),
    (
        lambda: use(new_accelerator(), algorithm=LocalSGD(period=2), **SETTINGS).prepare(new_model()),
        r"rank .: use\(\) cannot be used with the local SGD.*Drop algorithm=",
    ),
]


def refused_otherwise() -> list[tuple[str, str]]:
    """Expected and raised error of each case whose errors differ on this rank."""
    errors = [(expected, error_of(case)) for case, expected in CASES]
    return [(expected, error) for expected, error in errors if not re.search(expected, error, re.DOTALL)]


def error_of(case: Callable[[], Any]) -> str:
    """``Type: message``; empty if there is none."""
    before = dict(os.environ)
    try:
        case()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.environ.update(before)
    return ""
