"""May this pack write there, and is it still alone?

A marker object says who is packing. Without it, or an index that ``pack`` made, blobs are not known to be ours,
and are never touched. The marker goes when the index is there; a pack that was killed leaves marker and blobs, and
the next one starts clean. A store has no locks: two packs that start in the same second are told apart by the
marker that was written last, which every pack checks before each blob and before its index. What remains is a pack
that sleeps for longer than ``STALE_SECONDS`` with an upload on its way, while another one takes its place: that
upload may replace one of the new blobs. Checksums then name its samples. If it is the marker that was on its way, the
pack sees how long it has slept, and ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from refill.errors import DatasetError, DatasetExists, InvalidInput, RefillError, StoreNotFound, StoreUnavailable
from refill_service.cache_core.dataset_index import INDEX_KEY, KEPT_KEY, DatasetIndex, is_kept_key
from refill_service.datasets.dataset_reader import read_index
from refill_service.datasets.progress import bytes_text
from refill_service.object_store.base import ObjectStore

MARKER_KEY = "refill.packing"
PART_PREFIX = "refill.part."
OUR_BLOB = re.compile(r"blob-\d{6,}(-\d+)?\.tar")
_OURS = re.compile(
    rf"{OUR_BLOB.pattern}|{KEPT_KEY.pattern}|{re.escape(PART_PREFIX)}\d+|{re.escape(INDEX_KEY)}|{re.escape(MARKER_KEY)}"
)

_MARKER_BYTES = 512
RENEW_SECONDS = 10.0
STALE_SECONDS = 60.0
"""A marker that was not renewed for so long is that of a pack that was killed."""


def blob_name(number: int, piece: int = 0) -> str:
    return f"blob-{number:06}{f'-{piece}' if piece else ''}.tar"


def is_ours(key: str) -> bool:
    """Whether ``refill pack`` or ``refill index`` gives this name to what they write."""
    return _OURS.fullmatch(key) is not None


def part_name(number: int) -> str:
    """Of the object that says that a part is stored, while a pack that can be gone on with is under way."""
    return f"{PART_PREFIX}{number:06}"


@dataclass(frozen=True)
class Marker:
    """Says which process packs to a place, and that it still does."""

    run: str
    host: str
    pid: int
    at: float
    """Seconds since 1970 when it was last renewed, by that host's clock; 0: it has ended, and left what it had."""
    plan: str = ""
    """What is packed, and how, of a pack that another one may go on with."""

    @property
    def is_stale(self) -> bool:
        if self.host == socket.gethostname() and not _is_running(self.pid):
            return True
        return time.time() - self.at > STALE_SECONDS


class PackClaim:
    """The right to write one dataset. ``look`` changes nothing; ``begin`` then clears the way.

    :param plan: what is packed, and how, in some letters: what a pack with the same one has left is gone on with.
    """

    def __init__(self, store: ObjectStore, plan: str = "") -> None:
        self._store, self._plan = store, plan
        self.goes_on = False
        """Whether parts that are stored stay."""
        self.run = uuid.uuid4().hex
        self._renewing: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._has_slept = False
        """For so long that what is there may be another's."""
        self.replaces = False
        """Whether there is a dataset already."""

    async def look(self, *, force: bool) -> None:
        """Raises :class:`DatasetExists` if there is something that this pack must not replace."""
        store = self._store
        marker = await marker_of(store)
        if marker is not None and not marker.is_stale:
            # Not even by force: what is on its way from there could replace blobs of ours.
            raise DatasetExists(
                f"{store.url}: a pack on {marker.host} (process {marker.pid}) is writing there; wait for it, or stop"
                f" it and start again {STALE_SECONDS:.0f} s later"
            )
        has_index, index = await _index_of(store)
        if has_index and not force:
            raise DatasetExists(f"{store.url} holds a dataset already; replace it with --force or choose another place")
        self.replaces = has_index
        self.goes_on = bool(self._plan) and not has_index and marker is not None and marker.plan == self._plan
        ours = marker is not None or (index is not None and index.metadata.get("made_by") == "pack")
        if not ours:
            async for found in store.list("blob-"):
                if OUR_BLOB.fullmatch(found.key):
                    raise DatasetExists(
                        f"{store.url} holds {found.key}, which `refill pack` would overwrite but is not known to have"
                        " written; choose another place, or delete it yourself"
                    )

    async def check_room(self, size_bytes: int) -> None:
        """Raises :class:`InvalidInput` where so much does not fit beside a dataset that is there: that would be gone
        before it is known whether the new one can be written. Leftovers of a pack that was killed make room."""
        free_bytes = await self._store.free_bytes()
        if free_bytes is None:
            return
        if not self.replaces:
            async for found in self._store.list("blob-"):
                free_bytes += found.size_bytes
        stays = "; the dataset that is there stays: delete it first if it may go" if self.replaces else ""
        takes = f"this takes {bytes_text(size_bytes)}{stays}"
        if size_bytes > free_bytes:
            raise InvalidInput(f"{self._store.url} has room for {bytes_text(free_bytes)}, and {takes}")
        if self.replaces:
            try:
                await self._store.try_room(MARKER_KEY, size_bytes)
            except StoreUnavailable as error:
                raise InvalidInput(f"{error.message}, and {takes}") from error

    async def begin(self) -> None:
        """Put up the marker; remove index, then blobs, of an older dataset or a pack that was broken off."""
        await self._renew()
        if self.goes_on:
            await self.check()
            await self._store.discard_unfinished(_OURS)
            self._renewing = asyncio.create_task(self._keep_renewing())
            return
        await self._store.delete(INDEX_KEY)
        await self._delete_blobs()
        await self._store.discard_unfinished(_OURS)
        await self.check()
        self._renewing = asyncio.create_task(self._keep_renewing())

    async def check(self) -> None:
        """Raises unless the marker is still ours, and renewing it has not failed."""
        if self._renewing is not None and self._renewing.done():
            self._renewing.result()
        await check_is_of(self._store, self.run)

    async def commit(self) -> None:
        """The index is written: take down the marker."""
        await self._stop_renewing()
        await self._delete_parts()
        await self._store.delete(MARKER_KEY)

    async def leave(self) -> None:
        """Leave what is stored to a pack that goes on with it, which may begin at once."""
        await self._stop_renewing()
        with suppress(RefillError):  # why it ended matters more; without this, the next one waits a minute
            await self.check()
            if self._has_slept:
                await self._store.delete(MARKER_KEY)
            else:
                await self._write_marker(0.0)

    async def abort(self) -> None:
        """Remove what this pack wrote, as long as the place is still ours; else leave everything."""
        await self._stop_renewing()
        try:
            await self.check()
            if not self._has_slept:
                await self._store.delete(INDEX_KEY)
                await self._delete_blobs()
                await self._store.discard_unfinished(_OURS)  # of processes that were killed
            await self._store.delete(MARKER_KEY)
        except RefillError:
            # Why the pack failed matters more, and is on its way to the user; the marker lets the next one clean up.
            return

    async def _keep_renewing(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), RENEW_SECONDS)
            if self._stop.is_set():
                return
            looked_at = time.time()
            await self.check()
            await self._renew()
            if time.time() - looked_at > STALE_SECONDS:
                self._has_slept = True
                raise DatasetExists(
                    f"{self._store.url}: this pack stood still for more than {STALE_SECONDS:.0f} s, in which another "
                    "one may have taken over; it ends: if there is no dataset now, start it again"
                )

    async def _stop_renewing(self) -> None:
        # Not cancelled: a write that was given up may still arrive, after the marker was deleted.
        self._stop.set()
        if self._renewing is not None:
            await asyncio.wait([self._renewing])
            self._renewing.exception()  # retrieved; `check` has raised it if it mattered
            self._renewing = None

    async def _renew(self) -> None:
        await self._write_marker(time.time())

    async def _write_marker(self, at: float) -> None:
        marker = {"run": self.run, "host": socket.gethostname(), "pid": os.getpid(), "at": at, "plan": self._plan}
        # Of one length, so that whoever reads while it is replaced gets the old one or the new one.
        await self._store.write(MARKER_KEY, json.dumps(marker).encode().ljust(_MARKER_BYTES))

    async def _delete_parts(self) -> None:
        for key in [found.key async for found in self._store.list(PART_PREFIX)]:
            await self._store.delete(key)

    async def _delete_blobs(self) -> None:
        """And what says something of them."""
        for kept in [found.key async for found in self._store.list("refill.") if is_kept_key(found.key)]:
            await self._store.delete(kept)
        await self._delete_parts()
        batch: list[str] = []
        async for found in self._store.list("blob-"):
            if OUR_BLOB.fullmatch(found.key):
                batch.append(found.key)
            if len(batch) == 100:
                await asyncio.gather(*map(self._store.delete, batch))
                batch.clear()
        await asyncio.gather(*map(self._store.delete, batch))


async def check_is_of(store: ObjectStore, run: str) -> None:
    """Raises :class:`DatasetExists` unless the marker is that of this run, whichever process of it asks."""
    marker = await marker_of(store)
    if marker is None or marker.run != run:
        who = "was removed" if marker is None else f"is that of a pack on {marker.host} (process {marker.pid})"
        raise DatasetExists(f"{store.url}: another pack took over ({MARKER_KEY} {who}); this one ends")


async def marker_of(store: ObjectStore) -> Marker | None:
    """Who packs there, or was packing when it was killed."""
    try:
        data = await store.read_range(MARKER_KEY, 0, await store.head(MARKER_KEY))
    except StoreNotFound as error:
        if error.details.get("code") == "NoSuchBucket":
            raise
        return None
    try:
        found: dict[str, Any] = json.loads(bytes(data))
        return Marker(
            str(found["run"]), str(found["host"]), int(found["pid"]), float(found["at"]), str(found.get("plan", ""))
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{store.url_of(MARKER_KEY)} is not a marker of `refill pack`; delete it") from error


async def _index_of(store: ObjectStore) -> tuple[bool, DatasetIndex | None]:
    """Whether there is an index, and what it says if it can be read: a damaged one may be replaced as well."""
    try:
        await store.head(INDEX_KEY)
    except StoreNotFound:
        return False, None
    try:
        return True, await read_index(store)
    except DatasetError:
        return True, None


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
