"""What does a pod know of one job? Its settings, the dataset's chunks, the pod's share of the index, the traces."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refill.errors import EpochNotReady, InvalidInput, MemoryTooSmall
from refill.protocol.job_spec import JobSpec
from refill.protocol.wire_format import BatchRequest, Int64Array
from refill_service.cache_core.dataset_index import SampleRecords
from refill_service.cache_core.epoch_order import ExplicitTraces, IdArray, Traces
from refill_service.cache_core.job_memory import GOOD_CHUNKS, chunks_in_memory, way_to_more_memory
from refill_service.cache_core.job_state import JobState
from refill_service.cache_core.sample_mapping import AbstractMapping, ChunkLayout, abstract_chunks_for_budget
from refill_service.cache_core.shared_room import Asker
from refill_service.datasets.dataset_reader import Dataset
from refill_service.jobs.waits import Changes, RankWaits

_MOST_OF_OWN_MEAN = 4
"""Samples of the whole dataset may be so many times as large as those of one pod's share, on average."""


@dataclass(frozen=True)
class AskedPositions:
    """Positions of a rank, and what its trace asks for there. All arrays have an entry for each position."""

    epoch: int
    rank: int
    positions: Int64Array
    samples: Int64Array
    repeats: NDArray[np.bool_]
    """Whether it repeats a sample of the epoch (padding, replacement), and gets exactly that."""


class Job(JobState):
    """A live job at one pod: its settings, its memory here, and what was counted of it.

    :param memory_bytes: what the job may use here, for abstract memory, remote memory and reads in flight.
    :param abstract_bytes: the part of it for abstract memory.
    :param trace_bytes: what is set aside for posted traces.
    :param incarnation: names this run of the job; equal on all pods.
    """

    def __init__(
        self,
        spec: JobSpec,
        dataset: Dataset,
        records: SampleRecords,
        layout: ChunkLayout,
        *,
        ordinal: int,
        num_pods: int,
        memory_bytes: int,
        abstract_bytes: int,
        incarnation: str,
        trace_bytes: int = 0,
    ) -> None:
        super().__init__(
            spec, layout, ordinal=ordinal, num_pods=num_pods, incarnation=incarnation, trace_bytes=trace_bytes
        )
        self.asker = Asker.of(spec)
        self.dataset = dataset
        self.records = records
        self.share_bytes = int(records.length.sum())
        """Of the samples that the pod owns."""
        self.memory_bytes = memory_bytes
        self.abstract_bytes = abstract_bytes
        self.policy = spec.policy
        self.policy_settings = spec.settings_of_policy()
        self.mapping = AbstractMapping(self.share, self._abstract_chunks(), spec.group_order)
        self._traces_came = Changes()
        self.trace_came = self._traces_came.happened

    @property
    def is_by_importance(self) -> bool:
        """Whether training says how important samples are, and draws its epochs by that: positions repeat samples, and
        some samples never come."""
        return self.spec.is_by_importance

    def mean_bytes(self, num_samples: int) -> int:
        """What so many samples take, about."""
        claimed = num_samples * self.dataset.index.sample_bytes // max(1, self.layout.num_samples)
        # What other pods own is not known here; an index that claims very much must not shut out other jobs.
        own = len(self.records)
        return min(claimed, _MOST_OF_OWN_MEAN * num_samples * self.share_bytes // own) if own else claimed

    def owner_of(self, samples: Int64Array) -> Int64Array:
        """The ordinal of each sample's owner."""
        return np.searchsorted(self.owner_bounds[1:-1], samples, side="right")

    def info(self) -> dict[str, Any]:
        """What a client gets on registration."""
        return {
            "spec": self.spec.to_dict(),
            "incarnation": self.incarnation,
            "num_pods": self.num_pods,
            "num_samples": self.layout.num_samples,
            "num_blobs": len(self.layout.first_sample) - 1,
            "total_bytes": self.dataset.index.sample_bytes,
            "fingerprint": self.dataset.version,
            "samples_per_rank": self.samples_per_rank(),
            "metadata": self.dataset.index.metadata,
            "ordinal": self.ordinal,
            "memory_bytes": self.memory_bytes,
            "policy": self.policy,
            "chunk_size": self.layout.chunk_size,
            "group_size": self.mapping.group_size,
            "abstract_chunks": self.mapping.num_abstract_chunks,
            "chunks_in_memory": chunks_in_memory(self.abstract_bytes, self.share.num_chunks, self.share_bytes),
            "good_chunks_in_memory": min(self.share.num_chunks, GOOD_CHUNKS),
        }

    async def traces(self, epoch: int, waits: RankWaits) -> Traces:
        """The traces of an epoch; waits until every rank has posted its own when the order is explicit."""
        while (found := self.known_traces(epoch)) is None:
            await self._all_posted(epoch, waits)
        return found

    async def asked(self, request: BatchRequest, waits: RankWaits) -> AskedPositions:
        """The same at the home pod and at every owner. Waits until the traces of the epoch are known. Raises
        :class:`InvalidInput` for a position past the end of the rank's trace."""
        epoch, rank, positions = request.epoch, request.rank, request.positions
        traces = await self.traces(epoch, waits)
        if int(positions.max()) >= traces.length(rank):
            raise InvalidInput(
                f"rank {rank} asks for position {int(positions.max())}, but epoch {epoch} of job {self.spec.name} "
                f"has {traces.length(rank)} positions for it"
            )
        return AskedPositions(epoch, rank, positions, *traces.asked(rank, positions))

    def check_posting(self) -> None:
        """Raises :class:`InvalidInput` when ranks may post no traces."""
        if self.spec.order != "explicit":
            raise InvalidInput(f"job {self.spec.name} has order 'keyed': traces are posted to 'explicit' jobs only")

    async def post_trace(self, epoch: int, rank: int, sample_ids: IdArray) -> None:
        """Raises :class:`InvalidInput` when the job's order is keyed, or the rank posted another trace before."""
        self.check_posting()
        self.check_trace(rank, sample_ids)
        posted = dict(self.posted.of_epoch(epoch)) | {rank: sample_ids}
        if self.is_posted(epoch, rank, sample_ids):
            return
        if len(posted) < self.spec.world_size:
            self.put_trace(epoch, rank, sample_ids)
            return
        # The last one. Sorting all of them takes a while, in which others are to be answered.
        built = await asyncio.to_thread(ExplicitTraces, self.layout.num_samples, posted)
        if self.is_posted(epoch, rank, sample_ids):  # posted twice at the same time
            return
        others = self.posted.of_epoch(epoch)
        unchanged = all(others.get(other) is posted[other] for other in posted if other != rank)
        self.put_trace(epoch, rank, sample_ids, built if unchanged and len(others) == len(posted) - 1 else None)

    async def _all_posted(self, epoch: int, waits: RankWaits) -> None:
        try:
            await waits.until(self._traces_came, lambda: len(self.posted.of_epoch(epoch)) >= self.spec.world_size)
        except TimeoutError as error:
            posted = self.posted.of_epoch(epoch)
            missing = [rank for rank in range(self.spec.world_size) if rank not in posted]
            raise EpochNotReady(
                f"epoch {epoch} of job {self.spec.name} waits for the trace of rank {missing[0]}", ranks=missing
            ) from error

    def _check_reach(self, most_bytes: int) -> None:
        """A chunk is read from its first byte to its last, whatever lies between its samples."""
        offset, length = self.records.offset, self.records.length
        first, last = self.share.starts[:-1] - self.records.first_sample, self.share.starts[1:] - 1
        last = last - self.records.first_sample
        reach = int((offset[last] + length[last] - offset[first]).max())
        if reach > most_bytes:
            raise MemoryTooSmall(
                f"memory too small: job {self.spec.name} has {most_bytes:,} bytes for chunks on pod {self.ordinal}, "
                f"and its largest chunk of {self.layout.chunk_size} samples takes {reach:,} of its blob; "
                f"{way_to_more_memory(self.spec.memory_bytes)} or {self.dataset.way_to_smaller_chunks}",
                pod=self.ordinal,
                abstract_bytes=most_bytes,
                largest_chunk_bytes=reach,
            )

    def _abstract_chunks(self) -> int:
        share, abstract_bytes = self.share, self.abstract_bytes
        if share.num_chunks == 0:
            return 0
        self._check_reach(abstract_bytes if self.spec.shuffle else self.memory_bytes)
        if not self.spec.shuffle:
            return share.num_chunks  # in order, each chunk is used up before the next: no redirection, no waste
        chunk_bytes = np.add.reduceat(self.records.length, share.starts[:-1] - share.first_sample)
        found = abstract_chunks_for_budget(share.num_chunks, float(chunk_bytes.mean()), abstract_bytes)
        if found == 0 or int(chunk_bytes.max()) > abstract_bytes:
            raise MemoryTooSmall(
                f"memory too small: job {self.spec.name} has {abstract_bytes:,} bytes for chunks on pod "
                f"{self.ordinal}, and its largest chunk of {self.layout.chunk_size} samples takes "
                f"{int(chunk_bytes.max()):,}; {way_to_more_memory(self.spec.memory_bytes)} or "
                f"{self.dataset.way_to_smaller_chunks}",
                pod=self.ordinal,
                abstract_bytes=abstract_bytes,
                largest_chunk_bytes=int(chunk_bytes.max()),
            )
        return found
