"""What does a pod report to another one that was restarted, and what does it keep for it?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from refill.protocol.records import Kind, Record, RecordReader, encode_records
from refill_service.cache_core.home_record import HomeRecord
from refill_service.cache_core.job_state import JobState
from refill_service.cache_core.owner_machine import OwnerMachine

__all__ = ["HandedOver", "PodRecords", "snapshot", "snapshots_say_all"]


_NOBODY = "nobody"
"""Claims what came too late: another run has started since, and may have delivered more."""


@dataclass
class HandedOver:
    """The records that a pod handed over to this one when it ended, for its next run."""

    records: bytes
    claimed_by: str = ""
    """The run of that pod that came first after that, or asked for them. It may have delivered more since, so for a
    later run the records are not complete."""


class PodRecords:
    """Of one job at one pod."""

    def __init__(self, job: JobState, home: HomeRecord) -> None:
        self.handed_over: dict[int, HandedOver] = {}
        """By the ordinals of pods that ended in order."""
        self.unknown: dict[int, bytes] = {}
        """By the ordinals of other pods, records of what is unknown of their answers."""
        self._job = job
        self._home = home

    def hands_over(self, pod: int, records: bytes, run: str, newest: str | None) -> None:
        """Fact: a pod has ended, and leaves this here.

        :param run: of the pod, the one that has ended.
        :param newest: the newest one that is known here.
        """
        self.handed_over[pod] = HandedOver(records, "" if newest in (None, run) else _NOBODY)

    def started(self, pod: int, run: str) -> bool:
        """Fact: a run of another pod has started. Whether there is something here for it."""
        if (left := self.handed_over.get(pod)) is None:
            return False
        left.claimed_by = left.claimed_by or run
        return left.claimed_by == run

    @property
    def unclaimed(self) -> dict[int, bytes]:
        """By pods that have ended, and have not started again: the records that they have left."""
        return {pod: left.records for pod, left in self.handed_over.items() if not left.claimed_by}

    def records_for(self, pod: int, run: str, *, everything: bool = False) -> bytes:
        """For a pod that was restarted: those that it handed over when it ended, and this pod's own as a home and as an
        owner.

        :param run: names this run of the pod.
        :param everything: of what ranks have received of all pods' shares, not of that pod's alone.
        """
        job, life = self._job, self._job.life
        records = [*self._home.records_for(pod, everything=everything), *life.opened()]
        if not life.recovering:
            records.append(Record(Kind.NOT_RECOVERING, 0))
        elif life.will_recover:
            records.append(Record(Kind.WILL_RECOVER, 0))
        if everything or life.traces_are_final:  # else they may be from before it moved
            for epoch in job.traced_epochs:
                records += job.trace_records(epoch)
        for other, unknown in self.unknown.items():
            if everything or other == pod:
                records += RecordReader(unknown)
        if (left := self.handed_over.get(pod)) is None:
            return encode_records(records)
        left.claimed_by = left.claimed_by or run
        if left.claimed_by == run:
            records.append(Record(Kind.WHOLE_TABLE, 0))
        return left.records + encode_records(records)

    def unknown_before(self) -> dict[int, int]:
        """By rank, the epoch before which it is not known what the rank received, from this pod or from another one."""
        found = self._job.life.unknown.by_rank()
        for record in self._unknown_to_others():
            found[record.rank] = max(record.epoch, found.get(record.rank, 0))
        return found

    def _unknown_to_others(self) -> Iterator[Record]:
        for unknown in self.unknown.values():
            yield from RecordReader(unknown)


def snapshot(job: JobState, machine: OwnerMachine, epoch: int) -> Iterator[Record]:
    """All that is to be known of an epoch to go on with it, without its bytes: what a journal begins with, and what is
    handed over."""
    for rank, at in job.life.ranks:
        if at == epoch:
            yield Record(Kind.OPENED, epoch, rank, (np.array(job.life.ranks.homes(rank), dtype=np.int64),))
    yield from job.life.unknown.records()
    yield from job.trace_records(epoch)
    if (known := machine.known(epoch)) is not None:
        yield Record(Kind.ANSWERED, epoch, 0, machine.answered_of(known))


def snapshots_say_all(job: JobState, machine: OwnerMachine) -> bool:
    """Whether a journal may begin now. What is unknown is written down with an epoch: without one it would be lost with
    the pod, and the journal be believed."""
    return bool(machine.live_epochs) or not job.life.unknown
