"""Do README and docs make a site, with every page in its contents and every link right?"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.end_to_end.doc_pages import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_each_page_is_there_and_its_links_lead_to_pages_and_headings_of_the_site(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= {path.relative_to(site) for path in site.rglob("*.html")}
    for path in site.rglob("*.html"):
        for target, anchor in re.findall(r'href="([^":#?]*)(?:#([^"]*))?"', path.read_text()):
            page = (path.parent / target) if target else path
            if path.name != "404.html" and target not in (".", ".."):
                assert page.exists(), f"{path.relative_to(site)} links to {target}"
            if anchor and page.suffix == ".html" and page.exists():
                assert f'id="{anchor}"' in page.read_text(), f"{path.relative_to(site)} links to {target}#{anchor}"


def test_no_link_leads_out_of_the_site_into_the_repository(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert not re.findall(r'href="[^":]*\.md[#"]', path.read_text()), path.relative_to(site)


def test_a_page_that_is_opened_as_a_file_can_search(site: Path) -> None:
    """It finds the index and the search's own script beside it, and asks nobody else for anything."""
    assert "read amplification" in (site / "search" / "search_index.js").read_text()
    for path in site.rglob("*.html"):
        scripts = re.findall(r'<script[^>]* src="([^"]+)"', path.read_text())
        assert any(script.endswith("iframe-worker.js") for script in scripts), path.relative_to(site)
        if path.name != "404.html":
            assert all((path.parent / script).exists() for script in scripts), path.relative_to(site)
