"""Regional compilation: blocks that repeat are compiled by themselves, once for all that are alike.

Note [What the code of a region may know]
Dynamo keeps compiled code with the code object of the function that it traced, and takes parameters as inputs of the
graph. So the instances of a class that are called through one function share one graph, unless a guard tells them
apart. Nothing that names a parameter or a bucket may stand in such a graph: regions are compiled as they are, without a
cut and without operators of ours, and their gradients reach the reducer through the hooks of their parameters, which
all run as soon as the region's backward has. What makes that early enough is the plan, whose buckets begin and end
where regions do (`pack`).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from ddp_compile import torch_internals
from ddp_compile.compile.backend import EvaluationBackend, RegionBackend
from ddp_compile.compile.graph_compiler import GraphCompiler
from ddp_compile.compile.settings import CompileSettings
from ddp_compile.config import RegionClasses
from ddp_compile.plan.spec import shorten_names

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
#: Those that nobody calls.
_LISTS = (nn.ModuleList, nn.ModuleDict)


class KnowsForwards(Protocol):
    """What knows in which forward a region is called: a module's state."""

    @property
    def evaluates_eagerly(self) -> bool: ...

    def await_parameters(self) -> None: ...


def find_regions(module: nn.Module, classes: RegionClasses | None, rank: int) -> dict[str, nn.Module]:
    """The submodules that are compiled by themselves, by name, in registration order.

    Args:
        module: The module that is being replicated.
        classes: ``"auto"`` finds modules that repeat: direct children of a ModuleList, Sequential or ModuleDict, two or
            more of them of one class, that have submodules themselves. Or classes of modules, of which every instance
            is one. A region inside of another one is part of it. None finds nothing.
        rank: This rank, for messages.

    Raises:
        ValueError: Nothing repeats, a class has no instance, or ``module.compile()`` has been called for a region.

    Source: the rule for "auto" is that of ``compile_regions`` in Accelerate, utils/other.py, which takes a ModuleList
    whose children are all of one class, from the outside to the inside; torchtitan's ``apply_compile`` takes the
    children of ``model.layers``, a ModuleDict.
    """
    if classes is None:
        return {}
    if isinstance(classes, str):
        regions = _first_names(_repeated(module, ""))
        if not regions:
            raise ValueError(
                f"rank {rank}: regions='auto' finds no block that repeats in a ModuleList, Sequential or ModuleDict of"
                f" {type(module).__name__}; name the classes of its blocks, regions=[Block], or drop regions"
            )
    else:
        regions = _first_names(_instances(module, "", classes))
        for cls in classes:
            if not any(isinstance(submodule, cls) for name, submodule in module.named_modules() if name):
                raise ValueError(
                    f"rank {rank}: regions names {cls.__name__}, and no submodule of {type(module).__name__} is one;"
                    " name classes of its submodules, pass regions='auto', or drop regions"
                )
    for name, region in regions.items():
        if torch_internals.compiled_call_of(region) is not None:
            raise ValueError(
                f"rank {rank}: regions={_said(classes)} would compile {name}, which is compiled already, by"
                " module.compile(); drop one of the two"
            )
    return regions


def region_of_parameters(names: Sequence[str], regions: Mapping[str, nn.Module]) -> dict[int, int]:
    """Ordinal of the region of each parameter that is in one.

    A parameter of several regions, or of one and of what is outside, has the name of the first that was registered,
    which the backward reaches last.

    Args:
        names: Names of the parameters, in their order.
        regions: The regions by name.
    """
    ordinals = {f"{name}.": ordinal for ordinal, name in enumerate(regions)}
    found = {}
    for index, name in enumerate(names):
        # All prefixes of the name that end with a dot.
        prefixes = (name[: i + 1] for i, character in enumerate(name) if character == ".")
        ordinal = next((ordinals[prefix] for prefix in prefixes if prefix in ordinals), None)
        if ordinal is not None:
            found[index] = ordinal
    return found


class CompiledRegions:
    """The regions of one module, each of which calls what is compiled for its class.

    Args:
        regions: They, by name; maybe none.
        state: What knows in which forward they are called; not kept alive.
        compiler: Compiles each graph.
        settings: Settings of the compilation.
    """

    def __init__(
        self,
        regions: Mapping[str, nn.Module],
        state: KnowsForwards,
        compiler: GraphCompiler,
        settings: CompileSettings,
    ) -> None:
        self._regions = dict(regions)
        self._counts = Counter(map(type, regions.values()))
        self._classes = {
            cls: _CompiledClass(cls, count, weakref.ref(state), compiler, settings)
            for cls, count in self._counts.items()
        }
        for region in regions.values():
            torch_internals.set_compiled_call(region, _call_of(weakref.ref(region), self._classes[type(region)]))

    def __len__(self) -> int:
        return len(self._regions)

    @property
    def num_graphs(self) -> int:
        """How many graphs have been compiled, for training and for evaluation."""
        return sum(backend.num_graphs for of_class in self._classes.values() for backend in of_class.backends)

    def explain(self) -> list[str]:
        """Lines for ``model.explain()``."""
        lines = []
        for cls, of_class in self._classes.items():
            names = [name for name, region in self._regions.items() if type(region) is cls]
            training, evaluation = (backend.num_graphs for backend in of_class.backends)
            lines.append(
                f"{len(names)} regions of {cls.__name__} ({shorten_names(names)}):"
                f" {_number(training, 'graph')} for training, {_number(evaluation, 'graph')} for evaluation"
            )
        return lines

    def remove(self) -> None:
        """Let the regions call themselves again."""
        for region in self._regions.values():
            torch_internals.set_compiled_call(region, None)


class _CompiledClass:
    """What is compiled for the regions of one class.

    Training and evaluation are two functions, since Dynamo does not guard on ``module.training`` behind a graph break.
    """

    def __init__(
        self,
        cls: type[nn.Module],
        num_regions: int,
        state: weakref.ref[KnowsForwards],
        compiler: GraphCompiler,
        settings: CompileSettings,
    ) -> None:
        self._state = state
        # nn.Module's own call: a ``__call__`` of the class, for checkpoints for example, is around the region.
        self.eager = torch_internals.traced_call_of(nn.Module)
        self.backends = (
            RegionBackend(compiler, f"graph of {cls.__name__}"),
            EvaluationBackend(compiler, f"evaluation graph of {cls.__name__}"),
        )
        self.training, self.evaluation = (
            settings.compile(self.eager, backend, num_regions) for backend in self.backends
        )
        weakref.finalize(self, torch_internals.forget_compiled, self.eager)

    def choose(self, region: nn.Module) -> Callable[..., Any]:
        """What to call for a region now."""
        state = self._state()
        if state is None:
            return self.eager
        state.await_parameters()
        if not torch.is_grad_enabled():
            return self.eager if state.evaluates_eagerly else self.evaluation
        return self.training if region.training else self.evaluation


def _call_of(region: weakref.ref[nn.Module], of_class: _CompiledClass) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        module = region()
        assert module is not None, "a module is being called"
        return of_class.choose(module)(module, *args, **kwargs)

    return call


def _repeated(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    is_container = isinstance(module, _CONTAINERS)
    # With every place of a child that stands in several.
    counts = Counter(type(child) for child in module._modules.values()) if is_container else Counter()
    for name, child in module.named_children():
        is_block = not isinstance(child, _LISTS) and next(child.children(), None) is not None
        if is_block and counts[type(child)] > 1:
            yield f"{prefix}{name}", child
        else:
            yield from _repeated(child, f"{prefix}{name}.")


def _instances(module: nn.Module, prefix: str, classes: Sequence[type[nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(child, tuple(classes)):
            yield f"{prefix}{name}", child
        else:
            yield from _instances(child, f"{prefix}{name}.", classes)


def _first_names(found: Iterable[tuple[str, nn.Module]]) -> dict[str, nn.Module]:
    """Each module once, by the first of its names."""
    names: dict[nn.Module, str] = {}
    for name, module in found:
        names.setdefault(module, name)
    return {name: module for module, name in names.items()}


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _said(classes: RegionClasses) -> str:
    return repr(classes) if isinstance(classes, str) else f"[{', '.join(cls.__name__ for cls in classes)}]"
