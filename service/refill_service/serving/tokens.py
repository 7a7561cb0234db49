"""Which bearer tokens does a pod take, and who holds each? Read from files, and again when they change."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from pathlib import Path

from refill.errors import InvalidInput

__all__ = ["Tokens"]

log = logging.getLogger(__name__)

_LEAST_LETTERS = 16
_LOOK_SECONDS = 2.0
_OVERLAP_SECONDS = 300.0
"""How long a token is still taken that is in no file any more: those who hold it get to see the new one later."""


class Tokens:
    """Tokens of one file, or of a folder with one file for each *holder*, named like them, as a mounted Secret is.

    A file has a token a line; several while they are rotated. Tokens of a single file have the holder ``""``.
    Raises :class:`InvalidInput` when the path holds no token at the start; later what was read last stays.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._holders = self._read()
        self._replaced: dict[bytes, tuple[str, float]] = {}
        """Digests of tokens that are in no file any more: whose, and until when they are taken."""
        self._looked = time.monotonic()

    def holder_of(self, token: bytes) -> str | None:
        """Who holds it; None when nobody does. Takes as long whatever the token is."""
        self._look_again()
        presented, now, found = _digest(token), time.monotonic(), None
        for digest, (holder, until) in self._replaced.items():
            if hmac.compare_digest(digest, presented) and now < until:
                found = holder
        for digest, holder in self._holders.items():
            if hmac.compare_digest(digest, presented):
                found = holder
        return found

    def _look_again(self) -> None:
        now = time.monotonic()
        if now < self._looked + _LOOK_SECONDS:
            return
        self._looked = now
        try:
            found = self._read()
        except InvalidInput as error:
            log.warning("%s; those read before stay", error)
            return
        for digest in self._holders.keys() - found.keys():
            self._replaced[digest] = (self._holders[digest], now + _OVERLAP_SECONDS)
        self._replaced = {digest: old for digest, old in self._replaced.items() if now < old[1]}
        self._holders = found

    def _read(self) -> dict[bytes, str]:
        """Holders by the digests of their tokens: what is compared has one length, and no token stays in memory."""
        path, holders = self._path, {}
        try:
            # A mounted Secret has its versions in folders whose names begin with a dot.
            names = sorted(each for each in path.iterdir() if not each.name.startswith(".")) if path.is_dir() else []
            for file in names or [path]:
                for line in file.read_bytes().splitlines():
                    if not (token := line.strip()):
                        continue
                    if len(token) < _LEAST_LETTERS or not token.isascii() or b" " in token:
                        raise InvalidInput(
                            f"tokens in {file} need {_LEAST_LETTERS} letters or more without spaces, one a line "
                            "(openssl rand -hex 32)"
                        )
                    holders[_digest(token)] = file.name if names else ""
        except OSError as error:
            raise InvalidInput(f"tokens can't be read from {path}: {error.strerror}") from error
        if not holders:
            raise InvalidInput(f"{path} holds no token: one a line")
        return holders


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
