"""Ranks with fewer batches than others: the module as a ``torch.distributed.algorithms.Joinable``.

Note [Shadows]
Inside ``Join``, a rank that has no input left shadows the others: it joins all collectives of their iterations, and
contributes zeros. When a forward begins, the ranks exchange one message with a flag for each rank. A flag is set if the
rank still trains and its next backward is to be reduced. So every rank knows whether anything follows, how many ranks
still train, and whose buffers to broadcast. The hosts wait for each other there, but for no device: Note [Words on the
host]. One forward makes one iteration. A second forward before the backward of the first is an error, since shadows
could not know of it. Meanwhile the ranks compare no fingerprints, since they do different things on purpose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, JoinHook

from ddp_compile import torch_internals
from ddp_compile.features.compatibility import Feature, refuse_if_excluded
from ddp_compile.runtime.comm.exchange import Exchange
from ddp_compile.runtime.comm.iteration_message import IterationMessage

if TYPE_CHECKING:
    from ddp_compile.module.replicate_state import ReplicateState

_inside: list[Any] = []  # the modules whose `JoinOne` this process is in


class UnevenInputs(JoinHook):
    """The part of one replicated module in a ``Join``.

    Source: ``_DDPJoinHook`` of torch 2.13, nn/parallel/distributed.py.
    """

    def __init__(self, state: ReplicateState) -> None:
        self.config: Any = torch_internals.disabled_join_config()
        self._state = state
        self._divides_by_initial_world_size = True
        self._message: IterationMessage | None = None
        self._notified: Any = None  # keeps the work for ``Join`` alive until the next time

    def configure(self, config: Any) -> None:
        """A ``Join`` begins or has ended: undo what another one has left behind."""
        self.config = config
        self._state.reducer.leave_join()

    def hook(self, divide_by_initial_world_size: bool) -> JoinHook:
        """The hook that ``Join`` calls on a rank that has no input left."""
        self._divides_by_initial_world_size = divide_by_initial_world_size
        return self

    def forward_begins(self, module: nn.Module, synchronizes: bool) -> int:
        """Before a forward with gradients on this rank: inside ``Join``, notify the ranks that have no input left.

        Returns the rank in the group to broadcast buffers from; 0 outside ``Join``. ``Join`` raises a RuntimeError if
        ``throw_on_early_termination`` is set, and a rank has no input left.
        """
        if not self.config.enable:
            return 0
        self._state.reducer.refuse_second_forward()  # before anything is sent
        self._notified = Join.notify_join_context(module)  # type: ignore[arg-type]
        training = self._ranks_that_train(synchronizes)
        self._enter(training)
        return training[-1] if training else 0

    def main_hook(self) -> None:
        """Join one iteration of the ranks that still train."""
        training = self._ranks_that_train(False)
        if training:  # otherwise they accumulate
            self._enter(training)
            self._state.reducer.prepare_for_backward(synchronize=True)
            self._state.shadow_buffers(training[-1])
            self._state.reducer.shadow_backward()

    def post_hook(self, is_last_joiner: bool) -> None:
        """When no rank has input left, give every rank the parameters of one that trained longest."""
        group = self._state.process_group
        with Exchange("end of a Join", self._state.monitor):
            last = torch.tensor([group.rank() if is_last_joiner else -1], device=self._state.device)
            dist.all_reduce(last, dist.ReduceOp.MAX, group=group)
            self._state.broadcast_model(int(last.item()))
        self.configure(torch_internals.disabled_join_config())

    def _ranks_that_train(self, synchronizes: bool) -> list[int]:
        """The ranks in the group whose next backward is to be reduced, ascending."""
        group = self._state.process_group
        if self._message is None:  # constructed on all ranks together
            self._message = IterationMessage(group, self._state.device, is_needed=True)
        flags = bytearray(group.size())
        flags[group.rank()] = synchronizes
        with Exchange("message between the ranks of a Join", self._state.monitor):
            self._message.send([flags])
            (heard,) = self._message.wait()
        return [rank for rank, trains in enumerate(heard) if trains]

    def _enter(self, training: list[int]) -> None:
        if training:  # otherwise nothing is reduced
            size = self._state.process_group.size()
            self._state.reducer.enter_join(size if self._divides_by_initial_world_size else len(training))


class JoinOne(Join):
    """A ``Join`` of one module; a second one inside it is refused.

    The training ranks would wait for shadows in both, but a shadow is in only one of them at a time.
    """

    def __init__(self, module: Any, inputs: UnevenInputs, *arguments: Any, **keywords: Any) -> None:
        super().__init__([module], *arguments, **keywords)
        self._inputs = inputs

    def __enter__(self) -> None:
        (module,) = self._joinables
        if self._enable:
            if _inside:
                self._inputs.configure(torch_internals.disabled_join_config())  # ``__exit__`` will not run
                around = {Feature.JOIN: f"{type(_inside[-1]).__name__}.join() around it"}
                refuse_if_excluded(Feature.JOIN, f"{type(module).__name__}.join()", around)
            _inside.append(module)

    def __exit__(self, *raised: Any) -> None:
        try:
            super().__exit__(*raised)
        finally:
            if self._enable:
                _inside.pop()
                self._inputs.configure(torch_internals.disabled_join_config())  # ``Join`` does not reset it
