"""May a request be answered? One order of checks for whatever a pod is asked, at all of its doors and routes.

Of several things that are wrong, the first is said:

1. the pod ends, or has as many requests as it takes (those who look after the pod are answered all the same);
2. the request is for another host than the pod, or comes from a page of another one, where no token is wanted;
3. it shows no token that the pod knows (``/healthz`` and ``/readyz`` want none, and end here);
4. who asks has as many connections as one team may;
5. it comes from a pod that is one of another number of pods;
6. the job in its path is another token's.

That is :func:`admission`, before anything of its body is read. A request of a rank then comes to
:func:`rank_admission`:

7. the job has no such rank, or no memory for so many processes;
8. another process is this rank.

Both are told facts, and change nothing but what ``Leases`` and connections know of who asks.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar

from refill.errors import NotAllowed, NotAuthenticated, PodBusy, PodUnreachable, RefillError
from refill.protocol.rank_life import RankLife

Connection = TypeVar("Connection", contravariant=True)


class Head(Protocol):
    """What is known of a request when its head has come, each found when it is asked for."""

    @property
    def looks_after_the_pod(self) -> bool: ...
    @property
    def is_health(self) -> bool:
        """Nothing but whether the pod works, for kubelets and load balancers, which have no token."""

    @property
    def stopping(self) -> RefillError | None:
        """Why the door takes no requests any more."""

    @property
    def most_requests(self) -> int: ...
    @property
    def is_one_too_many(self) -> bool:
        """As many requests are under way, or its connection is above the limit."""

    @property
    def foreign_name(self) -> str | None:
        """The name of another host that it is for, or from a page of; None: there is none, or any name will do."""

    @property
    def of_pods(self) -> bool:
        """At the door for other pods."""

    @property
    def shows_token(self) -> bool: ...
    @property
    def team(self) -> str | None:
        """Whose token it shows; empty where none is wanted, or it has no name. None: nobody's."""

    def comes_from(self, team: str) -> bool:
        """Fact: what it came over is this team's. False: it has as many connections as it may."""

    @property
    def pod(self) -> tuple[int, int]:
        """``(which one, of how many)``."""

    @property
    def said_num_pods(self) -> bytes | None:
        """Of how many the pod is that asks, as it says; None: a client asks, or it does not say it."""

    @property
    def job_of_others(self) -> str | None:
        """A job of another token that the path names, where it asks for no more than its holder may."""


def admission(head: Head) -> RefillError | None:
    """Why a request is not answered; None: it is, if its rank is admitted where it has one."""
    if not head.looks_after_the_pod:
        if head.stopping is not None:
            return head.stopping
        if head.is_one_too_many:
            most = head.most_requests
            return PodBusy(f"the pod has {most} requests or connections, as many as it takes (max_connections)")
    if (name := head.foreign_name) is not None:
        return NotAllowed(
            "without client_tokens this pod answers to localhost and the names in pod_urls, and this request is for "
            f"{name[:60]!r} or comes from a page there: ask for localhost, or give the pod client_tokens"
        )
    if head.is_health:
        return None
    if (team := head.team) is None:
        return NotAuthenticated(_no_token(of_pods=head.of_pods, shown=head.shows_token))
    if not head.comes_from(team):
        return PodBusy(
            "you have as many connections to this pod as one team may have while others may want some "
            "(max_connections, team_reserved_fraction)"
        )
    if (said := head.said_num_pods) is not None:
        ordinal, num_pods = head.pod
        if said != b"%d" % num_pods:
            return PodUnreachable(
                f"pod {ordinal} is one of {num_pods} and was asked by one of {said[:20].decode('latin-1')}: pods are "
                "being replaced",
                pod=ordinal,
            )
    if (job := head.job_of_others) is not None:
        return of_another_token(job)
    return None


def _no_token(*, of_pods: bool, shown: bool) -> str:
    rule = "the pod takes only requests with a token that it knows"
    if of_pods:
        return f"{rule}: give all pods the same peer_token"
    if shown:
        return (
            f"{rule}, and yours is none of them: is it whole, and that of these pods? It comes from token_file "
            "(--token-file), REFILL_TOKEN_FILE or REFILL_TOKEN; the pods' are in their client_tokens"
        )
    return f"{rule}: give REFILL_TOKEN_FILE, or token_file= (--token-file), the file that holds yours"


class AsksAs(NamedTuple):
    """As which rank a process asks.

    :param life: None: it does not say which process it is, and is not asked for it.
    :param takes: False: it asks for no samples, and is not the rank by that.
    :param is_heard: it only says that it is there.
    :param num_ranks: to which an epoch is dealt; 0: those that the job was registered for.
    :param group: how many processes ask as this rank, ``member`` of which this is.
    :param ended: who was the process before it, and has ended as it says.
    :param refused_by: who is the process, as another pod has said.
    """

    rank: int
    life: RankLife | None = None
    takes: bool = True
    is_heard: bool = False
    num_ranks: int = 0
    group: int = 1
    member: int = 0
    ended: RankLife | None = None
    refused_by: RankLife | None = None

    @property
    def process(self) -> int:
        """Its number among those of all ranks."""
        return self.rank * self.group + self.member


class OfRanks(Protocol):
    """A job, as far as it has ranks."""

    def check_rank(self, asks: AsksAs) -> None:
        """Raises :class:`InvalidInput` for a rank that there is not, and :class:`MemoryTooSmall` for more processes
        than it has places for."""


class Leases(Protocol[Connection]):
    """Which processes are the ranks of a job, as :class:`LeasedRanks` knows it."""

    def ended(self, rank: int, life: RankLife, by: RankLife, *, takes: bool = True) -> None: ...
    def held_elsewhere(self, rank: int, holder: RankLife, by: RankLife) -> None: ...
    def heard(self, rank: int, life: RankLife | None, over: Connection | None = None) -> None: ...
    def asks(self, rank: int, life: RankLife | None, *, takes: bool = True, over: Connection | None = None) -> None: ...


def rank_admission(
    job: OfRanks, leases: Leases[Connection] | None, asks: AsksAs, over: Connection | None = None
) -> None:
    """Once for each request of a rank: what it calls may take the rank for one that there is.

    :param leases: None: another pod is the rank's home, and keeps its lease.
    :param over: what a client asks over.
    """
    job.check_rank(asks)
    life = asks.life
    if leases is None or life is None:
        return
    if asks.is_heard:
        leases.heard(asks.process, life, over)
        return
    if asks.ended is not None:
        leases.ended(asks.process, asks.ended, life, takes=asks.takes)
    if asks.refused_by is not None:
        leases.held_elsewhere(asks.process, asks.refused_by, life)
    leases.asks(asks.process, life, takes=asks.takes, over=over)


def is_of(held_by: str, asked_by: str) -> bool:
    """Whether a job is theirs who ask. What was registered without a token is everybody's."""
    return held_by in ("", asked_by)


def check_holder(job: str, held_by: str, asked_by: str) -> None:
    """Raises :class:`NotAllowed` for a job of another token."""
    if not is_of(held_by, asked_by):
        raise of_another_token(job)


def of_another_token(job: str) -> NotAllowed:
    return NotAllowed(f"job {job} belongs to another token: use another name, or the token it was registered with")
