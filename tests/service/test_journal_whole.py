"""When is a journal believed to be whole? Never when a file of it was cut, lost, damaged or put back."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.service.journals import Table, begun, closed, samples_in

from refill.protocol.pod_life import PodLife
from refill.protocol.records import Kind, Record
from refill_service.journal import kept_job
from refill_service.journal.folder_owner import FolderOwner
from refill_service.journal.journal import Journal


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
        elif what == "handed over":
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


HAPPENS = st.sampled_from(["answer"] * 4 + ["receipt", "forget", "another pod ends", "handed over", "restart"])


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


def test_one_whose_epoch_an_earlier_version_had_dealt_anew_is_not_used(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 1)
    begun(journal, Table())
    header = tmp_path / "job-run" / "job.json"
    header.write_text(json.dumps(json.loads(header.read_text()) | {"resumed": {"epoch": 0}}))
    assert journal.find("run") is None
    closed(journal)
