"""What a pod reads of one share where it begins in mid-epoch, a run goes back, or ranks leave positions out: it goes on
where it is asked, and what nobody asks for does not stay."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cache_core.one_share import BATCH, MadeUp, Pod, ask_all, even, in_calls, in_order, shares

from refill_service.cache_core.planned import share_memory


def test_what_is_left_of_a_chunk_is_read_ahead_though_its_next_sample_is_left_out() -> None:
    share = MadeUp([8] * 32, np.ones(256, dtype=np.int64), 16, any_order=True)
    pod = Pod(share, 64, slow=True)
    pod.ask(0, [0], may_plan_ahead=False)
    places = np.argsort(share.order(0))
    read = next(read for read in pod.under_way if places[read.samples].min() > 0 and places[read.samples].max() > 100)
    pod.fail(read)
    pod.memory_is(0)
    pod.ask(0, [int(places[read.samples].min()) + 30], may_plan_ahead=False)
    assert not pod.open_epoch(0).to_come[read.samples].all(), "who asks for the first of it is late"
    pod.memory_is(256)
    at = pod.open_epoch(0)
    assert not ((at.to_come > 0) & ~at.here & ~at.coming).any()


# A pod that starts, and runs that go back.


@given(shares(any_order=False), st.floats(0, 1), st.integers(1, 40), st.randoms(use_true_random=False))
def test_who_begins_in_mid_epoch_has_all_from_there_on(
    share: MadeUp, part: float, most: int, draws: random.Random
) -> None:
    n, epoch = share.num_samples, draws.randint(0, 2)
    first = min(n - 1, int(part * n))
    pod = Pod(share, share.planned_bytes)
    assert not ask_all(pod, in_calls(epoch, range(first, n), most, draws))
    planned = pod.memory.planned_places
    before = first if first < planned // 2 else planned // 8
    read = [sample for each in pod.log if each.epoch == epoch for sample in each.samples.tolist()]
    assert sorted(read) == sorted(set(read)), "read once"
    assert set(read) <= set(share.order(epoch)[first - before :].tolist())
    assert set(read) >= set(share.order(epoch)[first:].tolist())
    # What was read for workers that may be behind is left of that epoch, and may be in the way of the next one.
    for later in (epoch + 1, epoch + 2):
        assert not ask_all(pod, in_calls(later, range(n), most, draws))
    assert pod.gets(epoch + 2) == dict.fromkeys(range(share.num_chunks), 1)


def test_a_thread_may_have_begun_an_epoch_in_its_midst() -> None:
    """Which takes a while in a large share, and decides nothing."""
    pods = [Pod(even(num_samples, 8, 800), 1000, slow=True) for num_samples in (4095, 4095)]
    places = np.arange(2000, 2040)
    begun = pods[0].memory.to_prepare(1, places) if pods[0].memory.knows(1) else None
    assert begun is None, "nobody knows the order"
    for pod in pods:
        pod.plan(1)
    to_prepare = pods[0].memory.to_prepare(1, places)
    assert to_prepare is not None
    prepared = to_prepare()
    pods[0].memory.prepared(prepared)
    answers = [pod.memory.asked(1, places) for pod in pods]
    assert pods[0].open_epoch(1) is prepared
    assert pods[1].open_epoch(1) is not prepared
    assert [(read.chunk, read.samples.tolist()) for read in answers[0].reads] == [
        (read.chunk, read.samples.tolist()) for read in answers[1].reads
    ]
    assert pods[0].memory.to_prepare(1, places + 100) is None, "it has begun"


def test_what_was_begun_for_another_place_or_epoch_is_not_taken() -> None:
    for epoch, place in ((1, 3000), (2, 2000)):
        pod = Pod(even(4095, 8, 800), 1000, slow=True)
        pod.plan(1)
        pod.plan(2)
        to_prepare = pod.memory.to_prepare(1, np.array([2000]))
        assert to_prepare is not None
        pod.memory.prepared(to_prepare())
        asked = pod.memory.asked(epoch, np.arange(place, place + 10))
        at = pod.open_epoch(epoch)
        assert at is not None
        assert (at.number, at.first_place) == (epoch, place - 800 // 8)
        assert asked.samples.tolist() == pod.share.order(epoch)[place : place + 10].tolist()


def test_workers_may_be_a_little_behind_where_a_pod_begins() -> None:
    pod = Pod(even(4096, 8, 800), 1000)
    assert not pod.ask(2, range(2000, 2064))
    assert not pod.ask(2, range(1936, 2000))
    assert pod.ask(2, range(1800, 1840)) == 40, "these are taken as gone"
    assert pod.gets(2) == {chunk: 1 for chunk in pod.gets(2)}


@pytest.mark.variants("(0, 4096)")
@pytest.mark.parametrize(
    "stop_at",
    [(0, 4096), (2, 8192), *(pytest.param(at, marks=pytest.mark.variant) for at in ((0, 8192), (1, 2048)))],
    ids=str,
)
def test_a_run_that_goes_back_is_served_anew(stop_at: tuple[int, int]) -> None:
    share = even(8192, 16, 819)
    pod = Pod(share, 1024)
    last, places = stop_at
    for epoch in range(last + 1):
        in_order(pod, epoch, BATCH) if epoch < last else ask_all(
            pod, ((epoch, range(at, at + BATCH)) for at in range(0, places, BATCH))
        )
    already = len(pod.log)
    assert not pod.alone
    assert in_order(pod, 0, BATCH) <= share_memory.MOST_STRAY
    again = Counter(read.chunk for read in pod.log[already:] if read.epoch == 0)
    assert set(again.values()) == {1}
    assert not in_order(pod, 1, BATCH)
    assert all(read.epoch in (0, 1, 2) for read in pod.log[already:])
    assert len(pod.log) - already <= 512 * 2.2


def test_a_run_that_goes_on_in_another_epoch_is_served_there() -> None:
    pod = Pod(even(8192, 16, 819), 1024)
    in_order(pod, 0, BATCH)
    assert in_order(pod, 7, BATCH, first=4000) <= share_memory.MOST_STRAY
    assert not in_order(pod, 8, BATCH)
    assert set(pod.gets(8).values()) == {1}


def test_a_pod_that_others_stood_in_for_goes_on_where_they_are() -> None:
    pod = Pod(even(8192, 16, 819), 1024)
    ask_all(pod, ((1, range(at, at + BATCH)) for at in range(0, 320, BATCH)))
    already = len(pod.log)
    assert not in_order(pod, 1, BATCH, first=5024)
    read = [sample for each in pod.log[already:] if each.epoch == 1 for sample in each.samples.tolist()]
    assert len(read) <= 8192 - 5024 + 1024 + (1024 - 819), "and what lies behind by no more than memory"
    assert not in_order(pod, 2, BATCH)
    assert set(pod.gets(2).values()) == {1}


@pytest.mark.variants("9-32")
@pytest.mark.parametrize(
    ("epoch", "count"),
    [(9, 32), (3, 2000), *(pytest.param(epoch, 2000, marks=pytest.mark.variant) for epoch in (0, 9))],
    ids=str,
)
def test_a_request_that_nobody_expects_changes_nothing_for_others(epoch: int, count: int) -> None:
    """It is of an epoch that is far away, or asked again; there may be many places in it."""
    one, other = (Pod(even(8192, 16, 819), 1024) for _ in range(2))
    for pod in (one, other):
        in_order(pod, 2, BATCH)
        ask_all(pod, ((3, range(at, at + BATCH)) for at in range(0, 4000, BATCH)))
    assert other.ask(epoch, range(count)) == count
    for pod in (one, other):
        in_order(pod, 3, BATCH, first=4000)
        in_order(pod, 4, BATCH)
    of_one, of_other = ([(read.epoch, read.samples.tolist()) for read in pod.log] for pod in (one, other))
    assert of_other == of_one
    assert len(other.alone) == count


def test_the_epoch_after_one_that_was_only_read_ahead_is_far_away() -> None:
    pod = Pod(even(4096, 16, 4096), 5000)
    ask_all(pod, ((0, range(at, at + BATCH)) for at in range(0, 2016, BATCH)))
    assert {read.epoch for read in pod.log} == {0, 1}
    assert pod.ask(2, range(BATCH)) == BATCH
    assert not in_order(pod, 0, BATCH, first=2016)
    assert not in_order(pod, 1, BATCH)


@pytest.mark.variants("0-0", "2-0")
@pytest.mark.parametrize(("epoch", "place"), [(0, 0), (2, 0), (3, 0), (9, 2000)])
def test_a_job_that_begins_elsewhere_than_was_thought_begins_there(epoch: int, place: int) -> None:
    pod = Pod(even(4096, 8, 400), 500)
    pod.warm(2, 1000)
    assert not in_order(pod, epoch, 32, first=place)
    assert not in_order(pod, epoch + 1, 32)
    assert pod.epochs_here() == {epoch + 2}


# Ranks that leave positions out, and many epochs.


@pytest.mark.parametrize(("num_samples", "planned"), [(4096, 409), (1024, 1024), (500, 50), (500, 500)])
def test_what_nobody_asks_for_does_not_stay(num_samples: int, planned: int) -> None:
    share = even(num_samples, 8, planned)
    memory = planned * 3 // 2
    pod = Pod(share, memory)
    asked = [place for place in range(num_samples) if place % 8]
    for epoch in range(5):
        for at in range(0, len(asked), BATCH):
            assert not pod.ask(epoch, asked[at : at + BATCH])
            far_behind = share.order(epoch)[: max(0, int(asked[at] - 1.2 * memory))]
            assert not pod.here[epoch][far_behind].any()
        assert pod.gets(epoch) == dict.fromkeys(range(share.num_chunks), 1)
        assert min(pod.epochs_here()) >= epoch - (planned == num_samples)
    assert not pod.alone


def test_the_last_of_an_epoch_that_is_left_out_gives_room() -> None:
    """Ranks that do not divide the epoch, with ``drop_last``."""
    pod = Pod(even(1000, 8, 100), 125)
    for epoch in range(6):
        assert not ask_all(pod, ((epoch, range(at, at + 30)) for at in range(0, 990, 30)))
        assert pod.epochs_here() <= {epoch, epoch + 1}
        assert all(count == 1 for count in pod.gets(epoch).values())


def test_a_loop_that_breaks_off_each_epoch_reads_memory_anew_and_no_more() -> None:
    share = even(4096, 8, 400)
    pod = Pod(share, 500)
    for epoch in range(6):
        assert not ask_all(pod, ((epoch, range(at, at + 20)) for at in range(0, 1000, 20)))
        assert sum(pod.gets(epoch).values()) <= (1000 + 2 * 500) / 8
        assert all(len(read.samples) > 1 for read in pod.log if read.epoch == epoch)


@given(shares(), st.sampled_from([0, 0.5, 1, 3]), st.randoms(use_true_random=False))
def test_many_epochs_do_not_add_up(share: MadeUp, part: float, draws: random.Random) -> None:
    """Also where each is broken off, or leaves positions out."""
    pod = Pod(share, int(part * share.planned_bytes))
    for epoch in range(12):
        end = draws.randint(1, share.num_samples) if draws.random() < 0.5 else share.num_samples
        places = [place for place in range(end) if draws.random() < 0.9] or [0]
        ask_all(pod, in_calls(epoch, places, 40, draws))
        assert all(len(at.again) <= share.num_samples for at in pod.memory.epochs)
        assert pod.epochs_here() <= {epoch - 1, epoch, epoch + 1}, epoch


@pytest.mark.parametrize(("chunk_size", "memory"), [(8, 400), (64, 1600), (64, 400)])
def test_who_begins_in_mid_epoch_leaves_out_what_nobody_wants_of_chunks_in_use(chunk_size: int, memory: int) -> None:
    share = even(8192, chunk_size, memory)
    pod = Pod(share, memory)
    first = 4096
    assert not ask_all(pod, ((1, range(at, at + BATCH)) for at in range(first, 8192, BATCH)))
    begins = first - memory // 8
    in_use = np.unique(share.chunk_of[share.order(1)[:begins]])
    reads = [read for read in pod.log if read.epoch == 1 and read.chunk in in_use]
    wanted = sum(len(read.samples) for read in reads)
    read_bytes = sum(int(read.local[-1] + 1 - read.local[0]) for read in reads)
    assert wanted < read_bytes <= 2 * wanted
