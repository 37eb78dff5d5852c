"""The command line: its help, and that a recorded command line can be run again."""

from __future__ import annotations

import argparse
import re
import shlex

import pytest

from ddp_compile.__main__ import main
from ddp_compile.bench.cli import _checked, add_arguments, command_line


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser


@pytest.fixture
def help_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """What the help says of each option."""
    options = re.split(r"\n  (?=--)", parser.format_help())[1:]
    return {option.split()[0]: " ".join(option.split()) for option in options}


def test_help_names_every_default(help_of: dict[str, str]) -> None:
    assert len(help_of) >= 17
    assert [option for option, said in help_of.items() if "default: " not in said] == ["--algorithms", "--only-steps"]
    assert help_of["--rounds"].endswith("(default: 12)")
    assert help_of["--modes"].endswith("(default: default)")


@pytest.mark.parametrize(
    ("option", "returned"),
    [("--model", "returns a model, a function that makes"), ("--implementations", "returns an Implementation")],
)
def test_help_says_what_a_function_of_your_own_returns(help_of: dict[str, str], option: str, returned: str) -> None:
    assert "module:function" in help_of[option] and returned in help_of[option]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--only-steps", "--algorithms", "--output", "a folder", "--model", "my.module:model", "--depth", "3"],
        ["--link", "simulated:1gbit,simulated:2.5gbit", "--simulated-ranks", "2"],
        ["--link", "2.5gbit,none", "--bucket-cap-mb", "0.1,25", "--implementations", "all", "--ranks", "4"],
    ],
)
def test_a_command_can_be_asked_for_again(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    asked = parser.parse_args(arguments)
    words = shlex.split(command_line(asked))
    assert words[:4] == ["python", "-m", "ddp_compile", "bench"]
    assert {"--rounds", "--link"} <= set(words)  # defaults too, since they may change
    assert parser.parse_args(words[4:]) == asked


def test_an_implementation_for_muon_is_measured_with_muon_alone(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--optimizer", "adamw", "--implementations", "muon-owners"]) == 2
    assert "muon-owners needs Muon, and --optimizer is adamw; pass --optimizer muon" in capsys.readouterr().err
    for optimizer, is_measured in (("adamw", False), ("muon", True), ("muon-float32", True)):
        run, _ = _checked(parser.parse_args(["--optimizer", optimizer, "--implementations", "all"]))
        assert ("muon-owners" in {case.implementation for case in run.cases}) == is_measured
