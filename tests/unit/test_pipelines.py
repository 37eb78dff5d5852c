"""The version of the pipelines follows their sources, so that no cache gives back what another one has made."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from ddp_compile import passes
from ddp_compile.compile import pipelines
from ddp_compile.compile.pipelines import digest_of_sources, pipelines_version


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "some_passes"
    folder.mkdir()
    for name in ("__init__", "first", "second"):
        (folder / f"{name}.py").write_text(f"NAME = {name!r}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.startswith("some_passes")]:
        del sys.modules[name]


def test_any_source_changes_it_and_their_order_does_not(package: Path) -> None:
    names = ["some_passes.first", "some_passes.second"]
    before = digest_of_sources(names)
    assert before == digest_of_sources(names[::-1]) and len(before) == 16
    (package / "second.py").write_text("NAME = 'third!'\n")
    assert digest_of_sources(names) != before
    assert digest_of_sources(names[:1]) != before


def test_the_folder_of_passes_names_each_file() -> None:
    folder = Path(passes.__path__[0])
    assert {p.name for p in folder.rglob("*.py")} - {"__init__.py"} <= set(re.findall(r"\w+\.py", passes.__doc__ or ""))


def test_every_pass_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(pipelines, "digest_of_sources", lambda names: asked.extend(names) or "0")
    pipelines_version.__wrapped__()
    for run_pass in (*pipelines.FORWARD_SPLIT, *pipelines.BACKWARD_SPLIT):
        assert run_pass.__module__ in asked
    assert {"ddp_compile.passes.analysis.graph_nodes", "ddp_compile.torch_internals.backward_compile"} <= set(asked)
    assert len(asked) == len(set(asked))
