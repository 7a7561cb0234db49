"""Does a wrapper keep the samples that it takes, or one of every n, because it divides them a second time?

refill deals samples to ranks and loader workers itself. A generator around the iterable form that splits by worker or
by node, as those around a whole stream of data must, loses the others: pods have handed them out, so no receipt lacks
them. What the loader has got of them is seen in its fetcher, which is among the callers. A wrapper that chooses by what
is in a sample keeps now more of them, now fewer; one that divides keeps one of each n, always.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection
from types import FrameType
from typing import Any, NamedTuple

from refill.loops.callers import callers

_ROUNDS = 12
"""Who keeps every second sample by chance does so for so many in a row once in ten million times."""


class Divided(NamedTuple):
    """One of every ``of`` samples was kept, so often in a row that it is no chance."""

    of: int
    as_they_are: bool
    """Whether what was kept is a sample as it was given, so that it can't be made of all ``of``."""


class KeptSamples:
    """What becomes of the first samples of one iteration.

    :param dividers: among how many somebody may divide them who does not know that it was done.
    """

    def __init__(self, dividers: Collection[int]) -> None:
        self._dividers = {each for each in dividers if each > 1}
        self.is_over = not self._dividers
        """Whether nothing more is to be found out."""
        self._given: list[Any] = []
        """Since the loader got one last."""
        self._fetch: FrameType | None = None
        self._batch: list[Any] = []
        self._size = self._seen = 0
        """How many samples the loader puts into the batch that it fills, and how many were in it before."""
        self._next_number: int | None = None
        """Of the batch after the one that the loader fills."""
        self._rounds = -1
        """The first one may begin anywhere."""
        self._digests: list[int | None] = []
        """Of the samples of the last round, when they were given."""
        self._of = 0
        self._as_they_are = True

    def gives(self, sample: Any) -> None:
        """Fact: the wrapper is given this sample."""
        if self.is_over:
            return
        self._given.append(sample)
        if self._rounds == _ROUNDS - 1 and self._as_they_are:
            self._digests.append(_digest_of(sample))

    def look(self) -> Divided | None:
        """Fact: the wrapper wants one more. Returns what is certain by now, once."""
        if self.is_over:
            return None
        before, place = self._batch, self._seen
        kept = self._kept_since()
        if kept == 0 and len(self._given) <= max(self._dividers):
            return None
        if kept == 0 and self._rounds < 0:
            self.is_over = True
            self._given.clear()
            return None
        if kept != 1 or not self._is_regular():
            self._end()
            return None
        if self._rounds >= 0:
            self._as_they_are &= place < len(before) and self._was_given(before[place])
        self._rounds += 1
        self._given.clear()
        if self._rounds < _ROUNDS:
            return None
        self._end()
        return Divided(self._of, self._as_they_are)

    def none_kept(self) -> list[Any] | None:
        """Fact: the wrapper is about to be told that there are no more. If the loader has got none of them, the batch
        that it fills: still empty when it is done, unless the wrapper has collected them. Else None."""
        had_none = self._rounds < 0 and self._fetch is not None
        return self._batch if had_none and self._kept_since() == 0 and self._size > 1 else None

    def _was_given(self, sample: Any) -> bool:
        """Whether it is one of these, and in the last round: whether it is as it was, not made of several in place."""
        at = next((place for place, each in enumerate(self._given) if each is sample), None)
        if at is None or not self._digests:
            return at is not None
        return self._digests[at] is not None and self._digests[at] == _digest_of(sample)

    def _is_regular(self) -> bool:
        """Whether the loader got one of as many samples as the times before."""
        if self._rounds < 0:
            return True
        self._of = self._of or len(self._given)
        return self._of == len(self._given) and self._of in self._dividers

    def _kept_since(self) -> int:
        """How many samples the loader got since this was asked last; -1: that can't be seen."""
        fetch = _fetch()
        if fetch is None:
            return -1
        known = fetch.f_locals
        batch, wanted = known.get("data"), known.get("possibly_batched_index")
        is_batch = isinstance(batch, list) and isinstance(wanted, list)
        seen = len(batch) if is_batch else 0  # type: ignore[arg-type]  # it is a list
        if fetch is self._fetch:
            kept = seen - self._seen
        else:
            kept = (0 if self._fetch is None else self._size - self._seen) + seen
            number, next_number = _numbers(fetch)
            if self._fetch is not None and self._size == 1 and (number is None or number != self._next_number):
                kept = -1  # batches of one may have been made between, of what was collected
            self._fetch, self._next_number = fetch, next_number
        self._batch, self._size = (batch, len(wanted)) if is_batch else ([], 1)  # type: ignore[assignment, arg-type]
        self._seen = seen
        return kept

    def _end(self) -> None:
        self.is_over = True
        self._given, self._batch, self._fetch = [], [], None


def _fetch() -> FrameType | None:
    """Where a loader makes a batch of what it iterates."""
    for frame in callers(past=3):
        if frame.f_code.co_name == "fetch" and _is_fetcher(frame.f_locals.get("self")):
            return frame
    return None


def _numbers(fetch: FrameType) -> tuple[int | None, int | None]:
    """Of the batch that is made, as the loader counts, and of the next one that this process will make."""
    known = {} if fetch.f_back is None else fetch.f_back.f_locals
    if "num_workers" in known:
        number, step = known.get("idx"), known["num_workers"]
    else:
        number, step = getattr(known.get("self"), "_num_yielded", None), 1
    return (number, number + step) if isinstance(number, int) else (None, None)


def _digest_of(sample: Any) -> int | None:
    """None where it can't be told."""
    try:
        return hash(pickle.dumps(sample))
    except Exception:  # whatever may be in samples
        return None


def _is_fetcher(known: object) -> bool:
    return any(each.__name__ == "_BaseDatasetFetcher" for each in type(known).__mro__)
