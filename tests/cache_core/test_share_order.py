"""One share's order: a bijection that keeps the memory rule everywhere, whatever the sizes, and never changes."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill.protocol.spread import ONE, ramp_of, stays
from refill_service.cache_core.planned.share_order import ShareOrder, order_share


class Drawn(NamedTuple):
    starts: np.ndarray
    lengths: np.ndarray
    memory_bytes: int
    key: int
    number: int
    num_shares: int
    run: int
    ramped: bool

    def order(self) -> ShareOrder:
        return order_share(
            self.starts,
            self.lengths,
            self.memory_bytes,
            self.key,
            number=self.number,
            num_shares=self.num_shares,
            run=self.run,
            ramped=self.ramped,
        )


def lengths_of(kind: str, seed: int, n: int, chunk: np.ndarray) -> np.ndarray:
    """Bytes of samples as datasets have them."""
    draws = np.random.default_rng(seed)
    if kind == "one":
        return np.ones(n, dtype=np.int64)
    if kind == "log-normal":
        return draws.lognormal(11, 1, n).astype(np.int64)
    if kind == "alike within chunks":
        return draws.lognormal(11, 1, int(chunk.max(initial=0)) + 1).astype(np.int64)[chunk]
    if kind == "few huge":
        return np.where(draws.random(n) < 1 / 50, 10_000_000, 100_000)
    return draws.integers(0, 3, n) * 1000  # some are empty


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    chunk_size = draw(st.integers(1, 80))
    sizes = draw(st.lists(st.integers(1, chunk_size), max_size=60)) if draw(st.booleans()) else None
    if sizes is None:
        sizes = [chunk_size] * draw(st.integers(0, 60))
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    kind = draw(st.sampled_from(["one", "log-normal", "alike within chunks", "few huge", "some empty"]))
    chunk = np.repeat(np.arange(len(sizes)), sizes)
    lengths = lengths_of(kind, draw(st.integers(0, 99)), int(starts[-1]), chunk)
    part = draw(st.sampled_from([0.0, 0.001, 0.03, 0.1, 0.25, 0.6, 1.0, 3.0]))
    num_shares = draw(st.integers(1, 9))
    return Drawn(
        starts,
        lengths,
        int(lengths.sum() * part),
        draw(st.integers(0, 2**64 - 1)),
        draw(st.integers(0, num_shares - 1)),
        num_shares,
        draw(st.sampled_from([1, 32, 256])),
        draw(st.booleans()),
    )


def read_by(delivered: int, drawn: Drawn, chunk_bytes: list[int]) -> int:
    """How many chunks, in their order, may have been read when so many bytes have been delivered."""
    memory, count, through = drawn.memory_bytes, 0, 0
    if drawn.ramped:
        total = sum(chunk_bytes)
        ramp = ramp_of(min(memory, total), total // len(chunk_bytes), drawn.num_shares, drawn.run)
        memory = min(memory, ramp.start_bytes + delivered // ramp.part)
    for each in chunk_bytes:
        fits = through + each <= delivered + memory
        alone = through <= delivered  # larger than memory: when nothing else is there
        if not fits and not alone:
            break
        through += each
        count += 1
    return count


@given(drawn())
def test_every_sample_comes_once_and_none_before_memory_holds_its_chunk(share: Drawn) -> None:
    """From the order alone: chunks are read whole, in the order of their first use at the latest, each once."""
    order = share.order()
    num_samples, num_chunks = len(share.lengths), len(share.starts) - 1
    assert np.sort(order.samples).tolist() == list(range(num_samples)), "a sample is missing, or comes twice"
    assert np.sort(order.reads).tolist() == list(range(num_chunks)), "a chunk is missing, or is read twice"
    of_sample = np.repeat(np.arange(num_chunks), np.diff(share.starts))
    turn = np.empty(num_chunks, dtype=np.int64)
    turn[order.reads] = np.arange(num_chunks)
    turns = turn[of_sample[order.samples]]
    chunk_bytes = [int(share.lengths[of_sample == chunk].sum()) for chunk in order.reads.tolist()]
    delivered, allowed = 0, 0
    for place, sample in enumerate(order.samples.tolist()):
        allowed = max(allowed, read_by(delivered, share, chunk_bytes))
        assert turns[place] < allowed, f"sample {sample} comes at place {place} before memory has room for its chunk"
        delivered += int(share.lengths[sample])


@given(drawn())
def test_reads_say_when_memory_has_room(share: Drawn) -> None:
    """``read_at`` is the least that the rule allows; before the epoch but in a job's first."""
    order = share.order()
    through = 0
    of_chunk = np.add.reduceat(share.lengths, share.starts[:-1]) if len(order.reads) else np.empty(0, dtype=np.int64)
    for chunk, read_at in zip(order.reads.tolist(), order.read_at.tolist(), strict=True):
        before, through = through, through + int(of_chunk[chunk])
        assert read_at <= before
        if not share.ramped:
            assert read_at == min(before, through - share.memory_bytes)
        else:
            assert read_at >= 0


@given(drawn())
def test_the_same_arguments_give_the_same_order(share: Drawn) -> None:
    first, again = share.order(), share.order()
    for one, other in zip(first, again, strict=True):
        assert one.tolist() == other.tolist()


def test_another_key_gives_another_order() -> None:
    starts, lengths = np.arange(0, 1001, 10), np.ones(1000, dtype=np.int64)
    orders = {tuple(order_share(starts, lengths, 200, key).samples.tolist()) for key in range(50)}
    assert len(orders) == 50


@pytest.mark.parametrize(
    ("chunk_size", "kind", "ramped", "digest"),
    [
        (8, "one", False, "01afae1087907e2b"),
        (16, "many", False, "38728ee9f6458994"),
        (64, "few huge", True, "cf37d2853e12fe35"),
        (64, "one", True, "65407c204147dfb3"),
        (2, "one", True, "e7d2ef0ad34f8c67"),
    ],
)
def test_orders_never_change(chunk_size: int, kind: str, ramped: bool, digest: str) -> None:
    """Pods of different versions and processors must agree: a change of this is a new version of the function.
    Sizes are arithmetic, since numpy may change its draws."""
    n = 10_000
    starts = np.append(np.arange(0, n, chunk_size), n)
    each = np.arange(n, dtype=np.int64)
    lengths = {"one": each * 0 + 1, "many": 1000 + each * each % 7919, "few huge": 1 + (each % 997 == 0) * 99}[kind]
    order = order_share(starts, lengths, int(lengths.sum()) // 10, 7, number=2, num_shares=5, ramped=ramped)
    found = hashlib.blake2b(b"".join(column.astype("<i8").tobytes() for column in order), digest_size=8).hexdigest()
    assert found == digest


@pytest.mark.parametrize(
    ("num_shares", "run", "chunks", "start", "part"),
    [
        (8, 32, 63, 12.6, 4),
        (8, 32, 127, 25.4, 8),
        (8, 32, 639, 127.8, 16),
        (8, 32, 5000, 128, 16),
        (8, 256, 511, 102.2, 8),
        (8, 256, 5000, 512, 16),
        (1, 1, 1023, 204.6, 8),
        (1, 1, 9999, 1024, 16),
        (100, 64, 700, 128, 16),
    ],
)
def test_a_first_epoch_begins_with_the_chunks_that_mix_well(
    num_shares: int, run: int, chunks: int, start: float, part: int
) -> None:
    """With no more than a fifth of memory; with more memory than that in chunks it grows a quarter as fast,
    and with half of that half as fast."""
    assert ramp_of(chunks * 100, 100, num_shares, run) == (start * 100, part)


def test_large_memory_delays_a_first_epoch_no_more_than_the_chunks_that_mix_well() -> None:
    """Eight shares of 4,096 chunks, all of them in memory: what the second batch of 1,024 waits for, and whether
    samples of one chunk meet in it."""
    chunk_size, num_chunks, num_shares = 16, 4096, 8
    starts, lengths = np.arange(num_chunks + 1) * chunk_size, np.ones(num_chunks * chunk_size, dtype=np.int64)
    orders = [
        order_share(starts, lengths, len(lengths), 7, number=number, num_shares=num_shares, ramped=True)
        for number in range(num_shares)
    ]
    of_batch = 1024 // num_shares
    for order in orders:
        turns = np.empty(num_chunks, dtype=np.int64)
        turns[order.reads] = np.arange(num_chunks)
        chunks = order.samples // chunk_size
        first = chunks[: 2 * of_batch]
        assert turns[first].max() < 160, "two batches need more than 128 chunks of a share, and what they make room for"
        mates = [len(batch) - len(np.unique(batch)) for batch in chunks[: 50 * of_batch].reshape(50, of_batch)]
        assert sum(mates) <= 50, f"{sum(mates)} samples of 50 batches meet one of their chunk"


def test_stays_have_a_mean_of_one_and_end() -> None:
    parts = (np.arange(1 << 16, dtype=np.uint64) << np.uint64(16)) + np.uint64(1 << 15)
    found = stays(parts)
    assert (np.diff(found) > 0).all()
    x = (parts.astype(np.float64)) / 2**32
    assert np.allclose((found / ONE)[x < 0.99], (x / 2 - 0.75 * np.log1p(-x))[x < 0.99], atol=1e-4)
    assert abs(found.mean() / ONE - 1) < 1e-3
    assert found[-1] < 7.5 * ONE


def test_samples_of_a_chunk_leave_far_apart() -> None:
    """And chunks of a sorted share are read so that each twentieth of it is as frequent as the others at any time."""
    n, memory = 20_000, 2000
    starts = np.arange(0, n + 1, 10)
    order = order_share(starts, np.ones(n, dtype=np.int64), memory, 3)
    place = np.empty(n, dtype=np.int64)
    place[order.samples] = np.arange(n)
    of_chunks = np.sort(place.reshape(-1, 10), axis=1)
    assert np.median(of_chunks[:, -1] - of_chunks[:, 0]) > 1.5 * memory
    for first in range(0, n, 2000):
        counts = np.bincount(order.samples[first : first + 2000] * 20 // n, minlength=20)
        assert counts.min() > 60, f"of the samples from place {first} on, {counts} come from each twentieth"
        assert counts.max() < 145, f"of the samples from place {first} on, {counts} come from each twentieth"
