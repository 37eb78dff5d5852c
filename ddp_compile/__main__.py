"""``python -m ddp_compile COMMAND``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ddp_compile.bench import cli as bench
from ddp_compile.commands import explain, plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, by default that of the process, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m ddp_compile")
    commands = parser.add_subparsers(dest="command", required=True)
    bench_parser = commands.add_parser("bench", help="time ddp_compile and everything it can be compared with")
    bench.add_arguments(bench_parser)
    explain_parser = commands.add_parser("explain", help="explain how a model would be trained, without training it")
    explain.add_arguments(explain_parser)
    plan_parser = commands.add_parser("plan", help="predict steps from measured ones, and save the best bucket plan")
    plan.add_arguments(plan_parser)
    parsed = parser.parse_args(arguments)
    run = {"bench": bench.run, "explain": explain.run, "plan": plan.run}[parsed.command]
    return run(parsed)


if __name__ == "__main__":
    sys.exit(main())
