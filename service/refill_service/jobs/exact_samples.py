"""How are exactly these samples got, from whoever owns them, outside of any epoch's protocol?

Repeats of a batch, and random access. A sample that is asked for often is read and held once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from refill.protocol.wire_format import MAX_SAMPLES, Int64Array
from refill_service.jobs.all_done import all_done
from refill_service.jobs.answer_size import AnswerSize
from refill_service.jobs.job import Job
from refill_service.jobs.owner import Owner
from refill_service.memory.payload import Payload
from refill_service.peers.job_peers import JobPeers

__all__ = ["ExactSamples"]


class ExactSamples:
    """Of one job, as one pod gets them."""

    def __init__(self, job: Job, owner: Owner, peers: JobPeers) -> None:
        self._job = job
        self._owner = owner
        self._peers = peers

    async def read(self, sample_ids: Int64Array, *, says_damage: bool = False, repeats: bool = False) -> list[Payload]:
        """Raises :class:`RequestTooLarge` when they are more bytes than an answer may have.

        :param says_damage: whether :class:`Damage` stands for a sample that is damaged; else it is raised.
        :param repeats: whether positions of an epoch that repeat them ask for them.
        """
        ids, place_of = np.unique(sample_ids, return_inverse=True)
        owners = self._job.owner_of(ids)
        found: list[Payload] = [b""] * len(ids)
        size = AnswerSize(self._owner.answer_bytes)

        async def ask(pod: int, places: Int64Array) -> None:
            for start in range(0, len(places), MAX_SAMPLES):
                part = places[start : start + MAX_SAMPLES]
                if pod == self._job.ordinal:
                    data: Sequence[Payload] = await self._owner.exact(
                        ids[part], size, says_damage=says_damage, repeats=repeats
                    )
                else:
                    read = partial(self._read_at, pod, ids[part], size, says_damage, repeats)
                    data = await self._peers.patiently(pod, read)
                for place, payload in zip(part.tolist(), data, strict=True):
                    found[place] = payload

        await all_done(*(ask(pod, np.flatnonzero(owners == pod)) for pod in np.unique(owners).tolist()))
        if len(ids) < len(sample_ids):
            lengths = np.fromiter(map(len, found), dtype=np.int64, count=len(found))
            size.check(int(lengths[place_of].sum()))
        return [found[place] for place in place_of.tolist()]

    async def _read_at(
        self, pod: int, sample_ids: Int64Array, size: AnswerSize, says_damage: bool, repeats: bool
    ) -> Sequence[Payload]:
        part = size.part()
        try:
            ids = sample_ids.astype("<i8").tobytes()
            frames_of = self._peers.frames(pod, "samples", ids, says_damage=says_damage, repeats=repeats)
            async with frames_of as frames:
                return (await frames.frame(part.add)).payloads
        except BaseException:
            part.forget()
            raise
