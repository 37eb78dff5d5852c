"""The versions of torch that the package has been tested with: docs/compatibility.md."""

import functools
import logging
import re

import torch

from ddp_compile.errors import this_rank

log = logging.getLogger(__name__)

#: A test compares it with the page.
NEWEST_TESTED = "2.15"


def is_newer_than_tested(torch_version: str) -> bool:
    """Whether a version such as "2.16.0a0+git1234" is of a later release than the tested ones; patches do not count."""
    return release_of(torch_version) > release_of(NEWEST_TESTED)


@functools.cache
def warn_of_newer_torch(rank: int) -> None:
    """Log a warning on rank 0, once in this process, if the installed torch is newer than all that were tested."""
    if rank == 0 and is_newer_than_tested(torch.__version__):
        log.warning(
            f"{this_rank()}: torch {torch.__version__} is newer than torch {NEWEST_TESTED}, the newest that ddp_compile"
            " has been tested with; if something fails that works with DistributedDataParallel, install torch"
            f" {NEWEST_TESTED} or a newer ddp_compile"
        )


def release_of(version: str) -> tuple[int, int]:
    """The first two numbers of a version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
