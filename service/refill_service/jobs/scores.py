"""How do the scores of training come to the owners of its samples, and back to the ranks that draw the next epoch?

A rank asks its home, which reports to each owner the scores of its share, and puts together what all of them know.
Nothing of it is on the path of a batch.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refill.errors import InvalidInput
from refill.protocol.wire_format import Int64Array, check_samples
from refill_service.jobs.job_at_pod import JobAtPod
from refill_service.memory.loop_turns import all_done

_ENTRY_BYTES = 12
_AT_ONCE = 1 << 11
"""Scores that are entered in one piece, some us each."""


def read_scores(body: bytes, num_samples: int) -> tuple[Int64Array, NDArray[np.float32]]:
    """``(ids, scores)``, little-endian int64 and float32, one after the other. Raises :class:`InvalidInput`."""
    if len(body) % _ENTRY_BYTES:
        raise InvalidInput(f"body of {len(body)} bytes is not a list of ids (int64) and their scores (float32)")
    count = len(body) // _ENTRY_BYTES
    ids = np.frombuffer(body, dtype="<i8", count=count).astype(np.int64)
    scores = np.frombuffer(body, dtype="<f4", offset=8 * count).astype(np.float32)
    check_samples(ids, num_samples)
    if len(wrong_scores := scores[~(np.isfinite(scores) & (scores >= 0))]):
        raise InvalidInput(f"a score must be a number of at least 0, got {wrong_scores[0]}")
    return ids, scores


async def report_scores(at_pod: JobAtPod, ids: Int64Array, scores: NDArray[np.float32]) -> dict[str, Any]:
    """Each owner gets those of its share. Returns ``books``, by pod: the name of what it keeps, which another run of
    the pod has not, and of which samples, ``[name, first, end]``."""
    owners = at_pod.job.owner_of(ids)

    async def report_to(pod: int) -> tuple[str, list[Any]]:
        here = owners == pod
        if pod == at_pod.job.ordinal:
            return str(pod), await keep_scores(at_pod, ids[here], scores[here])
        body = ids[here].astype("<i8").tobytes() + scores[here].astype("<f4").tobytes()
        return str(pod), (await at_pod.peers.call(pod, "PUT", "scores", body))["book"]

    return {"scored": len(ids), "books": dict(await all_done(*(report_to(pod) for pod in range(at_pod.job.num_pods))))}


async def keep_scores(at_pod: JobAtPod, ids: Int64Array, scores: NDArray[np.float32]) -> list[Any]:
    """Keep scores of this pod's share. Returns ``[name, first, end]``, as :func:`report_scores`."""
    share = at_pod.job.share
    if not share.holds(ids).all():
        raise InvalidInput(f"pod {at_pod.job.ordinal} was told scores of samples that it does not own")
    book = at_pod.owner.scored(ids[:_AT_ONCE], scores[:_AT_ONCE])
    for start in range(_AT_ONCE, len(ids), _AT_ONCE):
        await asyncio.sleep(0)  # it is others' turn
        book = at_pod.owner.scored(ids[start : start + _AT_ONCE], scores[start : start + _AT_ONCE])
    return [book, share.first_sample, share.end_sample]


async def draw_from(at_pod: JobAtPod, epoch: int, rank: int, first: int, end: int) -> bytes:
    """What the samples ``[first, end)`` of an epoch are drawn from: scores as float32, NaN where none is known, then a
    bit for each that is in memory. Raises as :meth:`Owner.drawn_from`."""
    bounds = at_pod.job.owner_bounds.tolist()
    scores, cached = np.empty(end - first, dtype="<f4"), np.empty(end - first, dtype=bool)

    async def ask(pod: int) -> None:
        start, stop = max(first, bounds[pod]), min(end, bounds[pod + 1])
        if start >= stop:
            return
        count = stop - start
        if pod == at_pod.job.ordinal:
            encoded = await encode_drawn(at_pod, epoch, rank, start, stop)
        else:
            what = f"epochs/{epoch}/ranks/{rank}/scores"
            most_bytes = 5 * count + 1
            encoded = await at_pod.peers.patiently(
                pod, partial(at_pod.peers.bytes_of, pod, what, most_bytes, start=start, end=stop)
            )
        scores[start - first : stop - first] = np.frombuffer(encoded, dtype="<f4", count=count)
        bits = np.unpackbits(np.frombuffer(encoded, dtype=np.uint8, offset=4 * count), count=count)
        cached[start - first : stop - first] = bits

    # All at once: each waits until all ranks have asked it.
    await all_done(*(ask(pod) for pod in range(at_pod.job.num_pods)))
    return scores.tobytes() + np.packbits(cached).tobytes()


async def encode_drawn(at_pod: JobAtPod, epoch: int, rank: int, first: int, end: int) -> bytes:
    """As :func:`draw_from`, of samples of this pod's share."""
    share = at_pod.job.share
    if not share.first_sample <= first < end <= share.end_sample:
        raise InvalidInput(f"pod {at_pod.job.ordinal} was asked for scores of samples that it does not own")
    drawn_from = await at_pod.owner.drawn_from(epoch, rank)
    here = slice(first - share.first_sample, end - share.first_sample)
    return drawn_from.scores[here].astype("<f4").tobytes() + np.packbits(drawn_from.cached[here]).tobytes()
