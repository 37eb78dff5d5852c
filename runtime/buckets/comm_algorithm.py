"""What the reducer knows of the way in which buckets are reduced, and what that way is told.

Note [Algorithms]
The reducer decides *when* a bucket is launched: all its gradients are there, and it is its turn in plan order, which is
the same on every rank. A `CommAlgorithm` decides *what* is sent then. Nothing else in the runtime asks which algorithm
it has: where the reducer has to act differently, a trait says so. Users write an `AlgorithmConfig`; each replicated
module builds an algorithm of its own from it, since algorithms hold buffers, futures and what ranks owe each other.
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
        payload: What the algorithm communicates: ``"gradients"``, bucket by bucket; or ``"parameters"``, so that
            gradients stay this rank's own, no bucket is launched, and the ranks' parameters differ; or ``"both"``,
            gradients in the iterations in which `CommAlgorithm.sends_gradients` says so.
        prescale: The flat buffer arrives divided by the world size, in the pass that fills it; otherwise it holds this
            rank's sums, and the algorithm divides.
        layout: Of the flat buffers, see `BucketSpec`: ``"ddp"`` where the algorithm looks at a buffer as a whole, so
            that padding would change what it computes.
        replayable: A bucket may be launched twice in one iteration, where a gradient came after the first launch.
            False for what keeps state from launch to launch.
        on_one_rank: Buckets are launched at world size 1 as well.
        takes_sparse: A bucket may be one sparse gradient.
        takes_dtypes: The dtypes that gradients may have; all if None.
        keeps_buckets: The buckets of the first backward stay for good, as the algorithm keeps something for each of
            them; otherwise those of parameters that no graph shows are packed anew behind it.
        takes_shadows: A rank that has no input left may take part with zeros, inside ``Join``. Never where parameters
            are communicated.
        in_step: The ranks come to the same iterations together. False where none waits for another; then nothing else
            may be sent between them in an iteration, such as buffers.

    Raises:
        ValueError: A trait has a value that there is not, or two contradict each other.
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
        """Return when the reduced gradients are in the bucket's flat buffer, or will be before what comes next on the
        current stream.

        It must not start a collective: the reducer waits at another time on each rank.

        Raises:
            RuntimeError: The reduction failed; a ReductionError if there is more to say.
        """

    def result(self) -> list[Tensor]:
        """The reduced flat buffer, for a sparse bucket the reduced tensor; to be asked after `wait`."""


class CommAlgorithm(ABC):
    """One way to reduce the buckets of one module; built by an `AlgorithmConfig`.

    All but `evaluation` and the states are called on every rank in the same order; `launch` and `after_backward` by the
    thread that runs the backward. docs/custom_algorithms.md says when each is called, and what it may rely on.
    """

    #: For people, and compared between the ranks: "gradient all-reduce", "comm hook fp16_compress_hook".
    name: str
    traits: Traits = Traits()
    #: Whether buckets are sent over the process group that the module was given, which other modules may use too.
    shares_process_group: bool = True
    #: Whether ``register_comm_hook`` may put a hook in its place.
    gives_way_to_comm_hook: bool = False

    @property
    def sends_gradients(self) -> bool:
        """Whether the buckets of this iteration are launched; it changes in `after_backward` alone, on every rank.

        To be overridden where the payload is ``"both"``.
        """
        return self.traits.payload == "gradients"

    def objection(self, parameters: Mapping[str, Parameter]) -> str:
        """Why these cannot be reduced, and the way out; empty if they can.

        Asked once, before anything is sent. The ranks compare it, so that all of them raise where one objects.

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
        """Whether, in an iteration in which no bucket is launched, the ranks exchange something else."""
        return not self.sends_gradients and self.traits.in_step

    def attach(self, parameters: Sequence[Parameter]) -> None:  # noqa: B027  # most have nothing to do
        """Called once, when the parameters are equal on all ranks, before anything else.

        And once more behind `detach`, where what was to take its place could not be attached.

        Args:
            parameters: Those that are reduced, in registration order: number ``index`` of a bucket's gradients is the
                one at that place.
        """

    def detach(self, together: bool) -> None:  # noqa: B027  # most have nothing to do
        """Called when another algorithm, or a comm hook, takes its place, or the module is given back.

        Args:
            together: Every rank does so between the same two steps: leave the parameters equal on all of them, and
                nothing under way. False after an error: only let go of what this rank holds.
        """

    def before_forward(self) -> None:  # noqa: B027  # most have nothing to do
        """A forward whose backward is to be reduced begins; inside ``Join`` also on ranks that have no input left.

        Its backward need not follow: there may be several forwards for one backward, and forwards without any.
        """

    def before_local_forward(self) -> None:  # noqa: B027  # most have nothing to do
        """A forward inside ``no_sync`` begins, whose backward is no iteration."""

    def after_backward(self) -> None:  # noqa: B027  # most have nothing to do
        """An iteration ends: every ``.grad`` is what it will be, reduced or this rank's own.

        Inside ``Join`` also on ranks that have no input left, and contribute zeros. Not behind a backward without a
        forward before it that has passed over a bucket, as a parameter there has no gradient yet.
        """

    def evaluation(self) -> AbstractContextManager[None]:
        """What a forward without gradients runs in, and optimizers that step inside of a backward."""
        return nullcontext()

    def before_load(self) -> None:  # noqa: B027  # most have nothing to do
        """``load_state_dict`` of the module is about to write its parameters, maybe on this rank alone.

        Raises:
            ReplicationError: Not now.
        """

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on from here, bit for bit, beside the states of module and optimizer.

        Tensors are copies. Every rank has its own; it is asked for between two steps.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned on this rank.

        Raises:
            ValueError: It belongs to another algorithm, or to other parameters.
        """
        if state:
            raise ValueError(f"the {self.name} has no state, and was given {', '.join(state)}; it is another one's")

    def launch(self, bucket: Bucket, is_last: bool) -> Pending:
        """Start to reduce a bucket; every algorithm has it whose payload is gradients.

        Args:
            bucket: ``bucket.flat`` holds this rank's gradients, dense of shape (n,), or sparse of the parameter's
                shape; it may be written until the result is done. ``bucket.parameters`` and ``bucket.spec`` say whose
                gradients lie where.
            is_last: Whether no bucket follows in this iteration.

        Raises:
            ReductionError: It cannot be started.
        """
        raise NotImplementedError(f"the {self.name} has no launch()")

    def explain(self) -> list[str]:
        """Lines for ``model.explain()``: what happens that the plan does not show."""
        return []

    def drain(self) -> None:  # noqa: B027  # most have nothing to do
        """Return when nothing that was launched will start another collective.

        Called before anything else is sent, and before the reducer waits, which one rank may do between two launches
        and another may not. So an algorithm of several collectives for a bucket calls it at the begin of `launch`.

        Raises:
            ReductionError: What was launched has failed.
        """


class AlgorithmConfig(ABC):
    """What users pass as ``ddp_compile(model, algorithm=...)``: settings alone, frozen and picklable."""

    @abstractmethod
    def build(self, process_group: dist.ProcessGroup) -> CommAlgorithm:
        """A new algorithm for one module, reducing over the ranks of a process group.

        It must not communicate: the ranks have not yet compared whether all of them were given the same algorithm.
        """
