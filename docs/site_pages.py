"""Which pages of the site are not in docs/? The README begins it; the changelog and others lie where people look for
them in a repository. Links between them are turned into those of the site. For language models there are llms.txt, a
list of the pages, and llms-full.txt, which has all of them. mkdocs calls these functions."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

__all__ = ["on_files", "on_nav", "on_page_markdown", "on_post_build"]

_ROOT = Path(__file__).parents[1]
_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting_security.md",
    "CODE_OF_CONDUCT.md": "code_of_conduct.md",
    "examples/README.md": "examples.md",
}
"""Where each lies in the repository, and in the site."""
_LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")
_in_order: list[Any] = []
"""Pages as the site's contents have them."""


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


def on_nav(nav: Any, config: Any, files: Files) -> Any:
    _in_order[:] = nav.pages
    return nav


def on_post_build(config: Any) -> None:
    listed = [f"- [{page.title}]({page.url}): {_first_sentence(page.markdown)}" for page in _in_order]
    head = f"# {config.site_name}\n\n> {config.site_description}\n"
    site = Path(config.site_dir)
    (site / "llms.txt").write_text("\n".join([head, "## Pages\n", *listed, ""]))
    (site / "llms-full.txt").write_text("\n\n".join([head, *(page.markdown.strip() for page in _in_order)]) + "\n")


def _first_sentence(markdown: str) -> str:
    """Of the first paragraph that is text, without its first word where that is a label; links become their words."""
    paragraphs = (" ".join(each.split()) for each in re.sub(r"```.*?```", "", markdown, flags=re.DOTALL).split("\n\n"))
    text = next((each for each in paragraphs if re.match(r"[A-Za-z*`\[]", each)), "")
    plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", re.sub(r"^\*\*\w+\.\*\* ", "", text)).replace("**", "")
    return re.split(r"(?<=[.?!])\s", plain)[0]
