"""Where pytest begins: the fixtures that several kinds of tests share are those of `shared_fixtures`."""

from __future__ import annotations

import importlib

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """The process that hands tests out runs none: to import torch there as well would be seconds of waiting."""
    hands_tests_out = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not hands_tests_out:
        config.pluginmanager.register(importlib.import_module("shared_fixtures"))
