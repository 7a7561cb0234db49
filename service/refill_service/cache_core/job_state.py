"""What does a pod know of a job that runs, beside what it has answered? How far its ranks are, and what each position
of an epoch asks for: from the seed, or as ranks posted it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from refill.errors import InvalidInput
from refill.protocol.job_spec import JobSpec
from refill_service.cache_core.admission import AsksAs
from refill_service.cache_core.epoch_order import ExplicitTraces, IdArray, KeyedTraces, Traces, check_ids
from refill_service.cache_core.posted_traces import PostedTraces
from refill_service.cache_core.rank_places import RankPlaces
from refill_service.cache_core.sample_mapping import ChunkLayout

_KEPT_EPOCHS = 3
"""The one before, for who asks again; the one that is asked for; the one that is loaded ahead."""


class JobState:
    """Knows how far the ranks of one job are, and what each position asks for, at one pod.

    :param incarnation: names this run of the job; equal on all pods.
    :param trace_bytes: what is set aside for posted traces.
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
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.ordinal = ordinal
        self.num_pods = num_pods
        self.incarnation = incarnation
        self.owner_bounds = layout.owner_bounds(num_pods)
        self.share = layout.share(ordinal, num_pods)
        self.ranks = RankPlaces(spec.world_size, self.asks_nothing if spec.order == "explicit" else None)
        self.posted = PostedTraces(
            layout.num_samples,
            trace_bytes,
            world_size=spec.world_size,
            num_epochs=spec.num_epochs,
        )
        self.trace_came: Callable[[], None] = lambda: None
        """Told when it may be known what the positions of one more epoch ask for."""
        self._traces: dict[int, Traces] = {}

    def samples_per_rank(self) -> int:
        """Positions of each rank in an epoch whose order is keyed."""
        everything = self.layout.num_samples
        return KeyedTraces(everything, self.spec.world_size, shuffle=False, drop_last=self.spec.drop_last).length(0)

    def has_epoch(self, epoch: int) -> bool:
        """Whether the job may ask for this epoch."""
        return self.spec.num_epochs == 0 or epoch < self.spec.num_epochs

    def asks_nothing(self, epoch: int, rank: int) -> bool:
        """Whether a rank posted an empty trace for this epoch."""
        return len(self.posted.of_epoch(epoch).get(rank, (None,))) == 0

    def known_traces(self, epoch: int) -> Traces | None:
        """The traces of an epoch if they are known now: explicit ones when all ranks have posted theirs."""
        if (found := self._traces.get(epoch)) is not None:
            return found
        if self.spec.order == "keyed":
            found = KeyedTraces.of_job(self.spec, epoch, self.layout.num_samples)
            if epoch > self.ranks.newest + 1:
                return found  # somebody is curious: no rank can ask for it yet
        else:
            posted = self.posted.of_epoch(epoch)
            if len(posted) < self.spec.world_size:
                return None
            found = ExplicitTraces(self.layout.num_samples, posted)
        self._remember(epoch, found)
        return found

    def _remember(self, epoch: int, traces: Traces) -> None:
        """Whoever names an epoch, earlier ones may run: only what can be made again is dropped, not what was posted."""
        self._traces[epoch] = traces
        for old in [known for known in self._traces if known <= epoch - _KEPT_EPOCHS]:
            del self._traces[old]

    def forget_traces(self, before_epoch: int) -> None:
        """Fact: nobody can ask for earlier epochs any more. What ranks posted goes only now."""
        for old in [known for known in (*self._traces, *self.posted.epochs) if known < before_epoch]:
            self._traces.pop(old, None)
            self.posted.forget(old)

    def is_posted(self, epoch: int, rank: int, sample_ids: IdArray) -> bool:
        """Raises :class:`InvalidInput` when it is another one."""
        before = self.posted.of_epoch(epoch).get(rank)
        if before is None:
            return False
        if not np.array_equal(before, sample_ids):
            raise self.posted_another(epoch, rank)
        return True

    def posted_another(self, epoch: int, rank: int) -> InvalidInput:
        return InvalidInput(f"rank {rank} posted another trace for epoch {epoch} of job {self.spec.name} before")

    def check_trace(self, rank: int, entries: IdArray) -> None:
        """Raises :class:`InvalidInput` for what a trace of the job can't ask for."""
        check_ids(self.layout.num_samples, rank, entries)

    def check_rank(self, asks: AsksAs) -> None:
        """Raises :class:`InvalidInput` for a rank that the job has not."""
        if asks.rank >= self.spec.world_size:
            raise InvalidInput(
                f"rank {asks.rank} asks, but job {self.spec.name} was registered for world_size {self.spec.world_size}"
            )

    @property
    def traced_epochs(self) -> list[int]:
        """Those for which ranks have posted traces."""
        return self.posted.epochs

    def put_trace(self, epoch: int, rank: int, sample_ids: IdArray, built: Traces | None = None) -> None:
        """Fact: a rank asks for these.

        :param built: those of all ranks, if it is the last one.
        """
        self.posted.put(epoch, rank, sample_ids)
        self._traces.pop(epoch, None)
        if built is not None:
            self._remember(epoch, built)
        self.trace_came()
