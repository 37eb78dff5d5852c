"""The interface between the reducer and the algorithms that communicate.

Note [Algorithms]
The reducer decides *when* a bucket is launched: as soon as all its gradients are there and it is its turn in plan
order, which is the same on every rank. A `CommAlgorithm` decides *what* is sent. Nothing else in the runtime checks
which algorithm it is: if the reducer has to act differently, a trait says so. Algorithms hold buffers, futures and
other state. So users pass an `AlgorithmConfig`, from which each replicated module builds its own algorithm.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp_compile.plan.spec import Layout
from ddp_compile.runtime.buckets.sharding import NOT_SHARDED, Sharding

if TYPE_CHECKING:
    from ddp_compile.runtime.buckets.bucket import Bucket
    from ddp_compile.runtime.buckets.step_watch import StepWatch


Payload = Literal["gradients", "parameters", "both"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """What the reducer does differently for an algorithm.

    Args:
        payload: ``"gradients"``: gradients are sent, bucket by bucket. ``"parameters"``: parameters are sent, each rank
            keeps its own gradients, no bucket is launched, and parameters may differ between ranks. ``"both"``:
            gradients are sent in iterations in which `CommAlgorithm.sends_gradients` is true.
        prescale: The pass that fills the flat buffer divides by the world size. Otherwise the algorithm has to divide.
        layout: The layout of flat buffers, see `BucketSpec`. ``"ddp"`` has no padding, for algorithms that look at a
            buffer as a whole.
        replayable: A bucket may be launched again in the same iteration if a gradient arrives after its launch. Set it
            to False if the algorithm keeps state from launch to launch.
        on_one_rank: Buckets are launched at world size 1 as well.
        takes_sparse: A bucket may be one sparse gradient.
        takes_dtypes: The dtypes that gradients may have; all if None.
        keeps_buckets: The algorithm keeps something for each bucket, so none is packed again after the first
            backward. If False, those of parameters that no graph shows are.
        takes_shadows: A rank that has no input left may take part with zeros, inside ``Join``. Never where parameters
            are communicated.
        in_step: The ranks come to the same iterations together. If False, no rank waits for another, so nothing else,
            such as buffers, may be sent between them in an iteration.
        beyond_group: Gradients are also reduced with ranks outside of the process group. Those take no part in
            anything else that the group's ranks exchange in an iteration, so features that need that are refused.
        equal_gradients: Gradients have the same bits on every rank, so parameters keep theirs, and ``check_replicas``
            compares them. Never if parameters are communicated, or with ``beyond_group``.

    Raises:
        ValueError: A trait has an unknown value, or two contradict each other.
    """

    payload: Payload = "gradients"
    prescale: bool = True
    layout: Layout = "padded"
    replayable: bool = True
    on_one_rank: bool = False
    takes_sparse: bool = True
    takes_dtypes: tuple[torch.dtype, ...] | None = None
    keeps_buckets: bool = False
    takes_shadows: bool = True
    in_step: bool = True
    beyond_group: bool = False
    equal_gradients: bool = True

    @property
    def has_equal_replicas(self) -> bool:
        """Whether parameters have the same bits on every rank before each synchronized forward."""
        return self.equal_gradients and self.payload == "gradients" and not self.beyond_group

    def __post_init__(self) -> None:
        for name, allowed in (("payload", get_args(Payload)), ("layout", get_args(Layout))):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"Traits({name}={value!r}): pass one of {', '.join(map(repr, allowed))}")
        if self.payload == "gradients" and not self.in_step:
            raise ValueError(
                "Traits(in_step=False) does not work with payload='gradients', since each rank waits for the gradients"
                " of all others in every iteration; pass payload='both' or 'parameters'"
            )
        if self.payload == "parameters" and not (self.replayable and self.prescale and self.layout == "padded"):
            raise ValueError(
                "Traits(payload='parameters') does not work with replayable=False, prescale=False or layout='ddp',"
                " since these describe how gradient buckets are launched, and such an algorithm launches none; leave"
                " them out"
            )


class Pending(Protocol):
    """A reduction under way: a ``torch.distributed.Work``, a `Transfer`, or an object of your own.

    If it has an attribute ``works``, a list of works and futures that are done when it is, ``model.measure()`` notes
    when that was, as it does for a work.
    """

    def wait(self) -> object:
        """Return when the reduced gradients are in the bucket's flat buffer, or will be before later work on the
        current stream.

        It must not start a collective, since each rank calls it at a different time.

        Raises:
            RuntimeError: The reduction failed. Raise a ReductionError to say more.
        """

    def result(self) -> list[Tensor]:
        """The reduced flat buffer, or tensor of a sparse bucket; called after `wait`."""


def device_of(parameters: Mapping[str, Parameter]) -> torch.device:
    """The device of the first parameter, with which the ranks can send messages."""
    return next(iter(parameters.values())).device


class CommAlgorithm(ABC):
    """How one module's ranks communicate; built by an `AlgorithmConfig`.

    Every rank calls the methods in the same order, except for `using_parameters` and the states. The thread that runs
    the backward calls `launch` and `after_backward`. docs/algorithms.md says when each method is called and what
    it may rely on.
    """

    #: Appears in errors, and is compared between the ranks: "gradient all-reduce", "comm hook fp16_compress_hook".
    name: str
    traits: Traits = Traits()
    #: Whether buckets are sent over the module's own process group, which other modules may share.
    shares_process_group: bool = True
    #: Whether ``register_comm_hook`` may replace it by a hook.
    gives_way_to_comm_hook: bool = False
    #: Calls `after_step`; the reducer's.
    step_watch: StepWatch | None = None
    #: How gradients are handed over, and how reads of parameters wait.
    sharding: Sharding = NOT_SHARDED

    @property
    def sends_gradients(self) -> bool:
        """Whether buckets are launched in this iteration. May change only in `after_backward`, on every rank.

        Override it if the payload is ``"both"``.
        """
        return self.traits.payload == "gradients"

    def objection(self, parameters: Mapping[str, Parameter]) -> str:
        """Why these parameters cannot be reduced, and the way out; empty if they can be.

        Called once, before anything is sent. The ranks compare the result, so all of them raise if one objects.

        Args:
            parameters: The parameters to reduce, by name, in registration order.
        """
        return ""

    @property
    def meets_others(self) -> bool:
        """Whether the ranks exchange anything besides buckets in this iteration, and `after_step` is called after it.

        Override it if they do so in some iterations only. Read before `after_backward`.
        """
        return not self.sends_gradients and self.traits.in_step

    def attach(self, parameters: Mapping[str, Parameter]) -> None:  # noqa: B027  # most have nothing to do
        """Called once, before all methods below, with parameters that are equal on all ranks.

        Called again after `detach` if its replacement could not be attached.

        Args:
            parameters: The parameters to reduce, by name, in registration order. The ``index`` of a bucket's gradient
                is its position here.
        """

    def detach(self, together: bool) -> None:  # noqa: B027  # most have nothing to do
        """Called when another algorithm or a comm hook replaces it, or when the module is unwrapped.

        Args:
            together: Every rank calls this between the same two steps. Leave equal parameters on all ranks, and nothing
                under way. False after an error: only release this rank's resources.
        """

    def before_forward(self, synchronize: bool) -> None:  # noqa: B027  # most have nothing to do
        """Called when a forward with gradients begins; inside ``Join`` also on ranks that have no input left.

        There may be several forwards for one backward, and forwards without a backward.

        Args:
            synchronize: Whether its backward is to be reduced. False inside ``no_sync``: other ranks may not be there,
                so send nothing.
        """

    def after_backward(self) -> None:  # noqa: B027  # most have nothing to do
        """Called when an iteration ends: every ``.grad`` has its final value, reduced or this rank's own.

        Inside ``Join`` also called on ranks that have no input left and contribute zeros. Not called if a backward
        without a forward before it skipped a bucket because one of its parameters has no gradient yet.
        """

    def after_step(self, optimizers: Sequence[Optimizer]) -> None:  # noqa: B027  # most have nothing to do
        """Called once for each iteration in which `meets_others` was true, when its step is done or skipped.

        Called as soon as every parameter with a gradient was stepped. If that does not happen, as when a GradScaler
        skips the step, it is called before anything else of this module may be sent: when the next forward begins, or
        in `state_dict`. Every rank calls it, so it may communicate, and write parameters. Not called in a forward
        inside ``no_sync`` as long as there are gradients that could still be stepped.

        Args:
            optimizers: Those that have stepped any of the parameters since the backward. Empty if the step was skipped.
        """

    def using_parameters(self, trains: bool) -> AbstractContextManager[None]:
        """A context for every forward, also inside ``no_sync``, and for optimizers that step inside a backward.

        Args:
            trains: Whether this is a forward with gradients, whose backward may still use the parameters afterward.
        """
        return nullcontext()

    def before_load(self) -> None:  # noqa: B027  # most have nothing to do
        """Called before ``load_state_dict`` of the module writes its parameters, perhaps on this rank alone.

        Raises:
            ReplicationError: Parameters must not be loaded now.
        """

    def state_dict(self) -> dict[str, Any]:
        """This rank's state. With those of the module and the optimizer, training resumes bit for bit.

        Tensors are copies. Called between two steps. Each rank has its own state. If `after_step` is overridden, begin
        with ``super().state_dict()``, which makes the call that is due after a skipped step.
        """
        if self.step_watch is not None:
            self.step_watch.call_if_due()
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state_dict` returned on this rank. End with ``super().load_state_dict({})``.

        Raises:
            ValueError: It belongs to another algorithm, or to other parameters.
        """
        if state:
            raise ValueError(f"the {self.name} has no state, but was given another algorithm's: {', '.join(state)}")
        if self.step_watch is not None:
            self.step_watch.forget()

    def launch(self, bucket: Bucket, is_last: bool) -> Pending:
        """Start reducing a bucket. Override it unless the payload is ``"parameters"``.

        Args:
            bucket: ``bucket.flat`` holds this rank's gradients, dense of shape (n,), or sparse of the parameter's
                shape. It may be written until the reduction is done. ``bucket.parameters`` and ``bucket.spec`` say
                which part belongs to which parameter.
            is_last: Whether no bucket follows in this iteration.

        Raises:
            ReductionError: It cannot be started.
        """
        raise NotImplementedError(f"the {self.name} has no launch()")

    def drain(self) -> None:  # noqa: B027  # most have nothing to do
        """Return when no launched reduction will start further collectives.

        Called before anything else is sent and before the reducer waits. One rank may do that between two launches and
        another may not. So an algorithm with several collectives for a bucket calls it at the start of `launch`.

        Raises:
            ReductionError: A launched reduction has failed.
        """


class AlgorithmConfig(ABC):
    """Settings that users pass as ``ddp_compile(model, algorithm=...)``; frozen and picklable."""

    @abstractmethod
    def build(self, process_group: dist.ProcessGroup) -> CommAlgorithm:
        """A new algorithm for one module, over the ranks of a process group.

        It must not communicate, since the ranks have not yet compared their algorithms.
        """
