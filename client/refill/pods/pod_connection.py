"""What does a rank ask of the pods of a live job, and what does a pod need from it before it answers?

The job is registered with the service, which names the pods; one of them is the rank's home. Each request is made until
it is answered or time is up. Who has received what is in the pods' memory alone: when a pod was restarted, whoever has
received something can't go on, and is told so.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, MutableSequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from refill.build import tell_of_pods_version, versions_told
from refill.errors import JobLost, RankTaken, RefillError, UnknownJob
from refill.pods.answer_checks import checked_job, read_as_of_a_pod
from refill.pods.credentials import Credentials
from refill.pods.damage_log import DamageLog
from refill.pods.given_home import OTHER_DOMAIN, check_home
from refill.pods.goodbyes import Goodbye, are_said, says_goodbye
from refill.pods.home_watch import EVERY_SECONDS, watch_home
from refill.pods.index_reads import DatasetIndex, column_blocks, count_samples, numbers_of_index, samples_by_ids
from refill.pods.own_life import is_free, is_of_this_process, own_life
from refill.pods.own_process import PerProcess, ends_with_its_parent
from refill.pods.patience import Patience, check_timeouts
from refill.pods.pod_channel import PodChannel, Wait
from refill.pods.pod_link import UNIX, checked_url
from refill.pods.received_batch import Expected, ReceivedBatch
from refill.protocol.column_values import ColumnValues
from refill.protocol.job_spec import JobSpec
from refill.protocol.rank_life import RankLife
from refill.protocol.wire_format import MAX_LABELS, MAX_SCORES, BatchRequest, Int64Array

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Attempt = Callable[[str, Wait], Answer]
"""One try; gets the URL of the pod to ask, and how long it may wait."""

_PROBE_SECONDS = 5.0
_PROBES = 3
_PROBE_PAUSE_SECONDS = 0.5
_TURNS = 3
"""A pod may need the job's registration, and word of the process that was the rank before."""
_RETRIED_STATUS = 503
_REPORT_SECONDS = 5.0


class RunOfRank:
    """Remembers the run of its job from which a rank has received something. All copies of a dataset object share it:
    loader workers register the job, too, and a run that none of them has received anything of can be left for another
    one.

    :param shared: a zero in memory that they share.
    """

    NUM_SHARED = 1

    def __init__(self, shared: MutableSequence[Any] | Any) -> None:
        self._shared = shared

    @property
    def has_begun(self) -> bool:
        return bool(self._shared[0])

    def is_of(self, incarnation: str) -> bool:
        """Whether something has come, and of this run."""
        return int(self._shared[0]) == _number_of(incarnation)

    def goes_by(self, incarnation: str) -> bool:
        """Fact: something has come of this run, here or before the state that the loop goes on from. False when
        something had come of another one."""
        if not self._shared[0]:
            self._shared[0] = _number_of(incarnation)
        return self.is_of(incarnation)


def _number_of(incarnation: str) -> int:
    """As memory that processes share can hold it."""
    return 1 + int(incarnation[:15], 16)


class PodConnection(PerProcess):
    """A rank's connection to its home pod. Picklable; the copy opens connections of its own.

    Raises errors of :mod:`refill.errors`: those of the pod as they are, everything else that can go wrong on the way
    as :class:`PodUnreachable`.

    :param service_url: any pod, or the service in front of them; asked to register the job.
    :param home: the URL of the pod to fetch batches from; None: the pod that the rank's number falls to, or the one
        behind ``service_url`` if that is a Unix socket.
    :param timeout_seconds: how long a request is tried again before its last error is raised; 0: tried once.
    :param credentials: None: those of the environment.
    :param allow_skipped: whether this rank may leave out positions below ones that it asks for.
    :param connect_timeout_seconds: how long looking up a pod's name may take, and then reaching its machine, for which
        all of its addresses are tried.
    :param goes_without_damaged: whether a batch comes without the samples that are damaged, which
        ``ReceivedBatch.damaged`` then names. Else that is an error.
    :param run: shared by all copies.
    """

    OF_ONE_PROCESS = ("_of_ranks", "_watched_in")
    look_every_seconds = EVERY_SECONDS
    _watched_in: int

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
        run: RunOfRank | None = None,
    ) -> None:
        check_timeouts(timeout_seconds, connect_timeout_seconds)
        self.allow_skipped = allow_skipped
        self._goes_without_damaged = goes_without_damaged
        self._damage = DamageLog()
        self.service_url = checked_url(service_url)
        self.spec = spec
        self.rank = rank
        self.timeout_seconds = timeout_seconds
        self.credentials = credentials or Credentials()
        self._run = run or RunOfRank([0] * RunOfRank.NUM_SHARED)
        self._made_in = os.getpid()
        self._home = None if home is None else checked_url(home)
        self._home_is_given = home is not None
        self._channel = PodChannel(self.credentials, connect_timeout_seconds)
        self._info: dict[str, Any] | None = None
        self._begin_process()

    # The job, and its run.

    def info(self) -> dict[str, Any]:
        """What the pods say of the job; registers it the first time."""
        if self._info is None:
            are_said()
            self._registered(self._retried(self.service_url, self._register))
        assert self._info is not None
        return self._info

    @property
    def home(self) -> str:
        """The pod that this rank's requests go to."""
        self.info()
        assert self._home is not None
        return self._home

    @property
    def incarnation(self) -> str:
        """The run of the job's name that this is."""
        return str(self.info()["incarnation"])

    def goes_on(self, incarnation: str, epoch: int) -> None:
        """Fact: the loop goes on within an epoch, from a state of this run. Raises :class:`JobLost` when pods have
        another one."""
        if self._info is None:
            register = partial(self._register, incarnation=incarnation)
            with self._in_epoch(epoch):
                self._registered(self._retried(self.service_url, register, register=False))
        if self.incarnation != incarnation:
            raise self.spec.lost(
                "it was registered anew since the state was saved, as happens without CacheDataset(..., resume=state)",
                epoch,
            )
        self._has_come(incarnation)

    def num_samples(self) -> int:
        """Of the dataset. The job need not be registered, and is not by this."""
        if self._info is not None:
            return int(self.info()["num_samples"])
        count = partial(count_samples, self.spec.dataset, self._channel)
        return self._retried(self.service_url, count, register=False)

    def index(self) -> DatasetIndex:
        """What reads the index, as long as no job is registered."""
        retried = partial(self._retried, self.service_url, register=False)
        return DatasetIndex(self.spec.dataset, self._channel, self.service_url, retried)

    # Samples.

    def batch(
        self, epoch: int, positions: Int64Array, while_waiting: Callable[[], None] | None = None
    ) -> ReceivedBatch:
        """The samples that answer positions of this rank, in their order.

        :param while_waiting: is called about once a second while nothing comes, and may raise.
        """

        asked_by = ""

        def fetch(home: str, wait: Wait) -> ReceivedBatch:
            nonlocal asked_by
            asked_by = self.incarnation

            def still_waits(pod: str) -> None:
                wait.still_waits(pod)
                if while_waiting is not None:
                    while_waiting()

            watched = Wait(wait.seconds, still_waits)
            return self._channel.fetch(home, self._batch_path(asked_by), body, Expected(positions), watched)

        self._own_process()
        ends_with_its_parent()
        self._is_there()
        body = BatchRequest(epoch, self.rank, positions).encode()
        with self._in_epoch(epoch):
            received = self._retried(None, fetch)
            self._has_come(asked_by)
        return received

    def _batch_path(self, incarnation: str) -> str:
        path = self._data_path("batch", incarnation)
        return (
            path
            + ("&allow_skipped=true" if self.allow_skipped else "")
            + ("&damaged=say" if self._goes_without_damaged else "")
        )

    def goes_without(self, epoch: int, positions: Int64Array, sample_ids: Int64Array, why: list[RefillError]) -> None:
        """Fact: this rank goes on without what came for these positions, since it is damaged. Receipts name it."""
        self._damage.goes_without(self.spec.name, why)
        body = np.concatenate([positions, sample_ids]).astype("<i8").tobytes()
        self._retried(None, self._calls("PUT", f"epochs/{epoch}/ranks/{self.rank}/damaged", content=body))

    def samples(self, sample_ids: Int64Array) -> ReceivedBatch:
        """Exactly these samples, outside of any epoch. In as many requests as pods want it split into."""
        return samples_by_ids(sample_ids, partial(self._fetched, "samples"))

    def _fetched(self, what: str, body: bytes, expected: Expected) -> ReceivedBatch:
        def fetch(home: str, wait: Wait) -> ReceivedBatch:
            return self._channel.fetch(home, self._data_path(what, self.incarnation), body, expected, wait)

        return self._retried(None, fetch)

    def lengths(self, num_samples: int) -> Int64Array:
        """Bytes of all samples of a dataset."""
        return numbers_of_index(num_samples, partial(self._fetched, "lengths"), self.home)

    def column(self, name: str, num_samples: int) -> Iterator[ColumnValues]:
        """Of all samples of a dataset, in blocks."""
        return column_blocks(num_samples, partial(self._fetched, f"columns/{name}"), self.home)

    def post_trace(self, epoch: int, sample_ids: Int64Array) -> None:
        """Say which samples this rank asks for in an epoch, in which order."""
        body = np.ascontiguousarray(sample_ids, dtype="<i8").tobytes()
        what = f"epochs/{epoch}/ranks/{self.rank}/trace"
        with self._in_epoch(epoch):
            self._tell(what, body)

    def report_scores(self, sample_ids: Int64Array, scores: NDArray[np.float32]) -> None:
        """Report to pods how important training finds samples, ``(n,)``."""
        for start in range(0, len(sample_ids), MAX_SCORES):
            ids, of_ids = sample_ids[start : start + MAX_SCORES], scores[start : start + MAX_SCORES]
            self._tell(f"ranks/{self.rank}/scores", ids.astype("<i8").tobytes() + of_ids.astype("<f4").tobytes())

    def _tell(self, what: str, body: bytes) -> None:
        """Have pods keep something of this rank; what they keep of a run is lost with it."""
        asked_by = ""

        def put(home: str, wait: Wait) -> None:
            nonlocal asked_by
            asked_by = self.incarnation
            self._channel.call("PUT", home, self._data_path(what, asked_by), wait, content=body)

        self.info()
        self._is_there()
        self._retried(None, put)
        self._has_come(asked_by)

    def drawn_from(self, epoch: int, num_samples: int) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """``(scores, cached)``, each ``(num_samples,)``: what all ranks draw an epoch from, as soon as all have come to
        draw it. The score of a sample that no rank has trained with is NaN."""
        with read_as_of_a_pod(self.home):
            scores, cached = np.empty(num_samples, dtype=np.float32), np.empty(num_samples, dtype=bool)
        for first in range(0, num_samples, MAX_LABELS):
            end = min(first + MAX_LABELS, num_samples)
            body = np.array([first, end], dtype="<i8").tobytes()
            expected = Expected(sample_ids=np.array([first], dtype=np.int64))
            payload = self._fetched(f"epochs/{epoch}/ranks/{self.rank}/scores", body, expected).payloads[0]
            count = end - first
            with read_as_of_a_pod(self.home):
                scores[first:end] = np.frombuffer(payload, dtype="<f4", count=count)
                bits = np.frombuffer(payload, dtype=np.uint8, offset=4 * count)
                cached[first:end] = np.unpackbits(bits, count=count)
        return scores, cached

    def report(self, data_wait_seconds: float, samples: int, num_bytes: int) -> None:
        """Report to the home pod what the loop has seen since the last report; tried once."""
        seen = {"rank": self.rank, "data_wait_seconds": data_wait_seconds, "samples": samples, "bytes": num_bytes}
        self._calls("POST", "report", sent=seen)(self.home, Wait(_REPORT_SECONDS))

    def of_rank(self, rank: int) -> PodConnection:
        """A connection of this process for another rank, which asks for nothing itself: its process is given what this
        one reads."""
        self._own_process()
        if rank not in self._of_ranks:
            other = copy(self)
            other.rank = rank
            if not self._home_is_given:
                other._home = other._find_home(self.info()["pods"])
            self._of_ranks[rank] = other
        return self._of_ranks[rank]

    def skipped(self, epoch: int, start: int, end: int) -> bool:
        """Whether this rank has left out some of the positions ``[start, end)`` of an epoch so far: in all its
        processes, those of earlier lives, too. False when the pods don't know."""
        path = self._job_path(f"epochs/{epoch}/ranks/{self.rank}")
        params = {"start": start, "end": end, "incarnation": self.incarnation}
        answer = self._retried(None, lambda pod, wait: self._channel.call("GET", pod, path, wait, params=params))
        return answer.get("skipped") is not None

    def epoch_counts(self, epoch: int) -> dict[str, Any]:
        """Counts of an epoch, of each pod and in sum: of this run of the job, also when it has ended. Who has not asked
        for anything yet registers nothing by that, and looks at the run that runs, or ended last."""
        path = self._job_path(f"epochs/{epoch}")
        run = self.incarnation if self._info is not None else None
        return self._retried(
            self.service_url if run is None else None,
            lambda pod, wait: self._channel.call("GET", pod, path, wait, params={"run": run} if run else {}),
            register=False,
        )

    def end_job(self) -> None:
        """End the job on all pods and free its memory; nothing happens when that was done before."""
        path = self._job_path()
        try:
            ended = self._retried(
                self.service_url,
                lambda pod, wait: self._channel.call("DELETE", pod, path, wait),
                register=False,
            )
            if warning := ended.get("warning"):
                log.warning("%s", warning)
        except UnknownJob:
            log.info("job %s had ended before", self.spec.name)

    # Which pod is asked, and what it needs.

    def look_after_home(self) -> None:
        """Renew the lease of this rank, whose loop may stand still: another process that calls itself the same is
        refused by it."""
        self._calls("GET", f"ranks/{self.rank}")(self.home, Wait(_PROBE_SECONDS))

    def _is_there(self) -> None:
        """Fact: this process asks as the rank. Pods are to hear of it from now on, though it was copied to here, and
        when it ends."""
        if self._watched_in != os.getpid() and self._info is not None and is_of_this_process(self._life()):
            self._watch()

    def _has_come(self, incarnation: str) -> None:
        """Fact: pods have given this rank something of a run, or keep something that it has said. Raises
        :class:`JobLost` when it has gone by another one before."""
        if not self._run.goes_by(incarnation):
            raise self.spec.lost("it was registered anew while it ran here")

    @contextmanager
    def _in_epoch(self, epoch: int) -> Iterator[None]:
        """Around what is asked of an epoch: :class:`JobLost` names it, though a pod that was restarted does not."""
        try:
            yield
        except JobLost as error:
            why = error.details.get("why")
            if not isinstance(why, str) or error.details.get("epoch") != -1:
                raise
            raise self.spec.lost(why, epoch) from error

    def _retried(self, url: str | None, attempt: Attempt[Answer], register: bool = True) -> Answer:
        """Try until it works, an error is final, or time is up.

        :param url: of the pod that is asked; None: the home.
        :param register: whether the job is registered again at a pod that does not know it.
        """
        if url is None:
            self.info()
        patience = Patience(self.rank, self.timeout_seconds, is_first=self._info is None)
        while True:
            try:
                return self._once(url, attempt, patience.next_try(), register)
            except RefillError as error:
                if error.status != _RETRIED_STATUS and not (register and isinstance(error, UnknownJob)):
                    raise
                patience.failed(error, url or self.home)
                patience.pause(error)

    def _calls(self, method: str, what: str, **content: Any) -> Attempt[dict[str, Any]]:
        """Makes one small request to the job, by the run that it is then."""
        return lambda pod, wait: self._channel.call(
            method, pod, self._data_path(what, self.incarnation), wait, **content
        )

    def _job_path(self, what: str = "") -> str:
        return f"/v1/jobs/{quote(self.spec.name, safe='')}{what and '/'}{what}"

    def _data_path(self, what: str, incarnation: str) -> str:
        """A path that names a run of the job, and this process: pods refuse it when theirs is another run, or the rank
        is another process."""
        return f"{self._job_path(what)}?incarnation={quote(incarnation, safe='')}&life={self._life().encode()}"

    def _once(self, url: str | None, attempt: Attempt[Answer], wait: Wait, register: bool) -> Answer:
        """One attempt, and others when the pod needs something first: the job's registration, or word that the process
        that was this rank before has ended, or has started this one."""
        first: Attempt[None] | None = None
        for turn in range(_TURNS):
            try:
                if first is not None:
                    first(url or self.home, wait)
                return attempt(url or self.home, wait)
            except (UnknownJob, JobLost) as error:
                # Of a run that nothing has come of, nothing is lost.
                is_lost = isinstance(error, JobLost) and (self._info is None or self._run.is_of(self.incarnation))
                if not register or turn + 1 == _TURNS or is_lost:
                    raise
                first = self._register_again
            except RankTaken as error:
                holder = RankLife.decode(str(error.details.get("holder")))
                if turn + 1 == _TURNS or not is_free(error, holder, self._made_in):
                    raise
                first = partial(self._take_over, holder)
        raise AssertionError("the last turn returns or raises")

    def _register(self, url: str, wait: Wait, incarnation: str | None = None) -> dict[str, Any]:
        """:param incarnation: that the job must have; None: the one that something has come of, if any has."""
        if incarnation is None and self._info is not None and self._run.is_of(self._info["incarnation"]):
            incarnation = self._info["incarnation"]
        params = {} if incarnation is None else {"incarnation": incarnation}
        with versions_told(partial(self._channel.call, "GET", url, "/healthz", wait)):
            answer = self._channel.call("PUT", url, self._job_path(), wait, sent=self.spec.to_dict(), params=params)
        found = checked_job(answer, url)
        with read_as_of_a_pod(url):
            _number_of(found["incarnation"])
        return found

    def _register_again(self, url: str, wait: Wait) -> None:
        """Register the job at a pod that does not know it: it was restarted, or the job has ended."""
        if self._info is not None:
            self._registered(self._register(url, wait))

    def _registered(self, info: dict[str, Any]) -> None:
        if self._run.has_begun and not self._run.is_of(info["incarnation"]):
            raise self.spec.lost("it was registered anew while it ran here")
        if self._info is None and self._home_is_given:
            assert self._home is not None
            check_home(self._channel, self._home, self.service_url, self.spec.name, info)
        before, self._info = self._info, info
        with read_as_of_a_pod(self.service_url):
            if before is None:
                tell_of_pods_version(info)
                self._warn_of_memory(info)
            has_moved = before is not None and before["pods"] != info["pods"] and not self._home_is_given
            if self._home is None or has_moved:
                self._home = self._find_home(info["pods"])
        self._watch()

    def _watch(self) -> None:
        assert self._home is not None
        if self._watched_in != os.getpid():
            self._watched_in = os.getpid()
            watch_home(self)
        if is_of_this_process(life := self._life()):
            goodbye, run = Goodbye(self._home, self.spec.name, self.rank, life, self.credentials), self._run
            says_goodbye(goodbye, self, lambda: run.has_begun)

    def _warn_of_memory(self, info: dict[str, Any]) -> None:
        """Whether its samples are spread well, if that is up to the pods."""
        if self.spec.policy == "exact":
            return
        has, good = info.get("chunks_in_memory"), info.get("good_chunks_in_memory")
        if has is not None and good is not None and has < good and self.rank == 0:
            log.warning(
                "job %s has memory for %d chunks of %d samples on pod %s, and below %d the shuffle suffers: end jobs "
                "that are over (refill jobs), give the pods more memory, or lower chunk_size",
                self.spec.name,
                has,
                info["chunk_size"],
                info["ordinal"],
                good,
            )

    def _take_over(self, holder: RankLife, url: str, wait: Wait) -> None:
        """Take over the lease of a process that has ended, or has left the rank to this one: the pod need not wait."""
        log.info("rank %d goes on in place of %s", self.rank, holder)
        self._calls("PUT", f"ranks/{self.rank}/lease", params={"ended": holder.encode()})(url, wait)

    def _find_home(self, pods: list[str]) -> str:
        """The pod that the rank's number falls to; the service itself when that pod can't be reached from here."""
        if not pods or self.service_url.startswith(UNIX):
            return self.service_url
        home = checked_url(pods[self.rank % len(pods)])
        if home == self.service_url:
            return home
        if not self._channel.may_ask(home, self.service_url):
            log.warning(OTHER_DOMAIN, home, self.service_url)
            return self.service_url
        for probe in range(_PROBES):
            try:
                self._channel.call("GET", home, "/healthz", Wait(_PROBE_SECONDS))
                return home
            except RefillError as error:
                if probe + 1 == _PROBES:
                    log.warning("home pod can't be reached from here, so %s is asked: %s", self.service_url, error)
                else:
                    time.sleep(_PROBE_PAUSE_SECONDS)  # it may just be starting
        return self.service_url

    def _life(self) -> RankLife:
        return own_life(self._made_in)

    def _begin_process(self) -> None:
        super()._begin_process()
        self._watched_in = 0
        self._of_ranks: dict[int, PodConnection] = {}
