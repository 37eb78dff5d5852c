"""The start of pytest. Fixtures that several kinds of tests share are in `shared_fixtures`."""

import importlib

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """The process that distributes tests runs none, so it should not wait seconds to import torch."""
    hands_tests_out = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not hands_tests_out:
        config.pluginmanager.register(importlib.import_module("shared_fixtures"))
