"""Fixtures of the tests of the harness."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What draws is imported where it is used: matplotlib is optional.


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """The folder of a run, and the charts that were drawn into it."""
    from chart_data import write_all

    from ddp_compile.bench.charts import draw_charts

    directory = write_all(tmp_path_factory.mktemp("run"))
    return directory, draw_charts(directory)


@pytest.fixture(scope="session")
def figures(drawn: tuple[Path, list[Path]]) -> dict[str, Figure]:
    """The figures of the same run, by file name."""
    from chart_data import CHARTS, built

    return {name: figure for name in CHARTS if (figure := built(drawn[0], name)) is not None}
