"""What the site takes from outside of docs/, and where the pages' links lead on it.

The pages are written for who reads them in the repository: a link is a path of it. The names of the functions are those
that MkDocs calls.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_logger = logging.getLogger("mkdocs.hooks")
ROOT = Path(__file__).resolve().parents[2]

#: Files of the repository that are pages of the site as well; those of docs/ all are.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
#: Where pages have pictures from.
PICTURES = "benchmarks/results/**/*.png"

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")
_REFERENCE = re.compile(r"^<!-- (::: [\w.]+) -->$", re.MULTILINE)
_ELSEWHERE = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="((?:https?:)?//[^"]*)"')
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add what lies outside of docs/."""
    pictures = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob(PICTURES))]
    for source, page in {**PAGES, **{name: name for name in pictures}}.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links lead to the site's pages, and put the reference in, which is a comment where nobody makes it."""
    here = page.file.src_uri
    folder = posixpath.dirname(_path_in_repository(here))

    def leads_on_the_site(link: re.Match[str]) -> str:
        is_picture, text, path, anchor = link.groups(default="")
        target = posixpath.normpath(posixpath.join(folder, path))
        uri = _uri_on_site(target)
        file = files.get_file_from_path(uri)
        if file is not None:
            if text == path and file.page is not None:  # in the repository a path says more than a title
                text = file.page.title or text
            return f"{is_picture}[{text}]({posixpath.relpath(uri, posixpath.dirname(here))}{anchor})"
        if not (ROOT / target).exists():
            return link[0]  # for MkDocs to complain of
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/HEAD/{target})" if config.repo_url else text

    parts, end = [], 0
    for code in _CODE.finditer(markdown):
        parts += [_LINK.sub(leads_on_the_site, markdown[end : code.start()]), code[0]]
        end = code.end()
    parts.append(_LINK.sub(leads_on_the_site, markdown[end:]))
    return _REFERENCE.sub(r"\1", "".join(parts))


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Write one colon for the two with which docstrings announce code."""
    return html.replace("::</p>", ":</p>")


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Warn, which --strict makes an error, of a page that would load something from elsewhere."""
    for loaded in _ELSEWHERE.findall(output):
        _logger.warning("%s loads %s from elsewhere; the site has to work without a network", page.file.src_uri, loaded)
    return output


def _uri_on_site(path: str) -> str:
    return PAGES.get(path, path.removeprefix("docs/"))


def _path_in_repository(uri: str) -> str:
    sources = {page: source for source, page in PAGES.items()}
    return sources.get(uri, f"docs/{uri}")
