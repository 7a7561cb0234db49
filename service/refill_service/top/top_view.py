"""What does ``refill top`` show? One frame, as tables for a terminal of 70 columns or more."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console, ConsoleOptions, Group, JustifyMethod, OverflowMethod, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from refill_service.datasets.progress import bytes_text
from refill_service.top.top_figures import Figures, JobFigures, PodFigures, RankFigures

_SHOWN_RANKS = 16
_FEWEST_RANKS = 4
"""On a terminal of few rows."""
_MUCH_WAIT = 0.2
_NEAR_LIMIT = 0.95
_LATE_SECONDS = 2.0
_UNKNOWN = "-"
_NAMES = ("job", "data", "memory", "work", "store")
"""Columns of names, which are cut where a terminal is narrow; figures never are."""
_KINDS = {
    "abstract": ("abstract",),
    "remote": ("remote",),
    "recent": ("recent",),
    "pinned": ("pinned",),
    "moving": ("in_flight", "sending", "receiving"),
}
"""Columns, and the kinds of memory that each one sums up."""


class Screen:
    """A frame on a terminal that may have fewer rows than it has lines: a part of them, and where that is.

    :param frame_of: the frame; given True, with tables that stand close, for a terminal that it does not fit.
    """

    def __init__(self, frame_of: Callable[[bool], RenderableType]) -> None:
        self.frame_of = frame_of
        self._first = 0
        """The uppermost line that is to be seen; it is bounded when the lines are known."""
        self._rows = 1

    def scroll(self, lines: int, pages: int) -> None:
        """Down where they are positive."""
        self._first += lines + pages * self._rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self._rows = max(1, options.max_height - 1)
        options = options.update(height=None)
        lines = console.render_lines(self.frame_of(False), options, pad=False)
        if len(lines) > self._rows:
            lines = console.render_lines(self.frame_of(True), options, pad=False)
        self._first = max(0, min(self._first, len(lines) - self._rows))
        shown = lines[self._first : self._first + self._rows]
        for line in shown:
            yield from line
            yield Segment.line()
        places = f"lines {self._first + 1} to {self._first + len(shown)} of {len(lines)}: arrows and pages scroll, "
        yield Text(f"{places if len(shown) < len(lines) else ''}q ends", "dim", end="", no_wrap=True)


def frame(url: str, figures: Figures, over_seconds: float, *, is_close: bool = False) -> RenderableType:
    """:param is_close: tables stand close, and fewer ranks are shown."""
    used, unused = _by_use(figures.jobs)
    data = _data(used)
    parts: list[RenderableType] = [_heading(url, figures, over_seconds)]
    if used:
        parts.append(_jobs(used))
    if waited_for := _waited_for(used, figures.pods):
        parts.append(Text(f"waited for: {'; '.join(waited_for)}", "red", no_wrap=True, overflow="ellipsis"))
    if unused:
        parts.append(_unused(unused))
    if data.row_count:
        parts.append(data)
    if used:
        parts.append(_ranks([rank for job in used for rank in job.ranks], _FEWEST_RANKS if is_close else _SHOWN_RANKS))
    if not figures.jobs:
        parts.append(Text("No job is registered."))
    parts += [_memory(figures.pods), _work(figures.pods), _store(figures.pods)]
    gaps = [] if is_close else [Text()]
    return Group(parts[0], *(each for part in parts[1:] for each in (*gaps, part)))


def _by_use(jobs: Sequence[JobFigures]) -> tuple[list[JobFigures], list[JobFigures]]:
    """Those that read most first, and beside them those that no rank uses: runs that have ended, most of them."""
    ordered = sorted(jobs, key=lambda job: (-job.samples_per_second, -(job.ranks_alive or 0), job.name))
    is_used = [job.samples_per_second > 0 or job.ranks_alive != 0 for job in ordered]
    used, unused = ([job for job, use in zip(ordered, is_used, strict=True) if use is which] for which in (True, False))
    return used, unused


def _waited_for(jobs: Sequence[JobFigures], pods: Sequence[PodFigures]) -> list[str]:
    """Who keeps the others waiting."""
    found = []
    for job in jobs:
        if job.behind:
            first, others = job.behind[0], len(job.behind) - 1
            who = f"rank {first.rank}" + (f" and {_counted(others, 'other')}" if others else "")
            found.append(f"{who} of {job.name} (received {first.received:,}, others {first.most_received:,})")
    found += [f"{_name(pod)} (away)" for pod in pods if pod.is_away]
    late = max(pods, key=lambda pod: pod.take_seconds, default=None)
    if late is not None and late.take_seconds > _LATE_SECONDS:
        found.append(f"{_name(late)} (answers after {late.take_seconds:.0f} s)")
    return found


def _unused(jobs: Sequence[JobFigures]) -> Text:
    memory, names = bytes_text(sum(job.memory_bytes for job in jobs)), ", ".join(job.name for job in jobs)
    return Text(f"{_counted(len(jobs), 'job')} that no rank uses, {memory}: {names}", no_wrap=True, overflow="ellipsis")


def _heading(url: str, figures: Figures, over_seconds: float) -> Text:
    pods, away = figures.pods, sum(not pod.answers for pod in figures.pods)
    counts = f"{_counted(len(pods), 'pod')}, {_counted(len(figures.jobs), 'job')}"
    heading = Text(f"refill  {url}   {counts}   rates over {over_seconds:.0f} s", style="bold")
    if away:
        heading.append(f"\n{_counted(away, 'pod')} without an answer: jobs are shown without their part", style="red")
    return heading


def _jobs(jobs: Sequence[JobFigures]) -> Table:
    table = _table("job epoch progress  ends_in samples/s memory", left=("job", "progress"))
    for job in jobs:
        table.add_row(
            job.name,
            _UNKNOWN if job.epoch is None else str(job.epoch),
            ProgressBar(total=1, completed=job.progress or 0, width=12),
            _percent(job.progress),
            _duration(job.epoch_ends_in_seconds),
            f"{job.samples_per_second:,.0f}",
            bytes_text(job.memory_bytes),
        )
    return table


def _data(jobs: Sequence[JobFigures]) -> Table:
    """Without those of which there is nothing to show, such as runs that have ended."""
    table = _table("data bytes/s misses waste amplified receipts", left=("data", "receipts"))
    for job in jobs:
        if not (job.delivered_bytes_per_second or job.receipts):
            continue
        table.add_row(
            job.name,
            bytes_text(job.delivered_bytes_per_second),
            _percent(job.miss_rate),
            _percent(job.waste),
            _UNKNOWN if job.read_amplification is None else f"{job.read_amplification:.2f}",
            _receipts(job.receipts),
        )
    return table


def _receipts(counts: dict[str, int] | None) -> Text:
    if counts is None:
        return Text(_UNKNOWN)
    not_exact = ", ".join(f"{count:,} {outcome}" for outcome, count in counts.items() if outcome != "delivered")
    return Text(not_exact, style="red") if not_exact else Text("exact" if counts else "none yet")


def _ranks(ranks: list[RankFigures], num_shown: int) -> RenderableType:
    """Those that wait most first, since there may be hundreds."""
    if not ranks:
        return Text("No rank has told how long it waits (refill.timed).")
    table = _table("job rank waits samples/s", left=("job",))
    shown = sorted(ranks, key=lambda rank: (-round(rank.data_wait_share, 2), rank.job, rank.rank))[:num_shown]
    for rank in shown:
        waits = Text(_percent(rank.data_wait_share), style="red" if rank.data_wait_share > _MUCH_WAIT else "")
        table.add_row(rank.job, str(rank.rank), waits, f"{rank.samples_per_second:,.0f}")
    if len(ranks) == len(shown):
        return table
    return Group(table, Text(f"and {_counted(len(ranks) - len(shown), 'rank')} that wait less"))


def _memory(pods: Sequence[PodFigures]) -> Table:
    table = _table(f"memory budget {' '.join(_KINDS)}", left=("memory",))
    for pod in pods:
        if not pod.answers:
            table.add_row(_name(pod))
            continue
        table.add_row(
            _name(pod),
            bytes_text(pod.budget_bytes),
            *(bytes_text(sum(pod.memory_bytes.get(kind, 0) for kind in kinds)) for kinds in _KINDS.values()),
        )
    return table


def _work(pods: Sequence[PodFigures]) -> Table:
    table = _table("work cores process promised ", left=("work", ""))
    for pod in pods:
        if not pod.answers:
            table.add_row(_name(pod), *[""] * 3, Text("does not answer", style="red"))
            continue
        near = pod.process_bytes > _NEAR_LIMIT * pod.promised_bytes
        table.add_row(
            _name(pod),
            _UNKNOWN if pod.cpu_cores is None else f"{pod.cpu_cores:.2f}",
            Text(bytes_text(pod.process_bytes), style="red" if near else ""),
            bytes_text(pod.promised_bytes),
            Text(_waits(pod), style="red"),
        )
    return table


def _store(pods: Sequence[PodFigures]) -> Table:
    table = _table("store bytes/s GETs/s ms/GET errors", left=("store",))
    for pod in pods:
        if not pod.answers:
            table.add_row(_name(pod))
            continue
        table.add_row(
            _name(pod),
            bytes_text(pod.store_bytes_per_second),
            f"{pod.store_requests_per_second:.1f}",
            _UNKNOWN if pod.store_seconds is None else f"{pod.store_seconds * 1000:.1f}",
            Text(str(pod.store_errors), style="red" if pod.store_errors else ""),
        )
    return table


def _name(pod: PodFigures) -> str:
    return pod.url.removeprefix("http://")


def _waits(pod: PodFigures) -> str:
    return f"waits: {_counted(pod.waiting_requests, 'request')} to other pods" if pod.waiting_requests else ""


def _table(columns: str, left: tuple[str, ...]) -> Table:
    """``_`` in a name stands for a space; an empty name belongs to the column before it."""
    table = Table(box=None, pad_edge=False, header_style="bold cyan")
    for name in columns.split(" "):
        justify: JustifyMethod = "left" if name in left else "right"
        is_name, is_text = name in _NAMES, name in ("", "receipts") and name in left
        overflow: OverflowMethod = "fold" if is_text else "ellipsis"
        table.add_column(name.replace("_", " "), justify=justify, overflow=overflow, no_wrap=not (is_name or is_text))
    return table


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number:,} {what}s"


def _percent(part: float | None) -> str:
    return _UNKNOWN if part is None else f"{part:.0%}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return _UNKNOWN
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
