"""The process from which one rank's case processes are forked: it has imported torch, and does nothing else.

It runs as ``python -m ddp_compile.bench.rank_host CONNECTION CORE`` inside its rank's network namespace; CONNECTION is
the number of an inherited file descriptor, CORE the number of a core or "any".
"""

import faulthandler
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle

#: How long a process may take to end after its connection is closed.
_JOIN_S = 10.0


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    core = sys.argv[2]
    faulthandler.enable()
    if core != "any":
        os.sched_setaffinity(0, {int(core)})

    # Imported here, once for all cases, and after the affinity is set, from which torch takes its number of threads.
    import torch

    from ddp_compile.bench import torch_switches

    torch_switches.import_compilers()
    if core != "any":
        torch.set_num_threads(1)
    connection.send("ready")
    _start_and_join(connection)


def _start_and_join(connection: Connection) -> None:
    """Start case processes and join those that have ended, until the run hangs up."""
    from ddp_compile.bench.rank_process import serve

    forking = multiprocessing.get_context("fork")
    children: dict[int, BaseProcess] = {}
    while True:
        try:
            command, argument = connection.recv()
        except EOFError:
            return
        if command == "start":
            with Connection(recv_handle(connection)) as end_of_child:
                child: BaseProcess = forking.Process(target=serve, args=(argument, end_of_child, connection))
                child.start()
            assert child.pid is not None
            children[child.pid] = child
            connection.send(child.pid)
        else:
            child = children.pop(argument)
            child.join(_JOIN_S)
            if child.is_alive():
                child.kill()
                child.join()
            connection.send(child.exitcode)


if __name__ == "__main__":
    main()
