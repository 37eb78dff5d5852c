"""Run as a script: asks a store whose server has been stopped, and ends with exit code 7.

The server resumes when the interpreter ends. Then a thread that still waits for it is in danger.
"""

import ctypes
import os
import signal
import sys
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from ddp_compile.runtime.desync.group_store import GroupStore, StoreLostError


def start_server() -> tuple[int, int]:
    """Number of a process with the server of a TCPStore in it, and the port."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the reader of the script's output would wait for this process
        os.dup2(1, 2)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not even a stopped one is left behind
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write, str(store.port).encode())
        time.sleep(60)
        os._exit(0)
    return process, int(os.read(read, 100))


class GoesOn:
    """Stored in a module, so that it is dropped after the interpreter has begun to end."""

    def __init__(self, process: int) -> None:
        self.process = process

    def __del__(self, kill: Any = os.kill, sleep: Any = time.sleep) -> None:
        kill(self.process, signal.SIGCONT)
        sleep(0.5)
        kill(self.process, signal.SIGKILL)


server, port = start_server()
shared = dist.TCPStore("127.0.0.1", port, is_master=False)
group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0, get_group_store=lambda: dist.PrefixStore("group", shared))
store = GroupStore(group, "test/")
assert store.add("counter", 1) == 1
os.kill(server, signal.SIGSTOP)
os.waitpid(server, os.WUNTRACED)  # it answers until its threads have stopped, which takes a while on busy cores
goes_on = GoesOn(server)
started = time.monotonic()
try:
    # Not a function of this module, whose names would live as long as the thread that runs it.
    store.ask(partial(store._store.add, "counter", 1), limit_s=0.2)
except StoreLostError as error:
    print(f"{error}; {time.monotonic() - started:.1f} s")
sys.exit(7)
