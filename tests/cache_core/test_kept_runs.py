"""Receipts of runs that have ended: kept within bounds, by team, the newest longest."""

from __future__ import annotations

import json
import tracemalloc
import zlib
from typing import Any

import pytest

from refill_service.cache_core.kept_runs import KeptRuns, RunPart


def part(job: str = "job", run: str = "a", team: str = "", at: float = 1.0, pod: int = 0, epochs: int = 3) -> RunPart:
    about = {"job": job, "run": run, "team": team, "pod": pod, "num_pods": 2, "ended_at": at}
    return RunPart.of(about, ({"epoch": epoch, "receipt": {"delivered": epoch}} for epoch in range(epochs)))


def test_a_part_comes_back_from_bytes_with_its_epochs() -> None:
    kept = part()
    again = RunPart.decode(kept.encode())
    assert again == kept
    assert again.epoch(2) == {"epoch": 2, "receipt": {"delivered": 2}}
    assert again.epoch(3) is None


@pytest.mark.parametrize("damage", [b"", b"{}\n", b"[]\n", part().encode()[:-9], part().encode().replace(b'"a"', b"7")])
def test_what_is_no_part_is_refused(damage: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, IndexError)):
        RunPart.decode(damage)


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(b"\n" * (64 << 20), id="newlines"),
        pytest.param(b" " * (64 << 20), id="spaces"),
        pytest.param(b"[" * 1_000_000, id="deep"),
    ],
)
def test_a_part_that_unpacks_to_very_much_is_refused(lines: bytes) -> None:
    about = json.dumps(part().about).encode()
    packed = zlib.compress(lines)
    assert len(packed) < 100_000
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"longer than those of any|too deep|lacks|Expecting"):
            RunPart.decode(about + b"\n" + packed)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    with pytest.raises(ValueError, match="has 300000 bytes"):
        RunPart.decode(b"[" * 300_000)


def test_of_many_epochs_the_last_are_kept() -> None:
    """A job of very many ranks, whose receipts are long."""
    ranks = {str(rank): 1 for rank in range(20_000)}
    epochs: list[dict[str, Any]] = [{"epoch": epoch, "ranks": ranks} for epoch in range(100)]
    kept = part()
    kept = RunPart.of(kept.about, epochs)
    first, last = kept.about["epochs"][0], kept.about["epochs"][-1]
    assert (first > 0, last) == (True, 99)
    assert kept.epoch(99) == epochs[99]
    assert kept.epoch(first) == epochs[first]
    assert kept.epoch(first - 1) is None


def test_the_oldest_runs_of_a_team_go_and_no_other_teams() -> None:
    runs = KeptRuns()
    runs.put(part("other", team="speech", at=0.0))
    for number in range(1000):
        runs.put(part(f"job-{number}", team="vision", at=float(number)))
    assert [each.about["job"] for each in runs.of("speech")] == ["other"]
    of_vision = [each.about["job"] for each in runs.of("vision")]
    assert (of_vision[0], len(of_vision)) == ("job-999", 400)


def test_a_team_hears_of_its_own_runs_and_of_nobodys() -> None:
    runs = KeptRuns()
    for team in ("", "speech", "vision"):
        runs.put(part(team=team, run=f"of {team}"))
    assert {each.about["team"] for each in runs.of("vision")} == {"", "vision"}
    assert {each.about["team"] for each in runs.of("")} == {""}


def test_a_part_that_comes_again_replaces_itself() -> None:
    runs = KeptRuns()
    runs.put(part())
    runs.put(part(epochs=5))
    assert [each.about["epochs"] for each in runs.of("")] == [[0, 1, 2, 3, 4]]


def test_teams_together_have_a_bound_and_who_has_most_gives_way() -> None:
    runs = KeptRuns()
    for team in range(100):
        for run in range(200):
            runs.put(part(run=str(run), team=f"team-{team}", at=float(run)))
    left = [runs.of(f"team-{team}") for team in range(100)]
    assert sum(each.num_bytes for of_team in left for each in of_team) <= 16 << 20
    assert min(map(len, left)) > 100
