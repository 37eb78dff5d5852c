"""Runs a training under torchrun while something happens to it, and says how it ended."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import NamedTuple

import psutil
from trainee import NUM_STEPS

TRAINEE = Path(__file__).with_name("trainee.py")
#: torchrun waits so long for a process that does not end when it is told to, before it kills it (torch 2.13).
TORCHRUN_KILLS_AFTER_S = 30.0
#: In every process of a run.
_MARK = "DDP_COMPILE_FAULTS_RUN"


class Life(NamedTuple):
    """The steps of one process of a rank."""

    begins_after: int  #: the steps of the checkpoint that it resumed
    losses: dict[int, float]  #: by step


class Run(NamedTuple):
    """A run that is over."""

    exit_code: int
    seconds: float
    output: str
    lives: list[list[Life]]  #: by rank
    left_behind: list[str]  #: processes of the run that have not ended

    @property
    def losses(self) -> list[dict[int, float]]:
        """The losses of each rank; the same step of two lives must have had the same one."""
        merged: list[dict[int, float]] = []
        for lives in self.lives:
            merged.append({})
            for life in lives:
                for step, loss in life.losses.items():
                    assert merged[-1].setdefault(step, loss) == loss, f"step {step} was another one after the restart"
        return merged


def train(
    folder: Path,
    way: str,
    fault: str | None = None,
    at: str = "backward",
    *,
    max_restarts: int = 1,
    is_isolated: bool = False,
    ctrl_c: bool = False,
    shares_store: bool = False,
    timeout_s: float = 120.0,
) -> Run:
    """Train in a folder, which may hold checkpoints of an earlier run.

    Args:
        is_isolated: Whether the run has a network and a small disk of its own, which takes root.
        ctrl_c: Whether torchrun is interrupted as soon as the faulty rank waits for that.
        shares_store: Whether the ranks use the store of torchrun's process, instead of one in rank 0's.
    """
    (folder / "checkpoints").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--monitor-interval", "0.1", "--max-restarts", str(max_restarts), str(TRAINEE)]
    command += ["--folder", str(folder), "--way", way]
    command += [] if fault is None else ["--fault", fault, "--at", at]
    if is_isolated:
        disk = f"mount -t tmpfs -o size=1m none {shlex.quote(str(folder / 'checkpoints'))}"
        inside = f"ip link set lo up && {disk} && exec {shlex.join(command)}"
        command = ["unshare", "--net", "--mount", "sh", "-c", inside]
    mark = uuid.uuid4().hex
    # The store that torchrun shares with its ranks keeps their addresses over a restart, so that gloo may connect to a
    # process that is gone (torch 2.13; pytorch/pytorch#135712).
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int(not shares_store))}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, env=environment | {_MARK: mark}, stdout=output, stderr=output)
        try:
            if ctrl_c:
                _wait_for(folder / "ready", process)
                began = time.monotonic()
                process.send_signal(signal.SIGINT)
            exit_code = process.wait(timeout_s)
        finally:
            seconds = time.monotonic() - began
            process.kill()
            left_behind = _processes_of(mark)
            for each in left_behind:
                each.kill()
    text = (folder / "output").read_text()
    lives = [_lives(folder / f"losses.rank{rank}") for rank in range(2)]
    return Run(exit_code, seconds, text, lives, [" ".join(each.cmdline()) for each in left_behind])


def is_complete(run: Run) -> bool:
    """Whether every rank has made every step."""
    return all(losses.keys() == set(range(1, NUM_STEPS + 1)) for losses in run.losses)


def _wait_for(file: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not file.exists():
        assert process.poll() is None and time.monotonic() < deadline, "no rank has come to the fault"
        time.sleep(0.05)


def _processes_of(mark: str) -> list[psutil.Process]:
    """The processes of a run, except those that end within a moment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark and process.name() not in ("sh", "sleep"):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue  # it has ended, or it is not ours
    return psutil.wait_procs(found, timeout=2)[1]


def _lives(file: Path) -> list[Life]:
    lives: list[Life] = []
    for line in file.read_text().splitlines() if file.exists() else ():
        entry = json.loads(line)
        if "begins after" in entry:
            lives.append(Life(entry["begins after"], {}))
        else:
            lives[-1].losses[entry["step"]] = entry["loss"]
    return lives
