"""Which pod does a rank ask, and what does that pod need from it before it answers?

The job is registered with the service, which names the pods; one of them is the rank's home. Who has received what is
in the pods' memory alone: when a pod was restarted, whoever has received something can't go on, and is told so.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, MutableSequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

from refill.answer_checks import checked_job, read_as_of_a_pod
from refill.build import tell_of_pods_version, versions_told
from refill.errors import JobLost, RankHeld, RefillError, UnknownJob
from refill.given_home import OTHER_DOMAIN, check_home
from refill.goodbyes import Goodbye, says_goodbye
from refill.home_watch import EVERY_SECONDS, watch_home
from refill.own_life import has_ended, is_of_this_process, leaves_the_rank_to, own_life
from refill.patience import Patience
from refill.pod_channel import PodChannel, Wait
from refill.pod_link import UNIX, checked_url
from refill.protocol.job_spec import JobSpec
from refill.protocol.rank_life import RankLife

__all__ = ["Attempt", "JobPods", "RunOfRank"]

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


class JobPods:
    """The pods, as one rank of a job sees them. Parameters as those of ``PodConnection``. Picklable."""

    look_every_seconds = EVERY_SECONDS

    def __init__(
        self,
        service_url: str,
        spec: JobSpec,
        rank: int,
        home: str | None,
        timeout_seconds: float,
        channel: PodChannel,
        run: RunOfRank | None = None,
    ) -> None:
        self.service_url = checked_url(service_url)
        self.spec = spec
        self.rank = rank
        self.timeout_seconds = timeout_seconds
        self._run = run or RunOfRank([0] * RunOfRank.NUM_SHARED)
        self._made_in = os.getpid()
        self._home = None if home is None else checked_url(home)
        self._home_is_given = home is not None
        self._channel = channel
        self._info: dict[str, Any] | None = None
        self._watched_in = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_watched_in": 0}

    def of_rank(self, rank: int) -> JobPods:
        """As another rank sees them, for which this process asks, too."""
        info = self.info()
        other = JobPods.__new__(JobPods)
        other.__dict__.update(self.__getstate__())
        other.rank = rank
        if not self._home_is_given:
            other._home = other._find_home(info["pods"])
        return other

    def info(self) -> dict[str, Any]:
        """What the pods say of the job; registers it the first time."""
        if self._info is None:
            self._registered(self.retried(self.service_url, self._register))
        assert self._info is not None
        return self._info

    @property
    def is_registered(self) -> bool:
        return self._info is not None

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

    def has_come(self, incarnation: str) -> None:
        """Fact: pods have given this rank something of a run, or keep something that it has said. Raises
        :class:`JobLost` when it has gone by another one before."""
        if not self._run.goes_by(incarnation):
            raise self.spec.lost("it was registered anew while it ran here")

    def goes_on(self, incarnation: str, epoch: int) -> None:
        """Fact: the loop goes on within an epoch, from a state of this run. Raises :class:`JobLost` when pods have
        another one."""
        if self._info is None:
            register = partial(self._register, incarnation=incarnation)
            with self.in_epoch(epoch):
                self._registered(self.retried(self.service_url, register, register=False))
        if self.incarnation != incarnation:
            raise self.spec.lost("it was registered anew since the state was saved", epoch)
        self.has_come(incarnation)

    @contextmanager
    def in_epoch(self, epoch: int) -> Iterator[None]:
        """Around what is asked of an epoch: :class:`JobLost` names it, though a pod that was restarted does not."""
        try:
            yield
        except JobLost as error:
            why = error.details.get("why")
            if not isinstance(why, str) or error.details.get("epoch") != -1:
                raise
            raise self.spec.lost(why, epoch) from error

    def is_there(self) -> None:
        """Fact: this process asks as the rank. Pods are to hear of it from now on, though it was copied to here, and
        when it ends."""
        if self._watched_in != os.getpid() and self._info is not None and is_of_this_process(self._life()):
            self._watch()

    def look_after_home(self) -> None:
        """Renew the lease of this rank, whose loop may stand still: another process that calls itself the same is
        refused by it."""
        self.calls("GET", f"ranks/{self.rank}")(self.home, Wait(_PROBE_SECONDS))

    def retried(self, url: str | None, attempt: Attempt[Answer], register: bool = True) -> Answer:
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

    def calls(self, method: str, what: str, **content: Any) -> Attempt[dict[str, Any]]:
        """Makes one small request to the job, by the run that it is then."""
        return lambda pod, wait: self._channel.call(
            method, pod, self.data_path(what, self.incarnation), wait, **content
        )

    def job_path(self, what: str = "") -> str:
        return f"/v1/jobs/{quote(self.spec.name, safe='')}{what and '/'}{what}"

    def data_path(self, what: str, incarnation: str) -> str:
        """A path that names a run of the job, and this process: pods refuse it when theirs is another run, or the rank
        is another process."""
        return f"{self.job_path(what)}?incarnation={quote(incarnation, safe='')}&life={self._life().encode()}"

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
            except RankHeld as error:
                holder = RankLife.decode(str(error.details.get("holder")))
                is_free = has_ended(holder) or leaves_the_rank_to(holder, self._made_in)
                if turn + 1 == _TURNS or not is_free:
                    raise
                first = partial(self._take_over, holder)
        raise AssertionError("the last turn returns or raises")

    def _register(self, url: str, wait: Wait, incarnation: str | None = None) -> dict[str, Any]:
        """:param incarnation: that the job must have; None: the one that something has come of, if any has."""
        if incarnation is None and self._info is not None and self._run.is_of(self._info["incarnation"]):
            incarnation = self._info["incarnation"]
        params = {} if incarnation is None else {"incarnation": incarnation}
        with versions_told(partial(self._channel.call, "GET", url, "/healthz", wait)):
            answer = self._channel.call("PUT", url, self.job_path(), wait, sent=self.spec.to_dict(), params=params)
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
            says_goodbye(Goodbye(self._home, self.spec.name, self.rank, life, self._channel.credentials))

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
        self.calls("PUT", f"ranks/{self.rank}/lease", params={"ended": holder.encode()})(url, wait)

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
