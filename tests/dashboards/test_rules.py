"""Alerts fire for what they are for, are silent in what is usual, and lead to a page that says what to do."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import yaml
from tests.dashboards.debian_tools import succeeds, tool

ROOT = Path(__file__).parents[2]
RULES = ROOT / "dashboards" / "rules.yaml"
CASES = Path(__file__).parent / "alerts_test.yaml"


def test_rules_are_valid() -> None:
    succeeds(tool("promtool"), "check", "rules", "--lint=all", "--lint-fatal", str(RULES))


def test_alerts_fire_and_are_silent(tmp_path: Path) -> None:
    for path in (RULES, CASES):
        shutil.copy(path, tmp_path)
    succeeds(tool("promtool"), "test", "rules", str(tmp_path / CASES.name))


def test_every_alert_is_tested_for_both() -> None:
    """An expectation with alerts is one for firing; one without, or a query for none, is one for silence."""
    fires, silent = set(), set()
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        for expected in case.get("alert_rule_test", []):
            (fires if expected["exp_alerts"] else silent).add(expected["alertname"])
    assert fires == set(alerts())
    assert silent == set(alerts())


def test_every_alert_links_an_entry_of_the_runbook() -> None:
    entries = re.findall(r"^## (\w+)$", (ROOT / "docs" / "RUNBOOK.md").read_text(), re.MULTILINE)
    linked = {name: rule["annotations"]["runbook"] for name, rule in alerts().items()}
    assert linked == {name: f"docs/RUNBOOK.md#{name.lower()}" for name in entries}


def alerts() -> dict[str, dict[str, dict[str, str]]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}
