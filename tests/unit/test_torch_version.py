"""A torch that is newer than the tested ones gives one warning, and works."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from ddp_compile import ddp_compile
from ddp_compile.validation.torch_version import NEWEST_TESTED, is_newer_than_tested, warn_of_newer_torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def as_in_a_new_process() -> Iterator[None]:
    warn_of_newer_torch.cache_clear()
    yield
    warn_of_newer_torch.cache_clear()


@pytest.mark.parametrize(
    ("version", "newer"),
    [
        ("2.11.0", False),
        (f"{NEWEST_TESTED}.0", False),
        (f"{NEWEST_TESTED}.7+cpu", False),
        ("2.16.0a0+git1234567", True),
        ("2.100.0", True),
        ("3.0.0", True),
        ("unknown", False),
    ],
)
def test_versions(version: str, newer: bool) -> None:
    assert is_newer_than_tested(version) is newer


@pytest.mark.usefixtures("single_rank_group", "as_in_a_new_process")
def test_warning_of_a_newer_torch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.99.0+cpu"))
    for _ in range(2):
        ddp_compile(nn.Linear(3, 3))
    (said,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert said.getMessage().startswith(f"rank 0: torch 2.99.0+cpu is newer than torch {NEWEST_TESTED}, the newest")
    assert f"install torch {NEWEST_TESTED} or a newer ddp_compile" in said.getMessage()


def test_newest_version_of_the_page() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    versions = re.findall(r"^\| CPUs, gloo \| (\d+)\.(\d+)\.\d+", page, re.MULTILINE)
    assert max((int(major), int(minor)) for major, minor in versions) == tuple(map(int, NEWEST_TESTED.split(".")))
