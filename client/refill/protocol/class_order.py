"""In which order do positions ask for classes, and which samples stand for them? Plain arrays, the same on each rank.

An *order* is ``(n,)``, the class of each position of all ranks, batch after batch; batches are dealt to the ranks in
turn. A *step* is one batch of each rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from refill.errors import InvalidInput
from refill.protocol.wire_format import Int64Array

_COPIES_APART = 64
"""A sample comes again after this part of all turns: not in the same batch, and while memory has it."""


def bucket_boundaries(lengths: Int64Array, num_buckets: int) -> Int64Array:
    """Lengths at which buckets begin, but for the first: each bucket has about the same sum of lengths, as lhotse's
    (``estimate_duration_buckets``) have the same duration."""
    in_order = np.sort(lengths)
    sums = np.cumsum(in_order)
    places = np.searchsorted(sums, sums[-1] * np.arange(1, num_buckets) / num_buckets, side="right")
    return np.unique(in_order[np.minimum(places, len(in_order) - 1)])


def bucket_order(classes: Int64Array, step_size: int, random: np.random.Generator) -> Int64Array:
    """Steps of one class each, and what is left of each class in steps of neighbouring classes.

    The steps of a class are spread over the epoch, each at random within its own part: memory then has what comes.

    :param classes: ``(samples,)`` 0 and up.
    """
    counts = np.bincount(classes)
    whole = counts // step_size
    nth = np.arange(whole.sum()) - np.repeat(np.cumsum(whole) - whole, whole)
    of_class = np.repeat(np.arange(len(counts)), whole)
    times = (nth + random.random(len(nth))) / whole[of_class]
    rest = np.repeat(np.arange(len(counts)), counts - whole * step_size)
    # What fills no step comes last: of neighbouring classes, others in each epoch.
    num_last = len(rest) % step_size
    first = step_size * int(random.integers(len(rest) // step_size + 1))
    last, rest = rest[first : first + num_last], np.delete(rest, np.s_[first : first + num_last])
    mixed = rest.reshape(-1, step_size)
    times = np.concatenate([times, random.random(len(mixed))])
    steps = np.concatenate([np.repeat(of_class, step_size).reshape(-1, step_size), mixed])
    return np.concatenate([steps[np.argsort(times, kind="stable")].ravel(), last])


def balanced_order(counts: Int64Array, random: np.random.Generator) -> Int64Array:
    """So many positions of each class, each class as evenly over the epoch as whole numbers allow."""
    of_class = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(len(of_class)) - np.repeat(np.cumsum(counts) - counts, counts)
    times = (nth + random.random(len(counts))[of_class]) / counts[of_class]
    return of_class[np.argsort(times, kind="stable")]


def stage_boundaries(values: NDArray[Any], num_stages: int) -> NDArray[Any]:
    """Values at which stages begin, but for the first: as many samples in each, as far as equal values let it be."""
    in_order = np.sort(values)
    places = len(in_order) * np.arange(1, num_stages) // num_stages
    begins = in_order[places]
    return np.unique(begins[begins > in_order[0]])


def stage_order(classes: Int64Array, mixed: float, random: np.random.Generator) -> Int64Array:
    """One class after another, but at a part of the positions, which are drawn, any classes in any order.

    :param classes: ``(samples,)`` 0 and up.
    :param mixed: that part: 0: stages follow each other. 1: an order that is drawn.
    """
    order = np.sort(classes)
    drawn = np.flatnonzero(random.random(len(order)) < mixed)
    order[drawn] = order[random.permutation(drawn)]
    return order


def in_turns(samples: Int64Array, turns: Int64Array) -> Int64Array:
    """The same samples ``(n,)`` in the order in which they stand in ``turns``; one that is there several times comes
    again a little later each time.

    :param turns: ``(samples of the dataset,)`` all of them, in some order.
    """
    place = np.empty_like(turns)
    place[turns] = np.arange(len(turns), dtype=np.int64)
    by_sample = np.argsort(samples, kind="stable")
    in_order = samples[by_sample]
    copy = np.arange(len(samples)) - np.searchsorted(in_order, in_order)
    at = (place[in_order] + copy * (1 + len(turns) // _COPIES_APART)) % max(1, len(turns))
    found: Int64Array = in_order[np.argsort(at, kind="stable")]
    return found


def samples_for(order: Int64Array, classes: Int64Array, turns: Int64Array, random: np.random.Generator) -> Int64Array:
    """A sample of its class for each position: those of a class in their turn, so that what lies beside each other in
    ``turns`` is asked for at about the same time, also where classes are asked for more or less often than there are
    samples. All are different as far as there are so many; then they come again from the start. Where there are more,
    which of them don't come is drawn.

    :param turns: ``(samples,)`` all samples, in some order.

    Raises :class:`InvalidInput` for a class that no sample has.
    """
    num_classes = max(int(order.max(initial=-1)), int(classes.max(initial=-1))) + 1
    available, wanted = np.bincount(classes, minlength=num_classes), np.bincount(order, minlength=num_classes)
    if len(lacking := np.flatnonzero((wanted > 0) & (available == 0))):
        raise InvalidInput(f"positions ask for class {lacking[0]}, which no sample has")
    by_class = turns[np.argsort(classes[turns], kind="stable")]
    nth = np.arange(len(order)) - np.repeat(np.cumsum(wanted) - wanted, wanted)
    in_order = np.repeat(np.arange(num_classes), wanted)
    there, asked = np.maximum(available, 1), np.maximum(wanted, 1)
    drawn = random.integers(0, there)
    in_turn = np.where(
        (wanted <= available)[in_order],
        (nth * there[in_order] + drawn[in_order]) // asked[in_order],
        nth % there[in_order],
    )
    found = np.empty(len(order), dtype=np.int64)
    first = np.cumsum(available) - available
    found[np.argsort(order, kind="stable")] = by_class[first[in_order] + in_turn]
    return found


def rank_part(everything: Int64Array, rank: int, world_size: int, batch_size: int, *, drop_last: bool) -> Int64Array:
    """What a rank has of all positions: batches are dealt in turn, and what is left at the end is divided evenly. What
    does not divide is dropped, or filled up with what comes again."""
    step_size = world_size * batch_size
    end = len(everything) // step_size * step_size
    batches, rest = everything[:end].reshape(-1, world_size, batch_size), everything[end:]
    each = positions_of_rank(len(rest), world_size, drop_last=drop_last)
    last = np.resize(rest, (world_size, each)) if len(rest) else rest.reshape(world_size, 0)
    return np.concatenate([batches[:, rank].ravel(), last[rank]])


def positions_in_turn(num_positions: int, world_size: int, batch_size: int, *, drop_last: bool) -> Int64Array:
    """All positions, each once, as ranks in step ask for them: the first of each rank, then the second of each, and so
    on; at the end those that nobody asks for."""
    everything = np.arange(num_positions, dtype=np.int64)
    parts = [rank_part(everything, rank, world_size, batch_size, drop_last=drop_last) for rank in range(world_size)]
    asked = np.stack(parts, axis=1).ravel()
    firsts = np.sort(np.unique(asked, return_index=True)[1])
    return np.concatenate([asked[firsts], np.setdiff1d(everything, asked)])


def positions_of_rank(num_positions: int, world_size: int, *, drop_last: bool) -> int:
    return num_positions // world_size if drop_last else -(-num_positions // world_size)
