"""Is a delivery record that lost something ever taken to be whole? Folders and files are removed, disks are full."""

from __future__ import annotations

import fcntl
import os
import pickle
import resource
import shutil
from pathlib import Path

import pytest
from tests.client.delivery_records import received, reported, since

from refill.delivery_record import DeliveryRecord

pytestmark = pytest.mark.usefixtures("records_in_tmp_path")


@pytest.mark.parametrize("with_all_temporary_files", [False, True], ids=["", "and TMPDIR"])
@pytest.mark.parametrize("by", ["the same process", "a new worker"])
def test_a_folder_that_was_removed_is_said_and_what_comes_after_is_all_from_the_second_epoch_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, by: str, with_all_temporary_files: bool
) -> None:
    record = DeliveryRecord()
    asked_before = record.num_reports()
    assert record.add(received(0, 0), asked_before)
    (folder,) = tmp_path.iterdir()
    shutil.rmtree(tmp_path if with_all_temporary_files else folder)
    after = record if by == "the same process" else pickle.loads(pickle.dumps(record))
    assert not after.add(received(0, 4), asked_before), "a report may have said meanwhile that this had not come"
    assert reported(after) == ([], False)
    assert after.add(received(0, 8), after.num_reports())
    assert (reported(after), since(after)) == (([8, 9, 10, 11], True), 2)
    for epoch in (1, 2, 3):
        assert after.add(received(epoch, 8), after.num_reports())
        assert since(after) == 2
    assert "it was removed: should a pod lose its memory in this epoch or the next, nobody will know" in caplog.text


@pytest.mark.parametrize("removed", ["all folders", "the other rank's"])
def test_another_ranks_record_that_was_removed_is_not_taken_for_one_that_was_never_made(
    tmp_path: Path, removed: str
) -> None:
    """One process reads for both ranks. The first rank's record is whole again when the other's is missed."""
    record = DeliveryRecord()
    other = record.of_rank(1)
    for each in (record, other):
        assert each.add(received(0, 0), each.num_reports())
    for folder in tmp_path.glob("*" if removed == "all folders" else "*-rank-1"):
        shutil.rmtree(folder)
    for each in (record, other):
        each.add(received(0, 4), each.num_reports())
        assert each.add(received(0, 8), each.num_reports())
    assert since(other) == 2, "of epochs 0 and 1 not all is known"


def test_another_ranks_record_that_could_not_be_made_at_first_is_not_taken_to_be_all() -> None:
    record = DeliveryRecord()
    other = record.of_rank(1)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        assert other.add(received(0, 0), other.num_reports())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    other.add(received(0, 4), other.num_reports())
    assert other.add(received(0, 8), other.num_reports())
    assert since(other) == 2


def test_a_worker_that_begins_the_new_run_late_does_not_make_a_removed_record_whole(tmp_path: Path) -> None:
    """As each process says once that a new run has begun. What another one had of it went with the folder."""
    record = DeliveryRecord()
    record.begins_again("run")
    assert record.add(received(0, 0), record.num_reports())
    (folder,) = tmp_path.iterdir()
    shutil.rmtree(folder)
    record.add(received(0, 4), record.num_reports())
    assert record.add(received(0, 4), record.num_reports())
    worker = pickle.loads(pickle.dumps(record))
    worker.begins_again("run")
    assert worker.add(received(0, 8), worker.num_reports())
    assert since(worker) == 2


def test_what_one_worker_could_not_write_is_missed_at_once_and_while_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The disk is full for one of them, and nobody may report in between that all is there."""
    record, fails = DeliveryRecord(), DeliveryRecord._not_complete
    worker = pickle.loads(pickle.dumps(record))
    assert record.add(received(0, 0), record.num_reports())

    def reported_before(self: DeliveryRecord, error: OSError) -> None:
        locked.append(_is_locked(self))
        fails(self, error)

    locked: list[bool] = []
    for epoch in range(4):
        with monkeypatch.context() as full:
            full.setattr(DeliveryRecord, "_not_complete", reported_before)
            full.setattr("refill.delivery_record.os.write", lambda file, data: 0)
            assert worker.add(received(epoch, 100), worker.num_reports())
        assert locked[0], "another process could have reported that all was there"
        assert not reported(record)[1]
        assert record.add(received(epoch, 4 + 4 * epoch), record.num_reports())
        assert since(record) == epoch + 2
        locked.clear()


def _is_locked(record: DeliveryRecord) -> bool:
    lock = os.open(record._folder / "lock", os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


@pytest.mark.parametrize("by", ["the same process", "a new worker", "nobody"])
@pytest.mark.parametrize("removed", [0, 1])
def test_a_file_of_an_epoch_that_was_removed_is_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, removed: int, by: str
) -> None:
    """What cleans temporary folders goes by the age of each file."""
    record = DeliveryRecord()
    for epoch in (0, 1):
        assert record.add(received(epoch, 8 * epoch), record.num_reports())
    next(tmp_path.glob(f"refill-*/epoch-{removed}")).unlink()
    if by != "nobody":
        after = record if by == "the same process" else pickle.loads(pickle.dumps(record))
        assert after.add(received(removed, 16), after.num_reports())
    left = [8, 9, 10, 11] if removed == 0 else [0, 1, 2, 3]
    added = [] if by == "nobody" else [16, 17, 18, 19]
    assert reported(record) == (left + added, False)
    assert record.add(received(1, 20), record.num_reports())
    assert reported(record)[1]
    assert since(record) == 3
    assert (
        f"epoch-{removed} in it was removed: should a pod lose its memory in this epoch or the next, nobody will know"
        in caplog.text
    )


def test_files_of_old_epochs_are_not_missed() -> None:
    """Two workers, one of which is an epoch behind."""
    record = DeliveryRecord()
    other = pickle.loads(pickle.dumps(record))
    for epoch in range(6):
        for worker in (record, other) if epoch % 2 else (other, record):
            assert worker.add(received(epoch, 8 * epoch), worker.num_reports())
        assert reported(other)[1], f"in epoch {epoch}"
        assert since(record) >= epoch - 1


def test_a_full_disk_is_said_and_the_record_is_not_taken_to_be_whole(caplog: pytest.LogCaptureFixture) -> None:
    record = DeliveryRecord()
    record.add(received(0, 0), record.num_reports())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        for first in (4, 8):
            assert record.add(received(0, first), record.num_reports()), "training goes on"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert reported(record) == ([0, 1, 2, 3], False)
    assert len(caplog.records) == 1, "it is said once"
    for epoch in (1, 2):
        assert not reported(record)[1], "what was cut is in the file of an epoch that is kept"
        assert record.add(received(epoch, 0), record.num_reports())
    assert reported(record)[1]
    assert since(record) == 3


def test_what_follows_a_batch_that_was_cut_is_not_taken_to_be_all(tmp_path: Path) -> None:
    """A worker was killed in the middle of a write, and others went on."""
    record = DeliveryRecord()
    record.add(received(0, 0), record.num_reports())
    with next(tmp_path.glob("refill-*/epoch-0")).open("ab") as file:
        file.write(received(0, 4).encode()[:-5])
    record.add(received(0, 8), record.num_reports())
    assert reported(record) == ([0, 1, 2, 3], False)
