"""``ddp_compile(module)``: the module itself becomes data parallel and compiled, in place."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from ddp_compile.backend import FrameReport, TrainingBackend, buckets_without_cut
from ddp_compile.bucket_plan import BucketPlan, GradientSpec, PlanBuilder, device_labels
from ddp_compile.compile_settings import CompileSettings
from ddp_compile.config import ReplicateConfig
from ddp_compile.errors import ReductionError
from ddp_compile.runtime.agreement import broadcast_from_rank_0, verify_parameters_agree
from ddp_compile.runtime.reducer import Reducer, ReducerSettings

log = logging.getLogger(__name__)

_STATE = "_ddp_compile_state"


class ReplicateState:
    """What a replicated module carries beside its own attributes: plan, reducer and compiled calls.

    Args:
        module: The module that is being replicated.
        process_group: The ranks to average over.
        config: Settings of the replication.
        compile_settings: Settings of the compilation.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup,
        config: ReplicateConfig,
        compile_settings: CompileSettings,
    ) -> None:
        named = reduced_parameters(module, config.parameters_to_ignore)
        parameters = list(named.values())
        self.process_group = process_group
        self.config = config
        self.requires_sync = True
        gradients = describe_gradients(module, named)
        verify_parameters_agree(gradients, [p.shape for p in parameters], process_group, parameters[0].device)
        self.builder = PlanBuilder(gradients, config.caps_bytes)
        self.buffers = [b for name, b in module.named_buffers() if name not in config.parameters_to_ignore]
        if config.init_sync:
            ignored = config.parameters_to_ignore
            all_parameters = [p for name, p in module.named_parameters() if name not in ignored]
            broadcast_from_rank_0([*all_parameters, *self.buffers], process_group)
        self.backend = TrainingBackend(
            compile_settings.inner, self.builder, {id(p): i for i, p in enumerate(parameters)}, config.split
        )
        self._inner = compile_settings.inner
        self._num_evaluation_graphs = 0
        # Two compiled calls, so that a graph made in evaluation is never taken for training, nor cut.
        self._call_training = compile_settings.compile(self.backend)
        self._call_evaluation = compile_settings.compile(self._compile_for_evaluation)
        settings = ReducerSettings(
            gradient_as_bucket_view=config.gradient_as_bucket_view, on_plan_sealed=self._warn_without_overlap
        )
        self.reducer = Reducer(parameters, self.builder, process_group, settings)

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One forward of the module."""
        if torch.is_grad_enabled():
            self.reducer.prepare_for_backward(self.requires_sync)
            if self.requires_sync and self.config.broadcast_buffers:
                self._broadcast_buffers(module)
            if module.training:
                return self._call_training(module, *args, **kwargs)
        return self._call_evaluation(module, *args, **kwargs)

    def _compile_for_evaluation(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self._num_evaluation_graphs += 1
        return self._inner(gm, example_inputs)

    def _broadcast_buffers(self, module: nn.Module) -> None:
        ignored = self.config.parameters_to_ignore
        # Modules may replace a buffer by another tensor, so they are looked up each time.
        self.buffers = [b for name, b in module.named_buffers() if name not in ignored] if self.buffers else []
        try:
            broadcast_from_rank_0(self.buffers, self.process_group)
        except RuntimeError as error:
            raise ReductionError(
                f"rank {self.process_group.rank()}: the broadcast of {len(self.buffers)} buffers from rank 0 before the"
                " forward failed. Another rank has raised, exited, or not called the model; look for its error."
                f" ({error})"
            ) from error

    def _warn_without_overlap(self, plan: BucketPlan) -> None:
        reports = self.backend.reports
        if not reports and not self._num_evaluation_graphs:
            log.warning(
                "rank %d: nothing was compiled: Dynamo made no graph of the module, so it runs eagerly."
                ' TORCH_LOGS="graph_breaks,recompiles" says why',
                self.process_group.rank(),
            )
            return
        if self.config.split == "none" or not _needs_overlap(self.process_group):
            return
        whole = buckets_without_cut(reports)
        caps_in_plan = plan.num_bytes / self.config.caps_bytes[-1]
        if whole or (caps_in_plan > 2 and (len(plan.buckets) == 1 or not reports)):
            reasons = "; ".join(f"{d.node}: {d.reason}" for report in whole for d in report.declined)
            if not reports:
                reasons = "graphs made in evaluation mode are not cut; call model.train()"
            log.warning(
                "rank %d: %.1f MiB of gradients become ready all at once, so their communication is not hidden behind"
                " the backward: %s",
                self.process_group.rank(),
                plan.num_bytes / 2**20,
                reasons or "they are one gradient",
            )


class ReplicatedModule(nn.Module):
    """What ``ddp_compile`` adds to a module's class. Do not make one yourself: call ``ddp_compile(module)``."""

    @torch.compiler.disable(reason="ddp_compile arms its reducer before the compiled call")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _state_of(self).call(self, args, kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: backwards of forwards made inside are not reduced.

        The first backward of a forward made outside reduces everything accumulated until then.
        """
        state = _state_of(self)
        before, state.requires_sync = state.requires_sync, False
        try:
            yield
        finally:
            state.requires_sync = before

    @property
    def bucket_plan(self) -> BucketPlan:
        """The plan the module reduces by; until the first synchronised backward has sealed it, the plan so far."""
        state = _state_of(self)
        return state.builder.sealed or state.builder.propose()

    def explain(self) -> str:
        """The bucket table, and for each compiled graph how it was cut and which cuts were declined."""
        state = _state_of(self)
        return "\n".join([self.bucket_plan.format_table(), *map(_format_report, state.backend.reports)])

    def unwrap(self) -> nn.Module:
        """Make the module what it was before ``ddp_compile``, and return it.

        Parameters and gradients keep their values; nothing is reduced or compiled any more.
        """
        _state_of(self).reducer.detach()
        delattr(self, _STATE)
        self.__class__ = type(self).__mro__[2]
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As ``nn.Module.load_state_dict``; the prefixes of DistributedDataParallel and torch.compile are taken off.

        Raises:
            ValueError: ``assign=True``, which would replace the parameters that are being reduced.
        """
        if assign:
            raise ValueError(
                "load_state_dict(assign=True) would put new parameters in the place of those ddp_compile reduces;"
                " load before ddp_compile(module), or with assign=False"
            )
        return super().load_state_dict(_without_wrapper_prefixes(state_dict, self), strict=strict)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        plain = copy.deepcopy(_plain_shell(self), memo)
        memo[id(self)] = plain
        return plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The reduction of later protocols names the class of the object at hand, which is not the plain one.
        return _plain_shell(self).__reduce_ex__(1)


def _needs_overlap(process_group: dist.ProcessGroup) -> bool:
    return process_group.size() > 1


def _format_report(report: FrameReport) -> str:
    lines = [f"frame {report.frame}: {report.num_buckets} buckets, {report.num_partitions} partitions"]
    return "\n".join([*lines, *(f"  at {declined.node}: {declined.reason}" for declined in report.declined)])


def _state_of(module: nn.Module) -> ReplicateState:
    return module.__dict__[_STATE]


@functools.cache
def _replicated_class(cls: Any) -> type[nn.Module]:
    # Libraries read these names off the class, and look modules up by them.
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (ReplicatedModule, cls), names)


def _plain_shell(module: nn.Module) -> nn.Module:
    """A module of the original class with the same attributes, parameters and submodules, but nothing of ours."""
    shell: nn.Module = object.__new__(type(module).__mro__[2])
    shell.__dict__.update({name: value for name, value in module.__dict__.items() if name != _STATE})
    return shell


def _without_wrapper_prefixes(state_dict: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    prefixes = [prefix for prefix in ("module", "_orig_mod") if prefix not in module._modules]
    stripped = {}
    for key, value in state_dict.items():
        while any(key.startswith(f"{prefix}.") for prefix in prefixes):
            key = key.partition(".")[2]
        stripped[key] = value
    return stripped


def reduced_parameters(module: nn.Module, ignored: Container[str]) -> dict[str, nn.Parameter]:
    """The parameters that are averaged over ranks, by fully qualified name; a tied one under its first name only."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad and name not in ignored}


def describe_gradients(module: nn.Module, named: Mapping[str, nn.Parameter]) -> list[GradientSpec]:
    """What the plan needs to know of each parameter, in registration order."""
    labels = device_labels(parameter.device for parameter in named.values())
    sparse = {
        id(layer.weight)
        for layer in module.modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
    }
    return [
        GradientSpec(i, fqn, p.numel(), str(p.dtype).removeprefix("torch."), labels[p.device], id(p) in sparse)
        for i, (fqn, p) in enumerate(named.items())
    ]


def replicate(
    module: nn.Module, process_group: dist.ProcessGroup, config: ReplicateConfig, compile_settings: CompileSettings
) -> nn.Module:
    """Swap the module's class for one with our methods and give it its state."""
    state = ReplicateState(module, process_group, config, compile_settings)
    cls: Any = type(module)
    module.__class__ = _replicated_class(cls)
    module.__dict__[_STATE] = state
    return module
