"""Two ranks that have the pretend accelerator, in processes that run nothing else.

They are copies of a process that has imported torch and loaded the device, but has run no backward: in the first one
autograd's engine counts the devices, and makes a thread for each. So the copies of `process_copies` will not do.
"""

import faulthandler
import multiprocessing
import os
import signal
import traceback
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import compiled_device
import device
import pytest
import torch
import torch.distributed as dist
from rank_pool import RankFailure, RankPool

#: The device is written for this torch's internal interfaces, which change from release to release.
PINNED = (Path(__file__).parents[2] / "requirements" / "torch.txt").read_text().split("torch==")[1].strip()
needs_pinned_torch = pytest.mark.skipif(
    torch.__version__.split("+")[0] != PINNED, reason=f"the pretend accelerator is written for torch {PINNED}"
)
WORLD_SIZE = 2


class Rank(NamedTuple):
    """A process that another one has forked."""

    pid: int

    def is_alive(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()

    def kill(self) -> None:
        with suppress(ProcessLookupError):  # it has ended
            os.kill(self.pid, signal.SIGKILL)

    def join(self) -> None:
        """The process that has forked it waits for it."""


class DeviceRanks(RankPool):
    def __init__(self) -> None:
        super().__init__(WORLD_SIZE)

    def close(self) -> None:
        was_started = bool(self._processes)
        super().close()
        if was_started:
            self._original.join()

    def _start(self) -> None:
        compiled_device.folder()  # here, since it may take longer than a rank's answer
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(WORLD_SIZE)]
        theirs = [pipe[1] for pipe in pipes]
        self._original = context.Process(target=_copy, args=(theirs, [*map(self._stacks_of, range(WORLD_SIZE))]))
        self._original.start()
        for connection in theirs:
            connection.close()
        self._connections = [pipe[0] for pipe in pipes]
        self._processes = [Rank(connection.recv()) for connection in self._connections]


def _copy(connections: list[Connection], stacks: list[str]) -> None:
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
            _serve(rank, connection, stacks[rank])
            os._exit(0)
    for connection in connections:
        connection.close()
    for pid in pids:
        os.waitpid(pid, 0)


def _serve(rank: int, connection: Connection, stacks: str) -> None:
    faulthandler.register(signal.SIGUSR1, file=Path(stacks).open("w"))  # noqa: SIM115  # for as long as the process
    torch.set_num_threads(1)
    connection.send(os.getpid())
    while True:
        try:
            function, args, kwargs, _, store, timeout_s = connection.recv()
        except EOFError:
            return
        connection.send(_call(rank, function, args, kwargs, store, timeout_s))
        torch._dynamo.reset()


def _call(rank: int, function: Any, args: Any, kwargs: Any, store: str, timeout_s: float) -> Any:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE))
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        device.BACKENDS, store=dist.FileStore(store, WORLD_SIZE), rank=rank, world_size=WORLD_SIZE, timeout=timeout
    )
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        return RankFailure(type(error).__name__, str(error), traceback.format_exc())
    finally:
        for index in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(index)  # work that fails is the function's
        dist.destroy_process_group()
