"""What came of a soak? The tables of its folder, as a plot and in a few lines that judge.

``python -m tests.cluster.soak_report FOLDER`` makes both again. Exit status 1 if anything was not exact, memory
grew, or the soak ended before its time.

Memory is judged as in `tests.chaos.soak`: *flat* when the 95 % interval of the trend, over the last two thirds of the
time, lies below a bound; it *grows* when the interval lies above; between the two nobody can tell. What is looked at is
the highest that the cgroup of a pod counted, in each fortieth of the time: pods are replaced all the time, and a new
one has little. Page cache is left out of that, since the kernel takes it back; an eviction fills it up to the limit.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.chaos.memory_trend import trend_of
from tests.cluster.soak_files import TIME_UP, InMemory, Span, Tables

__all__ = ["plot", "report"]

_PARTS = 40
_GROWTH = 0.05
"""Of the limit, in an hour: more is too much."""


def report(tables: Tables) -> bool:
    """Print what came of it; False if anything was not exact, memory grew, or it ended before its time."""
    span, done, epochs, rates, memory = tables
    if not rates:
        print("the soak ended before anything was measured")
        return False
    minutes = (rates[-1].began + 5) / 60
    cut_short = _cut_short(span, minutes)
    if cut_short:
        print(cut_short)
    print(f"{minutes:.0f} minutes, {len(done)} events, {len(epochs)} epochs")
    wrong = [f"epoch {epoch.epoch}: {epoch.wrong}" for epoch in epochs if epoch.wrong]
    failed = [f"{each.event}: {each.exact}" for each in done if each.exact.startswith("**")]
    print(f"every sample exactly once, by what the ranks got: {_yes(not wrong)}", *wrong, sep="\n  ")
    exact = sum(epoch.receipt == "exact" for epoch in epochs)
    lacking = sum(epoch.receipt not in ("", "exact") for epoch in epochs)
    print(f"receipts: {exact} exact, {lacking} that lack what pods were told that are gone")
    if failed:
        print("events that failed:", *failed, sep="\n  ")
    flat = True
    if not memory:
        print("memory: nothing was measured")
    for pod in sorted({each.pod for each in memory}):
        of_pod = [each for each in memory if each.pod == pod]
        most, limit = max(max(each.now_bytes, each.peak_bytes) for each in of_pod), max(e.limit_bytes for e in of_pod)
        lives = len({each.life for each in of_pod})
        had = f"at most {most / 1e6:.0f} MB of {limit / 1e6:.0f} MB, page cache and all"
        says = f"{pod}: {lives} li{'fe' if lives == 1 else 'ves'}, {had}"
        try:
            trend = trend_of(*_highest(of_pod, 60 * minutes / _PARTS))
        except ValueError:
            print(f"{says}; too short to tell whether it grows")
            continue
        verdict = trend.verdict(_GROWTH * limit)
        flat &= verdict != "grows"
        words = {"flat": "yes", "grows": "no", "open": "can't be told"}[verdict]
        print(f"{says}; without it, flat: {words} ({trend.low / 1e6:+.1f} to {trend.high / 1e6:+.1f} MB an hour)")
    print("\n| event | times | longest without a batch: half of them | at most |\n| --- | --- | --- | --- |")
    for event in sorted({each.event for each in done}):
        waits = sorted(each.longest_seconds for each in done if each.event == event and each.longest_seconds)
        if waits:
            print(f"| {event} | {len(waits)} | {waits[len(waits) // 2]:.1f} s | {waits[-1]:.1f} s |")
    print()
    longest = max(done, key=lambda each: each.longest_seconds, default=None)
    if longest is not None:
        print(f"longest without a batch: {longest.longest_seconds:.1f} s ({longest.event})")
    mean = sum(rate.samples_a_second for rate in rates) / len(rates)
    usual = sorted(rate.samples_a_second for rate in rates)[len(rates) // 2]
    print(f"samples a second: {mean:.0f} on average, {usual:.0f} in half of the time or more")
    return not wrong and not failed and flat and not cut_short


def _cut_short(span: list[Span], minutes: float) -> str:
    """Empty: it ran for all its time."""
    if not span or span[0].ended == TIME_UP:
        return ""
    why = " ".join(span[0].ended.split()) or "it still runs, or was killed"
    return f"**NOT COMPLETE**, {minutes:.0f} of {span[0].minutes:.0f} minutes: {why}"


def _highest(of_pod: list[InMemory], step_seconds: float) -> tuple[list[float], list[int]]:
    """When each step began, and the most memory in it, without page cache."""
    highest: dict[float, int] = {}
    for each in of_pod:
        began = each.at // step_seconds * step_seconds
        highest[began] = max(highest.get(began, 0), each.anonymous_bytes)
    return list(highest), list(highest.values())


def _yes(is_true: bool) -> str:
    return "yes" if is_true else "NO"


def plot(tables: Tables, path: Path) -> None:
    """Throughput, and memory of pods and ranks, over time, with the events."""
    _, done, _, rates, memory = tables
    import matplotlib  # slow to import, as pyplot is

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "refill"
    from matplotlib import pyplot

    tones = matplotlib.color_sequences["tab20"]
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(11, 7), sharex=True, layout="constrained")
    colours = {event: tones[n % len(tones)] for n, event in enumerate(sorted({each.event for each in done}))}
    for event, colour in colours.items():
        for n, each in enumerate(each for each in done if each.event == event):
            label = event.replace("`", "") if n == 0 else None
            above.axvspan(each.began / 60, each.ended / 60, color=colour, alpha=0.35, linewidth=0, label=label)
    above.plot([rate.began / 60 for rate in rates], [rate.samples_a_second for rate in rates], "k", linewidth=0.6)
    above.set_ylabel("samples a second, both ranks")
    if done:
        above.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, fontsize="small")
    for n, pod in enumerate(sorted({each.pod for each in memory})):
        of_pod = [each for each in memory if each.pod == pod]
        for life in dict.fromkeys(each.life for each in of_pod):
            of_life = [each for each in of_pod if each.life == life]
            below.plot(
                [each.at / 60 for each in of_life],
                [each.now_bytes / 1e6 for each in of_life],
                color=tones[n % len(tones)],
                linewidth=0.8,
                label=pod if life == of_pod[0].life else None,
            )
    below.set_ylabel("memory by cgroup, page cache and all, MB")
    if memory:
        below.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=6, fontsize="small")
    below.set_xlabel("minutes; a colour: from the beginning of an event to the end of an epoch after it")
    for row in (above, below):
        row.set_ylim(bottom=0)
        row.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.soak_report")
    parser.add_argument("folder", type=Path, help="what --out of python -m tests.cluster named")
    parser.add_argument("--plot", type=Path, help="where the plot goes (default: FOLDER/soak.svg)")
    given = parser.parse_args()
    try:
        tables = Tables.read(given.folder)
    except FileNotFoundError as error:
        parser.error(f"{given.folder} has no soak: {error}")
    plot(tables, given.plot or given.folder / "soak.svg")
    return 0 if report(tables) else 1


if __name__ == "__main__":
    sys.exit(main())
