"""A recorded command line can be run again."""

from __future__ import annotations

import argparse
import shlex

import pytest

from ddp_compile.bench.cli import add_arguments, command_line


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--only-steps", "--output", "a folder", "--model", "my.module:model", "--depth", "3"],
        ["--link", "simulated:1gbit,simulated:2.5gbit", "--simulated-ranks", "2", "--clip", "1", "--tokens"],
        ["--link", "2.5gbit,none", "--bucket-cap-mb", "0.1,25", "--implementations", "all", "--ranks", "4"],
    ],
)
def test_a_command_can_be_asked_for_again(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
    asked = parser.parse_args(arguments)
    words = shlex.split(command_line(asked))
    assert words[:4] == ["python", "-m", "ddp_compile", "bench"]
    assert "--rounds" in words  # defaults too, since they may change
    assert parser.parse_args(words[4:]) == asked
