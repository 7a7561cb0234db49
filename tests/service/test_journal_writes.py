"""Is what was written to a journal there after the process, whatever the disk does, and who may write to it?"""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.service.journals import Table, begun, closed, samples_in

from refill.errors import InvalidInput, JournalUnwritable, PodReplaced
from refill.protocol.pod_life import PodLife
from refill.protocol.records import Kind, Record
from refill_service.journal.folder_owner import FolderOwner
from refill_service.journal.job_files import replace
from refill_service.journal.journal import Journal


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


def test_an_earlier_run_of_the_pod_writes_nothing_more(tmp_path: Path) -> None:
    """Where a lock does not keep it from the folder: another machine, or a storage that knows none."""

    def is_another(life: PodLife) -> None:
        raise PodReplaced(f"{life.encode()} has it")

    table, owner = Table(), FolderOwner(PodLife(1, "a"), is_another)
    journal = Journal(tmp_path, 1, owner)
    written = begun(journal, table)
    written.write(table.answer(0, 5))
    replace(tmp_path / "life", PodLife(2, "b").encode().encode())
    before = files_in(tmp_path)
    writes = (
        lambda: written.write(table.answer(0, 5)),
        lambda: written.begin([0]),
        lambda: written.forget(0),
        lambda: written.keep(1, b"records"),
        lambda: written.keep_receipt({"epoch": 0}),
        lambda: written.hands_over_to(1),
    )
    for write in writes:
        with pytest.raises(PodReplaced, match="2-b has it"):
            write()
    written.close()
    assert files_in(tmp_path) == before
    journal.abandon()
    for write in writes:  # by requests that were under way
        with pytest.raises(PodReplaced, match="2-b has it"):
            write()
    assert files_in(tmp_path) == before


def test_a_journal_that_was_abandoned_stays_as_it_is(tmp_path: Path) -> None:
    """Also where the folder does not say whose it is: a full volume keeps the later run from writing that there."""
    table, journal = Table(), Journal(tmp_path, 1)
    written = begun(journal, table)
    written.write(table.answer(0, 5))
    journal.abandon()
    before = files_in(tmp_path)
    with pytest.raises(JournalUnwritable, match="is that of a later run of this pod: nothing is delivered here"):
        written.write(table.answer(0, 5))
    written.epoch_begins([0])
    written.forget(0)
    written.keep(1, b"records")
    written.keep_receipt({"epoch": 0})
    written.hands_over_to(1)
    written.close()
    assert files_in(tmp_path) == before
    assert samples_in(journal) == list(range(5))


def files_in(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_process_that_is_killed_loses_nothing_that_was_written(tmp_path: Path) -> None:
    """No buffer of the process's own is between a record and the system."""
    script = f"""
import os, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from tests.service.journals import Table, begun
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
            with pytest.raises(JournalUnwritable, match="can be neither written nor removed") as caught:
                written.write(table.answer(0, 50))
            assert f"{caught.value.details['path']} can be" in str(caught.value)
            assert str(tmp_path) in caught.value.details["path"]
            assert "Operation not permitted" in str(caught.value), "what the system said"
            assert caught.value.status == 503, "it is asked again, until somebody has made room"
    written.write(table.answer(0, 1))
    assert journal.find("run") is None
    closed(journal)


def test_a_folder_belongs_to_one_pod(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 1)
    with pytest.raises(InvalidInput, match=r"journal_dir .* is used by another pod"):
        Journal(tmp_path, 1)
    closed(journal)
    closed(Journal(tmp_path, 1))


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


def test_a_run_whose_clock_is_behind_is_the_later_one_all_the_same(tmp_path: Path) -> None:
    """Of a pod that is alone nobody else knows; clients refuse the earlier of two runs, and so does the folder."""
    ahead = FolderOwner(PodLife(2000, "a"), lambda life: None)
    ahead.begin(tmp_path)
    others: list[PodLife] = []
    ahead = FolderOwner(PodLife(2000, "a"), others.append)
    ahead.begin(tmp_path)
    behind = FolderOwner(PodLife(1000, "b"), lambda life: None)
    behind.begin(tmp_path)
    assert behind.life > ahead.life
    ahead.check()
    assert others == [behind.life]
