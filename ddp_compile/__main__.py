"""``python -m ddp_compile COMMAND``."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from ddp_compile.bench.arguments import add_bench_arguments
from ddp_compile.commands.arguments import add_explain_arguments, add_plan_arguments


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, by default that of the process, and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m ddp_compile")
    commands = parser.add_subparsers(dest="command", required=True)
    bench_parser = commands.add_parser("bench", help="time ddp_compile and everything it can be compared with")
    add_bench_arguments(bench_parser)
    explain_parser = commands.add_parser("explain", help="explain how a model would be trained, without training it")
    add_explain_arguments(explain_parser)
    plan_parser = commands.add_parser("plan", help="predict steps from measured ones, and save the best bucket plan")
    add_plan_arguments(plan_parser)
    parsed = parser.parse_args(arguments)
    modules = {"bench": "bench.cli", "explain": "commands.explain", "plan": "commands.plan"}
    return import_module(f"ddp_compile.{modules[parsed.command]}").run(parsed)


if __name__ == "__main__":
    sys.exit(main())
