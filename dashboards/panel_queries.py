"""What do the dashboards ask Prometheus? Their queries as Prometheus gets them, with Grafana's variables put in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PanelQuery", "panel_queries", "variable_queries"]

_PRICE = "0.0004"


@dataclass(frozen=True)
class PanelQuery:
    """One line, or group of lines, of a panel."""

    board: str
    panel: str
    unit: str
    expr: str
    legend: str
    quiet: str
    """What the panel says when the query returns nothing, if that is how it is in health."""
    stacked: bool
    now: bool
    """Whether one moment is asked for, in place of a range of time."""


def panel_queries(folder: Path, *, rate_seconds: int, shown_seconds: int) -> Iterator[PanelQuery]:
    """Of all dashboards, in their order, with all caches and jobs chosen.

    :param rate_seconds: the time that rates are taken over; four scrapes at least, as Grafana has it.
    :param shown_seconds: the time that the dashboard shows.
    """
    for path in sorted(folder.glob("*.json")):
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            fields = panel.get("fieldConfig", {})
            config = fields.get("defaults", {})
            limits = {override["matcher"]["options"] for override in fields.get("overrides", [])}
            for target in panel.get("targets", []):
                yield PanelQuery(
                    board=board["title"],
                    panel=panel["title"],
                    unit=config.get("unit", ""),
                    expr=_filled_in(target["expr"], rate_seconds, shown_seconds),
                    legend=target.get("legendFormat", ""),
                    quiet=config.get("noValue", ""),
                    stacked=config.get("custom", {}).get("stacking", {}).get("mode") == "normal"
                    and target["legendFormat"] not in limits,
                    now=bool(target.get("instant")),
                )


def variable_queries(folder: Path) -> set[tuple[str, str]]:
    """``(selector, label)`` of the choices at the top: the label's values there are what can be chosen."""
    found = set()
    for path in sorted(folder.glob("*.json")):
        for variable in json.loads(path.read_text())["templating"]["list"]:
            if variable["type"] == "query":
                match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
                if match is None:
                    raise ValueError(f"{path.name}: can't read the choices of {variable['name']}")
                found.add((_filled_in(match[1], 60, 60), match[2]))
    return found


def _filled_in(expr: str, rate_seconds: int, shown_seconds: int) -> str:
    for name, value in (
        ("$__rate_interval", f"{rate_seconds}s"),
        ("$__range", f"{shown_seconds}s"),
        ("$cache", ".*"),
        ("$training_job", ".*"),
        ("$price", _PRICE),
    ):
        expr = expr.replace(name, value)
    if "$" in expr:
        raise ValueError(f"a variable is left in {expr}")
    return expr
