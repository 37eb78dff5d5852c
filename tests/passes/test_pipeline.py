"""Passes run in order and are observed, and the version of the pipelines depends on their sources."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from graphs import chain, context
from torch import fx

from ddp_compile.compile import pipelines
from ddp_compile.compile.pipelines import digest_of_sources, pipelines_version
from ddp_compile.passes.pipeline import PassContext, PassResult, run_pipeline


def test_broken_graph_raises() -> None:
    def break_order_pass(gm: fx.GraphModule, ctx: PassContext) -> PassResult:
        first, second, *_ = (node for node in gm.graph.nodes if node.op == "call_function")
        second.append(first)
        return PassResult(gm, 1)

    seen: list[str] = []
    with pytest.raises(RuntimeError, match="was used before it has been defined"):
        run_pipeline(chain(1).gm, context({}), [break_order_pass], lambda heading, _: seen.append(heading))
    assert seen == ["graph before"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "some_passes"
    folder.mkdir()
    for name in ("__init__", "first", "second"):
        (folder / f"{name}.py").write_text(f"NAME = {name!r}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.startswith("some_passes")]:
        del sys.modules[name]


def test_digest_of_sources(package: Path) -> None:
    names = ["some_passes.first", "some_passes.second"]
    before = digest_of_sources(names)
    assert before == digest_of_sources(names[::-1]) and len(before) == 16
    (package / "second.py").write_text("NAME = 'third!'\n")
    assert digest_of_sources(names) != before
    assert digest_of_sources(names[:1]) != before


def test_version_covers_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(pipelines, "digest_of_sources", lambda names: asked.extend(names) or "0")
    pipelines_version.__wrapped__()
    for run_pass in (*pipelines.FORWARD_SPLIT, *pipelines.BACKWARD_SPLIT):
        assert run_pass.__module__ in asked
    assert {"ddp_compile.passes.analysis.graph_nodes", "ddp_compile.torch_internals.backward_compile"} <= set(asked)
    assert len(asked) == len(set(asked))
