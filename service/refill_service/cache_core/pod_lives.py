"""Which run of each pod is the one that counts? Facts come in with their time; who has a successor learns of it.

A pod that stood still, or was cut off, may wake beside its successor. Both have a table of which sample answered which
request, so what the earlier one answers must reach nobody any more.

- A pod that starts announces itself to all others, and answers nothing of jobs that ran before until they all know it.
  From then on each of them refuses what the earlier run asks or answers.
- What a pod answers to ranks of its own from its own share goes by no other pod. So it answers only while another pod
  has *confirmed* it, by any answer, to a request of the last ``LEASE_SECONDS``. The successor waits until no such
  confirmation can hold. It reads its journal after that: there is all that the earlier run has answered.
- A pod that reaches no other one, or is alone, asks by its own name who it is: that leads to its successor.

The number of a life is the time of its start, or more than all that are known if a clock was wrong: if a life is known
that begins only later. One that began meanwhile is the successor, also where it was heard of first. Nobody believes a
life that would begin more than ``MOST_AHEAD_SECONDS`` from now: clocks of machines differ by less, and whoever could
name any number would end a pod for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from refill.errors import PodClockAhead
from refill.protocol.pod_life import PodLife

__all__ = ["LEASE_SECONDS", "MOST_AHEAD_SECONDS", "Announced", "PodLives", "is_ahead"]

LEASE_SECONDS = 1.0
MOST_AHEAD_SECONDS = 300
_NS = 10**9


def is_ahead(life: PodLife, number_now: int) -> bool:
    """Whether a life begins so much later than now that it can't be the number of any.

    :param number_now: that a life would have which began now.
    """
    return life.number > number_now + MOST_AHEAD_SECONDS * _NS


@dataclass(frozen=True)
class Announced:
    """A pod's answer to another one that announces itself. Wire names."""

    lives: dict[int, PodLife]
    """The newest life of each pod that it knows of."""
    wait_seconds: float
    """How long an earlier life may still be confirmed by it."""
    earlier: PodLife | None = None
    """The life before, as far as it knows."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "lives": {str(pod): life.encode() for pod, life in self.lives.items()},
            "wait_seconds": self.wait_seconds,
            "earlier": None if self.earlier is None else self.earlier.encode(),
        }

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Announced:
        earlier = given["earlier"]
        return cls(
            {int(pod): PodLife.decode(life) for pod, life in given["lives"].items()},
            float(given["wait_seconds"]),
            None if earlier is None else PodLife.decode(earlier),
        )


class PodLives:
    """As the pod ``ordinal`` of ``num_pods`` knows them.

    :param own: the life of this pod itself.
    :param now: seconds, of a clock that never goes back, nor stands still while the machine is suspended.
    """

    def __init__(self, ordinal: int, num_pods: int, own: PodLife, now: float) -> None:
        self.ordinal = ordinal
        self.own = own
        self.others = [pod for pod in range(num_pods) if pod != ordinal]
        self.earlier: PodLife | None = None
        """The newest life of this pod before its own, as far as others knew."""
        self._newest: dict[int, PodLife] = {}
        self._before: dict[int, PodLife] = {}
        """By pod, the life that the newest one followed."""
        self._heard = dict.fromkeys(self.others, now)
        """When each pod's newest life was heard of last. One that was not may have been confirmed by this pod's earlier
        life, until now."""
        self._leases_end = dict.fromkeys(self.others, now + LEASE_SECONDS)
        """By pod, when no life before its newest is confirmed by this pod any more."""
        self._succeeded: set[int] = set()
        self._aware: set[int] = set()
        self._wait_until = now if self.others else now + LEASE_SECONDS
        self._confirmed_until = now
        self._replaced_by: PodLife | None = None

    def counts_as(self, life: PodLife) -> None:
        """Fact: this pod's own life has this number, as an earlier one had one that was higher than its clock's."""
        self.own = max(self.own, life)

    def check_begun(self, pod: int, life: PodLife, number_now: int) -> None:
        """Before a life is told of by any fact below: raises :class:`PodClockAhead` for one that is ahead of the clock.

        What is known already stays so, should this pod's clock have been set back.
        """
        known = self.own if pod == self.ordinal else self._newest.get(pod)
        if not is_ahead(life, number_now) or (known is not None and life <= known):
            return
        minutes = (life.number - number_now) // (60 * _NS)
        raise PodClockAhead(
            f"pod {self.ordinal} is told of a process of pod {pod} that was started {minutes:,} minutes from now by "
            f"its clock, and believes {MOST_AHEAD_SECONDS // 60} at most: set the clocks of their machines (NTP)",
            pod=pod,
        )

    # The other pods

    def newest(self, pod: int) -> PodLife | None:
        return self._newest.get(pod)

    def came_from(self, pod: int, life: PodLife, now: float) -> bool:
        """Fact: this run of a pod has asked, or has answered. False: it has a successor, and must not be believed."""
        if pod not in self._heard:
            return True  # of another number of pods, which is looked at elsewhere
        if not self._is_newest(pod, life):
            return False
        self._heard[pod] = now
        return True

    def _is_newest(self, pod: int, life: PodLife) -> bool:
        known = self._newest.get(pod)
        if known is not None and life < known:
            return life.name == known.name  # under the number that it had before
        if known is None or known.name != life.name:
            # From now on no earlier life is confirmed here.
            self._leases_end[pod] = self._heard.get(pod, 0.0) + LEASE_SECONDS
            if known is not None:
                self._before[pod] = known
                self._succeeded.add(pod)
        self._newest[pod] = life
        return True

    def announced(self, pod: int, life: PodLife, now: float) -> Announced:
        """Fact: a pod that was started announces itself. Returns the answer to it."""
        if pod in self._heard and self._is_newest(pod, life):
            self._heard[pod] = now
        known = self._newest | {self.ordinal: self.own}
        return Announced(known, max(0.0, self._leases_end.get(pod, now) - now), self._before.get(pod))

    def ended(self, pod: int, life: PodLife) -> None:
        """Fact: a pod has ended in order, and answers nothing any more."""
        if self._newest.get(pod) == life:
            self._heard[pod] = self._leases_end[pod] = float("-inf")

    def take_succeeded(self) -> set[int]:
        """The pods that have had a successor since this was asked last: nothing more is to be had of the run before."""
        found, self._succeeded = self._succeeded, set()
        return found

    # This pod

    @property
    def replaced_by(self) -> PodLife | None:
        """The successor of this pod, which has to end then."""
        return self._replaced_by

    def named(self, life: PodLife) -> None:
        """Fact: another pod knows this life of this pod."""
        if life > self.own and life.name != self.own.name:
            self._replaced_by = max(life, self._replaced_by or life)

    def confirmed(self, asked_at: float) -> None:
        """Fact: another pod has answered what this one had asked at that time."""
        self._confirmed_until = max(self._confirmed_until, asked_at + LEASE_SECONDS)

    def is_confirmed(self, now: float) -> bool:
        """Whether what this pod has assigned so far may be answered: no successor can be without it."""
        return self._replaced_by is None and now < self._confirmed_until

    def is_to_be_renewed(self, now: float) -> bool:
        """Whether the confirmation is half over. Who is alone asks then, as that may take longer than it lasts: names
        are resolved for it."""
        return not self.others and now > self._confirmed_until - LEASE_SECONDS / 2

    # This pod announces itself

    @property
    def unaware(self) -> list[int]:
        """The other pods that don't know yet that this one was started."""
        return [pod for pod in self.others if pod not in self._aware]

    def announcement_answered(self, answers: Mapping[int, Announced], now: float, number_now: int) -> None:
        """Fact: these pods have answered to the announcement, all that were reached at a time.

        :param number_now: that a life would have which began now.
        """
        known = [answer.lives[self.ordinal] for answer in answers.values() if self.ordinal in answer.lives]
        newest = max((life for life in known if life.name != self.own.name), default=self.own)
        if newest.number > max(self.own.number, number_now) and not self._aware:
            # That life would begin only later: a clock was wrong. So this one, new to all others, is the later one.
            self.own = PodLife(newest.number + 1, self.own.name)
            self.earlier = newest
            return
        self.named(newest)
        for pod, answer in answers.items():
            self._aware.add(pod)
            self._wait_until = max(self._wait_until, now + answer.wait_seconds)
            if answer.earlier is not None:
                self.earlier = max(answer.earlier, self.earlier or answer.earlier)
            for other, life in answer.lives.items():
                if other in self._heard:
                    self._is_newest(other, life)

    def waits_seconds(self, now: float) -> float:
        """Until it may go on with jobs that ran before, when all others know of it."""
        return max(0.0, self._wait_until - now)
