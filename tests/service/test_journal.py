"""The journal: what was written is there after the process, cut and damaged files are noticed, and it stays small."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from refill.errors import InvalidInput, StoreUnavailable
from refill.protocol.records import Kind, Record
from refill_service.cache_core.resumed_epoch import ResumedEpoch
from refill_service.journal.journal import JobJournal, Journal

HEADER = {"incarnation": "1", "num_pods": 1, "num_samples": 1000}


class Table:
    """An owner's table, as far as the journal is concerned."""

    def __init__(self) -> None:
        self.samples: dict[int, list[int]] = {}

    def answer(self, epoch: int, count: int) -> Record:
        known = self.samples.setdefault(epoch, [])
        new = np.arange(len(known), len(known) + count, dtype=np.int64)
        known += new.tolist()
        return Record(Kind.ANSWERED, epoch, 0, (new, new))

    def snapshot(self, epoch: int) -> Iterator[Record]:
        samples = np.array(self.samples.get(epoch, []), dtype=np.int64)
        yield Record(Kind.ANSWERED, epoch, 0, (samples, samples))


def begun(journal: Journal, table: Table, epochs: tuple[int, ...] = ()) -> JobJournal:
    found = journal.begin("run", HEADER, table.snapshot, epochs)
    assert found is not None
    return found


def samples_in(journal: Journal, epoch: int = 0) -> list[int]:
    kept = journal.find("run")
    assert kept is not None
    return [s for record in kept.records if record.epoch == epoch for s in record.columns[0].tolist()]


def closed(journal: Journal) -> None:
    asyncio.run(journal.close())


def test_what_was_written_is_found_again(tmp_path: Path) -> None:
    table, journal = Table(), Journal(tmp_path, 1)
    written = begun(journal, table)
    for count in (1, 5, 100):
        written.write(table.answer(0, count))
    written.write(Record(Kind.OPENED, 0, 3, (np.array([1]),)))
    kept = journal.find("run")
    assert kept is not None
    assert kept.whole
    assert kept.header["incarnation"] == "1"
    assert samples_in(journal)[:106] == list(range(106))
    assert kept.records[-1].rank == 3
    closed(journal)


def test_a_process_that_is_killed_loses_nothing_that_was_written(tmp_path: Path) -> None:
    """No buffer of the process's own is between a record and the system."""
    script = f"""
import os, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from tests.service.test_journal import Table, begun
from refill_service.journal.journal import Journal
table, journal = Table(), Journal(Path({str(tmp_path)!r}), 1)
written = begun(journal, table)
for _ in range(50):
    written.write(table.answer(0, 7))
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2]).returncode == -9
    journal = Journal(tmp_path, 1)
    assert samples_in(journal) == list(range(350))
    kept = journal.find("run")
    assert kept is not None
    assert kept.whole, "the machine runs on, so nothing can be missing"
    closed(journal)


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_torn_tail_is_no_damage(tmp_path: Path, cut: int) -> None:
    table, journal = Table(), Journal(tmp_path, 1)
    written = begun(journal, table)
    written.write(table.answer(0, 10))
    written.write(table.answer(0, 2))
    path = tmp_path / "job-run" / "epoch-0.records"
    path.write_bytes(path.read_bytes()[:-cut])
    assert samples_in(journal) == (list(range(10)) if cut <= 52 else []), "more was lost than what was cut"
    kept = journal.find("run")
    assert kept is not None
    assert kept.whole
    closed(journal)


def test_damage_is_noticed(tmp_path: Path) -> None:
    table, journal = Table(), Journal(tmp_path, 1)
    written = begun(journal, table)
    for _ in range(3):
        written.write(table.answer(0, 10))
    path = tmp_path / "job-run" / "epoch-0.records"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    assert samples_in(journal) == list(range(10))
    kept = journal.find("run")
    assert kept is not None
    assert not kept.whole
    closed(journal)


def test_whole_after_a_reboot_only_if_it_was_closed(tmp_path: Path) -> None:
    table, journal = Table(), Journal(tmp_path, 1)
    begun(journal, table).write(table.answer(0, 10))
    header = tmp_path / "job-run" / "job.json"
    header.write_text(header.read_text().replace('"boot": "', '"boot": "another '))
    kept = journal.find("run")
    assert kept is not None
    assert not kept.whole, "what was not forced to the disk may be missing"
    closed(journal)
    kept = Journal(tmp_path, 1).find("run")
    assert kept is not None
    assert kept.whole


def test_it_stays_small(tmp_path: Path) -> None:
    """Single requests cost more than their 16 bytes: the file is written anew before that is too much."""
    table, journal = Table(), Journal(tmp_path, 1)
    written = begun(journal, table)
    for epoch in range(4):
        for _ in range(60_000):
            written.write(table.answer(epoch, 1))
        assert written.used_bytes <= 2 * 16 * 60_000 * min(epoch + 1, 2) + (1 << 20)
        assert samples_in(journal, epoch) == list(range(60_000))
        if epoch > 0:
            written.forget(epoch - 1)
    on_disk = sum(path.stat().st_size for path in (tmp_path / "job-run").iterdir())
    assert on_disk < 2 * 16 * 60_000 + (1 << 20) + 1000
    closed(journal)


@contextmanager
def full_disk(most_bytes: int) -> Iterator[None]:
    """No file grows beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_gives_the_journal_up_until_the_next_epoch(tmp_path: Path) -> None:
    """What lacks a record must not be believed: it is gone as a whole, and begins anew from the owner's table."""
    table, journal = Table(), Journal(tmp_path, 1)
    written = begun(journal, table)
    with full_disk(1000):
        for _ in range(100):
            written.write(table.answer(0, 5))
        assert journal.find("run") is None, "a journal that lacks records would be believed"
        assert journal.errors == 1
    written.write(table.answer(0, 5))
    assert journal.find("run") is None
    written.epoch_begins([0, 1])
    written.write(table.answer(1, 5))
    assert samples_in(journal, 0) == list(range(505))
    assert samples_in(journal, 1) == list(range(5))
    closed(journal)


def test_nothing_is_delivered_while_a_wrong_journal_can_not_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, journal = Table(), Journal(tmp_path, 1)
    written = begun(journal, table)

    def refuses(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(1, "Operation not permitted")

    with full_disk(100), monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuses)  # as a folder that has become read-only; root may remove everything
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="can be neither written nor removed"):
                written.write(table.answer(0, 50))
    written.write(table.answer(0, 1))
    assert journal.find("run") is None
    closed(journal)


def test_a_folder_belongs_to_one_pod(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 1)
    with pytest.raises(InvalidInput, match=r"journal_dir .* is used by another pod"):
        Journal(tmp_path, 1)
    closed(journal)
    closed(Journal(tmp_path, 1))


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


def test_a_resumed_job_keeps_what_was_done(tmp_path: Path) -> None:
    table, journal = Table(), Journal(tmp_path, 1)
    rest = ResumedEpoch("0", 3, 10, np.array([1, 5, 999]), 2)
    journal.begin("run", HEADER, table.snapshot, (), rest)
    kept = journal.find("run")
    assert kept is not None
    assert kept.resumed is not None
    assert kept.resumed.done.tolist() == [1, 5, 999]
    assert (kept.resumed.epoch, kept.resumed.position, kept.resumed.unknown) == (3, 10, 2)
    closed(journal)


def test_it_is_forced_to_the_disk_now_and_then(tmp_path: Path) -> None:
    async def run() -> None:
        table, journal = Table(), Journal(tmp_path, 0.01)
        journal.start()
        written = begun(journal, table)
        written.write(table.answer(0, 5))
        assert written.unsynced
        async with asyncio.timeout(10):
            while written.unsynced:  # noqa: ASYNC110 (a thread sets it)
                await asyncio.sleep(0.01)
        await journal.close()

    asyncio.run(run())


def test_what_nobody_came_back_for_is_removed(tmp_path: Path) -> None:
    table, journal = Table(), Journal(tmp_path, 1)
    begun(journal, table)
    closed(journal)
    for path in (tmp_path / "job-run").iterdir():
        os.utime(path, (0, 0))
    journal = Journal(tmp_path, 1)
    assert not (tmp_path / "job-run").exists()
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


def test_not_whole_after_a_reboot_if_the_disk_failed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    table, journal = Table(), Journal(tmp_path, 1)
    begun(journal, table).write(table.answer(0, 10))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fails)
        closed(journal)
    assert not (tmp_path / "job-run" / "clean").exists()


def test_a_cut_list_of_what_was_done_is_not_used(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 1)
    resumed = ResumedEpoch("0", 0, 10, np.arange(10))
    journal.begin("run", HEADER, Table().snapshot, resumed=resumed)
    (tmp_path / "job-run" / "done.bits").write_bytes(b"")
    assert journal.find("run") is None
    closed(journal)
