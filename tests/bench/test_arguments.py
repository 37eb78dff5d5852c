"""The command line: its help, and that a recorded command line can be run again."""

from __future__ import annotations

import argparse
import re
import shlex

import pytest

from ddp_compile.bench.cli import add_arguments, command_line


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
    assert len(help_of) >= 16
    assert [option for option, said in help_of.items() if "default: " not in said] == ["--only-steps"]
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
        ["--only-steps", "--output", "a folder", "--model", "my.module:model", "--depth", "3"],
        ["--link", "simulated:1gbit,simulated:2.5gbit", "--simulated-ranks", "2"],
        ["--link", "2.5gbit,none", "--bucket-cap-mb", "0.1,25", "--implementations", "all", "--ranks", "4"],
    ],
)
def test_a_command_can_be_asked_for_again(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    asked = parser.parse_args(arguments)
    words = shlex.split(command_line(asked))
    assert words[:4] == ["python", "-m", "ddp_compile", "bench"]
    assert "--rounds" in words  # defaults too, since they may change
    assert parser.parse_args(words[4:]) == asked
