"""Who asked what of a pod, and what came of it? One line a request, which nobody who asks can write into.

With client tokens it is an audit trail: the team, the address, and what was done to which job. Text that others chose
stands in it percent-encoded, so that no path or dataset looks like a field, or a line, of ours.
"""

from __future__ import annotations

import logging
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.types import Scope

access_log = logging.getLogger("refill.access")

HOLDER = "refill.holder"
"""In a request's scope: whose token it came with; missing when it came with none that the pod knows."""
_DONE = "refill.done"
_OF_PATHS = "/-._~!$&'()*+;=@"
_OF_URLS = _OF_PATHS + ":?#[]%"
_NONE = "-"


def was_done(request: Request, what: str, of: str = "") -> None:
    """What the request has done, in the past tense; for the line that is written when it was answered.

    :param of: in whose words, such as a dataset's URL.
    """
    was_done_in(request.scope, f"{what} {quote(of, safe=_OF_URLS, errors='replace')}" if of else what)


def was_done_in(scope: Scope, what: str) -> None:
    """As :func:`was_done`, in words of ours."""
    scope[_DONE] = what


def log_request(scope: Scope, asker: str, status: int, num_bytes: int, seconds: float) -> None:
    fields: dict[str, Any] = {
        "asker": asker,
        "method": scope["method"],
        "path": quote(scope["path"], safe=_OF_PATHS, errors="replace"),
        "status": status,
        "bytes": num_bytes,
        "milliseconds": round(1e3 * seconds, 1),
        "team": quote(scope.get(HOLDER) or _NONE, safe=_OF_PATHS, errors="replace"),
        "address": _address(scope),
        "done": scope.get(_DONE, _NONE),
    }
    access_log.info(
        "%(asker)s %(method)s %(path)s: %(status)d, %(bytes)d bytes, %(milliseconds).1f ms, team %(team)s, "
        "address %(address)s, %(done)s",
        fields,
        extra={"fields": fields},
    )


def _address(scope: Scope) -> str:
    """Of the connection itself: no header is believed."""
    client = scope.get("client")
    if not client:
        return "unix"
    host, port = client
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
