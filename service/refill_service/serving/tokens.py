"""Which bearer tokens does a pod take, and who holds each? Read from files, and again when they change."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from pathlib import Path

from refill.errors import InvalidInput

log = logging.getLogger(__name__)

_MIN_LETTERS = 16
_LOOK_SECONDS = 2.0


class Tokens:
    """Tokens of one file, or of a folder with one file for each *holder*, named like them, as a mounted Secret is.

    A file has a token a line; several while they are rotated. Tokens of a single file have the holder ``""``.
    Raises :class:`InvalidInput` when the path can't be read, or holds no token, at the start. Later every file counts
    for itself: a token that is no longer in it, because it was taken away, emptied, damaged or can't be read, is
    taken for ``overlap_seconds`` more and then never again.
    """

    def __init__(self, path: Path, overlap_seconds: float) -> None:
        self._path = path
        self._overlap_seconds = overlap_seconds
        self._holders, wrong = self._read()
        if wrong or not self._holders:
            raise InvalidInput(wrong[0] if wrong else f"{path} holds no token: one a line")
        self.holders = frozenset(self._holders.values())
        """Those who have a token now."""
        self._wrong: list[str] = []
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
        found, wrong = self._read()
        for each in wrong:
            if each not in self._wrong:
                log.warning("%s; tokens that it held before end in %g s", each, self._overlap_seconds)
        if self._holders and not found:
            log.warning("%s holds no token any more: in %g s nobody gets in", self._path, self._overlap_seconds)
        self._wrong = wrong
        for digest in self._holders.keys() - found.keys():
            self._replaced[digest] = (self._holders[digest], now + self._overlap_seconds)
        self._replaced = {digest: old for digest, old in self._replaced.items() if now < old[1]}
        self._holders, self.holders = found, frozenset(found.values())

    def _read(self) -> tuple[dict[bytes, str], list[str]]:
        """Holders by the digests of their tokens, and what is wrong with which file.

        Digests: what is compared has one length, and no token stays in memory.
        """
        path, holders, wrong = self._path, dict[bytes, str](), list[str]()
        try:
            # A mounted Secret has its versions in folders whose names begin with a dot.
            found = sorted(each for each in path.iterdir() if not each.name.startswith(".")) if path.is_dir() else None
        except OSError as error:
            return {}, [f"tokens can't be read from {path}: {error.strerror}"]
        for file in [path] if found is None else found:
            try:
                lines = [line.strip() for line in file.read_bytes().splitlines()]
            except OSError as error:
                wrong.append(f"tokens can't be read from {file}: {error.strerror}")
                continue
            tokens = [line for line in lines if line]
            if not all(map(_is_token, tokens)):
                wrong.append(
                    f"tokens in {file} need {_MIN_LETTERS} letters or more, ASCII without spaces, one a line "
                    "(openssl rand -hex 32)"
                )
            holder = "" if found is None else file.name
            own = {_digest(token): holder for token in tokens if _is_token(token)}
            if other := next((holders[each] for each in own if each in holders), ""):
                wrong.append(f"{file} has a token that is in {path / other}, too: each team needs tokens of its own")
            holders = own | holders
        return holders, wrong


def _is_token(line: bytes) -> bool:
    return len(line) >= _MIN_LETTERS and line.isascii() and b" " not in line


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
