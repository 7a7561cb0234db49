"""How does what lies in a bucket become a dataset as it lies there? ``refill index``.

Shards are scanned in threads (scanners are not asynchronous), which get their bytes from an event loop that the store
belongs to; in processes of their own where there is much to read. Each byte is read once at most; memory is two ranges
for each shard that is under way, and 24 bytes for each of its samples.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import xxhash

from refill.errors import DatasetExists, EmptyDataset, InvalidInput, RefillError, SampleDamaged, StoreNotFound
from refill_service.cache_core.dataset_index import INDEX_KEY, RecordArray, sample_checksum
from refill_service.datasets.earlier_version import EarlierVersion
from refill_service.datasets.index_writer import IndexWriter
from refill_service.datasets.pack_claim import MARKER_KEY, marker_of
from refill_service.datasets.progress import Progress
from refill_service.datasets.worker_processes import Worker, WorkerProcesses, Workers, WorkerThreads, in_order
from refill_service.formats.interface import HIDDEN, Format, Listing, Options, Plan, Shard, ShardBytes, ShardReport
from refill_service.formats.shard_reader import RANGE_BYTES
from refill_service.formats.table import FORMATS, planned
from refill_service.num_cores import num_cores
from refill_service.object_store.base import ListedVersion, ObjectReplaced, ObjectStore, ObjectTooShort
from refill_service.object_store.open_store import open_store
from refill_service.object_store.store_settings import StoreSettings
from refill_service.object_store.store_url import parse_url


@dataclass
class IndexSummary:
    """What ``refill index`` found and wrote."""

    format: str = ""
    checksums: str = ""
    num_samples: int = 0
    num_blobs: int = 0
    num_files: int = 0
    """Of which some are several blobs, one for each row group."""
    blob_bytes: int = 0
    num_passed_over: int = 0
    """What belongs to no sample."""
    passed_over: str = ""
    """What that is."""
    warnings: list[str] = field(default_factory=list)


_MOST_JOBS = 64
_HEADERS_AT_ONCE = 32
"""Shards of which no more is read than a header: that is a wait, and no work."""
_MUCH_BYTES = 256_000_000
"""Less is read before other processes have begun."""
_MOST_WARNINGS = 20
_BY_NAME_ALONE = ("webdataset", "parquet", "arrow", "tfrecord", "arrayrecord", "jsonl", "zip")
"""Formats that have no index of their own that would name their files, and others beside them."""
_SHOWN_KINDS = 4
_FoundInShard = tuple[Iterable[RecordArray], ShardReport]


async def index_shards(
    url: str,
    settings: StoreSettings | None = None,
    *,
    jobs: int | None = None,
    in_processes: bool | None = False,
    force: bool = False,
    quiet: bool = True,
    format_name: str | None = None,
    checksums: str | None = None,
    options: Options | None = None,
    output: str | None = None,
    append: bool = False,
    names: list[str] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> IndexSummary:
    """Write the index of what lies below ``url``, in the order of names.

    Raises :class:`DatasetExists`, :class:`EmptyDataset`, :class:`SampleDamaged` with shard and byte where one can't
    be read, and errors of the store. Then nothing was written.

    :param jobs: shards that are read whole at once; None: two more than there are cores.
    :param in_processes: whether each is read by a process of its own; None: if there is much to read.
    :param format_name: one of ``FORMATS``; None: whichever is found.
    :param checksums: ``all`` or ``first-read``; None: the latter where headers say where samples lie.
    :param output: the URL below which the index is written, which names ``url`` then; None: beside the files.
    :param append: add what the index that is there does not have, behind it. Its samples keep their ids, and it is kept
        for jobs that have begun with it. Raises :class:`InvalidInput` where that can't be.
    :param names: of all files below ``url``, where the store can't list them; None: a listing.
    :param say: is told what was decided, before shards are read.
    """
    if jobs is not None and not 1 <= jobs <= _MOST_JOBS:
        raise InvalidInput(f"jobs must be 1 to {_MOST_JOBS}, got {jobs}")
    jobs = min(_MOST_JOBS, num_cores() + 2) if jobs is None else jobs
    target = open_store(url if output is None else output, settings)
    earlier: EarlierVersion | None = None
    store = target
    try:
        if append:
            earlier = await EarlierVersion.open(target.url, settings)
            url, output = earlier.data_of(url, output)
            format_name = format_name or earlier.format_name
        if output is not None and parse_url(output) != parse_url(url):
            store = open_store(url, settings)
        await _refuse_unless_free(store, target, force=force or append)
        replaced = await _replaced(target.url, settings) if force else None
        if names is None:
            listing = Listing(store.url, [found async for found in store.list()])
        else:
            listing = Listing(store.url, await _looked_up(store, names), are_named=True)
        asked = checksums or (None if earlier is None else earlier.checksums)
        options = replace(options or Options(), checksums=asked)
        format_, plan = await planned(listing, _Source(store), options, format_name)
        if earlier is not None and checksums is None and not plan.reads_all:
            checksums = earlier.checksums
        checksums = _checksums(checksums, format_, plan)
        hashes = checksums == "all"
        shards = plan.shards if earlier is None else earlier.new_among(format_, plan, listing, checksums)
        summary = IndexSummary(format_.NAME, checksums, num_files=len(plan.shards), passed_over=plan.passed_over)
        if not shards and earlier is not None:
            say(f"all {len(plan.shards):,} files are in the index already")
            earlier.counted_in(summary)
            return summary
        say(
            _said(format_, plan, checksums)
            + ("" if earlier is None else f"; {len(shards):,} of them are new")
            + _left_alone(format_, plan, listing)
        )
        _check_names(store, shards)
        shards = shards if hashes else await _with_etags(store, shards)
        rereads = hashes and not plan.reads_all
        work = _Work(format_.NAME, rereads, hashes or plan.reads_all, plan.reads_all and not plan.in_parts)
        to_read = sum(shard.size_bytes for shard in shards) if work.reads_much else None
        with (
            Progress("indexing", to_read, quiet=quiet) as progress,
            tempfile.TemporaryDirectory(prefix="refill-index-") as folder,
            IndexWriter(Path(folder), has_checksums=hashes, overlaps=plan.overlaps) as writer,
        ):
            if earlier is not None:
                await earlier.write_to(writer)
            if in_processes is None or not work.reads_much:
                in_processes = (to_read or 0) >= _MUCH_BYTES
            if in_processes:
                workers = WorkerProcesses(min(jobs, len(shards)), url, settings, progress.advance)
                await _read_all(workers, work, shards, writer, summary)
            elif plan.reads_none and not hashes:
                for shard in shards:
                    _take(shard, _made_up(format_, shard, store), writer, summary)
            else:
                threads = WorkerThreads(jobs if work.reads_much else _HEADERS_AT_ONCE, store, progress.advance)
                await _read_all(threads, work, shards, writer, summary)
            if writer.num_samples == 0:
                needs = " (files named KEY.EXTENSION)" if format_.NAME == "webdataset" else ""
                raise EmptyDataset(f"{store.url}: {plan.why}, and no samples in them{needs}")
            metadata = {"made_by": "index"} | ({} if earlier is None else earlier.metadata) | plan.metadata
            if replaced is not None and replaced[1] and "classes" not in metadata:
                if replaced[0] == writer.blobs:
                    metadata["classes"] = replaced[1]
                else:
                    summary.warnings.append("the index that was there named classes of other files: they are gone")
            if plan.about:
                metadata["format"] = {"name": format_.NAME} | plan.about
            index = await asyncio.to_thread(writer.finish, metadata, None if target is store else str(parse_url(url)))
            if earlier is not None:
                await earlier.keep(target, Path(folder))
            if writer.labels is not None:
                await target.write(*writer.labels)
            await target.write(INDEX_KEY, index)
            summary.num_samples, summary.num_blobs = writer.num_samples, writer.num_blobs
            summary.blob_bytes = writer.blob_bytes
            summary.warnings[:0] = writer.warnings
            if left := store.not_followed:
                summary.warnings.insert(
                    0, f"{len(left):,} links to folders were not followed, such as {left[0]}: copy what they hold"
                )
        return summary
    finally:
        if earlier is not None:
            await earlier.close()
        await target.close()
        if store is not target:
            await store.close()


async def _refuse_unless_free(store: ObjectStore, target: ObjectStore, *, force: bool) -> None:
    if await marker_of(store) is not None:
        raise DatasetExists(
            f"{store.url}: a pack is writing there, or was broken off ({MARKER_KEY} is there), its blobs are not"
            " complete; let `refill pack` end, or start it again"
        )
    try:
        await target.head(INDEX_KEY)
    except StoreNotFound:
        return
    if not force:
        raise DatasetExists(f"{target.url} has an index already; replace it with --force")


async def _replaced(url: str, settings: StoreSettings | None) -> tuple[list[tuple[str, int]], list[str] | None] | None:
    """``(blobs, names of classes)`` of the index that is replaced: tars of ``refill pack`` don't say these. None: there
    is none, or it is damaged, which is why."""
    try:
        before = await EarlierVersion.open(url, settings)
    except RefillError:
        return None
    try:
        return before.blobs, before.metadata.get("classes")
    finally:
        await before.close()


def _checksums(asked: str | None, format_: Format, plan: Plan) -> str:
    if asked is None:
        return "all" if plan.reads_all else "first-read"
    if asked not in ("all", "first-read"):
        raise InvalidInput(f"checksums must be all or first-read, got {asked!r}")
    if asked == "first-read" and plan.reads_all:
        raise InvalidInput(
            f"no header says where the samples of {format_.NAME} lie here: {plan.how}. Leave --checksums out, which "
            "cost nothing more then"
        )
    return asked


def _said(format_: Format, plan: Plan, checksums: str) -> str:
    if plan.reads_all:
        how = plan.how
    elif checksums == "all":
        how = "all bytes are read once, for checksums"
    else:
        what = "none of their bytes" if plan.reads_none else "headers alone"
        how = f"read are {what} (--checksums first-read)"
    return f"format {format_.NAME}: {plan.why}; {how}"


def _left_alone(format_: Format, plan: Plan, listing: Listing) -> str:
    """What somebody may think is read, too: hidden files named as those that are, and files that lie beside those of a
    format that goes by names."""
    read = {shard.key for shard in plan.shards}
    endings = {_ending(key) for key in read}
    unseen = {each.key for each in listing.all} - {each.key for each in listing.objects} - read
    hidden = sum(_ending(key) in endings for key in unseen)
    left_out = f"; {hidden:,} more are {HIDDEN}" if hidden else ""
    if format_.NAME not in _BY_NAME_ALONE:
        return left_out
    others = [each.key for each in listing.objects if each.key not in read and not _is_own(each.key)]
    kinds = Counter(_ending(key) or "without ending" for key in others)
    few = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common(_SHOWN_KINDS))
    more = ", ..." if len(kinds) > _SHOWN_KINDS else ""
    return left_out + (f"; {len(others):,} other files are left alone ({few}{more})" if others else "")


def _ending(key: str) -> str:
    return PurePosixPath(key).suffix.lower()


def _is_own(key: str) -> bool:
    return any(part.startswith("refill.") for part in key.split("/"))


def _check_names(store: ObjectStore, shards: list[Shard]) -> None:
    """Before anything is read: an index holds names as UTF-8."""
    for shard in shards:
        try:
            shard.key.encode()
        except UnicodeEncodeError as error:
            raise InvalidInput(f"{store.url}/{shard.key!a}: its name is no UTF-8; rename it") from error


async def _looked_up(store: ObjectStore, names: list[str]) -> list[ListedVersion]:
    """As a listing has them: in the order of their UTF-8 bytes."""
    found: list[ListedVersion] = []
    to_ask = iter(sorted(set(names), key=lambda name: name.encode()))

    async def ask() -> None:
        for name in to_ask:
            found.append(await store.look_up(name))

    asking = [asyncio.create_task(ask()) for _ in range(_HEADERS_AT_ONCE)]
    try:
        await asyncio.gather(*asking)
    finally:
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    return sorted(found, key=lambda each: each.key.encode())


async def _with_etags(store: ObjectStore, shards: list[Shard]) -> list[Shard]:
    """A listing has them, in most stores."""
    found = list(shards)
    missing = iter([place for place, shard in enumerate(shards) if shard.etag is None])

    async def ask() -> None:
        for place in missing:
            shard = shards[place]
            found[place] = Shard(shard.key, shard.size_bytes, await store.etag(shard.key), shard.about)

    await asyncio.gather(*(ask() for _ in range(_HEADERS_AT_ONCE)))
    return found


class _Source:
    """What ``plan`` reads by."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def read(self, found: ListedVersion, start: int, end: int) -> memoryview:
        end = min(end, found.size_bytes)
        try:
            data = await self._store.read_version(found.key, min(start, end), end, etag=found.etag)
        except (ObjectTooShort, ObjectReplaced) as error:
            raise _changed(self._store.url_of(found.key), found.key, found.size_bytes) from error
        return data.data


def _changed(source: str, key: str, size_bytes: int) -> SampleDamaged:
    return SampleDamaged(
        f"{source}: it changed while it was indexed, or shrank; it had {size_bytes} bytes. Start again when nobody "
        "writes there",
        blob=key,
        sample=None,
        start=0,
        end=size_bytes,
    )


@dataclass(frozen=True)
class _Work:
    """What is done with each shard; goes to other processes."""

    format_name: str
    hashes: bool
    """Whether samples are read again for their checksums."""
    reads_much: bool
    reads_ahead: bool


async def _read_all(
    workers: Workers, work: _Work, shards: list[Shard], writer: IndexWriter, summary: IndexSummary
) -> None:
    """Their records go to the writer in the order of the shards."""

    async def reads() -> AsyncIterator[Coroutine[Any, Any, _FoundInShard]]:
        for shard in shards:
            yield workers.carry_out(_read_one, work, shard)

    taken = iter(shards)
    await in_order(workers, reads(), lambda found: _take(next(taken), found, writer, summary))


def _read_one(worker: Worker, work: _Work, shard: Shard) -> _FoundInShard:
    ranges = _RangesAhead(worker, shard, reads_ahead=work.reads_ahead)
    try:
        return _scanned(work, shard, ranges)
    except (ObjectTooShort, ObjectReplaced) as error:
        raise _changed(ranges.source, shard.key, shard.size_bytes) from error
    finally:
        ranges.close()


def _scanned(work: _Work, shard: Shard, data: ShardBytes) -> _FoundInShard:
    report = ShardReport()
    batches = list(FORMATS[work.format_name].scan(shard, data, report))
    if work.hashes:
        for batch in batches:
            _add_checksums(batch, data)
    return batches, report


def _made_up(format_: Format, shard: Shard, store: ObjectStore) -> _FoundInShard:
    """Of a shard that is not read, as it is written down: a file of tokens may hold any number of samples."""
    report = ShardReport()
    batches = iter(format_.scan(shard, _NoBytes(store.url_of(shard.key)), report))
    first = list(islice(batches, 1))  # then the report is complete
    return chain(first, batches), report


def _add_checksums(records: RecordArray, data: ShardBytes) -> None:
    """Of all samples, read in ranges."""
    offset: Any = records["offset"]  # else mypy tries all that + may be, for a second
    end = offset + records["length"]
    place = 0
    while place < len(records):
        start = int(offset[place])
        stop = int(np.searchsorted(end, start + RANGE_BYTES, side="right"))
        if stop > place:
            view = data.read(start, int(end[stop - 1]))
            for each in range(place, stop):
                sample = view[int(offset[each]) - start : int(end[each]) - start]
                records["checksum"][each] = sample_checksum(sample)
            place = stop
            continue
        hasher = xxhash.xxh3_64()
        for piece in range(start, int(end[place]), RANGE_BYTES):
            hasher.update(data.read(piece, min(piece + RANGE_BYTES, int(end[place]))))
        records["checksum"][place] = hasher.intdigest()
        place += 1


def _take(
    shard: Shard,
    found: _FoundInShard,
    writer: IndexWriter,
    summary: IndexSummary,
) -> None:
    batches, report = found
    labels = np.array(report.labels, dtype=np.int32) if report.labels else None
    num_samples = writer.num_samples
    if report.parts:
        rows, first = np.concatenate(list(batches)), 0
        for place, count, num_bytes in report.parts:
            writer.add_blob(shard.key + place, num_bytes, [rows[first : first + count]], None, shard.etag)
            first += count
    else:
        writer.add_blob(shard.key, shard.size_bytes, batches, labels, shard.etag)
    summary.num_passed_over += report.num_passed_over
    warnings = [f"{shard.key}: {each}" for each in report.warnings]
    if report.repeated is not None:
        first, again = report.repeated
        warnings.append(
            f"{shard.key}: its samples {first} and {again} have the same key but lie apart; kept as two samples"
        )
    if writer.num_samples == num_samples:
        warnings.append(f"{shard.key}: holds no samples")
    for warning in warnings:
        if len(summary.warnings) < _MOST_WARNINGS:
            summary.warnings.append(warning)


class _NoBytes:
    """Stands for a shard's bytes where a scanner reads none."""

    def __init__(self, source: str) -> None:
        self.source = source

    def read(self, start: int, end: int) -> memoryview:
        raise InvalidInput(f"{self.source}: it was to be indexed without a read")

    def damaged(self, why: str, at: int) -> SampleDamaged:
        return _damaged(self.source, why, at, at)

    def other(self, found: ListedVersion) -> ShardBytes:
        return _NoBytes(self.source)


class _RangesAhead:
    """Gives one thread a range of the shard while the next one is on its way."""

    def __init__(self, worker: Worker, shard: Shard, *, reads_ahead: bool) -> None:
        self.source = worker.store.url_of(shard.key)
        self._worker, self._shard, self._reads_ahead = worker, shard, reads_ahead
        self._next: tuple[tuple[int, int], Future[memoryview]] | None = None

    def read(self, start: int, end: int) -> memoryview:
        self._worker.check()
        if self._next is None or self._next[0] != (start, end):
            self._drop_next()
            self._next = (start, end), self._ask(start, end)
        asked = self._next[1]
        self._next = None
        if self._reads_ahead and end < self._shard.size_bytes:
            ahead = end, min(end + RANGE_BYTES, self._shard.size_bytes)
            self._next = ahead, self._ask(*ahead)
        data = asked.result()
        self._worker.on_bytes(len(data))
        return data

    def damaged(self, why: str, at: int) -> SampleDamaged:
        return _damaged(self.source, why, at, self._shard.size_bytes)

    def other(self, found: ListedVersion) -> ShardBytes:
        return _RangesAhead(self._worker, Shard.of(found), reads_ahead=False)

    def close(self) -> None:
        self._drop_next()

    def _drop_next(self) -> None:
        if self._next is not None:
            self._next[1].cancel()

    def _ask(self, start: int, end: int) -> Future[memoryview]:
        return asyncio.run_coroutine_threadsafe(self._read(start, end), self._worker.loop)

    async def _read(self, start: int, end: int) -> memoryview:
        return (await self._worker.store.read_version(self._shard.key, start, end, etag=self._shard.etag)).data


def _damaged(source: str, why: str, at: int, end: int) -> SampleDamaged:
    return SampleDamaged(
        f"{source}: can't be read from byte {at} on (of {end}): {why}",
        blob=source.rpartition("/")[2],
        sample=None,
        start=at,
        end=end,
    )
