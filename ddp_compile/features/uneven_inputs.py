"""Ranks with fewer batches than others: the module as a ``torch.distributed.algorithms.Joinable``.

Note [Shadows]
Inside ``Join``, a rank that has no input left shadows the others: it takes part in all that an iteration of theirs
sends, and contributes zeros. At the beginning of each forward the ranks exchange one message with a flag for each rank,
which is set if the rank still trains and its next backward is to be reduced. So every rank knows whether anything
follows, how many ranks still train, and which of them has the buffers to go on with. The hosts wait for each other
there, but for no device: Note [Words on the host]. One forward makes one iteration; a second one before its backward is
refused, since shadows could not know of it. The ranks compare no fingerprints meanwhile, as they do different things by
intention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, JoinHook

from ddp_compile import torch_internals
from ddp_compile.errors import ReplicationError, this_rank
from ddp_compile.runtime.comm.iteration_message import IterationMessage
from ddp_compile.runtime.reducer import Reducer

_inside: list[Any] = []  # the modules whose `JoinOne` this process is in


class UnevenInputs:
    """The part of one replicated module in a ``Join``.

    Args:
        process_group: The ranks.
        device: Of the parameters.
        reducer: The module's.
        shadow_buffers: Takes part in what is done with buffers; told the rank in the group whose hold.
        broadcast_model: Gives every rank the parameters, and buffers, of the rank in the group that it is told.

    Source: ``_DDPJoinHook`` of torch 2.13, nn/parallel/distributed.py.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        device: torch.device,
        reducer: Reducer,
        shadow_buffers: Callable[[int], None],
        broadcast_model: Callable[[int], None],
    ) -> None:
        self.config: Any = torch_internals.disabled_join_config()
        self.device = device
        self._process_group = process_group
        self._reducer = reducer
        self._shadow_buffers = shadow_buffers
        self._broadcast_model = broadcast_model
        self._divides_by_initial_world_size = True
        self._message: IterationMessage | None = None
        self._notified: Any = None  # what ``Join`` is told is on its way until the next time

    def configure(self, config: Any) -> None:
        """A ``Join`` begins, or one has ended; what another one has left is undone."""
        self.config = config
        self._reducer.leave_join()

    def hook(self, divide_by_initial_world_size: bool) -> JoinHook:
        """What ``Join`` calls on a rank that has no input left.

        Raises:
            ReplicationError: The module's algorithm communicates parameters, of which a shadow has none to give.
        """
        algorithm = self._reducer.algorithm
        if algorithm.traits.payload != "gradients" or not algorithm.traits.takes_shadows:
            raise ReplicationError(
                f"{this_rank()}: the {algorithm.name} communicates parameters, and cannot go on"
                " inside a Join, where ranks that have no input left contribute zeros; train on as many batches on"
                " every rank, or with GradientAllReduce()"
            )
        self._divides_by_initial_world_size = divide_by_initial_world_size
        return _Hook(self)

    def forward_begins(self, module: nn.Module, synchronizes: bool) -> int:
        """A forward with gradients begins on this rank; inside ``Join``, say so to those that have none left.

        Args:
            module: The replicated module.
            synchronizes: Whether its backward is to be reduced.

        Returns:
            The rank in the group whose buffers hold, 0 outside of ``Join``.

        Raises:
            RuntimeError: ``throw_on_early_termination``, and a rank has no input left.
        """
        if not self.config.enable:
            return 0
        self._reducer.refuse_second_forward()  # before anything is sent
        self._notified = Join.notify_join_context(module)  # type: ignore[arg-type]
        training = self._ranks_that_train(synchronizes)
        self._enter(training)
        return training[-1] if training else 0

    def shadow_iteration(self) -> None:
        """Take part in one iteration of those that still train."""
        training = self._ranks_that_train(False)
        if training:  # else they accumulate
            self._enter(training)
            self._reducer.prepare_for_backward(synchronize=True)
            self._shadow_buffers(training[-1])
            self._reducer.shadow_backward()

    def end(self, is_last_joiner: bool) -> None:
        """No rank has any input left: the parameters of those that trained longest hold."""
        last = torch.tensor([self._process_group.rank() if is_last_joiner else -1], device=self.device)
        dist.all_reduce(last, dist.ReduceOp.MAX, group=self._process_group)
        self._broadcast_model(int(last.item()))
        self.configure(torch_internals.disabled_join_config())

    def _ranks_that_train(self, synchronizes: bool) -> list[int]:
        """Ranks in the group whose next backward is to be reduced, ascending."""
        if self._message is None:  # all ranks make it here together
            self._message = IterationMessage(self._process_group, self.device, is_needed=True)
        flags = bytearray(self._process_group.size())
        flags[self._process_group.rank()] = synchronizes
        self._message.send([flags])
        (heard,) = self._message.wait()
        return [rank for rank, trains in enumerate(heard) if trains]

    def _enter(self, training: list[int]) -> None:
        if training:  # else nothing is reduced
            size = self._process_group.size()
            self._reducer.enter_join(size if self._divides_by_initial_world_size else len(training))


class _Hook(JoinHook):
    def __init__(self, inputs: UnevenInputs) -> None:
        self._inputs = inputs

    def main_hook(self) -> None:
        self._inputs.shadow_iteration()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._inputs.end(is_last_joiner)


class JoinOne(Join):
    """A ``Join`` of one module; a second one inside it is refused.

    Each would have the ranks that train wait for its own shadows, and shadows are in one of them at a time.
    """

    def __init__(self, module: Any, inputs: UnevenInputs, *arguments: Any, **keywords: Any) -> None:
        super().__init__([module], *arguments, **keywords)
        self._inputs = inputs

    def __enter__(self) -> None:
        (module,) = self._joinables
        if self._enable:
            if _inside:
                both = f"{type(module).__name__}.join() inside {type(_inside[-1]).__name__}.join()"
                raise ReplicationError(
                    f"{this_rank()}: {both}: ranks without input could shadow one of them only. Write one"
                    " torch.distributed.algorithms.Join([first, second]) around both"
                )
            _inside.append(module)

    def __exit__(self, *raised: Any) -> None:
        try:
            super().__exit__(*raised)
        finally:
            if self._enable:
                _inside.pop()
                self._inputs.configure(torch_internals.disabled_join_config())  # ``Join`` leaves it as it is
