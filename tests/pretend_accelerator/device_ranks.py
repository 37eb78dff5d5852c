"""Two ranks that have the pretend accelerator, in processes that run nothing else.

They are copies of a process that has imported torch and loaded the device, but has run no backward: in the first one
autograd's engine counts the devices, and makes a thread for each. So the copies of `process_copies` will not do.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import compiled_device
import device
import pytest
import torch
import torch.distributed as dist
from rank_pool import RankFailure

#: The device is written for this torch's internal interfaces, which change from release to release.
PINNED = (Path(__file__).parents[2] / "requirements" / "torch.txt").read_text().split("torch==")[1].strip()
needs_pinned_torch = pytest.mark.skipif(
    torch.__version__.split("+")[0] != PINNED, reason=f"the pretend accelerator is written for torch {PINNED}"
)
WORLD_SIZE = 2
CALL_TIMEOUT_S = 120.0
GROUP_TIMEOUT_S = 40.0


class DeviceRanks:
    """Started at the first call, and again after ranks that parted ways or gave no answer."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="device_ranks_")
        self._connections: list[Connection] = []
        self._pids: list[int] = []
        self._num_calls = 0

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The function's results, by rank. Raises if a rank raised, with its traceback."""
        if not self._connections:
            self._start()
        self._num_calls += 1
        store = str(Path(self._directory.name) / f"store_{self._num_calls}")
        for connection in self._connections:
            connection.send((function, args, store))
        results = [self._receive(connection) for connection in self._connections]
        failures = [f"--- rank {i} ---\n{r.traceback}" for i, r in enumerate(results) if isinstance(r, RankFailure)]
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return results

    def close(self) -> None:
        for pid in self._pids:
            _signal(pid, signal.SIGKILL)
        if self._connections:
            self._original.join()  # which waits for the ranks
        self._connections, self._pids = [], []

    def _start(self) -> None:
        compiled_device.folder()  # here, since it may take longer than a rank's answer
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(WORLD_SIZE)]
        theirs = [pipe[1] for pipe in pipes]
        self._original = context.Process(target=_copy, args=(theirs,))
        self._original.start()
        for connection in theirs:
            connection.close()
        self._connections = [pipe[0] for pipe in pipes]
        self._pids = [connection.recv() for connection in self._connections]

    def _receive(self, connection: Connection) -> Any:
        if not connection.poll(CALL_TIMEOUT_S):
            for pid in self._pids:
                _signal(pid, signal.SIGUSR1)  # where its threads are goes to stderr
            return RankFailure("TimeoutError", "", f"no answer within {CALL_TIMEOUT_S} s")
        try:
            return connection.recv()
        except (EOFError, ConnectionError):
            return RankFailure("EOFError", "", "the rank's process ended")


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has ended
        os.kill(pid, number)


def _copy(connections: list[Connection]) -> None:
    """Load the device and become the original of the ranks."""
    device.load()
    import torch._inductor.compile_fx  # noqa: F401  # once for all ranks

    import ddp_compile  # noqa: F401

    pids = []
    for rank, connection in enumerate(connections):
        pids.append(os.fork())
        if pids[-1] == 0:
            for other in connections[:rank] + connections[rank + 1 :]:
                other.close()
            _serve(rank, connection)
            os._exit(0)
    for connection in connections:
        connection.close()
    for pid in pids:
        os.waitpid(pid, 0)


def _serve(rank: int, connection: Connection) -> None:
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    connection.send(os.getpid())
    while True:
        try:
            function, args, store = connection.recv()
        except EOFError:
            return
        connection.send(_call(rank, function, args, store))
        torch._dynamo.reset()


def _call(rank: int, function: Any, args: Any, store: str) -> Any:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE))
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group(
        device.BACKENDS, store=dist.FileStore(store, WORLD_SIZE), rank=rank, world_size=WORLD_SIZE, timeout=timeout
    )
    try:
        return function(*args)
    except BaseException as error:
        return RankFailure(type(error).__name__, str(error), traceback.format_exc())
    finally:
        for index in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(index)  # work that fails is the function's
        dist.destroy_process_group()
