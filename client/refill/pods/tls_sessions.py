"""How does a client that comes again to a pod skip most of a TLS handshake? It shows the ticket that the pod gave it.

A ticket is good for the pod that gave it, as long as its process lives, and with the context that the session was made
with. So contexts are kept, too, until the files change that they were made of. Each process has its own; a forked one
goes on with what it finds.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import time
from collections.abc import Callable

from refill.errors import InvalidInput

log = logging.getLogger(__name__)

_MOST_SESSIONS = 1024
"""Pods, of all jobs of a process."""
_LOOK_SECONDS = 0.25

_State = tuple[tuple[str, int, int, int], ...]

_contexts: dict[str | None, tuple[_State, ssl.SSLContext]] = {}
_sessions: dict[tuple[ssl.SSLContext, str, int], ssl.SSLSession] = {}
"""By what it was made with, and where it leads to; the one that was made last at the end."""


def kept_context(ca_file: str | None) -> ssl.SSLContext:
    """For a client, the same one while the certificates are.

    :param ca_file: PEM; None: the system's. Raises :class:`InvalidInput` when they can't be used, and never could.
    """
    state = _state_of(ca_file)
    known = _contexts.get(ca_file)
    if known is not None and known[0] == state:
        return known[1]
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        if known is not None:
            log.warning("%s holds no certificates now, and those that it held count on: %s", ca_file, error)
            return known[1]
        raise InvalidInput(f"{ca_file} holds no certificates, as PEM: {error}") from error
    if known is not None:
        for each in [key for key in list(_sessions) if key[0] is known[1]]:
            _sessions.pop(each, None)
    _contexts[ca_file] = state, context
    return context


class Handshake:
    """The handshake of one connection, which may continue the session of an earlier one to the same pod."""

    def __init__(self, context: ssl.SSLContext, host: str, port: int) -> None:
        self._key = context, host, port
        self._is_kept = False

    def begin(self, sock: socket.socket) -> ssl.SSLSocket:
        """Takes ``sock`` over, in all cases; :meth:`finish` it then."""
        context, host, _ = self._key
        return context.wrap_socket(
            sock, server_hostname=host, do_handshake_on_connect=False, session=_sessions.get(self._key)
        )

    def finish(self, sock: ssl.SSLSocket, seconds: float, still_waits: Callable[[], None]) -> None:
        """Raises OSError when it fails, and TimeoutError when it takes longer than ``seconds``.

        :param still_waits: called now and then while it is under way. Whatever it raises ends it.
        """
        ends = time.monotonic() + seconds
        while True:
            sock.settimeout(max(0.001, min(_LOOK_SECONDS, ends - time.monotonic())))
            try:
                sock.do_handshake()
                return
            except TimeoutError:
                if time.monotonic() >= ends:
                    raise
            still_waits()

    def keep(self, sock: ssl.SSLSocket) -> None:
        """Fact: an answer has come. With TLS 1.3 tickets come just before it."""
        if self._is_kept:
            return
        session = sock.session
        if session is not None and session.has_ticket:
            self._is_kept = True
            _sessions.pop(self._key, None)
            _sessions[self._key] = session
            while len(_sessions) > _MOST_SESSIONS:
                _sessions.pop(next(iter(_sessions)), None)


def _state_of(ca_file: str | None) -> _State:
    """Another one than before: the files were replaced. Those that are not there do not count."""
    paths = ssl.get_default_verify_paths()
    found: list[tuple[str, int, int, int]] = []
    for path in (paths.cafile, paths.capath) if ca_file is None else (ca_file,):
        try:
            seen = os.stat(path) if path else None
        except OSError:
            continue
        if path and seen is not None:
            found.append((path, seen.st_ino, seen.st_mtime_ns, seen.st_size))
    return tuple(found)
