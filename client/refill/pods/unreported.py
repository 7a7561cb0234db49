"""What has a process of a rank to report to its pods, and when? Positions that came, and what its loop was given.

It is due when nothing has come for a moment, every three seconds, and when an epoch is over. What was not taken is
reported with what comes next, or three seconds later. Nothing is sent here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from refill.pods.loop_digest import LoopDigests, ReceivedHashes
from refill.protocol.dealing import Dealing
from refill.protocol.position_set import PositionSet
from refill.protocol.receipt_digest import DigestPart

REPORT_SECONDS = 3.0
QUIET_SECONDS = 0.25
_MOST_EPOCHS = 300
"""As many as a pod keeps."""
_KEPT_EPOCHS = 2
MOST_SPANS, MOST_SPANS_OF_DIGEST = 1 << 12, 10_000
"""In one report: it is read by a pod in one piece, in which that answers nobody. A digest can't be divided: one with
more is not reported, and receipts say at how many positions loops are known."""


Span = TypeVar("Span")


class Taken(NamedTuple):
    """What is reported now.

    :param received: by epoch and where it was dealt from, the spans that came.
    :param digests: by epoch, what loops have had.
    :param left: the same of the epoch that they had left before.
    """

    received: list[tuple[int, int, list[tuple[int, int]]]]
    digests: dict[int, list[DigestPart]]
    left: list[tuple[int, DigestPart]]


def in_reports(spans: Sequence[Span]) -> list[Sequence[Span]]:
    """Parts of them, each for a report of its own; one, at least."""
    return [spans[first : first + MOST_SPANS] for first in range(0, max(1, len(spans)), MOST_SPANS)]


def digests_in_reports(parts: Sequence[DigestPart]) -> Iterator[list[DigestPart]]:
    """The same of digests."""
    report, num_spans = list[DigestPart](), 0
    for part in parts:
        if len(part.spans) > MOST_SPANS_OF_DIGEST:
            continue
        if report and num_spans + len(part.spans) > MOST_SPANS:
            yield report
            report, num_spans = [], 0
        report.append(part)
        num_spans += max(5, len(part.spans))  # pods take a thousand parts at most
    if report:
        yield report


class Unreported:
    """Keeps what this process has received and not yet reported to its home pod. Threads may call it at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._received: dict[tuple[int, int], PositionSet] = {}
        """By epoch and where it was dealt from, what came of the last two, and of those before that was not reported;
        with what lies in the checkpoint that the loop goes on from."""
        self._began: dict[tuple[int, int], float] = {}
        """When the first of each came."""
        self._digests = LoopDigests()
        self._since = 0.0
        """When the first of it came; 0: all is reported."""
        self._last_came = 0.0
        self._is_over = False
        """Whether the rank has come to another epoch since it reported."""
        self._not_taken = False
        """Whether nothing has come since pods did not take it. They are not asked again at once: the job may have been
        ended, and this process lives on."""

    def __bool__(self) -> bool:
        return bool(self._since)

    # Facts.

    def came(self, epoch: int, start: int, *spans: tuple[int, int]) -> None:
        """Fact: of an epoch that is dealt from ``start`` samples came for positions ``[first, end)``, or lie in a
        checkpoint."""
        with self._lock:
            known = self._received.setdefault((epoch, start), PositionSet())
            self._began.setdefault((epoch, start), time.monotonic())
            for first, end in spans:
                known.add(first, end)
            while len(self._received) > _MOST_EPOCHS:
                oldest = next(iter(self._received))
                del self._received[oldest], self._began[oldest]
            self._came_now()

    def loop_has(self, epoch: int, dealing: Dealing, rank: int, first: int, end: int, hashes: ReceivedHashes) -> None:
        """Fact: the loop was given what came for the places ``[first, end)``."""
        with self._lock:
            self._digests.has(epoch, dealing, rank, first, end, hashes)
            self._came_now()

    def goes_on_from(
        self,
        epoch: int,
        parts: Sequence[DigestPart],
        dealing: Dealing,
        rank: int,
        last: int,
        parts_of_last: Sequence[DigestPart],
    ) -> None:
        """Fact: the loop goes on from a state, in which these lie of its epoch, and of the one that it had left."""
        with self._lock:
            self._digests.goes_on_from(epoch, parts, dealing, rank)
            self._digests.left(last, parts_of_last)
            if parts or parts_of_last:
                self._since = self._since or time.monotonic()

    def epoch_is_over(self) -> None:
        """Fact: the rank asks for another one."""
        self._is_over = True

    def may_be_lost(self) -> None:
        """Fact: the pods may have forgotten what they were told."""
        with self._lock:
            if self._received or self._digests:
                self._since = self._since or time.monotonic()

    def _came_now(self) -> None:
        self._last_came = time.monotonic()
        self._since = self._since or self._last_came
        self._not_taken = False

    # What follows from them.

    def is_due(self, report_seconds: float = REPORT_SECONDS, quiet_seconds: float = QUIET_SECONDS) -> bool:
        with self._lock:
            now = time.monotonic()
            is_quiet = now - self._last_came > quiet_seconds and not self._not_taken
            return bool(self._since) and (now - self._since > report_seconds or is_quiet or self._is_over)

    def age_seconds(self, epoch: int, start: int) -> float:
        """For how long this process has gone by this way to deal an epoch. By that pods know which of several stands:
        a report of one that is over may come last."""
        with self._lock:
            began = self._began.get((epoch, start))
            return 0.0 if began is None else time.monotonic() - began

    def digest_parts(self, epoch: int) -> list[DigestPart]:
        """What the loop has had of an epoch, and others before the state that it goes on from."""
        with self._lock:
            return self._digests.parts(epoch)

    def taken(self) -> Taken:
        """All of it, which is about to be reported."""
        with self._lock:
            self._since, self._is_over = 0.0, False
            return Taken(
                [(epoch, start, list(spans)) for (epoch, start), spans in self._received.items()],
                {epoch: self._digests.parts(epoch) for epoch in self._digests.epochs},
                self._digests.of_left,
            )

    def keep_last(self, most_spans: int) -> None:
        """Of each epoch, at most so many spans, which are reported again with what comes next."""
        with self._lock:
            for known in self._received.values():
                known.keep_last(most_spans)

    def was_not_taken(self) -> None:
        """Fact: the report did not come to a pod."""
        with self._lock:
            self._not_taken = not self._since
            self._since = self._since or time.monotonic()

    def was_reported(self, taken: Taken) -> None:
        """Fact: pods know it. Epochs that were over before are forgotten, where nothing came since."""
        with self._lock:
            self._not_taken = False
            for epoch, start, spans in taken.received[:-_KEPT_EPOCHS]:
                known = self._received.get((epoch, start))  # another report may have ended first
                if known is not None and list(known) == spans:
                    del self._received[epoch, start], self._began[epoch, start]
