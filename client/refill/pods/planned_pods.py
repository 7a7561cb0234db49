"""Which pod does a rank of a planned job ask, and what does it bring it?

Its home; where that does not answer, the next pod does. A pod that does not know the job, or not by this plan, is
brought both by the rank that asks.
"""

from __future__ import annotations

import logging
import math
import os
import random
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from refill.build import tell_of_pods_version, versions_told
from refill.errors import InvalidInput, JobConflict, PodBusy, PodUnreachable, RankTaken, RefillError, UnknownJob
from refill.pods.answer_checks import checked_job, read_as_of_a_pod
from refill.pods.batch_groups import BatchGroups
from refill.pods.credentials import Credentials
from refill.pods.direct_pods import DirectPods
from refill.pods.given_home import OTHER_DOMAIN, check_home
from refill.pods.goodbyes import Goodbye, are_said, says_goodbye
from refill.pods.holder_door import is_wanted
from refill.pods.index_reads import DatasetIndex, count_samples
from refill.pods.own_life import is_free, is_of_this_process, own_life
from refill.pods.patience import Patience, check_timeouts, spread_seconds
from refill.pods.planned_place import DealtConnection, RankPlace, names_another
from refill.pods.pod_channel import PodChannel, Wait
from refill.pods.pod_link import UNIX, checked_url
from refill.pods.resume_state import ResumeState
from refill.protocol.job_spec import JobSpec
from refill.protocol.plan_memory import PlanMemory, asked_at_once
from refill.protocol.plan_settings import PlanSettings
from refill.protocol.rank_life import RankLife

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Attempt = Callable[[str, Wait], Answer]
"""One try; gets the URL of the pod to ask, and how long it may wait."""

PROBE_SECONDS = 1.5
"""A pod that is asked for a sign of life, and gives none for so long, is taken to be away."""
_NO_SIGN_SECONDS = 2.0
"""A pod of which nothing was heard for so long, over any connection, gives no sign of life."""
_SILENT_SECONDS = 0.5
"""After so long without an answer it is asked for one."""
_BACK_SECONDS = 5.0
_SAY_EVERY_SECONDS = 10.0
"""Between looks whether the first of a rank's pods is there again."""
_TURNS = 4
_KEPT_PATHS = 64


class PlannedPods(DealtConnection):
    """The pods of a planned job, as one rank asks them. Parameters and errors as those of :class:`PodConnection`.

    :param place, groups: as of :class:`DealtConnection`.
    """

    _ended: RankLife | None
    """Who was this rank before, and is gone. Of this process alone, as what follows."""
    _refused_by: RankLife | None
    """Who is this rank, as a pod has said last; other pods may not know it yet."""
    _is_admitted: bool
    """Whether its home has let this process ask as the rank since a pod was away last, or had lost what it knew."""

    def __init__(
        self,
        service_url: str,
        spec: JobSpec,
        rank: int,
        home: str | None,
        timeout_seconds: float,
        credentials: Credentials | None,
        connect_timeout_seconds: float,
        place: RankPlace | None,
        groups: BatchGroups | None,
    ) -> None:
        check_timeouts(timeout_seconds, connect_timeout_seconds)
        super().__init__(spec, rank, place, groups)
        self.service_url = checked_url(service_url)
        self.timeout_seconds = timeout_seconds
        self._given_home = None if home is None else checked_url(home)
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
        self._said_away_at: dict[str, float] = {}
        """When that was logged last, by pod."""
        self._away: set[str] = set()
        """Pods that did not answer, and are asked by way of others."""

    # The job, and its plan.

    def info(self) -> dict[str, Any]:
        return self._said_of_job() | {"samples_per_rank": self.dealing(-1).per_rank}

    def _said_of_job(self) -> dict[str, Any]:
        """By a pod; the job is registered the first time."""
        if self._info is None:
            are_said()
            self._registered(self._retried(self._register, of_home=False))
        assert self._info is not None
        return self._info

    @property
    def is_registered(self) -> bool:
        """Whether this process has registered the job."""
        return self._info is not None

    def num_samples(self) -> int:
        if self._info is not None:
            return int(self._info["num_samples"])
        count = partial(count_samples, self.spec.dataset, self._channel)
        return self._retried(count, registers=False, of_home=False)

    def index(self) -> DatasetIndex:
        retried = partial(self._retried, registers=False, of_home=False)
        return DatasetIndex(self.spec.dataset, self._channel, self.service_url, retried)

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
        settings, is_elsewhere = PlanSettings.from_dict(state.plan), state.dataset != self.spec.dataset
        if state.at_end and names_another(self.spec, settings):
            info = self.info()
            if is_elsewhere and info["fingerprint"] != settings.dataset:
                raise self._is_of_another(state)
            return False
        try:
            self.goes_by(state.plan)
        except JobConflict as error:
            if is_elsewhere and "version" in error.details:
                raise self._is_of_another(state, **error.details) from error
            raise
        return True

    def _is_of_another(self, state: ResumeState, **details: Any) -> JobConflict:
        return JobConflict(
            f"the state is of dataset {state.dataset!r}, and {self.spec.dataset!r} has other samples: end the job "
            f"(refill end), and give dataset={state.dataset!r}, or begin anew without the state",
            **details,
        )

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

    # Which pod is asked.

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
            except RankTaken as error:
                holder = RankLife.decode(str(error.details.get("holder")))
                if turn + 1 == _TURNS or not is_free(error, holder, self._made_in):
                    self._refused_by = holder
                    raise
                log.info("rank %d goes on in place of %s", self.rank, holder)
                self._ended = holder
                continue
            # Not above: an error of it would come with the one that is mended here.
            info = self._register(pod, wait)
            self._away.discard(pod)
            self._is_admitted = False
            self._registered(info)
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
            self._probes.call("GET", pod, "/healthz", Wait(PROBE_SECONDS))
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
        self._is_admitted = False
        if self._info is not None and pod == self.home and len(self._pods) > 1:
            self._turn += 1
            self._back_at = time.monotonic() + _BACK_SECONDS + self._spread()
            now = time.monotonic()
            if said and now > self._said_away_at.get(pod, -math.inf) + _SAY_EVERY_SECONDS:  # all may be away
                self._said_away_at[pod] = now
                log.warning("%s does not answer: rank %d asks %s", pod, self.rank, self.home)

    def _is_asked_by_others(self, pod: str) -> None:
        """Fact: a pod was asked for its part of a batch, and can't be."""
        self._back_at = max(self._back_at, time.monotonic() + self._spread())
        self._is_away(pod)

    def _look_who_is_back(self, now: float) -> None:
        if (self._turn or self._away) and now > self._back_at:
            self._back_at = now + _BACK_SECONDS + self._spread()
            self._away -= {pod for pod in list(self._away) if self._answers(pod)}
            if self._turn and self._answers(self._pods[0]):
                self._turn = 0

    # What it is brought.

    def _register(self, pod: str, wait: Wait) -> dict[str, Any]:
        # Another process of the rank may have gone on by a state's plan since this one was started.
        brought = None if self._plan is None or not self._place.may_go_by(self._plan) else self._plan
        body: dict[str, Any] = {"settings": self.spec.to_dict(), "plan": brought, "begun": self._place.has_begun}
        # A state's plan is not that of the run which this process has registered before.
        is_again = self._info is not None and brought in (None, self._info["plan"])
        body |= {"again": is_again, "since": self._info.get("since") if self._info is not None and is_again else None}
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
            goodbye, place = Goodbye(found[0], self.spec.name, self.rank, life, self.credentials), self._place
            says_goodbye(goodbye, self, lambda: place.has_asked)

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


@lru_cache(maxsize=_KEPT_PATHS)
def _path_of(job: str, what: str, **about: Any) -> str:
    """Most batches of an epoch are asked for by the same."""
    return f"/v1/jobs/{quote(job, safe='')}/planned{what and '/'}{what}?{urlencode(about)}"


def is_gone(error: Exception) -> bool:
    """Whether a pod that answers so, or not at all, is away. TLS that was begun and did not come to an end says nothing
    of that: it may have very many handshakes to do."""
    return isinstance(error, PodUnreachable) and not isinstance(error, PodBusy) and not error.details.get("handshake")
