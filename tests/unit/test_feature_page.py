"""docs/feature_compatibility.md is the page generated from the table of exclusions."""

from __future__ import annotations

from parity.write_features_page import PAGE, format_page


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text() == format_page(), "run python tests/parity/write_features_page.py"
