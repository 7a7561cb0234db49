"""`make release`: a tag that is not what it says is refused, and what is published is the tag's."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import helm_python
import pytest
from release.__main__ import Refused, commands_that_publish, main, notes_of, sign_chart, what_is_wrong, with_addresses
from release.pages import add

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What names the version, as if it was released today."""
    for name in (
        *("pyproject.toml", "client/refill/__init__.py", "helm/refill/Chart.yaml", "docker/Dockerfile"),
        *("docker/bake.json", "CITATION.cff", "CHANGELOG.md"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    changelog = (tmp_path / "CHANGELOG.md").read_text()
    (tmp_path / "CHANGELOG.md").write_text(re.sub(rf"## {VERSION} \(.*\)", f"## {VERSION} (2026-01-31)", changelog))
    return tmp_path


def test_a_tree_that_agrees_with_its_tag_is_released(tree: Path) -> None:
    assert what_is_wrong(tree, f"v{VERSION}") == []


@pytest.mark.parametrize(
    ("tag", "says"),
    [
        (VERSION, "is no tag of a release, like v0.1.0"),
        ("v1", "is no tag of a release"),
        ("v77.0.0", "helm/refill/Chart.yaml says"),
        ("v77.0.0", "CHANGELOG.md has no '## 77.0.0 (YYYY-MM-DD)'"),
    ],
)
def test_a_tag_of_another_version_is_refused(tree: Path, tag: str, says: str) -> None:
    assert any(says in wrong for wrong in what_is_wrong(tree, tag))


@pytest.mark.parametrize("day", ["unreleased", "2026-02-30"])
def test_a_changelog_without_a_day_is_refused(tree: Path, day: str) -> None:
    path = tree / "CHANGELOG.md"
    path.write_text(path.read_text().replace("2026-01-31", day))
    assert what_is_wrong(tree, f"v{VERSION}") == [f"CHANGELOG.md says {VERSION} ({day}): put in the day"]


def test_notes_are_what_the_changelog_says_of_one_version() -> None:
    changelog = (
        "# Changelog\n\n## 0.2.0 (2026-02-02)\n\nSecond.\n\n### Fixed\n\n- It.\n\n## 0.1.0 (2026-01-01)\n\nFirst.\n"
    )
    assert notes_of(changelog, "0.2.0") == "Second.\n\n### Fixed\n\n- It.\n"
    assert notes_of(changelog, "0.1.0") == "First.\n"


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md"])
def test_a_page_that_is_shown_elsewhere_leads_to_the_files_of_its_tag(page: str) -> None:
    """The package index shows the README, and the page of a release its notes: neither has docs/ beside it."""
    shown = with_addresses((ROOT / page).read_text(), ROOT, "https://example.com/o/r", "v1.2.3")
    links = re.findall(r"(!?)\[[^]]*\]\(([^)\s]+)\)", shown)
    assert len(links) > 1
    for picture, link in links:
        found = re.fullmatch(r"https://example\.com/o/r/(raw|blob)/v1\.2\.3/([^#]+)(#.*)?", link)
        assert found, link
        assert found[1] == ("raw" if picture else "blob")
        assert (ROOT / found[2]).is_file()


def test_the_workflow_publishes_as_the_printed_commands_do() -> None:
    workflow = " ".join((ROOT / ".github/workflows/release.yml").read_text().split())
    printed = [line for line in commands_that_publish("1.2.3", "build/release") if not line.startswith(("#", "export"))]
    assert len(printed) > 8
    for line in printed:
        tool = " ".join(line.split()[:2])
        assert tool in workflow or tool in ("git push", "oras push"), line
    for signed in (line for line in printed if line.startswith("cosign")):
        assert signed in workflow


@pytest.mark.skipif(shutil.which("gpg") is None, reason="needs gpg")
def test_a_signed_chart_is_verified_and_one_that_was_changed_is_not(tmp_path: Path) -> None:
    home = tmp_path / "gnupg"
    home.mkdir(mode=0o700)

    def gpg(*arguments: str) -> None:
        started = ["gpg", "--homedir", str(home), "--batch", "--quiet", "--pinentry-mode", "loopback"]
        subprocess.run([*started, "--passphrase", "", *arguments], check=True, capture_output=True)

    secret, public = tmp_path / "secret.gpg", tmp_path / "public.gpg"
    try:
        gpg("--quick-generate-key", "refill <release@example.com>", "rsa2048", "sign")
        gpg("--output", str(secret), "--export-secret-keys")
        gpg("--output", str(public), "--export")
    finally:
        subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=False)
    chart = Path(helm_python.package(ROOT / "helm/refill", destination=tmp_path))
    with pytest.raises(Refused, match=r"can't be signed by nobody@example.com: "):
        sign_chart(chart, "nobody@example.com", secret)
    sign_chart(chart, "release@example.com", secret)
    assert "refill <release@example.com>" in helm_python.verify(chart, public)["signed_by"]
    chart.write_bytes(chart.read_bytes() + b"\0")
    with pytest.raises(helm_python.HelmError):
        helm_python.verify(chart, public)


def test_a_key_without_the_file_that_has_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--chart-key", "release@example.com"])
    assert "--chart-key needs --keyring" in capsys.readouterr().err


def archive_of(folder: Path, version: str) -> Path:
    page = folder / "page.html"
    page.write_text(version)
    with tarfile.open(folder / f"{version}.tar.gz", "w:gz") as archive:
        archive.add(page, f"{version}/index.html")
    return folder / f"{version}.tar.gz"


def test_docs_of_a_version_join_those_of_others(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    for version in ("0.9.0", "0.10.0", "0.11.0rc1", "0.2.5"):
        listed = add(archive_of(tmp_path, version), site)
    assert listed == ["0.11.0rc1", "0.10.0", "0.9.0", "0.2.5"]
    assert [each["version"] for each in json.loads((site / "versions.json").read_text())] == listed
    assert "url=0.10.0/index.html" in (site / "index.html").read_text(), "a candidate is nobody's front page"
    assert (site / "0.9.0" / "index.html").read_text() == "0.9.0"


@pytest.mark.variant
def test_a_release_is_built_from_its_tag_alone(tmp_path: Path) -> None:
    """In a clone, with changes in its working tree that nobody committed."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    by = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    changelog = (clone / "CHANGELOG.md").read_text()
    (clone / "CHANGELOG.md").write_text(re.sub(rf"## {VERSION} \(.*\)", f"## {VERSION} (2026-01-31)", changelog))
    subprocess.run(["git", *by, "commit", "--quiet", "-am", "A release"], cwd=clone, check=True)
    subprocess.run(["git", "tag", f"v{VERSION}"], cwd=clone, check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=clone, capture_output=True, text=True).stdout.strip()
    (clone / "client/refill/__init__.py").write_text("uncommitted")
    (clone / "helm/refill/values.yaml").write_text("uncommitted: true")
    into = tmp_path / "release"
    done = subprocess.run(
        [sys.executable, "-m", "release", "--no-image", "--folder", str(into)],
        cwd=clone,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(clone)},
    )
    assert done.returncode == 0, done.stderr
    assert "NOT TO BE PUBLISHED" in done.stdout
    names = {path.name for path in into.iterdir()}
    assert names == {
        *(f"refill_cache-{VERSION}-py3-none-any.whl", f"refill_cache-{VERSION}.tar.gz", f"refill-{VERSION}.tgz"),
        *(f"refill-docs-{VERSION}.tar.gz", f"refill-{VERSION}.sbom.cdx.json", "NOTES.md", "SHA256SUMS"),
    }
    for line in (into / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((into / name).read_bytes()).hexdigest() == digest
    with zipfile.ZipFile(into / f"refill_cache-{VERSION}-py3-none-any.whl") as wheel:
        assert wheel.read("refill/commit.txt").decode().strip() == commit
        assert b"uncommitted" not in wheel.read("refill/__init__.py")
        metadata = wheel.read(f"refill_cache-{VERSION}.dist-info/METADATA").decode()
    assert "](docs/" not in metadata
    assert f"/blob/v{VERSION}/docs/INSTALL.md)" in metadata
    with tarfile.open(into / f"refill-{VERSION}.tgz") as chart:
        values = chart.extractfile("refill/values.yaml")
        assert values is not None
        assert b"uncommitted" not in values.read()
