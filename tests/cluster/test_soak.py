"""Is a soak kept and judged right? Without a cluster."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from tests.cluster.cluster import Failed
from tests.cluster.events import Event
from tests.cluster.memory import Looked
from tests.cluster.ranks import Batch
from tests.cluster.rows import Row
from tests.cluster.soak import Soak
from tests.cluster.soak_files import TIME_UP, Done, Epoch, InMemory, Rate, Span, Tables, rates_of
from tests.cluster.soak_report import plot, report

_NOT = "2 unconfirmed"


def _tables(
    *,
    wrong: str = "",
    receipt: str = "exact",
    exact: str = "yes",
    growth: float = 0.0,
    cache: float = 0.0,
    ended: str = TIME_UP,
) -> Tables:
    """Of ten minutes; memory grows by so many bytes a second, and page cache by so many beside it."""
    return Tables(
        [Span(120.0, ended)],
        [Done(60.0, 91.5, "`kubectl delete pod`", exact, 18.25, "Unhealthy, with a comma")],
        [Epoch(0, "", "exact"), Epoch(1, wrong, receipt)],
        [Rate(5.0 * step, 640.0) for step in range(120)],
        [
            InMemory(at, pod, "a", int(1e8 + (growth + cache) * at), int(1.5e8), int(3.5e8), int(9e7 + growth * at))
            for at in map(float, range(0, 600, 5))
            for pod in ("pod-0", "rank-0")
        ],
    )


def test_what_is_kept_is_read_as_it_was(tmp_path: Path) -> None:
    tables = _tables(wrong="1 missing, 0 twice", receipt=_NOT)
    tables.write(tmp_path)
    assert Tables.read(tmp_path) == tables
    plot(tables, tmp_path / "soak.svg")
    assert "kubectl delete pod" in (tmp_path / "soak.svg").read_text()


@pytest.mark.parametrize(
    ("tables", "good", "says"),
    [
        (_tables(), True, "receipts: 2 exact, 0 that lack"),
        (_tables(), True, "longest without a batch: 18.2 s (`kubectl delete pod`)"),
        (_tables(), True, "rank-0: 1 life, at most 150 MB of 350 MB, page cache and all; without it, flat: yes"),
        (_tables(wrong="1 missing, 0 twice"), False, "by what the ranks got: NO\n  epoch 1: 1 missing, 0 twice"),
        (_tables(receipt=_NOT), True, "receipts: 1 exact, 1 that lack what pods were told"),
        (
            _tables(exact="**failed**: not within 300 s"),
            False,
            "events that failed:\n  `kubectl delete pod`: **failed**",
        ),
        (_tables(growth=2e4), False, "flat: no (+72.0 to +72.0 MB an hour)"),
        (_tables(cache=2e4), True, "flat: yes (-0.0 to +0.0 MB an hour)"),
        (_tables(ended="interrupted"), False, "**NOT COMPLETE**, 10 of 120 minutes: interrupted\n10 minutes, 1 events"),
        (_tables(ended=""), False, "**NOT COMPLETE**, 10 of 120 minutes: it still runs, or was killed"),
        (_tables()._replace(memory=[]), True, "memory: nothing was measured"),
        (Tables([], [], [], [], []), False, "ended before anything was measured"),
    ],
)
def test_it_is_judged(tables: Tables, good: bool, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(tables) is good
    assert says in capsys.readouterr().out


def test_samples_are_counted_in_whole_steps() -> None:
    batches = [Batch(99.0, 7), Batch(100.0, 64), Batch(104.9, 64), Batch(105.0, 10), Batch(112.0, 3)]
    assert rates_of(batches, 100.0, 113.0) == [Rate(0.0, 128 / 5), Rate(5.0, 2.0)]


class _NoRanks:
    """Of a cluster in which nothing runs."""

    receipts: ClassVar[dict[int, str]] = {}

    def finished(self) -> int:
        return 0

    def came_at(self) -> list[Batch]:
        return []


class _NoWatch:
    looked: ClassVar[list[Looked]] = []


def test_what_a_cluster_can_not_do_is_drawn_again_when_something_else_was_done(tmp_path: Path) -> None:
    """And a soak in which nothing can be done ends, with what there is."""
    events, told = [Event(name, name, lambda cluster, options: None) for name in "ab"], list[str]()

    def do(event: Event) -> Row:
        told.append(event.name)
        return Row(event.says, "skipped: it can't" if event.name == "a" or len(told) > 5 else "yes")

    soak = Soak(_NoRanks(), _NoWatch(), do, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(Failed, match="can do none of a, b"):
        soak.run(events, minutes=1e9, seed=3, pause_seconds=0)
    assert {"a", "b"} == set(told[:-2])
    assert set(told[-2:]) == {"a", "b"}
    assert {done.event for done in Tables.read(tmp_path).done} == {"b"}
    assert Tables.read(tmp_path).span == [Span(1e9, "Failed: this cluster can do none of a, b")]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), None])
def test_what_is_kept_says_whether_it_ran_for_all_its_time(
    error: BaseException | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Span] = []
    clock = [0.0]  # it stands but for the event: on a busy machine time could be up before the first one
    monkeypatch.setattr("tests.cluster.soak.time", SimpleNamespace(time=lambda: clock[0], sleep=lambda seconds: None))

    def do(event: Event) -> Row:
        clock[0] += 60
        seen.extend(Tables.read(tmp_path).span)
        if error is not None:
            raise error
        return Row(event.says, "yes")

    soak = Soak(_NoRanks(), _NoWatch(), do, tmp_path)  # type: ignore[arg-type]
    events = [Event("a", "a", lambda cluster, options: None)]
    if error is None:
        soak.run(events, minutes=1, seed=3, pause_seconds=0)
    else:
        with pytest.raises(type(error)):
            soak.run(events, minutes=1, seed=3, pause_seconds=0)
    assert seen[0] == Span(1.0, ""), "a soak that is killed is not taken for a whole one"
    assert Tables.read(tmp_path).span == [Span(1.0, TIME_UP if error is None else "interrupted")]
