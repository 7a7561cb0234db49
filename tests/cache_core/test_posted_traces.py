"""Is a job whose traces will not fit told so with its first epoch, and what it needs?"""

from __future__ import annotations

import re

import numpy as np
import pytest

from refill.errors import MemoryTooSmall, PodBusy
from refill_service.cache_core.posted_traces import PostedTraces, trace_memory

SAMPLES = 1_000_000
POSITION = 13


def posted_of(memory_bytes: int, *, world_size: int = 1, num_epochs: int = 0) -> PostedTraces:
    limit_bytes = trace_memory(memory_bytes, SAMPLES)
    return PostedTraces(SAMPLES, limit_bytes, world_size=world_size, num_epochs=num_epochs)


def post(posted: PostedTraces, epoch: int, rank: int, length: int) -> None:
    with posted.arriving(length, epoch):
        posted.put(epoch, rank, np.zeros(length, dtype=np.int32))


def test_what_the_refusal_of_the_first_trace_names_is_enough_for_all_epochs() -> None:
    """There was room for two epochs of it: the third was refused when two had been trained."""
    with pytest.raises(MemoryTooSmall, match="4 epochs are kept at once") as refused:
        post(posted_of(2 * SAMPLES * POSITION * 4), 0, 0, SAMPLES)
    assert "\n" not in str(refused.value)
    named = re.search(r"give it ([\d,]+) memory_bytes", str(refused.value))
    assert named is not None
    needed = int(named[1].replace(",", ""))
    posted = posted_of(needed)
    for epoch in range(10):
        post(posted, epoch, 0, SAMPLES)
        posted.forget(epoch - 3)
    with pytest.raises(MemoryTooSmall):
        post(posted_of(needed - 4), 0, 0, SAMPLES)


def test_all_ranks_of_the_first_epoch_are_counted_whatever_each_asks_for() -> None:
    memory_bytes = 4 * 4 * (SAMPLES * POSITION + 4 * 256)
    posted = posted_of(memory_bytes, world_size=4)
    for rank in range(4):
        post(posted, 0, rank, SAMPLES // 4)
    uneven = posted_of(memory_bytes, world_size=4)
    for rank, length in enumerate([SAMPLES, 0, 0, 0]):
        post(uneven, 0, rank, length)
    too_long = posted_of(memory_bytes, world_size=4)
    post(too_long, 0, 0, SAMPLES // 2)
    post(too_long, 0, 1, SAMPLES // 2 - 100)
    with pytest.raises(MemoryTooSmall, match="for each of 4 ranks"):
        post(too_long, 0, 2, SAMPLES // 2)


def test_traces_of_the_first_epoch_that_come_together_do_not_all_get_in() -> None:
    posted = posted_of(4 * 4 * (SAMPLES * POSITION + 512), world_size=2)
    with posted.arriving(SAMPLES, 0), pytest.raises(PodBusy), posted.arriving(SAMPLES // 2, 0):
        pass


def test_a_job_of_fewer_epochs_needs_room_for_these_alone() -> None:
    memory_bytes = 2 * 4 * (SAMPLES * POSITION + 256)
    posted = posted_of(memory_bytes, num_epochs=2)
    for epoch in range(2):
        post(posted, epoch, 0, SAMPLES)
    with pytest.raises(MemoryTooSmall, match="3 epochs are kept at once"):
        post(posted_of(memory_bytes, num_epochs=3), 0, 0, SAMPLES)


def test_where_more_memory_is_of_no_use_the_most_positions_are_named() -> None:
    """What is set aside is bounded by the dataset, too."""
    with pytest.raises(MemoryTooSmall, match=r"post shorter traces, of 2,000,000 positions an epoch at most"):
        post(posted_of(1 << 40), 0, 0, 3 * SAMPLES)
