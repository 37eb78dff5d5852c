"""The state of a replicated module: plan, reducer, compiled calls and features."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_compile import torch_internals
from ddp_compile.algorithms import AlgorithmConfig, CommAlgorithm, build_algorithm, check_algorithm, refuse_gradients
from ddp_compile.compile.settings import CompileSettings
from ddp_compile.config import ReplicateConfig
from ddp_compile.errors import MissingGradientError, ReplicationError, this_rank, warning_level
from ddp_compile.features.compatibility import Feature, in_force, refuse_if_excluded, refuse_pairs
from ddp_compile.features.delayed_all_reduce import DelayedAllReduce
from ddp_compile.features.optimizer_in_backward import OptimizersInBackward
from ddp_compile.features.regions import CompiledRegions, find_inner, find_regions, region_of_parameters
from ddp_compile.features.replicated_buffers import ReplicatedBuffers
from ddp_compile.features.uneven_inputs import UnevenInputs
from ddp_compile.graph_ops import next_reducer_id, register_receiver
from ddp_compile.plan.builder import PlanBuilder
from ddp_compile.plan.saved_plan import SavedPlan, load_for
from ddp_compile.plan.spec import BucketPlan
from ddp_compile.runtime.algorithms.comm_hook import CommHook
from ddp_compile.runtime.buckets import step_watch
from ddp_compile.runtime.comm import streams
from ddp_compile.runtime.comm.collectives import broadcast_all, verify_modules_agree
from ddp_compile.runtime.desync.model_order import is_agreement_point
from ddp_compile.runtime.desync.monitor import DesyncMonitor, replicating
from ddp_compile.runtime.reducer import Reducer
from ddp_compile.torch_internals import GraphBreaks
from ddp_compile.validation.description import describe_gradients, describe_module
from ddp_compile.validation.replicated_parameters import ReplicatedParameters
from ddp_compile.validation.wrappers import refuse_wrapper_around

if TYPE_CHECKING:
    from ddp_compile.features.measurement import Measurement
    from ddp_compile.report.explanation import Explanation

log = logging.getLogger(__name__)

#: The way from an algorithm that averages parameters to one that sends gradients.
REPLICATE_ANEW = (
    "replicate the model again, model = ddp_compile(model.unwrap(), algorithm=...), and make its optimizers anew"
)


class _OfThread(threading.local):
    names_parameters = False  #: while it lists parameters whose values may be under way


class ReplicateState:
    """The data-parallel half of one module."""

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup,
        config: ReplicateConfig,
        algorithm_config: AlgorithmConfig,
        compile_settings: CompileSettings,
    ) -> None:
        # Loaded with the first module, like Dynamo.
        from ddp_compile.compile.backend import launches_in_backward

        regions = find_regions(module, config.regions)
        self.process_group, self.config, self.compile_settings = process_group, config, compile_settings
        self.model = type(module).__name__
        self.requires_sync = True
        self.normalizes = False  # whether `normalize_by` has ever been called
        self.measurement: Measurement | None = None  # the last one
        self.is_generating = False  # in the module's method ``generate``, whose forwards get longer and longer
        # Whether a forward with gradients is under way; see `naming_parameters` and `await_before_python`.
        self._is_training = self._has_waited = False
        self._of_thread = _OfThread()
        self._was_compiled = self._ran_uncompiled = False  # any forward with gradients; the last one
        # The second counter includes forwards that `prepare_for_backward_of` announces.
        self._num_forwards = self._num_with_gradients = 0
        # A DistributedDataParallel that has called the module but reduces none of its parameters.
        self._ddp_beside: Callable[[], nn.Module | None] = lambda: None
        self._select_parameters(module)
        in_backward = not regions and launches_in_backward(config.split, compile_settings.inner, process_group)
        with replicating(process_group, self.model):
            algorithm = build_algorithm(algorithm_config, process_group)
            gradients = describe_gradients(module, self.reduced, config.reduce_dtype)
            saved = load_for(config.bucket_plan, gradients)
            self._agree(module, algorithm, in_backward, regions, saved)
            self.monitor = DesyncMonitor(process_group, self.device, self.model, config.check_replicas)
            self.buffers = ReplicatedBuffers(module, config, process_group, self.monitor)
            self.optimizers = OptimizersInBackward(self.reduced)
            self.uneven_inputs = UnevenInputs(self)
            refuse_gradients(algorithm, gradients)
            refuse_pairs(in_force(self, algorithm))
            if config.init_sync:
                broadcast_all([*self._all_parameters, *self.buffers.tensors().values()], process_group)
        step_watch.attach(algorithm, self.reduced)
        region_of = region_of_parameters(list(self.reduced), regions)
        self.builder = PlanBuilder(gradients, config.caps_bytes, algorithm.traits.layout, region_of)
        if saved.plan is not None:
            self.builder.use(saved.plan)
        self._compile_calls(module, in_backward, bool(regions))
        self.reducer = Reducer(
            list(self.reduced.values()),
            self.builder,
            process_group,
            config=config,
            algorithm=algorithm,
            monitor=self.monitor,
            requires_sync=lambda: self.requires_sync,
            has_launches=(lambda: self.backend.has_launches) if in_backward else None,
            on_reduced=self.optimizers.step,
            on_plan_sealed=self._warn_without_overlap,
        )
        self.delayed = DelayedAllReduce(config, process_group, self.reducer.normalizer)
        register_receiver(self.backend.reducer_id, self.reducer)
        self.parameters.register()
        self.regions = CompiledRegions(regions, self)

    def _select_parameters(self, module: nn.Module) -> None:
        ignored = self.config.parameters_to_ignore
        self._all_parameters = [p for name, p in module.named_parameters() if name not in ignored]
        self.parameters = ReplicatedParameters(module, ignored)
        delayed = {id(parameter) for parameter in self.config.delayed.named.values()}
        self.reduced: Mapping[str, nn.Parameter] = {
            name: p for name, p in self.parameters.named.items() if id(p) not in delayed
        }
        numbers = set(map(id, self.reduced.values()))
        self.not_reduced = [parameter for parameter in module.parameters() if id(parameter) not in numbers]
        self.device = next(iter(self.reduced.values())).device

    def _agree(
        self, module: nn.Module, algorithm: CommAlgorithm, in_backward: bool, regions: Iterable[str], saved: SavedPlan
    ) -> None:
        """Check that all ranks have the same module and settings, and that no other module reduces these parameters."""
        shared = self.parameters.shared_with_others()
        objection = algorithm.objection(self.reduced)
        description = [
            f"algorithm={algorithm.name}",
            f"objection of the algorithm to the parameters={objection or 'none'}",
            f"parameters that another replicated module reduces={', '.join(shared) or 'none'}",
            f"parameters whose all-reduce is delayed={', '.join(self.config.delayed.named) or 'none'}",
            f"the parameter whose gradient they are delayed until={self.config.delayed.trigger_name or 'none'}",
            f"modules that are compiled by themselves={', '.join(regions) or 'none'}",
            f"saved bucket plan={saved.describe()}",
            *describe_module(module, self.config, in_backward),
        ]
        verify_modules_agree(description, self.process_group, self.device)
        self._refuse_objection(objection)
        if saved.error:
            raise ValueError(f"{this_rank()}: {saved.error}")
        if shared:
            raise ReplicationError(
                f"{this_rank()}: another replicated module already reduces parameters of this module:"
                f" {', '.join(shared)}. Each would average the other's means again. Call ddp_compile once on a module"
                " that contains both, and let its forward choose; or unwrap() the other module first"
            )

    def _compile_calls(self, module: nn.Module, in_backward: bool, by_regions: bool) -> None:
        from ddp_compile.compile.backend import EvaluationBackend, TrainingBackend

        settings, config = self.compile_settings, self.config
        numbers = {id(p): i for i, p in enumerate(self.reduced.values())}
        names = {id(submodule): name for name, submodule in module.named_modules() if name}
        # Gradients that are not sent or not views need not move, and gradients that may be added to must not.
        are_views = config.gradient_as_bucket_view and config.reduce_dtype is None
        moves = config.static_graph and are_views and self.process_group.size() > 1
        self.backend: TrainingBackend = TrainingBackend(
            settings.inner, self.builder, numbers, names, config.split, in_backward, next_reducer_id(), moves
        )
        self._evaluation_backend = EvaluationBackend(settings.inner)
        self.breaks = GraphBreaks()
        inside = None if by_regions else torch_internals.while_alive(self.compile_inside)
        await_parameters = torch_internals.while_alive(self.await_before_python)
        call = torch_internals.traced_call_of(type(module), await_parameters, inside)
        self.backend.root = call
        self._call_eagerly = self._call_training = self._call_evaluation = call
        if by_regions:
            return
        # Two compiled calls, so that a graph made in evaluation is never used for training, nor cut.
        self._call_training = settings.compile(call, self.backend)
        self._call_evaluation = settings.compile(call, self._evaluation_backend)
        weakref.finalize(self, torch_internals.forget_compiled, call)

    def refuse_if_excluded(self, feature: Feature, said: str) -> None:
        """Refuse to switch on a feature that a present feature excludes. ``said`` is its name in the error."""
        refuse_if_excluded(feature, said, in_force(self, self.reducer.algorithm))

    def _refuse_objection(self, objection: str) -> None:
        if objection:
            raise ReplicationError(f"{this_rank()}: {objection}")

    def register_comm_hook(self, hook: CommHook) -> None:
        """See ``ReplicatedModule.register_comm_hook``."""
        present = self.reducer.algorithm
        if not present.gives_way_to_comm_hook:
            self.refuse_if_excluded(Feature.COMM_HOOK, f"the {hook.name}")
        self.reducer.agree_on_algorithm(hook)
        step_watch.detach(present, together=True)
        self.reducer.set_algorithm(hook)

    def set_comm_algorithm(self, config: AlgorithmConfig) -> None:
        """See ``ReplicatedModule.set_comm_algorithm``."""
        check_algorithm(config)
        before, algorithm = self.reducer.algorithm, build_algorithm(config, self.process_group)
        self._refuse_objection(algorithm.objection(self.reduced))
        refuse_gradients(algorithm, self.builder.gradients)
        refuse_pairs(in_force(self, algorithm))
        if algorithm.sends_gradients and not before.sends_gradients and self.process_group.size() > 1:
            raise ReplicationError(
                f"{this_rank()}: under the {before.name} the ranks' optimizers have reached different states, so the"
                f" ranks would drift apart under the {algorithm.name}; {REPLICATE_ANEW}"
            )
        self.reducer.agree_on_algorithm(algorithm, always=True)
        step_watch.detach(before, together=True)
        try:
            step_watch.attach(algorithm, self.reduced)
        except Exception:  # raised on every rank, for example if a rank does not know its node
            step_watch.attach(before, self.reduced)
            raise
        self.reducer.set_algorithm(algorithm)

    def compile_inside(self, module: nn.Module) -> None:
        """After a graph break has left the module's own code to Python, compile the blocks that it calls separately.

        A block that Dynamo still inlines into a graph of the surrounding code stays part of that graph.
        """
        if not self.breaks.note_module():
            return
        regions, alone = find_inner(module)
        self.builder.region_of = region_of_parameters([g.fqn for g in self.builder.gradients], regions)
        for cls in set(map(type, regions.values())):
            torch_internals.leave_call_to_python(cls)
        self.regions.compile(regions)
        self.regions.compile_alone(alone.values(), self.backend, self._evaluation_backend)

    @property
    def plan(self) -> BucketPlan:
        """The sealed plan, or the plan so far."""
        return self.builder.sealed or self.builder.propose()

    def explain(self) -> Explanation:
        from ddp_compile.module.explanation import explain

        return explain(self, self.plan)

    def describe(self) -> str:
        """The settings that are printed with the module."""
        inner = self.compile_settings.inner
        backend = getattr(inner, "compiler_name", inner)
        return f"ddp_compile(split={self.config.split!r}, backend={backend!r}, world_size={self.process_group.size()})"

    def normalize_by(self, count: Any, loss: Any) -> None:
        """See ``ReplicatedModule.normalize_by``."""
        if not self.normalizes:
            self.refuse_if_excluded(Feature.NORMALIZE, "normalize_by()")
            self.normalizes = True
        # Ranks without input left join the message in the backward, after what a forward sends.
        synchronizes = self.requires_sync
        is_last = synchronizes and not self.uneven_inputs.config.enable
        is_sealed, holds_gradients = bool(self.reducer.buckets), self.reducer.holds_gradients
        self.reducer.normalizer.add(count, loss, synchronizes, is_last, is_sealed, holds_gradients)

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self._forward(module, args, kwargs)
        except Exception as error:
            self.monitor.raised(error)
            raise

    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch_internals.is_traced(self._all_parameters[0]):
            return self._call_eagerly(module, *args, **kwargs)  # the ranks exchange nothing
        kind = self._kind_of_forward(module)
        self.monitor.forward_begins(kind)
        self._refuse_wrapper_around(module)
        if not torch.is_grad_enabled():
            is_eager = self.runs_uncompiled or self.evaluates_eagerly
            evaluate = self._call_eagerly if is_eager else self._call_evaluation
            self.await_parameters()
            with self.reducer.algorithm.using_parameters(trains=False):
                outputs = evaluate(module, *args, **kwargs)
            self.monitor.forward_ends(kind)
            return outputs
        self._refuse_distributed_autograd()
        streams.refuse_capture(self.device, "a forward of a replicated module with gradients")
        source = self.uneven_inputs.forward_begins(module, self.requires_sync)
        self._prepare_for_backward(module)
        num_graphs = self.num_graphs
        with self.reducer.algorithm.using_parameters(trains=True):
            outputs = self._call_with_gradients(module, args, kwargs, kind, source)
        self.reducer.forward_returns(self.requires_sync)
        if self.num_graphs != num_graphs:
            # A parameter, for example its dtype, may have changed since the last check.
            self._refuse_changes(module)
        if self.requires_sync:
            self.reducer.await_at_the_end(self.buffers.after_forward())
            self.reducer.search_unused_parameters(outputs)
        # In evaluation mode a forward need not have a backward: no_grad may have been forgotten.
        self.monitor.forward_ends(kind, outputs, trains=module.training, is_local=not self.requires_sync)
        return outputs

    def await_parameters(self) -> None:
        """Return when all parameters are complete."""
        if not self._of_thread.names_parameters:
            self.reducer.algorithm.sharding.await_parameters()

    def await_before_python(self) -> None:
        """Called before Python runs the whole forward: return when all parameters are complete."""
        self._has_waited = True
        self.await_parameters()

    @contextmanager
    def setting(self, attribute: str, value: bool) -> Iterator[None]:
        """Inside, an attribute of this has the value; afterward the one from before."""
        before = getattr(self, attribute)
        setattr(self, attribute, value)
        try:
            yield
        finally:
            setattr(self, attribute, before)

    @contextmanager
    def naming_parameters(self) -> Iterator[None]:
        """Inside, parameters are listed but this thread does not read their values."""
        before, self._of_thread.names_parameters = self._of_thread.names_parameters, True
        try:
            yield
        finally:
            self._of_thread.names_parameters = before

    @property
    def runs_uncompiled(self) -> bool:
        """Whether a call cannot run compiled code now; a checkpoint's recomputation runs what its forward ran."""
        if torch_internals.is_inside_backward():
            return self._ran_uncompiled
        return torch_internals.leaves_calls_to_python()

    @property
    def evaluates_eagerly(self) -> bool:
        """Whether a forward without gradients would run uncompiled now."""
        if self._is_training or torch_internals.is_inside_backward():
            return False  # in a reentrant checkpoint, which must compute the same as training
        wanted = self.config.compile_evaluation
        return self.is_generating if wanted == "auto" else not wanted

    def _call_with_gradients(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], kind: str, source: int
    ) -> Any:
        runs = self.backend.runs = list[bool]()
        is_one_graph = self._has_waited = False
        try:
            # In evaluation mode too, as in DistributedDataParallel: ranks may be in different modes.
            if self.requires_sync:
                self.reducer.await_at_the_end(self.buffers.before_forward(kind, source))
            self._is_training = True
            self._ran_uncompiled = self.runs_uncompiled
            if self._ran_uncompiled:
                return self._call_eagerly(module, *args, **kwargs)
            self._was_compiled = True
            if not module.training:
                self.await_before_python()
                return self._call_evaluation(module, *args, **kwargs)
            outputs = self._call_training(module, *args, **kwargs)
            is_one_graph = runs == [True] and runs is self.backend.runs  # another one after a call inside this one
        except BaseException:  # Ctrl-C too
            self.reducer.forward_raised(self.requires_sync)
            raise
        finally:
            self._is_training = False
            self.reducer.algorithm.sharding.forward_ends(is_one_graph, self._has_waited)
        return outputs

    def _refuse_distributed_autograd(self) -> None:
        if self.requires_sync and torch_internals.inside_distributed_autograd():
            raise ReplicationError(
                f"{this_rank()}: a forward was called inside torch.distributed.autograd.context(), whose backward"
                " leaves its gradients in the context, where they are not averaged. Leave the context and call"
                " loss.backward(), or call the module inside model.no_sync() and average what get_gradients() returns"
                " yourself; DistributedDataParallel averages it"
            )

    def _refuse_wrapper_around(self, module: nn.Module) -> None:
        self._num_forwards += 1
        ddp = torch_internals.active_ddp()
        if ddp is not self._ddp_beside() or is_agreement_point(self._num_forwards):
            with self.naming_parameters():
                refuse_wrapper_around(module, self.parameters.named)
            self._ddp_beside = (lambda: None) if ddp is None else weakref.ref(ddp)

    def _prepare_for_backward(self, module: nn.Module) -> None:
        if self._num_with_gradients == 0:
            refuse_pairs(in_force(self, self.reducer.algorithm))  # optimizers may have been applied since
            self.optimizers.adopt()
        self._num_with_gradients += 1
        if is_agreement_point(self._num_with_gradients):
            self._refuse_changes(module)
        try:
            self.reducer.prepare_for_backward(self.requires_sync)
        except MissingGradientError:
            self._refuse_changes(module)  # a change may be why they are missing
            raise

    def broadcast_buffers(self, before: str) -> None:
        """Give all ranks the same buffers ``before`` something, "validation" for example, but no training forward."""
        self.monitor.forward_begins(before)
        self.reducer.await_at_the_end(self.buffers.before_forward(before, source=0))

    def prepare_for_backward_of(self, module: nn.Module, loss: Any) -> None:
        """Get ready for the backward of a loss as a forward does, if the module was not called for it."""
        self._prepare_for_backward(module)
        if self.requires_sync:
            self.reducer.search_unused_parameters(loss)

    def _refuse_changes(self, module: nn.Module) -> None:
        with self.naming_parameters():
            self.parameters.refuse_changes(module)

    @property
    def num_graphs(self) -> int:
        return len(self.backend.reports) + self._evaluation_backend.num_graphs + self.regions.num_graphs

    def _kind_of_forward(self, module: nn.Module) -> str:
        if not torch.is_grad_enabled():
            return "evaluation forward"
        kind = "training forward" if module.training else "forward with gradients in evaluation mode"
        return kind if self.requires_sync else f"{kind} in no_sync"

    def broadcast_model(self, source: int) -> None:
        """Give every rank the parameters of one rank in the group, and that rank's buffers if buffers are broadcast."""
        self.buffers.refuse_differences()
        broadcast_all([*self._all_parameters, *self.buffers.synchronized()], self.process_group, source)

    def shadow_buffers(self, source: int) -> None:
        """On a rank that has no input left, join the others in synchronizing buffers."""
        kind = "shadow of a forward"
        self.monitor.forward_begins(kind)
        self.reducer.await_at_the_end(self.buffers.before_forward(kind, source))
        self.reducer.await_at_the_end(self.buffers.after_forward())

    def _warn_without_overlap(self, plan: BucketPlan) -> None:
        from ddp_compile.module.explanation import without_overlap

        if self._num_with_gradients:
            warning = without_overlap(self, plan, self._was_compiled)
        elif self.monitor.is_paused:  # inside ``Join``, without any input
            return
        else:
            warning = (
                f"{this_rank()}: the module itself has not been called for training: gradients came through one of its"
                " submodules or methods, or through module.forward. These are not compiled, and no buffers are"
                " broadcast before them; call the module: model(x)"
            )
        if warning is not None:
            log.log(warning_level(self.process_group), "%s", warning)
