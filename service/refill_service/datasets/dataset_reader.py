"""How is a dataset opened and read? The index by share, the samples by ranges that are verified."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from refill.errors import (
    DatasetNotFound,
    DatasetReplaced,
    IndexDamaged,
    InvalidInput,
    NotAllowed,
    RefillError,
    SampleDamaged,
    StoreNotFound,
    StoreUnavailable,
)
from refill.protocol.column_values import BLOCK_VALUES, LABELS, decode_values, joined_values
from refill_service.cache_core import dataset_columns
from refill_service.cache_core.dataset_index import (
    HEADER_BYTES,
    INDEX_KEY,
    BlobTable,
    DatasetIndex,
    IndexHeader,
    Int64Array,
    SampleRecords,
    column_key,
    decode_header,
    decode_index,
    is_fingerprint,
    kept_key,
    sample_checksum,
)
from refill_service.cache_core.dataset_labels import LabelSummary, summary_in
from refill_service.cache_core.policies.registry import kind_of
from refill_service.cache_core.record_pieces import RecordPieces, Records, block_runs
from refill_service.datasets.first_checksums import FirstChecksums
from refill_service.datasets.index_room import IndexRoom
from refill_service.datasets.row_groups import RowGroups, file_of
from refill_service.formats.rows import GroupDamaged, need_pyarrow
from refill_service.formats.table import TABLES
from refill_service.object_store.base import ObjectReplaced, ObjectStore, ObjectTooShort
from refill_service.object_store.open_store import open_store
from refill_service.object_store.second_requests import Room
from refill_service.object_store.store_counters import StoreCounters
from refill_service.object_store.store_settings import StoreSettings
from refill_service.object_store.store_url import parse_url

_FIRST_READ_BYTES = 256 << 10
"""Holds the head of an index of a few thousand blobs, so that opening takes one request, and all of the index of some
ten thousand samples, so that their records take none."""

_RECORDS_READ_BYTES = 4 << 20
"""Most bytes of records in one request."""
_RECORDS_AT_ONCE = 8
"""Requests for them."""
_PIECES_AT_ONCE = 64
"""The same where each is for a block or a few."""
_GAP_BLOCKS = 2
"""So many blocks that nobody wants are read rather than that another request is made."""

_SAMPLE_BYTES = 32
"""What a pod holds of the index for each sample of its share: its record, and its part of the chunks."""

_LENGTH_BYTES = 4
"""More, where lengths are what a pod has found them to be."""

_DECODED_TIMES = 16
"""What metadata takes as Python's objects, many times its text."""

_ETAG_BYTES = 300
"""What a blob's ETag takes, or less."""

_AT_ONCE_SAMPLES, _AT_ONCE_HEAD_BYTES = 100_000, 64 << 10
"""More than these are decoded off the event loop."""

_Found = TypeVar("_Found", SampleRecords, RecordPieces)


class Dataset:
    """A dataset in a store. Holds the blob table and metadata; the records belong to who loaded them.

    :param store: holds the index.
    :param data_store: holds the blobs: the same one, unless they lie elsewhere.
    :param start: the first bytes of the index, which hold some records already.
    :param is_kept: whether that is an earlier version, for which :func:`kept_key` has the name.
    :param owned: stores that end with it.
    """

    def __init__(
        self,
        url: str,
        store: ObjectStore,
        index: DatasetIndex,
        start: memoryview,
        *,
        data_store: ObjectStore,
        owned: list[ObjectStore],
        is_kept: bool = False,
        room: IndexRoom | None = None,
    ) -> None:
        self.url = url
        self.store = store
        self._data_store = data_store
        self._is_kept = is_kept
        self.index = index
        self._start = start
        self._owned = owned
        self._room = room
        self._reserved_bytes = 0 if room is None else _head_room_bytes(index.header)
        self._ahead: asyncio.Task[SampleRecords] | None = None
        """Reads all records."""
        self._etags: dict[int, str] = {}
        """Of blobs, as they were when each was read for the first time: none may change while it is in use."""
        self._column: tuple[str, Int64Array] | None = None
        """The one that was read last, and where its blocks lie."""
        self._damaged_blobs: set[int] = set()
        """Those may be repaired at any time: which bytes are right checksums say."""
        self._groups = RowGroups(self._data_store, index.blobs, index.metadata["format"]) if _is_table(index) else None
        self._sample_bytes = _SAMPLE_BYTES + _LENGTH_BYTES * self.has_means
        self.read_by = ""
        """The job, for errors."""
        self.shared_as = _shared_as(index.data_url or url, index)
        """Jobs whose datasets have the same one here may share bytes, as far as their records agree."""
        self._first_checksums = FirstChecksums() if room is None else room.first_checksums
        self._seen = None if index.header.has_checksums else self._first_checksums.lease(self.shared_as)

    @classmethod
    async def open(
        cls,
        url: str,
        settings: StoreSettings | None = None,
        *,
        open_place: Callable[[str], tuple[ObjectStore, bool]] | None = None,
        counters: StoreCounters | None = None,
        room: IndexRoom | None = None,
        version: str = "",
    ) -> Dataset:
        """Reads header, metadata and blob table; once more if they are damaged, which may be on their way only.

        What it holds of the index is set aside in ``room`` before it is read.

        :param open_place: opens the store at a URL: that of the index, and the one that the index says its blobs lie
            below, which may be anybody's word. Raises for one that may not be read. Returned is, too, whether the
            dataset owns the store: :meth:`close` closes those that it owns, and so does a failure.
        :param version: the fingerprint that a job began with, for an earlier version where that was kept. Where it was
            not, the dataset is the newest: look at its fingerprint.

        Raises :class:`DatasetNotFound`, :class:`IndexDamaged`, :class:`IndexVersionUnsupported`, :class:`NotAllowed`
        and store errors.
        """
        open_place = open_place or (lambda place: (open_store(place, settings, counters=counters), True))
        store, owns = open_place(url)
        owned = [store] if owns else []
        index: DatasetIndex | None = None
        try:
            index, start = await _head_of(store, room, INDEX_KEY)
            is_kept = False
            if is_fingerprint(version) and int(version, 16) != index.fingerprint:
                with contextlib.suppress(DatasetNotFound):
                    earlier = await _head_of(store, room, kept_key(INDEX_KEY, int(version, 16)))
                    if room is not None:
                        room.release(_head_room_bytes(index.header))
                    (index, start), is_kept = earlier, True
            data_store = store
            if index.data_url is not None:
                data_store, owns = _opened_elsewhere(index.data_url, store.url_of(INDEX_KEY), open_place)
                owned += [data_store] if owns else []
            return cls(
                url.rstrip("/"), store, index, start, data_store=data_store, owned=owned, is_kept=is_kept, room=room
            )
        except BaseException:
            if room is not None and index is not None:
                room.release(_head_room_bytes(index.header))
            for each in owned:
                await each.close()
            raise

    async def close(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.gather(self._ahead, return_exceptions=True)
        if self._room is not None:
            self._room.release(self._reserved_bytes)
            self._reserved_bytes = 0
        if self._seen is not None:
            self._first_checksums.release(self._seen)
            self._seen = None
        for store in self._owned:
            await store.close()

    @property
    def num_samples(self) -> int:
        return self.index.num_samples

    @property
    def version(self) -> str:
        """Its fingerprint."""
        return f"{self.index.fingerprint:016x}"

    @property
    def blobs(self) -> BlobTable:
        return self.index.blobs

    @property
    def label_summary(self) -> LabelSummary | None:
        """None where samples have no labels."""
        return summary_in(self.index.metadata)

    async def labels(self, first: int, end: int) -> NDArray[np.int32]:
        """Of samples ``[first, end)``, verified. Raises :class:`InvalidInput` where there are none."""
        if self.label_summary is None:
            raise InvalidInput(f"{self.url} has no labels: not each of its samples has a member cls with a number")
        before = first // BLOCK_VALUES * BLOCK_VALUES
        starts = range(before, end, BLOCK_VALUES)
        head = await self.column(LABELS, first // BLOCK_VALUES)  # which has the table read, for all
        rest = (self.column(LABELS, start // BLOCK_VALUES) for start in starts[1:])
        blocks = [head, *await asyncio.gather(*rest)]
        sizes = [min(BLOCK_VALUES, self.num_samples - start) for start in starts]
        try:
            found = joined_values([decode_values(*each) for each in zip(blocks, sizes, strict=True)])
            return np.asarray(found, dtype=np.int32)[first - before : end - before]
        except ValueError as error:
            raise IndexDamaged(f"the labels of {self.url} are no numbers; make the index again") from error

    async def column(self, name: str, block: int) -> memoryview:
        """A block of the values of a column, encoded, verified. Raises :class:`InvalidInput` for one that is not there.

        :param name: as :func:`is_column_name` has them.
        """
        header = self.index.header
        key = column_key(name, header.fingerprint)
        with self._column_errors(name):
            start, end = await self._column_block(name, block)
            data = await self.store.read_range(key, start, end)
            return dataset_columns.block_body(data, block, header.fingerprint, self.store.url_of(key))

    async def column_bytes(self, name: str, block: int) -> int:
        """What reading it takes. Errors as those of :meth:`column`."""
        with self._column_errors(name):
            start, end = await self._column_block(name, block)
            return end - start

    async def _column_block(self, name: str, block: int) -> tuple[int, int]:
        """Where it lies."""
        header, column = self.index.header, self._column
        if column is None or column[0] != name:
            key = column_key(name, header.fingerprint)
            head = bytes(await self.store.read_range(key, 0, dataset_columns.head_bytes(header.num_samples)))
            table = dataset_columns.decode_table(head, header.num_samples, header.fingerprint, self.store.url_of(key))
            column = self._column = name, table
        start, end = column[1][block : block + 2].tolist()
        return start, end

    @contextlib.contextmanager
    def _column_errors(self, name: str) -> Iterator[None]:
        source = self.store.url_of(column_key(name, self.index.header.fingerprint))
        try:
            yield
        except StoreNotFound as error:
            raise InvalidInput(
                f"{self.url} has no column {name!r}, not in this version of it: write it by refill index {self.url} "
                f"--column {name}"
            ) from error
        except (ObjectTooShort, IndexDamaged) as error:
            self._column = None  # it may have been written anew
            if isinstance(error, IndexDamaged):
                raise
            raise IndexDamaged(f"{source} ends too early; write it again", index=source) from error

    async def lengths(self, first: int, end: int) -> NDArray[np.int64]:
        """Bytes of samples ``[first, end)``, read for one answer and not kept. Errors as of :meth:`load_records`, and
        of :meth:`check_lengths`."""
        self.check_lengths("an order or packing by length")
        self.check_room(end - first)
        return (await self._load_records(first, end)).length

    @property
    def group_samples(self) -> int | None:
        """K of all jobs, where samples are rows that are decoded a group at a time: those of the largest group. None:
        they are not, and each job may choose."""
        return None if self._groups is None else max(1, int(np.diff(self.blobs.first_sample).max(initial=1)))

    @property
    def has_means(self) -> bool:
        """Whether lengths in the index are means of groups of rows, which was made from headers alone."""
        return self._groups is not None and self._groups.means

    def check_lengths(self, what: str) -> None:
        """Raises :class:`InvalidInput` where they are such means.

        :param what: needs to know them."""
        if self.has_means:
            raise InvalidInput(
                f"{what} needs to know how long each sample is, and nobody knows it of rows of {self.url} before they "
                "are decoded: index it with --checksums all, which reads and decodes all of it once"
            )

    @property
    def way_to_smaller_chunks(self) -> str:
        """For who has no memory for a chunk."""
        return "lower chunk_size" if self._groups is None else "write the dataset with smaller row groups"

    def read_cost_bytes(self, first: int, reach_bytes: int) -> int:
        """What reading a range of so many bytes takes while it lasts, which begins with sample ``first``."""
        return reach_bytes if self._groups is None else self._groups.cost_bytes(self.blobs.blob_of(first))

    def check_chunk_size(self, asked: int) -> None:
        """Raises :class:`InvalidInput` for a K that would have groups of rows decoded again and again."""
        most = self.group_samples
        if most is not None and asked not in (0, most):
            raise InvalidInput(
                f"chunk_size {asked}: a chunk of {self.url} is a row group or record batch, up to {most:,} rows, which "
                "is decoded whole: leave chunk_size out, or write the dataset with smaller ones"
            )

    def chunk_size_of(self, policy: str) -> int:
        """K of a job that names none."""
        if self.group_samples is not None:
            return self.group_samples
        sample_bytes = self.index.sample_bytes / max(1, self.num_samples)
        largest_blob = int(np.diff(self.blobs.first_sample).max(initial=1))
        summary = self.label_summary
        by_class = summary is not None and summary.by_class
        return kind_of(policy).default_chunk_size(self.num_samples, sample_bytes, largest_blob, by_class)

    @property
    def classes_in_pieces(self) -> int | None:
        """Classes that are stored one after another; 0: it is stored mixed, by its labels, or as ``refill pack`` has
        shuffled it. None: nothing says it."""
        if (summary := self.label_summary) is not None:
            return summary.classes * summary.by_class
        metadata = self.index.metadata
        return 0 if metadata.get("made_by") == "pack" and metadata.get("seed") is not None else None

    def check_room(self, num_samples: int) -> None:
        """Raises :class:`MemoryTooSmall` when the records of so many samples find no room. Those that are being loaded
        ahead have theirs, or who loads them learns of it."""
        if self._room is not None and self._ahead is None:
            self._room.check(self.index.header.source, num_samples * self._sample_bytes)

    async def load_records(self, first: int, end: int) -> SampleRecords:
        """Records of samples ``[first, end)``, verified. Raises :class:`IndexDamaged` with section and byte range, when
        they are damaged in a second reading, too; :class:`MemoryTooSmall` before any is read."""
        if self._ahead is not None and (first, end) == (0, self.num_samples):
            ahead, self._ahead = self._ahead, None
            return await ahead
        return await self._reserved_records(first, end)

    def load_ahead(self) -> None:
        """Begin to load the records of all samples, for who will do so."""
        if self._ahead is None:
            self._ahead = asyncio.create_task(self._reserved_records(0, self.num_samples))

    async def loaded_ahead(self) -> None:
        """Wait for that, if it has begun, however it ends."""
        if self._ahead is not None:
            await asyncio.wait([self._ahead])

    async def _reserved_records(self, first: int, end: int) -> SampleRecords:
        if self._room is not None:
            self._room.reserve(self.index.header.source, (end - first) * self._sample_bytes)
            self._reserved_bytes += (end - first) * self._sample_bytes
        try:
            return await self._load_records(first, end)
        except IndexDamaged:
            await self._reads_anew()
            return await self._load_records(first, end)

    async def load_pieces(self, first: Int64Array, end: Int64Array, *, kept: bool = True) -> RecordPieces:
        """Records of the samples ``[first[i], end[i])`` of each piece, ascending, by ranged GETs for the blocks that
        hold them and no other. Errors as of :meth:`load_records`.

        :param kept: until :meth:`records_left`, or the dataset is closed; else for one answer only.
        """
        num_samples = int((end - first).sum())
        self.check_room(num_samples)
        if self._room is not None and kept:
            self._room.reserve(self.index.header.source, num_samples * self._sample_bytes)
            self._reserved_bytes += num_samples * self._sample_bytes
        try:
            try:
                return await self._load_pieces(first, end)
            except IndexDamaged:
                await self._reads_anew()
                return await self._load_pieces(first, end)
        except BaseException:
            if kept:
                self.records_left(num_samples)
            raise

    def records_left(self, num_samples: int) -> None:
        """Fact: so many of :meth:`load_pieces` are held no more."""
        if self._room is not None:
            left_bytes = min(self._reserved_bytes, num_samples * self._sample_bytes)
            self._room.release(left_bytes)
            self._reserved_bytes -= left_bytes

    async def _load_pieces(self, first: Int64Array, end: Int64Array) -> RecordPieces:
        return await self._checked(await self._read_pieces(first, end))

    async def _load_records(self, first: int, end: int) -> SampleRecords:
        self.index.records_range(first, end)  # raises for samples that are not there
        pieces = await self._read_pieces(np.array([first]), np.array([end]))
        return await self._checked(pieces.part(first, end))

    async def _read_pieces(self, first: Int64Array, end: Int64Array) -> RecordPieces:
        """A few parts at once, so that no more than those are in memory beside what is kept."""
        header = self.index.header
        pieces = RecordPieces(first, end, has_checksums=header.has_checksums)
        most_blocks = max(1, _RECORDS_READ_BYTES // header.block_bytes)
        runs = _runs(pieces.first, pieces.end, header.block_samples, header.block_bytes)
        largest = max((stop - start for start, stop in runs), default=1)
        at_once = min(len(runs), _PIECES_AT_ONCE, _RECORDS_AT_ONCE * most_blocks // largest)
        to_read = iter(runs)

        def decode(data: memoryview, low: int, high: int) -> None:
            pieces.put(self.index.decode_records(data, low, high))

        async def load_some() -> None:
            for start, stop in to_read:
                low, high = start * header.block_samples, min(header.num_samples, stop * header.block_samples)
                data = await self._read_blocks(*self.index.records_range(low, high))
                await _off_loop_if_many(high - low, decode, data, low, high)

        await _all_of([load_some() for _ in range(at_once)])
        return pieces

    async def _checked(self, records: _Found) -> _Found:
        await _off_loop_if_many(len(records), self.index.check_records, records)
        return records

    async def read_samples(self, records: Records, first: int, end: int, room: Room | None = None) -> memoryview:
        """The bytes from the start of sample ``first`` to the end of sample ``end - 1``, by one ranged GET.

        The samples must lie in one blob; sample ``s`` is at ``offset[s] - offset[first]`` of the buffer, of the records
        that :meth:`as_read` gives then. Nothing is verified yet: see :meth:`verify_sample`. A blob that ends before
        raises :class:`SampleDamaged` that names the first sample that is cut, if the blob's size could be learned; a
        blob that is gone raises it, too. One that is no longer what it was when it was indexed, or else at its first
        read, raises :class:`DatasetReplaced`.

        :param room: as of :meth:`ObjectStore.read_range`.
        """
        if first >= end:
            raise InvalidInput(f"{self.url}: samples {first}-{end} are none")
        wanted = records.part(first, end)
        blob = self.blobs.blob_of(first)
        if end > int(self.blobs.first_sample[blob + 1]):
            raise InvalidInput(f"{self.url}: samples {first}-{end} lie in more than one blob")
        name = self.blobs.names[blob]
        start, stop = int(wanted.offset[0]), int(wanted.offset[-1] + wanted.length[-1])
        indexed = self.blobs.etag_of(blob)
        known = indexed or (None if blob in self._damaged_blobs else self._etags.get(blob))
        try:
            if self._groups is not None:
                data = await self._groups.read(blob, room)
                if self._groups.means:
                    ends = self._groups.ends_of(blob)
                    place = first - int(self.blobs.first_sample[blob])
                    start, stop = int(ends[place]), int(ends[place + end - first])
                return data[start:stop]
            found = await self._data_store.read_version(name, start, stop, room, etag=known)
            if found.etag is not None and indexed is None:  # others may have read it meanwhile, for the first time
                known = self._etags.setdefault(blob, found.etag)
                self._data_store.check_same(name, None if blob in self._damaged_blobs else known, found.etag)
            return found.data
        except ObjectReplaced as error:
            if indexed is not None:
                raise self._not_as_indexed(name if self._groups is None else file_of(name)) from error
            raise self._replaced(f"blob {name} was replaced", blob=name) from error
        except StoreNotFound as error:
            raise self.damage(wanted, first, "the blob is gone from the store") from error
        except GroupDamaged as error:
            raise self.damage(wanted, first, f"its rows can't be decoded: {error}") from error
        except ObjectTooShort as error:
            if self._groups is not None:
                raise self.damage(wanted, first, "the file ends before these rows do") from error
            raise await self._too_short(wanted, first, end, error) from error

    async def _too_short(self, wanted: SampleRecords, first: int, end: int, error: ObjectTooShort) -> RefillError:
        """Why a blob ends before these samples do."""
        blob = self.blobs.blob_of(first)
        size_bytes = await self._data_store.head(self.blobs.names[blob])
        indexed_bytes = int(self.blobs.size_bytes[blob])
        if size_bytes >= indexed_bytes:  # it may come another time
            return StoreUnavailable(f"{error.message}, and yet it has {size_bytes:,} bytes: the store answers wrongly")
        ends = wanted.offset + wanted.length
        cut = first + int((ends <= size_bytes).sum())
        why = f"the blob ends at byte {size_bytes}, the index says at {indexed_bytes}"
        return self.damage(wanted, min(cut, end - 1), why)

    def as_read(self, records: SampleRecords) -> SampleRecords:
        """The records of neighbouring samples of one blob that have been read. They are others than those of the index
        where that has no more than means of groups (:attr:`has_means`)."""
        if self._groups is None or not self._groups.means:
            return records
        blob = self.blobs.blob_of(records.first_sample)
        place = records.first_sample - int(self.blobs.first_sample[blob])
        ends = self._groups.ends_of(blob)[place : place + len(records) + 1]
        return replace(records, offset=ends[:-1], length=np.diff(ends))

    def is_same(self, etag: str, found: str) -> bool:
        """Whether two ETags of a blob are of one version of it."""
        try:
            self._data_store.check_same("", etag, found)
        except ObjectReplaced:
            return False
        return True

    async def check_not_replaced(self, sample: int) -> None:
        """Raises :class:`DatasetReplaced` when a sample is damaged since its blob, or the index, is another one than
        before. Two requests: for who has found damage."""
        blob = self.blobs.blob_of(sample)
        name, known, indexed = self.blobs.names[blob], self._etags.get(blob), self.blobs.etag_of(blob)
        if self._groups is not None:
            name, known = file_of(name), self._groups.etag_of(blob)
        with contextlib.suppress(StoreNotFound):  # it is gone, as others will say
            etag = await self._data_store.etag(name)
            try:
                self._data_store.check_same(name, indexed, etag)
            except ObjectReplaced as error:
                raise self._not_as_indexed(name) from error
            if indexed is None and None not in (known, etag) and known != etag:
                raise self._replaced(f"blob {name} was replaced", blob=name)
        source = self.store.url_of(self._key(INDEX_KEY))
        try:
            start, index_bytes = await self.store.read_start(self._key(INDEX_KEY), HEADER_BYTES)
            is_same = decode_header(start, source, index_bytes).fingerprint == self.index.fingerprint
        except StoreNotFound as error:
            raise self._replaced("its index is gone", index=source) from error
        except IndexDamaged:
            is_same = True  # for all that can be said
        if not is_same and not await self._was_kept():
            raise self._replaced("its index was replaced", index=source)

    def verify_sample(self, payload: bytes | bytearray | memoryview, records: SampleRecords, sample: int) -> None:
        """Raises :class:`SampleDamaged` unless ``payload`` is what the index says of the sample with this id."""
        place = sample - records.first_sample
        if len(payload) != int(records.length[place]):
            raise self.damage(records, sample, f"{len(payload)} bytes in place of {int(records.length[place])}")
        if self._seen is None or records.has_checksums:
            if sample_checksum(payload) != int(records.checksum[place]):
                raise self.damage(records, sample, "its checksum is wrong")
        elif not self._seen.is_as_before(sample, sample_checksum(payload)):
            raise self.damage(records, sample, "it is not what it was when this pod first read it")

    def damaged(
        self, payloads: Sequence[bytes | memoryview], records: SampleRecords, samples: Int64Array
    ) -> dict[int, SampleDamaged]:
        """What :meth:`verify_sample` has to say of samples ``(n,)``, by their places among them. Mostly nothing: then
        it is done for all at once."""
        suspects: Iterable[int] = range(len(payloads))
        if self._seen is None or records.has_checksums:
            places = samples - records.first_sample
            checksums = np.fromiter(map(sample_checksum, payloads), np.uint64, len(payloads))
            lengths = np.fromiter(map(len, payloads), np.int64, len(payloads))
            is_other = (checksums != records.checksum[places]) | (lengths != records.length[places])
            suspects = np.flatnonzero(is_other).tolist()
        found: dict[int, SampleDamaged] = {}
        for place in suspects:
            try:
                self.verify_sample(payloads[place], records, int(samples[place]))
            except SampleDamaged as error:
                found[place] = error
        return found

    def damage(self, records: SampleRecords, sample: int, why: str) -> SampleDamaged:
        """The error that names blob, sample and byte range."""
        place = sample - records.first_sample
        start = int(records.offset[place])
        end = start + int(records.length[place])
        blob = self.blobs.blob_of(sample)
        self._damaged_blobs.add(blob)
        name = self.blobs.names[blob]
        return SampleDamaged(
            f"{self._data_store.url_of(name)}: sample {sample}, bytes {start}-{end}, is damaged: {why}",
            blob=name,
            sample=sample,
            start=start,
            end=end,
        )

    def _not_as_indexed(self, name: str) -> DatasetReplaced:
        return DatasetReplaced(
            f"{self._data_store.url_of(name)} is not the object that was indexed: it has another ETag. If the dataset "
            f"is a copy, or was written once more as it was, index it here (refill index --force {self._indexed_by}); "
            "jobs go on from their states if all samples lie where they lay",
            dataset=self.url,
            blob=name,
        )

    @property
    def _indexed_by(self) -> str:
        data_url = self.index.data_url
        return self.url if data_url is None else f"{data_url} --output {self.url}"

    def _replaced(self, what: str, **details: str) -> DatasetReplaced:
        job = f"job {self.read_by}" if self.read_by else "a job"
        return DatasetReplaced(
            f"dataset {self.url} was replaced while {job} reads it: {what}. End the job (refill end) and start it "
            "again; it goes on from a state if the dataset is the same as before. Write a new dataset to a new URL",
            dataset=self.url,
            **details,
        )

    def _key(self, key: str) -> str:
        return kept_key(key, self.index.fingerprint) if self._is_kept else key

    async def _reads_anew(self) -> None:
        """Fact: what was read of the index is damaged, or of another one."""
        self._start = memoryview(b"")
        await self._was_kept()

    async def _was_kept(self) -> bool:
        """Whether this version of the dataset lies under a name of its own since another one was made; it is read there
        from then on."""
        if not self._is_kept:
            try:
                await self.store.head(kept_key(INDEX_KEY, self.index.fingerprint))
                self._is_kept = True
            except StoreNotFound:
                pass
        return self._is_kept

    async def _read_blocks(self, start: int, stop: int) -> memoryview:
        if stop <= len(self._start):
            return self._start[start:stop]
        key = self._key(INDEX_KEY)
        try:
            return await self.store.read_range(key, start, stop)
        except (ObjectTooShort, StoreNotFound) as error:
            raise IndexDamaged(
                f"{self.store.url_of(key)} is damaged in its records, bytes {start}-{stop}: it changed since it"
                " was opened, and ends before; open the dataset again",
                index=self.store.url_of(key),
                section="records",
                start=start,
                end=stop,
            ) from error


def _opened_elsewhere(
    data_url: str, source: str, open_place: Callable[[str], tuple[ObjectStore, bool]]
) -> tuple[ObjectStore, bool]:
    try:
        return open_place(data_url)
    except (InvalidInput, NotAllowed) as error:
        raise type(error)(f"{source} says that its data lies elsewhere: {error.message}", **error.details) from error


def _shared_as(url: str, index: DatasetIndex) -> str:
    """The place in the store; where records have no checksums that could be compared, with all that says which objects,
    and which versions of them, they are of. Without ETags nothing does."""
    place, header = str(parse_url(url)), index.header
    if header.has_checksums:
        return place
    proof = f"{header.fingerprint:016x}-{header.blobs_checksum:016x}"
    etags = index.blobs.etags
    return f"{place}#{proof}" if etags is not None and all(etags) else f"{place}#{proof}-{uuid.uuid4().hex}"


def _runs(first: Int64Array, end: Int64Array, block_samples: int, block_bytes: int) -> list[tuple[int, int]]:
    """Blocks of each request that is made for some pieces."""
    return list(block_runs(first, end, block_samples, max(1, _RECORDS_READ_BYTES // block_bytes), _GAP_BLOCKS))


def record_requests(
    first: Int64Array, end: Int64Array, block_samples: int, num_samples: int, record_bytes: int
) -> tuple[int, int]:
    """``(requests, samples whose records they read)`` of :meth:`Dataset.load_pieces`."""
    runs = _runs(first, end, block_samples, block_samples * record_bytes)
    return len(runs), sum(min(num_samples, stop * block_samples) - start * block_samples for start, stop in runs)


def held_bytes(num_samples: int, blobs_bytes: int) -> int:
    """What a pod sets aside for the head of an index without much metadata, and the records of so many samples."""
    return 2 * blobs_bytes + _FIRST_READ_BYTES + num_samples * _SAMPLE_BYTES


async def _off_loop_if_many(num_samples: int, what: Callable[..., None], *of: Any) -> None:
    if num_samples > _AT_ONCE_SAMPLES:
        await asyncio.to_thread(what, *of)
    else:
        what(*of)


async def _all_of(loading: list[Coroutine[Any, Any, None]]) -> None:
    """Raises what the first of them raises; then none of them goes on."""
    tasks = [asyncio.create_task(each) for each in loading]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def read_index(store: ObjectStore) -> DatasetIndex:
    index, _ = await _read_head(store, None, INDEX_KEY)
    return index


def _head_room_bytes(header: IndexHeader) -> int:
    of_blobs = 2 * header.blobs_bytes + (0 if header.has_etags else _ETAG_BYTES * header.num_blobs)
    return _DECODED_TIMES * header.metadata_bytes + of_blobs + _FIRST_READ_BYTES


async def _head_of(store: ObjectStore, room: IndexRoom | None, key: str) -> tuple[DatasetIndex, memoryview]:
    try:
        return await _read_head(store, room, key)
    except IndexDamaged:
        return await _read_head(store, room, key)


async def _read_head(store: ObjectStore, room: IndexRoom | None, key: str) -> tuple[DatasetIndex, memoryview]:
    """The head of the index, and the first bytes of the index as they are in the store. What the head takes is set
    aside, unless it can't be read."""
    source = store.url_of(key)
    try:
        start, object_bytes = await store.read_start(key, _FIRST_READ_BYTES)
        header = decode_header(start, source, object_bytes)
    except StoreNotFound as error:
        await _refuse_missing_bucket(store)
        raise DatasetNotFound(
            f"{store.url}: no dataset there (no {INDEX_KEY}); make one with `refill pack`, or with `refill index` of"
            " files that are there already",
            url=store.url,
        ) from error
    wanted_bytes = _head_room_bytes(header)
    if room is not None:
        room.reserve(source, wanted_bytes)
    try:
        return await _read_rest_of_head(store, key, header, start), start
    except BaseException:
        if room is not None:
            room.release(wanted_bytes)
        raise


async def _read_rest_of_head(store: ObjectStore, key: str, header: IndexHeader, start: memoryview) -> DatasetIndex:
    data = start
    try:
        # An index that is replaced between this request and a later one fails its checksums.
        if header.head_bytes > len(data):
            rest = await store.read_range(key, len(data), header.head_bytes)
            data = memoryview(b"".join((data, rest)))
    except (ObjectTooShort, StoreNotFound) as error:
        source = header.source
        raise IndexDamaged(f"{source} changed while it was read; try again", index=source) from error
    sections = data[HEADER_BYTES : header.head_bytes]
    if len(sections) > _AT_ONCE_HEAD_BYTES:
        index = await asyncio.to_thread(decode_index, header, sections)
    else:
        index = decode_index(header, sections)
    if _is_table(index):
        need_pyarrow()
    return index


def _is_table(index: DatasetIndex) -> bool:
    about = index.metadata.get("format")
    name = about.get("name") if isinstance(about, dict) else None
    return isinstance(name, str) and name in TABLES


async def _refuse_missing_bucket(store: ObjectStore) -> None:
    """A bucket that is not there is another error than a bucket without a dataset: listing shows which."""
    async for _ in store.list(INDEX_KEY):
        return
