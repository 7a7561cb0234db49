"""What a rank has received: one record for all its processes, that outlives each of them but the first."""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from refill.delivery_record import DeliveryRecord
from refill.protocol.records import Kind, Record, RecordReader


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def received(epoch: int, first: int, count: int = 4) -> Record:
    positions = np.arange(first, first + count)
    return Record(Kind.RECEIVED, epoch, 0, (positions, positions + 1000))


def reported(record: DeliveryRecord) -> tuple[list[int], bool]:
    """The positions in it, and whether they are all."""
    records = list(RecordReader(record.report(0)))
    positions = [p for each in records if each.kind is Kind.RECEIVED for p in each.columns[0].tolist()]
    return sorted(positions), records[-1:] != [] and records[-1].kind is Kind.WHOLE


def add_as_a_worker(record: DeliveryRecord, worker: int, killed: bool) -> None:
    for batch in range(10):
        assert record.add(received(0, 100 * worker + 4 * batch), record.num_reports())
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_yet() -> None:
    """Another process may have been the rank: who has received nothing says no more than that."""
    record = DeliveryRecord()
    assert [each.kind for each in RecordReader(record.report(0))] == [Kind.UNUSED]
    assert record.add(received(0, 0), record.num_reports())
    assert reported(record) == ([0, 1, 2, 3], True)


def test_what_was_unknown_of_the_rank_is_not_reported_as_all() -> None:
    record = DeliveryRecord()
    assert record.add(received(0, 0), record.num_reports())
    record.is_unknown_before(2)
    record.is_unknown_before(1)
    assert list(RecordReader(record.report(0)))[-1] == (Kind.WHOLE, 2, 0, (pytest.approx([]),))


def test_who_begins_with_a_later_epoch_does_not_say_that_it_knows_all_of_the_one_before() -> None:
    """The rank's process was killed at the end of epoch 0, and another one goes on with epoch 1."""
    record = DeliveryRecord()
    assert record.add(received(1, 0), record.num_reports())
    assert list(RecordReader(record.report(0)))[-1][:2] == (Kind.WHOLE, 1)
    assert record.add(received(2, 0), record.num_reports())
    assert list(RecordReader(record.report(0)))[-1][:2] == (Kind.WHOLE, 1), "of epoch 1 it knows all"


def test_a_trace_that_is_posted_early_drops_nothing_that_another_rank_may_be_in() -> None:
    """Rank 0 is about to enter epoch 2, another one is in epoch 0."""
    record = DeliveryRecord()
    for epoch in (0, 1):
        assert record.add(received(epoch, 8 * epoch), record.num_reports())
    assert record.add(Record(Kind.TRACE, 2, 0, (np.arange(4),)), record.num_reports())
    assert reported(record) == ([0, 1, 2, 3, 8, 9, 10, 11], True)
    assert record.add(received(2, 16), record.num_reports())
    assert record.add(received(3, 24), record.num_reports())
    assert reported(record) == ([16, 17, 18, 19, 24, 25, 26, 27], True)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_share_it_and_may_be_killed(method: str) -> None:
    record, context = DeliveryRecord(), multiprocessing.get_context(method)
    record.add(received(0, 900), record.num_reports())
    workers = [context.Process(target=add_as_a_worker, args=(record, n, n == 1)) for n in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0, -9, 0]
    expected = [p for n in range(3) for p in range(100 * n, 100 * n + 40)] + list(range(900, 904))
    assert reported(record) == (expected, True)


def test_threads_share_it() -> None:
    record = DeliveryRecord()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: add_as_a_worker(record, n, killed=False), range(4)))
    assert len(reported(record)[0]) == 160


def test_what_was_asked_for_before_a_report_does_not_count_after() -> None:
    """The pod that got the report has given it to somebody else by then."""
    record, worker = DeliveryRecord(), None
    assert record.add(received(0, 0), record.num_reports())
    worker = pickle.loads(pickle.dumps(record))
    asked = worker.num_reports()
    reported(record)
    assert not worker.add(received(0, 50), asked)
    assert worker.add(received(0, 50), worker.num_reports())
    assert reported(record)[0] == [0, 1, 2, 3, 50, 51, 52, 53]


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
        held.append(_is_locked(self))
        fails(self, error)

    held: list[bool] = []
    for epoch in range(4):
        with monkeypatch.context() as full:
            full.setattr(DeliveryRecord, "_not_complete", reported_before)
            full.setattr("refill.delivery_record.os.write", lambda file, data: 0)
            assert worker.add(received(epoch, 100), worker.num_reports())
        assert held[0], "another process could have reported that all was there"
        assert not reported(record)[1]
        assert record.add(received(epoch, 4 + 4 * epoch), record.num_reports())
        assert since(record) == epoch + 2
        held.clear()


def _is_locked(record: DeliveryRecord) -> bool:
    lock = os.open(record._folder / "lock", os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


LOOP_THAT_FAILS = """
import multiprocessing.util, signal  # as torch imports it: before anything ends
from refill.delivery_record import DeliveryRecord
from refill.protocol.records import Kind, Record

def work(record, ready):
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    record.add(Record(Kind.TRACE, 0, 0, ((),)), 0)
    ready.set()
    while not ended:
        signal.pause()
    record.add(Record(Kind.TRACE, 0, 0, ((),)), 0)

context = multiprocessing.get_context("fork")
record, ready = DeliveryRecord(), context.Event()
context.Process(target=work, args=(record, ready), daemon=True).start()
assert ready.wait(60)
raise KeyError("of the loop")
"""


def test_a_training_process_that_ends_takes_it_away_after_its_workers(tmp_path: Path) -> None:
    """A worker that was still to be ended took the folder's removal for somebody else's, and said so below the error
    that ended the loop."""
    ended = subprocess.run(
        [sys.executable, "-c", LOOP_THAT_FAILS],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.stderr.endswith("KeyError: 'of the loop'\n"), ended.stderr
    assert list(tmp_path.glob("refill-*")) == []


def add_as_an_orphan(record: DeliveryRecord, folder: Path, said: Connection) -> None:
    while os.getppid() == record.made_in:
        time.sleep(0.01)
    shutil.rmtree(folder)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: messages.append(entry.getMessage())  # type: ignore[method-assign]
    logging.getLogger("refill.delivery_record").addHandler(handler)
    record.add(received(0, 8), record.num_reports())
    said.send((messages, folder.exists()))


def be_killed_with_a_worker(folder: Path, said: Connection) -> None:
    record = DeliveryRecord()
    record.add(received(0, 0), record.num_reports())
    (folder,) = folder.iterdir()
    multiprocessing.get_context("fork").Process(
        target=add_as_an_orphan, args=(record, folder, said), daemon=True
    ).start()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_whose_training_process_was_killed_says_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=be_killed_with_a_worker, args=(tmp_path, there))
    process.start()
    process.join(30)
    assert process.exitcode == -9
    assert here.poll(30), "the worker did not end"
    assert here.recv() == ([], False)


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


def test_a_folder_of_a_killed_process_goes_with_the_next_one(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=add_as_a_new_process, args=(tmp_path,))
    process.start()
    process.join(30)
    assert process.exitcode == -9
    (left,) = tmp_path.iterdir()
    record = DeliveryRecord()
    assert not left.exists()
    assert len(list(tmp_path.iterdir())) == 1
    DeliveryRecord()
    assert record.add(received(0, 0), record.num_reports()), "it is in use"
    assert reported(record) == ([0, 1, 2, 3], True)


def add_as_a_new_process(folder: Path) -> None:
    record = DeliveryRecord()
    record.add(received(0, 0), record.num_reports())
    os.kill(os.getpid(), signal.SIGKILL)


def test_two_epochs_are_kept(tmp_path: Path) -> None:
    record = DeliveryRecord()
    for epoch in range(5):
        record.add(received(epoch, 10 * epoch), record.num_reports())
    assert reported(record)[0] == [30, 31, 32, 33, 40, 41, 42, 43]


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


def test_it_goes_with_the_training_process(tmp_path: Path) -> None:
    def train() -> None:
        record = DeliveryRecord()
        record.add(received(0, 0), record.num_reports())
        worker = context.Process(target=add_as_a_worker, args=(record, 1, False))
        worker.start()
        worker.join(30)
        assert reported(record)[1], "a worker that ended took the record with it"

    context = multiprocessing.get_context("fork")
    process = context.Process(target=train)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    record = DeliveryRecord()
    record.add(received(0, 0), record.num_reports())
    folders = list(tmp_path.iterdir())
    del record
    assert [folder for folder in folders if folder.exists()] == [
        folder for folder in folders if f"-{os.getpid()}-" not in folder.name
    ]


def test_what_follows_a_batch_that_was_cut_is_not_taken_to_be_all(tmp_path: Path) -> None:
    """A worker was killed in the middle of a write, and others went on."""
    record = DeliveryRecord()
    record.add(received(0, 0), record.num_reports())
    with next(tmp_path.glob("refill-*/epoch-0")).open("ab") as file:
        file.write(received(0, 4).encode()[:-5])
    record.add(received(0, 8), record.num_reports())
    assert reported(record) == ([0, 1, 2, 3], False)


def since(record: DeliveryRecord) -> int:
    """The epoch from which on it says to be whole."""
    (last,) = list(RecordReader(record.report(0)))[-1:]
    assert last.kind is Kind.WHOLE
    return last.epoch


class TestALoopThatGoesOnWithinAnEpoch:
    def test_is_whole_from_the_next_epoch_on(self) -> None:
        record = DeliveryRecord()
        record.add(received(3, 8), record.num_reports())
        assert record.resumes_within(3, np.arange(8))
        assert since(record) == 4

    def test_is_whole_when_this_process_had_it_all(self) -> None:
        record = DeliveryRecord()
        record.add(received(3, 0), record.num_reports())
        record.add(received(3, 4), record.num_reports())
        assert record.resumes_within(3, np.arange(8))
        assert since(record) <= 3

    def test_can_not_when_pods_that_were_new_took_it_for_whole(self) -> None:
        record = DeliveryRecord()
        record.report(0, moves=1)
        assert not record.resumes_within(3, np.arange(8))


def test_nothing_comes_from_pods_that_were_there_before_the_job_moved() -> None:
    record = DeliveryRecord()
    record.report(0, moves=1)
    assert not record.add(received(0, 0), record.num_reports(), moves=0)
    assert record.add(received(0, 0), record.num_reports(), moves=1)
    assert record.moves() == pickle.loads(pickle.dumps(record)).moves() == 1


def test_files_are_closed_with_the_record() -> None:
    """A process may make a dataset for each epoch of a validation, and has 1,024 files."""
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(20):
        record = DeliveryRecord()
        copy = pickle.loads(pickle.dumps(record))
        other = record.of_rank(1)
        for each in (record, copy, other):
            assert each.add(received(0, 0), each.num_reports())
        del each, other, copy, record
    assert set(os.listdir("/proc/self/fd")) <= before
