"""What does a rank of a mixture ask of the job of one of its datasets? Positions of passes, as a member of one group.

All ranks of the mixture are one rank to such a job: each asks for some positions of a pass, and says which came. What
is asked of several jobs goes to a pod as one request, by :mod:`refill.pods.mixture_connection`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np

from refill.errors import JobConflict, RefillError
from refill.pods.answer_checks import checked_num_samples, read_as_of_a_pod
from refill.pods.batch_groups import BatchGroups
from refill.pods.patience import Patience
from refill.pods.planned_connection import AskedBatch, PlannedConnection, Wanted
from refill.pods.pod_channel import Asked, PodChannel, Wait
from refill.pods.received_batch import ReceivedBatch
from refill.protocol.dealing import Dealing
from refill.protocol.job_spec import JobSpec
from refill.protocol.mixture_order import MemberPlace
from refill.protocol.position_set import PositionSet, spans_of
from refill.protocol.wire_format import Int64Array

_LOOKED_AT = 4
"""Of positions that a loop may have left out."""
_MOST_SPANS = 1 << 12
"""Of what a process has received of a pass: what was reported beyond is forgotten. A batch leaves one."""
_REPORTS_APART = 8
"""So many datasets are reported as often as one; of more, all of them more rarely."""


class OfDataset(NamedTuple):
    """What pods say of one dataset of a mixture, before a job of it is registered."""

    num_samples: int
    sample_bytes: float
    job_memory_bytes: int
    """That one job may keep for itself on a pod."""
    most_memory_bytes: int
    """That a job can use there: all its samples are in memory then."""


class _Mixture(Protocol):
    """What a member has of the mixture that it belongs to."""

    spec: JobSpec
    names: list[str]
    channel: PodChannel
    probes: PodChannel

    @property
    def dealt(self) -> int: ...
    def watch(self) -> None: ...


class MemberConnection(PlannedConnection):
    """A rank's connection to the job of one dataset."""

    def __init__(self, mixture: _Mixture, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, groups=BatchGroups.in_a_row(mixture.spec.world_size), **named)
        # All are asked over the same connections, and looked after by the mixture.
        self._channel, self._probes, self._mixture = mixture.channel, mixture.probes, mixture
        times = max(1, len(mixture.names) // _REPORTS_APART)
        self.report_every_seconds, self.quiet_seconds = times * self.report_every_seconds, times * self.quiet_seconds
        self._had_spans: list[tuple[int, int]] = []
        """Of the pass that the loop goes on in, what it had before."""
        self.allow_skipped = True  # an epoch may end within a pass; what a loop leaves out is seen by the mixture

    def look_at(self) -> OfDataset:
        """What pods say of the dataset."""

        def look(pod: str, wait: Wait) -> OfDataset:
            answer = self._channel.call("GET", pod, "/v1/dataset", wait, params={"url": self.spec.dataset})
            count = checked_num_samples(answer, pod)
            with read_as_of_a_pod(pod):
                kept = int(answer["job_memory_bytes"])
                most = int(answer.get("most_memory_bytes", kept))  # which earlier pods do not say
                return OfDataset(count, answer["total_bytes"] / max(1, count), kept, most)

        return self._retried(look, registers=False, of_home=False)

    def _register(self, pod: str, wait: Wait) -> dict[str, Any]:
        """Where nobody has named the mixture's memory, each rank divides what pods say that there is. They may have
        said something else to other ranks; then the job keeps what it has."""
        try:
            return super()._register(pod, wait)
        except JobConflict as error:
            memory_bytes, differences = error.details.get("memory_bytes"), error.details.get("differences")
            is_of_memory = isinstance(differences, list) and [str(each)[:13] for each in differences] == [
                "memory_bytes:"
            ]
            if self._mixture.spec.memory_bytes or not is_of_memory or type(memory_bytes) is not int:
                raise
            self.spec = replace(self.spec, memory_bytes=memory_bytes)
            return super()._register(pod, wait)

    def dealing(self, epoch: int) -> Dealing:
        """One rank has all of a pass, as far as pods see. How many positions it is dealt together makes no difference
        then, so that this number can say which mixture it is."""
        return Dealing(self.num_positions(epoch), 1, self._mixture.dealt)

    def deals_pass(self, at: MemberPlace, left_out: Int64Array) -> None:
        """Fact: the loop goes on at this place of a pass. All before it was had, but for these positions ``(n,)``."""
        self.deals(at.number, 0, at.position)
        had = PositionSet()
        for first, end in pairwise([-1, *np.sort(left_out[left_out < at.position]).tolist(), at.position]):
            had.add(first + 1, end)
        self._had_spans = list(had)

    def _had(self, epoch: int) -> list[tuple[int, int]]:
        return self._had_spans if epoch == self._place.epoch else []

    def begins_at(self, epoch: int, positions: Int64Array) -> AskedBatch:
        """Fact: samples at these positions of a pass are asked for."""
        self._own_process()
        self.info()
        self._comes_to(epoch)
        return AskedBatch(epoch, positions, Wanted(positions), self.plan_id, {})

    def pods_of(self, asked: AskedBatch) -> tuple[list[tuple[str, Int64Array]], Int64Array]:
        """Whom to ask for which places of it; and those that are left to :meth:`has_batch`."""
        direct = self._direct
        if direct is None:
            return [(self.home, np.arange(len(asked.places)))], np.arange(0)
        of_pods = dict(direct.parts(asked.epoch, asked.wanted.positions))
        left = [of_pods.pop(pod) for pod in list(of_pods) if pod in self._away]
        return list(of_pods.items()), np.sort(np.concatenate([np.arange(0), *left]))

    def _report(self) -> None:
        super()._report()
        self._unreported.keep_last(_MOST_SPANS)

    def _dealt_to(self, epoch: int, start: int) -> dict[str, Any]:
        return {
            "epoch": epoch,
            "rank": 0,
            "num_ranks": 1,
            "batch": self._mixture.dealt,
            "start": start,
            "drop_last": False,
        }

    def fetch_together(self, requests: list[list[Asked]]) -> list[list[ReceivedBatch] | RefillError]:
        """Those of any datasets."""
        wait = self._watchful(Patience(self.rank, self.timeout_seconds).next_try())
        return self._channel.fetch_together(requests, wait)

    def goes_without_some(self, asked: AskedBatch, sample_ids: Int64Array, why: list[RefillError]) -> None:
        """As :meth:`goes_without`, of positions of a pass."""
        self.goes_without(asked.epoch, asked.places, sample_ids, why)

    def had_some(self, asked: AskedBatch) -> None:
        """Fact: these positions of a pass lie in the state that the loop goes on from."""
        self._unreported.came(asked.epoch, 0, *spans_of(asked.places))

    def has_left_out(self, asked: AskedBatch) -> bool:
        """Whether nobody has asked for some of these positions so far; some of many are looked at."""
        places = asked.places.tolist()
        some = places[:: max(1, len(places) // _LOOKED_AT)]
        return any(self.skipped(asked.epoch, place, place + 1) for place in some)

    def _watch(self) -> None:
        self._mixture.watch()
