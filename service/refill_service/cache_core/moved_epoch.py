"""What does each position of an epoch ask for when other pods go on with it?

Owners change with the number of pods, and each of them must be asked for as many samples as it has left. So a position
that was answered asks for the sample that it got, and what is left of the samples is dealt to what is left of the
positions. Where positions name classes, what is left of each class goes to the positions of that class: a sample that
was received came for a position of its class, so their numbers come out.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from refill.protocol.classes import entries_of
from refill_service.cache_core.epoch_order import KeyedPermutation, Traces
from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["moved_traces"]


def moved_traces(
    before: Traces, world_size: int, num_samples: int, received: Mapping[int, tuple[Int64Array, Int64Array]], key: str
) -> dict[int, Int64Array]:
    """The trace of each rank, for :class:`ExplicitTraces`: as long as it was, and asking for the same samples together.

    :param before: the traces of the epoch as it was asked for so far.
    :param received: by rank, ``(positions, samples)`` of what it has received, each position once.
    :param key: names the order in which the samples that are left are dealt.

    Entries name classes if those of ``before`` do.

    Raises :class:`ValueError` when a sample was received more often than the epoch asks for it.
    """
    members = before.members(0, num_samples)
    left = np.ones(num_samples, dtype=bool) if members is None else members.copy()
    """Samples that requests may get, each once."""
    again = np.zeros(num_samples, dtype=np.int64)
    """How often each is asked for beside that: by repeats."""
    num_requests = 0
    repeats: dict[int, NDArray[np.bool_]] = {}
    traces: dict[int, Int64Array] = {}
    asked_before: dict[int, Int64Array] = {}
    for rank in range(world_size):
        asked, repeats[rank] = before.asked(rank, np.arange(before.length(rank), dtype=np.int64))
        traces[rank], asked_before[rank] = asked.copy(), asked
        np.add.at(again, asked[repeats[rank]], 1)
        num_requests += int(np.count_nonzero(~repeats[rank]))
    came = np.zeros(num_samples, dtype=np.int64)
    for _, samples in received.values():
        np.add.at(came, samples, 1)
    if (came > left + again).any():
        sample = int(np.flatnonzero(came > left + again)[0])
        raise ValueError(f"sample {sample} was received {came[sample]} times, more often than the epoch has it")
    # Which of several positions got it as a request may differ from what is asked now: the job may have moved before.
    num_requests -= int(np.count_nonzero(came))
    again -= np.maximum(came - 1, 0)
    left &= came == 0
    vacant: list[tuple[int, Int64Array]] = []
    for rank in range(world_size):
        is_open = np.ones(len(traces[rank]), dtype=bool)
        if rank in received:
            positions, samples = received[rank]
            traces[rank][positions] = samples
            is_open[positions] = False
        requests, asked_again = np.flatnonzero(is_open & ~repeats[rank]), np.flatnonzero(is_open & repeats[rank])
        keep = left[traces[rank][requests]]
        left[traces[rank][requests[keep]]] = False
        num_requests -= int(np.count_nonzero(keep))
        keep_again = _first(traces[rank][asked_again], again)
        np.subtract.at(again, traces[rank][asked_again[keep_again]], 1)
        vacant.append((rank, np.concatenate([requests[~keep], asked_again[~keep_again]])))
    once = np.flatnonzero(left)
    if len(once):
        once = once[KeyedPermutation(len(once), key).forward(np.arange(len(once), dtype=np.int64))]
    to_deal = np.concatenate([once[:num_requests], np.repeat(np.arange(num_samples), again)])
    classes = before.classes(0, num_samples)
    if classes is not None:
        to_deal = _within_classes(classes, to_deal, [asked_before[rank][places] for rank, places in vacant])
    for rank, places in vacant:
        traces[rank][places], to_deal = to_deal[: len(places)], to_deal[len(places) :]
    if classes is not None:
        return {rank: entries_of(samples, classes[samples]) for rank, samples in traces.items()}
    return traces


def _within_classes(classes: Int64Array, to_deal: Int64Array, asked: list[Int64Array]) -> Int64Array:
    """The same samples in an order in which each comes to a position of its class; all positions ask for ``asked``.

    Raises :class:`ValueError` when a sample was received for a position of another class.
    """
    wanted = classes[np.concatenate([*asked, to_deal[:0]])]
    by_class, places = np.argsort(classes[to_deal], kind="stable"), np.argsort(wanted, kind="stable")
    found = np.empty_like(to_deal)
    found[places] = to_deal[by_class]
    if (classes[found] != wanted).any():
        raise ValueError("a sample was received for a position of another class")
    return found


def _first(samples: Int64Array, counts: Int64Array) -> NDArray[np.bool_]:
    """Of equal ones among ``samples``, as many as ``counts`` has of each: the first."""
    order = np.argsort(samples, kind="stable")
    ordered = samples[order]
    nth = np.arange(len(samples)) - np.searchsorted(ordered, ordered)
    found = np.zeros(len(samples), dtype=bool)
    found[order] = nth < counts[ordered]
    return found
