"""What does a rank ask of pods whose order is planned? Positions of an epoch, of any pod that answers.

Which sample is at a position follows from the plan alone, and every request names it; or, where ranks have the order in
lists of their own, each request says which samples it wants. So any pod answers, also one that was started a moment
ago. What has come is reported now and then, for receipts; nothing hangs on that.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import multiprocessing.util
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple, Self

import numpy as np

from refill.errors import PodUnreachable, RankTaken, RefillError, RequestTooLarge, UnknownJob
from refill.pods.batch_groups import BatchGroups
from refill.pods.credentials import Credentials
from refill.pods.damage_log import DamageLog
from refill.pods.home_watch import watch_home
from refill.pods.index_reads import Fetch, column_blocks, numbers_of_index, samples_by_ids
from refill.pods.loop_digest import ReceivedHashes
from refill.pods.own_life import is_of_this_process
from refill.pods.own_process import PerProcess, ends_with_its_parent
from refill.pods.patience import Patience
from refill.pods.planned_place import RankPlace
from refill.pods.planned_pods import PROBE_SECONDS, Attempt, PlannedPods, is_gone
from refill.pods.pod_channel import Asked, PodChannel, Wait
from refill.pods.received_batch import Expected, ReceivedBatch, joined
from refill.pods.unreported import QUIET_SECONDS, REPORT_SECONDS, Unreported, digests_in_reports, in_reports
from refill.protocol.class_plan import StoredSamples, chunks_and_shares
from refill.protocol.column_values import ColumnValues
from refill.protocol.job_spec import JobSpec
from refill.protocol.position_set import spans_of
from refill.protocol.rank_life import RankLife
from refill.protocol.receipt_digest import DigestPart
from refill.protocol.sample_cut import SampleCut
from refill.protocol.wire_format import MAX_LISTED, BatchRequest, Int64Array

log = logging.getLogger(__name__)

_HEARD_AGAIN_SECONDS = 1.0
"""After a pod has not answered in time that it has heard of the rank."""
_LAST_REPORT_SECONDS, _LAST_REPORT_PAUSE_SECONDS = 2.5, 0.1
"""For this long a process that ends begins its last report again, if it was not taken."""
_MOST_SILENT = 500
"""Pods that a request names: if more are away, others notice that soon enough."""
_LONG_SECONDS = 1e8
"""In place of how long ago a rank has left an epoch."""
_KEPT_LISTS = 2
"""Epochs."""
_last_reports_end: dict[int, float] = {}
"""By process: of all its connections together."""
_with_unreported: set[PlannedConnection] = set()
"""A loop that has come to its end may let go of its connection: it stays until what came last is reported."""
os.register_at_fork(after_in_child=_with_unreported.clear)


class PlannedConnection(PerProcess, PlannedPods):
    """A rank's connection to the pods of a planned job. Parameters and errors as those of :class:`PodConnection`, whose
    place it takes. Picklable; the copy opens connections of its own.

    :param place, groups: as of :class:`DealtConnection`.
    :param hashes: shared by all copies; None: nobody counts what the loop has had.
    """

    OF_ONE_PROCESS = (
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
    look_every_seconds = QUIET_SECONDS
    report_every_seconds, quiet_seconds = REPORT_SECONDS, QUIET_SECONDS
    _unreported: Unreported
    _heard_at: float
    _epoch: int
    _watched: bool

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
        super().__init__(
            service_url, spec, rank, home, timeout_seconds, credentials, connect_timeout_seconds, place, groups
        )
        self.allow_skipped = allow_skipped
        self.cut = cut or SampleCut()
        self._is_for_another = False
        """Whether it asks for another rank than that of its process."""
        self._goes_without_damaged = goes_without_damaged
        self._damage = DamageLog()
        self._hashes = None if spec.is_listed else hashes
        self._begin_process()

    def _registered(self, info: dict[str, Any]) -> None:
        super()._registered(info)
        if is_of_this_process(self._life()):
            self._watch()  # its loader workers come and go

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
        to_ask = [left] if len(left) else []
        while to_ask:
            some = to_ask.pop(0)

            def ask(pod: str, wait: Wait, some: Int64Array = some) -> ReceivedBatch:
                nonlocal asked_by
                asked_by = self.plan_id  # another thread may learn meanwhile that another plan stands
                return self._channel.fetch(*self.asked_of(pod, asked, some, is_whole=True), wait)

            try:
                parts.append((some, self._retried(ask)))
            except RequestTooLarge:  # an answer is bounded by the pods' memory, and a batch of large samples is not
                if len(some) < 2:
                    raise
                to_ask[:0] = np.array_split(some, 2)
                continue
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
        direct = self._direct  # another thread may register again
        if direct is None or is_first or wanted.sample_ids is not None:
            return [], np.arange(len(wanted.positions))
        of_pods = dict(direct.parts(epoch, wanted.positions))
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
            is_for_home |= isinstance(answer, RequestTooLarge)  # which is asked for a part at a time
            if answer.status != PodUnreachable.status and not is_for_home:
                raise answer
            left.append(places)
            if isinstance(answer, RankTaken):  # its own pod may not know it yet
                self._refused_by = RankLife.decode(str(answer.details.get("holder")))
            if is_gone(answer):
                log.warning("until %s answers, others are asked in its place: %s", pod, answer)
                self._is_asked_by_others(pod)
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
        if self._away and (direct := self._direct) is not None and not is_part:
            silent = [str(ordinal) for ordinal, url in enumerate(direct.urls) if url in self._away]
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
        posted = _PostedList(found, start, list_digest(found))
        with self._lock:
            self._lists.pop(epoch, None)
            self._lists[epoch] = posted
            while len(self._lists) > _KEPT_LISTS:
                del self._lists[next(iter(self._lists))]
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
                self._once(self.home, put, Wait(PROBE_SECONDS), registers=True)

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
        self._channel.call("POST", self.home, path, Wait(PROBE_SECONDS), sent=seen)

    def skipped(self, epoch: int, start: int, end: int) -> bool:
        what = f"epochs/{epoch}/ranks/{self.group}"
        answer = self._retried(
            lambda pod, wait: self._channel.call("GET", pod, self._path(what, start=start, end=end), wait)
        )
        return answer.get("skipped") is not None

    def epoch_counts(self, epoch: int) -> dict[str, Any]:
        path = self._job_path(f"epochs/{epoch}")
        return self._retried(
            lambda pod, wait: self._channel.call("GET", pod, path, wait),
            registers=False,
            of_home=self._info is not None,  # else it would register the job
        )

    def end_job(self) -> None:
        self.report_received()
        try:
            ended = self._retried(
                lambda pod, wait: self._channel.call("DELETE", pod, self._job_path(), wait),
                registers=False,
                of_home=self._info is not None,
            )
            if warning := ended.get("warning"):
                log.warning("%s", warning)
        except UnknownJob:
            log.info("job %s had ended before", self.spec.name)

    def of_rank(self, rank: int) -> Self:
        self._own_process()
        self.info()
        if rank not in self._of_ranks:
            other = copy(self)
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
        self._look_who_is_back(now)

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
            answer = channel.call("GET", pod, self._path("", **about), wait or Wait(PROBE_SECONDS))
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
            start = max((part.start for _, part in taken.left), default=0)
            for epoch, part in sorted(taken.left, key=lambda each: each[1].start, reverse=True):
                names = ("num_ranks", "batch", "start", "drop_last", "rank")
                if part.start == start:  # before that it was dealt in other ways
                    dealt = dict(zip(names, part.dealt, strict=True)) | {"epoch": epoch, "age_seconds": _LONG_SECONDS}
                self._tell_home_of(dealt, part.spans if part.start == start else (), [part])
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

    def report_last(self, ends: float | None = None) -> None:
        """As the process ends. A pod that is busy is asked again; torch waits for a worker for five seconds.

        :param ends: when it gives up, by the monotonic clock; None: after a while.
        """
        ends = time.monotonic() + _LAST_REPORT_SECONDS if ends is None else ends
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
                self._once(pod, tell, Wait(PROBE_SECONDS), registers=True)
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

    def _begin_process(self) -> None:
        super()._begin_process()
        self._lock = threading.Lock()
        self._lists: dict[int, _PostedList] = {}
        """By epoch, what this process has posted last."""
        self._unreported = Unreported()
        self._heard_at = 0.0
        self._is_forgotten = False
        """Whether its first pod may not know any more that this process is the rank."""
        self._is_admitted = False
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


def list_digest(sample_ids: Int64Array) -> str:
    """Of a rank's list ``(n,)``, 16 bytes in hexadecimal digits."""
    return hashlib.blake2b(sample_ids.astype("<i8", copy=False).tobytes(), digest_size=16).hexdigest()


def _report_last(connection: weakref.ref[PlannedConnection], process: int) -> None:
    found = connection()
    if found is not None and process == os.getpid():
        found.report_last(_last_reports_end.setdefault(process, time.monotonic() + _LAST_REPORT_SECONDS))
