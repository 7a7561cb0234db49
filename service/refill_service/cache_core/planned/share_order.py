"""In which order are the samples of one share delivered in an epoch, and when is each of its chunks read?

Three things are asked of it (the memory rule, spread, the same everywhere):

- Chunks are read whole, in an order q = 0, 1, ...; chunk q when all chunks up to it, less what memory holds, have been
  delivered. No sample comes before its chunk is read. So memory for M bytes does, and each byte is read once. While the
  last M bytes of an epoch are delivered, the first M of the next one take their place.
- Chunks are read in an order of nested halves: of any run of reads half are of the first half of the share and half of
  the second, and so on within each. So memory looks like the whole share at any time, though it be stored sorted, and
  neighbours are read far apart. Shares that lie beside each other differ in which half comes first, so that this holds
  for neighbours of two shares, and for all shares together, too.
- The samples of a chunk leave at times that are drawn from equal parts of the distribution of stays (``spread.py``),
  all at about the same place of their part, so that they leave far apart. The order is that of those times. The few
  that come before their chunk wait until it is read.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from refill.protocol.keyed_hash import key_of, numbers
from refill.protocol.nested_halves import chunks_in_order
from refill.protocol.spread import Ramp, VirtualClock, ramp_of, stays
from refill_service.cache_core.sample_mapping import Int64Array

_HALF = np.uint64(32)
_LAST = np.uint64(2**64 - 1)
_COMMON = np.uint64(3)
"""Parts of four that samples of a chunk have in common in where they are in their part of the stays."""


class ShareOrder(NamedTuple):
    """The order of one share in one epoch. Samples and chunks are *local*: they count within the share."""

    samples: Int64Array
    """``(n,)`` in the order in which they are delivered."""
    reads: Int64Array
    """``(chunks,)`` in the order in which they are read."""
    read_at: Int64Array
    """``(chunks,)`` in that order, how many bytes of the share have been delivered when each is read. Below 0: so many
    before the epoch's first, while the epoch before ends. Ascending but where a chunk is larger than memory."""


def order_share(
    starts: Int64Array,
    lengths: Int64Array,
    memory_bytes: int,
    key: int,
    *,
    number: int = 0,
    num_shares: int = 1,
    run: int = 1,
    ramped: bool = False,
    read_key: int | None = None,
) -> ShareOrder:
    """The order of one share in one epoch, which follows from the arguments alone.

    A chunk that is larger than memory is read when everything before it has been delivered, and is in memory alone.

    :param starts: ``(chunks + 1,)`` first local sample of each chunk, then their number.
    :param lengths: ``(n,)`` bytes of each sample.
    :param memory_bytes: that the share is planned for.
    :param key: of the epoch, ``key_of``.
    :param number: of the share, ``0 <= number < num_shares``.
    :param run: how many positions of the share follow each other.
    :param ramped: a job's first epoch, which begins with little memory.
    :param read_key: of the order of chunks; None: ``key``.
    """
    num_chunks = len(starts) - 1
    if not num_chunks:
        return ShareOrder(*(np.empty(0, dtype=np.int64) for _ in range(3)))
    ends = np.concatenate([[0], np.cumsum(lengths)])[starts]
    chunk_bytes = np.diff(ends)
    mean_bytes = max(1, int(ends[-1]) // num_chunks)
    reads = chunks_in_order(num_chunks, key if read_key is None else read_key, number, num_shares)
    ramp = ramp_of(min(memory_bytes, int(ends[-1])), mean_bytes, num_shares, run) if ramped else None
    read_at = _read_at(chunk_bytes[reads], memory_bytes, ramp)
    # Chunks are read whole: on average half of one's memory is still empty.
    held_bytes = max(1, memory_bytes - mean_bytes // 2, mean_bytes // 2)
    clock = (
        VirtualClock() if ramp is None else VirtualClock((ramp.start_bytes << 28) // max(1, memory_bytes), ramp.part)
    )
    times = _times(np.maximum(read_at, 0), held_bytes, clock)

    of_chunk = np.empty((2, num_chunks), dtype=np.int64)
    of_chunk[0, reads], of_chunk[1, reads] = times, read_at
    sizes = np.diff(starts)
    time_of, read_at_of = (np.repeat(each, sizes) for each in of_chunk)
    time_of += _stays_in_chunks(sizes, key_of("share", number, key))
    samples = np.argsort(time_of, kind="stable")
    return ShareOrder(_after_their_reads(samples, lengths[samples], read_at_of[samples]), reads, read_at)


def stored_order(starts: Int64Array, lengths: Int64Array, memory_bytes: int) -> ShareOrder:
    """The order in which a share is stored; parameters as of :func:`order_share`."""
    chunk_bytes = np.diff(np.concatenate([[0], np.cumsum(lengths)])[starts])
    samples, reads = (np.arange(count, dtype=np.int64) for count in (len(lengths), len(starts) - 1))
    return ShareOrder(samples, reads, _read_at(chunk_bytes, memory_bytes, None))


def _read_at(chunk_bytes: Int64Array, memory_bytes: int, ramp: Ramp | None) -> Int64Array:
    """See :class:`ShareOrder`."""
    through = np.cumsum(chunk_bytes)
    before = through - chunk_bytes
    read_at: Int64Array = np.minimum(through - memory_bytes, before)
    if ramp is not None:
        grown = -((ramp.start_bytes - through) * ramp.part // (ramp.part + 1))
        read_at = np.maximum(np.maximum(read_at, np.minimum(grown, before)), 0)
    return read_at


def _times(delivered: Int64Array, memory_bytes: int, clock: VirtualClock) -> Int64Array:
    """Virtual times at which so many bytes have been delivered."""
    whole, rest = np.divmod(delivered, memory_bytes)
    shift = max(0, memory_bytes.bit_length() - 34)  # so that what is shifted to the left fits
    return clock.times((whole << 28) + ((rest >> shift) << 28) // max(1, memory_bytes >> shift))


def _stays_in_chunks(sizes: Int64Array, key: int) -> Int64Array:
    """How long each sample stays: those of a chunk, at random, one in each of equal parts of all stays."""
    num_chunks, largest = len(sizes), int(sizes.max())
    numbers_of = numbers(key_of("parts", key), num_chunks * largest).reshape(num_chunks, largest)
    there = None
    if int(sizes.min()) < largest:
        there = np.arange(largest) < sizes[:, None]
        numbers_of[~there] = _LAST  # behind those that there are
    parts = np.argsort(numbers_of, axis=1, kind="stable")
    flat = parts.reshape(-1) if there is None else parts[there]
    common = np.repeat(numbers(key_of("common", key), num_chunks) >> _HALF, sizes)
    own = numbers(key_of("own", key), len(flat)) >> _HALF
    within = (common * _COMMON + own) >> np.uint64(2)
    return stays(((flat.astype(np.uint64) << _HALF) + within) // np.repeat(sizes.astype(np.uint64), sizes))


def _after_their_reads(samples: Int64Array, lengths: Int64Array, read_at: Int64Array) -> Int64Array:
    """The samples, none before its chunk is read: each that would be waits until then, and the others move up.

    :param samples: ``(n,)`` in the order that is wanted; with them their bytes, and the bytes that are to be delivered
        before each.
    """
    delivered = np.cumsum(lengths) - lengths
    late_by = read_at - delivered
    most_waiting = 64 * (1 + int(lengths.mean()))
    while True:
        # Who would be early only if more waited than this need not be looked at.
        near = np.flatnonzero(late_by > -most_waiting).tolist()
        waits = _waits(near, delivered, lengths, read_at, most_waiting)
        if waits is not None:
            break
        most_waiting *= 4
    if not waits:
        return samples
    places = np.arange(len(samples), dtype=np.int64) * 2 + 1
    waiting, until = np.array(waits, dtype=np.int64).T
    stay = np.ones(len(samples), dtype=bool)
    stay[waiting] = False
    kept = np.flatnonzero(stay)
    order = np.argsort(np.concatenate([until * 2, places[kept]]), kind="stable")
    found: Int64Array = samples[np.concatenate([waiting, kept])[order]]
    return found


def _waits(
    near: list[int], delivered: Int64Array, lengths: Int64Array, read_at: Int64Array, most_waiting: int
) -> list[tuple[int, int]] | None:
    """``(place, place before which it comes instead)`` of those that wait, in the order in which they come. None: more
    than ``most_waiting`` bytes waited at once."""
    num_samples, total = len(delivered), int(delivered[-1] + lengths[-1])
    found: list[tuple[int, int]] = []
    waiting: list[tuple[int, int]] = []
    waiting_bytes, reached = 0, 0
    for place in [*near, num_samples]:
        before = int(delivered[place]) if place < num_samples else total
        while waiting and (place == num_samples or waiting[0][0] <= before - waiting_bytes):
            at, first = heapq.heappop(waiting)
            reached = max(reached, int(np.searchsorted(delivered, at + waiting_bytes)))
            found.append((first, min(reached, num_samples)))
            waiting_bytes -= int(lengths[first])
        if place < num_samples and int(read_at[place]) > before - waiting_bytes:
            heapq.heappush(waiting, (int(read_at[place]), place))
            waiting_bytes += int(lengths[place])
            if waiting_bytes > most_waiting:
                return None
    return found
