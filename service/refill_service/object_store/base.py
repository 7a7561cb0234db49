"""What does refill ask of an object store?

Six operations, each one asynchronous, rooted at a URL: keys are relative to the bucket and prefix, or to the
folder. Every store behind this interface passes the same tests (tests/service/test_object_store_contract.py).

Callers see errors of :mod:`refill.errors` only: :class:`StoreNotFound`, :class:`StoreDenied`,
:class:`StoreUnavailable` (after the retries), :class:`InvalidInput` for what can't be asked, and
:class:`ObjectTooShort` when an object ends before the range does, and :class:`ObjectReplaced` when it is no longer the
one that is asked for.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from refill.errors import InvalidInput, StoreError
from refill_service.object_store.second_requests import Room, SecondRequests
from refill_service.object_store.store_counters import OverdueRequests, StoreCounters

WritableData = bytes | bytearray | memoryview | Path


class ListedVersion(NamedTuple):
    """An object that a listing names, and which version of it: None where the store does not say."""

    key: str
    size_bytes: int
    etag: str | None


class StoredRange(NamedTuple):
    """Bytes of an object, and of which version of it."""

    data: memoryview
    etag: str | None
    """None: the store names no versions."""


class ObjectReplaced(StoreError):
    """The object is another one than that with the ETag that was asked for. Details: ``key``, ``etag``, and ``found``:
    the one that it has, None where the store does not say."""

    status = 409


class ObjectTooShort(StoreError):
    """The object ends before the range does. Details: ``key``, ``start``, ``end``.

    Whoever knows what the bytes should have been says so: :class:`SampleDamaged` or :class:`IndexDamaged`.
    """


class ObjectStore(ABC):
    """One bucket and prefix, or one folder. Belongs to one event loop; close it there.

    The public methods check their arguments and count; a store implements those with an underscore.
    """

    def __init__(self, url: str, counters: StoreCounters | None = None, *, pause_seconds: float | None = None) -> None:
        """
        :param pause_seconds: as of :class:`SecondRequests`; None: there are none, a request that was given up goes on.
        """
        self.url = url.rstrip("/")
        self.not_followed: list[str] = []
        """Links to folders that a listing came by."""
        self.counters = counters or StoreCounters()
        self._overdue = OverdueRequests()
        self._second = None if pause_seconds is None else SecondRequests(self.counters, pause_seconds)

    def url_of(self, key: str) -> str:
        return f"{self.url}/{key}"

    async def read_range(self, key: str, start: int, end: int, room: Room | None = None) -> memoryview:
        """The bytes ``[start, end)`` of an object: exactly ``end - start`` bytes, never fewer.

        The buffer belongs to the caller and is not touched again by the store. An empty range is answered
        without a request. Raises :class:`ObjectTooShort` when the object ends before ``end``.

        :param room: that the bytes take, where a second request may be made for them (``second_requests.py``).
        """
        return (await self.read_version(key, start, end, room)).data

    async def read_version(
        self, key: str, start: int, end: int, room: Room | None = None, *, etag: str | None = None
    ) -> StoredRange:
        """The same, with the ETag of the object that the bytes are of; an empty range has none.

        :param etag: as it came with other bytes of the object. Where it has another one now, :class:`ObjectReplaced` is
            raised. None: whichever is there.
        """
        self._check_key(key)
        if not 0 <= start <= end:
            raise InvalidInput(f"{self.url_of(key)}: byte range {start}-{end} is not a range")
        if start == end:
            return StoredRange(memoryview(b""), None)
        with self.counters.counted("read_range") as request, self._overdue.watched(self.url_of(key)):
            first = partial(self._read_range, key, start, end, etag=etag)
            if self._second is None or room is None:
                found = await first()
            else:
                found = await self._second.read(end - start, first, partial(first, once=True), room)
            request.num_bytes = len(found.data)
            # Asked for by its ETag, not each store refuses another object.
            self.check_same(key, etag, found.etag)
            if len(found.data) != end - start:
                raise self._too_short(key, start, end, f"it ends at byte {start + len(found.data)}")
            return found

    def check_same(self, key: str, etag: str | None, found: str | None) -> None:
        """Raises :class:`ObjectReplaced` when two ETags of an object, as far as they are known, are of two versions."""
        if etag is not None and found is not None and not self._is_same(etag, found):
            raise self._replaced(key, etag, found)

    async def read_start(self, key: str, most_bytes: int) -> tuple[memoryview, int]:
        """The first bytes of an object, all of a smaller one, and the object's size: one request gets both."""
        self._check_key(key)
        counted = self.counters.counted("read_range", looks_for=True)
        with counted as request, self._overdue.watched(self.url_of(key)):
            buffer, size_bytes = await self._read_start(key, most_bytes)
            request.num_bytes = len(buffer)
            if len(buffer) != min(size_bytes, most_bytes):
                raise self._too_short(key, 0, min(size_bytes, most_bytes), f"it ends at byte {len(buffer)}")
            return buffer, size_bytes

    async def write(self, key: str, data: WritableData) -> None:
        """Create or replace an object, atomically: a reader sees the old bytes or all the new ones.

        ``data`` is not copied; leave it unchanged until this returns. A path is read piece by piece. A write that
        is cancelled may still arrive later.
        """
        self._check_key(key)
        with self.counters.counted("write") as request:
            request.num_bytes = await self._write(key, data)

    async def list(self, prefix: str = "") -> AsyncIterator[ListedVersion]:
        """All objects whose key starts with ``prefix`` (any text), in the order of their UTF-8 bytes, with ETags as
        :meth:`read_version` has them.

        Nothing there, or no such folder, lists nothing; no such bucket raises :class:`StoreNotFound`.
        """
        with self.counters.counted("list", looks_for=True):
            async for listed in self._list(prefix):
                yield listed

    async def look_up(self, key: str) -> ListedVersion:
        """As :meth:`list` has it."""
        self._check_key(key)
        with self.counters.counted("head"), self._overdue.watched(self.url_of(key)):
            return ListedVersion(key, *await self._head(key))

    async def head(self, key: str) -> int:
        """The size of an object in bytes."""
        return (await self.look_up(key)).size_bytes

    async def etag(self, key: str) -> str | None:
        """That an object has now; None where the store names no versions."""
        return (await self.look_up(key)).etag

    async def delete(self, key: str) -> None:
        """Delete an object; one that is not there is no error, as in S3."""
        self._check_key(key)
        with self.counters.counted("delete"):
            await self._delete(key)

    async def discard_unfinished(self, keys: re.Pattern[str]) -> None:
        """Remove what writes that were killed half-way may have left, invisible to the other operations.

        ``keys`` must match the whole key; keys with a '/' are not looked at. A folder: temporary files. S3 keeps
        the parts of unfinished uploads until a lifecycle rule of the bucket removes them; nothing is done there.
        """
        return

    async def free_bytes(self) -> int | None:
        """How much more can be written; None: nobody knows, or there is no bound, as in S3."""
        return None

    async def try_room(self, key: str, size_bytes: int) -> None:
        """Take so much room for a moment, where that costs little: a quota shows in nothing else. Raises
        :class:`StoreUnavailable` where it can't be had. Nothing is written under ``key`` itself."""
        return

    async def close(self) -> None:
        """Give back threads and connections. The store is not usable afterwards."""
        return

    @abstractmethod
    async def _read_range(
        self, key: str, start: int, end: int, *, etag: str | None = None, once: bool = False
    ) -> StoredRange:
        """May return fewer bytes when the object is short, and those of another version.

        :param etag: of the version that is wanted, to save the way for the bytes of another one.
        :param once: it is not tried again.
        """

    @abstractmethod
    async def _read_start(self, key: str, most_bytes: int) -> tuple[memoryview, int]: ...

    @abstractmethod
    async def _write(self, key: str, data: WritableData) -> int:
        """Returns the number of bytes written."""

    @abstractmethod
    def _list(self, prefix: str) -> AsyncIterator[ListedVersion]: ...

    @abstractmethod
    async def _head(self, key: str) -> tuple[int, str | None]:
        """``(size in bytes, ETag)``."""

    @abstractmethod
    async def _delete(self, key: str) -> None: ...

    def _check_key(self, key: str) -> None:
        if not key or "\0" in key or any(part in ("", ".", "..") for part in key.split("/")):
            raise InvalidInput(f"{self.url}: {key!r} is not a key (relative, without empty parts, '.' or '..')")

    def _is_same(self, one: str, other: str) -> bool:
        """Whether ETags are of one version, for all that a store can say in the middle of a run."""
        return one == other

    def _replaced(self, key: str, etag: str, found: str | None) -> ObjectReplaced:
        return ObjectReplaced(
            f"{self.url_of(key)} was replaced: its ETag is {found or 'another'}, and was {etag}",
            key=key,
            etag=etag,
            found=found,
        )

    def _too_short(self, key: str, start: int, end: int, why: str) -> ObjectTooShort:
        return ObjectTooShort(
            f"{self.url_of(key)}: bytes {start}-{end} are not there, {why}", key=key, start=start, end=end
        )
