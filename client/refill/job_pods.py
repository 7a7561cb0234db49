"""Which pod does a rank ask, and what does that pod need from it before it answers?

The job is registered with the service, which names the pods; one of them is the rank's home. Pods are replaced and
become more or fewer meanwhile. Then the rank finds its home again, registers the job and reports what it has received.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

from refill.answer_checks import checked_job, checked_pods, read_as_of_a_pod
from refill.delivery_record import DeliveryRecord
from refill.errors import (
    JobLost,
    JobMoved,
    PodUnreachable,
    RankHeld,
    RecordsWanted,
    RefillError,
    RunEnded,
    UnknownJob,
)
from refill.goodbyes import Goodbye, says_goodbye
from refill.home_watch import EVERY_SECONDS, watch_home
from refill.own_life import has_ended, is_of_this_process, leaves_the_rank_to, own_life
from refill.patience import Patience
from refill.pod_channel import PodChannel, Wait
from refill.pod_link import UNIX, checked_url
from refill.protocol.incarnation import incarnation_of, line_of, moves_of, next_run
from refill.protocol.job_spec import JobSpec
from refill.protocol.rank_life import RankLife
from refill.run_start import RunStart
from refill.token_hosts import TOKEN_HOSTS_VARIABLE

__all__ = ["Attempt", "JobPods"]

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Attempt = Callable[[str, Wait], Answer]
"""One try; gets the URL of the pod to ask, and how long it may wait."""

_FOLLOW_AFTER_SECONDS = 2.0
"""After so long, the home may be a pod that is not wanted any more, and waits for others that do not talk to it."""
_FOLLOW_EVERY_SECONDS = 3.0
_REQUEST_SECONDS = 60.0
_PROBE_SECONDS = 5.0
_PROBES = 3
_PROBE_PAUSE_SECONDS = 0.5
_PODS_EVERY_LOOKS = 5
"""The pods that there are are asked for at every fifth look after the home."""
_TURNS = 4
"""A pod may need the job's registration, then the rank's report, and the job may have moved meanwhile."""
_RETRIED_STATUS = 503
_ANSWERED_BY_ITSELF = (UnknownJob, JobMoved, RecordsWanted, RunEnded)
"""The pod gets what it lacks, and is asked again; if that takes too many turns, later."""


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
        record: DeliveryRecord,
        channel: PodChannel,
        start: RunStart | None = None,
    ) -> None:
        self.service_url = checked_url(service_url)
        self.spec = spec
        self.rank = rank
        self.timeout_seconds = timeout_seconds
        self.record = record
        self.is_rank = True
        """False: it has asked for no sample so far, and has no record of what the rank has received."""
        self.start = start
        """None: what it asks for always goes on from before."""
        self._began_again = False
        """Whether it knows the job by its new run."""
        self._home = None if home is None else checked_url(home)
        self._home_is_given = home is not None
        self._channel = channel
        self._info: dict[str, Any] | None = None
        self._looks = 0
        self._known_unknown: dict[str, int] = {}
        self._watched_in = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_watched_in": 0}

    def of_rank(self, rank: int) -> JobPods:
        """As another rank sees them, for which this process asks, too. It has a record of its own."""
        info = self.info()
        other = JobPods.__new__(JobPods)
        other.__dict__.update(self.__getstate__())
        other.rank, other.record = rank, self.record.of_rank(rank)
        if not self._home_is_given:
            other._home = other._find_home(info["pods"])
        return other

    def info(self) -> dict[str, Any]:
        """What the pods say of the job; registers it the first time."""
        if self._info is None:
            self._registered(self.retried(self.service_url, self._register))
        elif self.start is not None and self.start.has_begun_again and not self._began_again:
            self.retried(self.service_url, self._begin_again)  # as another process of this object has
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
        return str(self.info()["incarnation"])

    @property
    def run(self) -> str | None:
        """Which run of the job's name this is; None: it has not been registered from here."""
        return None if self._info is None else line_of(self.incarnation)

    def asks_as_rank(self) -> None:
        """Fact: this process asks as the rank. So it is to be heard of from now on, though it was copied to here."""
        self.is_rank = True
        if self._watched_in != os.getpid() and self._info is not None and is_of_this_process(self._life()):
            self._watch_home()

    def look_after_home(self) -> None:
        """Register the job again at a home pod that was restarted, or at another one, and report what this rank has
        received, if that pod lacks the report. Renews the lease, too, if this process is the one that asks as the rank.
        A process that asks for no samples reports nothing: its report would say that the rank has received nothing."""
        self._looks += 1
        try:
            answer = self._once(None, self.calls("GET", f"ranks/{self.rank}"), Wait(_PROBE_SECONDS), register=True)
            with read_as_of_a_pod(self.home):
                self._unknown({str(rank): int(epoch) for rank, epoch in (answer.get("unknown_before") or {}).items()})
        except PodUnreachable:
            self._follow()
            raise
        if self._looks % _PODS_EVERY_LOOKS == 0:
            self._follow()  # a pod that is not wanted any more may answer for a while

    def _unknown(self, before: dict[str, int]) -> None:
        """Fact: it is not known any more what these ranks received in epochs before the one given for each."""
        for rank, epoch in before.items():
            if self._known_unknown.get(rank, 0) >= epoch:
                continue
            self._known_unknown[rank] = epoch
            log.warning(
                "job %s: pods lost their memory, and nobody can tell what rank %s had received in epochs up to %d: "
                "samples of it may come twice or not at all; receipts count them as unknown",
                self.spec.name,
                rank,
                epoch - 1,
            )
            if int(rank) == self.rank:
                self.record.is_unknown_before(epoch)

    def follow_moves(self) -> None:
        """Fact: the job has moved, as another process of this rank knows."""
        self.retried(self.service_url, self._register_again)

    def retried(self, url: str | None, attempt: Attempt[Answer], register: bool = True) -> Answer:
        """Try until it works, an error is final, or time is up.

        :param url: of the pod that is asked; None: the home, which is another one when the job has moved.
        :param register: whether the job is registered again at a pod that does not know it.
        """
        patience = Patience(self.rank, self.timeout_seconds)
        followed = 0.0
        while True:
            try:
                return self._once(url, attempt, patience.next_try(), register)
            except RefillError as error:
                if error.status != _RETRIED_STATUS and not (register and isinstance(error, _ANSWERED_BY_ITSELF)):
                    raise
                patience.failed(error, url or self.home)
                waited = patience.waited_seconds
                unsure = isinstance(error, PodUnreachable) or waited > _FOLLOW_AFTER_SECONDS
                if url is None and unsure and (not followed or waited - followed > _FOLLOW_EVERY_SECONDS):
                    followed = waited
                    self._follow()
                patience.pause(error)

    def calls(self, method: str, what: str, **content: Any) -> Attempt[dict[str, Any]]:
        """Makes one small request to the job, by the name that it has then."""
        return lambda pod, wait: self._channel.call(method, pod, self.data_path(what), wait, **content)

    def job_path(self, what: str = "") -> str:
        return f"/v1/jobs/{quote(self.spec.name, safe='')}{what and '/'}{what}"

    def data_path(self, what: str) -> str:
        """A path that names this registration of the job, and this process: pods refuse it when theirs is a later one,
        or the rank is another process."""
        incarnation = quote(self.incarnation, safe="")
        path = f"{self.job_path(what)}?incarnation={incarnation}&life={self._life().encode()}"
        start = self.start
        if start is None or self._began_again or not (start.is_anew or start.has_begun_again):
            return path
        return path + "&anew=true" + "&first=true" * start.asks_first

    def _once(self, url: str | None, attempt: Attempt[Answer], wait: Wait, register: bool) -> Answer:
        """One attempt, and others when the pod needs something first: the job's registration, the rank's report of what
        it has received, or word that the process that was this rank before has ended, or has started this one."""
        first: Attempt[None] | None = None
        for turn in range(_TURNS):
            try:
                if first is not None:
                    first(url or self.home, wait)
                return attempt(url or self.home, wait)
            except (UnknownJob, JobMoved):
                if not register or turn + 1 == _TURNS:
                    raise
                first = self._register_again
            except RunEnded:
                if turn + 1 == _TURNS:
                    raise
                first = self._begin_again
            except RecordsWanted:
                if turn + 1 == _TURNS or not self.is_rank:
                    raise
                first = self._report
            except RankHeld as error:
                holder = RankLife.decode(str(error.details.get("holder")))
                is_free = has_ended(holder) or leaves_the_rank_to(holder, self.record.made_in)
                if turn + 1 == _TURNS or not is_free:
                    raise
                first = partial(self._take_over, holder)
        raise AssertionError("the last turn returns or raises")

    def _register(self, url: str, wait: Wait) -> dict[str, Any]:
        params = {}
        if self._info is not None:
            known = self._info["incarnation"]
            # Another process of this rank may have followed the job further.
            params["incarnation"] = incarnation_of(line_of(known), max(moves_of(known), self.record.moves()))
            if "num_pods" in self._info:  # older pods do not say it
                params["pods"] = self._info["num_pods"]
        answer = self._channel.call("PUT", url, self.job_path(), wait, sent=self.spec.to_dict(), params=params)
        return checked_job(answer, url)

    def _registered(self, info: dict[str, Any]) -> None:
        self._info = checked_job(info, self.service_url)
        self._home = self._home or self._find_home(info["pods"])
        with read_as_of_a_pod(self.service_url):
            self._warn_of_memory(info)
        self._watch_home()
        self._will_say_goodbye()

    def _will_say_goodbye(self) -> None:
        life = self._life()
        if is_of_this_process(life) and self._home is not None:
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

    def _register_again(self, url: str, wait: Wait) -> None:
        """Register the job at a pod that does not know it. The pod restores it, or refuses."""
        again = self._register(url, wait)
        if self._info is None:
            return
        if line_of(str(again.get("incarnation"))) != line_of(self._info["incarnation"]):
            raise JobLost(
                f"job {self.spec.name} was ended on the pods and started again while it ran here: its epoch can't go "
                "on with every sample exactly once; end the job and start it again, or use another name",
                job=self.spec.name,
            )
        if moves_of(again["incarnation"]) < self.record.moves():
            raise PodUnreachable(f"{url} does not know yet that job {self.spec.name} has moved to other pods")
        before, self._info = self._info, again
        if again["incarnation"] != before["incarnation"]:
            log.warning("job %s goes on with %d pods, as there are now", self.spec.name, again["num_pods"])
        if again.get("pods", before["pods"]) != before["pods"] and not (
            self._home_is_given and self._answers(self.home)
        ):
            self._home = self._find_home(again["pods"])
        self._will_say_goodbye()

    def _begin_again(self, url: str, wait: Wait) -> None:
        """The run had ended, and this object begins a new one: it goes on by that one's name."""
        before = self.info() if self._info is None else self._info
        again = checked_job(self._channel.call("PUT", url, self.job_path(), wait, sent=self.spec.to_dict()), url)
        if self._began_again or line_of(again["incarnation"]) == line_of(before["incarnation"]):
            return  # by another thread; or not all pods know it yet
        if line_of(again["incarnation"]) != next_run(line_of(before["incarnation"])):
            raise JobLost(f"job {self.spec.name} was ended and started again while it ran here", job=self.spec.name)
        assert self.start is not None
        if not self.start.has_begun_again:
            log.warning(
                "job %s: the run before has ended, and this one starts without a state, so it is a new run; refill "
                "receipt %s EPOCH --run %.8s shows the receipts of the one before",
                self.spec.name,
                self.spec.name,
                before["incarnation"],
            )
        self.start.begins_again()
        self.record.begins_again(line_of(again["incarnation"]))
        self._info, self._began_again = again, True

    def _follow(self) -> None:
        """The home does not answer: perhaps there are fewer pods now, and it is not one of them."""
        info = self._info
        if info is None or self._home == self.service_url:
            return
        try:
            answer = self._channel.call("GET", self.service_url, "/v1/pods", Wait(_PROBE_SECONDS))
            pods = checked_pods(answer, self.service_url)
            if pods != info["pods"]:
                self._register_again(self.service_url, Wait(_REQUEST_SECONDS))
        except RefillError as error:
            if error.status != _RETRIED_STATUS:  # else they are asked again soon, as the home is
                raise

    def _report(self, url: str, wait: Wait) -> None:
        """Report what this rank has received to a pod that was restarted."""
        log.info("rank %d reports to %s, which was restarted, what it has received", self.rank, url)
        path = self.data_path(f"ranks/{self.rank}/records")
        report = self.record.report(self.rank, moves_of(self.incarnation))
        self._channel.call("PUT", url, path, wait, content=report)

    def _take_over(self, holder: RankLife, url: str, wait: Wait) -> None:
        """Take over the lease of a process that has ended, or has left the rank to this one: the pod need not wait."""
        log.info("rank %d goes on in place of %s", self.rank, holder)
        params = {"ended": holder.encode()}
        self._channel.call("PUT", url, self.data_path(f"ranks/{self.rank}/lease"), wait, params=params)

    def _find_home(self, pods: list[str]) -> str:
        """The pod that the rank's number falls to; the service itself when that pod can't be reached from here."""
        if not pods or self.service_url.startswith(UNIX):
            return self.service_url
        home = checked_url(pods[self.rank % len(pods)])
        if home == self.service_url:
            return home
        if not self._channel.may_ask(home, self.service_url):
            log.warning(
                "home pod %s is of another domain than %s, which is asked in its place: the token is not sent there "
                "unless %s lists that host or its domain",
                home,
                self.service_url,
                TOKEN_HOSTS_VARIABLE,
            )
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

    def _answers(self, pod: str) -> bool:
        try:
            self._channel.call("GET", pod, "/healthz", Wait(_PROBE_SECONDS))
        except RefillError:
            return False
        return True

    def _watch_home(self) -> None:
        self._watched_in = os.getpid()
        watch_home(self)

    def _life(self) -> RankLife:
        return own_life(self.record.made_in)
