"""What does a pod know of a job that runs, beside what it has answered? What has become of it, how far its ranks are,
and what each position of an epoch asks for: from the seed, as ranks posted it, as it was dealt anew when the job moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from refill.errors import InvalidInput
from refill.protocol.job_spec import JobSpec
from refill.protocol.records import Kind, Record
from refill_service.cache_core.epoch_order import ExplicitTraces, IdArray, KeyedTraces, Traces, check_ids
from refill_service.cache_core.job_lifecycle import Begin, JobLife
from refill_service.cache_core.posted_traces import PostedTraces
from refill_service.cache_core.rank_places import RankPlaces
from refill_service.cache_core.sample_mapping import ChunkLayout, Int64Array

__all__ = ["JobState"]

_KEPT_EPOCHS = 3
"""The one before, for who asks again; the one that is asked for; the one that is loaded ahead."""


class JobState:
    """Of one job at one pod.

    :param incarnation: tells this registration from an earlier one of the same name; equal on all pods.
    :param trace_bytes: what is set aside for posted traces.
    :param begin: how the job came to this pod; None: as a new one.
    :param journal_is_whole: whether the pod's journal says all that it had answered before.
    """

    def __init__(
        self,
        spec: JobSpec,
        layout: ChunkLayout,
        *,
        ordinal: int,
        num_pods: int,
        incarnation: str,
        trace_bytes: int = 0,
        begin: Begin | None = None,
        journal_is_whole: bool = False,
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.ordinal = ordinal
        self.num_pods = num_pods
        self.incarnation = incarnation
        self.owner_bounds = layout.owner_bounds(num_pods)
        self.share = layout.share(ordinal, num_pods)
        ranks = RankPlaces(spec.world_size, self.asks_nothing)
        self.life = JobLife(spec.name, incarnation, ranks, begin, journal_is_whole=journal_is_whole)
        self.posted = PostedTraces(
            layout.num_samples,
            trace_bytes,
            world_size=spec.world_size,
            num_epochs=spec.num_epochs,
            names_classes=spec.names_classes,
        )
        self.trace_came: Callable[[], None] = lambda: None
        """Told when it may be known what the positions of one more epoch ask for."""
        self._traces: dict[int, Traces] = {}
        self._moved_epochs: set[int] = set()

    def samples_per_rank(self) -> int:
        """Positions of each rank in an epoch whose order is keyed."""
        everything = self.layout.num_samples
        return KeyedTraces(everything, self.spec.world_size, shuffle=False, drop_last=self.spec.drop_last).length(0)

    def has_epoch(self, epoch: int) -> bool:
        """Whether the job may ask for this epoch."""
        return self.spec.num_epochs == 0 or epoch < self.spec.num_epochs

    def asks_nothing(self, epoch: int, rank: int) -> bool:
        """Whether a rank posted an empty trace for this epoch."""
        return self.spec.order == "explicit" and len(self.posted.of_epoch(epoch).get(rank, (None,))) == 0

    def known_traces(self, epoch: int) -> Traces | None:
        """The traces of an epoch if they are known now: explicit ones when all ranks have posted theirs."""
        found = self._traces.get(epoch)
        if found is None:
            posted = self.posted.of_epoch(epoch)
            if len(posted) == self.spec.world_size:  # by ranks, or dealt anew when the job moved
                found = ExplicitTraces(self.layout.num_samples, posted)
            elif self.spec.order == "keyed":
                found = self._keyed(epoch)
                if epoch > self.life.ranks.newest + 1:
                    return found  # somebody is curious: no rank can ask for it yet
            else:
                return None
            self._remember(epoch, found)
        return found

    def _keyed(self, epoch: int) -> Traces:
        if (found := self._traces.get(epoch)) is not None:
            return found
        return KeyedTraces.of_job(self.spec, epoch, self.layout.num_samples)

    def _remember(self, epoch: int, traces: Traces) -> None:
        """Whoever names an epoch, earlier ones may run: only what can be made again is dropped, not what was posted."""
        self._traces[epoch] = traces
        for old in [known for known in self._traces if known <= epoch - _KEPT_EPOCHS]:
            del self._traces[old]

    def forget_traces(self, before_epoch: int) -> None:
        """Fact: nobody can ask for earlier epochs any more. What ranks posted, or was dealt anew, goes only now."""
        for old in [known for known in (*self._traces, *self.posted.epochs) if known < before_epoch]:
            self._traces.pop(old, None)
            self.posted.forget(old)

    def trace_to_compare(self, epoch: int, rank: int) -> IdArray | None:
        """What the rank has posted before, and has to post again if it posts; None: nothing, or it was dealt anew."""
        return None if epoch in self._moved_epochs else self.posted.of_epoch(epoch).get(rank)

    def is_posted(self, epoch: int, rank: int, sample_ids: IdArray) -> bool:
        """Raises :class:`InvalidInput` when it is another one."""
        before = self.posted.of_epoch(epoch).get(rank)
        if before is None:
            return False
        if epoch in self._moved_epochs and len(before) == len(sample_ids) > 0:
            return True  # posted again, and it has been dealt anew since
        if not np.array_equal(before, sample_ids):
            raise self.posted_another(epoch, rank)
        return True

    def posted_another(self, epoch: int, rank: int) -> InvalidInput:
        return InvalidInput(f"rank {rank} posted another trace for epoch {epoch} of job {self.spec.name} before")

    def check_trace(self, rank: int, entries: IdArray) -> None:
        """Raises :class:`InvalidInput` for what a trace of the job can't ask for."""
        check_ids(self.layout.num_samples, rank, entries, may_name_classes=self.spec.names_classes)

    def check_rank(self, rank: int) -> None:
        if rank >= self.spec.world_size:
            raise InvalidInput(
                f"rank {rank} asks, but job {self.spec.name} was registered for world_size {self.spec.world_size}"
            )

    def trace_length(self, epoch: int, rank: int) -> int:
        """Positions of a rank in an epoch; 0 when it has yet to post its trace."""
        if self.spec.order == "keyed":
            return self.samples_per_rank()
        return len(self.posted.of_epoch(epoch).get(rank, ()))

    def restore_trace(self, epoch: int, rank: int, sample_ids: IdArray) -> None:
        """Fact: the rank had posted this trace before the pod was restarted."""
        if rank < self.spec.world_size:
            if rank not in self.posted.of_epoch(epoch):
                self._put_trace(epoch, rank, sample_ids)
            self.trace_came()

    def replace_trace(self, epoch: int, rank: int, sample_ids: Int64Array) -> None:
        """Fact: the rank asks for this, as dealt when the job moved."""
        if rank < self.spec.world_size:
            self._put_trace(epoch, rank, sample_ids)
            self._moved_epochs.add(epoch)
            self.trace_came()

    def move_traces(self, epoch: int, traces: Mapping[int, Int64Array]) -> None:
        """Fact: from now on, ranks ask for these in an epoch that had begun on other pods."""
        self.posted.replace(epoch, traces)
        self._moved_epochs.add(epoch)
        self._traces.pop(epoch, None)
        self.trace_came()

    def _put_trace(self, epoch: int, rank: int, sample_ids: IdArray) -> None:
        self.posted.put(epoch, rank, sample_ids)
        self._traces.pop(epoch, None)

    @property
    def traced_epochs(self) -> list[int]:
        """Those for which ranks have posted traces, or which were dealt anew when the job moved."""
        return self.posted.epochs

    def trace_records(self, epoch: int) -> Iterator[Record]:
        """The traces of an epoch that can't be told from the seed."""
        for rank, sample_ids in self.posted.of_epoch(epoch).items():
            yield Record(Kind.TRACE, epoch, rank, (sample_ids,))

    def remember(self, epoch: int, rank: int, sample_ids: IdArray, built: Traces) -> None:
        """Fact: the last rank has posted its trace; ``built`` are those of all."""
        self._put_trace(epoch, rank, sample_ids)
        self._remember(epoch, built)
        self.trace_came()
