"""The example trains, writes its files, and continues from a checkpoint as if it had never stopped."""

import json
import os
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.run
from process_copies import Ended, run_in_copy

from lm.algorithms import NAMES

SCRIPT = Path(__file__).parents[2] / "examples" / "train_lm.py"
TINY = "--layers 1 --heads 2 --width 32 --context 16 --batch-size 2 --accumulate 2 --bucket-cap-mb 0.02 --text-mb 0.2"
SETTINGS = [*TINY.split(), "--backend", "eager", "--eval-batches", "2", "--log-every", "2", "--warmup", "2"]
RUN = ["--steps", "5", "--checkpoint-every", "3"]


@torch.compiler.set_stance("force_eager")  # `test_compares_with_ddp` compiles it
def be_a_rank(arguments: list[str]) -> None:
    sys.argv = arguments
    sys.path.insert(0, str(SCRIPT.parent))  # as for a script
    runpy.run_path(str(SCRIPT), run_name="__main__")


def run_ranks(out_dir: Path, *arguments: str | Path, num_ranks: int = 2) -> str:
    """Run the example on CPU ranks; returns what rank 0 printed.

    Without a launcher: ranks are copies of a process that has imported torch, which takes seconds.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(num_ranks)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "LOCAL_WORLD_SIZE": "2"}
    # Started by a launcher, whose store is the one above.
    environment |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    command = [str(SCRIPT), *SETTINGS, "--out-dir", str(out_dir), *map(str, arguments)]

    def run_rank(rank: int) -> Ended:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return run_in_copy(be_a_rank, command, environment=environment | own, timeout_s=120)

    with ThreadPoolExecutor(num_ranks) as threads:
        ended = list(threads.map(run_rank, range(num_ranks)))
    for done in ended:
        assert done.exit_code == 0, done.stdout + done.stderr
    return ended[0].stdout


def read_losses(out_dir: Path) -> dict[str, Any]:
    return json.loads((out_dir / "losses.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    printed = run_ranks(folder, *RUN, "--checkpoint", folder / "step{step}.pt")
    assert "held-out loss" in printed
    return folder


@pytest.mark.slow
def test_trains(whole: Path) -> None:
    assert {file.name for file in whole.iterdir()} == {"losses.json", "loss.png", "step3.pt", "step5.pt"}
    straight = read_losses(whole)
    assert len(straight["losses"]) == 5
    assert straight["losses"][-1] < straight["losses"][0]
    assert set(straight["held_out"]) == {"0", "5"}


@pytest.mark.slow
def test_resumes_exactly(whole: Path, tmp_path: Path) -> None:
    run_ranks(tmp_path, *RUN, "--resume", whole / "step3.pt")

    straight, continued = read_losses(whole), read_losses(tmp_path)
    # Every digit: the JSON holds floats in the form that reads back as the same float.
    assert continued["losses"] == straight["losses"]
    assert continued["held_out"] == straight["held_out"]


@pytest.mark.slow
@pytest.mark.long
def test_sharded_muon_trains_and_resumes(tmp_path: Path) -> None:
    muon = [*RUN, "--optimizer", "muon"]
    run_ranks(tmp_path / "whole", *muon, "--sharded", "--checkpoint", tmp_path / "step{step}.pt")
    straight = read_losses(tmp_path / "whole")
    assert straight["losses"][-1] < straight["losses"][0]
    for name, options in (("sharded", ["--sharded"]), ("unsharded", [])):
        run_ranks(tmp_path / name, *muon, *options, "--resume", tmp_path / "step3.pt")
        continued = read_losses(tmp_path / name)
        # The norm for clipping is added up in another order if the optimizers are not sharded.
        tolerance = 0 if options else 1e-5
        assert continued["losses"] == pytest.approx(straight["losses"], rel=tolerance, abs=0)
        assert continued["held_out"] == pytest.approx(straight["held_out"], rel=tolerance, abs=0)


@pytest.mark.long
@pytest.mark.slow
def test_padded_trains_what_one_process_trains(tmp_path: Path) -> None:
    def losses(num_ranks: int, average: str) -> list[float]:
        out_dir = tmp_path / f"{num_ranks}_{average}"
        batch = ["--padded", "--context", "128", "--average", average, "--batch-size", str(4 // num_ranks)]
        run_ranks(out_dir, *RUN, *batch, num_ranks=num_ranks)
        found = read_losses(out_dir)
        return [*found["losses"], *found["held_out"].values()]

    alone = losses(1, "tokens")
    assert losses(2, "tokens") == pytest.approx(alone, rel=1e-5)
    assert losses(2, "ranks") != pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--algorithm", "qadam", "--optimizer", "muon"], "leave out --optimizer muon"),
        (["--algorithm", "byte-grad", "--sharded"], "leave out --algorithm byte-grad"),
        (["--compare", "--average", "tokens"], "leave out --average tokens"),
    ],
)
def test_options_that_exclude_each_other(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT))["parse_args"]()
    assert message in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("algorithm", NAMES)
def test_every_algorithm_trains_and_resumes(algorithm: str, tmp_path: Path) -> None:
    named = ["--algorithm", algorithm]
    run_ranks(tmp_path / "whole", *RUN, *named, "--checkpoint", tmp_path / "step{step}.pt")
    run_ranks(tmp_path / "rest", *RUN, *named, "--resume", tmp_path / "step3.pt")
    straight, continued = read_losses(tmp_path / "whole"), read_losses(tmp_path / "rest")
    # QAdam's warm-up, a fifth of five steps, settles nothing.
    assert algorithm == "qadam" or straight["losses"][-1] < straight["losses"][0]
    assert continued["losses"][:3] == straight["losses"][:3]
    if algorithm == "async":  # when a round comes is a matter of time
        assert continued["losses"] == pytest.approx(straight["losses"], rel=0.05)
    else:
        assert continued["losses"] == straight["losses"]
    own = sorted(file.name for file in tmp_path.glob("step3.pt*"))
    averages_gradients = algorithm in ("all-reduce", "bfloat16", "byte-grad", "qadam")
    assert own == ["step3.pt"] if averages_gradients else ["step3.pt", "step3.pt.rank1"]


@pytest.mark.long
@pytest.mark.slow
def test_compares_with_ddp(tmp_path: Path) -> None:
    # torch.compile(DistributedDataParallel) refuses buckets of less than 1 MiB.
    options = [*SETTINGS, "--out-dir", str(tmp_path), "--compare", "3", "--bucket-cap-mb", "1"]
    command = ["--standalone", "--nproc-per-node", "2", str(SCRIPT), *options]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = run_in_copy(torch.distributed.run.main, command, environment=environment, timeout_s=120)
    assert done.exit_code == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith(("ddp_", "torch.c"))]
    rows = {line[0]: line for line in lines}
    assert rows.keys() == {"ddp_compile", "torch.compile(DDP)"}
    ours, reference = (float(row[-1]) for row in rows.values())
    assert ours == pytest.approx(reference, abs=1e-4), "both train the same model on the same batches"
