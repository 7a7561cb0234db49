"""How does a test wait? For a fact, however busy the machine is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx

from refill.errors import RefillError
from refill_service.demo.local_cluster import LocalCluster

__all__ = ["until", "until_answered", "until_in_loop", "until_logged", "until_serving"]

Answer = TypeVar("Answer")

_LONGEST_SECONDS = 100
"""Below pytest's own limit, so that a failure says what did not come."""


def until(is_true: Callable[[], bool], what: str) -> None:
    """:param what: is waited for, as the failure names it."""
    deadline = time.monotonic() + _LONGEST_SECONDS
    while not is_true():
        assert time.monotonic() < deadline, f"{what} did not come within {_LONGEST_SECONDS} s"
        time.sleep(0.05)


async def until_in_loop(is_true: Callable[[], bool | Awaitable[bool]], what: str) -> None:
    """The same where the event loop has to go on."""
    deadline = time.monotonic() + _LONGEST_SECONDS
    while not (found if isinstance(found := is_true(), bool) else await found):
        assert time.monotonic() < deadline, f"{what} did not come within {_LONGEST_SECONDS} s"
        await asyncio.sleep(0.01)


def until_answered(ask: Callable[[], Answer]) -> Answer:
    """For calls that a client makes anew when a pod answers 503, as one does just after it was started."""
    deadline = time.monotonic() + _LONGEST_SECONDS
    while True:
        try:
            return ask()
        except RefillError as error:
            if error.status != 503 or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def until_serving(url: str, ended: Callable[[], bool], said: Callable[[], str], *, ok: bool = True) -> None:
    """Until a server that was started answers.

    :param ended: whether its process has ended.
    :param said: its log, for the failure.
    :param ok: False: with any status.
    """

    def serves() -> bool:
        assert not ended(), "the server ended"
        try:
            return httpx.get(url, timeout=5).status_code == 200 or not ok
        except httpx.TransportError:
            return False

    try:
        until(serves, f"an answer of {url}")
    except AssertionError as error:
        raise AssertionError(f"{error}: {said()[-2000:]}") from None


def until_logged(cluster: LocalCluster, pod: int, text: str) -> None:
    """A request's line is written when its answer has left: who reads the answer may be faster."""
    until(lambda: text in cluster.log(pod), f"{text!r} in the log of pod {pod}")
