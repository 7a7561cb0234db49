"""When may a request have its samples? When there is room for its answer among those that are being sent.

Room is entered before anything is taken, for about as much as the answer will be, so that nobody holds samples while it
waits; and left when the answer was sent, or nobody reads it any more.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from starlette.requests import Request

from refill.errors import PodBusy
from refill.protocol.job_spec import JobSpec
from refill_service.cache_core.shared_room import Asker
from refill_service.memory.byte_gate import ByteGate, Passage
from refill_service.serving.request_guard import resources_of

__all__ = ["AnswerRoom", "entered_now", "overhead_bytes"]


_OVERHEAD_BYTES_PER_SAMPLE = 512
"""What Python needs for each sample meanwhile; and its place in the queue, as it costs time, however small it is."""


class Answering(Protocol):
    """A job at a pod, as far as answers need it."""

    ordinal: int
    spec: JobSpec

    def mean_bytes(self, num_samples: int) -> int: ...


class AnswerRoom:
    """Holds the place of one request's answer, in a gate that bounds the bytes of answers."""

    def __init__(self, request: Request, gate: ByteGate, job: Answering, wait_seconds: float) -> None:
        self._request = request
        self._gate = gate
        self._job = job
        self._wait_seconds = wait_seconds
        self._passage: Passage | None = None
        self._overhead_bytes = 0

    async def enter(self, num_samples: int, samples_bytes: int | None = None) -> None:
        """Raises :class:`PodBusy` when no room came free in time.

        :param samples_bytes: of all of them; None: not known.
        """
        job = self._job
        self._overhead_bytes = overhead_bytes(num_samples)
        size_bytes = job.mean_bytes(num_samples) if samples_bytes is None else samples_bytes
        size_bytes += self._overhead_bytes
        asker = _asker(job)
        if (found := self._gate.enter_now(size_bytes, asker)) is not None:
            self._passage = found
            resources_of(self._request).callback(found.leave)
            return
        passage = self._gate.passage(size_bytes, asker)
        try:
            async with asyncio.timeout(self._wait_seconds):
                self._passage = await resources_of(self._request).enter_async_context(passage)
        except TimeoutError as error:
            raise PodBusy(
                f"pod {job.ordinal} has {self._gate.inside_bytes:,} bytes of answers that are still being sent, as "
                "many as it may (sending_bytes): do its clients read them?",
                pod=job.ordinal,
            ) from error

    def holds(self, size_bytes: int) -> None:
        """Fact: the answer is as large as this."""
        if self._passage is not None:
            self._passage.resize(size_bytes + self._overhead_bytes)


def entered_now(gate: ByteGate, job: Answering, num_samples: int, samples_bytes: int) -> Passage | None:
    """As :meth:`AnswerRoom.enter`; who asks leaves. None: there is no room in this moment."""
    return gate.enter_now(samples_bytes + overhead_bytes(num_samples), _asker(job))


def overhead_bytes(num_samples: int) -> int:
    return _OVERHEAD_BYTES_PER_SAMPLE * num_samples


def _asker(job: Answering) -> Asker:
    return Asker(job.spec.holder, job.spec.name)
