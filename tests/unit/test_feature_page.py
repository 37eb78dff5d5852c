"""docs/feature_compatibility.md is the page generated from the table of exclusions."""

from __future__ import annotations

from parity.write_features_page import PAGE, format_page


def test_page_of_exclusions() -> None:
    assert PAGE.read_text() == format_page(), "run python tests/parity/write_features_page.py"
