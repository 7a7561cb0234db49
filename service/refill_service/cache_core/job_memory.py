"""How is a pod's memory divided, and a job's part of it, and how much of each is left for the bytes of samples?

Pods and ``refill analyze`` both ask here, so that the one does what the other says.

Python needs an object and places in dicts for each sample. With small samples that is most of what they take, and it
has to stay within the memory that was promised, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from refill.errors import MemoryTooSmall

_BESIDE_RESIDENT_BYTES = 250
"""Beside a sample that fills a slot."""
_BESIDE_SENT_BYTES = 400
"""Beside one that was sent ahead, or has just left: it is found by its request."""
_TABLES_PER_SAMPLE = 100
_TABLES_PER_CHUNK = 1250
_TABLES_PER_RANK = 32
_SMALL_TABLES_BYTES = 1 << 20
_SHARE_MARGIN = 1.25
_LEAST_JOB_BYTES = 1 << 20
GOOD_CHUNKS = 128
"""With as many in memory, a batch of 64 samples has those of 50 different chunks."""

_MUCH_BYTES = 1 << 50
_KEPT_PARTS = 4096

RECENT_PART = 0.05
"""Of a job's memory, for what has just left: an answer that was lost, or came too late, is asked for again."""
SWEEP_PART = 1 / 12
"""Of the memory of a job with a read order: with it others may be behind by half of what its order is planned for."""


@dataclass(frozen=True)
class JobMemory:
    """Parts of ``memory_bytes``; what none of them has is for reads in flight."""

    memory_bytes: int
    remote_fraction: float
    """For what owners send ahead; 0 with one pod."""
    in_flight_fraction: float
    sample_bytes: float
    """Of a sample, on average."""
    sweep_fraction: float = 0.0
    """For what has left and other jobs of the same read order will want; 0 for a job that reads alone."""

    @property
    def abstract_bytes(self) -> int:
        """Of samples, in abstract memory."""
        rest = 1 - self.remote_fraction - RECENT_PART - self.in_flight_fraction - self.sweep_fraction
        return int(self.memory_bytes * rest * self._payload_part(_BESIDE_RESIDENT_BYTES))

    @property
    def remote_bytes(self) -> int:
        """Of samples that were sent ahead."""
        return int(self.memory_bytes * self.remote_fraction * self._payload_part(_BESIDE_SENT_BYTES))

    @property
    def recent_bytes(self) -> int:
        """Of samples that have just left."""
        return int(self.memory_bytes * RECENT_PART * self._payload_part(_BESIDE_SENT_BYTES))

    @property
    def sweep_bytes(self) -> int:
        """For other jobs, with what stands beside each sample."""
        return int(self.memory_bytes * self.sweep_fraction)

    def _payload_part(self, beside_bytes: int) -> float:
        sample_bytes = max(1.0, self.sample_bytes)
        return sample_bytes / (sample_bytes + beside_bytes)


def table_memory(num_samples: int, num_chunks: int, num_ranks: int) -> int:
    """What a job's tables take on a pod that owns so many samples, in so many chunks: which of them are where, and
    where each rank is."""
    return _TABLES_PER_SAMPLE * num_samples + _TABLES_PER_CHUNK * num_chunks + _TABLES_PER_RANK * num_ranks


def check_tables(
    memory_bytes: int, tables_bytes: int, least_bytes: int, job: str, num_chunks: int, num_ranks: int
) -> None:
    """Raises :class:`MemoryTooSmall` for a job whose tables are large, and take more than the memory that it has.

    :param least_bytes: that they would take were all samples one chunk.
    """
    most_bytes = max(memory_bytes, _SMALL_TABLES_BYTES)
    if tables_bytes > most_bytes:
        fewer_chunks = (
            f"; with any chunk_size they take {least_bytes:,} and more"
            if least_bytes > most_bytes
            else ", or a larger chunk_size (most chunks of 512 KiB or more read fastest)"
        )
        raise MemoryTooSmall(
            f"memory too small: job {job} has {memory_bytes:,} bytes on a pod, and its tables of {num_chunks:,} chunks "
            f"and {num_ranks:,} ranks take {tables_bytes:,}; give it more memory_bytes{fewer_chunks}"
        )


def way_to_more_memory(named_bytes: int) -> str:
    """For a job that has no memory for a chunk.

    :param named_bytes: its own ``memory_bytes``; 0: it names none.
    """
    if named_bytes:
        return f"raise the job's own memory_bytes, which is {named_bytes:,},"
    return "end jobs that are over (refill jobs), raise REFILL_MEMORY_BYTES"


def memory_for_chunks(abstract_bytes: float, of: JobMemory) -> int:
    """The ``memory_bytes`` with which a job has so much abstract memory, divided as ``of`` is."""
    return math.ceil(abstract_bytes * _MUCH_BYTES / _abstract_of_much(of)) if abstract_bytes else 0


@lru_cache(maxsize=_KEPT_PARTS)
def _abstract_of_much(of: JobMemory) -> int:
    """Asked again and again of each job, whenever memory is shared anew."""
    return replace(of, memory_bytes=_MUCH_BYTES).abstract_bytes


def most_memory(share_bytes: float, of: JobMemory) -> int:
    """More than this a job can't use that owns so many bytes of samples on a pod: all of them are in memory then.

    Shares differ by a chunk or so, and a chunk may reach over bytes between its samples.
    """
    return memory_for_chunks(_SHARE_MARGIN * share_bytes, of) + _LEAST_JOB_BYTES


def least_memory(chunk_bytes: float, most_bytes: int, of: JobMemory) -> int:
    """With less than this a job's samples are spread badly: too few chunks are in memory to choose from."""
    return min(most_bytes, memory_for_chunks(GOOD_CHUNKS * chunk_bytes, of))


def chunks_in_memory(abstract_bytes: int, num_chunks: int, share_bytes: int) -> int:
    """So many of the chunks that a pod reads fit at once, on average.

    :param num_chunks: that it reads, of ``share_bytes`` in all.
    """
    return min(num_chunks, abstract_bytes * num_chunks // max(1, share_bytes))


@dataclass(frozen=True)
class PodMemory:
    """What each of some pods has for samples; fractions as those of the pods' settings."""

    memory_bytes: int
    num_pods: int
    pinned_fraction: float
    remote_fraction: float
    in_flight_fraction: float
    kept_fraction: float
    """Of what there is, for a job that can't give back while it runs, and names no memory; and of what one that can
    may keep for itself."""

    @property
    def pinned_bytes(self) -> int:
        """For the pinned tier."""
        return int(self.memory_bytes * self.pinned_fraction)

    @property
    def for_jobs_bytes(self) -> int:
        return self.memory_bytes - self.pinned_bytes

    def parts(self, sample_bytes: float, *, planned: bool, in_sweep: bool = False) -> JobMemory:
        """How the memory of a job is divided. Nothing is sent ahead to one pod alone, nor where the order is planned.

        :param sample_bytes: of a sample, on average.
        :param in_sweep: whether it reads in an order that other jobs may share.
        """
        sends_ahead = self.num_pods > 1 and not planned
        remote_fraction = self.remote_fraction if sends_ahead else 0.0
        sweep_fraction = SWEEP_PART if in_sweep else 0.0
        return JobMemory(0, remote_fraction, self.in_flight_fraction, sample_bytes, sweep_fraction)

    def least_and_most(
        self, parts: JobMemory, dataset_bytes: int, chunk_size: int, *, gives_back: bool, beside_bytes: int = 0
    ) -> tuple[int, int]:
        """What a job that names no memory needs here to shuffle well, and what it can use. Alone, it gets that. Where
        memory is small it needs no more than a part, so that another job finds some, too.

        :param gives_back: whether it can do so while it runs.
        :param beside_bytes: that it needs beside its samples.
        """
        of_all = int(self.for_jobs_bytes * (1.0 if gives_back else self.kept_fraction))
        own_bytes = max(dataset_bytes / self.num_pods, min(dataset_bytes, chunk_size * parts.sample_bytes))
        most = min(most_memory(own_bytes, parts) + beside_bytes, of_all)
        least = least_memory(chunk_size * parts.sample_bytes, most, parts) + beside_bytes
        return min(most, least, int(self.for_jobs_bytes * self.kept_fraction)), most
