"""How does a test wait? For a fact, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from refill.errors import RefillError
from refill_service.demo.local_cluster import LocalCluster

__all__ = ["until", "until_answered", "until_logged"]

Answer = TypeVar("Answer")

_LONGEST_SECONDS = 100
"""Below pytest's own limit, so that a failure says what did not come."""


def until(is_true: Callable[[], bool], what: str) -> None:
    """:param what: is waited for, as the failure names it."""
    deadline = time.monotonic() + _LONGEST_SECONDS
    while not is_true():
        assert time.monotonic() < deadline, f"{what} did not come within {_LONGEST_SECONDS} s"
        time.sleep(0.05)


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


def until_logged(cluster: LocalCluster, pod: int, text: str) -> None:
    """A request's line is written when its answer has left: who reads the answer may be faster."""
    until(lambda: text in cluster.log(pod), f"{text!r} in the log of pod {pod}")
