"""The dashboards in the repository are the ones that the code describes, and Grafana can tell their panels apart."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from dashboards.panel_queries import panel_queries

DASHBOARDS = Path(__file__).parents[2] / "dashboards"
FILES = sorted(DASHBOARDS.glob("*.json"))


def test_files_are_what_the_generator_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, DASHBOARDS / "generate.py", "--output", tmp_path / "made" / "here"], check=True)
    written = {path.name: path.read_text() for path in (tmp_path / "made" / "here").iterdir()}
    assert {path.name: path.read_text() for path in FILES} == written, "run: python dashboards/generate.py"
    assert len(written) == 3


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_panels_have_ids_titles_and_places_of_their_own(path: Path) -> None:
    panels = json.loads(path.read_text())["panels"]
    for name, of_panel in (("id", lambda p: p["id"]), ("title", lambda p: p["title"]), ("place", place)):
        times = Counter(map(of_panel, panels))
        assert max(times.values()) == 1, f"{name} {times.most_common(1)} is used twice"


def test_lines_of_two_caches_are_told_apart() -> None:
    """Both may have a job of one name, and have pods of the same numbers."""
    queries = list(panel_queries(DASHBOARDS, rate_seconds=60, shown_seconds=60))
    by_cache = [query for query in queries if re.search(r"\b(by|on) \(job\b", query.expr)]
    assert len(by_cache) > len(queries) / 2
    for query in by_cache:
        assert "{{job}}" in query.legend, f"{query.board}: {query.panel}"


def place(panel: dict[str, dict[str, int]]) -> tuple[int, int]:
    return panel["gridPos"]["x"], panel["gridPos"]["y"]
