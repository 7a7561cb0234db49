"""How does a pod see to it that of two runs of it only the later one is used? Carries out what ``PodLives`` decides.

After its start it announces itself to all other pods, again and again until all have answered. A pod that learns that
it has a successor serves nobody any more, writes nothing more, and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from refill.errors import InvalidInput, PodClockAhead, PodRecovering, PodReplaced, PodUnreachable, RefillError
from refill.protocol.pod_life import PodLife
from refill_service.cache_core.pod_lives import LEASE_SECONDS, Announced, PodLives, is_ahead
from refill_service.peers.job_peers import PATIENCE_SECONDS
from refill_service.peers.lease_clock import lease_time
from refill_service.peers.peers import Peers

__all__ = ["Fence"]

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 1.0
_GOODBYE_SECONDS = 1.0
_LOOK_SECONDS = 5.0


class Fence:
    """Of one pod. ``replaced`` is set when it has a successor."""

    def __init__(self, lives: PodLives, peers: Peers) -> None:
        self.lives = lives
        self.replaced = asyncio.Event()
        self.on_started: Callable[[int, str], None] = lambda pod, run: None
        """Called when another pod has announced itself, once or more."""
        self._peers = peers
        self._known = asyncio.Event()
        """Set when all others know of this pod."""
        self._announcing: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._one_asks = asyncio.Lock()
        self._times_asked = 0
        peers.on_replaced = self._is_replaced

    def start(self) -> None:
        self._announcing = asyncio.create_task(self._announce())
        self._looking = asyncio.create_task(self._look())

    async def close(self, *, in_order: bool = False) -> None:
        """:param in_order: nothing is answered any more, and the successor need not wait."""
        tasks = [task for task in (self._announcing, self._looking, self._renewing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if in_order and not self.replaced.is_set():
            asked = (self._peers.call(pod, "DELETE", self._path()) for pod in self.lives.others)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GOODBYE_SECONDS):
                    await asyncio.gather(*asked, return_exceptions=True)

    async def until_known(self) -> None:
        """Until no earlier process of this pod can be used by anybody. Raises :class:`PodRecovering` if that takes
        long."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await self._known.wait()
                await asyncio.sleep(self.lives.waits_seconds(lease_time()))
        except TimeoutError as error:
            unaware = ", ".join(map(self._peers.name, self.lives.unaware))
            raise PodRecovering(
                f"pod {self.lives.ordinal} was started, and waits until no earlier process of it can be used any more: "
                f"{unaware or 'other pods'} can't be told",
                pod=self.lives.ordinal,
            ) from error

    async def confirm(self) -> None:
        """To be called before an answer leaves for a client, when all that it says is assigned and written down.

        Raises :class:`PodReplaced` when this pod has a successor, and :class:`PodUnreachable` when no other pod is
        there to say that it has none."""
        if not self.lives.is_confirmed(lease_time()):
            await self._ask_once()
        elif self.lives.is_to_be_renewed(lease_time()) and (self._renewing is None or self._renewing.done()):
            self._renewing = asyncio.create_task(self._ask_once())
        self.check_not_replaced()
        if not self.lives.is_confirmed(lease_time()):
            raise PodUnreachable(
                f"pod {self.lives.ordinal} may have been replaced: no pod has said otherwise within "
                f"{LEASE_SECONDS:g} s, not even itself by its name. It reaches none, or has no processor to ask with",
                pod=self.lives.ordinal,
            )

    async def _ask_once(self) -> None:
        """For all that wait at this moment: they may be many, and each question may need a connection of its own."""
        asked_before = self._times_asked
        async with self._one_asks:
            if self._times_asked == asked_before:
                await self._ask()
                self._times_asked += 1

    async def _ask(self) -> None:
        """One that confirms this pod is enough."""
        await self._ask_others()
        if (self.lives.others and self.lives.is_confirmed(lease_time())) or self.replaced.is_set():
            return
        asked_at = lease_time()
        if not self._peers.urls:  # alone, and given no name by which it could ask
            self.lives.confirmed(asked_at)
            return
        try:
            life = await self._peers.who_is(self.lives.ordinal)
        except RefillError:
            if not self.lives.others:  # nor need its own name lead here, however long that takes to find out
                self.lives.confirmed(lease_time())
            return
        if life == self.lives.own:
            self.lives.confirmed(asked_at if self.lives.others else lease_time())
        elif life is not None:
            self.lives.named(life)

    async def _ask_others(self) -> None:
        asking = {asyncio.create_task(self._ask_pod(pod)) for pod in self.lives.others}
        try:
            while asking and not self.lives.is_confirmed(lease_time()) and not self.replaced.is_set():
                _, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in asking:
                task.cancel()

    def owns_no_more(self, life: PodLife) -> None:
        """Fact: another run of this pod has taken over its journal. Raises :class:`PodReplaced` when that is a later
        one."""
        self.lives.named(life)
        self.check_not_replaced()

    def announced(self, pod: int, life: PodLife) -> Announced:
        """Fact: another pod was started. Returns the answer to it."""
        self.check_begun(pod, life)
        answer = self.lives.announced(pod, life, lease_time())
        self.leave_earlier_runs()
        if self.lives.newest(pod) == life:
            self.on_started(pod, life.name)
        return answer

    def check_begun(self, pod: int, life: PodLife) -> None:
        """See :meth:`PodLives.check_begun`."""
        self._peers.check_begun(pod, life)

    def leave_earlier_runs(self) -> None:
        self._peers.leave_earlier_runs()

    def check_not_replaced(self) -> None:
        if (newest := self.lives.replaced_by) is not None:
            self._is_replaced()
            raise self.error(newest)

    def error(self, newest: PodLife) -> PodReplaced:
        pod = self.lives.ordinal
        return PodReplaced(
            f"pod {pod} was started again while this process of it stood still or was cut off, and goes on there",
            pod=pod,
            newest=newest.encode(),
        )

    def _is_replaced(self) -> None:
        self.replaced.set()

    async def _ask_pod(self, pod: int) -> None:
        with contextlib.suppress(RefillError):
            await self._peers.call(pod, "GET", "/peer/v1/lives")

    async def _look(self) -> None:
        """A pod that nobody asks for anything learns of its successor, too."""
        while not self.replaced.is_set():
            await asyncio.sleep(_LOOK_SECONDS)
            if not self.lives.is_confirmed(lease_time()):
                await self._ask_once()
            if self.lives.replaced_by is not None:
                self._is_replaced()

    async def _announce(self) -> None:
        pause = _PAUSE_SECONDS
        while self.lives.unaware and not self.replaced.is_set():
            unaware = self.lives.unaware
            answers = await asyncio.gather(*map(self._announce_to, unaware))
            self.lives.announcement_answered(
                {pod: answer for pod, answer in zip(unaware, answers, strict=True) if answer},
                lease_time(),
                time.time_ns(),
            )
            self.leave_earlier_runs()
            if self.lives.replaced_by is not None:
                self._is_replaced()
            if self.lives.unaware and None in answers:  # else its number was too low
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        self._known.set()

    async def _announce_to(self, pod: int) -> Announced | None:
        try:
            answer: dict[str, Any] = await self._peers.call(pod, "PUT", self._path())
        except RefillError:
            return None  # it is down, or is one of another number of pods
        try:
            announced = Announced.from_dict(answer)
        except (InvalidInput, ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
            self._peers.say_now_and_then(
                f"{self._peers.name(pod)} answers, but not as a pod does: {str(answer)[:100]!r}; is its URL right?"
            )
            return None
        return self._believed(announced)

    def _believed(self, answer: Announced) -> Announced | None:
        """Without what is ahead of this pod's clock. None: that is a process of this pod itself, which the other one
        takes for its successor. So it is asked again, until clocks agree or it has forgotten that process."""
        lives = dict[int, PodLife]()
        for pod, life in answer.lives.items():
            try:
                self.check_begun(pod, life)
            except PodClockAhead:
                if pod == self.lives.ordinal:
                    return None
            else:
                lives[pod] = life
        earlier = answer.earlier
        if earlier is not None and is_ahead(earlier, time.time_ns()):
            earlier = None
        return Announced(lives, min(max(0.0, answer.wait_seconds), LEASE_SECONDS), earlier)

    def _path(self) -> str:
        return f"/peer/v1/lives/{self.lives.ordinal}?life={self.lives.own.encode()}"
