"""Which refill is this, and does it fit the pods'?

A client and pods of one minor release, or of two that follow each other, understand each other
(docs/COMPATIBILITY.md). Of others a process says once that they may not; and whatever the versions are, when pods
refuse what a job asks for.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from refill import __version__
from refill.errors import InvalidInput, RefillError

__all__ = ["VERSION_FIELD", "commit", "said_of_versions", "tell_of_pods_version", "version_line", "versions_told"]

log = logging.getLogger(__name__)

VERSION_FIELD = "refill"
"""Of what pods answer to the registration of a job: their version."""

_COMMIT = Path(__file__).with_name("commit.txt")
"""Written by what builds wheels and images; not in a working tree."""


@cache
def commit() -> str:
    """That it was built from, ``-dirty`` behind it where the tree had changes; empty where nobody knows."""
    try:
        return _COMMIT.read_text().strip()
    except FileNotFoundError:
        return ""


def version_line() -> str:
    """For people: ``refill 0.1.0 (commit 0123456789ab)``."""
    found = re.sub(r"^([0-9a-f]{12})[0-9a-f]+", r"\1", commit())
    return f"refill {__version__}" + (f" (commit {found})" if found else "")


def said_of_versions(pods: str, own: str = __version__) -> str | None:
    """What there is to say of a client that talks to pods of that version; None: they understand each other."""
    theirs, ours = _minor(pods), _minor(own)
    if theirs is None or ours is None or (theirs[0] == ours[0] and abs(theirs[1] - ours[1]) <= 1):
        return None
    older = "this client" if ours < theirs else "the pods'"
    return (
        f"the pods run refill {pods[:40]}, and this client is {own}: more than one minor release apart, they may not "
        f"understand each other; upgrade {older}"
    )


def tell_of_pods_version(answer: dict[str, Any]) -> None:
    """Log what there is to say of the pods' version, once a process."""
    if isinstance(version := answer.get(VERSION_FIELD), str) and (line := said_of_versions(version)):
        say_once(line)


@contextlib.contextmanager
def versions_told(health: Callable[[], dict[str, Any]]) -> Iterator[None]:
    """Around the registration of a job: when it is refused by pods of another version, both are said.

    :param health: asks the pod for ``/healthz``.
    """
    try:
        yield
    except InvalidInput:
        with contextlib.suppress(RefillError):
            version = health().get("version")
            if isinstance(version, str) and version != __version__:
                say_once(f"the pods that refuse this run refill {version[:40]}, and this client is {__version__}")
        raise


@cache
def say_once(line: str) -> None:
    log.warning("%s", line)


def _minor(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d{1,6})\.(\d{1,6})(?!\d)", version)
    return None if found is None else (int(found[1]), int(found[2]))
