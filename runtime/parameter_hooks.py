"""The reducer's hook on each parameter."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor
from torch.nn import Parameter

from ddp_compile import torch_internals
from ddp_compile.runtime.accumulators import Accumulators


class ArrivalListener(Protocol):
    """Who is told that a gradient has been accumulated into ``.grad``."""

    def mark_parameter_ready(self, index: int) -> None: ...

    def hooks_have_run(self) -> None: ...


_Slot = tuple[OrderedDict[int, Callable[[Tensor], None]], int, Callable[[Tensor], None]]


class ParameterHooks:
    """Tells a listener of the gradients that matter to it, and gathers the others.

    Args:
        parameters: The parameters, spoken of by their number.
        accumulators: Theirs.
        listener: Not kept alive.

    Note [One of many]
    With thousands of small parameters, hooks are what a reducer costs: a microsecond or two for a Python function and
    what it does, as the backward has pushed it out of the caches meanwhile. Of a bucket's gradients only two need
    thought: the one that begins a backward and the one that completes the bucket. So after the first one of a backward
    the reducer calls `gather`, and then the hook of nearly every parameter is the ``append`` of a list, which runs no
    Python code. Only the parameter that came last in its bucket the time before tells the listener, who first calls
    `settle` to learn what has been gathered. If some are missing still, the order is another one, and the parameters
    of that bucket tell of themselves for the rest of the backward. `tell_of_each` ends all gathering.
    """

    def __init__(self, parameters: Sequence[Parameter], accumulators: Accumulators, listener: ArrivalListener) -> None:
        # A strong reference would make a cycle through C++ (parameter, hook, reducer, parameter) that gc cannot see.
        self._listener = weakref.ref(listener)
        self._tell = [_hook_for(self._listener, index) for index in range(len(parameters))]
        self._handles = [
            torch_internals.register_own(parameter.register_post_accumulate_grad_hook, tell)
            for parameter, tell in zip(parameters, self._tell, strict=True)
        ]
        self._all_hooks = [torch_internals.post_accumulate_grad_hooks(parameter) for parameter in parameters]
        self._accumulators = accumulators
        self._tell_behind = _hook_behind_for(self._listener)
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._group_of: list[_Group | None] = [None] * len(parameters)
        self._gathering: dict[_Group, None] = {}  # those that do, and some that have stopped

    def gather(
        self,
        members: tuple[int, ...],
        missing: set[int],
        arriving: Sequence[int] = (),
        tell_of_last: bool = True,
    ) -> None:
        """From now on gather the gradients of one bucket.

        Args:
            members: Its parameters.
            missing: Those of them whose gradients are still to come; `settle` strikes off what has.
            arriving: The parameters that the listener is being told of.
            tell_of_last: Whether to tell the listener when the last one comes.
        """
        group = self._group_of[members[0]]
        if group is None or group.members != members:
            if group is not None:  # of a plan before
                group.tell_of_each()
            slots = [(self._all_hooks[index], self._handles[index].id, self._tell[index]) for index in members]
            group = _Group(members, slots)
            for index in members:
                self._group_of[index] = group
        group.gather(missing, arriving, tell_of_last)
        self._gathering[group] = None

    def settle(self, index: int) -> None:
        """Strike off what has been gathered of a parameter's bucket; to be called when told of the parameter.

        A gradient that was not missing any more is told of.
        """
        group = self._group_of[index]
        if group is None:
            return
        again = self._strike_off(group)
        if again or (index == group.last and len(group.missing) > 1):
            group.tell_of_each()
        self._tell_again(again)

    def settle_all(self) -> None:
        """`settle` for all buckets; from now on every gradient is told of."""
        again = [index for group in self._gathering for index in self._strike_off(group)]
        self.tell_of_each()
        self._tell_again(again)

    def note_last(self, index: int) -> None:
        """A parameter's gradient was the last one of its bucket, and is expected to be so the next time."""
        group = self._group_of[index]
        if group is not None:
            group.expected_last = index

    def tell_of_each(self) -> None:
        """From now on tell the listener of every gradient, as at the beginning; what is gathered is forgotten."""
        for group in self._gathering:
            group.tell_of_each()
        self._gathering.clear()

    def with_hooks_of_others(self) -> list[int]:
        """The parameters on which somebody else has hooks, beside those on their nodes."""
        return torch_internals.with_hooks_of_others(self._all_hooks)

    def tell_behind(self, index: int) -> None:
        """A parameter's hook is running: tell the listener when all other hooks on it and on its node have run."""
        self._accumulators.run_last(index, self._tell_behind)

    def remove(self) -> None:
        """Stop listening."""
        self.tell_of_each()
        for handle in self._handles:
            handle.remove()
        self._accumulators.remove_hooks()

    def _strike_off(self, group: _Group) -> list[int]:
        """Take what has come off what is missing; returns what was not missing."""
        # One by one in Python would cost as much as the hooks that are saved.
        arrived = list(map(self._index_of.__getitem__, map(id, group.take())))
        once = set(arrived)
        if len(once) == len(arrived) and once <= group.missing:
            group.missing -= once
            return []
        again = []
        for index in arrived:
            if index in group.missing:
                group.missing.remove(index)
            else:
                again.append(index)
        return again

    def _tell_again(self, indices: Sequence[int]) -> None:
        listener = self._listener()
        if listener is not None:
            for index in indices:
                listener.mark_parameter_ready(index)


class _Group:
    """The hooks of one bucket's parameters, and the gradients that have come without being told of.

    Args:
        members: The bucket's parameters.
        slots: For each of them the hooks of the parameter, the number of ours among them, and what it is while it tells
            of every gradient.
    """

    def __init__(self, members: tuple[int, ...], slots: Sequence[_Slot]) -> None:
        self.members = members
        self.is_gathering = False
        self.missing: set[int] = set()  #: what had not come when that was last looked at
        self.last: int | None = None  #: the one of them that is told of
        self.expected_last = members[-1]
        self._slots = slots
        self._arrived: list[Tensor] = []
        self._append = self._arrived.append

    def gather(self, missing: set[int], arriving: Sequence[int], tell_of_last: bool) -> None:
        """See `ParameterHooks.gather`."""
        if self.is_gathering and self.missing is missing:
            return
        if tell_of_last and (self.expected_last not in missing or self.expected_last in arriving):
            return  # not in the order of the last time
        self.missing = missing
        self.last = self.expected_last if tell_of_last else None
        self.is_gathering = True
        append = self._append
        for hooks, number, _ in self._slots:
            hooks[number] = append
        if tell_of_last:
            hooks, number, tell = self._slots[self.members.index(self.expected_last)]
            hooks[number] = tell

    def tell_of_each(self) -> None:
        """See `ParameterHooks.tell_of_each`."""
        if not self.is_gathering:
            return
        self.take()
        self.is_gathering = False
        for hooks, number, tell in self._slots:
            hooks[number] = tell

    def take(self) -> list[Tensor]:
        """The parameters that have come, which are forgotten."""
        arrived = self._arrived[:]
        del self._arrived[: len(arrived)]  # the thread of another device may be appending
        return arrived


def _hook_for(listener: weakref.ref[ArrivalListener], index: int) -> Callable[[Tensor], None]:
    def hook(_parameter: Tensor) -> None:
        alive = listener()
        if alive is not None:
            alive.mark_parameter_ready(index)

    return hook


def _hook_behind_for(listener: weakref.ref[ArrivalListener]) -> Callable[[object, object], None]:
    def hook(_inputs: object, _outputs: object) -> None:
        alive = listener()
        if alive is not None:
            alive.hooks_have_run()

    return hook
