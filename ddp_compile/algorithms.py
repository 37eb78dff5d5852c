"""Algorithms for ``ddp_compile(model, algorithm=...)``, and all that an algorithm outside of the core may import.

The algorithms of the core are `GradientAllReduce` and comm hooks. The others are an extension: they import the names of
this module and nothing else of the runtime, as your own algorithms can, and are imported at their first use.
"""

import importlib
import inspect
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ddp_compile.errors import ReplicationError, shorten_names, this_rank
from ddp_compile.plan.spec import GradientSpec
from ddp_compile.runtime.algorithms.all_reduce import AllReduce, AllReduceInChain, GradientAllReduce
from ddp_compile.runtime.algorithms.collective_chain import CollectiveChain, Hierarchical
from ddp_compile.runtime.algorithms.flat_parameters import FLOATING, FlatParameters, average_over
from ddp_compile.runtime.buckets.bucket import Bucket as Bucket
from ddp_compile.runtime.buckets.comm_algorithm import AlgorithmConfig, CommAlgorithm, Pending, Traits, device_of
from ddp_compile.runtime.buckets.optimizer_steps import OptimizerSteps
from ddp_compile.runtime.comm import streams
from ddp_compile.runtime.comm.exchange import Exchange
from ddp_compile.runtime.comm.process_groups import NodeGroups, host_group, own_group
from ddp_compile.runtime.comm.transfers import (
    Transfer,
    all_gather,
    all_reduce,
    all_to_all,
    exchange,
    keep_after,
    objection_to_messages,
    wait_for,
)
from ddp_compile.torch_internals import group_timeout, local_tensors

if TYPE_CHECKING:
    from ddp_compile.runtime.algorithms.async_model_average import AsyncModelAverage, AsyncModelAverageAlgorithm
    from ddp_compile.runtime.algorithms.byte_grad import ByteGrad
    from ddp_compile.runtime.algorithms.decentralized import Decentralized
    from ddp_compile.runtime.algorithms.diloco import DiLoCo
    from ddp_compile.runtime.algorithms.local_sgd import LocalSGD
    from ddp_compile.runtime.algorithms.low_precision_decentralized import LowPrecisionDecentralized
    from ddp_compile.runtime.algorithms.parameter_average import ParameterAverage

__all__ = [
    "FLOATING",
    "AlgorithmConfig",
    "AllReduce",
    "AllReduceInChain",
    "AsyncModelAverage",
    "AsyncModelAverageAlgorithm",
    "Bucket",
    "ByteGrad",
    "CollectiveChain",
    "CommAlgorithm",
    "Decentralized",
    "DiLoCo",
    "Exchange",
    "FlatParameters",
    "GradientAllReduce",
    "Hierarchical",
    "LocalSGD",
    "LowPrecisionDecentralized",
    "NodeGroups",
    "OptimizerSteps",
    "ParameterAverage",
    "Pending",
    "Traits",
    "Transfer",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "average_over",
    "device_of",
    "exchange",
    "group_timeout",
    "host_group",
    "keep_after",
    "local_tensors",
    "objection_to_messages",
    "own_group",
    "streams",
    "wait_for",
]

_EXTENSIONS = {
    "AsyncModelAverage": "async_model_average",
    "AsyncModelAverageAlgorithm": "async_model_average",
    "ByteGrad": "byte_grad",
    "Decentralized": "decentralized",
    "DiLoCo": "diloco",
    "LocalSGD": "local_sgd",
    "LowPrecisionDecentralized": "low_precision_decentralized",
    "ParameterAverage": "parameter_average",
}


def __getattr__(name: str) -> Any:
    """The algorithms of the extension, imported at their first use."""
    if name not in _EXTENSIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"ddp_compile.runtime.algorithms.{_EXTENSIONS[name]}"), name)


# By ``id``: two algorithms may be equal.
_in_use: weakref.WeakValueDictionary[int, CommAlgorithm] = weakref.WeakValueDictionary()


def check_algorithm(algorithm: object) -> None:
    """Raise a TypeError unless this is an `AlgorithmConfig`."""
    if isinstance(algorithm, CommAlgorithm):
        raise TypeError(
            f"algorithm={type(algorithm).__name__}(...) is a CommAlgorithm, which works for one model; pass the"
            " AlgorithmConfig whose build() makes it"
        )
    if not isinstance(algorithm, AlgorithmConfig):
        hint = ""
        if isinstance(algorithm, type) and issubclass(algorithm, AlgorithmConfig) and not inspect.isabstract(algorithm):
            hint = f"; did you mean {algorithm.__name__}()?"
        raise TypeError(
            f"algorithm={algorithm!r} is not an AlgorithmConfig; pass one of ddp_compile.algorithms, for example"
            f" GradientAllReduce(){hint}"
        )


def build_algorithm(config: AlgorithmConfig, process_group: dist.ProcessGroup) -> CommAlgorithm:
    """Build the algorithm of one module, and check that it is complete, and not another module's."""
    algorithm = config.build(process_group)
    if not isinstance(algorithm, CommAlgorithm):
        raise TypeError(f"{type(config).__name__}.build() returned {algorithm!r}; it must return a CommAlgorithm")
    if flaw := _flaw_of(algorithm):
        raise TypeError(f"{type(algorithm).__name__} has {flaw}")
    if id(algorithm) in _in_use:
        raise ReplicationError(
            f"{type(config).__name__}.build() returned the {algorithm.name} of another model; it must make a new one in"
            " each call, since an algorithm holds the state of one model"
        )
    _in_use[id(algorithm)] = algorithm
    return algorithm


def _flaw_of(algorithm: CommAlgorithm) -> str:
    """What a user's algorithm lacks, or which of its parts contradict each other, and the way out; empty if nothing."""
    cls, payload = type(algorithm), algorithm.traits.payload
    if not isinstance(getattr(algorithm, "name", None), str):
        return "no name; it needs one, for errors and for comparing ranks"
    if payload != "parameters" and cls.launch is CommAlgorithm.launch:
        return (
            "no launch(), which reduces a bucket of gradients; write it, or set traits = Traits(payload='parameters')"
            " if the algorithm communicates parameters instead"
        )
    if payload == "both" and cls.sends_gradients is CommAlgorithm.sends_gradients:
        return (
            "the payload 'both' but does not say when gradients are sent; override the property sends_gradients, or"
            " set traits = Traits(payload='gradients') to send them always"
        )
    if isinstance(algorithm, CollectiveChain) and not hasattr(algorithm, "num_collectives"):
        return "no num_collectives; set it to the number of works that reduce() yields for a bucket"
    if isinstance(algorithm, CollectiveChain) and not hasattr(algorithm, "process_group"):
        return "no process_group; its __init__ has to call super().__init__()"
    if payload == "parameters" and algorithm.gives_way_to_comm_hook:
        return (
            "the payload 'parameters' and gives_way_to_comm_hook, but a comm hook reduces gradients; leave"
            " gives_way_to_comm_hook out"
        )
    return ""


def refuse_gradients(algorithm: CommAlgorithm, gradients: Sequence[GradientSpec]) -> None:
    """Raise a ReplicationError if an algorithm does not take one of the gradients to reduce."""
    sparse = [each.fqn for each in gradients if each.is_sparse]
    if sparse and not algorithm.traits.takes_sparse:
        raise ReplicationError(
            f"{this_rank()}: the {algorithm.name} takes no sparse gradients, but these parameters have some:"
            f" {shorten_names(sparse)}. Make their layers with sparse=False, name them in parameters_to_ignore, or use"
            " GradientAllReduce() without arguments"
        )
    taken = [str(dtype).removeprefix("torch.") for dtype in algorithm.traits.takes_dtypes or ()]
    refused: dict[str, list[str]] = {}
    for each in gradients if taken else ():
        if each.dtype not in taken:
            refused.setdefault(each.dtype, []).append(each.fqn)
    if refused:
        found = "; ".join(f"{shorten_names(names)} ({dtype})" for dtype, names in refused.items())
        raise ReplicationError(
            f"{this_rank()}: the {algorithm.name} takes gradients of {', '.join(taken)}, and refuses {found}. Convert"
            " them, name them in parameters_to_ignore, or use GradientAllReduce() without arguments"
        )
