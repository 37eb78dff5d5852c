"""What a test process does so that its many small compilations take less time; it changes nothing of what they make."""

from __future__ import annotations

import gc
from typing import Any

import torch._dynamo.guards as dynamo_guards


def make_compiles_cheap() -> None:
    """A third of the processor time of small graphs goes into things that no test looks at (torch 2.13).

    Dynamo empties the processor's caches after each graph to measure how long its guards take, for a metric. The
    garbage collector goes over everything that torch has imported, again and again: what there is now is not looked at
    any more, and the rest less often.
    """
    guards: Any = dynamo_guards
    guards.profile_guard_manager = lambda *_: 0.0
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
