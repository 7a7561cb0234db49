"""Which request is this done for? An id that goes along, to other pods and into logs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextvars import ContextVar

__all__ = ["REQUEST_ID_HEADER", "current_request_id", "take_request_id"]

REQUEST_ID_HEADER = "x-request-id"

_WIRE_NAME = REQUEST_ID_HEADER.encode()
_MAY_BE_LOGGED = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_current: ContextVar[str] = ContextVar("request_id", default="")


def current_request_id() -> str:
    """Empty outside of requests."""
    return _current.get()


def take_request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """That of the headers, or a new one where they have none that may stand in a log; for this task from now on."""
    given = next((value for name, value in headers if name == _WIRE_NAME), b"")
    found = given.decode() if _MAY_BE_LOGGED.fullmatch(given) else os.urandom(8).hex()
    _current.set(found)
    return found
