"""What came out? The results that are kept, as a table on the terminal, and in docs/PEERS.md with a plot beside it."""

from __future__ import annotations

import importlib.metadata
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from peers.loaders import LOADERS
from targets import target

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.lines import Line2D

__all__ = ["US", "Row", "draw", "report"]

DOCUMENT = Path("docs/PEERS.md")
PLOT = Path("docs/peers.svg")
BEGIN, END = "<!-- made by `make bench-peers`: begin -->", "<!-- made by `make bench-peers`: end -->"
US, US_LARGE = "refill planned", "refill planned, 32 a chunk"
_MARKERS = {0.0: "D", 0.10: "o", 0.25: "s"}


@dataclass(frozen=True)
class Row:
    """One loader at one allowance, over its epochs."""

    loader: str
    allowance: float
    """Part of the dataset; 0: it keeps nothing."""
    samples_per_second: float
    """Mean of the epochs."""
    wait: float
    """Part of the time that the loop waited for a batch."""
    gets: float
    """For 64 samples."""
    other_requests: float
    bytes_read: float
    """From the store, for each byte delivered."""
    cpu: float
    """Seconds for 1,000 samples, starting all processes included."""
    later_cpu: float
    """The same from the second epoch on, when they run; NaN where that was not reached."""
    co_batch: float
    """NaN, as distance, where too little was delivered for it to mean anything."""
    later_co_batch: float
    distance: float
    disk: float
    """The most that lay in its cache folder, as part of the dataset."""
    repeated: int
    missing: int
    complete: bool


def report(results: Path, conditions: dict[str, Any], publish: bool) -> None:
    """:param publish: also write the document and the plot."""
    rows = [row for path in results.glob("*.json") if (row := _row(json.loads(path.read_text()), conditions))]
    rows.sort(key=lambda row: (list(LOADERS).index(row.loader), row.allowance))
    if not rows:
        raise SystemExit("no results of this kind of run are kept yet: run it without --report")
    table = _table(rows)
    print(f"{conditions['machine']}\n{table}\n{_beaten(rows)}")
    _targets(rows)
    if publish:
        draw(rows, US, PLOT)
        text = DOCUMENT.read_text()
        head, tail = text[: text.index(BEGIN)], text[text.index(END) :]
        made = "\n\n".join((_conditions(conditions), table, _beaten(rows), _set_up(), "![plot](peers.svg)"))
        DOCUMENT.write_text(f"{head}{BEGIN}\n\n{made}\n\n{tail}")


def _targets(rows: list[Row]) -> None:
    """What refill has to reach beside the others, and with larger chunks at a quarter of the dataset."""
    for ours in (row for row in rows if row.loader == US):
        if peers := [row for row in _peers(rows, ours) if row.complete]:
            of_all, later = ours.cpu / min(peer.cpu for peer in peers), min(peer.later_cpu for peer in peers)
            target(f"at {ours.allowance:.0%}: CPU of a sample / the leanest peer's", of_all, at_most=1)
            target(f"at {ours.allowance:.0%}: the same from the second epoch on", ours.later_cpu / later, at_most=1)
    for row in rows:
        if row.loader == US_LARGE and row.allowance == 0.25:
            name = f"{row.loader}, at 25%"
            target(f"{name}: GETs for 64 samples", row.gets, at_most=2)
            target(f"{name}: co-batch", row.co_batch, at_most=1.1)
            target(f"{name}: the same from the second epoch on", row.later_co_batch, at_most=1.1)


def _peers(rows: list[Row], ours: Row) -> list[Row]:
    """At the same allowance, or with none."""
    return [
        row
        for row in rows
        if row.allowance in (0.0, ours.allowance) and row.loader != "No-I/O" and not row.loader.startswith("refill")
    ]


def _row(result: dict[str, Any], conditions: dict[str, Any]) -> Row | None:
    if result["conditions"] != conditions:
        print(f"left out, made under other conditions: {result['loader']} at {result['allowance']:.0%}")
        return None
    epochs = result["epochs"]
    enough = sum(epoch["samples"] for epoch in epochs) > conditions["samples"] * len(epochs) / 4

    def total(name: str) -> float:
        return sum(epoch[name] for epoch in epochs)

    def for_each(name: str, of: list[dict[str, Any]]) -> float:
        samples = sum(epoch["samples"] for epoch in of)
        return sum(epoch[name] for epoch in of) / samples if samples else math.nan

    later_spread = [epoch["co_batch"] for epoch in epochs[1:]] if enough else []
    return Row(
        loader=result["loader"],
        allowance=result["allowance"],
        samples_per_second=statistics.mean(epoch["samples"] / epoch["seconds"] for epoch in epochs),
        wait=total("wait_seconds") / total("seconds"),
        gets=64 * for_each("gets", epochs),
        other_requests=64 * total("other_requests") / total("samples"),
        bytes_read=total("read_bytes") / total("bytes"),
        cpu=1000 * for_each("cpu_seconds", epochs),
        later_cpu=1000 * for_each("cpu_seconds", epochs[1:]),
        co_batch=statistics.mean(epoch["co_batch"] for epoch in epochs) if enough else math.nan,
        later_co_batch=statistics.mean(later_spread) if later_spread else math.nan,
        distance=statistics.mean(epoch["distance"] for epoch in epochs) if enough else math.nan,
        disk=max(epoch["disk_bytes"] for epoch in epochs) / conditions["total_bytes"],
        repeated=int(total("repeated")),
        missing=int(total("missing")),
        complete=all(epoch["complete"] for epoch in epochs),
    )


def _table(rows: list[Row]) -> str:
    lines = [
        "| loader | allowance | samples/s | data wait | GETs / 64 samples | other requests / 64 | bytes read "
        "| CPU s / 1,000 samples | 2nd epoch | co-batch | distance | on disk | repeated | missing |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        name = row.loader if row.complete else f"{row.loader} \\*"
        allowance = f"{row.allowance:.0%}" if row.allowance else "none"
        disk = f"{row.disk:.1%}" if row.disk else "-"
        spread = "- | -" if math.isnan(row.co_batch) else f"{row.co_batch:.2f} | {row.distance:.3f}"
        missing = row.missing if row.complete else "-"
        later = "-" if math.isnan(row.later_cpu) else f"{row.later_cpu:.2f}"
        lines.append(
            f"| {name} | {allowance} | {row.samples_per_second:.0f} | {row.wait:.1%} | {row.gets:.1f} "
            f"| {row.other_requests:.1f} | {row.bytes_read:.2f}x | {row.cpu:.2f} | {later} | {spread} "
            f"| {disk} | {row.repeated} | {missing} |"
        )
    if not all(row.complete for row in rows):
        lines += ["", "\\* broken off: an epoch took longer than the limit. Its figures are of the part delivered."]
    return "\n".join(lines)


@dataclass(frozen=True)
class _Measure:
    name: str
    cost: Callable[[Row], float]
    """Lower is better."""
    shown: Callable[[Row], str]


_MEASURES = (
    _Measure("samples/s", lambda row: -row.samples_per_second, lambda row: f"{row.samples_per_second:.0f}"),
    _Measure("data wait", lambda row: row.wait, lambda row: f"{row.wait:.1%}"),
    _Measure("GETs / 64 samples", lambda row: row.gets, lambda row: f"{row.gets:.1f}"),
    _Measure("bytes read", lambda row: row.bytes_read, lambda row: f"{row.bytes_read:.2f}x"),
    _Measure("CPU s / 1,000 samples", lambda row: row.cpu, lambda row: f"{row.cpu:.2f}"),
    _Measure("CPU, 2nd epoch", lambda row: row.later_cpu, lambda row: f"{row.later_cpu:.2f}"),
    _Measure("co-batch, how near to 1", lambda row: abs(row.co_batch - 1), lambda row: f"{row.co_batch:.2f}"),
)


def _beaten(rows: list[Row]) -> str:
    """Where a peer is better than ours by more than 2 %, in so many words."""
    lines = []
    for ours in (row for row in rows if row.loader == US):
        peers = _peers(rows, ours)
        for measure in _MEASURES:
            own = measure.cost(ours)
            better = [peer for peer in peers if measure.cost(peer) < own - 0.02 * abs(own)]
            if better:
                named = ", ".join(f"{peer.loader} {measure.shown(peer)}" for peer in better)
                lines.append(f"| {ours.allowance:.0%} | {measure.name} | {measure.shown(ours)} | {named} |")
    if not lines:
        return f"No loader above is better than {US} by more than 2 % in any column."
    head = [
        f"Where peers beat {US} (by more than 2 %):",
        "",
        f"| allowance | what | {US} | peers |",
        "| ---: | --- | ---: | --- |",
    ]
    return "\n".join(head + lines)


def _conditions(conditions: dict[str, Any]) -> str:
    names = sorted({name for loader in LOADERS.values() for name in loader.distributions})
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    seconds = conditions["compute_seconds"]
    ideal = conditions["batch_size"] / seconds
    return (
        f"Command: `make bench-peers`. Machine: {conditions['machine']}. {versions}.\n\n"
        f"{conditions['samples']:,} samples, {conditions['total_bytes'] / 1e6:,.0f} MB; store behind "
        f"{conditions['store_mbit']} mbit/s and a round trip of {conditions['round_trip_ms']:g} ms; batches of "
        f"{conditions['batch_size']}, {conditions['workers']} loader workers, {conditions['epochs']} epochs, an epoch "
        f"broken off after {conditions['limit_seconds']:g} s; the loop computes {1000 * seconds:.0f} ms a batch, which "
        f"alone makes {ideal:.0f} samples/s."
    )


def _set_up() -> str:
    lines = ["How each is set up:", "", "| loader | settings | its docs |", "| --- | --- | --- |"]
    lines += [f"| {name} | {loader.settings} | [docs]({loader.docs}) |" for name, loader in LOADERS.items()]
    return "\n".join(lines)


def _floor(rows: list[Row]) -> float | None:
    """Samples/s of the loop alone, where that was run: the dashed line."""
    return next((row.samples_per_second for row in rows if row.loader == "No-I/O"), None)


def draw(rows: list[Row], ours: str, path: Path) -> None:
    """Written without date and random ids, so that the same rows give the same file."""
    pyplot.rcParams["svg.hashsalt"] = "refill"
    pyplot.rcParams["svg.fonttype"] = "none"
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 5), sharey=True, layout="constrained")
    rows, floor = [row for row in rows if row.loader != "No-I/O"], _floor(rows)
    names = list(dict.fromkeys(row.loader for row in rows))
    # As many as there may be loaders; each other one first, as neighbours among them look alike.
    shades = matplotlib.color_sequences["tab20"]
    colors = dict(zip(names, [*shades[::2], *shades[1::2]], strict=False))
    for row in rows:
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
    for panel, label in zip(
        panels, ("bytes read from the store / bytes delivered", "co-batch (1 = uniform shuffle)"), strict=True
    ):
        panel.set_xscale("log")
        panel.set_xlabel(label)
        panel.set_ylim(0, 1.1 * max([floor or 0, *(row.samples_per_second for row in rows)]))
        panel.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        panel.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        panel.set_xticks([1, 2, 5, 10])
        panel.grid(alpha=0.3)
        if floor is not None:
            panel.axhline(floor, color="gray", linestyle="--", linewidth=1)
    panels[0].set_ylabel("samples/s (dashed: No-I/O)")
    handles = [Line2D([], [], marker="o", linestyle="", color=colors[name], label=name) for name in names]
    handles += [
        Line2D(
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
