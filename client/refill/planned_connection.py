"""What does a rank ask of pods whose order is planned? Positions of an epoch, of any pod that answers.

Which sample is at a position follows from the plan alone, and every request names it; or, where ranks have the order in
lists of their own, each request says which samples it wants. So any pod answers, also one that was started a moment
ago: it is brought the plan by the rank that asks. Where a rank's home does not answer, the next pod does. What has come
is reported now and then, for receipts; nothing hangs on that.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import multiprocessing.util
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import zip_longest
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import quote, urlencode

import numpy as np

from refill.answer_checks import checked_job, read_as_of_a_pod
from refill.batch_groups import BatchGroups
from refill.build import tell_of_pods_version, versions_told
from refill.credentials import Credentials
from refill.damage_log import DamageLog
from refill.direct_pods import DirectPods
from refill.errors import (
    InvalidInput,
    PodBusy,
    PodUnreachable,
    RankHeld,
    RankTaken,
    RefillError,
    UnknownJob,
)
from refill.given_home import OTHER_DOMAIN, check_home
from refill.goodbyes import Goodbye, says_goodbye
from refill.holder_door import is_wanted
from refill.home_watch import watch_home
from refill.index_reads import Fetch, column_blocks, count_samples, numbers_of_index, samples_by_ids
from refill.loop_digest import ReceivedHashes
from refill.orphans import ends_with_its_parent
from refill.own_life import has_ended, is_of_this_process, leaves_the_rank_to, own_life
from refill.patience import Patience, check_timeouts, spread_seconds
from refill.planned_place import DealtConnection, RankPlace, names_another
from refill.pod_channel import Asked, PodChannel, Wait
from refill.pod_link import UNIX, checked_url
from refill.protocol.class_plan import StoredSamples, chunks_and_shares
from refill.protocol.column_values import ColumnValues
from refill.protocol.job_spec import JobSpec
from refill.protocol.plan_memory import PlanMemory, asked_at_once
from refill.protocol.plan_settings import PlanSettings
from refill.protocol.position_set import spans_of
from refill.protocol.rank_life import RankLife
from refill.protocol.receipt_digest import DigestPart
from refill.protocol.sample_cut import SampleCut
from refill.protocol.wire_format import MAX_LISTED, BatchRequest, Int64Array
from refill.received_batch import Expected, ReceivedBatch, joined
from refill.resume_state import ResumeState
from refill.unreported import QUIET_SECONDS, REPORT_SECONDS, Unreported, digests_in_reports, in_reports

__all__ = ["AskedBatch", "PlannedConnection", "Wanted", "is_gone"]

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Attempt = Callable[[str, Wait], Answer]
"""One try; gets the URL of the pod to ask, and how long it may wait."""

_PROBE_SECONDS = 1.5
"""A pod that is asked for a sign of life, and gives none for so long, is taken to be away."""
_NO_SIGN_SECONDS = 2.0
"""A pod of which nothing was heard for so long, over any connection, gives no sign of life."""
_SILENT_SECONDS = 0.5
"""After so long without an answer it is asked for one."""
_HEARD_AGAIN_SECONDS = 1.0
"""After a pod has not answered in time that it has heard of the rank."""
_BACK_SECONDS = 5.0
"""Between looks whether the first of a rank's pods is there again."""
_LAST_REPORT_SECONDS, _LAST_REPORT_PAUSE_SECONDS = 2.5, 0.1
"""For this long a process that ends begins its last report again, if it was not taken."""
_TURNS = 4
_MOST_SILENT = 500
"""Pods that a request names: if more are away, others notice that soon enough."""
_OF_ONE_PROCESS = (
    "_process",
    "_epoch",
    "_lock",
    "_unreported",
    "_lists",
    "_of_ranks",
    "_ended",
    "_refused_by",
    "_watched",
    "_look_is_due",
    "_is_forgotten",
    "_is_admitted",
)
_LONG_SECONDS = 1e8
"""In place of how long ago a rank has left an epoch."""
_KEPT_PATHS = 64
_KEPT_LISTS = 2
"""Epochs."""
_with_unreported: set[PlannedConnection] = set()
"""A loop that has come to its end may let go of its connection: it stays until what came last is reported."""
os.register_at_fork(after_in_child=_with_unreported.clear)


class PlannedConnection(DealtConnection):
    """A rank's connection to the pods of a planned job. Parameters and errors as those of :class:`PodConnection`, whose
    place it takes. Picklable; the copy opens connections of its own.

    :param place, groups: as of :class:`DealtConnection`.
    :param hashes: shared by all copies; None: nobody counts what the loop has had.
    """

    look_every_seconds = QUIET_SECONDS
    report_every_seconds, quiet_seconds = REPORT_SECONDS, QUIET_SECONDS
    _unreported: Unreported
    _heard_at: float
    _epoch: int
    _watched: bool
    _is_admitted: bool
    _ended: RankLife | None
    """Who was this rank before, and is gone."""
    _refused_by: RankLife | None
    """Who is this rank, as a pod has said last; other pods may not know it yet."""

    def __init__(
        self,
        service_url: str,
        spec: JobSpec,
        rank: int,
        home: str | None,
        timeout_seconds: float,
        credentials: Credentials | None = None,
        allow_skipped: bool = False,
        connect_timeout_seconds: float = 2.0,
        *,
        goes_without_damaged: bool = False,
        place: RankPlace | None = None,
        groups: BatchGroups | None = None,
        hashes: ReceivedHashes | None = None,
        cut: SampleCut | None = None,
    ) -> None:
        check_timeouts(timeout_seconds, connect_timeout_seconds)
        super().__init__(spec, rank, place, groups)
        self.service_url = checked_url(service_url)
        self.timeout_seconds = timeout_seconds
        self.allow_skipped = allow_skipped
        self.cut = cut or SampleCut()
        self._is_for_another = False
        """Whether it asks for another rank than that of its process."""
        self._given_home = None if home is None else checked_url(home)
        self._goes_without_damaged = goes_without_damaged
        self._damage = DamageLog()
        self._hashes = None if spec.is_listed else hashes
        self._made_in = os.getpid()
        self.credentials = credentials or Credentials()
        held_for = spec.name if is_wanted(spec.world_size) else None
        self._channel = PodChannel(self.credentials, connect_timeout_seconds, held_for=held_for)
        self._probes = PodChannel(self.credentials, connect_timeout_seconds, held_for=held_for, is_quick=True)
        """Apart from requests that are under way."""
        self._info: dict[str, Any] | None = None
        self._plan: dict[str, Any] | None = None
        self._pods: list[str] = []
        """In the order in which this rank asks them."""
        self._turn = 0
        """How many of them were found away, one after another."""
        self._back_at = 0.0
        self._direct: DirectPods | None = None
        """None: its own pod is asked for everything."""
        self._away: set[str] = set()
        """Pods that did not answer, and are asked by way of others."""
        self._begin_process()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OF_ONE_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_process()

    # The job, and its plan.

    def info(self) -> dict[str, Any]:
        return self._said_of_job() | {"samples_per_rank": self.dealing(-1).per_rank}

    def _said_of_job(self) -> dict[str, Any]:
        """By a pod; the job is registered the first time."""
        if self._info is None:
            self._registered(self._retried(self._register, of_home=False))
        assert self._info is not None
        return self._info

    def num_samples(self) -> int:
        if self._info is not None:
            return int(self._info["num_samples"])
        count = partial(count_samples, self.spec.dataset, self._channel)
        return self._retried(count, registers=False, of_home=False)

    def goes_by(self, plan: dict[str, Any]) -> None:
        """Fact: the loop goes on from a state by this plan. Raises :class:`JobConflict` when pods know that other ranks
        go by another one."""
        settings = PlanSettings.from_dict(plan)
        self._place.goes_by(settings.plan_id)
        known, self._plan = self._plan, settings.to_dict()
        if self._info is None or known != self._plan:
            self._registered(self._retried(self._register, of_home=False))

    def keeps_plan_of(self, state: ResumeState) -> bool:
        """At the end of an epoch nothing of the next one has come. So a job that names other memory, shares or chunks
        than the state's plan begins the next epoch by a plan of its own: all ranks load a state of that step."""
        assert state.plan is not None
        if state.at_end and names_another(self.spec, PlanSettings.from_dict(state.plan)):
            self.info()
            return False
        self.goes_by(state.plan)
        return True

    def asks_in_batches(self, batch: int, workers: int = 0) -> None:
        if not self._place.at_once:
            super().asks_in_batches(batch, workers)
            if self._info is not None:
                self._warn_of_memory(self._info)

    def num_positions(self, epoch: int) -> int:
        assert self._info is not None
        return int(self._info["num_samples"])

    @property
    def plan(self) -> dict[str, Any]:
        self._said_of_job()
        assert self._plan is not None
        return self._plan

    @property
    def plan_id(self) -> str:
        return str(self._said_of_job()["plan_id"])

    @property
    def home(self) -> str:  # type: ignore[override]  # which nobody sets
        self._said_of_job()
        return self._pods[self._turn % len(self._pods)]

    # Samples.

    def batch(self, epoch: int, positions: Int64Array, sample_ids: Int64Array | None = None) -> ReceivedBatch:
        asked = self.begins_batch(epoch, positions, sample_ids)
        of_pods, left = self._of_their_pods(epoch, asked.wanted)
        parts: list[tuple[Int64Array, ReceivedBatch]] = []
        if of_pods:
            requests = [self.asked_of(pod, asked, places) for pod, places in of_pods]
            wait = self._watchful(Patience(self.rank, self.timeout_seconds).next_try())
            answers = self._channel.fetch_all(requests, wait)
            parts, failed = self.sorted_out(of_pods, answers)
            left = np.sort(np.concatenate([left, *failed]))
        return self.has_batch(asked, parts, left)

    def begins_batch(self, epoch: int, positions: Int64Array, sample_ids: Int64Array | None = None) -> AskedBatch:
        """Parameters as of :meth:`batch`, which this begins."""
        self._own_process()
        ends_with_its_parent()
        self._said_of_job()
        self._check_positions(epoch, positions)
        self._place.asks_in_batches(1)  # unless a loader has said more: from now on it must not change
        dealing = self.dealing(epoch)
        wanted = Wanted(dealing.positions(self.group, positions) % max(1, dealing.num_positions), sample_ids)
        return AskedBatch(epoch, positions, wanted, self.plan_id, {})

    def has_batch(
        self, asked: AskedBatch, parts: list[tuple[Int64Array, ReceivedBatch]], left: Int64Array
    ) -> ReceivedBatch:
        """Fact: these parts have come of a batch, each with the places ``(n,)`` of its samples. What is ``left`` is
        asked for here, of this rank's own pod."""
        epoch, places, asked_by = asked.epoch, asked.places, asked.plan_id
        if parts:
            self._place.goes_by(asked_by)
        if len(left):

            def ask(pod: str, wait: Wait) -> ReceivedBatch:
                nonlocal asked_by
                asked_by = self.plan_id  # another thread may learn meanwhile that another plan stands
                return self._channel.fetch(*self.asked_of(pod, asked, left, is_whole=True), wait)

            parts.append((left, self._retried(ask)))
            self._place.goes_by(asked_by)
        if len(places):
            self._place.asks(epoch, int(places.max()) + 1, len(places))
        received = joined(len(places), parts)
        self._refused_by = None
        if self._hashes is not None:
            self._hashes.came(asked_by, epoch, places, self.dealing(epoch), self.group, received.sample_ids)
        with self._lock:
            self._unreported.came(epoch, self._place.start(epoch), *self._had(epoch), *spans_of(places))
            _with_unreported.add(self)
        self._watch()
        return received

    def loop_has(self, epoch: int, first: int, end: int) -> None:
        if first >= end:
            return
        with self._lock:  # a worker that had it may be gone, and its last report with it
            self._unreported.came(epoch, self._place.start(epoch), *self._had(epoch), (first, end))
            _with_unreported.add(self)
        if self._hashes is None:
            return
        self._unreported.loop_has(epoch, self.dealing(epoch), self.group, first, end, self._hashes)

    def _had(self, epoch: int) -> list[tuple[int, int]]:
        """Spans of the rank's positions that lie in the state that its loop goes on from."""
        had = self._place.had(epoch)
        return [(0, had)] if had else []

    def had_before(
        self, epoch: int, parts: Sequence[DigestPart], last: int, parts_of_last: Sequence[DigestPart]
    ) -> None:
        self._unreported.goes_on_from(epoch, parts, self.dealing(epoch), self.group, last, parts_of_last)

    def had_of_list(self, epoch: int, had: int, length: int, digest: str) -> None:
        super().had_of_list(epoch, had, length, digest)
        if had:
            self._unreported.came(epoch, 0, (0, had))

    def digest_parts(self, epoch: int) -> list[DigestPart]:
        return self._unreported.digest_parts(epoch)

    def _watch(self) -> None:
        if not self._watched:
            self._watched = True
            self.is_watched(watch_home(self))

    def is_watched(self, look_is_due: threading.Event) -> None:
        """Fact: a thread of this process calls :meth:`look_after_home` now and then, and when this event is set."""
        self._look_is_due = look_is_due
        multiprocessing.util.Finalize(None, _report_last, args=(weakref.ref(self), os.getpid()), exitpriority=10)

    def _of_their_pods(self, epoch: int, wanted: Wanted) -> tuple[list[tuple[str, Int64Array]], Int64Array]:
        """Pods that have the samples in memory, with the places that each is asked for; and those of which this rank's
        own pod is asked."""
        is_first = epoch != self._epoch and not self._place.has_left_none(epoch)
        self._comes_to(epoch)
        # At first its own pod looks whether it has left anything out of another epoch, and asks the others for that,
        # unless this rank knows that it has not. Of samples that a list names it knows whose they are.
        if self._direct is None or is_first or wanted.sample_ids is not None:
            return [], np.arange(len(wanted.positions))
        of_pods = dict(self._direct.parts(epoch, wanted.positions))
        left = [of_pods.pop(pod) for pod in list(of_pods) if pod in self._away]
        if not left and list(of_pods) == [self.home]:
            return [], of_pods[self.home]
        if not self._is_admitted:  # others forget a rank that asks for nothing for a while
            self._retried(partial(self._is_heard, asks=True))
            self._is_admitted = True
        return list(of_pods.items()), np.sort(np.concatenate([np.arange(0), *left]))

    def _comes_to(self, epoch: int) -> None:
        """Fact: it asks for an epoch."""
        if 0 <= self._epoch < epoch:
            self._unreported.epoch_is_over()
            self._look_is_due.set()
        self._epoch = epoch

    def sorted_out(
        self, of_pods: list[tuple[str, Int64Array]], answers: Sequence[ReceivedBatch | RefillError]
    ) -> tuple[list[tuple[Int64Array, ReceivedBatch]], list[Int64Array]]:
        """What came of pods that were asked for these places, with its places; and the places of what did not. Raises
        what is wrong with the request."""
        parts: list[tuple[Int64Array, ReceivedBatch]] = []
        left: list[Int64Array] = []
        for (pod, places), answer in zip(of_pods, answers, strict=True):
            if isinstance(answer, ReceivedBatch):
                parts.append((places, answer))
                continue
            # Which process is the rank, its own pod decides: another one may have answered a second one in its place.
            is_for_home = isinstance(answer, UnknownJob) or (isinstance(answer, RankTaken) and pod != self.home)
            if answer.status != PodUnreachable.status and not is_for_home:
                raise answer
            left.append(places)
            if isinstance(answer, RankTaken):  # its own pod may not know it yet
                self._refused_by = RankLife.decode(str(answer.details.get("holder")))
            if is_gone(answer):
                log.warning("until %s answers, others are asked in its place: %s", pod, answer)
                self._back_at = max(self._back_at, time.monotonic() + self._spread())
                self._is_away(pod)
        return parts, left

    def asked_of(self, pod: str, asked: AskedBatch, places: Int64Array, *, is_whole: bool = False) -> Asked:
        """The request for some of a batch's samples.

        :param is_whole: for all that this rank's own pod does not see of it, too.
        """
        positions, ids = asked.wanted.at(places)
        body = BatchRequest(asked.epoch, self.group, positions, sample_ids=ids).encode()
        is_part = not is_whole and pod != self.home
        paths = {} if is_whole else asked.paths  # another plan may stand by then
        if is_part not in paths:
            paths[is_part] = self._batch_path(asked.epoch, is_part=is_part)
        return Asked(pod, paths[is_part], body, Expected(positions, ids))

    def _batch_path(self, epoch: int, *, is_part: bool = False) -> str:
        """:param is_part: of a batch of which this rank's own pod sees no more than its own part."""
        about = self._about_batch(epoch) | ({"part": "true"} if is_part else {})
        if self._away and self._direct is not None and not is_part:
            silent = [str(ordinal) for ordinal, url in enumerate(self._direct.urls) if url in self._away]
            about["silent"] = ",".join(silent[:_MOST_SILENT])
        return self._path("batch", **about)

    def _about_batch(self, epoch: int) -> dict[str, Any]:
        dealing = self.dealing(epoch)
        about: dict[str, Any] = {"ranks": dealing.num_ranks, "life": self._life().encode()}
        about |= {"batch": dealing.batch, "start": dealing.start}
        if self._groups.size > 1:
            about |= {"group": self._groups.size, "member": self._groups.member(self.rank)}
        if dealing.drop_last:
            about["drop_last"] = "true"
        if had := self._place.had(epoch):
            about["had"] = had
        if self.allow_skipped or self._place.has_left_none(epoch):
            about["allow_skipped"] = "true"
        if self._goes_without_damaged:
            about["damaged"] = "say"
        return about | self.cut.query() | self._about_others()

    def _about_others(self) -> dict[str, str]:
        """What it knows of other processes of its rank."""
        if self._ended is not None:
            return {"ended": self._ended.encode()}
        return {} if self._refused_by is None else {"refused_by": self._refused_by.encode()}

    def samples(self, sample_ids: Int64Array) -> ReceivedBatch:
        return samples_by_ids(sample_ids, partial(self._fetched, lambda: self._path("samples", **self.cut.query())))

    def lengths(self, num_samples: int) -> Int64Array:
        return numbers_of_index(num_samples, self._of_dataset("lengths"), self.home)

    def column(self, name: str, num_samples: int) -> Iterator[ColumnValues]:
        return column_blocks(num_samples, self._of_dataset(f"columns/{name}"), self.home)

    def _of_dataset(self, what: str) -> Fetch:
        return partial(self._fetched, lambda: f"{self._job_path(what)}?incarnation={self.plan_id}")

    def _fetched(self, path: Callable[[], str], body: bytes, expected: Expected) -> ReceivedBatch:
        self.info()
        return self._retried(lambda pod, wait: self._channel.fetch(pod, path(), body, expected, wait))

    def plan_order(self, epoch: int, num_samples: int) -> Int64Array:
        """The sample at each position of the plan's order of an epoch, of which lists are composed."""
        fetch = partial(self._fetched, lambda: self._path(f"epochs/{epoch}/order"))
        return numbers_of_index(num_samples, fetch, self.home)

    def stored_samples(self, lengths: Int64Array) -> StoredSamples:
        """Where samples lie by the plan, within whose classes lists are composed.

        :param lengths: ``(samples,)`` bytes of each sample of the dataset.
        """
        fetch = partial(self._fetched, lambda: self._path("chunks"))
        chunks, shares = chunks_and_shares(numbers_of_index(len(lengths), fetch, self.home))
        return StoredSamples(chunks, shares, lengths)

    def post_list(self, epoch: int, sample_ids: Int64Array, start: int = 0) -> None:
        """Say which samples this rank will ask for in an epoch, in which order, so that pods read ahead. Nothing else
        hangs on it.

        :param start: positions before it were had.
        """
        self._own_process()
        self.info()
        found = np.ascontiguousarray(sample_ids, dtype="<i8")
        posted = _PostedList(found, start, hashlib.blake2b(found.tobytes(), digest_size=16).hexdigest())
        with self._lock:
            self._lists[epoch] = posted
            for old in sorted(self._lists)[:-_KEPT_LISTS]:
                del self._lists[old]
        if not self._is_for_another:
            self._place.is_listed(epoch, len(found), posted.digest)
        for put in self._pieces(epoch, posted, self._channel):
            self._retried(put)
        self._watch()

    def _pieces(self, epoch: int, posted: _PostedList, channel: PodChannel) -> Iterator[Attempt[Any]]:
        """Of a list, to be posted one after another."""
        about = {"num_ranks": self.spec.num_groups, "length": len(posted.sample_ids), "start": posted.start}
        for first in range(posted.start, max(posted.start + 1, len(posted.sample_ids)), MAX_LISTED):
            piece = posted.sample_ids[first : first + MAX_LISTED].tobytes()
            what = f"epochs/{epoch}/ranks/{self.group}/list"

            def put(pod: str, wait: Wait, what: str = what, first: int = first, piece: bytes = piece) -> None:
                path = self._path(what, digest=posted.digest, first=first, **about)
                channel.call("PUT", pod, path, wait, content=piece)

            yield put

    def _post_again(self, known: Any) -> None:
        """Tried once at this time.

        :param known: the digests of this rank's lists that its home has, by epoch."""
        with self._lock:
            lost = {epoch: posted for epoch, posted in self._lists.items() if known.get(str(epoch)) != posted.digest}
        for epoch, posted in lost.items():
            for put in self._pieces(epoch, posted, self._probes):
                self._once(self.home, put, Wait(_PROBE_SECONDS), registers=True)

    # Facts for receipts and for those who watch.

    def goes_without(self, epoch: int, positions: Int64Array, sample_ids: Int64Array, why: list[RefillError]) -> None:
        self._damage.goes_without(self.spec.name, why)
        dealt = self._dealt_to(epoch, self._place.start(epoch))
        for pairs in in_reports(list(zip(positions.tolist(), sample_ids.tolist(), strict=True))):
            tell = partial(self._tell, self._channel, dealt | {"damaged": pairs})
            self._retried(tell)

    def report(self, data_wait_seconds: float, samples: int, num_bytes: int) -> None:
        seen = {"rank": self.rank, "data_wait_seconds": data_wait_seconds, "samples": samples, "bytes": num_bytes}
        path = f"{self._job_path('report')}?incarnation={self.plan_id}"
        self._channel.call("POST", self.home, path, Wait(_PROBE_SECONDS), sent=seen)

    def skipped(self, epoch: int, start: int, end: int) -> bool:
        what = f"epochs/{epoch}/ranks/{self.group}"
        answer = self._retried(
            lambda pod, wait: self._channel.call("GET", pod, self._path(what, start=start, end=end), wait)
        )
        return answer.get("skipped") is not None

    def epoch_counts(self, epoch: int) -> dict[str, Any]:
        path = self._job_path(f"epochs/{epoch}")
        return self._retried(lambda pod, wait: self._channel.call("GET", pod, path, wait), registers=False)

    def end_job(self) -> None:
        self.report_received()
        try:
            self._retried(
                lambda pod, wait: self._channel.call("DELETE", pod, self._job_path(), wait),
                registers=False,
                of_home=self._info is not None,
            )
        except UnknownJob:
            log.info("job %s had ended before", self.spec.name)

    def of_rank(self, rank: int) -> Self:
        self._own_process()
        self.info()
        if rank not in self._of_ranks:
            other = type(self).__new__(type(self))
            other.__setstate__(self.__getstate__())
            other.rank, other._hashes, other._is_for_another = rank, None, True
            self._of_ranks[rank] = other
        return self._of_ranks[rank]

    def look_after_home(self) -> None:
        """As a thread of each process that asks does now and then: reports what has come, says that the rank is there,
        and goes back to the first of its pods when that answers again."""
        now = time.monotonic()
        if self._unreported.is_due(self.report_every_seconds, self.quiet_seconds):
            self.report_received()
        if now - self._heard_at > self.report_every_seconds:
            self._heard_at = now
            self._says_that_it_is_there()
        if (self._turn or self._away) and now > self._back_at:
            self._back_at = now + _BACK_SECONDS + self._spread()
            self._away -= {pod for pod in list(self._away) if self._answers(pod)}
            if self._turn and self._answers(self._pods[0]):
                self._turn = 0

    def _says_that_it_is_there(self) -> None:
        home, first = self.home, self._pods[0]
        if home != first:  # that is late, perhaps, and another process of this rank may reach it first
            with contextlib.suppress(RefillError):
                self._is_heard(first)
        try:
            self._post_again(self._is_heard(home).get("lists") or {})
        except UnknownJob:  # what it was told is lost, and is told again
            self._unreported.may_be_lost()
            self._post_again({})
        except PodUnreachable:  # perhaps it is lost
            self._unreported.may_be_lost()
            self._heard_at += _HEARD_AGAIN_SECONDS - self.report_every_seconds
        except RefillError:  # it has heard of the rank, and whoever asks for samples is told what is wrong
            pass

    def _is_heard(self, pod: str, wait: Wait | None = None, *, asks: bool = False) -> dict[str, Any]:
        process = self.group * self._groups.size + self._groups.member(self.rank)
        about: dict[str, Any] = {"rank": process, "list_of": self.group, "life": self._life().encode()}
        is_first = pod == self._pods[0]
        if asks or (self._place.has_asked and (self._is_forgotten or not is_first)):
            about["asked"] = "true"
        if asks:
            about |= self._about_others()
        try:
            # While an answer is waited for, pods are asked for a sign of life over the other one.
            channel = self._channel if asks else self._probes
            answer = channel.call("GET", pod, self._path("", **about), wait or Wait(_PROBE_SECONDS))
        except PodUnreachable:
            self._is_forgotten |= is_first
            raise
        self._is_forgotten &= not is_first
        return answer

    def report_received(self) -> bool:
        """Tried once at this time; what was not taken is reported with what comes next. Returns whether all was."""
        try:
            self._report()
        except RefillError:
            return False
        return True

    def _report(self) -> None:
        taken = self._unreported.taken()
        try:
            for epoch, part in taken.left:
                names = ("num_ranks", "batch", "start", "drop_last", "rank")
                dealt = dict(zip(names, part.dealt, strict=True)) | {"epoch": epoch, "age_seconds": _LONG_SECONDS}
                self._tell_home_of(dealt, part.spans, [part])
            for epoch, parts in taken.digests.items():
                self._tell_home_of(self._dealt_to(epoch, self._place.start(epoch)), (), parts)
            for epoch, start, spans in taken.received:
                had = self._had(epoch) if start == self._place.start(epoch) else []
                self._tell_home_of(self._dealt_to(epoch, start), [*had, *spans], ())
        except RefillError:
            self._unreported.was_not_taken()
            _with_unreported.discard(self)  # whoever needs it still has it
            raise
        self._unreported.was_reported(taken)
        with self._lock:
            if not self._unreported:
                _with_unreported.discard(self)

    def report_last(self) -> None:
        """As the process ends. A pod that is busy is asked again; torch waits for a worker for five seconds."""
        ends = time.monotonic() + _LAST_REPORT_SECONDS
        with contextlib.suppress(RefillError):
            while self._unreported:
                try:
                    self._report()
                except PodUnreachable:
                    if time.monotonic() > ends:
                        raise
                    time.sleep(_LAST_REPORT_PAUSE_SECONDS)

    def _tell_home_of(
        self, dealt: dict[str, Any], spans: Sequence[tuple[int, int]], parts: Sequence[DigestPart]
    ) -> None:
        for some, of_loops in zip_longest(in_reports(spans), digests_in_reports(parts), fillvalue=()):
            self._tell_home(dealt | {"spans": some, "digests": [part.to_list() for part in of_loops]})

    def _tell_home(self, received: dict[str, Any]) -> None:
        """Tried once at each of this rank's pods."""
        tell = partial(self._tell, self._probes, received)
        for turn in range(len(self._pods)):
            pod = self.home
            try:
                self._once(pod, tell, Wait(_PROBE_SECONDS), registers=True)
                return
            except PodUnreachable as error:
                if not is_gone(error) or turn + 1 == len(self._pods):
                    raise
                self._is_away(pod, said=False)

    def _tell(self, channel: PodChannel, received: dict[str, Any], pod: str, wait: Wait) -> dict[str, Any]:
        return channel.call("PUT", pod, self._path("received"), wait, sent=received)

    def _dealt_to(self, epoch: int, start: int) -> dict[str, Any]:
        spec = self.spec
        about: dict[str, Any] = {"epoch": epoch, "rank": self.group, "num_ranks": spec.num_groups}
        about |= {"batch": self._batch_dealt(epoch), "start": start, "drop_last": spec.drop_last}
        about["age_seconds"] = self._unreported.age_seconds(epoch, start)
        if (listed := self.listed(epoch)) is not None:  # pods that were away have lost it
            about["listed"] = listed
        return about

    def listed(self, epoch: int) -> tuple[int, str] | None:
        if (posted := self._lists.get(epoch)) is not None:
            return len(posted.sample_ids), posted.digest
        return None if self._is_for_another else super().listed(epoch)

    # Which pod is asked, and what it is brought.

    def _retried(self, attempt: Attempt[Answer], *, registers: bool = True, of_home: bool = True) -> Answer:
        """Try until it works, an error is final, or time is up.

        :param registers: whether a pod that does not know the job is brought it.
        :param of_home: whether this rank's pods are asked, one after another; else the service.
        """
        if of_home:
            self._said_of_job()
        spread = spread_seconds(self.spec.world_size)
        patience = Patience(self.rank, self.timeout_seconds, spread, is_first=self._info is None)
        while True:
            pod = self.home if of_home else self.service_url
            try:
                return self._once(pod, attempt, self._watchful(patience.next_try()), registers=registers)
            except RefillError as error:
                if error.status != PodUnreachable.status and not (registers and isinstance(error, UnknownJob)):
                    raise
                patience.failed(error, pod)
                if of_home and is_gone(error):
                    self._is_away(pod)
                    if self._turn % len(self._pods):
                        continue  # the next one is asked at once
                patience.pause(error)

    def _once(self, pod: str, attempt: Attempt[Answer], wait: Wait, *, registers: bool) -> Answer:
        for turn in range(_TURNS):
            try:
                return attempt(pod, wait)
            except UnknownJob:
                if not registers or self._info is None or turn + 1 == _TURNS:
                    raise
                info = self._register(pod, wait)
                self._away.discard(pod)
                self._registered(info)
            except RankHeld as error:
                holder = RankLife.decode(str(error.details.get("holder")))
                is_free = has_ended(holder) or leaves_the_rank_to(holder, self._made_in)
                if turn + 1 == _TURNS or not is_free:
                    self._refused_by = holder
                    raise
                log.info("rank %d goes on in place of %s", self.rank, holder)
                self._ended = holder
        raise AssertionError("the last turn returns or raises")

    def _watchful(self, wait: Wait) -> Wait:
        """A pod that does not answer is asked for a sign of life, over another connection."""
        started = time.monotonic()

        def still_waits(pod: str) -> None:
            wait.still_waits(pod)
            if time.monotonic() - started > _SILENT_SECONDS and not self._answers(pod):
                raise PodUnreachable(f"{pod} gives no sign of life", url=pod)

        return Wait(wait.seconds, still_waits)

    def _answers(self, pod: str) -> bool:
        try:
            self._probes.call("GET", pod, "/healthz", Wait(_PROBE_SECONDS))
        except RefillError as error:
            if not error.details.get("handshake"):
                return False
            return any(channel.was_heard(pod, _NO_SIGN_SECONDS) for channel in (self._channel, self._probes))
        return True

    def _spread(self) -> float:
        """A pause, at random, so that not all ranks connect to a pod at once that has come back."""
        return random.uniform(0, spread_seconds(self.spec.world_size))

    def _is_away(self, pod: str, *, said: bool = True) -> None:
        """Fact: a pod was asked, and can't be. Several threads may find the same.

        :param said: whether it is worth a line in the log; what has come is reported when pods have ended, too.
        """
        self._away.add(pod)
        if self._info is not None and pod == self.home and len(self._pods) > 1:
            self._turn += 1
            self._back_at = time.monotonic() + _BACK_SECONDS + self._spread()
            if said:
                log.warning("%s does not answer: rank %d asks %s", pod, self.rank, self.home)

    def _register(self, pod: str, wait: Wait) -> dict[str, Any]:
        # Another process of the rank may have gone on by a state's plan since this one was started.
        brought = None if self._plan is None or not self._place.may_go_by(self._plan) else self._plan
        body: dict[str, Any] = {"settings": self.spec.to_dict(), "plan": brought, "begun": self._place.has_begun}
        body["again"] = self._info is not None
        body["at_once"] = self._place.at_once
        with versions_told(partial(self._channel.call, "GET", pod, "/healthz", wait)):
            answer = checked_job(self._channel.call("PUT", pod, self._job_path("planned"), wait, sent=body), pod)
        with read_as_of_a_pod(pod):
            plan = PlanSettings.from_dict(answer["plan"])
            if plan.plan_id != answer["plan_id"]:
                raise InvalidInput(f"its plan is {plan.plan_id}, and it says {answer['plan_id']}")
        return answer

    def _registered(self, info: dict[str, Any]) -> None:
        if self._place.has_begun:
            self._place.goes_by(info["plan_id"])
        if self._info is None:
            tell_of_pods_version(info)
            self._look_at_home(info)
            self._warn_of_memory(info)
        self._plan, self._info = info["plan"], info
        pods = [checked_url(url) for url in info["pods"]]
        mine = [*pods[self.rank % len(pods) :], *pods[: self.rank % len(pods)]] if pods else []
        if self.service_url.startswith(UNIX):
            mine = []
        mine = [pod for pod in mine if self._channel.may_ask(pod, self.service_url)]
        if self._given_home is not None:
            mine = [self._given_home] if self._may_ask_home(self._given_home) else []
        found = list(dict.fromkeys([*mine, self.service_url]))
        self._away &= {*found}
        if found != self._pods:
            # Pods are being replaced, and one that was found away a moment ago may let another two seconds pass.
            is_there = (turn for turn, pod in enumerate(found) if pod not in self._away)
            self._pods, self._turn = found, next(is_there, 0)
            # Who has nobody else to ask waits for the end of a handshake.
            self._channel.silent_seconds = _NO_SIGN_SECONDS if len(found) > 1 else None
        self._direct = None
        settings = PlanSettings.from_dict(self._plan)
        # Where samples are in the order of the dataset, it takes the index to know whose they are.
        if len(mine) == len(pods) > 1 and not settings.keeps_stored_order:
            self._direct = DirectPods(settings, info["share_sizes"], pods, self.home)
            self._channel.asks_pods(len(pods))
        if is_of_this_process(life := self._life()):
            self._watch()  # its loader workers come and go
            says_goodbye(Goodbye(found[0], self.spec.name, self.rank, life, self.credentials))

    def _look_at_home(self, info: dict[str, Any]) -> None:
        if (home := self._given_home) is None:
            return
        if self._may_ask_home(home):
            check_home(self._channel, home, self.service_url, self.spec.name, info)
        else:
            log.warning(OTHER_DOMAIN, home, self.service_url)

    def _may_ask_home(self, home: str) -> bool:
        return home.startswith(UNIX) or self._channel.may_ask(home, self.service_url)

    def _warn_of_memory(self, info: dict[str, Any]) -> None:
        """Whether the pods' memory holds what the loaders of all ranks ask for at once, beside the plan."""
        if self.rank or not self._place.at_once:
            return
        with read_as_of_a_pod(self.service_url):
            memory = PlanMemory.from_dict(info["plan_memory"])
            sample_bytes = info["total_bytes"] / max(1, info["num_samples"])
            asked = asked_at_once(self._place.at_once, self.spec.num_groups, sample_bytes, max(1, info["num_pods"]))
        if (lacks := memory.lacks(asked, info["total_bytes"])) is not None:
            log.warning("job %s: %s", self.spec.name, lacks)

    def _path(self, what: str, **about: Any) -> str:
        return _path_of(self.spec.name, what, plan=self.plan_id, **about)

    def _job_path(self, what: str = "") -> str:
        return f"/v1/jobs/{quote(self.spec.name, safe='')}{what and '/'}{what}"

    def _life(self) -> RankLife:
        return own_life(self._made_in)

    def _own_process(self) -> None:
        if self._process != os.getpid():
            self._begin_process()

    def _begin_process(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._lists: dict[int, _PostedList] = {}
        """By epoch, what this process has posted last."""
        self._unreported = Unreported()
        self._heard_at = 0.0
        self._is_forgotten = False
        """Whether its first pod may not know any more that this process is the rank."""
        self._is_admitted = False
        """Whether its home has let this process ask as the rank."""
        self._epoch = -1
        """The one that it has asked for last."""
        self._watched = False
        self._look_is_due = threading.Event()
        self._ended = self._refused_by = None
        self._of_ranks: dict[int, Self] = {}


class Wanted(NamedTuple):
    """What a batch asks for."""

    positions: Int64Array
    sample_ids: Int64Array | None = None

    def at(self, places: Int64Array) -> Wanted:
        return Wanted(self.positions[places], None if self.sample_ids is None else self.sample_ids[places])


class AskedBatch(NamedTuple):
    """A batch that is under way."""

    epoch: int
    places: Int64Array
    """Of this rank, ``(n,)``."""
    wanted: Wanted
    plan_id: str
    paths: dict[bool, str]
    """Of its first requests: of parts of it, and of all that its own pod has."""


class _PostedList(NamedTuple):
    """A rank's own list of an epoch, as it was posted: the samples from ``start`` on."""

    sample_ids: Int64Array
    start: int
    digest: str


@lru_cache(maxsize=_KEPT_PATHS)
def _path_of(job: str, what: str, **about: Any) -> str:
    """Most batches of an epoch are asked for by the same."""
    return f"/v1/jobs/{quote(job, safe='')}/planned{what and '/'}{what}?{urlencode(about)}"


def is_gone(error: Exception) -> bool:
    """Whether a pod that answers so, or not at all, is away. TLS that was begun and did not come to an end says nothing
    of that: it may have very many handshakes to do."""
    return isinstance(error, PodUnreachable) and not isinstance(error, PodBusy) and not error.details.get("handshake")


def _report_last(connection: weakref.ref[PlannedConnection], process: int) -> None:
    found = connection()
    if found is not None and process == os.getpid():
        found.report_last()
