"""Warnings of ddp_compile, on ranks of a pool too, whose log no fixture of pytest's sees."""

import contextlib
import logging
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def warned() -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("ddp_compile")
    log.addHandler(handler)
    try:
        yield said
    finally:
        log.removeHandler(handler)


def warnings_of(train: Callable[[], object], times: int) -> list[str]:
    with warned() as said:
        for _ in range(times):
            train()
    return said
