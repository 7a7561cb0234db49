"""What does a delivery record report as received, and from which epoch on does it say that this is all?"""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from tests.client.delivery_records import received, reported, since

from refill.delivery_record import DeliveryRecord
from refill.protocol.records import Kind, Record, RecordReader

pytestmark = pytest.mark.usefixtures("records_in_tmp_path")


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


def test_two_epochs_are_kept(tmp_path: Path) -> None:
    record = DeliveryRecord()
    for epoch in range(5):
        record.add(received(epoch, 10 * epoch), record.num_reports())
    assert reported(record)[0] == [30, 31, 32, 33, 40, 41, 42, 43]


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
