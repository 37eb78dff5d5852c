"""What the documents promise is what the code does."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ddp_compile
from ddp_compile.config import DDP_ARGUMENTS_REPLACED

ROOT = Path(__file__).parents[2]


def documented_arguments() -> dict[str, str]:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", (ROOT / "docs" / "arguments.md").read_text(), re.MULTILINE)
    return dict(rows)


def test_every_argument_of_ddp_has_a_row() -> None:
    # An older torch has fewer arguments than the table, which follows torch 2.13.
    missing = set(inspect.signature(DistributedDataParallel).parameters) - set(documented_arguments())
    assert missing == set()


def test_rows_say_refused_where_the_code_refuses() -> None:
    taken = set(inspect.signature(ddp_compile).parameters) - {"unknown"}
    for name, row in documented_arguments().items():
        assert (name in taken) == row.startswith("the same"), name
        assert (name in DDP_ARGUMENTS_REPLACED) == (name not in taken), name


def test_links_between_documents_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
