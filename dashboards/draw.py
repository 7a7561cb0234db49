"""Draw every panel of the dashboards as pictures, from a Prometheus: to look at them without a Grafana."""

from __future__ import annotations

import argparse
import json
import time
import urllib.parse
import urllib.request
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from panel_queries import PanelQuery, panel_queries

__all__ = ["draw"]

_COLUMNS = 3
_POINTS = 200
_RATE_SECONDS = 60
_PREFIXES = {"bytes": "B", "Bps": "B/s", "s": "s", "short": "", "none": "", "currencyUSD": "$"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", metavar="URL", help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=30, help="how far to look back (default: %(default)g)")
    parser.add_argument("--rate-seconds", type=int, default=_RATE_SECONDS, help="time of rates (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("pictures"), help="folder (default: %(default)s)")
    args = parser.parse_args()
    try:
        draw(args.prometheus, args.minutes * 60, args.rate_seconds, args.output)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{args.prometheus} can't be asked: {error}") from None


def draw(prometheus: str, seconds: float, rate_seconds: int, output: Path) -> None:
    """One PNG for each dashboard."""
    output.mkdir(parents=True, exist_ok=True)
    queries = panel_queries(Path(__file__).parent, rate_seconds=rate_seconds, shown_seconds=int(seconds))
    for board, of_board in groupby(queries, key=lambda query: query.board):
        panels = [(title, list(lines)) for title, lines in groupby(of_board, key=lambda query: query.panel)]
        rows = -(-len(panels) // _COLUMNS)
        figure, places = plt.subplots(
            rows, _COLUMNS, figsize=(6 * _COLUMNS, 2.8 * rows), squeeze=False, layout="constrained"
        )
        for place in places.flat[len(panels) :]:
            place.axis("off")
        for place, (title, lines) in zip(places.flat, panels, strict=False):
            _draw_panel(place, title, lines, prometheus, seconds)
        figure.suptitle(board)
        figure.savefig(output / f"{board.split()[-1].lower()}.png", dpi=60)
        plt.close(figure)


def _draw_panel(axes: Axes, title: str, lines: list[PanelQuery], prometheus: str, seconds: float) -> None:
    axes.set_title(title, fontsize=10)
    if lines[0].now:
        numbers = [
            f"{_legend(line, series)}  {_shown(float(series['value'][1]), line.unit)}"
            for line in lines
            for series in _ask(prometheus, "query", query=line.expr)
        ]
        axes.axis("off")
        axes.text(0.5, 0.5, "\n".join(numbers) or "no data", ha="center", va="center", fontsize=13)
        return
    end = time.time()
    found = [
        (line, _legend(line, series), [(float(at) - end, float(value)) for at, value in series["values"]])
        for line in lines
        for series in _ask(
            prometheus, "query_range", query=line.expr, start=end - seconds, end=end, step=max(1, seconds / _POINTS)
        )
    ]
    if stacked := [(name, dict(points)) for line, name, points in found if line.stacked]:
        times = sorted({at for _, points in stacked for at in points})
        heights = [[points.get(at, 0.0) for at in times] for _, points in stacked]
        axes.stackplot(times, heights, labels=[name for name, _ in stacked], alpha=0.7)
    for line, name, points in found:
        if not line.stacked:
            axes.plot(*zip(*points, strict=True), linewidth=1, label=name, linestyle="--" if stacked else "-")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _shown(value, lines[0].unit)))
    if found:
        axes.legend(fontsize=7)
    else:
        axes.text(0.5, 0.5, lines[0].quiet or "no data", transform=axes.transAxes, ha="center")


def _ask(prometheus: str, path: str, **parameters: object) -> list[dict[str, Any]]:
    address = f"{prometheus}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(address, timeout=30) as answer:
        series: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return series


def _legend(line: PanelQuery, series: dict[str, Any]) -> str:
    text = line.legend
    for name, value in series["metric"].items():
        text = text.replace("{{" + name + "}}", value)
    return text


def _shown(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{value:.0%}"
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{_PREFIXES.get(unit, unit)}"
    return f"{value:.3g} {_PREFIXES.get(unit, unit)}".rstrip()


if __name__ == "__main__":
    main()
