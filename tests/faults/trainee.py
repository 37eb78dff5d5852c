"""A training script to which things happen: started by torchrun, it resumes from its newest complete checkpoint.

    torchrun --nproc-per-node 2 tests/faults/trainee.py --folder FOLDER --way sharded [--fault kill --at backward]

Each rank appends the loss of every step to its own file. A fault happens once, in step `FAULTY_STEP` of one rank, and
not after a restart.
"""

import argparse
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_compile import ddp_compile, shard_optimizer
from ddp_compile.algorithms import Decentralized, DiLoCo

NUM_STEPS = 12
STEPS_BETWEEN_CHECKPOINTS = 4
FAULTY_STEP = 9  #: after every rank has written a checkpoint of step 8
GROUP_TIMEOUT_S = 8.0
#: How long the network or the store does not answer. The ranks are not started again within the difference.
SHORT_S, LONG_S = 3.0, GROUP_TIMEOUT_S + 1.5
#: Where a fault can happen.
POINTS = ("forward", "backward", "optimizer", "after the step")

WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "sharded": {},
    "ring": {"algorithm": Decentralized(peer_selection="shift_one")},
    "diloco": {"algorithm": DiLoCo(sync_every=3)},
}


class Faults:
    """What happens to this rank, and where."""

    def __init__(self, folder: Path, kind: str | None, at: str) -> None:
        is_struck = os.environ["LOCAL_RANK"] == "1" and not (folder / "struck").exists()
        self._folder, self._kind, self._at = folder, kind if is_struck else None, at
        self.step = 0

    def pass_by(self, point: str) -> None:
        """Called at every point of a step."""
        if self._kind is not None and (self.step, point) == (FAULTY_STEP, self._at):
            kind, self._kind = self._kind, None
            newest = FAULTY_STEP // STEPS_BETWEEN_CHECKPOINTS * STEPS_BETWEEN_CHECKPOINTS
            while len([*self._folder.glob(f"checkpoints/step_{newest}.rank*.pt")]) < dist.get_world_size():
                time.sleep(0.01)  # another rank may be a step behind
            (self._folder / "struck").touch()
            _STRIKES[kind]()


def _later(command: str) -> None:
    """A shell command that goes on while this process does, and if it ends."""
    subprocess.Popen(["sh", "-c", command], start_new_session=True)


def _cut(seconds: float) -> None:
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    _later(f"sleep {seconds}; ip link set lo up")


def _freeze_store() -> None:
    agent = os.getppid()  # torchrun holds the store
    os.kill(agent, signal.SIGSTOP)
    _later(f"sleep {LONG_S}; kill -CONT {agent}")


def _wait() -> None:
    time.sleep(30)
    raise AssertionError("this process was to be interrupted, or started again")


_STRIKES: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "out of memory": lambda: torch.empty(2**60, dtype=torch.uint8),
    "link cut": lambda: _cut(LONG_S),
    "link cut and healed": lambda: _cut(SHORT_S),
    "store frozen": _freeze_store,
    "ctrl-c": _wait,
}


class Training:
    """A small model that is trained, saved and resumed in one way."""

    def __init__(self, folder: Path, way: str, faults: Faults) -> None:
        torch.manual_seed(0)
        self._folder, self._faults, self._rank = folder / "checkpoints", faults, dist.get_rank()
        module = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU())))
        self._model: Any = ddp_compile(module, backend="aot_eager", bucket_cap_mb=0.005, **WAYS[way])
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        if way == "sharded":
            shard_optimizer(self._optimizer, self._model)

    def step(self, number: int) -> float:
        faults = self._faults
        faults.step = number
        rows = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * number + self._rank))
        self._optimizer.zero_grad()
        faults.pass_by("forward")
        outputs = self._model(rows)
        outputs.register_hook(lambda _gradient: faults.pass_by("backward"))
        loss = (outputs - rows.roll(1, 1)).square().mean()
        loss.backward()
        faults.pass_by("optimizer")
        self._optimizer.step()
        faults.pass_by("after the step")
        return loss.item()

    def save(self, number: int) -> None:
        """Every rank writes its own file, since parameters may differ. Only complete files have the name of one."""
        state = {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "algorithm": self._model.comm_algorithm.state_dict(),
        }
        path = self._path(number)
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def resume(self) -> int:
        """Load the newest checkpoint that every rank has; the number of steps done."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, set(map(_step_of, self._folder.glob(f"step_*.rank{self._rank}.pt"))))
        number = max(set.intersection(*everyone), default=0)
        if number:
            state = torch.load(self._path(number), weights_only=True)
            self._model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
            self._model.comm_algorithm.load_state_dict(state["algorithm"])
        return number

    def _path(self, number: int) -> Path:
        return self._folder / f"step_{number}.rank{self._rank}.pt"


def _step_of(path: Path) -> int:
    return int(path.name.split(".")[0].removeprefix("step_"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--fault", choices=_STRIKES)
    parser.add_argument("--at", choices=POINTS, default="backward")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    faults = Faults(arguments.folder, arguments.fault, arguments.at)
    training = Training(arguments.folder, arguments.way, faults)
    first = training.resume()
    with (arguments.folder / f"losses.rank{dist.get_rank()}").open("a", buffering=1) as log:
        log.write(f"{json.dumps({'begins after': first})}\n")
        for number in range(first + 1, NUM_STEPS + 1):
            log.write(f"{json.dumps({'step': number, 'loss': training.step(number)})}\n")
            if number % STEPS_BETWEEN_CHECKPOINTS == 0:
                training.save(number)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
