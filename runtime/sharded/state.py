"""Where the parameters of one bucket stand, and the one table by which that changes."""

from __future__ import annotations

from enum import Enum, auto


class State(Enum):
    """Where the parameters of one bucket stand."""

    WHOLE = auto()  #: complete; anybody may read them
    STEPPING = auto()  #: the optimizer's step has begun, and may have written this rank's shard
    GATHERING = auto()  #: this rank's shard is stepped, and those of the others are on their way


class Event(Enum):
    """What changes that."""

    STEP_BEGINS = auto()  #: the optimizer is about to write
    STEPPED = auto()  #: the gather has started
    GATHERED = auto()  #: the gather has been waited for


#: Every change there is. A read waits in GATHERING. In STEPPING it is refused, unless the step is under way: the step
#: has raised, and the ranks are not alike. A step that begins waits in GATHERING first. In STEPPING it is refused,
#: unless another optimizer of the same model has stepped and this one has not. A gather that fails changes nothing, so
#: that each further read raises its error.
TABLE = {
    (State.WHOLE, Event.STEP_BEGINS): State.STEPPING,
    (State.STEPPING, Event.STEPPED): State.GATHERING,
    (State.GATHERING, Event.GATHERED): State.WHOLE,
}
