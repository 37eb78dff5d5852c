"""Runs a training under torchrun while something happens to it, and says how it ended."""

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
#: In the environment of every process of a run.
_MARK = "DDP_COMPILE_FAULTS_RUN"


class Life(NamedTuple):
    """The steps of one process of a rank."""

    begins_after: int  #: the steps of the checkpoint that it resumed
    losses: dict[int, float]  #: by step


class Run(NamedTuple):
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
    is_isolated: bool = False,  # in a network of its own, which takes root
    ctrl_c: bool = False,  # torchrun is interrupted as soon as the faulty rank waits for that
    shares_store: bool = False,  # the ranks use the store of torchrun's process, instead of one in rank 0's
) -> Run:
    """Train on one node in a folder, which may hold checkpoints of an earlier run."""
    (folder / "checkpoints").mkdir(exist_ok=True)
    launcher = ["--monitor-interval", "0.1", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, str(TRAINEE), "--folder", str(folder)]
    command += ["--way", way, *([] if fault is None else ["--fault", fault, "--at", at])]
    if is_isolated:
        command = ["unshare", "--net", "sh", "-c", f"ip link set lo up && exec {shlex.join(command)}"]
    mark = uuid.uuid4().hex
    environment = {**os.environ, _MARK: mark, "OMP_NUM_THREADS": "1"}
    # The store that torchrun shares with its ranks keeps their addresses over a restart, so that gloo may connect
    # to a process that is gone (torch 2.13; pytorch/pytorch#135712).
    environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int(not shares_store))}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    began = time.monotonic()
    with (folder / "output").open("a") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        if ctrl_c:
            _wait_for(folder / "struck", folder / "output")
            began = time.monotonic()
            process.send_signal(signal.SIGINT)
        exit_code = process.wait(120)
        seconds = time.monotonic() - began
    finally:
        process.kill()
        process.wait()
        left = _processes_of(mark)
        left_behind = [" ".join(each.cmdline()) for each in left]
        for each in left:
            each.kill()
    lives = [_lives(folder / f"losses.rank{rank}") for rank in range(2)]
    return Run(exit_code, seconds, (folder / "output").read_text(), lives, left_behind)


def _wait_for(file: Path, output: Path) -> None:
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline, f"no rank has made {file.name}: {output.read_text()}"
        time.sleep(0.05)


def is_complete(run: Run) -> bool:
    """Whether every rank has made every step."""
    return all(losses.keys() == set(range(1, NUM_STEPS + 1)) for losses in run.losses)


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
