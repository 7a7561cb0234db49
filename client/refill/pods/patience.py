"""When is a request made again, what is said meanwhile, and which error is raised in the end?

A request is idempotent: it is made again after a lost answer or a "not ready", until ``timeout_seconds`` have passed.
The error that is raised then is the last one that a pod answered with: a pod that does not answer because it waits, for
another rank or for the store, has said before what it waits for.
"""

from __future__ import annotations

import logging
import random
import time
from numbers import Real

from refill.errors import InvalidInput, PodBusy, PodUnreachable, RankHeld, RefillError
from refill.pods.pod_channel import Wait
from refill.pods.pod_failures import OTHER_PORT, speaks_tls

log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0
"""Training stands still until what is waited for is there."""
_BUSY_PAUSE_SECONDS = 5.0
_SAY_EVERY_SECONDS, _SAY_FIRST_SECONDS = 10.0, 3.0
_CERTIFICATE_SECONDS = 90.0
"""So long it may take until a Secret that was replaced is in all pods that mount it."""
_REQUEST_SECONDS = 60.0
"""A pod that is silent for longer is asked again."""
_LAST_REQUEST_SECONDS = 15.0
"""Where no pod has answered yet, a request just before the end of the time may take so long. Pods wait 10 s
(``wait_seconds``) before they answer what they wait for, and that answer is worth the delay."""


_SPREAD_ABOVE_RANKS = 16
_SPREAD_SECONDS_A_RANK = 0.004
"""Eight loader workers of a rank take a pod about as long for their TLS handshakes."""
_LONGEST_SPREAD_SECONDS = 4.0


def spread_seconds(num_ranks: int) -> float:
    """Over how long the ranks of a job spread their connections to a pod that has come back; 0 for a small job."""
    return 0.0 if num_ranks <= _SPREAD_ABOVE_RANKS else min(_SPREAD_SECONDS_A_RANK * num_ranks, _LONGEST_SPREAD_SECONDS)


def check_timeouts(timeout_seconds: float, connect_timeout_seconds: float) -> None:
    """As callers give them. Raises :class:`InvalidInput`."""
    if not isinstance(timeout_seconds, Real) or not timeout_seconds >= 0:
        raise InvalidInput(f"timeout_seconds must be at least 0, got {timeout_seconds!r:.100}")
    if not isinstance(connect_timeout_seconds, Real) or not 0 < connect_timeout_seconds < float("inf"):
        raise InvalidInput(f"connect_timeout_seconds must be above 0, got {connect_timeout_seconds!r:.100}")


class Patience:
    """The tries of one request of a rank.

    :param timeout_seconds: how long it is made again; 0: it is made once.
    :param spread_seconds: the longest further pause, at random, after a pod could not be asked.
    :param is_first: whether nothing has been answered to this process before.
    """

    def __init__(
        self, rank: int, timeout_seconds: float, spread_seconds: float = 0.0, *, is_first: bool = False
    ) -> None:
        self._is_first = is_first
        self._has_said = False
        self._speaks_tls: bool | None = None
        """Known when a connection was closed without an answer, and nothing was ever answered."""
        self._spread_seconds = spread_seconds
        self._rank = rank
        self._timeout_seconds = timeout_seconds
        self._started = self._said = self._tried = time.monotonic()
        self._pause = _FIRST_PAUSE_SECONDS
        self._last_answer: RefillError | None = None
        """The last error that a pod answered with."""
        self._answer_at = 0.0
        self._distrusts_at: float | None = None
        """When a certificate was not trusted, at first."""

    def next_try(self) -> Wait:
        """Fact: the request is made now."""
        self._tried = time.monotonic()
        left = self._started + self._timeout_seconds - self._tried
        if self._last_answer is None:
            left = max(left, _LAST_REQUEST_SECONDS)
        return Wait(min(max(left, _FIRST_PAUSE_SECONDS), _REQUEST_SECONDS), self._still_waits)

    def failed(self, error: RefillError, asked: str) -> None:
        """Fact: a try has failed, and another one may help. Raises the error to end with when time is up.

        :param asked: the URL of the pod.
        """
        now = time.monotonic()
        if self._is_first and error.details.get("closed"):
            error = self._explained(error, asked)
        if not error.details.get("silent"):
            self._last_answer, self._answer_at = error, now
        gives_up_at = self._started + self._timeout_seconds
        if self._is_first and error.details.get("certificate"):
            # Who has made a mistake is told at once, and nobody's job ends because it began at a bad moment.
            is_new = self._distrusts_at is None
            self._distrusts_at = self._distrusts_at or now
            gives_up_at = min(gives_up_at, self._distrusts_at + _CERTIFICATE_SECONDS)
            if is_new:
                why = f"{error.message}. Are certificates being replaced? Else set REFILL_CA_FILE (ca_file)"
                self._say(asked, why, gives_up_at)
        is_wrong = self._is_first and error.details.get("wrong")
        if is_wrong or now + self._pause >= gives_up_at:
            cause = self._cause(error, now)
            given_up = type(cause)(
                f"rank {self._rank} gives up on {asked} after {now - self._started:.0f} s: {cause.message}"
            )
            given_up.details = cause.details
            raise given_up from error
        if isinstance(error, RankHeld) and self._said == self._started:
            self._say(asked, error.message)
        elif now - self._said >= self._say_after:
            self._say(asked, self._cause(error, now).message)

    def pause(self, error: RefillError) -> None:
        """Before the next try. The pause doubles, with jitter; a try that took long has been one."""
        took = time.monotonic() - self._tried
        pause = max(_FIRST_PAUSE_SECONDS, self._pause - took) * random.uniform(0.5, 1.0)
        if isinstance(error, PodUnreachable) and not isinstance(error, PodBusy):
            pause += random.uniform(0, self._spread_seconds)
        time.sleep(pause)
        longest = _BUSY_PAUSE_SECONDS if isinstance(error, PodBusy) else _LONGEST_PAUSE_SECONDS
        self._pause = min(2 * self._pause, longest)

    def _still_waits(self, asked: str) -> None:
        """Fact: the answer of a try has yet to come."""
        now = time.monotonic()
        if now - self._said >= self._say_after:
            before = "" if self._last_answer is None else f"; before that: {self._last_answer.message}"
            self._say(asked, f"no answer for {now - self._tried:.0f} s{before}")

    def _cause(self, error: RefillError, now: float) -> RefillError:
        """A pod that does not answer now is taken to fail as in its last answer, unless that was long ago."""
        if error.details.get("silent") and self._last_answer is not None and now - self._answer_at <= _REQUEST_SECONDS:
            return self._last_answer
        return error

    def _explained(self, error: RefillError, asked: str) -> RefillError:
        """Why a connection is closed before anything was ever answered."""
        if self._speaks_tls is None:
            self._speaks_tls = speaks_tls(asked)
        if self._speaks_tls:
            why = "it speaks TLS there: write https://"
            return PodUnreachable(f"{asked} does not answer: {why}", url=asked, wrong=True)
        return PodUnreachable(f"{error.message}: {OTHER_PORT}", **error.details)

    def _say(self, asked: str, why: str, gives_up_at: float | None = None) -> None:
        self._said = time.monotonic()
        waited = self._said - self._started
        if not self._is_first or self._has_said:
            log.warning("rank %d has waited %.0f s for %s: %s", self._rank, waited, asked, why)
            return
        self._has_said = True
        log.warning(
            "rank %d has waited %.0f s for %s, which has not taken its job yet, and tries on until %g s have passed "
            "(timeout_seconds): %s",
            self._rank,
            waited,
            asked,
            self._timeout_seconds if gives_up_at is None else gives_up_at - self._started,
            why,
        )

    @property
    def _say_after(self) -> float:
        """Seconds since something was said last. Where nothing was ever answered it may be the URL that is wrong."""
        return _SAY_FIRST_SECONDS if self._is_first and not self._has_said else _SAY_EVERY_SECONDS
