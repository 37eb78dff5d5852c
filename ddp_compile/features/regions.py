"""Regional compilation: blocks that repeat are compiled separately, once for all blocks of a class.

Note [What the code of a region may know]
Dynamo stores compiled code on the code object of the function that it traced, and makes parameters inputs of the graph.
So all instances of a class that are called through one function share one graph, unless a guard distinguishes them.
Such a graph must not name a parameter or a bucket. So regions are compiled without cuts and without our operators.
Their gradients reach the reducer through the hooks of their parameters, which run right after the region's backward.
That is early enough, since buckets begin and end at region boundaries (`pack`).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ddp_compile import torch_internals
from ddp_compile.compile.settings import CompileSettings
from ddp_compile.config import RegionClasses
from ddp_compile.errors import this_rank

if TYPE_CHECKING:
    from ddp_compile.compile.backend import EvaluationBackend, RegionBackend
    from ddp_compile.module.replicate_state import ReplicateState
    from ddp_compile.report.explanation import Region

#: Called with each graph and its example inputs.
Backend = Callable[..., Callable[..., Any]]

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
#: Containers that are never called.
_LISTS = (nn.ModuleList, nn.ModuleDict)


def find_regions(module: nn.Module, classes: RegionClasses | None) -> dict[str, nn.Module]:
    """Find the submodules to compile as regions, by name, in registration order.

    Each instance of one of the ``classes`` is a region. ``"auto"`` finds modules that repeat: children of a ModuleList,
    Sequential or ModuleDict, two or more of one class, that have submodules. A region inside another one is part of it.
    None finds nothing. Raises a ValueError if nothing repeats, a class has no instance, or ``module.compile()`` has
    been called for a region.

    Source: the rule for "auto" is that of ``compile_regions`` in Accelerate, utils/other.py, which takes a ModuleList
    whose children are all of one class, from the outside to the inside; torchtitan's ``apply_compile`` takes the
    children of ``model.layers``, a ModuleDict.
    """
    if classes is None:
        return {}
    if isinstance(classes, str):
        regions = _first_names(_repeated(module, "", nested=False))
        if not regions:
            raise ValueError(
                f"{this_rank()}: regions='auto' finds no repeated block in a ModuleList, Sequential or ModuleDict of"
                f" {type(module).__name__}; name the classes of its blocks, regions=[Block], or drop regions"
            )
    else:
        regions = _first_names(_instances(module, "", classes))
        for cls in classes:
            if not any(isinstance(submodule, cls) for name, submodule in module.named_modules() if name):
                raise ValueError(
                    f"{this_rank()}: regions names {cls.__name__}, but no submodule of {type(module).__name__} is one;"
                    " name classes of its submodules, pass regions='auto', or drop regions"
                )
    for name, region in regions.items():
        if torch_internals.compiled_call_of(region) is not None:
            raise ValueError(
                f"{this_rank()}: regions={_said(classes)} would compile {name}, which module.compile() compiles"
                " already; drop one of the two"
            )
    return regions


def find_inner(module: nn.Module) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Find the submodules to compile separately if Dynamo leaves the code that calls them to Python.

    Returns two mappings from name to submodule: those that share compiled code with others of their class, and those
    that do not. Blocks that repeat share code, as with "auto" in `find_regions`, and so do blocks inside them. The
    others are modules with submodules whose forward is torch's own, such as ``nn.Sequential``: Dynamo starts at frames
    of the user's code, but never at torch's. Inside blocks these share code too. Submodules on which ``compile()`` was
    called are left out.
    """
    left = {
        each for outer in module.modules() if torch_internals.is_disabled_for_dynamo(outer) for each in outer.modules()
    }
    shared = _first_names(_repeated(module, "", nested=True))
    repeated, inside = set(shared.values()), {each for block in shared.values() for each in block.modules()}
    alone: dict[str, nn.Module] = {}
    for name, submodule in module.named_modules():
        is_other = submodule is not module and submodule not in repeated and submodule not in left
        if is_other and _is_block(submodule) and _is_of_torch(submodule):
            (shared if submodule in inside else alone)[name] = submodule
    return _without_compiled(shared), _without_compiled(alone)


def region_of_parameters(names: Sequence[str], regions: Mapping[str, nn.Module]) -> dict[int, int]:
    """For the index of each parameter that is in a region, the ordinal of that region.

    If several regions, or a region and the rest, share a parameter, its first name counts, which the backward reaches
    last.
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
    """The regions of one module, whose state is not kept alive. Each calls the code compiled for its class."""

    def __init__(self, regions: Mapping[str, nn.Module], state: ReplicateState) -> None:
        self._regions: dict[str, nn.Module] = {}
        self._alone: list[nn.Module] = []
        self._backends: dict[type[nn.Module], tuple[RegionBackend, EvaluationBackend]] = {}
        self._state = weakref.ref(state)
        self._settings = state.compile_settings
        self.compile(regions)

    def __len__(self) -> int:
        return len(self._regions)

    @property
    def num_training_graphs(self) -> int:
        return sum(training.num_graphs for training, _ in self._backends.values())

    @property
    def num_graphs(self) -> int:
        return sum(backend.num_graphs for backends in self._backends.values() for backend in backends)

    def compile(self, regions: Mapping[str, nn.Module]) -> None:
        """Make these modules regions too. No region may be of their classes yet."""
        from ddp_compile.compile.backend import EvaluationBackend, RegionBackend

        self._regions.update(regions)
        for cls, count in Counter(map(type, regions.values())).items():
            backends = self._backends[cls] = (
                RegionBackend(self._settings.inner, f"graph of {cls.__name__}"),
                EvaluationBackend(self._settings.inner, f"evaluation graph of {cls.__name__}"),
            )
            self._replace_calls([region for region in regions.values() if type(region) is cls], backends, count)

    def compile_alone(self, modules: Iterable[nn.Module], training: Backend, evaluation: Backend) -> None:
        """Compile each of these modules separately, with the backends of the whole module. They share no code."""
        for module in modules:
            self._alone.append(module)
            self._replace_calls([module], (training, evaluation), None)

    def explain(self, *, compiled_only: bool = False) -> list[Region]:
        """For ``model.explain()``: one for each class, or only for classes with compiled code."""
        from ddp_compile.report.explanation import Region

        found = []
        for cls, (training, evaluation) in self._backends.items():
            if compiled_only and not training.num_graphs + evaluation.num_graphs:
                continue
            names = tuple(name for name, region in self._regions.items() if type(region) is cls)
            found.append(Region(cls.__name__, names, training.num_graphs, evaluation.num_graphs))
        return found

    def remove(self) -> None:
        """Restore the regions' own calls."""
        for region in [*self._regions.values(), *self._alone]:
            torch_internals.set_compiled_call(region, None)

    def _replace_calls(
        self, modules: Sequence[nn.Module], backends: tuple[Backend, Backend], num_modules: int | None
    ) -> None:
        calls = _CompiledCalls(backends, self._state, self._settings, num_modules)
        for module in modules:
            torch_internals.set_compiled_call(module, _call_of(weakref.ref(module), calls))


class _CompiledCalls:
    """The compiled code of the regions of one class.

    Training and evaluation are two functions, since Dynamo does not guard on ``module.training`` after a graph break.
    """

    def __init__(
        self,
        backends: tuple[Backend, Backend],
        state: weakref.ref[ReplicateState],
        settings: CompileSettings,
        num_modules: int | None,
    ) -> None:
        self._state = state
        # nn.Module's own call, so that a ``__call__`` of the class, such as one that checkpoints, stays around the
        # region.
        self.eager = torch_internals.traced_call_of(nn.Module)
        self.training, self.evaluation = (settings.compile(self.eager, backend, num_modules) for backend in backends)
        weakref.finalize(self, torch_internals.forget_compiled, self.eager)

    def choose(self, region: nn.Module) -> Callable[..., Any]:
        """The code that a call of a region runs now."""
        state = self._state()
        if state is None:
            return self.eager
        state.await_parameters()  # perhaps outside a forward of the module
        if state.runs_uncompiled:
            return self.eager
        if not torch.is_grad_enabled():
            return self.eager if state.evaluates_eagerly else self.evaluation
        return self.training if region.training else self.evaluation


def _call_of(reference: weakref.ref[nn.Module], calls: _CompiledCalls) -> Callable[..., Any]:
    def region() -> nn.Module:
        module = reference()
        assert module is not None, "a module is being called"
        return module

    def call(*args: Any, **kwargs: Any) -> Any:
        module = region()
        return calls.choose(module)(module, *args, **kwargs)

    return torch_internals.in_python(lambda *args, **kwargs: calls.eager(region(), *args, **kwargs), call)


def _repeated(module: nn.Module, prefix: str, nested: bool) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks that repeat; if ``nested``, those inside other blocks too."""
    is_container = isinstance(module, _CONTAINERS)
    # A child counts once for each of its names.
    counts = Counter(type(child) for child in module._modules.values()) if is_container else Counter()
    for name, child in _children(module):
        is_repeated = _is_block(child) and counts[type(child)] > 1
        if is_repeated:
            yield f"{prefix}{name}", child
        if nested or not is_repeated:
            yield from _repeated(child, f"{prefix}{name}.", nested)


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Those in which Dynamo may compile anything."""
    return (
        (name, child) for name, child in module.named_children() if not torch_internals.is_disabled_for_dynamo(child)
    )


def _is_block(module: nn.Module) -> bool:
    return not isinstance(module, _LISTS) and next(module.children(), None) is not None


def _is_of_torch(module: nn.Module) -> bool:
    # A class may have any callable for its forward.
    return str(getattr(type(module).forward, "__module__", "")).partition(".")[0] == "torch"


def _without_compiled(found: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    return {name: module for name, module in found.items() if torch_internals.compiled_call_of(module) is None}


def _instances(module: nn.Module, prefix: str, classes: Sequence[type[nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    for name, child in _children(module):
        if isinstance(child, tuple(classes)):
            yield f"{prefix}{name}", child
        else:
            yield from _instances(child, f"{prefix}{name}.", classes)


def _first_names(found: Iterable[tuple[str, nn.Module]]) -> dict[str, nn.Module]:
    """Each module once, by its first name."""
    names: dict[nn.Module, str] = {}
    for name, module in found:
        names.setdefault(module, name)
    return {name: module for module, name in names.items()}


def _said(classes: RegionClasses) -> str:
    return repr(classes) if isinstance(classes, str) else f"[{', '.join(cls.__name__ for cls in classes)}]"
