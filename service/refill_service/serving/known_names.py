"""By which names may a pod be asked that wants no token? A browser on its machine is not to ask for a page's owner.

A page can give its own name the address 127.0.0.1 (DNS rebinding), and then reads what a pod there answers. The browser
still says by which name it asks. So a pod that listens on loopback alone answers to names of loopback, and to those of
its URLs. Where it listens for other machines, it can't know all its names: there pages are refused that name another
origin than the pod.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from refill.errors import NotAllowed
from refill_service.serving.request_guard import wire_answer
from refill_service.settings import Settings

__all__ = ["KnownNames"]

_KEPT = 64
"""Names that were looked at: those who ask for batches ask by few."""


class KnownNames:
    """An ASGI application around another one, which sees requests only that name this pod. The Unix socket has no name,
    and no page reaches it."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._listens_on_loopback = _is_of_loopback(settings.host)
        self._configured = {urlsplit(url).hostname for url in settings.pod_urls} | {settings.host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (wrong := self._wrong_with(scope)) is not None:
            status, headers, body = wire_answer(NotAllowed(wrong))
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        await self._app(scope, receive, send)

    def refuses(self, scope: Scope) -> bool:
        return self._wrong_with(scope) is not None

    def _wrong_with(self, scope: Scope) -> str | None:
        return None if (scope.get("server") or ("", None))[1] is None else self._wrong_in(scope)

    def _wrong_in(self, scope: Scope) -> str | None:
        """In words; None: nothing."""
        hosts = [_name_in(f"//{value}") for value in _values(scope, b"host")]
        names = hosts if self._listens_on_loopback else []
        origins = [_name_in(value) for value in _values(scope, b"origin")]
        # Where any name may be the pod's, a page of the pod itself names the same one.
        of_pod = {} if self._listens_on_loopback else set(hosts)
        for name in (*names, *(each for each in origins if each not in of_pod)):
            if not self._is_known(name):
                return (
                    "without client_tokens this pod answers to localhost and the names in pod_urls, and this request "
                    f"is for {name[:60]!r} or comes from a page there: ask for localhost, or give the pod client_tokens"
                )
        return None

    def _is_known(self, name: str) -> bool:
        return name in self._configured or _is_of_loopback(name)


def _values(scope: Scope, header: bytes) -> Collection[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == header]


@lru_cache(maxsize=_KEPT)
def _name_in(url: str) -> str:
    """Empty where there is none, as in ``null``."""
    try:
        return urlsplit(url.strip()).hostname or ""
    except ValueError:
        return ""


@lru_cache(maxsize=_KEPT)
def _is_of_loopback(host: str) -> bool:
    name = host.lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):  # nobody else can own these: RFC 6761
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
