"""docs/ddp_parity.md has a line for everything that DistributedDataParallel has, and each line names tests that exist.

This file does not run those tests; ``make parity`` runs just these and writes the page.
"""

import inspect

import pytest
import torch
from parity import write_page
from parity.write_page import PAGE, differences, format_page, load_rows, problems_of
from shared_fixtures import COLLECTED
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ddp_compile
from ddp_compile.config import DDP_ARGUMENTS_REPLACED
from ddp_compile.validation.torch_version import is_newer_than_tested

ROWS = load_rows()


@pytest.fixture(scope="module")
def markers(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """The markers of each case that the rows list, by node id."""
    items, listed = request.config.stash[COLLECTED], {test for row in ROWS for test in row.tests}
    if not {test.split("::")[0] for test in listed} <= {item.nodeid.split("::")[0] for item in items}:
        pytest.skip("not all files of the rows' tests were collected")
    return write_page.markers_of(write_page.only_listed(items, listed))


def names_in_torch(section: str) -> set[str]:
    if section == "arguments":
        return set(inspect.signature(DistributedDataParallel).parameters)
    return {name for name in vars(DistributedDataParallel) if not name.startswith("_")}


@pytest.mark.parametrize("section", ["arguments", "methods"])
def test_rows_of_this_torch(section: str) -> None:
    found = differences(section, ROWS, names_in_torch(section), torch.__version__)
    if found and is_newer_than_tested(torch.__version__):
        pytest.skip("; ".join(found))  # said by every run, and no reason why nothing else could be tried with it
    assert found == []


def test_refused_arguments() -> None:
    for row in ROWS:
        if row.section == "arguments":
            assert (row.verdict == "refused") == (row.name in DDP_ARGUMENTS_REPLACED), row.name


def test_rows_of_our_arguments() -> None:
    names = {name for row in write_page.own_arguments() for name in row.split()}
    of_ddp = {row.name for row in ROWS if row.section == "arguments"}
    taken = set(inspect.signature(ddp_compile).parameters) - {"positional", "unknown"}
    assert names == taken - of_ddp


def test_tests_of_rows_exist(markers: dict[str, list[str]]) -> None:
    assert problems_of(ROWS, markers) == []


def test_every_row_is_tested_in_ci(markers: dict[str, list[str]]) -> None:
    in_ci = {case: marks for case, marks in markers.items() if "long" not in marks}
    assert [row.name for row in ROWS if row.tests and not write_page.cases_of(row, in_ci)] == []


def test_page(markers: dict[str, list[str]]) -> None:
    assert PAGE.read_text() == format_page(ROWS, markers), "run make parity"
