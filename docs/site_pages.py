"""Which pages of the site are not in docs/? The README begins it; the changelog and others lie where people look for
them in a repository. Links between them are turned into those of the site. mkdocs calls these functions."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

__all__ = ["on_files", "on_page_markdown"]

_ROOT = Path(__file__).parents[1]
_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting_security.md",
    "examples/README.md": "examples.md",
}
"""Where each lies in the repository, and in the site."""
_LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for source, page in _PAGES.items():
        files.append(File.generated(config, page, content=(_ROOT / source).read_text()))
    for script in sorted((_ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{script.name}", content=script.read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links that are right in the repository become right in the site; those to its folders become their names."""
    here = page.file.src_uri
    source = next((name for name, of_site in _PAGES.items() if of_site == here), f"docs/{here}")

    def in_site(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        found = _PAGES.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(found) is None:
            return "]" if link.start() else link[0]
        return f"]({posixpath.relpath(found, posixpath.dirname(here) or '.')}{link[2] or ''})"

    return _LINK.sub(in_site, markdown)
