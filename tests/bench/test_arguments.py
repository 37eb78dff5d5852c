"""The command line of `bench`: it can be run again, and its help names what there is."""

import argparse
import shlex

import pytest

from ddp_compile.bench.arguments import add_bench_arguments, command_line
from ddp_compile.bench.implementations import ALGORITHMS, IMPLEMENTATIONS
from ddp_compile.bench.workloads import LANGUAGE_MODELS, WORKLOADS


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_bench_arguments(parser)
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


def test_help_names_what_there_is(parser: argparse.ArgumentParser) -> None:
    helps = {action.dest: action.help or "" for action in parser._actions}
    assert helps["model"].startswith(f"{', '.join(WORKLOADS)}, or your own")
    assert f"some of {', '.join(IMPLEMENTATIONS)}, and also {', '.join(ALGORITHMS)}, or" in helps["implementations"]
    assert f"({', '.join(LANGUAGE_MODELS)})" in helps["tokens"]
