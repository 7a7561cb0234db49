"""What does ``refill top`` show? One frame, as tables for a terminal of 70 columns or more."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, JustifyMethod, OverflowMethod, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from refill_service.datasets.progress import bytes_text
from refill_service.top.top_figures import Figures, JobFigures, PodFigures, RankFigures

__all__ = ["frame"]

_SHOWN_RANKS = 16
_MUCH_WAIT = 0.2
_NEAR_LIMIT = 0.95
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


def frame(url: str, figures: Figures, over_seconds: float) -> RenderableType:
    pods, away = figures.pods, sum(not pod.answers for pod in figures.pods)
    counts = f"{_counted(len(pods), 'pod')}, {_counted(len(figures.jobs), 'job')}"
    heading = Text(f"refill  {url}   {counts}   rates over {over_seconds:.0f} s", style="bold")
    if away:
        heading.append(f"\n{_counted(away, 'pod')} without an answer: jobs are shown without their part", style="red")
    ranks = [rank for job in figures.jobs for rank in job.ranks]
    data = _data(figures.jobs)
    jobs = [_jobs(figures.jobs), Text(), *([data, Text()] if data.row_count else []), *_ranks(ranks)]
    parts = jobs if figures.jobs else [Text("No job is registered.")]
    return Group(heading, Text(), *parts, Text(), _memory(pods), Text(), _work(pods), Text(), _store(pods))


def _jobs(jobs: Sequence[JobFigures]) -> Table:
    table = _table("job epoch progress  ends_in samples/s memory", left=("job", "progress"))
    for job in jobs:
        table.add_row(
            job.name,
            str(job.epoch),
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


def _receipts(counts: dict[str, int]) -> Text:
    not_exact = ", ".join(f"{count:,} {outcome}" for outcome, count in counts.items() if outcome != "delivered")
    return Text(not_exact, style="red") if not_exact else Text("exact" if counts else "none yet")


def _ranks(ranks: list[RankFigures]) -> list[RenderableType]:
    """Those that wait most first, since there may be hundreds."""
    if not ranks:
        return [Text("No rank has told how long it waits (refill.timed).")]
    table = _table("job rank waits samples/s", left=("job",))
    shown = sorted(ranks, key=lambda rank: (-round(rank.data_wait_share, 2), rank.job, rank.rank))[:_SHOWN_RANKS]
    for rank in shown:
        waits = Text(_percent(rank.data_wait_share), style="red" if rank.data_wait_share > _MUCH_WAIT else "")
        table.add_row(rank.job, str(rank.rank), waits, f"{rank.samples_per_second:,.0f}")
    if len(ranks) == len(shown):
        return [table]
    return [table, Text(f"and {_counted(len(ranks) - len(shown), 'rank')} with less to wait")]


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
    waits = [f"{_counted(pod.waiting_requests, 'request')} to other pods"] if pod.waiting_requests else []
    waits += [f"{_counted(pod.recovering_jobs, 'job')} to be told what was delivered"] if pod.recovering_jobs else []
    return "waits: " + ", ".join(waits) if waits else ""


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
