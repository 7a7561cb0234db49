"""Puts the docs of one version into a site that has those of others: ``python -m release.pages ARCHIVE SITE``.

Each version is a folder; ``versions.json`` lists them, newest first, for the list at the top of each page, and the
front page leads to the newest that is no candidate. What the site had of other versions stays. The standard library
only, since it runs where a release is published.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tarfile
from pathlib import Path

__all__ = ["add"]

_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(.*)")


def add(archive: Path, site: Path) -> list[str]:
    """Returns all versions that the site has then, newest first."""
    with tarfile.open(archive) as opened:
        (version,) = {name.partition("/")[0] for name in opened.getnames()}
        shutil.rmtree(site / version, ignore_errors=True)
        opened.extractall(site, filter="data")
    versions = sorted((found.name for found in site.iterdir() if _VERSION.fullmatch(found.name)), key=_age)
    newest = next((each for each in versions if not _parts(each)[3]), versions[0])
    listed = [{"version": each, "title": each, "aliases": ["latest"] if each == newest else []} for each in versions]
    (site / "versions.json").write_text(json.dumps(listed, indent=1) + "\n")
    (site / "index.html").write_text(
        f'<!doctype html><meta http-equiv="refresh" content="0; url={newest}/index.html">\n'
    )
    (site / ".nojekyll").touch()
    return versions


def _parts(version: str) -> tuple[int, int, int, str]:
    found = _VERSION.fullmatch(version)
    assert found
    return int(found[1]), int(found[2]), int(found[3]), found[4]


def _age(version: str) -> tuple[int, int, int, bool, str]:
    """Smaller is newer; a candidate is older than what it became."""
    major, minor, patch, candidate = _parts(version)
    return -major, -minor, -patch, bool(candidate), candidate


if __name__ == "__main__":
    print("\n".join(add(Path(sys.argv[1]), Path(sys.argv[2]))))
