"""How are single samples read from the store, for who waits for exactly these? Before what is read ahead of need."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Protocol

from refill.errors import SampleDamaged
from refill_service.cache_core.dataset_index import SampleRecords
from refill_service.cache_core.fair_queue import Need
from refill_service.cache_core.record_pieces import Records
from refill_service.cache_core.sample_mapping import OwnerShare
from refill_service.cache_core.shared_room import Asker
from refill_service.datasets.dataset_reader import Dataset
from refill_service.memory.byte_gate import ByteGate
from refill_service.memory.loop_turns import in_turn
from refill_service.memory.payload import Damage, Payload
from refill_service.object_store.store_counters import within

_READS_AT_ONCE = 64
"""For one request."""


class Reading(Protocol):
    """A job at a pod, as far as reads need it."""

    ordinal: int
    asker: Asker
    dataset: Dataset
    share: OwnerShare


class ReadAlone:
    """Samples that parts of one request want, which go side by side: each is read once, and all have the same bytes."""

    def __init__(self) -> None:
        self._results: dict[int, asyncio.Future[Payload | BaseException]] = {}

    async def results(
        self, samples: list[int], read: Callable[[list[int]], Awaitable[list[Payload | BaseException]]]
    ) -> list[Payload | BaseException]:
        """What came of each sample, or what went wrong.

        :param read: is called with those that no other part reads.
        """
        new = {sample: asyncio.Future[Payload | BaseException]() for sample in samples if sample not in self._results}
        self._results.update(new)
        try:
            for sample, result in zip(new, await read(list(new)) if new else [], strict=True):
                new[sample].set_result(result)
        except BaseException:
            for future in new.values():
                future.cancel()
            raise
        return [await asyncio.shield(self._results[sample]) for sample in samples]


class SingleReads:
    """Reads single samples of one pod's share of a job from the store.

    :param gate: bounds the bytes of reads in flight, over all jobs of the pod.
    """

    def __init__(self, job: Reading, gate: ByteGate, wait_seconds: float) -> None:
        self._job = job
        self._gate = gate
        self._wait_seconds = wait_seconds

    async def read(self, samples: list[int], records: Records, *, says_damage: bool) -> list[Payload | BaseException]:
        """What went wrong stands in the place of each sample that failed: an :class:`asyncio.CancelledError`, too, when
        the store was closed under its reads.

        :param samples: counted from the start of the share; ``records`` has those of all of them.
        :param says_damage: whether :class:`Damage` stands for a sample that is damaged; else its error.
        """
        first = self._job.share.first_sample
        found: list[Payload | BaseException] = [b""] * len(samples)
        to_read = iter(enumerate(samples))

        async def read_some() -> None:
            for place, sample in to_read:
                try:
                    found[place] = await self._read(records.part(sample + first, sample + first + 1))
                except SampleDamaged as error:
                    found[place] = Damage(json.dumps(error.to_wire()).encode()) if says_damage else error
                except Exception as error:
                    found[place] = error
                except asyncio.CancelledError as error:
                    if (task := asyncio.current_task()) is None or task.cancelling():
                        raise
                    found[place] = error  # of the read alone

        await asyncio.gather(*(in_turn(read_some()) for _ in samples[:_READS_AT_ONCE]))
        return found

    async def _read(self, record: SampleRecords) -> Payload:
        try:
            return await self._read_once(record)
        except SampleDamaged:  # perhaps on its way only, and the store has the right bytes
            try:
                return await self._read_once(record)
            except SampleDamaged:
                await self._job.dataset.check_not_replaced(record.first_sample)
                raise

    async def _read_once(self, record: SampleRecords) -> Payload:
        sample, dataset = record.first_sample, self._job.dataset
        # Somebody waits for it; the reads ahead of need can wait.
        size_bytes = dataset.read_cost_bytes(sample, int(record.length[0]))
        async with (
            self._gate.passage(size_bytes, self._job.asker, need=Need(0)) as room,
            within(self._wait_seconds, f"pod {self._job.ordinal} waits for a sample of {dataset.url}"),
        ):
            payload = bytes(await dataset.read_samples(record, sample, sample + 1, room))
        dataset.verify_sample(payload, dataset.as_read(record), sample)
        return payload
