"""The mean over all tokens, or whatever else is counted: ``model.normalize_by``.

Note [One message of counts]
A mean over ranks is not the mean over tokens if ranks have different numbers of them. So each rank says how many its
micro-batches have, and gradients of *summed* losses are divided by the number of all. One all-reduce of a few bytes
adds up the counts. It starts when the last micro-batch's count is known, before any bucket, and ends before the first
flatten, whose kernel multiplies every gradient anyway. On a device with streams the factor stays on the device.

The ranks must agree on whether there is such a message. The first backward exchanges that with the plan. A first call
in a later step waits for the other ranks' calls. From then on every iteration has the message, in which each rank says
whether it has called `add`. If ranks differ, or a rank has counted some micro-batches of a step and not others, every
rank raises. On a device with streams the host reads that at agreement points only; until then the gradients are NaN.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ddp_compile.errors import RanksDifferError, ReplicationError, name_values, this_rank, warning_level
from ddp_compile.runtime.comm import error_messages, streams
from ddp_compile.runtime.comm.collectives import gather_texts
from ddp_compile.runtime.comm.exchange import Exchange
from ddp_compile.runtime.comm.step_records import NoRecords
from ddp_compile.runtime.comm.transfers import all_reduce
from ddp_compile.runtime.desync.model_order import is_agreement_point
from ddp_compile.runtime.desync.monitor import DesyncMonitor

log = logging.getLogger(__name__)

# Places in the message, all of them summed over the ranks.
_COUNT, _LOSS, _NUM_CALLS, _NUM_LOSSES, _NUM_WRONG = range(5)


class Normalizer:
    """The counts of one model's step, and the factor of its gradients.

    ``monitor`` agrees with the other ranks on the first call. ``device`` is that of the model's parameters.
    """

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device, monitor: DesyncMonitor) -> None:
        self._is_agreed = False  # whether every iteration has the message; the same on every rank
        self._group, self._device, self._monitor = process_group, device, monitor
        self._has_streams = streams.has_streams(device)
        self._warned_of_zero = False
        self._totals: Tensor | None = None  # the latest message, once it has been received
        self._latest_factor: float | Tensor | None = None  # of the last step, if its iterations have the message
        self._was_counting = False  # in the last step
        self._had_losses = False  # whether this rank put losses into it
        self._begin_step()

    def _begin_step(self) -> None:
        self._counts: list[float | Tensor] = []
        self._losses: list[Tensor] = []
        self._is_wrong = False  # some micro-batch was not counted
        self._is_counted = self._has_gradients = False  # of this micro-batch
        self._returned: bool | None = None  # whether the forward that has returned was outside ``no_sync``
        self._is_of_returned = False  # whether the count came after it
        self._is_first = True  # whether no backward of the step has come
        self._message: Tensor | None = None  # sent
        self._work: dist.Work | None = None  # until it has been waited for
        self._received: streams.Event | None = None
        self._factor: float | Tensor | None = None
        self._factor_is_ready: streams.Event | None = None

    # The user counts.

    def add(
        self,
        count: Any,
        loss: Any,
        synchronizes: bool,
        is_last: bool,
        is_sealed: bool,
        holds_gradients: Callable[[], bool],
    ) -> None:
        """Count a micro-batch, see ``ReplicatedModule.normalize_by``.

        Args:
            synchronizes: Whether this is outside ``no_sync``.
            is_last: Whether the message can be sent: the backward is to be reduced. If False, the backward sends it.
            is_sealed: Whether the first backward has come.
            holds_gradients: Whether any parameter has a ``.grad``.
        """
        count, loss = self._checked(count), self._checked_loss(loss)
        if self._counts and not self._is_first and not holds_gradients():
            self._begin_step()  # the user has left the step, for example after an error, and dropped its gradients
        self.forward_begins()
        if self._is_counted:
            self._begin_step()
            raise ReplicationError(
                f"{this_rank()}: model.normalize_by() was called twice for one backward. Call it once before each"
                " backward, with the sum of the counts; inside model.no_sync() if the backward's forward is. The counts"
                " of this step are dropped: if its backward was left out after an error, call optimizer.zero_grad() and"
                " begin the step again"
            )
        if bool(self._losses) != (loss is not None) and self._counts:
            raise ReplicationError(
                f"{this_rank()}: model.normalize_by() has got loss= for some micro-batches of a step and not for"
                " others; pass it for all of them, or for none"
            )
        if is_sealed and not self._is_agreed:
            self._monitor.agree_on_normalizing()
            self._is_agreed = True
        self._is_counted, self._is_of_returned = True, self._returned is synchronizes
        self._counts.append(count)
        self._losses += [] if loss is None else [loss]
        # A forward that has not come may raise on this rank alone, which then repeats it.
        if is_last and is_sealed and self._is_of_returned:
            self._send()

    @property
    def mean_loss(self) -> Tensor:
        """See ``ReplicatedModule.mean_loss``."""
        if self._message is not None:
            self._receive(NoRecords())
        if self._totals is None or not self._had_losses or (self.is_counting and self._message is None):
            raise RuntimeError(
                "model.mean_loss is not known: pass the summed loss of each micro-batch, on every rank,"
                " model.normalize_by(count, loss=loss), and read it after the last backward of a step"
            )
        streams.used_here([self._totals])  # the user may read it on a stream of its own
        is_known = (self._totals[_NUM_LOSSES] == self._totals[_NUM_CALLS]) & (self._totals[_COUNT] > 0)
        return torch.where(is_known, self._totals[_LOSS] / self._totals[_COUNT], torch.nan)

    def _checked(self, count: Any) -> float | Tensor:
        if isinstance(count, Tensor):
            if count.shape != () or count.device != self._device:
                raise ValueError(
                    f"{this_rank()}: model.normalize_by(count) has got a tensor of shape {tuple(count.shape)} on"
                    f" {count.device}; pass a number, or a tensor of shape () on {self._device}, such as mask.sum()"
                )
            if self._has_streams:
                return count.detach()  # the host does not read it
            count = count.item()
        if not isinstance(count, Real) or not 0 <= float(count) < math.inf:
            raise ValueError(
                f"{this_rank()}: model.normalize_by({count!r}): pass the number of tokens, or whatever else the loss is"
                " summed over: a number of at least 0, or a tensor of shape ()"
            )
        return float(count)

    def _checked_loss(self, loss: Any) -> Tensor | None:
        if loss is None:
            return None
        if not isinstance(loss, Tensor) or loss.shape != () or loss.device != self._device:
            raise ValueError(
                f"{this_rank()}: model.normalize_by(loss={loss!r}): pass the micro-batch's summed loss, a tensor of"
                f" shape () on {self._device}"
            )
        return loss.detach()

    def explain(self) -> Iterator[str]:
        """Lines for ``model.explain()``."""
        if self._is_agreed:
            yield "model.normalize_by() divides gradients by the counts of all ranks; each step has a message of them"

    # The reducer says what happens.

    @property
    def is_counting(self) -> bool:
        """Whether this rank has counted in this step."""
        return bool(self._counts)

    @property
    def awaits_backward(self) -> bool:
        """Whether this rank has counted a micro-batch whose backward has not come."""
        return self._is_counted and not self._has_gradients

    def agree(self, is_any_counting: bool, is_any_not_counting: bool) -> None:
        """At the first backward, take what the ranks have said; raises a RanksDifferError if only some are counting."""
        if is_any_counting and is_any_not_counting:
            raise self._ranks_differ()
        self._is_agreed = is_any_counting

    def forward_begins(self) -> None:
        """A forward with gradients begins, or a micro-batch is counted: another one, if gradients have come."""
        if self._has_gradients:
            self._is_counted = self._has_gradients = False
            self._returned = None

    def forward_returns(self, synchronizes: bool) -> None:
        """A forward with gradients has returned."""
        self._returned = synchronizes

    def forward_raised(self) -> None:
        """A forward with gradients has raised: if its micro-batch has been counted, forget that."""
        if self._is_counted and not self._is_of_returned:
            self._counts.pop()
            self._losses = self._losses[: len(self._counts)]
            self._is_counted = False

    def gradients_arrive(self, holds_values: Callable[[], bool]) -> None:
        """A backward brings gradients. Called for each gradient of a backward inside ``no_sync``.

        ``holds_values`` tells whether ``.grad`` of a parameter that has not arrived holds more than zeros. Such values
        are from before the step. No count belongs to them, so they raise a ReplicationError.
        """
        if self._has_gradients:
            return
        self._has_gradients = True
        self._is_wrong |= not self._is_counted
        is_first, self._is_first = self._is_first and (self.is_counting or self._was_counting), False
        if is_first and (not self._has_streams or self._is_agreement_point) and holds_values():
            raise ReplicationError(
                f"{this_rank()}: gradients of an earlier step, or of a backward that no count belongs to, were not"
                " zeroed, so they cannot be divided by this step's count. Call optimizer.zero_grad() before the first"
                " backward of a step; accumulate inside model.no_sync()"
            )

    def backward_begins(self, is_shadow: bool) -> None:
        """A backward that is reduced has begun: all counts of the step are known."""
        if self._is_agreed and self._message is None:
            self._send(is_shadow)

    def factor(self, divisor: float, num_averaged: int, records: NoRecords) -> float | Tensor:
        """The factor of the gradients on their way into a flat buffer.

        It is a number, or on a device with streams a float64 tensor of shape (), complete on the current stream. Raises
        a RanksDifferError on every rank if one of them has not counted as it should, and a ReductionError if the
        message failed or timed out.

        Args:
            divisor: What gradients are divided by if nothing is counted.
            num_averaged: By how many ranks the algorithm will divide afterward; 1 if it adds up.
        """
        if not self._is_agreed:
            return num_averaged / divisor
        if self._factor is None:
            self._receive(records)
            self._factor = self._computed_factor(divisor)
            self._factor_is_ready = streams.record(self._device)
        elif self._factor_is_ready is not None:
            self._factor_is_ready.wait()
        return self._factor * num_averaged

    def normalize_alone(self, parameters: Sequence[Parameter], records: NoRecords) -> None:
        """Without other ranks, nothing is flattened: divide every ``.grad``."""
        if self._is_agreed and (gradients := [p.grad for p in parameters if p.grad is not None]):
            factor = self.factor(1, 1, records)
            with torch.no_grad():
                for gradient in gradients:
                    gradient.mul_(factor)

    def factor_of_delayed(self, what: str) -> float | Tensor:
        """The factor of ``what``, gradients outside of buckets; raises a ReplicationError if the count is not known."""
        if self._message is None and self.is_counting:
            raise ReplicationError(
                f"{this_rank()}: {what} would be divided before the step's count is known, since the backward is inside"
                " model.no_sync(). With model.normalize_by(), let the gradient of param_to_hook_all_reduce come in the"
                " last backward of a step only"
            )
        if self._message is not None:  # it is finalized by hand
            return self.factor(self._group.size(), 1, NoRecords())
        return 1 / self._group.size() if self._latest_factor is None else self._latest_factor

    def step_ends(self) -> None:
        """The iteration has ended; what follows is the next step."""
        self._latest_factor, self._was_counting = self._factor, self.is_counting
        self._begin_step()

    # The message.

    @property
    def _is_incomplete(self) -> bool:
        """Whether this rank has counted some micro-batches of the step, and not all."""
        return self.is_counting and (self._is_wrong or not self._is_counted)

    @property
    def _is_agreement_point(self) -> bool:
        return is_agreement_point(self._monitor.iteration_number)

    def _send(self, is_shadow: bool = False) -> None:
        called = is_shadow or self.is_counting
        has_losses = is_shadow or bool(self._losses)
        parts = [sum(self._counts), sum(self._losses), float(called), float(has_losses), float(self._is_incomplete)]
        if self._has_streams:
            message = torch.stack([self._on_device(part) for part in parts])
            message[_NUM_WRONG] += ~(message[_COUNT] >= 0)  # NaN too
        else:
            message = torch.tensor([float(part) for part in parts], dtype=torch.float64, device=self._device)
        self._message = message
        if self._group.size() > 1:
            with self._exchange(NoRecords()):
                self._work = all_reduce(message, self._group)

    def _on_device(self, part: float | Tensor) -> Tensor:
        if isinstance(part, Tensor):
            return part.to(torch.float64)
        return torch.full((), part, dtype=torch.float64, device=self._device)

    def _receive(self, records: NoRecords) -> None:
        if self._work is not None:
            with self._exchange(records):
                since = records.block_begins()
                self._work.wait()
                records.block_ends(since, "counts")
            self._work, self._received = None, streams.record(self._device)
        elif self._received is not None:  # on another stream, perhaps, by a user who has read the mean loss
            self._received.wait()
        self._totals, self._had_losses = self._message, bool(self._losses)

    def _exchange(self, records: NoRecords) -> Exchange:
        failed: Any = partial(error_messages.reduction_failed, "the counts of model.normalize_by()")
        return Exchange(failed, self._monitor, records=records)

    def _computed_factor(self, divisor: float) -> float | Tensor:
        assert self._totals is not None
        num_ranks = self._group.size()
        if self._has_streams and not self._is_agreement_point:
            count, called, wrong = (self._totals[place] for place in (_COUNT, _NUM_CALLS, _NUM_WRONG))
            of_counts = torch.where(count > 0, 1 / count, 0.0)
            factor = torch.where(called == 0, 1 / divisor, torch.where(called == num_ranks, of_counts, torch.nan))
            return torch.where(wrong > 0, torch.nan, factor)
        total, _, num_calls, _, num_wrong = self._totals.tolist()
        if num_wrong or 0 < num_calls < num_ranks:
            raise self._ranks_differ()
        if not num_calls:
            return 1 / divisor
        if not total and not self._warned_of_zero:
            self._warned_of_zero = True
            said = "%s: all counts of a step are zero (model.normalize_by), so its gradients are too"
            log.log(warning_level(self._group), said, this_rank())
        scale = 1 / total if total else 0.0
        return self._on_device(scale) if self._has_streams else scale

    def _ranks_differ(self) -> RanksDifferError:
        """The error of every rank; all ranks call this."""
        if self._is_incomplete:
            said = "called for some micro-batches of the step only"
        else:
            said = "called" if self.is_counting else "not called"
        return error_messages.counts_differ(name_values(gather_texts(said, self._group, self._device)))
