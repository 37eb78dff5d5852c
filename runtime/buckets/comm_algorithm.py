"""The interface between the reducer and the algorithms that communicate.

Note [Algorithms]
The reducer decides *when* a bucket is launched: when all its gradients are there, and it is its turn in plan order,
which is the same on every rank. A `CommAlgorithm` decides *what* is sent then. Nothing else in the runtime asks which
algorithm it is: if the reducer has to act differently, a trait says so. Users write an `AlgorithmConfig`, from which
each replicated module builds an algorithm of its own, since algorithms hold buffers, futures and other state.
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

from ddp_compile.plan.spec import Layout
from ddp_compile.runtime.buckets.sharding import NOT_SHARDED, Sharding

if TYPE_CHECKING:
    from ddp_compile.runtime.buckets.bucket import Bucket


Payload = Literal["gradients", "parameters", "both"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """What the reducer does differently for an algorithm.

    Args:
        payload: ``"gradients"`` are sent, bucket by bucket; or ``"parameters"``, so that gradients stay this rank's
            own, no bucket is launched, and the ranks' parameters differ; or ``"both"``: gradients in the iterations in
            which `CommAlgorithm.sends_gradients` is true.
        prescale: The flat buffer arrives divided by the world size, in the pass that fills it; otherwise it holds this
            rank's sums, and the algorithm divides.
        layout: Of the flat buffers, see `BucketSpec`: ``"ddp"`` if the algorithm looks at a buffer as a whole, so that
            padding would change its results.
        replayable: A bucket may be launched twice in one iteration, if a gradient came after the first launch. False
            for algorithms that keep state from launch to launch.
        on_one_rank: Buckets are launched at world size 1 as well.
        takes_sparse: A bucket may be one sparse gradient.
        takes_dtypes: The dtypes that gradients may have; all if None.
        keeps_buckets: The buckets of the first backward stay for good, as the algorithm keeps something for each of
            them; otherwise those of parameters that no graph shows are packed anew after it.
        takes_shadows: A rank that has no input left may take part with zeros, inside ``Join``. Never where parameters
            are communicated.
        in_step: The ranks come to the same iterations together. If False, no rank waits for another, so nothing else,
            such as buffers, may be sent between them in an iteration.

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

    def __post_init__(self) -> None:
        for name, allowed in (("payload", get_args(Payload)), ("layout", get_args(Layout))):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"Traits({name}={value!r}): pass one of {', '.join(map(repr, allowed))}")
        if self.payload == "gradients" and not self.in_step:
            raise ValueError(
                "Traits(in_step=False) together with payload='gradients': each rank waits for the gradients of all"
                " others in every iteration; say payload='both' or 'parameters'"
            )
        if self.payload == "parameters" and not (self.replayable and self.prescale and self.layout == "padded"):
            raise ValueError(
                "Traits(payload='parameters') together with replayable=False, prescale=False or layout='ddp': these are"
                " about launches of gradient buckets, of which such an algorithm has none; leave them out"
            )


class Pending(Protocol):
    """A reduction under way, as ``torch.distributed.Work``."""

    def wait(self) -> object:
        """Return when the reduced gradients are in the bucket's flat buffer, or will be before later work on the
        current stream.

        It must not start a collective, since the reducer waits at another time on each rank.

        Raises:
            RuntimeError: The reduction failed; a ReductionError if there is more to say.
        """

    def result(self) -> list[Tensor]:
        """The reduced flat buffer, or tensor of a sparse bucket; called after `wait`."""


class CommAlgorithm(ABC):
    """How one module's ranks communicate; built by an `AlgorithmConfig`.

    Every rank calls all methods but `evaluation` and the states in the same order; the thread that runs the backward
    calls `launch` and `after_backward`. docs/custom_algorithms.md says when each is called, and what it may rely on.
    """

    #: For people, and compared between the ranks: "gradient all-reduce", "comm hook fp16_compress_hook".
    name: str
    traits: Traits = Traits()
    #: Whether buckets are sent over the process group that the module was given, which other modules may use too.
    shares_process_group: bool = True
    #: Whether ``register_comm_hook`` may replace it by a hook.
    gives_way_to_comm_hook: bool = False

    @property
    def sends_gradients(self) -> bool:
        """Whether the buckets of this iteration are launched; changes only in `after_backward`, on every rank.

        To be overridden if the payload is ``"both"``.
        """
        return self.traits.payload == "gradients"

    def objection(self, parameters: Mapping[str, Parameter]) -> str:
        """Why these parameters cannot be reduced, and the way out; empty if they can.

        Called once, before anything is sent. The ranks compare it, so that all of them raise if one objects.

        Args:
            parameters: Those that are to be reduced, by name, in registration order.
        """
        return ""

    @property
    def sharding(self) -> Sharding:
        """Who hands gradients over, and waits for parameters that are read."""
        return NOT_SHARDED

    @property
    def meets_others(self) -> bool:
        """Whether the ranks exchange something else than buckets in this iteration."""
        return not self.sends_gradients and self.traits.in_step

    def attach(self, parameters: Sequence[Parameter]) -> None:  # noqa: B027  # most have nothing to do
        """Called once, when the parameters are equal on all ranks, before anything else.

        Called again after `detach` if the algorithm that was to replace it could not be attached.

        Args:
            parameters: Those that are reduced, in registration order: the ``index`` of a bucket's gradient is a place
                in this sequence.
        """

    def detach(self, together: bool) -> None:  # noqa: B027  # most have nothing to do
        """Another algorithm or a comm hook replaces it, or the module is unwrapped.

        Args:
            together: Every rank calls this between the same two steps: leave the parameters equal on all of them, and
                nothing under way. False after an error: only release what this rank holds.
        """

    def before_forward(self, synchronize: bool) -> None:  # noqa: B027  # most have nothing to do
        """A forward with gradients begins; inside ``Join`` also on ranks that have no input left.

        There may be several forwards for one backward, and forwards without any.

        Args:
            synchronize: Whether its backward is to be reduced. False inside ``no_sync``, where a rank may be alone, so
                nothing may be sent.
        """

    def after_forward(self) -> None:  # noqa: B027  # most have nothing to do
        """A forward with gradients has ended, or raised, inside ``no_sync`` too; on the stream on which it ran."""

    def after_backward(self) -> None:  # noqa: B027  # most have nothing to do
        """An iteration ends: every ``.grad`` has its final value, reduced or this rank's own.

        Inside ``Join`` also called on ranks that have no input left, and contribute zeros. Not called if a backward
        without a forward before it skipped a bucket, because a parameter there has no gradient yet.
        """

    def evaluation(self) -> AbstractContextManager[None]:
        """A context for forwards without gradients, and for optimizers that step inside of a backward."""
        return nullcontext()

    def before_load(self) -> None:  # noqa: B027  # most have nothing to do
        """``load_state_dict`` of the module is about to write its parameters, maybe on this rank alone.

        Raises:
            ReplicationError: It may not be called now.
        """

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, needed beside those of module and optimizer to resume from here bit for bit.

        Tensors are copies. Called between two steps; every rank has a state of its own.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state_dict` returned on this rank.

        Raises:
            ValueError: It belongs to another algorithm, or to other parameters.
        """
        if state:
            raise ValueError(f"the {self.name} has no state, and was given {', '.join(state)}; it is another one's")

    def launch(self, bucket: Bucket, is_last: bool) -> Pending:
        """Start to reduce a bucket; to be overridden unless the payload is ``"parameters"``.

        Args:
            bucket: ``bucket.flat`` holds this rank's gradients, dense of shape (n,), or sparse of the parameter's
                shape; it may be written until the reduction is done. ``bucket.parameters`` and ``bucket.spec`` say
                whose gradients lie where.
            is_last: Whether no bucket follows in this iteration.

        Raises:
            ReductionError: It cannot be started.
        """
        raise NotImplementedError(f"the {self.name} has no launch()")

    def drain(self) -> None:  # noqa: B027  # most have nothing to do
        """Return when no launched reduction will start another collective.

        Called before anything else is sent, and before the reducer waits, which one rank may do between two launches
        and another may not. So an algorithm of several collectives for a bucket calls it at the start of `launch`.

        Raises:
            ReductionError: A launched reduction has failed.
        """


class AlgorithmConfig(ABC):
    """Settings that users pass as ``ddp_compile(model, algorithm=...)``; frozen and picklable."""

    @abstractmethod
    def build(self, process_group: dist.ProcessGroup) -> CommAlgorithm:
        """A new algorithm for one module, over the ranks of a process group.

        It must not communicate: the ranks have not yet compared whether all were given the same algorithm.
        """
