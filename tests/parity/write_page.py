"""Writes docs/ddp_parity.md from the rows in the TOML files next to this one, if every test that they list passes.

``make parity`` runs the tests and writes the page; `tests/unit/test_ddp_parity.py` compares the page with what pytest
collects.

In each row ``says`` is what an argument, method or behavior of DistributedDataParallel is here; ``verdict`` whether it
is the same, better, refused (``says`` is then what to write instead) or not there yet; ``tests`` what proves it: node
ids below tests/, of a whole test or of one of its cases. ``since`` is the torch that brought it, where not all have it
that the package supports.
"""

import sys
import tomllib
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ddp_compile.validation.torch_version import NEWEST_TESTED

OLDEST = "2.11"  # pyproject.toml
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "ddp_parity.md"
SECTIONS = {"arguments": "Arguments of the constructor", "methods": "Methods and attributes", "behavior": "Behavior"}
VERDICTS = ("same", "better", "refused", "not yet")
PROVED = ("same", "better", "refused")

HEAD = """\
# DistributedDataParallel, line by line

Every argument, public method and documented behavior of DistributedDataParallel, of torch {oldest} to {newest}, and
what it is here: the *same*; *better*; *refused* with an error, and what to write instead; or *not yet* there. What came
after torch {oldest} says since when. The last column is the number of tests that hold the line; most compare gradients
with DistributedDataParallel's own, on two or three ranks with gloo.

Every argument except the module is passed by name. An argument that is refused may still be passed with the value that
changes nothing: `None`, `dim=0`, and `False` except for `forward_sync_buffers`. An argument that only a newer torch has
is refused as such. An unknown name is a TypeError that suggests the nearest name, and an error in type checkers.
Some features exclude each other: [feature_compatibility.md](feature_compatibility.md).

`make parity` runs these tests and writes this page from `tests/parity/*.toml`; do not edit it.
"""


class Row(NamedTuple):
    section: str
    name: str
    verdict: str
    says: str
    tests: tuple[str, ...]
    since: str = ""  #: version of the first torch that has it; empty if all have it

    def is_in(self, torch_version: str) -> bool:
        """Whether a torch has it, by its version."""
        return release_of(torch_version) >= release_of(self.since or OLDEST)


def release_of(version: str) -> tuple[int, ...]:
    """What two versions are compared by: (2, 15) of "2.15.0+cpu"."""
    return tuple(map(int, version.split(".")[:2]))


def load_rows() -> list[Row]:
    """All rows, in the order of the page."""
    rows = []
    for section in SECTIONS:
        entries = tomllib.loads((Path(__file__).parent / f"{section}.toml").read_text())
        for name, entry in entries.items():
            tests = tuple(f"tests/{test}" for test in entry.get("tests", ()))
            rows.append(Row(section, name, entry["verdict"], entry["says"], tests, entry.get("since", "")))
    return rows


def own_arguments() -> dict[str, str]:
    """What each argument of ddp_compile does that DistributedDataParallel does not have; several names share a row."""
    return tomllib.loads((Path(__file__).parent / "own_arguments.toml").read_text())


def differences(section: str, rows: Sequence[Row], names: Set[str], torch_version: str) -> list[str]:
    """The differences between the rows of a section and DistributedDataParallel: one line for each name."""
    of_section = [row for row in rows if row.section == section]
    known = {row.name for row in of_section if row.is_in(torch_version)}
    ahead = {row.name: row.since for row in of_section if row.name not in known}
    lines = []
    for name in sorted(names - known):
        since = f', whose row says since = "{ahead[name]}"' if name in ahead else ", which has no row"
        lines.append(f"torch {torch_version} has {name}{since}: tests/parity/{section}.toml")
    if section == "arguments":  # of methods there may be rows for private ones, which are not looked for
        for name in sorted(known - names):
            lines.append(f"torch {torch_version} has no {name}, which has a row: tests/parity/{section}.toml")
    return lines


def cases_of(row: Row, cases: Mapping[str, Any]) -> list[str]:
    """Which of the collected cases prove a row."""
    return [case for case in cases if any(case == test or case.startswith(f"{test}[") for test in row.tests)]


def problems_of(rows: Sequence[Row], cases: Mapping[str, Any]) -> list[str]:
    """The errors in the rows, one line for each; ``cases`` are the node ids of all that were collected."""
    problems = []
    for row in rows:
        if row.verdict not in VERDICTS:
            problems.append(f"{row.name}: verdict {row.verdict!r} is none of {VERDICTS}")
        if (row.verdict in PROVED) != bool(row.tests):
            problems.append(f"{row.name}: {row.verdict!r} with {len(row.tests)} tests; {PROVED} need some, others none")
        for test in row.tests:
            if not cases_of(row._replace(tests=(test,)), cases):
                problems.append(f"{row.name}: there is no {test}")
    return problems


def format_page(rows: Sequence[Row], cases: Mapping[str, Any]) -> str:
    """The page's text; ``cases`` are the node ids of all that have passed."""
    proving = {case for row in rows for case in cases_of(row, cases)}
    totals = ", ".join(f"{sum(row.verdict == verdict for row in rows)} {verdict}" for verdict in VERDICTS)
    lines = [
        HEAD.format(oldest=OLDEST, newest=NEWEST_TESTED),
        f"{len(rows)} lines: {totals}. {len(proving)} tests.",
        "",
    ]
    for section, title in SECTIONS.items():
        lines += [f"## {title}", "", "| DistributedDataParallel | | here | tests |", "|---|---|---|---|"]
        for row in rows:
            if row.section == section:
                name = row.name if section == "behavior" else f"`{row.name}`"
                name += f" (since {row.since})" if row.since else ""
                lines.append(f"| {name} | {row.verdict} | {row.says} | {len(cases_of(row, cases)) or ''} |")
        lines.append("")
    lines += ["## Arguments of ddp_compile alone", "", "| argument | what it does |", "|---|---|"]
    lines += [
        f"| {', '.join(f'`{name}`' for name in names.split())} | {says} |" for names, says in own_arguments().items()
    ]
    return "\n".join([*lines, ""])


def only_listed(items: Iterable[pytest.Item], listed: Container[str]) -> list[pytest.Item]:
    return [item for item in items if item.nodeid in listed or item.nodeid.split("[")[0] in listed]


def markers_of(items: Iterable[pytest.Item]) -> dict[str, list[str]]:
    return {item.nodeid: sorted({mark.name for mark in item.iter_markers()}) for item in items}


class _Recorder:
    """A pytest plugin that deselects all cases except the listed ones, and records their markers and outcomes."""

    def __init__(self, listed: Container[str]) -> None:
        self.listed = listed
        self.markers: dict[str, list[str]] = {}
        self.outcomes: dict[str, set[str]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = only_listed(items, self.listed)
        self.markers = markers_of(items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.outcomes.setdefault(report.nodeid, set()).add(report.outcome)


def run_pytest(rows: Sequence[Row]) -> _Recorder:
    """Run pytest on the tests that the rows list."""
    recorder = _Recorder({test for row in rows for test in row.tests})
    # Whole files, since pytest collects nothing at all if it is given one test that does not exist.
    files = sorted({str(ROOT / test.split("::")[0]) for row in rows for test in row.tests})
    # Including those that CI leaves out, so no marker is requested.
    pytest.main(["--rootdir", str(ROOT), "-m", "", "--quiet", *files], plugins=[recorder])
    return recorder


def main() -> int:
    rows = load_rows()
    recorder = run_pytest(rows)
    problems = problems_of(rows, recorder.markers)
    problems += [f"{case} did not pass" for case in recorder.markers if recorder.outcomes.get(case) != {"passed"}]
    if problems:
        print(f"{PAGE.name} is not written:", *problems, sep="\n  ", file=sys.stderr)
        return 1
    PAGE.write_text(format_page(rows, recorder.markers))
    print(f"{PAGE} written: {len(rows)} lines, {len(recorder.markers)} tests passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
