"""Do all processes of a rank share one delivery record, that outlives each of them but the first?"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from tests.client.delivery_records import received, reported

from refill.delivery_record import DeliveryRecord

pytestmark = pytest.mark.usefixtures("records_in_tmp_path")


def add_as_a_worker(record: DeliveryRecord, worker: int, killed: bool) -> None:
    for batch in range(10):
        assert record.add(received(0, 100 * worker + 4 * batch), record.num_reports())
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)


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


def test_a_process_that_imports_dill_ends_without_a_word(tmp_path: Path) -> None:
    """dill keeps what ``__main__`` holds until no module is left, and with it the datasets there."""
    pytest.importorskip("dill")
    line = "import dill, refill; dataset = refill.CacheDataset('http://127.0.0.1:9', dataset='file:///data', job='job')"
    ended = subprocess.run(
        [sys.executable, "-c", line],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert list(tmp_path.glob("refill-*")) == []


def test_a_record_that_is_gone_has_nothing_open() -> None:
    def opened() -> set[str]:
        return {os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}

    record = DeliveryRecord()
    record.add(received(0, 0), record.num_reports())
    folder = str(record._folder)
    assert len([name for name in opened() if name.startswith(folder)]) == 3
    del record
    assert not [name for name in opened() if name.startswith(folder)]


def add_as_an_orphan(record: DeliveryRecord, folder: Path, answers: Connection) -> None:
    while os.getppid() == record.made_in:
        time.sleep(0.01)
    shutil.rmtree(folder)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: messages.append(entry.getMessage())  # type: ignore[method-assign]
    logging.getLogger("refill.delivery_record").addHandler(handler)
    record.add(received(0, 8), record.num_reports())
    answers.send((messages, folder.exists()))


def be_killed_with_a_worker(folder: Path, answers: Connection) -> None:
    record = DeliveryRecord()
    record.add(received(0, 0), record.num_reports())
    (folder,) = folder.iterdir()
    multiprocessing.get_context("fork").Process(
        target=add_as_an_orphan, args=(record, folder, answers), daemon=True
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


def add_for_another_rank(record: DeliveryRecord) -> None:
    other = record.of_rank(1)
    other.add(received(0, 0), other.num_reports())


def test_what_a_worker_keeps_for_another_rank_stays_while_the_training_process_lives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As where process 0 of a trainer reads for all: between two epochs no worker lives. A dataset that was made then,
    by whomever on the machine, took the other ranks' records for those of a process that was killed."""
    record = DeliveryRecord()
    worker = multiprocessing.get_context("fork").Process(target=add_for_another_rank, args=(record,))
    worker.start()
    worker.join(30)
    assert worker.exitcode == 0
    DeliveryRecord()
    assert reported(record.of_rank(1)) == ([0, 1, 2, 3], True)
    assert caplog.messages == []


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
