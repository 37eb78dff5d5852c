"""The ranks of a run, for the process that directs it: starts their processes, and calls them."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any, NamedTuple

from ddp_compile.bench.link import NamespacedLink
from ddp_compile.bench.rank_process import Failure
from ddp_compile.bench.settings import Case, RankContext, WorkloadSettings

START_TIMEOUT_S = 120.0
#: max-autotune of a large model takes minutes on one core.
ANSWER_TIMEOUT_S = 1200.0
#: How long the other ranks may take to fail after the first one.
FAILURE_GRACE_S = 5.0
#: How long killed processes may still write to the run's temporary folder.
DELETION_GRACE_S = 3.0


class CaseFailedError(Exception):
    """A case raised on some rank. The run continues without it.

    ``summary`` is one line, ``traceback`` the rank's whole traceback.
    """

    def __init__(self, summary: str, traceback: str) -> None:
        super().__init__(summary)
        self.summary = summary
        self.traceback = traceback


class RankDiedError(Exception):
    """A rank's process ended, so the run cannot continue."""


@dataclass(frozen=True, kw_only=True)
class WorldSettings:
    """The ranks and their link."""

    world_size: int
    workload: WorkloadSettings
    #: Namespaces of the ranks; loopback, or whatever the process group chooses, when None.
    link: NamespacedLink | None = None
    #: Rate of a simulated link, with one real rank; None for a real process group.
    simulated_bits_per_second: float | None = None
    simulated_world_size: int = 8  #: ranks that the simulated link pretends to have
    simulated_latency_s: float = 50e-6  #: of each collective of a simulated link

    @property
    def num_communicating_ranks(self) -> int:
        """The ranks of an all-reduce, simulated ones included."""
        return self.world_size if self.simulated_bits_per_second is None else self.simulated_world_size


class RankWorld:
    """One host process for each rank, and the case processes that were forked from them.

    Leaving the context kills them all and deletes their temporary folder. If the folder cannot be deleted, a warning
    says so, or a note on the exception that ended the run.
    """

    def __init__(self, settings: WorldSettings) -> None:
        self.settings = settings
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._hosts: list[_Host] = []
        self._numbers = itertools.count()

    def __enter__(self) -> RankWorld:
        try:
            self._start()
        except BaseException as error:
            self._close(error)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self._close(error)
        except KeyboardInterrupt:
            self._close(error)
            raise

    def start_case(self, case: Case, *, reuse_caches_of: RunningCase | None = None) -> RunningCase:
        """Fork the case's process on every rank, and connect them.

        Compile caches are those of ``reuse_caches_of``; empty ones when None. Raises a CaseFailedError if the ranks
        could not form a process group, and a RankDiedError if a process ended.
        """
        number = next(self._numbers)
        caches = reuse_caches_of.cache_dir if reuse_caches_of is not None else self.directory / f"caches_{number}"
        processes = []
        for rank in range(self.settings.world_size):
            context = RankContext(
                case=case,
                workload=self.settings.workload,
                rank=rank,
                world_size=self.settings.world_size,
                store_path=str(self.directory / f"store_{number}"),
                interface=self._interface(),
                cache_dir=str(caches / f"rank_{rank}"),
                simulated_bits_per_second=self.settings.simulated_bits_per_second,
                simulated_world_size=self.settings.simulated_world_size,
                simulated_latency_s=self.settings.simulated_latency_s,
            )
            processes.append(self._start_process(rank, context))
        running = RunningCase(case, processes, self, caches)
        running.receive()
        return running

    def exit_code(self, rank: int, pid: int) -> int:
        """Exit code of a case process that has ended."""
        self._send_to_host(rank, ("join", pid))
        return self._receive_from_host(rank)

    def log_tail(self, rank: int) -> str:
        """The end of the standard error of the rank's processes."""
        return self._log_path(rank).read_text(errors="replace")[-4000:]

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ddp_compile_bench_", ignore_cleanup_errors=True)
        self.directory = Path(self._folder.name)
        for rank in range(self.settings.world_size):
            self._start_host(rank)
        for rank, host in enumerate(self._hosts):
            if not host.connection.poll(START_TIMEOUT_S):
                raise RankDiedError(f"the process of rank {rank} did not start within {START_TIMEOUT_S:.0f} s")
            self._receive_from_host(rank)

    def _close(self, error: BaseException | None) -> None:
        self._kill_hosts()
        left = self._delete_folder()
        if left is None:
            return
        message = f"the temporary folder {left} could not be deleted; delete it yourself"
        if error is None:
            warnings.warn(message, stacklevel=3)
        else:
            error.add_note(message)

    def _delete_folder(self) -> Path | None:
        """Returns the folder if it could not be deleted."""
        deadline = time.monotonic() + DELETION_GRACE_S
        while self._folder is not None:
            self._folder.cleanup()
            if not self.directory.exists():
                self._folder = None
            elif time.monotonic() > deadline:
                return self.directory
            else:
                time.sleep(0.05)
        return None

    def _start_host(self, rank: int) -> None:
        link = self.settings.link
        prefix = [] if link is None else link.command_prefix(rank)
        cores = sorted(os.sched_getaffinity(0))
        on_cpu = self.settings.workload.device == "cpu"
        core = str(cores[rank % len(cores)]) if on_cpu else "any"
        # Shows people and tests which run a process belongs to.
        environment = {**os.environ, "DDP_COMPILE_BENCH_PID": str(os.getpid())}
        if on_cpu:
            # One core for each rank, so one thread; a pool of compile workers would outlive its case.
            environment |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.settings.world_size)}
        ours, theirs = multiprocessing.Pipe()
        with open(self._log_path(rank), "wb") as log, theirs:
            process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "ddp_compile.bench.rank_host", str(theirs.fileno()), core],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Only the directing process gets the terminal's Ctrl-C, and ends the others in order.
                start_new_session=True,
            )
        self._hosts.append(_Host(process, ours))

    def _start_process(self, rank: int, context: RankContext) -> _CaseProcess:
        host = self._hosts[rank]
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            self._send_to_host(rank, ("start", context))
            send_handle(host.connection, theirs.fileno(), host.process.pid)
            return _CaseProcess(ours, self._receive_from_host(rank))

    def _kill_hosts(self) -> None:
        for host in self._hosts:
            with suppress(ProcessLookupError):
                os.killpg(host.process.pid, signal.SIGKILL)  # it leads a session that holds all its children
        for host in self._hosts:
            host.process.wait()
            host.connection.close()
        self._hosts = []

    def _interface(self) -> str | None:
        if self.settings.link is not None:
            return self.settings.link.interface
        return "lo" if self.settings.workload.device == "cpu" else None

    def _log_path(self, rank: int) -> Path:
        return self.directory / f"rank_{rank}.log"

    def _send_to_host(self, rank: int, command: tuple[str, Any]) -> None:
        try:
            self._hosts[rank].connection.send(command)
        except OSError as error:
            raise self._host_died(rank) from error

    def _receive_from_host(self, rank: int) -> Any:
        try:
            return self._hosts[rank].connection.recv()
        except (EOFError, OSError) as error:
            raise self._host_died(rank) from error

    def _host_died(self, rank: int) -> RankDiedError:
        return RankDiedError(f"the process of rank {rank} ended; its output:\n{self.log_tail(rank)}")


class _Host(NamedTuple):
    process: subprocess.Popen[bytes]
    connection: Connection


class _CaseProcess(NamedTuple):
    connection: Connection
    pid: int


class RunningCase:
    """One case's processes, one for each rank; ``cache_dir`` has a folder of compile caches for each."""

    def __init__(self, case: Case, processes: Sequence[_CaseProcess], world: RankWorld, cache_dir: Path) -> None:
        self.case = case
        self.cache_dir = cache_dir
        self._processes = list(processes)
        self._world = world

    def ask(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of `RankCase` on every rank; the answers by rank.

        Raises a CaseFailedError if a rank raised, when the case's processes are ended; a RankDiedError if one has died.
        """
        for rank, process in enumerate(self._processes):
            try:
                process.connection.send((method, arguments))
            except OSError:
                self._raise_died(rank)
        return self.receive()

    def receive(self) -> list[Any]:
        """The answers to the last call, by rank."""
        answers: dict[int, Any] = {}
        failure: Failure | None = None
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while len(answers) < len(self._processes):
            waiting = [rank for rank in range(len(self._processes)) if rank not in answers]
            ready = wait([self._processes[rank].connection for rank in waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                failure = failure or Failure(f"TimeoutError: no answer within {ANSWER_TIMEOUT_S:.0f} s", "")
                break
            for rank in waiting:
                if self._processes[rank].connection not in ready:
                    continue
                try:
                    answers[rank] = self._processes[rank].connection.recv()
                except (EOFError, OSError):
                    self._raise_died(rank)
                if isinstance(answers[rank], Failure) and failure is None:
                    failure = answers[rank]
                    deadline = min(deadline, time.monotonic() + FAILURE_GRACE_S)
        if failure is not None:
            self.stop()
            raise CaseFailedError(*failure)
        return [answers[rank] for rank in range(len(self._processes))]

    def stop(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.connection.close()
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        for rank, process in enumerate(self._processes):
            self._world.exit_code(rank, process.pid)
        self._processes = []

    def _raise_died(self, rank: int) -> None:
        code = self._world.exit_code(rank, self._processes[rank].pid)
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise RankDiedError(
            f"rank {rank} of {self.case} died ({how}); the end of its output:\n{self._world.log_tail(rank)}"
        )
