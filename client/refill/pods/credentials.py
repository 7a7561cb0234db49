"""How does a client show who it is, and know a pod for one? A bearer token, and certificates to trust, from files.

Files are read again when they change, since Kubernetes replaces what a Secret holds while a training run goes on.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Mapping
from pathlib import Path

from refill.errors import InvalidInput
from refill.pods.environment import check_spelling
from refill.pods.tls_sessions import kept_context
from refill.pods.token_hosts import TOKEN_HOSTS_VARIABLE, listed_hosts, may_be_shown, searched_domains

TOKEN_VARIABLE = "REFILL_TOKEN"
TOKEN_FILE_VARIABLE = "REFILL_TOKEN_FILE"
CA_FILE_VARIABLE = "REFILL_CA_FILE"
URL_VARIABLE = "REFILL_URL"
"""Where commands find the service."""
HOLDER_VARIABLE = "REFILL_CONNECTION_HOLDER"
"""``on``, ``off``, or ``auto``: whether one process of the machine holds the connections to pods."""
VARIABLES = (
    TOKEN_VARIABLE,
    TOKEN_FILE_VARIABLE,
    CA_FILE_VARIABLE,
    URL_VARIABLE,
    TOKEN_HOSTS_VARIABLE,
    HOLDER_VARIABLE,
)
"""All that a client reads. Pods have others, which may be set beside it on one machine."""

_LOOK_SECONDS = 2.0
_SHOW_OLD_SECONDS = 120.0
"""Of a token that was replaced: by then those who check it know the new one, and they take the old one for longer."""


class ShownToken:
    """The token in a file: its first line. Raises :class:`InvalidInput` for a file that holds none at the start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._shown = self._newest = self._read()
        self._show_newest_at = 0.0
        self._looked = time.monotonic()

    def text(self) -> str:
        now = time.monotonic()
        if now >= self._looked + _LOOK_SECONDS:
            self._looked = now
            self._look_again(now)
        return self._shown

    def was_refused(self, shown: str) -> bool:
        """Fact: who was asked does not take what was shown. Returns whether there is a newer one, shown from now on:
        another request may have brought that about already."""
        self._look_again(time.monotonic())
        if self._shown == shown:
            self._shown = self._newest
        return self._shown != shown

    def __repr__(self) -> str:
        return f"ShownToken({self._path})"

    def __getstate__(self) -> Path:
        return self._path

    def __setstate__(self, path: Path) -> None:
        self.__init__(path)  # type: ignore[misc]  # in another process, where clocks differ

    def _look_again(self, now: float) -> None:
        try:
            found = self._read()
        except InvalidInput:
            return  # it is being replaced
        if found != self._newest:
            self._newest, self._show_newest_at = found, now + _SHOW_OLD_SECONDS
        if now >= self._show_newest_at:
            self._shown = self._newest

    def _read(self) -> str:
        try:
            lines = self._path.read_text("ascii").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise InvalidInput(f"token file {self._path} can't be read: {why}") from error
        token = lines[0].strip() if lines else ""
        if not _may_be_shown(token):
            raise InvalidInput(f"token file {self._path} holds no token: one line without spaces")
        return token


class Credentials:
    """What a client shows to the service, and which certificates it wants from it. Picklable; no ``repr`` shows a
    token.

    :param token_file: holds the bearer token; None: REFILL_TOKEN_FILE, else the token is REFILL_TOKEN, else none.
    :param ca_file: PEM certificates that the service's must be signed by; None: REFILL_CA_FILE, else the system's.

    Raises :class:`InvalidInput` for a file, or a REFILL_TOKEN, that can't be used, and for a misspelt variable.
    """

    def __init__(self, token_file: str | None = None, ca_file: str | None = None) -> None:
        check_spelling(os.environ, VARIABLES)
        path = token_file or os.environ.get(TOKEN_FILE_VARIABLE)
        self._token: ShownToken | None = ShownToken(Path(path)) if path else None
        if self._token is None:
            _token_of_environment()
        self.ca_file = ca_file or os.environ.get(CA_FILE_VARIABLE) or None
        """None: the system's certificates are trusted."""
        if self.ca_file is not None:
            self.ssl_context()

    def __repr__(self) -> str:
        return f"Credentials({self._token!r}, ca_file={self.ca_file!r})"

    def headers(self) -> dict[str, str]:
        """To be sent with every request."""
        token = self._token.text() if self._token is not None else _token_of_environment()
        return {"Authorization": f"Bearer {token}"} if token else {}

    def may_be_shown(self, url: str, service_url: str) -> bool:
        """Whether they may be sent to a pod that a pod of the service has named (:mod:`refill.pods.token_hosts`)."""
        if not self.headers():
            return True
        listed = listed_hosts(os.environ.get(TOKEN_HOSTS_VARIABLE, ""))
        return may_be_shown(url, service_url, listed, searched_domains())

    def were_refused(self, shown: Mapping[str, str]) -> bool:
        """Fact: a pod does not take the token of a request with these headers. Returns whether there is a newer one,
        shown from now on."""
        token = shown.get("Authorization", "").removeprefix("Bearer ")
        return self._token is not None and self._token.was_refused(token)

    def ssl_context(self) -> ssl.SSLContext:
        """For a client; the same one for all of a process, while the certificates are."""
        return kept_context(self.ca_file)


def _token_of_environment() -> str:
    """Empty when there is none. Checked here, since libraries show a header that they can't send."""
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if token and not _may_be_shown(token):
        raise InvalidInput(f"{TOKEN_VARIABLE} holds no token: one line of ASCII letters without spaces")
    return token


def _may_be_shown(token: str) -> bool:
    """Whether it can stand in a header."""
    return bool(token) and token.isascii() and token.isprintable() and " " not in token
