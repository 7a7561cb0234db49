"""Do README and docs make a site, with every page in its contents and every link right?"""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from tests.end_to_end.doc_pages import ROOT

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def build(tree: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """As `make docs` does."""
    recipe = re.search(r"^docs: .*\n\t(.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe
    command = f"{recipe[1].replace('$(BIN)', sysconfig.get_path('scripts'))} --site-dir {folder}"
    return subprocess.run(["sh", "-c", command], cwd=tree, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_a_site_with_something_wrong_is_not_built(tmp_path: Path) -> None:
    """With ``--quiet``, mkdocs lets through what ``--strict`` refuses."""
    (tmp_path / "docs").mkdir()
    validation = (ROOT / "mkdocs.yml").read_text().partition("validation:")[2].partition("\nnav:")[0]
    (tmp_path / "mkdocs.yml").write_text(f"site_name: s\nnav: [index.md]\nvalidation:{validation}\n")
    page = tmp_path / "docs" / "index.md"
    page.write_text("# A page\n")
    right = build(tmp_path, tmp_path / "site")
    assert right.returncode == 0, right.stderr
    page.write_text("# A page\n\n[There](gone.md)\n")
    assert_is_refused(tmp_path)
    page.write_text("# A page\n")
    (tmp_path / "docs" / "in_no_contents.md").write_text("# Another\n")
    assert_is_refused(tmp_path)


def assert_is_refused(tree: Path) -> None:
    refused = build(tree, tree / "site")
    assert refused.returncode != 0
    assert "strict mode" in refused.stdout


@pytest.mark.variant
def test_nothing_lies_in_the_site_that_python_left_behind(site: Path) -> None:
    assert not list(site.rglob("__pycache__"))


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


def test_language_models_find_all_pages_of_the_contents(site: Path) -> None:
    listed = re.findall(r"^- \[(.+?)\]\((\S+)\): (.+)$", (site / "llms.txt").read_text(), re.MULTILINE)
    assert {link for _, link, _ in listed} >= {"index.html", "INSTALL.html", "trainers/torchrun.html", "changelog.html"}
    everything = (site / "llms-full.txt").read_text()
    for title, link, says in listed:
        assert (site / link).exists(), link
        assert len(says) > 10, f"{title} begins with no sentence"
    for page in (ROOT / "docs").glob("*.md"):
        assert page.read_text().splitlines()[0] in everything, page.name


def test_a_page_that_is_opened_as_a_file_can_search(site: Path) -> None:
    """It finds the index and the search's own script beside it, and asks nobody else for anything."""
    assert "read amplification" in (site / "search" / "search_index.js").read_text()
    for path in site.rglob("*.html"):
        scripts = re.findall(r'<script[^>]* src="([^"]+)"', path.read_text())
        assert any(script.endswith("iframe-worker.js") for script in scripts), path.relative_to(site)
        if path.name != "404.html":
            assert all((path.parent / script).exists() for script in scripts), path.relative_to(site)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_finds_words_in_pages_that_are_files(site: Path, tmp_path: Path) -> None:
    assert "PROTOCOL.html" in found_by_browser(site, "ghost+cache", tmp_path / "first")
    assert found_by_browser(site, "nosuchword", tmp_path / "second") == set()


def found_by_browser(site: Path, words: str, user_data: Path) -> set[str]:
    """The pages that the front page's search lists, as a headless browser shows them."""
    assert CHROMIUM is not None
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
    ]
    flags += ["--no-first-run", f"--user-data-dir={user_data}", "--virtual-time-budget=20000", "--dump-dom"]
    page = f"{(site / 'index.html').as_uri()}?q={words}"
    shown = subprocess.run([CHROMIUM, *flags, page], capture_output=True, text=True, timeout=200)
    assert re.search("matching documents?<", shown.stdout), f"the search said nothing: {shown.stderr[-2000:]}"
    links = re.findall(r'<a href="([^"#]*)[^"]*" class="md-search-result__link"', shown.stdout)
    return {link.rpartition("/")[2] for link in links}
