"""What do the docs name? Their code blocks, the code within their sentences, their links."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

__all__ = ["PAGES", "ROOT", "blocks", "commands", "commands_with_output", "prose", "sources", "spans", "words"]

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, *languages: str) -> list[str]:
    """What stands in fences of these languages; ``""`` is one of none."""
    return [text for language, text in _BLOCK.findall(page.read_text()) if language in languages]


def commands_with_output(page: Path, beginning: str) -> list[tuple[str, str]]:
    """Commands that stand alone in a fence, with what stands in the fence of text after it."""
    found = re.findall(r"```sh\n([^\n]+)\n```\n+```text\n(.*?)```", page.read_text(), re.DOTALL)
    return [(command, printed) for command, printed in found if command.startswith(beginning)]


def prose(page: Path) -> str:
    """All but that."""
    return _BLOCK.sub("", page.read_text())


def words(page: Path) -> int:
    """Of sentences and tables that somebody wrote: without code, and without what a program puts between its marks."""
    return len(re.sub(r"<!-- made by .*?: begin -->.*?: end -->", "", prose(page), flags=re.DOTALL).split())


def spans(page: Path) -> list[str]:
    """What stands in backticks, each in one line."""
    return [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(page))]


def commands(page: Path) -> list[str]:
    """Lines for a shell, continued ones joined, comments cut off: of blocks, indented ones, and of sentences."""
    text = "\n".join(
        [*blocks(page, "", "sh", "bash", "console"), *re.findall(r"^    (\w.*)$", prose(page), re.MULTILINE)]
    )
    lines = text.replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+#.*", "", line.strip().removeprefix("$ ")) for line in lines] + spans(page)


@cache
def sources() -> str:
    """Everything that the docs speak of: code, chart, tests, and the names of their files."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    files = [Path(name) for name in listed] or [path.relative_to(ROOT) for path in ROOT.glob("[a-z]*/**/*.*")]
    texts = [
        (ROOT / path).read_text(errors="replace")
        for path in files
        if path.parts[0] != "docs" and path.suffix not in (".md", ".lock") and (ROOT / path).is_file()
    ]
    return "\n".join([*map(str, files), *texts])
