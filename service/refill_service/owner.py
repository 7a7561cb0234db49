"""How does a pod serve its share of a job? Carries out what ``OwnerEpoch`` decides: reads chunks, keeps bytes.

The path of a request: ``take`` -> the core assigns samples and orders refills -> ``_read`` fetches each chunk and
keeps what fills a slot -> the bytes leave with the answer and are forgotten. ``ahead`` follows the answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

import numpy as np

from refill.errors import EpochEnded, EpochNotReady, JobLost, SampleDamaged
from refill.protocol.wire_format import Int64Array
from refill_service.byte_gate import ByteGate
from refill_service.cache_core.epoch_order import Traces
from refill_service.cache_core.owner_epoch import EpochCounts, OwnerEpoch
from refill_service.cache_core.policies import new_epoch
from refill_service.cache_core.refill import Refill
from refill_service.job import Job
from refill_service.recently_sent import RecentlySent

__all__ = ["Owner", "OwnerCounts"]

log = logging.getLogger(__name__)


@dataclass
class OwnerCounts:
    """What an owner did in one epoch, beside what its core decided."""

    core: EpochCounts
    waited_takes: int = 0
    """Takes that had to wait for the store, whether for their own refill or for one under way."""
    wait_seconds: float = 0.0
    replays: int = 0
    """Requests that were asked again after their bytes had left."""
    exact_reads: int = 0
    """Samples read by a ranged GET of their own: replays of what left long ago, repeats and random access."""
    exact_bytes: int = 0
    refills_failed: int = 0


@dataclass
class _Epoch:
    """The running state of one epoch: the core, and the bytes of what it holds."""

    number: int
    core: OwnerEpoch
    counts: OwnerCounts
    payloads: _Payloads = field(default_factory=lambda: _Payloads())
    """Bytes of local samples that fill a slot, or that were assigned and have yet to leave."""
    arriving: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """The refill under way that brings a local sample."""
    abandoned: bool = False


class _Payloads:
    """Bytes by local sample, and how many they are."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._by_sample: dict[int, bytes] = {}

    def put(self, sample: int, payload: bytes) -> None:
        self._by_sample[sample] = payload
        self.num_bytes += len(payload)

    def pop(self, sample: int) -> bytes | None:
        payload = self._by_sample.pop(sample, None)
        if payload is not None:
            self.num_bytes -= len(payload)
        return payload

    def take(self, sample: int) -> bytes:
        """Of a sample that must be here."""
        payload = self._by_sample.pop(sample)
        self.num_bytes -= len(payload)
        return payload

    def clear(self) -> None:
        self._by_sample.clear()
        self.num_bytes = 0


class Owner:
    """One pod's share of one job.

    :param gate: bounds the bytes of reads in flight, over all jobs of the pod.
    :param recent_bytes: how much of what was sent is kept for those who ask again.
    """

    def __init__(self, job: Job, gate: ByteGate, recent_bytes: int, wait_seconds: float) -> None:
        self.job = job
        self.history: dict[int, OwnerCounts] = {}
        self._gate = gate
        self._recent = RecentlySent(recent_bytes)
        self.wait_seconds = wait_seconds
        self._current: _Epoch | None = None
        self._previous: _Epoch | None = None
        self._rank_epochs = [-1] * job.spec.world_size
        self._moved_on = asyncio.Condition()
        self._reads: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def resident_bytes(self) -> int:
        return sum(epoch.payloads.num_bytes for epoch in (self._current, self._previous) if epoch is not None)

    @property
    def begun(self) -> bool:
        """Whether a rank has entered an epoch, here or at another pod: all owners are told before any is asked."""
        return max(self._rank_epochs) >= 0

    @property
    def recent_bytes(self) -> int:
        return self._recent.used_bytes

    async def close(self) -> None:
        """Stop all reads and forget everything. Requests under way, and later ones, end with :class:`JobLost`."""
        self._closed = True
        for task in self._reads:
            task.cancel()
        await asyncio.gather(*self._reads, return_exceptions=True)
        self._current = self._previous = None
        self._recent.clear()

    async def rank_opens(self, epoch: int, rank: int) -> None:
        """Fact: a rank asks for this epoch now, so it has left all before."""
        self.job.check_rank(rank)
        if self._rank_epochs[rank] < epoch:
            self._rank_epochs[rank] = epoch
            async with self._moved_on:
                self._moved_on.notify_all()

    async def take(self, epoch: int, rank: int, asked: Int64Array) -> tuple[Int64Array, list[bytes]]:
        """Answer requests for samples of this share: ``(sample ids, their bytes)`` in the order of ``asked``.

        :param asked: ``(n,)`` sample ids that the rank's trace asks for, all different, none a repeat.
        """
        state = await self._epoch(epoch, rank)
        if state.abandoned:
            raise EpochEnded(
                f"job {self.job.spec.name} has left epoch {epoch} before its end; it can't be taken up again"
            )
        first = self.job.share.first_sample
        taken = state.core.take(asked - first)
        for refill in taken.refills:
            self._order(state, refill)
        samples = taken.samples.tolist()
        payloads = [state.payloads.pop(sample) for sample in samples]
        missing = [i for i, payload in enumerate(payloads) if payload is None]
        try:
            if missing:
                await self._wait_for(state, [samples[i] for i in missing])
            for i in missing:
                payloads[i] = state.payloads.pop(samples[i])
            await self._replay(state, samples, payloads)
        except BaseException:
            # Who asks again finds what is here already, within the limit of what is kept of answers that left.
            here = {sample: found for sample, found in zip(samples, payloads, strict=True) if found is not None}
            self._recent.put(epoch, list(here), list(here.values()))
            raise
        found = [payload for payload in payloads if payload is not None]
        self._recent.put(epoch, samples, found)
        return taken.samples + first, found

    async def _replay(self, state: _Epoch, samples: list[int], payloads: list[bytes | None]) -> None:
        """Fill in what is missing: its bytes have left with an answer that never came through, or are damaged."""
        gone = [i for i, payload in enumerate(payloads) if payload is None]
        state.counts.replays += len(gone)
        for i in gone:
            payloads[i] = self._recent.get(state.number, samples[i])
        lost = [i for i in gone if payloads[i] is None]
        for i, payload in zip(lost, await self._exact(state.counts, [samples[i] for i in lost]), strict=True):
            payloads[i] = payload

    def ahead(
        self, epoch: int, rank: int, answered: Int64Array, ahead_from: int, room: int, started_below: int
    ) -> tuple[Int64Array, Int64Array, list[bytes]]:
        """What to send after an answer: ``(positions, sample ids, their bytes)``. Parameters as ``send_ahead``.

        :param answered: the samples that the requests just answered asked for.
        """
        state = self._current
        if state is None or state.number != epoch:
            empty = np.empty(0, dtype=np.int64)
            return empty, empty, []
        first = self.job.share.first_sample
        locations = self.job.mapping.locations(answered - first)
        ahead = state.core.send_ahead(rank, locations, ahead_from, room, started_below)
        for refill in ahead.refills:
            self._order(state, refill)
        samples = ahead.samples.tolist()
        payloads = [state.payloads.take(sample) for sample in samples]
        self._recent.put(epoch, samples, payloads)
        return ahead.positions, ahead.samples + first, payloads

    async def exact(self, sample_ids: Int64Array) -> list[bytes]:
        """The bytes of exactly these samples of the share, outside of any epoch's protocol."""
        counts = self._current.counts if self._current else OwnerCounts(EpochCounts())
        return await self._exact(counts, (sample_ids - self.job.share.first_sample).tolist())

    async def _epoch(self, epoch: int, rank: int) -> _Epoch:
        self._refuse_when_closed()
        await self.rank_opens(epoch, rank)
        for known in (self._current, self._previous):
            if known is not None and known.number == epoch:
                return known
        if self._current is not None and epoch < self._current.number:
            raise EpochEnded(
                f"job {self.job.spec.name} is at epoch {self._current.number}, epoch {epoch} has ended: "
                "use another job name to start over, or end this job first"
            )
        traces = await self.job.traces(epoch, self.wait_seconds)
        try:
            async with asyncio.timeout(self.wait_seconds), self._moved_on:
                await self._moved_on.wait_for(lambda: self._may_open(epoch))
        except TimeoutError as error:
            behind = [rank for rank, at in enumerate(self._rank_epochs) if at < epoch]
            raise EpochNotReady(
                f"epoch {epoch} of job {self.job.spec.name} waits for rank {behind[0] if behind else '?'} "
                f"to finish epoch {self._current.number if self._current else '?'}",
                ranks=behind,
            ) from error
        self._refuse_when_closed()
        if self._current is None or self._current.number < epoch:
            self._open(epoch, traces)
        return await self._epoch(epoch, rank)

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise JobLost(f"job {self.job.spec.name} was ended while it was asked for samples", job=self.job.spec.name)

    def _may_open(self, epoch: int) -> bool:
        """One epoch at a time holds memory: the one before is used up, or every rank has left it."""
        current = self._current
        return current is None or current.number >= epoch or current.core.finished or min(self._rank_epochs) >= epoch

    def _open(self, epoch: int, traces: Traces) -> None:
        spec = self.job.spec
        core = new_epoch(
            # In the order of the dataset each chunk is used up before the next: nothing to redirect, nothing wasted.
            spec.policy if spec.shuffle else "redox",
            self.job.mapping,
            traces,
            self.job.records.length,
            capacity_bytes=self.job.abstract_bytes,
            refill=spec.refill,
            prefetch_window=spec.prefetch_window,
            key=f"{spec.seed} {epoch} {self.job.ordinal}",
        )
        if self._current is not None and not self._current.core.finished:
            self._current.abandoned = True
            self._current.payloads.clear()
        self._previous, self._current = self._current, _Epoch(epoch, core, OwnerCounts(core.counts))
        self.history[epoch] = self._current.counts
        for refill in core.start():
            self._order(self._current, refill)

    def _order(self, state: _Epoch, refill: Refill) -> None:
        task = asyncio.create_task(self._read(state, refill))
        self._reads.add(task)
        task.add_done_callback(self._reads.discard)
        for sample in refill.samples.tolist():
            state.arriving[sample] = task

    async def _read(self, state: _Epoch, refill: Refill) -> None:
        """Fetch the chunk of a refill and keep the samples that fill a slot. Raises what the store raised.

        A damaged sample keeps its slot without bytes: the request that it falls to reads it alone and gets the error.
        """
        share, records = self.job.share, self.job.records
        first, end = int(share.starts[refill.chunk]), int(share.starts[refill.chunk + 1])
        samples = (refill.samples + share.first_sample).tolist()
        kept: list[bytes | None]
        try:
            chunk = records.part(first, end)
            async with self._gate.passage(int(chunk.length.sum())):
                buffer = await self.job.dataset.read_samples(records, first, end)
                starts = chunk.offset - chunk.offset[0]
                # Copies, so that the wasted rest of the chunk is freed with the buffer.
                kept = [
                    self._intact(
                        bytes(buffer[starts[sample - first] : starts[sample - first] + chunk.length[sample - first]]),
                        sample,
                    )
                    for sample in samples
                ]
                del buffer
        except SampleDamaged as error:  # the blob ends too early, or is gone
            log.warning("job %s: %s", self.job.spec.name, error)
            kept = [None] * len(samples)
        except BaseException:
            state.counts.refills_failed += 1
            state.core.refill_failed(refill)
            self._forget_arriving(state, refill)
            raise
        if not state.abandoned:
            intact = [i for i, payload in enumerate(kept) if payload is not None]
            arrived = Refill(refill.chunk, refill.samples[intact], refill.locations[intact])
            for sample, payload in zip(refill.samples.tolist(), kept, strict=True):
                if payload is not None:
                    state.payloads.put(sample, payload)
            state.core.refill_arrived(arrived)
        self._forget_arriving(state, refill)

    def _intact(self, payload: bytes, sample: int) -> bytes | None:
        try:
            self.job.dataset.verify_sample(payload, self.job.records, sample)
        except SampleDamaged as error:
            log.warning("job %s: %s", self.job.spec.name, error)
            return None
        return payload

    def _forget_arriving(self, state: _Epoch, refill: Refill) -> None:
        for sample in refill.samples.tolist():
            state.arriving.pop(sample, None)

    async def _wait_for(self, state: _Epoch, samples: list[int]) -> None:
        """Wait for the refills that bring these samples, and raise what went wrong with the first that failed."""
        tasks = {state.arriving[sample] for sample in samples if sample in state.arriving}
        if not tasks:
            return
        waiting = sum(sample in state.arriving for sample in samples)
        started = time.perf_counter()
        done, _ = await asyncio.wait(tasks)
        state.counts.waited_takes += waiting
        state.counts.wait_seconds += time.perf_counter() - started
        for task in done:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _exact(self, counts: OwnerCounts, samples: list[int]) -> list[bytes]:
        self._refuse_when_closed()
        records, dataset = self.job.records, self.job.dataset

        async def read(sample: int) -> bytes:
            async with self._gate.passage(int(records.length[sample - records.first_sample])):
                payload = bytes(await dataset.read_samples(records, sample, sample + 1))
            dataset.verify_sample(payload, records, sample)
            return payload

        first = self.job.share.first_sample
        try:
            found = list(await asyncio.gather(*(read(sample + first) for sample in samples)))
        except asyncio.CancelledError:
            self._refuse_when_closed()  # the store was closed under its reads
            raise
        counts.exact_reads += len(samples)
        counts.exact_bytes += sum(map(len, found))
        return found
