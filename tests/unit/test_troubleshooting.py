"""The page of error messages quotes the texts in the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [
    ROOT / "setup.py",
    *(path for name in ("ddp_compile", "runtime", "passes", "kernels") for path in (ROOT / name).rglob("*.py")),
]
ANYTHING = "…"


def text_of(node: ast.AST) -> str | None:
    """The text of a string of the sources, with a mark for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[\d.]*[a-z]", ANYTHING, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or ANYTHING for part in node.values)
    return None


def texts() -> list[str]:
    trees = [ast.parse(path.read_text()) for path in SOURCES]
    return [text for tree in trees for node in ast.walk(tree) if (text := text_of(node)) is not None]


def quoted_messages() -> list[str]:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    return [message for row in rows for message in re.findall(r"`([^`]+)`", row)]


def test_messages_of_the_page() -> None:
    said, quoted = "\n".join(texts()), quoted_messages()
    assert len(quoted) > 30
    patterns = {message: ".*".join(map(re.escape, message.split(ANYTHING))) for message in quoted}
    assert [message for message, pattern in patterns.items() if not re.search(pattern, said)] == []
