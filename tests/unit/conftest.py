"""Fixtures of the unit tests."""

from __future__ import annotations

import pytest
from kernel_choice import Asked

from ddp_compile.kernels.native import library


@pytest.fixture(params=[None, "reference"], ids=["native", "reference"])
def asked(request: pytest.FixtureRequest) -> Asked:
    """Each implementation that a CPU has."""
    library.load()  # it has to be there: nothing may pass because it is missing
    return Asked(request.param)
