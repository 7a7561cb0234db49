"""How do samples that Python makes become a dataset? ``refill.pack``, and ``refill pack`` of all but folders of files.

Items are cut into parts of as many as make about a blob. A part is made, built into blobs and stored by one process,
and an object ``refill.part.NNNNNN`` says so, with the records of its samples. So a pack that was killed, when it is
started again with the same items, goes on with the parts that are not there. The index is written last.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import pickle
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing import current_process
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from refill.errors import EmptyDataset, InvalidInput, RefillError
from refill_service.cache_core.dataset_index import INDEX_KEY, RECORD, RecordArray, sample_checksum
from refill_service.cache_core.epoch_order import KeyedPermutation
from refill_service.datasets.blob_builder import (
    END_OF_ARCHIVE,
    BuiltBlob,
    FillingBlob,
    GrowingTar,
    tar_range,
    whole_chunks,
)
from refill_service.datasets.index_writer import IndexWriter
from refill_service.datasets.pack import DEFAULT_BLOB_BYTES, MIN_BLOB_BYTES, MOST_JOBS, SMALL_BYTES
from refill_service.datasets.pack_claim import PART_PREFIX, PackClaim, blob_name, check_is_of, part_name
from refill_service.datasets.pack_sources import is_hugging_face, items_of_hugging_face
from refill_service.datasets.progress import Progress
from refill_service.datasets.sample_members import members_of
from refill_service.datasets.worker_processes import Worker, WorkerProcesses, Workers, WorkerThreads, in_order
from refill_service.num_cores import num_cores
from refill_service.object_store.base import ObjectStore
from refill_service.object_store.open_store import open_store
from refill_service.object_store.store_settings import StoreSettings

MakesSample = Callable[[Any], Any]

_PROBED_ITEMS = 16
"""Made ahead, to learn how large samples are."""
_MOST_PART_ITEMS = 1 << 20
_LARGEST_BLOB = 1.5
"""Times the size that was asked for: a part whose samples are larger than the first ones is several blobs."""
_GOES_ON = "what is packed stays: the same call goes on with it"


@dataclass(frozen=True)
class PackedSamples:
    """What was packed."""

    num_samples: int
    num_blobs: int
    blob_bytes: int
    num_kept: int
    """Samples that an earlier pack, which was broken off, had stored."""
    jobs: int
    """Processes."""
    seconds: float
    made_bytes: int
    """Bytes of blobs that this one has made and stored."""
    making_seconds: float
    """Of all processes together: reading and making samples."""
    storing_seconds: float


@dataclass
class _Part:
    """What a process has stored."""

    num_items: int
    blobs: list[tuple[str, int, RecordArray, NDArray[np.int32]]] = field(default_factory=list)
    """Name, size, and its samples' records and labels."""
    making_seconds: float = 0.0
    storing_seconds: float = 0.0
    is_kept: bool = False

    def to_bytes(self) -> bytes:
        about = {"items": self.num_items, "blobs": [[name, size, len(of)] for name, size, of, _ in self.blobs]}
        head = json.dumps(about).encode() + b"\n"
        arrays = b"".join(records.tobytes() + labels.astype("<i4").tobytes() for _, _, records, labels in self.blobs)
        return head + arrays + xxhash.xxh3_64_digest(head + arrays)

    @classmethod
    def from_bytes(cls, data: bytes) -> _Part | None:
        """None: it is not whole."""
        body = data[:-8]
        if xxhash.xxh3_64_digest(body) != data[-8:]:
            return None
        out = io.BytesIO(body)
        about = json.loads(out.readline())
        found = cls(about["items"], is_kept=True)
        for name, size, count in about["blobs"]:
            records = np.frombuffer(out.read(count * RECORD.itemsize), dtype=RECORD)
            found.blobs.append((name, size, records, np.frombuffer(out.read(4 * count), dtype="<i4")))
        return found


async def pack_samples(
    samples: Iterable[Any],
    url: str,
    settings: StoreSettings | None = None,
    *,
    function: MakesSample | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    blob_bytes: int = DEFAULT_BLOB_BYTES,
    classes: Sequence[str] | None = None,
    force: bool = False,
    quiet: bool = True,
    jobs: int | None = None,
    about: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> PackedSamples:
    """Write samples as a dataset to ``url``; parameters as of :func:`refill.pack`.

    :param about: what the samples are of, beyond their number and the first of them, so that a pack goes on with no
        other's parts.
    :param say: is told what was decided, before anything is written.

    Raises :class:`DatasetExists`, :class:`EmptyDataset`, :class:`InvalidInput` that names an item, and errors of the
    store.
    """
    if getattr(current_process(), "_inheriting", False):  # a process that begins runs the script that began it
        raise SystemExit(
            "refill: call refill.pack below `if __name__ == '__main__':`, since its processes import the script; or "
            "give jobs=1"
        )
    if blob_bytes < MIN_BLOB_BYTES:
        raise InvalidInput(f"blob_bytes must be at least {MIN_BLOB_BYTES}, got {blob_bytes}")
    if jobs is not None and not 1 <= jobs <= MOST_JOBS:
        raise InvalidInput(f"jobs must be 1 to {MOST_JOBS}, got {jobs}")
    if is_hugging_face(samples) and function is None:
        given = items_of_hugging_face(samples)
        samples, function, about, classes = given.samples, given.function, given.about, classes or given.classes
    items = _Items(samples, shuffle, seed)
    started = time.monotonic()
    probed, mean_bytes = await asyncio.to_thread(_probe, items, function)
    fitting = min(_MOST_PART_ITEMS, max(1, round(blob_bytes / mean_bytes)))
    part_items = whole_chunks(fitting, fitting * mean_bytes)
    total_bytes = None if items.count is None else round(mean_bytes * items.count)
    plan = repr((about, items.count, items.shuffles, seed, blob_bytes, part_items, probed))
    if jobs is None:
        small = SMALL_BYTES if function is not None or items.count is not None else float("inf")
        jobs = 1 if (total_bytes or 0) < small else min(MOST_JOBS, num_cores() + 2)
    if total_bytes is not None:
        jobs = min(jobs, -(-(items.count or 1) // part_items))
    makes = function if jobs == 1 else _sent(function)
    store = open_store(url, settings)
    claim = PackClaim(store, xxhash.xxh3_128_hexdigest(plan.encode()))
    try:
        await claim.look(force=force)
        if total_bytes is not None and not claim.goes_on:
            await claim.check_room(total_bytes)
        number = "items" if items.count is None else f"{items.count:,} items"
        order = f"in an order by seed {seed}" if items.shuffles else "in their order"
        say(f"{number}, {order}, {part_items:,} a part, by {jobs} process{'es' * (jobs > 1)}")
        with (
            Progress("packing", total_bytes, quiet=quiet) as progress,
            tempfile.TemporaryDirectory(prefix="refill-pack-") as folder,
            IndexWriter(Path(folder)) as writer,
        ):
            await claim.begin()
            try:
                found = await _store_parts(
                    store,
                    claim,
                    items,
                    makes,
                    jobs,
                    url,
                    settings,
                    part_items,
                    blob_bytes,
                    writer,
                    progress.advance,
                    say,
                )
                metadata: dict[str, Any] = {"made_by": "pack", "seed": seed if items.shuffles else None}
                metadata["classes"] = None if classes is None else list(classes)
                index = await asyncio.to_thread(writer.finish, metadata)
                await claim.check()
                if writer.labels is not None:
                    await store.write(*writer.labels)
                await store.write(INDEX_KEY, index)
            except BaseException:
                await claim.leave()
                raise
            await claim.commit()
            for warning in writer.warnings:
                say(f"warning: {warning}")
            return PackedSamples(
                writer.num_samples,
                writer.num_blobs,
                writer.blob_bytes,
                found.num_kept,
                jobs,
                time.monotonic() - started,
                found.made_bytes,
                found.making_seconds,
                found.storing_seconds,
            )
    finally:
        await store.close()


class _Items:
    """What is given, with a number for each: its place among all."""

    def __init__(self, samples: Iterable[Any], shuffle: bool | None, seed: int) -> None:
        self._sequence: Any = None
        self.count: int | None = None
        self._order: KeyedPermutation | None = None
        self._rest: Iterator[Any] = iter(())
        self._ahead: list[tuple[int, Any]] = []
        self._place = 0
        has_numbers = hasattr(samples, "__len__") and hasattr(samples, "__getitem__")
        if isinstance(samples, (dict, str, bytes)) or not (has_numbers or hasattr(samples, "__iter__")):
            raise InvalidInput(f"refill.pack takes an iterable of samples, got a {type(samples).__name__}")
        if has_numbers:
            self._sequence = samples
            self.count = len(self._sequence)
            if shuffle is not False and self.count:
                self._order = KeyedPermutation(self.count, f"refill pack {seed}")
        elif shuffle:
            raise InvalidInput("shuffle=True needs samples that have a length and can be asked for by number")
        else:
            self._rest = iter(samples)
        self.shuffles = self._order is not None

    def first(self, count: int) -> list[tuple[int, Any]]:
        """Which come again."""
        if self._sequence is not None:
            return self._of(0, count)
        self._ahead = self._next(count)
        return self._ahead

    def take(self, count: int, *, wanted: bool = True) -> tuple[int, list[tuple[int, Any]]]:
        """``(how many come next, and these)``; none where they are not wanted."""
        if self._sequence is not None:
            here, self._place = self._place, min(self._place + count, self.count or 0)
            return self._place - here, self._of(here, count) if wanted else []
        found, self._ahead = self._ahead[:count], self._ahead[count:]
        found += self._next(count - len(found))
        return len(found), found if wanted else []

    def _of(self, first: int, count: int) -> list[tuple[int, Any]]:
        places = np.arange(first, min(first + count, self.count or 0), dtype=np.int64)
        numbers = (places if self._order is None else self._order.forward(places)).tolist()
        found = []
        for number in numbers:
            with _named(number):
                found.append((number, self._sequence[number]))
        return found

    def _next(self, count: int) -> list[tuple[int, Any]]:
        with _named(self._place):
            found = [(self._place + place, item) for place, item in enumerate(itertools.islice(self._rest, count))]
        self._place += len(found)
        return found


@contextlib.contextmanager
def _named(number: int) -> Iterator[None]:
    """What the caller's code raises, with the item in a line."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(f"item {number}: {error.message}") from error
    except RefillError:
        raise
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise InvalidInput(f"item {number}: {why}; {_GOES_ON}") from error


def _sent(function: MakesSample | None) -> bytes:
    """A function as other processes get it."""
    try:
        return pickle.dumps(function)
    except Exception as error:
        raise InvalidInput(
            f"function can't be given to other processes ({' '.join(str(error).split())[:200]}): define it at the top "
            "of a module, or give jobs=1"
        ) from error


@lru_cache(maxsize=1)
def _function_of(sent: bytes) -> MakesSample | None:
    try:
        found: MakesSample | None = pickle.loads(sent)  # of the process that began this one
    except Exception as error:
        raise InvalidInput(
            f"function can't be found in another process ({' '.join(str(error).split())[:200]}): put it into a module "
            "that can be imported, or give jobs=1"
        ) from error
    return found


def _made(function: MakesSample | None, number: int, item: Any) -> tuple[list[bytes], int]:
    """``(pieces of a tar, label)`` of an item."""
    with _named(number):
        return tar_range(*members_of(item if function is None else function(item), number))


def _probe(items: _Items, function: MakesSample | None) -> tuple[list[int], float]:
    """Checksums of the first samples, and how large they are on average."""
    first = [b"".join(_made(function, number, item)[0]) for number, item in items.first(_PROBED_ITEMS)]
    if not first:
        raise EmptyDataset("there are no samples to pack")
    return [sample_checksum(each) for each in first], sum(map(len, first)) / len(first)


@dataclass
class _Done:
    """What has been packed so far, and how long it took."""

    num_kept: int = 0
    made_bytes: int = 0
    making_seconds: float = 0.0
    storing_seconds: float = 0.0


async def _store_parts(
    store: ObjectStore,
    claim: PackClaim,
    items: _Items,
    makes: MakesSample | bytes | None,
    jobs: int,
    url: str,
    settings: StoreSettings | None,
    part_items: int,
    blob_bytes: int,
    writer: IndexWriter,
    on_bytes: Callable[[int], None],
    say: Callable[[str], None],
) -> _Done:
    """All parts, in order, to the writer: those that are stored already, and the rest."""
    there = {found.key: found.size_bytes async for found in store.list(PART_PREFIX)} if claim.goes_on else {}
    if there:
        say(f"goes on with a pack that was broken off: {len(there):,} parts are stored")
    workers: Workers = (
        WorkerProcesses(jobs, url, settings, on_bytes) if jobs > 1 else WorkerThreads(1, store, on_bytes, in_turn=True)
    )
    done = _Done()

    def take(part: _Part) -> None:
        for name, size_bytes, records, labels in part.blobs:
            writer.add_blob(name, size_bytes, [records], labels)
            done.num_kept += len(records) * part.is_kept
            done.made_bytes += size_bytes * (not part.is_kept)
        done.making_seconds += part.making_seconds
        done.storing_seconds += part.storing_seconds

    async def parts() -> AsyncIterator[Coroutine[Any, Any, _Part]]:
        for number in itertools.count():
            kept = None
            if (key := part_name(number)) in there:
                kept = _Part.from_bytes(bytes(await store.read_range(key, 0, there[key])))
            count, some = await asyncio.to_thread(items.take, part_items, wanted=kept is None)
            if not count:
                return
            if kept is not None and kept.num_items != count:
                raise InvalidInput(
                    f"a pack of other items was broken off at {store.url} (part {number} has {kept.num_items} of them, "
                    f"and {count} come now): delete {part_name(number)} there to begin anew, or choose another place"
                )
            await claim.check()
            what = makes, some, number, blob_bytes, claim.run
            yield workers.carry_out(_build_part, *what) if kept is None else _ready(kept)

    await in_order(workers, parts(), take)
    return done


async def _ready(part: _Part) -> _Part:
    return part


def _build_part(
    worker: Worker,
    makes: MakesSample | bytes | None,
    items: list[tuple[int, Any]],
    number: int,
    blob_bytes: int,
    run: str,
) -> _Part:
    """Make the samples of a part, and store them, then say so.

    :param makes: in a process of its own, the function as it was sent.
    """
    function = _function_of(makes) if isinstance(makes, bytes) else makes
    part = _Part(len(items))
    tar, filling = GrowingTar(), FillingBlob(int(_LARGEST_BLOB * blob_bytes) - len(END_OF_ARCHIVE))

    def store(built: BuiltBlob) -> None:
        name = blob_name(number, len(part.blobs))
        began = time.perf_counter()
        worker.wait_for(check_is_of(worker.store, run))
        worker.wait_for(worker.store.write(name, built.data))
        part.storing_seconds += time.perf_counter() - began
        part.blobs.append((name, len(built.data), built.records, built.labels))

    for each, item in items:
        worker.check()
        began = time.perf_counter()
        pieces, label = _made(function, each, item)
        part.making_seconds += time.perf_counter() - began
        size_bytes = sum(map(len, pieces))
        for count in filling.add(size_bytes):
            store(tar.take(count))
        tar.append(pieces, label)
        worker.on_bytes(size_bytes)
    store(tar.take(len(tar)))
    worker.wait_for(worker.store.write(part_name(number), part.to_bytes()))
    return part
