"""What a stranger meets in the repository is true: workflows, versions, addresses, and who is cited."""

from __future__ import annotations

import re
import subprocess
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import refill

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
ACTIONLINT = Path(sysconfig.get_path("scripts")) / "actionlint"


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]


def lint(*paths: Path) -> str:
    return subprocess.run([ACTIONLINT, "-no-color", *paths], cwd=ROOT, capture_output=True, text=True).stdout


def test_actionlint_finds_nothing_in_the_workflows() -> None:
    assert WORKFLOWS
    assert lint(*WORKFLOWS) == ""


def test_actionlint_finds_what_would_fail(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yml"
    broken.write_text(WORKFLOWS[0].read_text().replace("github.sha", "github.sah").replace("github.ref ", "github.rf "))
    assert 'property "' in lint(broken)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_targets_that_exist_and_actions_by_commit(path: Path) -> None:
    """A tag can be moved to other code; a commit can't. The version beside it is for people and dependabot."""
    called = [word for step in steps(path) for word in re.findall(r"\bmake ([\w-]+)", step.get("run", ""))]
    assert set(called) <= TARGETS
    used = re.findall(r"uses: (\S+)(.*)", path.read_text())
    assert used
    for action, comment in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_may_read_alone_unless_a_job_says_why(path: Path) -> None:
    """And whoever asks for a pull request gets no secret: no workflow runs for a fork with the rights of this place."""
    loaded = yaml.safe_load(path.read_text())
    assert loaded["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in path.read_text()
    for job in loaded["jobs"].values():
        writes = {name for name, right in job.get("permissions", {}).items() if right == "write"}
        assert not writes or path.stem == "release"


def test_the_tests_run_on_every_python_that_is_promised() -> None:
    matrix = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    promised = [found[1] for each in PROJECT["classifiers"] if (found := re.fullmatch(r".*:: (3\.\d+)", each))]
    assert matrix["python"][: len(promised)] == promised, "the next one may be there before it is promised"
    assert PROJECT["requires-python"] == f">={promised[0]}"


def test_every_place_has_the_same_version() -> None:
    version = PROJECT["version"]
    chart = yaml.safe_load((ROOT / "helm/refill/Chart.yaml").read_text())
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    in_image = re.findall(r'image\.version="(.*?)"', (ROOT / "docker/Dockerfile").read_text())
    assert {refill.__version__, chart["version"], chart["appVersion"], citation["version"], *in_image} == {version}


def test_lines_to_copy_name_images_wheels_and_charts_of_that_version() -> None:
    named = re.compile(r"\brefill(?:_cache-|-|:| --version )(\d+\.\d+\.\d+)")
    folders = [ROOT / name for name in ("benchmarks", "docker", "docs", "helm", "tests/cluster")]
    files = [ROOT / "README.md", ROOT / "Makefile", *(path for each in folders for path in each.rglob("*"))]
    found = {
        path.relative_to(ROOT).as_posix(): set(named.findall(path.read_text()))
        for path in files
        if path.suffix in (".json", ".md", ".py", ".yaml") or path.name.endswith("file")
    }
    assert len([said for said in found.values() if said]) > 6
    assert {place: said for place, said in found.items() if said - {PROJECT["version"]}} == {}


def test_every_address_of_the_project_is_below_its_source() -> None:
    """So that one replacement puts the true one in everywhere."""
    source = PROJECT["urls"]["Source"]
    assert all(url.startswith(source) for url in PROJECT["urls"].values())
    chart = yaml.safe_load((ROOT / "helm/refill/Chart.yaml").read_text())
    assert all(url.startswith(source) for url in (chart["home"], *chart["sources"], chart["icon"]))
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["repository-code"] == source


def test_the_papers_are_cited_with_the_software() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    titles = [each["title"] for each in cited["references"]]
    assert [title.partition(":")[0] for title in titles] == ["Brand", "Redox"]
    assert all(each["authors"] and each["url"].startswith("https://arxiv.org/abs/") for each in cited["references"])


@pytest.mark.parametrize("path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.stem)
def test_forms_of_issues_are_forms(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert set(form) == {"blank_issues_enabled"}
        return
    assert {"name", "description", "body"} <= set(form)
    for part in form["body"]:
        assert part["type"] in ("markdown", "textarea", "input")
        assert ("value" if part["type"] == "markdown" else "label") in part["attributes"]
