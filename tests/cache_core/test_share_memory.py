"""What a pod reads of one share where ranks ask for all of it in order, more or less: each asked place gets the order's
sample, and each chunk is read once where memory holds what was planned for."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cache_core.one_share import BATCH, EPOCHS, MadeUp, Pod, even, in_calls, in_order, shares

# Where memory holds what was planned for.


@given(
    shares(any_order=False),
    st.integers(0, 3),
    st.sampled_from([1, 7, 300]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_each_chunk_is_read_once_an_epoch(
    share: MadeUp, more: int, most: int, slow: bool, draws: random.Random
) -> None:
    pod = Pod(share, share.planned_bytes * (4 + more) // 4, slow=slow)
    for epoch in range(EPOCHS):
        for call in in_calls(epoch, range(share.num_samples), most, draws):
            assert not pod.ask(*call)
            for read in draws.sample(list(pod.under_way), len(pod.under_way) // 2):
                pod.arrive(read)
        assert pod.gets(epoch) == dict.fromkeys(range(share.num_chunks), 1)
    pod.arrive_all()
    assert pod.is_all_here
    assert not pod.alone
    assert not pod.dropped
    assert pod.epochs_here() <= {EPOCHS}


def test_the_next_epoch_is_read_before_this_one_ends() -> None:
    share = even(4096, 8, 400)
    pod = Pod(share, 500)
    in_order(pod, 0, 32)
    for epoch in range(1, EPOCHS):
        for first in range(0, 4096, 32):
            assert pod.here[epoch][share.order(epoch)[first : first + 32]].all(), "nobody waits"
            assert 500 - 500 // 16 < pod.num_here <= 500, "memory is as good as full, over the end of an epoch, too"
            pod.ask(epoch, range(first, first + 32))
        assert pod.epochs_here() == {epoch + 1}
        assert not pod.gets(epoch + 2)


@pytest.mark.parametrize(
    ("chunk_size", "least_together"), [(8, 16 * 8), (512, 512)], ids=["of sixteen chunks", "of a large one"]
)
def test_full_memory_is_read_into_in_portions(chunk_size: int, least_together: int) -> None:
    share = even(8_192, chunk_size, 1_600)
    pod = Pod(share, 2_048)
    in_order(pod, 0, 32)
    together = []
    for first in range(0, 4_096, 32):
        before = len(pod.log)
        assert not pod.ask(1, range(first, first + 32)), "nobody waits"
        together.append(sum(len(read.samples) for read in pod.log[before:]))
    assert sum(together) > 2_048
    assert min(filter(None, together)) >= least_together
    assert not pod.gets(2), "each chunk is read once"


def test_an_epoch_is_planned_when_half_of_the_one_before_is_read() -> None:
    pod = Pod(even(1000, 10, 100), 100)
    assert pod.memory.next_wanted() is None, "nobody has asked for anything"
    wanted = []
    for first in range(0, 1000, 10):
        pod.ask(3, range(first, first + 10), may_plan_ahead=False)
        wanted.append(pod.memory.next_wanted())
    first = wanted.index(4)
    assert 350 <= 10 * first <= 500
    assert wanted == [None] * first + [4] * (100 - first)
    pod.plan(4)
    assert pod.memory.next_wanted() is None
    assert pod.num_here == 100, "what is known of late is read at once"


def test_the_orders_that_were_planned_last_are_known() -> None:
    pod = Pod(even(100, 10, 10), 10)
    for epoch in (0, 1, 2, 0, 3):
        pod.plan(epoch)
    assert [epoch for epoch in range(5) if pod.memory.knows(epoch)] == [0, 2, 3]


# Who comes before anybody asks, and ranks that share their batches.


def test_what_is_read_before_anybody_asks_is_what_will_be_asked_for() -> None:
    pod = Pod(even(4096, 8, 400), 500)
    pod.warm(2, 1000)
    assert pod.memory.next_wanted() is None
    assert 500 - 8 < pod.num_here <= 500
    assert pod.here[2][pod.share.order(2)[1000:1032]].all()
    pod.warm(0, 0)
    assert pod.epochs_here() == {2}
    assert not in_order(pod, 2, 32, first=1000)
    assert not in_order(pod, 3, 32)
    assert max((pod.gets(2) + pod.gets(3)).values()) == 2


def test_each_chunk_is_read_once_for_all_ranks_that_share_a_batch() -> None:
    pod = Pod(even(4096, 8, 400), 500, num_askers=3)
    for epoch in range(EPOCHS):
        for first in range(0, 4096, 32):
            for _ in range(3):
                assert not pod.ask(epoch, range(first, first + 32))
            assert not pod.here[epoch][pod.share.order(epoch)[: first + 32]].any(), "all have it"
        assert pod.gets(epoch) == dict.fromkeys(range(512), 1)


@given(shares(), st.sampled_from([0, 0.3, 1, 2]), st.integers(2, 4), st.randoms(use_true_random=False))
def test_ranks_that_share_batches_get_them_with_any_memory(
    share: MadeUp, part: float, num_askers: int, draws: random.Random
) -> None:
    """Each asks in its own time, a few calls before or behind the others. Checks are those of :class:`Pod`."""
    pod = Pod(share, int(part * share.planned_bytes), num_askers=num_askers)
    calls = [call for epoch in range(3) for call in in_calls(epoch, range(share.num_samples), 8, draws)]
    turns = [(number + draws.uniform(0, 2), number) for number in range(len(calls)) for _ in range(num_askers)]
    for _, number in sorted(turns):
        pod.ask(*calls[number])
    pod.forget()
    for _ in range(num_askers):
        assert not pod.ask(7, range(share.num_samples))
    assert 7 not in pod.epochs_here()


def test_a_batch_of_every_worker_may_take_as_much_as_memory_holds() -> None:
    """Who is behind by no more than memory holds is waited for: of what comes that late, little is read alone, where
    memory is twice what was planned for."""
    share = even(8192, 16, 400)
    pod = Pod(share, 800)
    workers = np.arange(8192 // 800 * 800).reshape(-1, 25, BATCH)
    alone = 0
    for epoch in range(3):
        for turn in workers:  # the first of 25 is the last to ask
            alone += sum(pod.ask(epoch, batch.tolist()) for batch in turn[::-1])
        alone += in_order(pod, epoch, BATCH, first=workers.size)
    assert alone <= 3 * 8192 // 20


# The smallest ones.


def test_a_share_without_samples_is_asked_for_nothing() -> None:
    pod = Pod(MadeUp([], np.empty(0, dtype=np.int64), 0), 100)
    pod.plan(0)
    pod.memory_is(0)
    pod.forget()
    assert not pod.log
    assert pod.memory.next_wanted() is None


@pytest.mark.parametrize("num_samples", [1, 2, 3])
@pytest.mark.parametrize("chunk_size", [1, 2, 8])
@pytest.mark.parametrize("planned", [0, 1, 2, 9])
def test_shares_of_a_few_samples(num_samples: int, chunk_size: int, planned: int) -> None:
    share = even(num_samples, min(chunk_size, num_samples), planned)
    pod = Pod(share, planned)
    for epoch in range(5):
        assert not in_order(pod, epoch, 1)
    for epoch in range(5, 10):
        assert not in_order(pod, epoch, num_samples)
        assert pod.gets(epoch) == dict.fromkeys(range(share.num_chunks), 1)


def test_a_chunk_that_nobody_has_read_is_read_by_one_get_though_all_of_it_is_asked_for_at_once() -> None:
    pod = Pod(even(64, 16, 64), 64)
    assert not pod.ask(0, range(64))
    assert pod.gets(0) == dict.fromkeys(range(4), 1)


# What a pod reads first, when it begins.


def test_what_a_request_waits_for_is_due_and_what_is_read_ahead_is_not() -> None:
    pod = Pod(even(4096, 8, 400), 400, slow=True)
    for first in (64, 1000):
        before = len(pod.log)
        pod.ask(0, range(first, first + 32))
        wanted = set(pod.share.order(0)[first : first + 32].tolist())
        is_due = [not wanted.isdisjoint(read.samples.tolist()) for read in pod.log[before:]]
        assert [read.due for read in pod.log[before:]] == [first if due else None for due in is_due]
        assert any(is_due)


def test_what_is_read_says_where_somebody_will_ask_for_it_first() -> None:
    """So that a pod reads for all of its shares what is needed soonest."""
    pod = Pod(even(4096, 8, 400), 400, slow=True)
    pod.ask(0, range(32))
    place_of = np.argsort(pod.share.order(0))
    ahead = [read for read in pod.log if read.epoch == 0 and read.due is None and read.place > 0]
    assert len(ahead) > 20
    assert [read.place for read in ahead] == [int(place_of[read.samples].min()) for read in ahead]


def test_first_batches_are_read_alone_where_their_chunks_are_much() -> None:
    """Until something has come; those of other workers are read with their chunks."""
    share = even(4096, 64, 1600)
    for most, is_alone in ((10_000, False), (100, True)):
        pod = Pod(share, 1600, slow=True)
        pod.memory.num_ranks, pod.memory.most_at_first_bytes = 2, most
        pod.ask(0, range(32))
        pod.ask(0, range(32, 64))
        of_first = [read for read in pod.log if read.due is not None]
        assert (max(len(read.samples) for read in of_first) < 32) == is_alone
        if is_alone:
            first = {sample for read in of_first for sample in read.samples.tolist()}
            assert first <= set(share.order(0)[:64].tolist())
        before = len(pod.log)
        pod.ask(0, range(512, 544))
        later = [read for read in pod.log[before:] if read.due is not None]
        assert not later or max(len(read.samples) for read in later) > 32
