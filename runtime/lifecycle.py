"""The states of a reducer, and the table of all transitions between them."""

from enum import Enum, auto
from typing import NamedTuple

from ddp_compile import torch_internals
from ddp_compile.errors import this_rank


class State(Enum):
    """What the reducer does with the next gradient."""

    ARMED = auto()  #: it starts an iteration
    LOCAL = auto()  #: it stays on this rank
    REDUCING = auto()  #: it belongs to the iteration that has started
    LAUNCHED = auto()  #: it is an error: the backward has ended, and `finalize_manually` has not been called yet
    INCOMPLETE = auto()  #: a backward ended before all gradients had arrived; another one may bring them
    FAILED = auto()  #: a backward raised in the middle of an iteration; this rank may be out of step with the others


class Event(Enum):
    """What changes the state."""

    FORWARD = auto()  #: a forward whose backward is to be reduced begins
    LOCAL_FORWARD = auto()  #: a forward inside ``no_sync`` begins
    FORWARD_RAISED = auto()  #: the only forward whose backward was expected has raised, so none will come
    GRADIENT = auto()  #: a gradient comes, or a whole bucket
    LEFT_OUT = auto()  #: a backward has ended, but gradients are missing
    ALL_LAUNCHED = auto()  #: a backward has ended, and `finalize_manually` will wait for its reductions
    FINALIZE = auto()  #: it waits for them now
    ITERATION_ENDS = auto()  #: every bucket has been handed over, or the iteration is abandoned


class Phase(NamedTuple):
    """Where a reducer stands."""

    state: State
    #: Whether a forward has come since the last iteration whose backward is to be reduced. A backward without one, of a
    #: regulariser for example, may reach a part of the parameters only.
    after_forward: bool


def _table() -> dict[tuple[Phase, Event], Phase]:
    armed, local = Phase(State.ARMED, False), Phase(State.LOCAL, False)
    expecting = Phase(State.ARMED, True)
    table = {
        (armed, Event.FORWARD): expecting,
        (armed, Event.LOCAL_FORWARD): local,
        (local, Event.FORWARD): expecting,
        (local, Event.LOCAL_FORWARD): local,
        (expecting, Event.FORWARD): expecting,
        # The backward of the synchronized forward before it is still expected.
        (expecting, Event.LOCAL_FORWARD): expecting,
        # Otherwise a backward inside no_sync would be reduced in place of the backward that cannot come.
        (expecting, Event.FORWARD_RAISED): armed,
    }
    for before in (armed, expecting):
        reducing, failed = before._replace(state=State.REDUCING), before._replace(state=State.FAILED)
        launched = before._replace(state=State.LAUNCHED)
        table |= {
            (before, Event.GRADIENT): reducing,
            (reducing, Event.ITERATION_ENDS): armed,
            (reducing, Event.ALL_LAUNCHED): launched,
            (launched, Event.FINALIZE): reducing,
            # AccumulateGrad has written to a buffer that is being reduced.
            (launched, Event.GRADIENT): failed,
            # The last backward raised, and the iteration was not replaced.
            (reducing, Event.GRADIENT): failed,
            (reducing, Event.FORWARD): failed,
            (reducing, Event.LOCAL_FORWARD): failed,
            (failed, Event.FORWARD): failed,
            (failed, Event.LOCAL_FORWARD): failed,
            (failed, Event.GRADIENT): failed,
        }
    # Only a backward after a forward waits for gradients that it leaves out.
    reducing, incomplete = expecting._replace(state=State.REDUCING), expecting._replace(state=State.INCOMPLETE)
    table |= {
        (reducing, Event.LEFT_OUT): incomplete,
        (incomplete, Event.GRADIENT): reducing,
        (incomplete, Event.ITERATION_ENDS): armed,
    }
    return table


#: All transitions. `Reducer` refuses a forward while gradients are missing, and ends the iteration; it also refuses one
#: before `finalize_manually`, which changes nothing. A gradient after a forward inside ``no_sync``, or another one of
#: the same iteration, changes nothing.
TABLE = _table()


class Lifecycle:
    """The state of one reducer.

    One assignment replaces the phase, so that after Ctrl-C it is either the old or the new one.
    """

    def __init__(self) -> None:
        self.phase = Phase(State.ARMED, False)  #: read only
        self.had_local_forward = False  #: whether one came while the backward of another forward was expected
        self._expected_before = False  # whether an earlier forward was waiting for its backward

    def on(self, event: Event) -> State:
        """Change the phase; returns the new state."""
        if event is Event.FORWARD:
            self._expected_before = self.phase.after_forward
        elif event is Event.LOCAL_FORWARD:
            self.had_local_forward |= self.phase.after_forward
        elif event is Event.ITERATION_ENDS:
            self.had_local_forward = False
        self.phase = TABLE[self.phase, event]
        return self.phase.state

    def forward_raised(self) -> None:
        """Expect no backward of the latest synchronized forward; an earlier one's is still expected."""
        if self.phase == Phase(State.ARMED, True) and not self._expected_before:
            self.on(Event.FORWARD_RAISED)


def nothing_to_finalize(is_manual: bool, state: State) -> RuntimeError:
    """The error of ``finalize_backward()`` if nothing waits for it."""
    if not is_manual:
        why = "backwards finalize by default; set model.require_manual_backward_finalization = True before the forward"
    elif torch_internals.current_graph_task_id() != -1:
        why = "the backward has not returned, and more gradients may come; call it after the backward"
    elif state is State.INCOMPLETE:
        why = "gradients are missing; another backward has to bring them, or the next forward names them"
    elif state in (State.REDUCING, State.FAILED):
        why = "the last backward, or its finalization, has raised; the next forward says how to continue"
    else:
        why = "no reduced backward has come since the last call; call it once after each, outside no_sync"
    return RuntimeError(f"{this_rank()}: finalize_backward() was called, but {why}")
