"""Gradients are reduced to shards, and parameters are gathered from them behind the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_

from ddp_compile import torch_internals
from ddp_compile.errors import DDPCompileError, ReductionError, ReplicationError, this_rank
from ddp_compile.runtime.algorithms.flat_parameters import FLOATING
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.comm_algorithm import CommAlgorithm, Pending, Traits
from ddp_compile.runtime.buckets.local_tensors import has_dtensors
from ddp_compile.runtime.comm import error_messages, streams
from ddp_compile.runtime.comm.process_groups import group_of
from ddp_compile.runtime.sharded.gathered_parameters import GatheredParameters
from ddp_compile.runtime.sharded.shard_transfers import ReduceScatter, ShardTransfers
from ddp_compile.runtime.sharded.sharded_bucket import Piece, ShardedBucket
from ddp_compile.runtime.sharded.sharded_gradients import HiddenGradients, norm_over_ranks


class StepsPieces(Protocol):
    """The optimizer's side."""

    def attach(self) -> None:
        """Tell of steps from now on."""

    def before_sharding(self) -> None:
        """Refuse, on every rank, what cannot be sharded any more; before parameters are moved into flat buffers."""

    def shard(self, buckets: Sequence[ShardedBucket]) -> None:
        """Step the pieces from now on; called once, at the end of the first backward."""

    def detach(self, together: bool) -> None:
        """Step whole parameters again; where not all ranks are there, do nothing any more."""


class ShardedAlgorithm(CommAlgorithm):
    """Each bucket is reduced to one shard for each rank, whose pieces of parameters the rank's optimizer steps.

    Behind the step of a bucket it is gathered, and waited for where it is read, see `GatheredParameters`.

    Args:
        process_group: All ranks.
        optimizer: What steps the pieces.
        names: Of the parameters that are reduced.
        master_weights: Whether pieces of low precision are stepped in float32.

    Sources: Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054), its first stage; the gathers behind the next forward are
    those of Megatron-core's distributed optimizer.
    """

    name = "sharded optimizer"
    traits = Traits(
        on_one_rank=True,
        takes_sparse=False,
        takes_dtypes=FLOATING,
        keeps_buckets=True,
        takes_shadows=False,
        gathers_parameters=True,
    )

    def __init__(
        self, process_group: dist.ProcessGroup, optimizer: StepsPieces, names: Sequence[str], master_weights: bool
    ) -> None:
        self._process_group = process_group
        self._optimizer = optimizer
        self._names = tuple(names)
        self._master_weights = master_weights
        self._rank = process_group.rank()
        #: Parameters without elements, of each dtype: by them a GradScaler finds gradients on every rank, and asks all.
        self.witnesses: list[Piece] = []
        self._stepped_versions: dict[int, int] = {}  # of the pieces' gradients behind a step, until new ones come
        self._stepped: set[int] = set()  # numbers of the parameters that the step under way may change
        self._num_steps = 0

    def objection(self, parameters: Mapping[str, Parameter]) -> str:
        """See `CommAlgorithm.objection`."""
        if has_dtensors(list(parameters.values())):
            return (
                "a sharded optimizer takes no DTensors, of which a rank has a part already; use fully_shard for these"
                " modules, or leave the optimizer as it is"
            )
        return ""

    def attach(self, parameters: Sequence[Parameter]) -> None:
        """Take process groups of its own, for gathers and for gradients; hear of the optimizer from now on."""
        ranks = dist.get_process_group_ranks(self._process_group)
        device = parameters[0].device
        gathers = gradients = self._process_group
        if len(ranks) > 1:
            gathers, gradients = (group_of(ranks, self._process_group, device) for _ in range(2))
            self.shares_process_group = False
        self._parameters = list(parameters)
        self._hidden = HiddenGradients(self._parameters, self._names, self._rank)
        self.transfers = ShardTransfers(gathers, gradients, device)
        self.gathered = GatheredParameters(self._parameters, self._rank, self._failed)
        self._optimizer.attach()

    def detach(self, together: bool) -> None:
        """Give the parameters memory of their own, and the optimizer its whole states; see `CommAlgorithm.detach`."""
        gradients: dict[int, Tensor] = {}
        try:
            self.await_parameters()
            if together and self.buckets:
                gradients = self._whole_gradients("giving back what is sharded")
        except BaseException:
            self._optimizer.detach(together=False)  # the others may be gone
            raise
        self._optimizer.detach(together)
        for bucket in self.buckets:
            bucket.leave()
        self._hidden.replace(gradients)
        self.gathered.buckets = ()

    @property
    def buckets(self) -> Sequence[ShardedBucket]:
        """In plan order; none before the end of the first backward."""
        return self.gathered.buckets

    # Gradients.

    def launch(self, bucket: Bucket, is_last: bool) -> Pending:
        """See `CommAlgorithm.launch`."""
        return self.transfers.reduce_scatter(bucket.flat)

    def hand_over(self, buckets: Sequence[Bucket], launched: Sequence[Bucket], untouched: Set[int]) -> None:
        """Let ``.grad`` of each piece be its part of the mean, or have it added, and hide those of the parameters."""
        if not self.buckets:
            self._shard(buckets)
        shards = {bucket.param_indices: _shard_of(bucket) for bucket in launched}
        touched = [
            (piece, shards[bucket.param_indices])
            for bucket in self.buckets
            if bucket.param_indices in shards
            for piece in bucket.pieces
            if piece.index not in untouched
        ]
        self._refuse_gradients_of_before(piece for piece, _ in touched)
        for piece, shard in touched:
            piece.accumulate(shard, self._unscaled)
        for witness in self.witnesses:
            witness.zero(set_to_none=True)
            witness.accumulate(witness.stepped.detach(), self._unscaled)
        self._hidden.hide(index for bucket in launched for index in bucket.param_indices if index not in untouched)
        self._stepped_versions = {}

    def before_backward(self) -> None:
        """See `CommAlgorithm.before_backward`."""
        self._adopt_edits_of_gradients()
        self._hidden.before_backward()

    def _shard(self, buckets: Sequence[Bucket]) -> None:
        self._optimizer.before_sharding()
        shared = self.transfers, self._master_weights
        self.gathered.buckets = tuple(ShardedBucket(bucket, *shared) for bucket in buckets)
        dtypes = sorted({bucket.stepped_dtype for bucket in self.buckets}, key=str)
        device = self._parameters[0].device
        self.witnesses = [Piece(-1, 0, 0, 0, Parameter(torch.empty(0, dtype=dtype, device=device))) for dtype in dtypes]
        self._optimizer.shard(self.buckets)

    def _unscaled(self, found_non_finite: Tensor) -> None:
        """A GradScaler has looked at gradients: they are to be stepped, or left out by every rank."""
        with self.on_every_rank("GradScaler's question whether gradients are finite"):
            self.transfers.any_rank(found_non_finite)
        self._note_versions()

    def _note_versions(self) -> None:
        gradients = {piece.index: piece.stepped.grad for piece in self._pieces()}
        self._stepped_versions = {index: g._version for index, g in gradients.items() if g is not None}

    def _refuse_gradients_of_before(self, pieces: Iterable[Piece]) -> None:
        """Of gradients that are still what they were behind a step, nobody can say whether the user has zeroed them."""
        for piece in pieces if self._stepped_versions else ():
            gradient, version = piece.stepped.grad, self._stepped_versions.get(piece.index)
            if gradient is not None and gradient._version == version:
                raise ReplicationError(
                    f"{this_rank()}: a backward ends and the gradient of {self._names[piece.index]} of before the"
                    " last step, taken or skipped, has not been zeroed. Call optimizer.zero_grad() or model.zero_grad()"
                    " for each step"
                )

    def zero_gradients(self, set_to_none: bool = True) -> None:
        """What ``zero_grad`` of model and optimizer do: pieces' gradients, and what has not been reduced."""
        for piece in self._pieces():
            piece.zero(set_to_none)
        if set_to_none:
            self._hidden.forget()
        self._hidden.zero_others(set_to_none)

    def _adopt_edits_of_gradients(self) -> None:
        """Where a user has set ``.grad`` of a parameter to None, or zeroed it, so are its pieces'."""
        gone, zeroed = self._hidden.adopt_edits()
        for piece in self._pieces() if gone or zeroed else ():
            if piece.index in gone or piece.index in zeroed:
                piece.zero(set_to_none=piece.index in gone)

    def _whole_gradients(self, what: str) -> dict[int, Tensor]:
        gradients: dict[int, Tensor] = {}
        with self.on_every_rank(what):
            for bucket in self.buckets:
                gradients |= bucket.whole_gradients()
        return gradients

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """See ``ReplicatedModule.clip_grad_norm_``."""
        self._before_gradients_are_read("model.clip_grad_norm_()")
        pieces = [piece.stepped for piece in self._pieces()]
        with self.on_every_rank("model.clip_grad_norm_()"):
            total = norm_over_ranks(pieces, norm_type, self._parameters, self.transfers)
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(
                f"{this_rank()}: the total norm of order {norm_type} of the gradients is {total.item()}, so they"
                " cannot be clipped; look for what is not finite, or pass error_if_nonfinite=False"
            )
        clip_grads_with_norm_(pieces, max_norm, total)
        return total

    def full_gradients(self) -> dict[str, Tensor]:
        """See ``ReplicatedModule.full_gradients``."""
        self._before_gradients_are_read("model.full_gradients()")
        gradients = self._whole_gradients("model.full_gradients()")
        return {self._names[index]: gradients[index] for index in sorted(gradients)}

    def _before_gradients_are_read(self, what: str) -> None:
        self._adopt_edits_of_gradients()
        self._hidden.refuse_others(what)

    # Steps.

    def step_begins(self) -> None:
        """The optimizer is about to step the pieces."""
        streams.refuse_capture(self.buckets[0].flat.device, "a step of a sharded optimizer")
        self.gathered.refuse_half_a_step()
        self.await_parameters()  # of a step before, without a forward between
        self._before_gradients_are_read("optimizer.step()")
        for bucket in self.buckets:
            bucket.take_edits(self._rank)
        self._stepped = {*self._hidden.reduced} | {p.index for p in self._pieces() if p.stepped.grad is not None}
        self.gathered.step_begins()

    def bucket_is_stepped(self, bucket: ShardedBucket) -> None:
        """Gather a bucket; on every rank in the same order."""
        self.gathered.gather_begins()
        try:
            with torch_internals.profiled_range(f"ddp_compile::bucket_{bucket.spec.index}_gather"):
                bucket.gather(self._stepped, tag=self._num_steps % 2**15)
        except RuntimeError as error:
            raise self._failed(error) from error

    def step_ends(self) -> None:
        """All buckets are being gathered."""
        self.gathered.step_ends()
        self._note_versions()
        self._num_steps += 1

    def _pieces(self) -> Iterator[Piece]:
        return (piece for bucket in self.buckets for piece in bucket.pieces)

    # Parameters are read.

    def await_parameters(self, indices: Sequence[int] | None = None) -> None:
        """Return when parameters are complete, or will be before what comes next on the current stream.

        Args:
            indices: Their numbers; all that there are if None.

        Raises:
            ReductionError: A rank has not come to the same step.
        """
        self.gathered.wait(indices)

    def refuse_step_before_sharding(self) -> None:
        """Raise where the optimizer, which is not sharded yet, would step by gradients that are not reduced.

        Zeros are those of every rank, or others raise: `torch.distributed.checkpoint.state_dict` steps by them to let
        the optimizer make its states.
        """
        if any(p.grad is not None and p.grad.to_dense().any() for p in self._parameters):
            self._hidden.refuse_others("optimizer.step()")

    def before_forward(self) -> None:
        """See `CommAlgorithm.before_forward`."""
        self.gathered.before_forward()
        self._adopt_edits_of_gradients()
        self._hidden.before_forward()

    def before_local_forward(self) -> None:
        """See `CommAlgorithm.before_local_forward`."""
        self.before_forward()

    def after_forward(self, as_one_graph: bool) -> None:
        """See `CommAlgorithm.after_forward`."""
        self._hidden.after_forward()
        self.gathered.after_forward(as_one_graph)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """See `CommAlgorithm.evaluation`."""
        self.await_parameters()
        yield

    def before_load(self) -> None:
        """See `CommAlgorithm.before_load`."""
        self.await_parameters()

    def explain(self) -> list[str]:
        """See `CommAlgorithm.explain`."""
        if not self.buckets:
            return ["the optimizer is sharded at the end of the first backward"]
        own = sum(piece.end - piece.begin for piece in self._pieces())
        total = sum(parameter.numel() for parameter in self._parameters)
        overlaps = self.gathered.overlaps_forward
        when = "part by part" if overlaps else "before each forward, as it is not one compiled graph"
        return [f"this rank steps {own} of {total} elements; gathered parameters are waited for {when}"]

    @contextmanager
    def on_every_rank(self, what: str) -> Iterator[None]:
        """What is inside waits for all ranks.

        Args:
            what: What the user has called.

        Raises:
            ReductionError: One has not come.
            RanksDifferError: One has called something else.
        """
        try:
            self.transfers.agree_on(what)
            yield
        except DDPCompileError:
            raise
        except RuntimeError as error:
            raise error_messages.exchange_failed(f"{what}, to be called on every rank,", error) from error

    def _failed(self, error: RuntimeError) -> ReductionError:
        return error_messages.exchange_failed(f"gather of parameters behind step {self._num_steps}", error)


def _shard_of(bucket: Bucket) -> Tensor:
    """This rank's part of the mean of a bucket."""
    assert isinstance(bucket.iteration.work, ReduceScatter)
    return bucket.iteration.work.shard
