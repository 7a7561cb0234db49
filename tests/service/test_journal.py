"""The journal: what was written is there after the process, cut and damaged files are noticed, and it stays small."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refill.errors import InvalidInput, JournalUnwritable, PodReplaced
from refill.protocol.pod_life import PodLife
from refill.protocol.records import Kind, Record
from refill_service.cache_core.resumed_epoch import ResumedEpoch
from refill_service.journal import kept_job
from refill_service.journal.folder_owner import FolderOwner
from refill_service.journal.job_files import replace
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


def test_an_earlier_run_of_the_pod_writes_nothing_more(tmp_path: Path) -> None:
    """Where a lock does not keep it from the folder: another machine, or a storage that knows none."""

    def is_another(life: PodLife) -> None:
        raise PodReplaced(f"{life.encode()} has it")

    table, owner = Table(), FolderOwner(PodLife(1, "a"), is_another)
    journal = Journal(tmp_path, 1, owner)
    written = begun(journal, table)
    written.write(table.answer(0, 5))
    replace(tmp_path / "life", PodLife(2, "b").encode().encode())
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for write in (lambda: written.write(table.answer(0, 5)), lambda: written.begin([0])):
        with pytest.raises(PodReplaced, match="2-b has it"):
            write()
    journal.abandon()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_folder_that_the_last_run_did_not_have_is_not_believed(tmp_path: Path) -> None:
    lives = [PodLife(number, f"{number}") for number in range(1, 4)]
    for life in lives:
        owner = FolderOwner(life, lambda life: None)
        journal = Journal(tmp_path, 1, owner)
        if life is lives[0]:
            begun(journal, Table())
        else:
            assert owner.found == PodLife(life.number - 1, str(life.number - 1))
            journal.earlier_run_was(owner.found)
            kept = journal.find("run")
            assert kept is not None
            assert kept.whole, kept.reason
        closed(journal)
    journal = Journal(tmp_path, 1, FolderOwner(PodLife(9, "9"), lambda life: None))
    journal.earlier_run_was(PodLife(8, "8"))
    kept = journal.find("run")
    assert kept is not None
    assert "the pod has run without it since" in kept.reason
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


@pytest.mark.parametrize("there", range(1, 53))
def test_a_torn_tail_is_no_damage(tmp_path: Path, there: int) -> None:
    """As a process leaves it that is killed while it writes: the answer had not left."""
    table, journal = Table(), Journal(tmp_path, 1)
    written = begun(journal, table)
    written.write(table.answer(0, 10))
    with (tmp_path / "job-run" / "epoch-0.records").open("ab") as file:
        file.write(table.answer(0, 2).encode()[:there])
    assert samples_in(journal) == list(range(12 if there == 52 else 10))
    kept = journal.find("run")
    assert kept is not None
    assert kept.whole, kept.reason
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


def test_whole_after_a_reboot_only_if_it_was_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, journal = Table(), Journal(tmp_path, 1)
    begun(journal, table).write(table.answer(0, 10))
    monkeypatch.setattr(kept_job, "boot_id", lambda: "another boot")
    kept = journal.find("run")
    assert kept is not None
    assert not kept.whole, "what was not forced to the disk may be missing"
    assert "restarted" in kept.reason
    closed(journal)
    kept = Journal(tmp_path, 1).find("run")
    assert kept is not None
    assert kept.whole, kept.reason


def test_a_journal_of_an_earlier_version_has_no_inventory(tmp_path: Path) -> None:
    table, journal = Table(), Journal(tmp_path, 1)
    begun(journal, table).write(table.answer(0, 10))
    closed(journal)
    header = tmp_path / "job-run" / "job.json"
    header.write_text(header.read_text().replace(', "inventory": true', ""))
    (tmp_path / "inventory-run").unlink()
    journal = Journal(tmp_path, 1)
    kept = journal.find("run")
    assert kept is not None
    assert kept.whole, kept.reason
    closed(journal)


def test_the_end_in_order_is_taken_back_on_the_disk_before_anything_is_delivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a machine that stops right after would leave an old journal that says it is whole."""
    table, journal = Table(), Journal(tmp_path, 1)
    begun(journal, table).write(table.answer(0, 10))
    closed(journal)
    clean, synced = tmp_path / "job-run" / "clean", []
    assert clean.exists()
    real = os.fsync

    def watched(file: int) -> None:
        synced.append((Path(f"/proc/self/fd/{file}").readlink(), clean.exists()))
        real(file)

    journal = Journal(tmp_path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", watched)
        begun(journal, table, (0,))
    assert (clean.parent, False) in synced
    closed(journal)


class Past:
    """A journal's files and what they held, after each thing that happened to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.table, self.journal = Table(), Journal(folder, 1)
        self.written = begun(self.journal, self.table)
        self.copies = [self.files()]
        self.num_receipts = 0

    def files(self) -> dict[str, bytes]:
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in self.folder.glob("[ij]*-run/*")} | {
            "inventory-run": (self.folder / "inventory-run").read_bytes()
        }

    def happens(self, what: str, epoch: int) -> None:
        if what == "answer":
            self.written.write(self.table.answer(epoch, 3))
        elif what == "receipt":
            self.num_receipts += 1
            self.written.keep_receipt({"epoch": self.num_receipts})
        elif what == "forget":
            self.table.samples.pop(epoch, None)
            self.written.forget(epoch)
        elif what == "another pod ends":
            self.journal.keep("run", epoch, b"" if epoch else Record(Kind.OPENED, 0, 1, (np.array([epoch]),)).encode())
        elif what == "left with":
            self.written.hands_over_to(epoch)
        else:
            closed(self.journal)
            self.copies.append(self.files())
            self.journal = Journal(self.folder, 1)
            if what == "restart":
                self.written = begun(self.journal, self.table, tuple(self.table.samples))
        self.copies.append(self.files())

    def put(self, files: dict[str, bytes], names: set[str]) -> None:
        for name in names:
            path = self.folder / name
            path.unlink(missing_ok=True)
            if name in files:
                path.write_bytes(files[name])

    def believed(self) -> tuple[object, ...] | None:
        """What a later run takes to be all that there is; None: it would ask others."""
        kept = self.journal.find("run")
        if kept is None or not kept.whole:
            return None
        return [record.encode() for record in kept.records], kept.receipts, kept.handed_over_to, kept.header


HAPPENS = st.sampled_from(["answer"] * 4 + ["receipt", "forget", "another pod ends", "left with", "restart"])


@settings(max_examples=100, deadline=None)
@given(
    events=st.lists(st.tuples(HAPPENS, st.integers(0, 2)), min_size=1, max_size=12),
    ended=st.booleans(),
    harm=st.sampled_from(["inventory cut", "cut", "lost", "earlier file", "earlier folder"]),
    data=st.data(),
)
def test_a_journal_that_was_cut_or_put_back_is_never_believed(
    events: list[tuple[str, int]], ended: bool, harm: str, data: st.DataObject
) -> None:
    """Whatever file is cut anywhere, lost, or replaced by any earlier copy of it or of the whole folder."""
    with tempfile.TemporaryDirectory() as folder:
        past = Past(Path(folder))
        for what, epoch in events:
            past.happens(what, epoch)
        if ended:
            past.happens("end", 0)
        truth, now = past.believed(), past.files()
        assert truth is not None, "nothing was done to it"
        with_content = sorted(name for name in now if now[name] and name != "inventory-run")
        if harm == "inventory cut":
            past.put({"inventory-run": now["inventory-run"][:-1]}, {"inventory-run"})
        elif harm == "cut":
            name = data.draw(st.sampled_from(with_content))
            past.put({name: now[name][: data.draw(st.integers(0, len(now[name]) - 1))]}, {name})
        elif harm == "lost":
            past.put({}, {data.draw(st.sampled_from([*with_content, "inventory-run"]))})
        else:
            earlier = data.draw(st.sampled_from(past.copies))
            names = {each for each in {*now, *earlier} if now.get(each) != earlier.get(each)}
            of_folder = names - {"inventory-run"}
            if harm == "earlier file" and names:
                past.put(earlier, {data.draw(st.sampled_from(sorted(names)))})
            elif of_folder:
                past.put(earlier, of_folder)
        assert past.believed() in (truth, None), "something is missing, and it is taken to be all there is"
        if harm in ("cut", "lost"):
            assert past.believed() is None
        closed(past.journal)


def test_what_is_not_believed_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table, journal = Table(), Journal(tmp_path, 1)
    written = begun(journal, table)
    for _ in range(2):
        written.write(table.answer(0, 10))
    path = tmp_path / "job-run" / "epoch-0.records"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    for _ in range(3):
        kept = journal.find("run")
        assert kept is not None
        assert not kept.whole
    assert [record.message for record in caplog.records] == [
        f"{path.parent} is not believed to be whole, and others are asked: "
        "epoch-0.records has 180 of 360 bytes: cut, or an earlier copy"
    ]
    closed(journal)


def test_what_was_not_whole_is_so_again_when_it_is_begun_anew(tmp_path: Path) -> None:
    """As after a recovery: from what others knew."""
    table, journal = Table(), Journal(tmp_path, 1)
    begun(journal, table).write(table.answer(0, 10))
    closed(journal)
    (tmp_path / "inventory-run").write_text("nothing of the sort")
    journal = Journal(tmp_path, 1)
    kept = journal.find("run")
    assert kept is not None
    assert not kept.whole
    begun(journal, table, (0,)).write(table.answer(0, 5))
    kept = journal.find("run")
    assert kept is not None
    assert kept.whole, kept.reason
    assert samples_in(journal) == list(range(15))
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
            with pytest.raises(JournalUnwritable, match="can be neither written nor removed") as said:
                written.write(table.answer(0, 50))
            assert f"{said.value.details['path']} can be" in str(said.value)
            assert str(tmp_path) in said.value.details["path"]
            assert "Operation not permitted" in str(said.value), "what the system said"
            assert said.value.status == 503, "it is asked again, until somebody has made room"
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


def test_a_job_that_is_resumed_as_it_was_before_has_not_ended(tmp_path: Path) -> None:
    """Resumed with two ranks, with three, and with two again, from the same state each time."""
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


def test_a_run_whose_clock_is_behind_is_the_later_one_all_the_same(tmp_path: Path) -> None:
    """Of a pod that is alone nobody else knows; clients refuse the earlier of two runs, and so does the folder."""
    ahead = FolderOwner(PodLife(2000, "a"), lambda life: None)
    ahead.begin(tmp_path)
    told: list[PodLife] = []
    ahead = FolderOwner(PodLife(2000, "a"), told.append)
    ahead.begin(tmp_path)
    behind = FolderOwner(PodLife(1000, "b"), lambda life: None)
    behind.begin(tmp_path)
    assert behind.life > ahead.life
    ahead.check()
    assert told == [behind.life]
