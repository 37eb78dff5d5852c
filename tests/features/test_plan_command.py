"""``python -m ddp_compile plan``: predictions from a profile, a plan that can be trained with, and wrong input."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from simulated_steps import Simulation

from ddp_compile import BucketPlan
from ddp_compile.__main__ import main

LAYERS, LAYER_BYTES = 6, 4 * 512 * 512


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Of a layer in each bucket, on a link that takes as long as the computation."""
    names = [f"{LAYERS - 1 - i}.weight" for i in range(LAYERS)]
    buckets = [([name], LAYER_BYTES) for name in names]
    buckets[:2] = [(names[:2], 2 * LAYER_BYTES)]  # a rate needs transfers of two sizes
    report = Simulation(buckets=buckets, ready=[0.022 + 0.001 * i for i in range(LAYERS - 1)], latency_s=2e-5).run()
    report.save(tmp_path / "report.json")
    return tmp_path / "report.json"


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["plan", *words])
    return status, *capsys.readouterr()


def test_from_profile_to_plan(capsys: pytest.CaptureFixture[str], profile: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    link = ("--world-size", "8", "--bandwidth", "10gbit", "--latency", "20us")
    status, out, err = plan(capsys, "--profile", str(profile), *link, "--save", str(path))
    assert (status, err) == (0, "")
    assert re.match(r"6 gradients, 6\.0 MiB; 2\d\.\d\d ms a step on one rank, from 20 steps of .*: it is left", out)
    assert "\n8 ranks, link: 10gbit, 20us, 1 rank a node\n" in out
    times = {name.strip(): float(ms) for name, ms in re.findall(r"^(\S.*?)  +(\d+\.\d\d) ", out, re.MULTILINE)}
    assert len(times) == 8 and times["best boundaries"] < times["buckets of 100 MiB"]
    assert times["best boundaries"] <= min(time for name, time in times.items() if not name.startswith("sharded"))
    assert re.search(r'fastest: .*best.*\n    ddp_compile\(model, bucket_plan="' + str(path), out)
    assert f"{path} has the plan of: best boundaries" in out  # the profile has no sharded optimizer
    assert 1 < len(BucketPlan.load(path).buckets) <= LAYERS


def test_measured_link(capsys: pytest.CaptureFixture[str], profile: Path) -> None:
    status, out, _ = plan(capsys, "--profile", str(profile))
    assert status == 0 and "\n2 ranks, link: as measured, 20 us and 1000.0 us/MB for an all-reduce\n" in out
    assert "\ndefault capacities: 1, then 5 MiB, those for cpu; --device" in out
    _, on_cuda, _ = plan(capsys, "--profile", str(profile), "--device", "cuda")
    assert "\ndefault capacities: 1, then 25 MiB, those for cuda; --device" in on_cuda
    assert "(pass --save FILE to write the plan of: best boundaries)" in out


def test_steps_over_ranks(capsys: pytest.CaptureFixture[str], profile: Path, tmp_path: Path) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    link = ("--world-size", "48", "--bandwidth", "10gbit", "--intra-node", "3")
    with mock.patch.object(
        figures.Figure, "savefig", autospec=True, side_effect=lambda figure, *_, **__: drawn.append(figure)
    ):
        _, out, _ = plan(capsys, "--profile", str(profile), *link, "--png", str(tmp_path / "steps.png"))
    (axes,), (legend,) = drawn[0].axes, drawn[0].legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert f"fastest: {labels[0]}, " in out and labels[-1] == "one rank alone" and len(labels) <= 6
    assert [label.get_text() for label in axes.get_xticklabels()] == ["3", "6", "12", "24", "48", "96"]
    assert len({line.get_color() for line in axes.lines}) == len(labels) == len(axes.lines)
    in_table = {name.strip(): ms for name, ms in re.findall(r"^(\S.*?)  +(\d+\.\d\d) ", out, re.MULTILINE)}
    for line in axes.lines[:-1]:
        assert f"{line.get_ydata()[4]:.2f}" == in_table[str(line.get_label())]
    status, *_ = plan(capsys, "--profile", str(profile), *link, "--png", str(tmp_path / "steps.png"))
    assert status == 0 and (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--world-size", "1", "--bandwidth", "1gbit"), "world_size=1 must be at least 2"),
        (("--world-size", "64"), "--world-size 64: the profile is of 2 ranks; pass --bandwidth and --latency"),
        (("--bandwidth", "1gbit", "--intra-node", "3"), "ranks_per_node=3 must be at least 1 and divide world_size=2"),
        (("--bandwidth", "1gbit", "--latency", "0us"), "latency='0us' must be a number above zero with the unit us"),
        (("--bandwidth", "0gbit"), "rate='0gbit' must be a number with the unit mbit or gbit"),
        (("--bandwidth", "none"), "--bandwidth none is not a rate; pass for example 100gbit"),
        (("--profile", "/no/such"), "--profile /no/such cannot be read: "),
        (("--save", "/no/such/file"), "--save /no/such/file cannot be written: no folder /no/such; create it"),
        (("--png", "steps.png"), "--png steps.png shows more ranks than the profile has; pass --bandwidth and"),
        (("--png", "/no/such/file"), "--png /no/such/file cannot be written: no folder /no/such; create it"),
        (("mine:gpt",), "'mine:gpt' is no longer an argument: the profile has the model's gradients"),
        (("--max-bucket-cap-mb", "3"), "--max-bucket-cap-mb 3 is no longer an argument: pass bucket_cap_mb="),
    ],
)
def test_wrong_input(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], profile: Path) -> None:
    status, out, err = plan(capsys, "--profile", str(profile), *words)
    assert (status, out) == (2, "") and err.startswith("plan: ") and said in err


def test_profile_of_another_algorithm(capsys: pytest.CaptureFixture[str], profile: Path) -> None:
    profile.write_text(profile.read_text().replace('"gradient all-reduce"', '"ByteGrad"'))
    status, _, err = plan(capsys, "--profile", str(profile))
    assert status == 2 and "the profile is of the algorithm 'ByteGrad', whose transfers do not say what" in err
