"""How does a home pod assemble a batch? From its own share, from what was sent ahead, and from other owners.

The path of a batch: ``open`` finds what its positions ask for and sees to it that all owners know of the rank, and may
refuse; nothing is taken before it returns. ``assemble`` has the machine plan the batch, then takes from the pod's own
share and asks every other owner that is still needed, once each and all at the same time, and returns the samples in
the order of the positions. What owners send ahead arrives after their answers and does not delay them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from refill.errors import InvalidInput, RefillError, SamplesSkipped
from refill.protocol.wire_format import BatchRequest, Int64Array
from refill_service.cache_core.damaged_samples import DamagedSamples
from refill_service.cache_core.home_machine import Batch, HomeMachine
from refill_service.jobs.all_done import all_done
from refill_service.jobs.answer_size import AnswerSize
from refill_service.jobs.asked_positions import AskedPositions, asked_positions
from refill_service.jobs.exact_samples import ExactSamples
from refill_service.jobs.job import Job
from refill_service.jobs.leased_ranks import LeasedRanks
from refill_service.jobs.owner import Owner
from refill_service.jobs.owner_answers import OwnerAnswers
from refill_service.jobs.rank_entry import RankEntry
from refill_service.jobs.running_epoch import RunningEpoch
from refill_service.memory.payload import Payload
from refill_service.observing.tracing import span
from refill_service.peers.job_peers import JobPeers

__all__ = ["Home", "OpenBatch"]


@dataclass(frozen=True)
class OpenBatch:
    """A batch that may be assembled."""

    asked: AskedPositions
    own_epoch: RunningEpoch | None
    """Of this pod's share; None: nothing is asked of it."""
    says_damage: bool
    """Whether :class:`Damage` stands for a sample that is damaged; else it is raised."""


class Home:
    """One pod as the home of some ranks of one job. What it decides, it asks its ``machine``."""

    def __init__(self, job: Job, owner: Owner, peers: JobPeers, remote_memory_bytes: int) -> None:
        self.machine: HomeMachine[Payload] = HomeMachine(job.ordinal, job.owner_bounds, remote_memory_bytes)
        self.damaged = DamagedSamples()
        """What ranks went on without."""
        self.leases = LeasedRanks(job.spec.name)
        self.entry = RankEntry(self.machine, job, owner, self.leases, peers)
        self.exact = ExactSamples(job, owner, peers)
        self._job = job
        self._owner = owner
        self._peers = peers
        self._answers = OwnerAnswers(self.machine, peers, job.ordinal)

    async def close(self, why: RefillError) -> None:
        """Requests under way end with ``why``."""
        await self._answers.close(why)

    async def open(self, request: BatchRequest, *, allow_skipped: bool = False, says_damage: bool = False) -> OpenBatch:
        """Once it is known what the positions ask for, and the epoch is open. An error costs nothing here.

        Errors as of :meth:`RankEntry.check_comes_next` and :func:`asked_positions`; raises :class:`RequestTooLarge` for
        more samples than an answer holds.

        :param allow_skipped: whether the rank may have left positions out of epochs before; else it is an error.
        """
        epoch, rank = request.epoch, request.rank
        self._job.check_rank(rank)
        self.entry.check_comes_next(epoch, rank)  # before its traces replace those of others
        asked = await asked_positions(request, self._job, self._owner)
        AnswerSize(self._owner.answer_bytes).check(self._job.mean_bytes(len(asked.positions)))
        if not allow_skipped:
            self._nothing_was_skipped(rank, before_epoch=epoch)
        await self.entry.enter(epoch, rank)  # not before: what is refused must not move the rank on
        here = self._job.share.holds(asked.samples).any()
        return OpenBatch(asked, await self._owner.open(epoch, rank) if here else None, says_damage)

    async def assemble(self, opened: OpenBatch) -> Batch[Payload]:
        """The batch, with all its samples."""
        asked = opened.asked
        epoch, rank, positions = asked.epoch, asked.rank, asked.positions
        batch = self.machine.begin(epoch, rank, positions, asked.samples, asked.repeats)
        try:
            with span("batch", job=self._job.spec.name, epoch=epoch, rank=rank, positions=len(positions)):
                await all_done(
                    self._take_own(batch, opened),
                    self._take_of_owners(batch, batch.of_owners, opened.says_damage),
                    self._take_arriving(batch, opened.says_damage),
                    self._read_repeats(batch, opened.says_damage),
                )
            self.machine.complete(batch, sum(map(len, batch.payloads)))
        finally:
            self.machine.over(batch)
        return batch

    def rank_goes_without(self, epoch: int, rank: int, positions: Int64Array, sample_ids: Int64Array) -> None:
        """Fact: a rank goes on without what came for these positions, since it is damaged.

        Raises :class:`InvalidInput` for what is not in the dataset.
        """
        self._job.check_rank(rank)
        last = self._job.layout.num_samples - 1
        if len(sample_ids) and not 0 <= int(sample_ids.min()) <= int(sample_ids.max()) <= last:
            raise InvalidInput(f"rank {rank} tells of damaged samples that are not in the dataset, 0 to {last}")
        if (traces := self._job.known_traces(epoch)) is not None:  # repeats are counted where they are no repeats
            inside = (positions >= 0) & (positions < traces.length(rank))
            positions, sample_ids = positions[inside], sample_ids[inside]
            sample_ids = sample_ids[~traces.asked(rank, positions)[1]]
        self.damaged.rank_goes_without(epoch, rank, sample_ids.tolist())

    async def _take_own(self, batch: Batch[Payload], opened: OpenBatch) -> None:
        epoch, says_damage = opened.own_epoch, opened.says_damage
        if epoch is not None and len(places := batch.own):
            taken = await self._owner.take(epoch, batch.rank, batch.asked[places], says_damage=says_damage)
            batch.put(places, *taken)

    async def _take_of_owners(self, batch: Batch[Payload], of_owners: dict[int, Int64Array], says_damage: bool) -> None:
        asks = [
            self._peers.patiently(pod, partial(self._answers.ask, batch, pod, places, len(of_owners) - i, says_damage))
            for i, (pod, places) in enumerate(of_owners.items())
        ]
        for places, answer in zip(of_owners.values(), await all_done(*asks), strict=True):
            batch.put(places, *answer)

    async def _take_arriving(self, batch: Batch[Payload], says_damage: bool) -> None:
        """What other answers bring ahead; what of it was lost on the way is asked for."""
        if batch.awaited:
            await self._answers.wait_for(batch.awaited)
            await self._take_of_owners(batch, self.machine.arrived(batch), says_damage)

    async def _read_repeats(self, batch: Batch[Payload], says_damage: bool) -> None:
        if len(places := batch.repeats):
            repeated = await self.exact.read(batch.asked[places], says_damage=says_damage, repeats=True)
            batch.put(places, batch.asked[places], repeated)

    def _nothing_was_skipped(self, rank: int, before_epoch: int) -> None:
        """Raises :class:`SamplesSkipped` when a rank that asks for an epoch has left out positions of one before."""
        if (skipped := self.machine.skipped(rank, before_epoch)) is not None:
            epoch, start, end = skipped
            raise SamplesSkipped(
                f"rank {rank} of job {self._job.spec.name} has left epoch {epoch} and never asked for its positions "
                f"{start} to {end - 1}, while it asked for later ones: its samples are divided a second time, "
                "or batches are skipped. Let the trainer take the sampler as it is (docs/TRAINERS.md); "
                "allow_skipped=True, given to the dataset, allows it",
                epoch=epoch,
                rank=rank,
                start=start,
                end=end,
            )
