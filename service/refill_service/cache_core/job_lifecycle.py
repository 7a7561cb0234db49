"""What becomes of a job at one pod: a new one, one to restore, one to be moved, or none? Facts come in, orders go out.

    NEW          registered; no rank has asked for anything
    RUNNING      requests are answered
    RECOVERING   the pod was restarted while the job ran, and has yet to learn what it had answered
    MOVING       as that, of a job that ran on another number of pods: this one learns it for all
    CLOSED       ended, or let go of

``how_to_register``, ``how_to_begin`` and ``how_to_move`` decide for a job that the pod does not have: from what its
journal says, the name (:mod:`refill.protocol.incarnation`) that a client or a pod brings, and what other pods know.
``JobLife`` is the state of a job that it has. :mod:`refill_service.membership` carries it out; so a bug in a move or a
recovery is a list of facts that a test replays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from refill.errors import InvalidInput, JobConflict, JobLost, PodUnreachable, RefillError
from refill.protocol.incarnation import incarnation_of, is_later, line_of, moves_of, next_run, same_line
from refill.protocol.job_spec import JobSpec
from refill.protocol.records import Kind, Record
from refill_service.cache_core.rank_places import NOT_BEGUN, RankPlaces
from refill_service.cache_core.unknown_deliveries import UnknownDeliveries

__all__ = [
    "AskPeers",
    "Begin",
    "JobLife",
    "JournalFound",
    "KnownJob",
    "Learned",
    "Phase",
    "Register",
    "Restore",
    "RunAtPod",
    "StartAgain",
    "Wait",
    "how_to_begin",
    "how_to_move",
    "how_to_register",
    "how_to_start_again",
    "newest_known",
]


class Phase(Enum):
    NEW = "new"
    RUNNING = "running"
    RECOVERING = "recovering"
    MOVING = "moving"
    CLOSED = "closed"


@dataclass(frozen=True)
class JournalFound:
    """What the pod's own journal says of a job."""

    incarnation: str
    num_pods: int
    whole: bool = True
    """Whether nothing that was delivered can be missing."""


@dataclass(frozen=True)
class KnownJob:
    """What a pod knows of a job, be it from before a restart. Pods ask each other for it: the fields are wire names."""

    incarnation: str
    holder: str = ""
    begun: bool = True
    idle: bool = True
    running: bool = True
    """The pod has the job itself; False: only a journal of it."""
    world_size: int = 1
    knows: bool = True
    """Whether that pod has the records of what ranks have received, now or as soon as it has recovered."""
    ranks_alive: int = 0
    """Ranks whose home it is and whose lease is not over."""
    newest: int = NOT_BEGUN
    """The latest epoch that a rank has asked for, as far as that pod knows."""
    spec: dict[str, Any] | None = None
    """The job's settings; None: it does not say."""

    def check_settings(self, spec: JobSpec) -> None:
        """Raises :class:`JobConflict` when somebody with other settings would have this job."""
        if self.spec is not None:
            check_same_settings(spec.name, JobSpec.from_dict(self.spec).differences(spec), here=self.running)

    def to_dict(self) -> dict[str, Any]:
        return vars(self).copy()

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> KnownJob:
        """Raises :class:`RefillError` for what no pod says."""
        facts = {name: value for name, value in given.items() if name in cls.__dataclass_fields__}
        kinds = {"incarnation": str, "holder": str, "world_size": int, "ranks_alive": int, "newest": int}
        for name, kind in kinds.items():
            if not isinstance(facts.get(name, kind()), kind):
                raise RefillError(f"a pod says of a job, but not as pods do: its {name} is {facts[name]!r:.100}")
        if "incarnation" not in facts:
            raise RefillError("a pod says of a job, but not as pods do: it names no incarnation")
        return cls(**facts)


def newest_known(known: Sequence[KnownJob]) -> KnownJob | None:
    """The one to go on with, of what pods know of a name: a pod may have missed that another run of it has begun."""
    lines = {line_of(each.incarnation) for each in known}
    newest = [each for each in known if next_run(line_of(each.incarnation)) not in lines]
    return max(newest, key=lambda each: (each.running, moves_of(each.incarnation)), default=None)


class Register(Enum):
    """Where a registration that a client asks for is made."""

    EVERYWHERE = "at pod 0, here, and at the others"
    HERE = "here: other pods have it"
    HERE_AFTER_ASKING = "here, after the others were asked which token owns it"
    MOVE = "as one that ran on other pods"


def how_to_register(
    here: JobLife | None,
    journal: JournalFound | None,
    num_pods: int,
    brought: str | None,
    brought_num_pods: int | None,
) -> Register:
    """A client registers a job.

    :param here: the job as it is at this pod.
    :param num_pods: the number of pods that there are now.
    :param brought: the incarnation that the client has of the job already; None: it has none.
    :param brought_num_pods: the number of pods on which that one ran, as far as the client knows.
    """
    if here is not None and not (brought is not None and is_later(brought, here.incarnation)):
        if brought is None or not here.moves:
            return Register.EVERYWHERE
        return Register.MOVE if here.recovering else Register.HERE  # perhaps pod 0 has forgotten about it, too
    if brought is None:
        return Register.EVERYWHERE
    enough = journal is not None and journal == JournalFound(brought, num_pods, whole=True)
    if brought_num_pods not in (None, num_pods) or (moves_of(brought) and not enough):
        return Register.MOVE
    return Register.HERE_AFTER_ASKING


class AskPeers(Enum):
    """Order: ask the others what they know of the job, and decide again."""

    WHO_HAS_IT = 1


@dataclass(frozen=True)
class Begin:
    """Order: make the job here.

    :param incarnation: empty: a new one.
    :param from_journal: whether the pod's journal is of this job.
    :param ran_before: whether the job ran before the pod had it, so that what was answered has to be restored first.
    :param moving: whether this pod learns for all of them what ranks have received.
    """

    incarnation: str
    from_journal: bool
    ran_before: bool
    moving: bool = False


def how_to_begin(
    name: str,
    journal: JournalFound | None,
    num_pods: int,
    named: str,
    *,
    begun: bool,
    names_jobs: bool,
    elsewhere: KnownJob | AskPeers | None = AskPeers.WHO_HAS_IT,
) -> Begin | AskPeers:
    """A pod is asked for a job that it does not have.

    :param named: the incarnation, as another pod or a client names it; empty: not named.
    :param begun: whether ranks have asked for samples already: then a pod that does not have the job has lost it.
    :param names_jobs: whether this is the pod that names new jobs.
    :param elsewhere: what another pod knows of the job; None: no other knows it.

    Raises :class:`JobLost` when the job ran on another number of pods, and no pod knows whether it has moved.
    """
    if journal is not None and named not in ("", journal.incarnation):
        journal = None  # of an earlier job of that name
    unclear = names_jobs if journal is None else journal.num_pods != num_pods
    if not named and unclear:
        if isinstance(elsewhere, AskPeers):
            return elsewhere
        if elsewhere is not None and (journal is None or is_later(elsewhere.incarnation, journal.incarnation)):
            named, begun, journal = elsewhere.incarnation, elsewhere.begun or journal is not None, None
    if journal is None:
        return Begin(named, from_journal=False, ran_before=begun)
    if journal.num_pods != num_pods:
        raise JobLost(
            f"job {name} ran on {journal.num_pods} pods, and there are {num_pods} now: end it "
            f"(DELETE /v1/jobs/{name}) and begin the epoch anew",
            job=name,
        )
    return Begin(journal.incarnation, from_journal=True, ran_before=True)


def how_to_move(
    name: str, journal: JournalFound | None, brought: str, elsewhere: Sequence[KnownJob], journal_is_enough: bool
) -> Begin:
    """Pod 0 is asked to go on with a job that ran on another number of pods, or that moved and was forgotten by all.

    :param brought: the incarnation that the client has of the job.
    :param elsewhere: what the other pods know of it; all have answered.
    :param journal_is_enough: whether the journal has all that ranks received, for as many pods as there are now.

    Raises :class:`JobLost` when another job of that name runs, and :class:`InvalidInput` when ranks are alive in this
    one, which no pod has ever called so: it must not move by what somebody has made up.
    """
    known = list(elsewhere)
    if journal is not None:
        known.append(KnownJob(journal.incarnation, running=False, knows=journal_is_enough))
    of_line = [each for each in known if same_line(each.incarnation, brought)]
    # One that no rank has asked for anything may be of somebody who only looks, and came first.
    if any(each.running and each.begun for each in known if each not in of_line):
        raise is_another(name)
    alive = sum(each.ranks_alive for each in of_line if each.running)
    # One move may be known to nobody else: it was taken back before another rank had heard of it.
    if alive and all(moves_of(brought) > moves_of(each.incarnation) + 1 for each in of_line):
        raise InvalidInput(
            f"no pod knows job {name} as {brought}, and {alive} of its ranks are alive under another name"
        )
    moves = max([moves_of(each.incarnation) for each in of_line] + [moves_of(brought)])
    newest = incarnation_of(line_of(brought), moves)
    from_journal = journal is not None and same_line(journal.incarnation, brought)
    if any(each.knows and each.incarnation == newest for each in of_line):
        return Begin(newest, from_journal, ran_before=True)
    return Begin(incarnation_of(line_of(brought), moves + 1), from_journal, ran_before=True, moving=True)


@dataclass(frozen=True)
class RunAtPod:
    """What a pod knows of whether a run has ended. Pods ask each other for it: the fields are wire names."""

    finished: bool
    """Whether all ranks are in the newest epoch, and have had all that this pod has of it and was sent for it."""
    ranks_in_run: int
    """Ranks whose home it is, whose lease is not over and that do not ask anew."""
    others_may_be: bool = False
    """The pod was restarted a moment ago: ranks that are alive may not have been heard since."""


class StartAgain(Enum):
    NEW_RUN = "the run has ended"
    WAIT = "it ends if the ranks that were heard lately are gone"
    GO_ON = "it has not ended: the same requests get the same samples"


def how_to_start_again(known: Sequence[RunAtPod], *, may_wait: bool) -> StartAgain:
    """A process that goes on from no state asks for an epoch that its rank has been in.

    :param known: what each pod knows.
    :param may_wait: whether the ranks that are heard may still turn out to be gone.
    """
    if not all(each.finished for each in known):
        return StartAgain.GO_ON
    if any(each.others_may_be for each in known):
        return StartAgain.WAIT
    if any(each.ranks_in_run for each in known):
        return StartAgain.WAIT if may_wait else StartAgain.GO_ON
    return StartAgain.NEW_RUN


def is_another(name: str) -> JobLost:
    """The error for a request that means an earlier job of that name."""
    return JobLost(
        f"job {name} was ended or lost by the pods and was registered again since: its epoch can't go on with "
        f"every sample exactly once; end the job and start it again (DELETE /v1/jobs/{name}), or use another name",
        job=name,
    )


def check_same_settings(name: str, differences: list[str], *, here: bool) -> None:
    """Raises :class:`JobConflict` when a job is to be registered with other settings than it has.

    :param here: it runs, and is no journal of before a restart.
    """
    if differences:
        was = "was registered before with other settings" if here else "ran before with other settings"
        raise JobConflict(
            f"job {name} {was} ({'; '.join(differences)}): use another name, or end that job first",
            differences=differences,
        )


@dataclass(frozen=True)
class Learned:
    """What a pod that recovers knows after it has asked everybody once more.

    :param silent: other pods that may have records and did not answer, in words.
    :param unreported: ranks of which something may be unknown.
    :param gone: of these, ranks of which only processes were heard that had received nothing, for as long as a lease
        lasts: the process that was the rank before has ended, and what it received is not known. Or ranks that have
        reported all that they can, and have lost a part of their record.
    :param missing_traces: traces without which positions that were received can't be mapped to samples, in words.
    :param deal_is_known: whether this pod has learned how epochs were dealt when the job moved.
    :param another_pod_will_recover: whether another pod that is recovering will recover, whatever others know.
    :param waited_seconds: time since all other pods had answered; None: some have yet to answer.
    """

    silent: tuple[str, ...] = ()
    unreported: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    missing_traces: tuple[str, ...] = ()
    deal_is_known: bool = True
    another_pod_will_recover: bool = False
    waited_seconds: float | None = 0.0


@dataclass(frozen=True)
class Wait:
    """Order: ask again after a while.

    :param for_what: in words.
    :param patience_begins: whether the time that ranks have to report starts anew.
    """

    for_what: tuple[str, ...]
    patience_begins: bool = False


@dataclass(frozen=True)
class Restore:
    """Order: restore what was answered, and go on.

    :param without: ranks that have not reported all that they received: it is unknown.
    """

    without: tuple[int, ...] = ()


class JobLife:
    """The state of a job that a pod has.

    :param begin: how it came here.
    :param journal_is_whole: whether the pod's journal says all that it had answered before a restart.
    """

    def __init__(
        self,
        name: str,
        incarnation: str,
        ranks: RankPlaces,
        begin: Begin | None = None,
        *,
        journal_is_whole: bool = False,
    ) -> None:
        begin = begin or Begin(incarnation, from_journal=False, ran_before=False)
        self.name = name
        self.incarnation = incarnation
        self.moves = moves_of(incarnation)
        self.ranks = ranks
        self.ran_before = begin.ran_before
        """Whether the job ran before the pod had it, so that its ranks have to report what they received."""
        self.journal_is_whole = journal_is_whole
        self.lists_all_ranks = not begin.ran_before
        """Whether a rank that is not known here has not begun: none was forgotten."""
        self.unknown = UnknownDeliveries()
        self.waits_for = ""
        """The ranks and pods whose records it lacks, in words."""
        self._phase = Phase.MOVING if begin.moving else Phase.RECOVERING if begin.ran_before else Phase.RUNNING

    @property
    def phase(self) -> Phase:
        return Phase.NEW if self._phase is Phase.RUNNING and not self.ranks.begun else self._phase

    def is_but_a_name_beside(self, incarnation: str) -> bool:
        """Whether a job of that name may take its place: this one was registered, perhaps by somebody who only looks,
        when pods had lost all that they knew, and no rank has asked for anything. The other one has ranks."""
        is_new = self.phase is Phase.NEW and not (self.ran_before or self.moves)
        return is_new and bool(incarnation) and not same_line(self.incarnation, incarnation)

    @property
    def recovering(self) -> bool:
        """Whether it has yet to learn what was answered."""
        return self._phase in (Phase.RECOVERING, Phase.MOVING)

    @property
    def moving(self) -> bool:
        return self._phase is Phase.MOVING

    @property
    def begun(self) -> bool:
        """Whether a rank has asked for samples, here or at another pod: then who does not know the job has lost it."""
        return self.ranks.begun or self.recovering

    @property
    def will_recover(self) -> bool:
        """Whether it is recovering, and will recover whatever other pods know."""
        return self.moving or (self.recovering and self.journal_is_whole)

    @property
    def has_records(self) -> bool:
        """Whether the records of what ranks have received are here, now or as soon as the pod has recovered."""
        return not self.recovering or self.journal_is_whole

    @property
    def traces_are_final(self) -> bool:
        """Whether what positions ask for is known: after a move, when nothing is to be learned any more."""
        return not (self.moves and self.recovering)

    def lacks_deal(self, *, another_pod_runs_it: bool, table_is_whole: bool) -> bool:
        """Whether this pod has yet to learn how epochs were dealt when the job moved.

        :param another_pod_runs_it: a pod that is not recovering has given its records.
        """
        return self.moves > 0 and not (self.moving or another_pod_runs_it or table_is_whole)

    def next_step(self, learned: Learned, patience_seconds: float) -> Wait | Restore:
        """Whether to go on, after everybody was asked.

        :param patience_seconds: how long ranks are waited for that do not report.

        Raises :class:`JobLost` when the job can't go on, and :class:`PodUnreachable` when nobody is left who could
        tell how it was dealt: then it is to move once more.
        """
        waits_for = learned.silent or (
            *(f"rank {rank}" for rank in learned.unreported),
            *(() if learned.deal_is_known else ("a pod that knows how the epoch was dealt when the job moved",)),
            *learned.missing_traces,
        )
        self.waits_for = ", ".join(waits_for)
        if not waits_for:
            return Restore()
        if not learned.deal_is_known:
            if not learned.silent and not learned.another_pod_will_recover:
                raise PodUnreachable(f"no pod knows any more how epochs of job {self.name} were dealt when it moved")
            return Wait(waits_for, patience_begins=True)  # the pod that deals them anew says so when it gives up
        if not learned.silent and not learned.missing_traces and set(learned.unreported) <= set(learned.gone):
            return Restore(without=learned.unreported)
        if learned.silent or learned.waited_seconds is None or learned.waited_seconds <= patience_seconds:
            return Wait(waits_for)
        if self.moving:
            raise JobLost(f"{', '.join(waits_for)} did not tell what had been received", job=self.name)
        if learned.missing_traces:
            raise JobLost(
                f"job {self.name} can't go on after a restart: {learned.missing_traces[0]} is known to nobody; end it "
                f"(DELETE /v1/jobs/{self.name}) and start it again, or use another name",
                job=self.name,
            )
        return Restore(without=learned.unreported)

    def restored(self, *, complete: bool) -> None:
        """Fact: what was answered is known again.

        :param complete: whether all ranks had reported.
        """
        if self._phase is Phase.CLOSED:
            return
        self._phase = Phase.RUNNING
        self.lists_all_ranks = complete

    def opened(self) -> Iterator[Record]:
        """Where each rank is that has begun, and whether these are all."""
        for rank, homes in self.ranks.with_homes():
            at = max(0, self.ranks.epoch(rank))
            yield Record(Kind.OPENED, at, rank, (np.array(homes, dtype=np.int64),))
        if self.lists_all_ranks and not self.recovering:
            yield Record(Kind.ALL_RANKS, 0)

    def has_not_begun(self, rank: int) -> bool:
        """Whether no process can have received anything as this rank."""
        return self.lists_all_ranks and self.ranks.epoch(rank) == NOT_BEGUN

    def closed(self) -> None:
        self._phase = Phase.CLOSED


def expected(error: Exception) -> bool:
    """Whether the error is an answer to the client and no failure of the pod, so that a log needs no traceback."""
    return isinstance(error, RefillError) and error.status < 500
