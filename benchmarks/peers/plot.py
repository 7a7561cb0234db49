"""Who reads little, shuffles well and is fast? One picture: speed against bytes read, and against co-batch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

if TYPE_CHECKING:
    from peers.report import Row

__all__ = ["plot"]

_MARKERS = {0.0: "D", 0.10: "o", 0.25: "s"}


def plot(rows: list[Row], ours: str, path: Path) -> None:
    """Written without date and random ids, so that the same rows give the same file."""
    pyplot.rcParams["svg.hashsalt"] = "refill"
    pyplot.rcParams["svg.fonttype"] = "none"
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 5), sharey=True, layout="constrained")
    names = list(dict.fromkeys(row.loader for row in rows))
    colors = dict(zip(names, pyplot.get_cmap("tab10").colors, strict=False))
    for row in rows:
        if row.loader == "No-I/O":  # the dashed line
            continue
        for panel, value in zip(panels, (row.bytes_read, row.co_batch), strict=True):
            panel.scatter(
                value,
                row.samples_per_second,
                s=110 if row.loader == ours else 60,
                marker=_MARKERS[row.allowance],
                color=colors[row.loader],
                edgecolors="black" if row.loader == ours else "none",
                zorder=3,
            )
    floor = next((row.samples_per_second for row in rows if row.loader == "No-I/O"), None)
    for panel, label in zip(
        panels, ("bytes read from the store / bytes delivered", "co-batch (1 = uniform shuffle)"), strict=True
    ):
        panel.set_xscale("log")
        panel.set_xlabel(label)
        panel.set_ylim(0, 1.1 * max(row.samples_per_second for row in rows))
        panel.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        panel.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        panel.set_xticks([1, 2, 5, 10])
        panel.grid(alpha=0.3)
        if floor is not None:
            panel.axhline(floor, color="gray", linestyle="--", linewidth=1)
    panels[0].set_ylabel("samples/s (dashed: No-I/O)")
    handles = [
        pyplot.Line2D([], [], marker="o", linestyle="", color=colors[name], label=name)
        for name in names
        if name != "No-I/O"
    ]
    handles += [
        pyplot.Line2D(
            [],
            [],
            marker=marker,
            linestyle="",
            color="black",
            fillstyle="none",
            label=f"allowance {share:.0%}" if share else "keeps nothing",
        )
        for share, marker in _MARKERS.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9)
    figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)
