"""Ways to reduce gradients, for ``ddp_compile(model, algorithm=...)``, and what a way of your own derives from."""

from __future__ import annotations

import weakref

import torch.distributed as dist

from ddp_compile.errors import ReplicationError
from ddp_compile.runtime.algorithms.all_reduce import GradientAllReduce
from ddp_compile.runtime.algorithms.base import AlgorithmConfig, CommAlgorithm, Pending, Traits

__all__ = ["AlgorithmConfig", "CommAlgorithm", "GradientAllReduce", "Pending", "Traits"]

_in_use: weakref.WeakSet[CommAlgorithm] = weakref.WeakSet()


def check_algorithm(algorithm: object) -> None:
    """Raise a TypeError unless this is what ``ddp_compile(model, algorithm=...)`` takes."""
    if isinstance(algorithm, CommAlgorithm):
        raise TypeError(
            f"algorithm={algorithm.name!r} is an algorithm at work, which belongs to one model; pass its settings, an"
            " AlgorithmConfig whose build() makes it"
        )
    if not isinstance(algorithm, AlgorithmConfig):
        hint = f"; did you mean {algorithm.__name__}()?" if isinstance(algorithm, type) else ""
        raise TypeError(
            f"algorithm={algorithm!r} is not an AlgorithmConfig; pass one of ddp_compile.algorithms, for example"
            f" GradientAllReduce(){hint}"
        )


def build_algorithm(config: AlgorithmConfig, process_group: dist.ProcessGroup) -> CommAlgorithm:
    """The algorithm of one module.

    Raises:
        TypeError: What ``config.build`` returned is none.
        ReplicationError: Another module has it already.
    """
    algorithm = config.build(process_group)
    if not isinstance(algorithm, CommAlgorithm):
        raise TypeError(f"{type(config).__name__}.build() returned {algorithm!r}; it must return a CommAlgorithm")
    if algorithm in _in_use:
        raise ReplicationError(
            f"{type(config).__name__}.build() returned the {algorithm.name} of another model; it must make a new one in"
            " each call, as an algorithm holds what is under way"
        )
    _in_use.add(algorithm)
    return algorithm
