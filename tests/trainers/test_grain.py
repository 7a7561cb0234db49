"""Grain reads planned epochs on real pods: each sample once, one request for many asks, and on from a saved number."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import islice
from typing import Any

import pytest
from tests.trainers.launching import NUM_SAMPLES, Place, check_exact
from tests.waiting import until

import refill
from refill.errors import InvalidInput

pytestmark = pytest.mark.skipif(find_spec("grain") is None, reason="Grain is not installed")


def source_of(place: Place, job: str, **more: Any) -> refill.GrainSource:
    return refill.GrainSource(place.url, dataset=place.dataset, job=job, **({"epochs": 2, "stretch": 16} | more))


def loop_of(source: refill.GrainSource, batch_size: int = 10, threads: int = 8) -> Iterator[Any]:
    import grain  # slow to import

    dataset = grain.MapDataset.source(source).map(lambda sample: sample["__id__"]).batch(batch_size)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=40)))


def test_a_saved_iterator_goes_on_and_each_sample_comes_once_an_epoch(place: Place) -> None:
    job = place.new_job()
    source = source_of(place, job)
    loop: Any = loop_of(source)
    had = [number for _ in range(13) for number in next(loop).tolist()]
    state = loop.get_state()
    del loop
    again: Any = loop_of(source_of(place, job))  # as another process would
    again.set_state(state)
    had += [number for batch in again for number in batch.tolist()]
    assert len(source) == len(had) == 2 * NUM_SAMPLES
    first, second = had[:NUM_SAMPLES], had[NUM_SAMPLES:]
    for epoch, ids in enumerate((first, second)):
        check_exact(place, job, epoch, ids)
    assert first != second
    assert first != sorted(first)


def test_two_ranks_divide_each_epoch(place: Place) -> None:
    job = place.new_job()
    ranks = [source_of(place, job, rank=rank, world_size=2, epochs=1) for rank in range(2)]
    assert [len(source) for source in ranks] == [NUM_SAMPLES // 2] * 2
    check_exact(place, job, 0, [number for source in ranks for batch in loop_of(source) for number in batch.tolist()])


def test_many_asks_are_one_request_and_the_next_stretch_is_not_asked_for(place: Place) -> None:
    job = place.new_job()
    source = source_of(place, job, epochs=1)
    ids = [source[number]["__id__"] for number in range(NUM_SAMPLES)]
    assert sorted(ids) == list(range(NUM_SAMPLES))

    def counted() -> int:
        return int(source.epoch_counts(0)["total"]["batches"])

    most = 2 * -(-NUM_SAMPLES // 16)  # a request to each of two pods
    until(lambda: counted() > 0, "counts")
    assert counted() <= most


def test_any_order_of_asks_gives_what_lies_there(place: Place) -> None:
    source = source_of(place, place.new_job())
    expected = [source[number]["__id__"] for number in range(2 * NUM_SAMPLES)]
    backwards = source_of(place, source.job)
    for number in [*range(2 * NUM_SAMPLES - 1, 2 * NUM_SAMPLES - 50, -1), -1, 0, 17, 0]:
        assert backwards[number]["__id__"] == expected[number]


def test_it_is_a_source_for_grain_and_refuses_what_it_is_not(place: Place) -> None:
    import grain

    job = place.new_job()
    source = source_of(place, job)
    assert isinstance(source, grain.sources.RandomAccessDataSource)
    assert repr(source) == repr(source_of(place, job)) != repr(source_of(place, job, stretch=8))
    with pytest.raises(IndexError, match="there is no sample 800; there are 800 in 2 epochs"):
        source[2 * NUM_SAMPLES]
    with pytest.raises(InvalidInput, match="without mp_prefetch"):
        pickle.dumps(source)
    for wrong in ({"epochs": 0}, {"stretch": 1.5}):
        with pytest.raises(InvalidInput, match="must be a whole number"):
            source_of(place, job, **wrong)


def shuffled(ranks: int = 1, rank: int = 0) -> Any:
    """As Grain shuffles two epochs and divides them."""
    import grain

    return grain.MapDataset.range(NUM_SAMPLES).seed(7).shuffle().repeat(2)[rank::ranks]


@pytest.mark.variants("exact")
@pytest.mark.parametrize("policy", ["exact", "planned"])
def test_an_order_of_grains_own_is_kept_and_comes_in_few_requests(place: Place, policy: str) -> None:
    """With memory for about half of the dataset, a chunk is read for several of its samples. What is read of the store
    pods count."""
    expected = [int(shuffled()[number]) for number in range(2 * NUM_SAMPLES)]
    how: dict[str, Any] = {"policy": policy, "order": shuffled(), "chunk_size": 16, "memory_bytes": 100_000}
    source = source_of(place, place.new_job(), **how)
    loop = loop_of(source)
    assert [number for batch in loop for number in batch.tolist()] == expected
    for epoch in range(2):
        counts = source.epoch_counts(epoch)["total"]
        # Some 100 with exact on a quiet machine. On a busy one Grain's threads ask further out of order.
        assert counts["refills"] + counts["exact_reads"] < NUM_SAMPLES, counts


@pytest.mark.variants("exact")
@pytest.mark.parametrize("policy", ["exact", "planned"])
def test_an_order_goes_on_where_it_stood_and_is_divided_among_ranks(place: Place, policy: str) -> None:
    """Ranks are threads: an epoch of ``exact`` begins when all have listed theirs."""
    job = place.new_job()
    how: dict[str, Any] = {"world_size": 2, "policy": policy, "memory_bytes": 100_000, "chunk_size": 16}

    def part(rank: int, state: Any, most: int | None = None) -> tuple[list[int], Any]:
        loop: Any = loop_of(source_of(place, job, rank=rank, order=shuffled(2, rank), **how))
        if state is not None:
            loop.set_state(state)
        had = [number for batch in islice(loop, most) for number in batch.tolist()]
        return had, loop.get_state()

    with ThreadPoolExecutor(2) as ranks:
        first = list(ranks.map(lambda rank: part(rank, None, 13), range(2)))
        rest = list(ranks.map(lambda rank: part(rank, first[rank][1]), range(2)))
    for rank in range(2):
        assert first[rank][0] + rest[rank][0] == [int(shuffled(2, rank)[number]) for number in range(NUM_SAMPLES)]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"order": range(401)}, "order has 401 ids, which are not the same number in each of 2 epochs"),
        ({"order": [0, NUM_SAMPLES]}, f"order names ids {NUM_SAMPLES} to {NUM_SAMPLES}, and there are"),
        ({"order": ["a", "b"]}, "order must be ids of samples, whole numbers"),
        ({"order": range(400), "policy": "redox"}, "policy redox keeps no order"),
    ],
)
def test_what_is_no_order_is_refused(place: Place, how: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        source_of(place, place.new_job(), **how)[1]
