"""Does anybody ask for a job at this pod? Decides when others may have its memory.

A training process says goodbye when it ends. One that was killed is known by its connections, which its machine closes.
One that is merely silent keeps its job's memory for a minute. Pods that are nobody's home learn from the homes of ranks
that these are gone: by a word of theirs, or by asking, where a job that comes needs the memory. Whoever asks again
finds the job as it was: only bytes were given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from refill.protocol.position_set import spans_of
from refill.protocol.rank_life import RankLife
from refill_service.jobs.leased_ranks import LeasedRanks
from refill_service.peers.peers import Peers

SLEEPS_AFTER_SECONDS = 60.0
"""Training processes that live are heard every few seconds. By its home, that is, and this pod may be none."""
GONE_SECONDS = 2.0
"""A process without a connection that was not heard for so long has ended: loader workers that take the place of others
come within that time."""
QUIET_SECONDS = 0.5
"""A home that has asked for nothing for so long may have no ranks any more; most have asked again by then."""
_TELL_SECONDS = 0.5
"""A process that ends waits for this."""


class JobUse:
    """Tells whether anybody still asks one job of a pod for something.

    :param leases: of the ranks whose home this pod is.
    """

    def __init__(self, leases: LeasedRanks) -> None:
        self.last_used = time.monotonic()
        self.requests_under_way = 0
        self._leases = leases
        self._homes: set[int] = set()
        """Other pods that have asked for samples since they last said that their ranks are gone."""
        self._goodbye_at: float | None = None
        """When a process said goodbye last."""
        self._is_left = False

    # Facts.

    def asked(self, pod: int | None = None) -> None:
        """Fact: somebody asks for the job.

        :param pod: another pod, for ranks whose home that is.
        """
        self.last_used = time.monotonic()
        self._is_left = False
        if pod is not None:
            self._homes.add(pod)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """For the time of a request, which may wait for longer than a job may be idle."""
        self.requests_under_way += 1
        try:
            yield
        finally:
            self.requests_under_way -= 1
            self.last_used = time.monotonic()

    def said_goodbye(self, rank: int, life: RankLife) -> None:
        """Fact: a training process that may have been a rank ends."""
        self._leases.returned(rank, life)
        self._goodbye_at = time.monotonic()

    def pod_said_goodbye(self, pod: int) -> None:
        """Fact: no rank of another pod asks for the job any more."""
        self._homes.discard(pod)
        self._goodbye_at = time.monotonic()

    def is_found_left(self) -> bool:
        """Whether it is known now, and was not at the last look, that nobody asks for the job here any more."""
        if self._is_left or self.requests_under_way or self._homes:
            return False
        silent_seconds = self._leases.silent_seconds()
        if self._goodbye_at is None and silent_seconds == math.inf:
            return False  # nobody has come so far
        # What a process has asked may be answered after its goodbye.
        was_asked = self._goodbye_at is not None and self.last_used > self._goodbye_at
        self._is_left = silent_seconds > GONE_SECONDS and (not was_asked or self.idle_seconds > GONE_SECONDS)
        return self._is_left

    # What follows from them.

    def has_come(self, rank: int) -> bool:
        """Whether a rank whose home this pod is has asked for samples, in a process that has not said goodbye."""
        return self._leases.holder(rank) is not None

    def is_there(self, rank: int) -> bool:
        """Whether its process lives, as far as is known."""
        return not self._is_left and self._leases.is_alive(rank)

    @property
    def idle_seconds(self) -> float:
        """Since the last request for the job here; requests that only look at it don't count."""
        return 0.0 if self.requests_under_way else time.monotonic() - self.last_used

    @property
    def is_left(self) -> bool:
        """Whether all processes that asked for it are known to be gone."""
        return self._is_left

    @property
    def sleeps(self) -> bool:
        """Whether others may have its memory: all are gone, or nobody has asked for anything for long."""
        return self._is_left or self.idle_seconds > SLEEPS_AFTER_SECONDS

    @property
    def may_be_left(self) -> bool:
        """Whether the processes that asked have no connection any more, and may be known to be gone in a moment."""
        if self.requests_under_way or self._is_left:
            return False
        silent_seconds = self._leases.silent_seconds()
        if self._homes:
            return silent_seconds > 0 and self.idle_seconds > QUIET_SECONDS
        return silent_seconds > 0 and (silent_seconds < math.inf or self._goodbye_at is not None)

    def to_dict(self) -> dict[str, Any]:
        """How many ranks that asked here are alive, and which (spans ``[first, end)``), and for how long nobody has
        asked."""
        alive = [] if self._is_left else self._leases.alive()
        spans = spans_of(np.array(alive, dtype=np.int64))
        return {"ranks_alive": len(alive), "alive": spans, "idle_seconds": round(self.idle_seconds, 1)}

    @property
    def silent_homes(self) -> frozenset[int]:
        """Other pods that may have died before they said goodbye: nobody else has asked for long, nor have they."""
        if self.requests_under_way or self._is_left or self.idle_seconds <= GONE_SECONDS:
            return frozenset()
        return frozenset(self._homes) if self._leases.silent_seconds() > GONE_SECONDS else frozenset()

    @property
    def has_ranks(self) -> bool:
        """Whether processes live, as far as is known, whose home this pod is."""
        return bool(self.requests_under_way) or self._leases.silent_seconds() <= GONE_SECONDS


class Goodbyes:
    """Of one pod, for both kinds of jobs: what it tells others of jobs that nobody asks it for any more.

    Nothing hangs on it but whose memory is taken first: a pod that is told too early, or not at all, answers all the
    same.
    """

    def __init__(self, ordinal: int, peers: Peers) -> None:
        self._ordinal, self._peers = ordinal, peers
        self._telling: dict[str, asyncio.Task[None]] = {}

    def tell(self, name: str) -> None:
        """Fact: nobody asks for a job here any more."""
        if name not in self._telling:
            task = self._telling[name] = asyncio.create_task(self._tell(name))
            task.add_done_callback(lambda _: self._telling.pop(name, None))

    async def told(self, name: str) -> None:
        """When other pods know it, as far as they answer at once."""
        if (telling := self._telling.get(name)) is not None:
            await asyncio.shield(telling)

    async def close(self) -> None:
        for task in self._telling.values():
            task.cancel()
        await asyncio.gather(*self._telling.values(), return_exceptions=True)

    async def _tell(self, name: str) -> None:
        path = f"/peer/v1/jobs/{name}/goodbye?pod={self._ordinal}"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TELL_SECONDS):
                others = (pod for pod in range(len(self._peers.urls)) if pod != self._ordinal)
                calls = (self._peers.call(pod, "POST", path) for pod in others)
                await asyncio.gather(*calls, return_exceptions=True)
