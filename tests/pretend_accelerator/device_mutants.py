"""Programs from whose runtime one wait, one recorded event or one report of used memory is taken away."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import device
import torch
import torch.distributed as dist
from device_places import PLACEMENTS, Where, placed
from device_programs import PROGRAMS, largest_difference
from torch import Tensor

from ddp_compile.runtime.comm import streams

ROOT = Path(__file__).resolve().parents[2]
#: Files that only pass on what others ask for.
_PASSED_THROUGH = {"streams.py", "transfers.py"}
#: Before each operator and collective, so that who does not wait is too early.
PAUSES = (3000, 1)


class Site(NamedTuple):
    """A function of the sources that keeps streams in order, and how."""

    what: str  #: "wait", "record", "used_by" or "wait for work"
    path: str
    function: str


class WatchedBackend(streams.Backend):
    """The real backend; what ``ignored`` asks for is not done."""

    def __init__(self, ignored: Site | None) -> None:
        super().__init__()
        self.sites: set[Site] = set()
        self._ignored = ignored

    def record(self, device: Any) -> Any:
        return None if self.is_ignored("record") else super().record(device)

    def wait(self, device: Any, event: Any) -> None:
        if not self.is_ignored("wait") and event is not None:
            super().wait(device, event)

    def used_by(self, tensor: Tensor, stream: Any) -> None:
        if not self.is_ignored("used_by"):
            super().used_by(tensor, stream)

    def is_ignored(self, what: str) -> bool:
        """Note the place in the sources that asks."""
        frame: Any = sys._getframe(2)
        while frame is not None:
            path = Path(frame.f_code.co_filename).resolve()
            if ROOT / "tests" in path.parents:
                return False
            if ROOT in path.parents and path.name not in _PASSED_THROUGH and ".venv" not in path.parts:
                site = Site(what, str(path.relative_to(ROOT)), frame.f_code.co_qualname)
                self.sites.add(site)
                return site == self._ignored
            frame = frame.f_back
        return False


@contextmanager
def watched(ignored: Site | None) -> Iterator[WatchedBackend]:
    backend = WatchedBackend(ignored)
    wait_for_work = dist.Work.wait

    def wait(work: dist.Work, *args: Any, **kwargs: Any) -> bool:
        return True if backend.is_ignored("wait for work") else wait_for_work(work, *args, **kwargs)

    with patch.object(streams, "backend", backend), patch.object(dist.Work, "wait", wait):
        yield backend


def sites_of(name: str, placement: str) -> set[Site]:
    with watched(None) as backend, placed(PLACEMENTS[placement]) as where:
        PROGRAMS[name].run(where)
    return backend.sites


def is_noticed(name: str, placement: str, ignored: Site) -> bool:
    """Whether the parameters are wrong on this rank, or the program raises, without what the site does."""
    program = PROGRAMS[name]
    expected = program.run(Where(torch.device("cpu"), program.expected == "one process"))
    device.extension().set_pauses(*PAUSES)
    try:
        with watched(ignored), placed(PLACEMENTS[placement]) as where:
            found = program.run(where)
    except Exception:
        return True
    finally:
        device.extension().set_pauses(500, 8)
    return largest_difference(found, expected) > program.tolerance
