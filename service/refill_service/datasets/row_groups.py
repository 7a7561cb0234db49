"""Where do the rows of a table come from, which are no ranges of bytes? A pod reads a group and decodes it, once.

``refill_service/formats/rows.py`` says what a group is. Who reads samples of a group that is being decoded waits for
it; what has been decoded goes to those who waited, and is kept by nobody here.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refill_service.cache_core.dataset_index import BlobTable, Int64Array
from refill_service.formats.rows import MEANS, MOST_GROUP_BYTES, Group, GroupDamaged, need_pyarrow
from refill_service.formats.table import TABLES
from refill_service.object_store.base import ObjectStore
from refill_service.object_store.second_requests import Room

_KEPT_BYTES = 4 << 20
"""Of footers and schemas, which take some ten times as much once they are read: of more, those longest unused are read
again."""
_COST_TIMES = 4
"""What a group takes while it is decoded, beside what it becomes: its pages, as they came and as pyarrow has them."""


class RowGroups:
    """Reads and decodes groups of rows of one dataset, each once for all who want it. Raises :class:`InvalidInput`
    where pyarrow is not installed.

    :param about: its format, as the index describes it.
    """

    def __init__(self, store: ObjectStore, blobs: BlobTable, about: dict[str, Any]) -> None:
        need_pyarrow()
        self._store, self._blobs, self._about = store, blobs, about
        self._format = TABLES[about["name"]]
        self._files: OrderedDict[str, _File] = OrderedDict()
        """By key, the one longest unused first."""
        self.means = about.get(MEANS) is True
        """Whether lengths in the index are means of groups."""
        self._lengths: dict[int, NDArray[np.uint32]] = {}
        """Of the rows of groups that have been read, when they were first."""
        self._etags: dict[str, str] = {}
        """Of files, when they were indexed or first read."""
        self._decoding: dict[int, _Decoding] = {}

    def cost_bytes(self, blob: int) -> int:
        return (1 + _COST_TIMES) * int(self._blobs.size_bytes[blob])

    async def read(self, blob: int, room: Room | None) -> memoryview:
        """All rows of a group, one after another. Errors of the store, and :class:`GroupDamaged`: also for rows that
        are not as long as they were at first."""
        decoding = self._decoding.get(blob)
        if decoding is None:
            decoding = self._decoding[blob] = _Decoding(asyncio.create_task(self._decoded(blob, room)))
        decoding.num_waiting += 1
        try:
            return await asyncio.shield(decoding.task)
        finally:
            decoding.num_waiting -= 1
            if not decoding.num_waiting:
                decoding.task.cancel()
                if self._decoding.get(blob) is decoding:
                    del self._decoding[blob]

    def ends_of(self, blob: int) -> Int64Array:
        """``(rows + 1,)`` where the rows of a group end, from 0 on, which has been read."""
        return np.concatenate([[0], np.cumsum(self._lengths[blob], dtype=np.int64)])

    def etag_of(self, blob: int) -> str | None:
        """Of the file, when it was indexed or first read."""
        return self._etags.get(file_of(self._blobs.names[blob]))

    async def _decoded(self, blob: int, room: Room | None) -> memoryview:
        name, size_bytes = self._blobs.names[blob], int(self._blobs.size_bytes[blob])
        key, _, place = name.rpartition("#")
        if not key or size_bytes > MOST_GROUP_BYTES:
            raise GroupDamaged(f"{name[:200]!r}, of {size_bytes:,} bytes, can be no group")
        file = self._files.pop(key, None) or _File()
        self._files[key] = file

        etag = self._blobs.etag_of(blob)
        if etag is not None:
            self._etags[key] = etag

        async def read(start: int, end: int, of: str | None = None) -> memoryview:
            of = key if of is None else of
            found = await self._store.read_version(of, start, end, room, etag=self._etags.get(of))
            if found.etag is not None:
                self._store.check_same(of, self._etags.setdefault(of, found.etag), found.etag)
            return found.data

        async def read_about(start: int, end: int, of: str | None = None) -> memoryview:
            file.num_bytes += end - start
            return await read(start, end, of)

        async with file.lock:  # its footer is read once
            group = await self._format.group(place, self._about, read_about, file.kept)
        while sum(each.num_bytes for each in self._files.values()) > _KEPT_BYTES:
            self._files.popitem(last=False)
        pieces = await asyncio.gather(
            *(read(start, end) for start, end in group.ranges),
            *(read(start, end, of) for of, start, end in group.of_others),
        )
        if not self.means:
            return await asyncio.to_thread(_whole, group, pieces, size_bytes)
        first = self._blobs.first_sample
        num_rows = int(first[blob + 1] - first[blob])
        data, lengths = await asyncio.to_thread(_as_they_are, group, pieces, size_bytes, num_rows)
        if not np.array_equal(self._lengths.setdefault(blob, lengths), lengths):
            raise GroupDamaged("its rows are not as long as when this pod first read them")
        return data


@dataclass
class _File:
    """What is kept of a file whose groups are read."""

    kept: dict[str, Any] = field(default_factory=dict)
    """By its format."""
    num_bytes: int = 0
    """That were read for it."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass
class _Decoding:
    """A group that is being decoded, and how many wait for it."""

    task: asyncio.Task[memoryview]
    num_waiting: int = 0


def file_of(name: str) -> str:
    """The key of a group's file."""
    return name.rpartition("#")[0]


def _whole(group: Group, pieces: Sequence[memoryview], size_bytes: int) -> memoryview:
    found, place = bytearray(size_bytes), 0
    for block in group.decode(pieces):
        end = place + len(block.data)
        if end > size_bytes:
            break
        found[place:end] = block.data
        place = end
    else:
        if place == size_bytes:
            return memoryview(found).toreadonly()
    raise GroupDamaged(f"it has other rows than when it was indexed: they took {size_bytes:,} bytes")


def _as_they_are(
    group: Group, pieces: Sequence[memoryview], most_bytes: int, num_rows: int
) -> tuple[memoryview, NDArray[np.uint32]]:
    """The rows, and how long each is, where no more is known than what all take at most."""
    found, lengths, size = list[bytes](), [np.empty(0, dtype=np.uint32)], 0
    for block in group.decode(pieces):
        size += len(block.data)
        if size > most_bytes:
            raise GroupDamaged(f"its rows take more than the {most_bytes:,} bytes that its file says")
        found.append(block.data)
        lengths.append(block.lengths.astype(np.uint32))
    if (count := sum(map(len, lengths))) != num_rows:
        raise GroupDamaged(f"it has {count} rows, and had {num_rows} when it was indexed")
    return memoryview(b"".join(found)), np.concatenate(lengths)
