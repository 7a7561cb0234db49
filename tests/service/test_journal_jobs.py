"""Which jobs does a journal still know: ended, or left behind by an earlier job of the same name?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.service.journals import HEADER, Table, begun, closed

from refill_service.journal.journal import Journal


def test_ended_jobs_are_remembered(tmp_path: Path) -> None:
    table, journal = Table(), Journal(tmp_path, 1)
    begun(journal, table).write(table.answer(0, 5))
    journal.end("run", "1")
    assert journal.find("run") is None
    closed(journal)
    journal = Journal(tmp_path, 1)
    assert journal.has_ended("1")
    assert not journal.has_ended("2")
    closed(journal)


@pytest.mark.parametrize("killed_before", ["it was put aside", "its inventory was followed", "its receipts were kept"])
def test_a_job_that_was_ended_by_a_pod_that_was_killed_then(tmp_path: Path, killed_before: str) -> None:
    table, journal = Table(), Journal(tmp_path, 1)
    begun(journal, table).write(table.answer(0, 5))
    kept = journal.find("run")
    journal.end("run", "1")
    aside = next(tmp_path.glob("ending~*"))
    if killed_before == "it was put aside":
        (tmp_path / f"inventory-{aside.name}").rename(tmp_path / "inventory-run")
    if killed_before != "its receipts were kept":
        aside.rename(tmp_path / "job-run")
    journal._open.clear()
    closed(journal)
    journal = Journal(tmp_path, 1)
    (found,) = journal.was_ending()
    assert kept is not None
    assert found.whole
    assert found.num_answered() == kept.num_answered() == {0: 5}
    assert journal.find("run") is None, "a later job of its name does not find it"
    journal.begin("run", HEADER | {"incarnation": "2"}, table.snapshot)
    journal.receipts_are_kept("1")
    assert journal.was_ending() == []
    assert [path.name for path in tmp_path.iterdir() if "ending" in path.name] == []
    assert journal.find("run") is not None
    closed(journal)


def test_a_job_that_begins_again_has_not_ended(tmp_path: Path) -> None:
    table, journal = Table(), Journal(tmp_path, 1)
    begun(journal, table)
    journal.end("run", "1")
    journal.receipts_are_kept("1")
    begun(journal, table)
    closed(journal)
    journal = Journal(tmp_path, 1)
    assert not journal.has_ended("1")
    assert journal.was_ending() == []
    assert journal.find("run") is not None
    closed(journal)


def test_nothing_is_taken_from_an_earlier_job_of_that_name(tmp_path: Path) -> None:
    table, journal = Table(), Journal(tmp_path, 1)
    written = begun(journal, table)
    written.keep_receipt({"epoch": 0})
    journal.keep("run", 1, table.answer(0, 10).encode())
    assert journal.begin("run", HEADER | {"incarnation": "2"}, Table().snapshot) is not None
    kept = journal.find("run")
    assert kept is not None
    assert (kept.receipts, kept.records) == ({}, [])
    closed(journal)


def test_what_nobody_came_back_for_is_removed(tmp_path: Path) -> None:
    table, journal = Table(), Journal(tmp_path, 1)
    begun(journal, table)
    closed(journal)
    for path in (tmp_path / "job-run").iterdir():
        os.utime(path, (0, 0))
    journal = Journal(tmp_path, 1)
    assert not (tmp_path / "job-run").exists()
    closed(journal)
