"""What comes with the chart is what it is made of: its README, and the archive that a registry takes."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path

import helm_python
import yaml
from tests.helm.rendering import CHART

spec = importlib.util.spec_from_file_location("chart_readme", CHART.parent / "chart_readme.py")
assert spec is not None
assert spec.loader is not None
chart_readme = importlib.util.module_from_spec(spec)
spec.loader.exec_module(chart_readme)


def test_the_readme_is_that_of_the_values() -> None:
    assert (CHART / "README.md").read_text() == chart_readme.readme(), "make chart-files"


def test_the_readme_has_every_value() -> None:
    def leaves(values: object, path: str) -> set[str]:
        if not isinstance(values, dict) or not values:
            return {path}
        return set().union(*(leaves(inner, f"{path}.{name}".lstrip(".")) for name, inner in values.items()))

    text = (CHART / "values.yaml").read_text()
    documented = {value.path for value in chart_readme.values(text)}
    for leaf in leaves(yaml.safe_load(text), ""):
        parts = leaf.split(".")
        assert any(".".join(parts[:many]) in documented for many in range(1, len(parts) + 1)), leaf


def test_values_are_explained_by_the_comment_above_them() -> None:
    text = """
# --- Of pods ---

# How many,
# in all.
replicas: 3
# When.
probe:
  period: 1

# Where.
store:
  # A URL.
  url: ""
  key: <k>
"""
    found = [tuple(value) for value in chart_readme.values(text)]
    assert found == [
        ("Of pods", "replicas", 3, "How many, in all."),
        ("Of pods", "probe", {"period": 1}, "When."),
        ("Of pods", "store", None, "Where."),
        ("Of pods", "store.url", "", "A URL."),
        ("Of pods", "store.key", "<k>", ""),
    ]


def test_what_artifact_hub_is_told_is_true() -> None:
    root = CHART.parents[1]
    chart, project = (
        yaml.safe_load((CHART / "Chart.yaml").read_text()),
        tomllib.loads((root / "pyproject.toml").read_text()),
    )
    version, given = project["project"]["version"], chart["annotations"]
    assert chart["version"] == chart["appVersion"] == version
    assert all(isinstance(value, str) for value in given.values()), "Helm takes nothing else"
    assert given.pop("artifacthub.io/category") == "ai-machine-learning"
    assert given.pop("artifacthub.io/license") == project["project"]["license"]
    assert given.pop("artifacthub.io/operator") == "false"
    unreleased = f"## {version} (unreleased)" in (root / "CHANGELOG.md").read_text()
    assert given.pop("artifacthub.io/prerelease") == str(unreleased).lower()
    assert given == {}, "an annotation that nothing here looks at"


def test_the_archive_is_the_chart(tmp_path: Path) -> None:
    archive = helm_python.Chart.load_archive(Path(helm_python.package(CHART, destination=tmp_path)).read_bytes())
    values = {"insecure": True, "dashboards": {"enabled": True}, "prometheusRule": {"enabled": True}}
    given = {"name": "refill", "namespace": "ml"}
    assert archive.render(values, **given) == helm_python.Chart.load(CHART).render(values, **given)
