"""The documents agree with the code, and the page of error messages quotes its texts."""

import ast
import importlib
import pkgutil
import re
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
from parity import write_features_page

ROOT = Path(__file__).parents[2]
SOURCES = [
    ROOT / "setup.py",
    *(path for name in ("ddp_compile", "runtime", "passes", "kernels") for path in (ROOT / name).rglob("*.py")),
]
ANYTHING = "…"


def test_code_of_the_readme_is_typed() -> None:
    (block,) = re.findall(r"^## Use\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    checked = (ROOT / "tests" / "typing" / "readme_calls.py").read_text()
    statements = textwrap.indent(block[block.index("dist.init_process_group") :], "    ")
    assert statements in checked


def test_links() -> None:
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_no_snippet_takes_the_function_for_the_package() -> None:
    with pytest.raises(TypeError, match="write 'from ddp_compile import ddp_compile' instead of 'import ddp_compile'"):
        importlib.import_module("ddp_compile")(None)  # type: ignore[operator]
    assert "shard_optimizer" in dir(importlib.import_module("ddp_compile"))
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for block in re.findall(r"^ *```python\n(.*?)^ *```", document.read_text(), re.MULTILINE | re.DOTALL):
            code = re.sub(r"^ *(from|import) .*", "", block, flags=re.MULTILINE)
            assert re.findall(r"(?<![\w.])ddp_compile\.\w+", code) == [], document.name


def test_no_page_installs_another_package() -> None:
    # The package of that name on the index is unrelated. A wheel's file name, or a checkout's ".[extra]", is ours.
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*"), *SOURCES]:
        text = re.sub(r"\s+", " ", path.read_text()) if path.is_file() and path.suffix in (".md", ".py") else ""
        assert re.findall(r"pip install (?:-\S+ )*['\"]?ddp[-_]compile\b(?!-\*)", text) == [], path


@pytest.mark.parametrize("module", ["ddp_compile", "ddp_compile.algorithms", "ddp_compile.optim"])
def test_reference_has_every_name(module: str) -> None:
    page = (ROOT / "docs" / "reference.md").read_text()
    names = re.findall(r"^<!-- ::: (ddp_compile(?!\.integrations)[\w.]*) -->$", page, re.MULTILINE)
    documented = [pkgutil.resolve_name(name) for name in names]
    for each in [each for each in documented if isinstance(each, ModuleType)]:
        documented += [value for value in vars(each).values() if getattr(value, "__module__", None) == each.__name__]
    exported = importlib.import_module(module)
    missing = [name for name in exported.__all__ if not any(getattr(exported, name) is each for each in documented)]
    assert missing == []


def test_page_of_exclusions() -> None:
    page = write_features_page
    assert page.PAGE.read_text() == page.format_page(), "run python tests/parity/write_features_page.py"


def text_of(node: ast.AST) -> str | None:
    """The text of a string of the sources, with a mark for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[\d.]*[a-z]", ANYTHING, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or ANYTHING for part in node.values)
    return None


def test_messages_of_the_page() -> None:
    nodes = [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text()))]
    said = "\n".join(text for node in nodes if (text := text_of(node)) is not None)
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    quoted = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) > 30
    patterns = {message: ".*".join(map(re.escape, message.split(ANYTHING))) for message in quoted}
    assert [message for message, pattern in patterns.items() if not re.search(pattern, said)] == []
