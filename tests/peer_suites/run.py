"""torch's own tests of DistributedDataParallel, with ddp_compile in its place: ``python tests/peer_suites/run.py``.

Each test that names DistributedDataParallel runs with it first, on the CPU. If that passes, it runs with ddp_compile,
which has to pass too, unless the test is in not_applicable.toml; then it has to fail with the error given there. Prints
a line for each test, and a table. The exit code is 1 if one failed.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from cheap_compiles import make_compiles_cheap
from peer_suites import on_ranks, stand_ins, verdict
from peer_suites.torch_suites import PeerTest, find_tests

#: For one test on its ranks; they are ended then. A few have many cases.
LIMIT_S = 300.0
LIMITS_S = {"test_ddp_uneven_inputs": 1800.0}

NOT_BY_DDP = "not passed by DistributedDataParallel here"
ROWS = {
    verdict.PASSED: "passed",
    verdict.INTERNALS: "look at the inside of DistributedDataParallel",
    verdict.WORDS: "ask for the words of an error that has others here",
    verdict.COMPILED: "see what torch.compile does by itself",
    verdict.REFUSED: "do what is refused here",
    verdict.FAILED: "failed",
    NOT_BY_DDP: NOT_BY_DDP,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", metavar="PART", action="append", help="only tests with this in their name; repeatable")
    parser.add_argument("--backend", default=stand_ins.backend, help="what ddp_compile compiles with (%(default)s)")
    parser.add_argument(
        "--details", action="store_true", help="print tracebacks and what the ranks of failed tests print"
    )
    options = parser.parse_args(arguments)
    tests = [test for test in find_tests() if not options.k or any(part in test.name for part in options.k)]
    listed = verdict.read_list()
    prepare_copies(options.backend)
    counts: Counter[str] = Counter()
    passed_by_ddp = set()
    for test in tests:
        row, text, details = NOT_BY_DDP, why_not_by_ddp(test), ""
        if not text:
            passed_by_ddp.add(test.name)
            row, text, details = judge(test, options.backend, listed.get(test.name))
        counts[row] += 1
        print(f"{test.name}: {row}  {text}", flush=True)
        if row == verdict.FAILED and options.details:
            print(details, flush=True)
    if not options.k:
        for name in sorted(listed.keys() - passed_by_ddp):
            counts[verdict.FAILED] += 1
            print(f"{name}: drop its line in {verdict.LIST.name}: no such test, or DistributedDataParallel fails it")
    print_table(counts, options.backend)
    return 1 if counts[verdict.FAILED] else 0


def prepare_copies(backend: str) -> None:
    """Import and set up what every rank needs; the ranks are copies of this process."""
    make_compiles_cheap()
    torch.compile(torch.sin, backend=backend)(torch.ones(1))


def run(test: PeerTest, stand_in: type) -> on_ranks.TestEnd:
    return on_ranks.run_on_ranks(test, stand_in, LIMITS_S.get(test.name, LIMIT_S))


def why_not_by_ddp(test: PeerTest) -> str:
    """Empty if DistributedDataParallel passes, and the test makes one at all."""
    end = run(test, stand_ins.DDPOnCPU)
    if end.outcome != on_ranks.PASSED:
        return f"{end.outcome}: {end.error.splitlines()[0] if end.error else ''}"
    return "" if end.made_one else "makes none"


def judge(test: PeerTest, backend: str, listed: verdict.Listed | None) -> tuple[str, str, str]:
    """The row of the table, a message, and the output of the ranks."""

    def run_with(name: str) -> on_ranks.TestEnd:
        stand_ins.backend = name
        return run(test, stand_ins.Replicated)

    def passes_eagerly() -> bool:
        return run_with("eager").outcome == on_ranks.PASSED

    end = run_with(backend)
    row, text = verdict.judge(end.outcome == on_ranks.PASSED, end.error, listed, passes_eagerly)
    return row, f"{end.seconds:.0f} s  {text}", end.details


def print_table(counts: Counter[str], backend: str) -> None:
    print(f"\ntorch {torch.__version__}, gloo, backend {backend}")
    for row, label in ROWS.items():
        print(f"{counts[row]:5}  {label}")


if __name__ == "__main__":
    sys.exit(main())
