"""Data-parallel training under ``torch.compile``: one bucket plan cuts the graphs and drives the reducer."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from ddp_compile import checkout as checkout  # first, since the other imports go through symbolic links

if TYPE_CHECKING:
    from ddp_compile.api import ddp_compile
    from ddp_compile.errors import (
        CompilationError,
        DDPCompileError,
        GradientArrivalError,
        KernelUnavailableError,
        MissingGradientError,
        ParametersChangedError,
        RanksDifferError,
        ReductionError,
        ReplicationError,
    )
    from ddp_compile.functions import explain, is_replicated, no_sync, unwrap
    from ddp_compile.plan.packing import plan_buckets
    from ddp_compile.plan.spec import BucketPlan, BucketSpec, GradientSpec
    from ddp_compile.runtime.sharded.checkpoint import load_sharded_optimizer_state_dict, sharded_optimizer_state_dict
    from ddp_compile.sharded_optimizer import shard_optimizer
else:
    # Where the public names are; imported at the first use of one, so that `python -m ddp_compile --help` need not wait
    # for torch. The last two are an extension.
    _MODULES = ["api", "errors", "functions", "plan.packing", "plan.spec"]
    _MODULES += ["sharded_optimizer", "runtime.sharded.checkpoint"]

    class _Package(ModuleType):
        def __call__(self, *args, **kwargs):
            raise TypeError(
                "this is the package ddp_compile, which has a function of its name: write"
                " 'from ddp_compile import ddp_compile' instead of 'import ddp_compile'"
            )

    sys.modules[__name__].__class__ = _Package

    # Not for type checkers, which would accept any name.
    def __getattr__(name):
        if name in ("algorithms", "errors"):
            return import_module(f"{__name__}.{name}")
        for module in _MODULES if name in __all__ else ():
            if hasattr(found := import_module(f"{__name__}.{module}"), name):
                return getattr(found, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():  # for completion
        return sorted({*globals(), *__all__})


__version__ = "0.1.0"

__all__ = [
    "BucketPlan",
    "BucketSpec",
    "CompilationError",
    "DDPCompileError",
    "GradientArrivalError",
    "GradientSpec",
    "KernelUnavailableError",
    "MissingGradientError",
    "ParametersChangedError",
    "RanksDifferError",
    "ReductionError",
    "ReplicationError",
    "ddp_compile",
    "explain",
    "is_replicated",
    "load_sharded_optimizer_state_dict",
    "no_sync",
    "plan_buckets",
    "shard_optimizer",
    "sharded_optimizer_state_dict",
    "unwrap",
]
