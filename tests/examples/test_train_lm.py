"""The example trains, leaves its files, and goes on from a checkpoint as if it had never stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "train_lm.py"
TINY = "--layers 2 --heads 2 --width 32 --context 16 --batch-size 2 --accumulate 2 --bucket-cap-mb 0.02 --text-mb 0.2"
SETTINGS = [*TINY.split(), "--backend", "eager", "--eval-batches", "2", "--log-every", "2", "--warmup", "2"]
RUN = ["--steps", "5", "--checkpoint-every", "3"]


def run_example(out_dir: Path, *arguments: str | Path) -> str:
    """Run the example on two CPU ranks; returns what it printed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(SCRIPT), *SETTINGS, "--out-dir", str(out_dir), *map(str, arguments)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def read_losses(out_dir: Path) -> dict[str, Any]:
    return json.loads((out_dir / "losses.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    printed = run_example(folder, *RUN, "--checkpoint", folder / "step{step}.pt")
    assert "held-out loss" in printed
    return folder


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_trains(whole: Path) -> None:
    assert {file.name for file in whole.iterdir()} == {"losses.json", "loss.png", "step3.pt", "step5.pt"}
    straight = read_losses(whole)
    assert len(straight["losses"]) == 5
    assert straight["losses"][-1] < straight["losses"][0]
    assert set(straight["held_out"]) == {"0", "5"}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_resumes_exactly(whole: Path, tmp_path: Path) -> None:
    run_example(tmp_path, *RUN, "--resume", whole / "step3.pt")

    straight, continued = read_losses(whole), read_losses(tmp_path)
    # Every digit: the JSON holds floats in the form that reads back as the same float.
    assert continued["losses"] == straight["losses"]
    assert continued["held_out"] == straight["held_out"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_compares_with_ddp(tmp_path: Path) -> None:
    # torch.compile(DistributedDataParallel) refuses buckets of less than 1 MiB.
    printed = run_example(tmp_path, "--compare", "3", "--bucket-cap-mb", "1")

    rows = {line.split()[0]: line.split() for line in printed.splitlines() if line.startswith(("ddp_", "torch.c"))}
    assert rows.keys() == {"ddp_compile", "torch.compile(DDP)"}
    ours, reference = (float(row[-1]) for row in rows.values())
    assert ours == pytest.approx(reference, abs=1e-4), "both train the same model on the same batches"
