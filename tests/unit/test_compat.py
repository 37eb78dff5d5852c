"""What ``make compat`` says of a run of the tests."""

from __future__ import annotations

from pathlib import Path

from compat.run import count_outcomes, format_summary

REPORT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest">
  <testcase classname="tests.unit.test_config" name="test_a[1]" time="0.1"/>
  <testcase classname="tests.unit.test_config" name="test_a[2]" time="0.1"><system-out>ok</system-out></testcase>
  <testcase classname="tests.unit.test_config" name="test_b"><skipped message="no device"/></testcase>
  <testcase classname="tests.multiproc.test_join" name="test_c"><failure message="it differs"/></testcase>
  <testcase classname="tests.multiproc.test_join" name="test_d"><error message="in a fixture"/></testcase>
  <testcase classname="" name="tests.fuzz.test_fuzz"><error message="cannot be imported"/></testcase>
</testsuite></testsuites>
"""


def test_tests_are_counted_by_folder_and_outcome(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert format_summary(count_outcomes(report), "2.15.0+cpu").split("\n") == [
        "collection: 0 passed, 1 failed, 0 skipped",
        "multiproc: 0 passed, 2 failed, 0 skipped",
        "unit: 2 passed, 0 failed, 1 skipped",
        "torch 2.15.0+cpu: 2 passed, 3 failed, 1 skipped",
        "| 2.15.0+cpu | 2 | 3 | 1 |",
    ]
