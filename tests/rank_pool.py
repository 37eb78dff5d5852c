"""Processes that stand in for ranks: started once, and given one function after the other.

Importing torch and its compilers takes seconds; starting ranks for each test would be most of the suite's time. Ranks
are copies of one process that has imported them, so replacing ranks that got out of step is cheap. A function that a
test gives to the pool must be at the top level of its module, so that the ranks can import it. The ranks' `ddp_compile`
has the defaults that it has here at the call, for fixtures that change one.
"""

import faulthandler
import functools
import gc
import inspect
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from one_stack import on_one_stack
from process_copies import begin_copy, context_of_copies

from ddp_compile import ddp_compile

GROUP_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 240.0
#: More threads than this belong to several process groups that nothing uses anymore.
MOST_THREADS = 6
#: What `sys.getrefcount` counts for an item of a list in a loop over the list: the list, the variable, the argument.
REFERENCES_OF_A_LOOP = 3
LONGEST_CONNECTION_S = 3.0
PROCESS_ENDED = "EOFError"  #: the kind of failure of a rank whose process is gone


class RankFailure(NamedTuple):
    kind: str
    message: str
    traceback: str


class RankPool:
    """``world_size`` processes in one gloo group that is made again for each call."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._directory = tempfile.TemporaryDirectory(prefix="rank_pool_")
        self._num_calls = 0
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """The function's results, by rank. Raises when a rank raised, with that rank's traceback."""
        results = self.run_expecting_failures(function, *args, **kwargs)
        failures = [(rank, r) for rank, r in enumerate(results) if isinstance(r, RankFailure)]
        if failures:
            raise AssertionError("\n".join(f"--- rank {rank} ---\n{r.traceback}" for rank, r in failures))
        return results

    def run_expecting_failures(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = GROUP_TIMEOUT_S, **kwargs: Any
    ) -> list[Any]:
        """As `run`, with a `RankFailure` instead of a result for each rank that raised or died."""
        if not self._processes:
            self._start()
        self._num_calls += 1
        store = str(Path(self._directory.name) / f"store_{self._num_calls}")
        try:
            for connection in self._connections:
                connection.send((function, args, kwargs, ddp_compile.__kwdefaults__, store, timeout_s))
        except ConnectionError as error:
            self.close()  # otherwise every later test would fail too
            raise AssertionError("a rank's process has ended after the call before this one") from error
        results = [self._receive(connection) for connection in self._connections]
        kinds = {result.kind if isinstance(result, RankFailure) else None for result in results}
        if len(kinds) > 1 or PROCESS_ENDED in kinds:
            # Ranks that parted ways may have left collectives under way; ranks that failed alike have not.
            self.close()
        return results

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        context = context_of_copies()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world_size, theirs, sys.path, self._stacks_of(rank)), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _stacks_of(self, rank: int) -> str:
        return str(Path(self._directory.name) / f"stacks_of_rank_{rank}.txt")

    def _stacks(self) -> str:
        """Where every thread of every rank is."""
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1.0)  # until they have written it
        texts = [Path(self._stacks_of(rank)).read_text() for rank in range(self.world_size)]
        return "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in enumerate(texts))

    def _receive(self, connection: Connection) -> Any:
        if not connection.poll(CALL_TIMEOUT_S):
            stacks = self._stacks()
            self.close()
            raise AssertionError(f"a rank gave no answer within {CALL_TIMEOUT_S} s\n{stacks}")
        try:
            return connection.recv()
        except (EOFError, ConnectionError):
            return RankFailure(PROCESS_ENDED, "the rank's process ended", "the rank's process ended")


def on_ranks(
    world_size: int | None = None, eagerly: bool = False, **settings: float
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test whose body runs on each of `world_size` ranks, by default as many as its argument of that name says.

    ``eagerly``, nothing is compiled; ``settings`` are those of `RankPool.run`.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        body = torch.compiler.set_stance("force_eager")(body) if eagerly else body

        @functools.wraps(body)
        def test(ranks: Callable[[int], RankPool], **arguments: Any) -> None:
            ranks(world_size or arguments["world_size"]).run(_call_body, test, **settings, **arguments)

        signature = inspect.signature(body)
        ranks = inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY)
        vars(test)["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), ranks])
        return test

    return decorate


def _call_body(test: Any, **arguments: Any) -> None:
    test.__wrapped__(**arguments)


#: The fixture ``ranks``: ``ranks(2)`` is a pool of two.
Ranks = Callable[[int], RankPool]


def run_in_new_processes(pool: RankPool, function: Callable[..., Any], *args: Any) -> list[Any]:
    """The result of a function on ranks that have never had another mesh.

    torch caches results about DTensors by mesh, with the names of the mesh's groups, and equal meshes share an entry.
    After the groups are destroyed, an equal mesh leads to "could not resolve the process group".
    """
    pool.close()
    try:
        return pool.run(function, *args)
    finally:
        pool.close()


#: Process groups that have been destroyed, but not freed; see `collect_process_groups`.
_destroyed: list[Any] = []


def destroy_process_groups() -> None:
    """Destroy all process groups; `collect_process_groups` frees them."""
    _destroyed.extend(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()


def collect_process_groups() -> None:
    """Free destroyed process groups, and before them the models that the collector has not found, unless there are few.

    Their threads poll: on idle ranks they took a tenth of both cores. Remaining objects are not scanned again.

    A group that anything else holds waits for a later call. The callback of a communication hook may hold it, on one
    of gloo's threads that has not dropped the callback yet. The group would then be freed there, and its destructor
    ends the process, since a thread cannot join itself (torch 2.13).

    A DistributedDataParallel must not be a group's last owner. The collector frees its reducer with the GIL held; the
    group's destructor then joins a thread of gloo that may be waiting for the GIL to drop a tensor (torch 2.13). A
    group that Python owns is destroyed without the GIL.
    """
    if len(os.listdir("/proc/self/task")) > MOST_THREADS:
        gc.collect()
        gc.freeze()
        _destroyed[:] = [group for group in _destroyed if sys.getrefcount(group) > REFERENCES_OF_A_LOOP]


def _serve(rank: int, world_size: int, connection: Connection, path: list[str], stacks: str) -> None:
    begin_copy(path)
    faulthandler.register(signal.SIGUSR1, file=Path(stacks).open("w"))  # noqa: SIM115  # for as long as the process
    while True:
        try:
            function, args, kwargs, defaults, store, timeout_s = connection.recv()
        except EOFError:
            return
        ddp_compile.__kwdefaults__ = defaults
        connection.send(_call(rank, world_size, function, args, kwargs, store, timeout_s))
        torch._dynamo.reset()
        # Now, since minutes may pass until the next call.
        collect_process_groups()


on_one_stack(_serve)


def _call(rank: int, world_size: int, function: Any, args: Any, kwargs: Any, store: str, timeout_s: float) -> Any:
    """The function's result on this rank."""
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world_size)
    torch.manual_seed(rank)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    ends = dist.FileStore(f"{store}_ends", world_size)
    dist.barrier()  # otherwise a function that needs no other rank could leave before the others have connected
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        with_locals = isinstance(error, AssertionError)  # instead of what pytest says of an assertion of its own
        text = traceback.TracebackException.from_exception(error, capture_locals=with_locals)
        return RankFailure(type(error).__name__, str(error), "".join(text.format()))
    finally:
        _let_others_connect(ends)
        destroy_process_groups()


def _let_others_connect(ends: dist.Store) -> None:
    """If there are more groups than one, give the others time to connect in them: they may wait for nothing of ours."""
    num_ended, deadline = ends.add("ended", 1), time.monotonic() + LONGEST_CONNECTION_S
    while len(dist.distributed_c10d._world.pg_map) > 1 and num_ended < dist.get_world_size():
        if time.monotonic() > deadline:
            return  # they may never end
        time.sleep(0.01)
        num_ended = ends.add("ended", 0)
