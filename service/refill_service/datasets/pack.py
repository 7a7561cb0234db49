"""How does a folder become a dataset? ``refill pack``: shuffled tar blobs, then the index, last."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from refill.errors import EmptyDataset, InvalidInput
from refill_service.cache_core.dataset_index import INDEX_KEY, RecordArray
from refill_service.datasets.blob_builder import blobs_of, built_blob
from refill_service.datasets.index_writer import IndexWriter
from refill_service.datasets.pack_claim import PackClaim, blob_name, check_is_of
from refill_service.datasets.progress import Progress
from refill_service.datasets.sample_names import FIRST, LAST
from refill_service.datasets.source_scan import SourceSample, SourceScan, check_files
from refill_service.datasets.worker_processes import (
    Worker,
    WorkerProcesses,
    Workers,
    WorkerThreads,
    in_order,
    to_the_end,
)
from refill_service.num_cores import num_cores
from refill_service.object_store.open_store import open_store
from refill_service.object_store.store_settings import StoreSettings
from refill_service.object_store.store_url import parse_url

DEFAULT_BLOB_BYTES = 64_000_000
MIN_BLOB_BYTES = 4096
_CLASS_BYTES = 1024
"""A member ``cls`` in a tar."""
_END_BYTES = 2048
"""The end of a tar, and its entry in the index."""
_INDEXED_BYTES = 32
"""Of a sample in index and labels, at most."""
_THREADS = 2
"""Of one process: one builds a blob while another one's is under way to the store. Of processes, so many more than
cores."""
MOST_JOBS = 64
SMALL_BYTES = 256_000_000
"""Of a folder that is packed before other processes have begun."""

_StoredBlob = tuple[int, RecordArray, NDArray[np.int32]]
"""Its size, and its samples' records and labels."""


@dataclass(frozen=True)
class PackSummary:
    """What ``refill pack`` found and wrote."""

    num_samples: int
    num_files: int
    num_blobs: int
    blob_bytes: int
    num_hidden: int
    num_excluded: int
    num_dangling: int
    classes: list[str] | None


async def pack(
    source: str,
    url: str,
    settings: StoreSettings | None = None,
    *,
    seed: int = 0,
    blob_bytes: int = DEFAULT_BLOB_BYTES,
    classes: str = "auto",
    include: Sequence[str] | None = None,
    split_names: str = "auto",
    force: bool = False,
    quiet: bool = True,
    jobs: int | None = 1,
    say: Callable[[Remark], None] = lambda remark: None,
) -> PackSummary:
    """Write the files below ``source`` as a dataset to ``url``.

    Same files, seed and sizes give the same bytes. Nothing is written or removed at ``url`` before the folder was
    read through; the index is written when every blob is stored, so that a pack that is broken off leaves no dataset.

    :param classes: ``yes``: top folders are classes, numbered in sorted order; ``no``; ``auto``: if there are only
        folders at the top.
    :param split_names: where the name of a sample ends: ``first-dot``, ``last-dot`` or ``auto`` (:mod:`.sample_names`).
    :param jobs: blobs that are built and stored at once, each by a process of its own; 1: by two threads of this
        process. None: as many as there are cores, and two more, unless the folder is small.
    :param say: called with what was decided about the folder, before anything is written.

    Raises :class:`DatasetExists`, :class:`EmptyDataset`, :class:`InvalidInput` and errors of the store. A dataset that
    ``force`` would replace is left as it is where the new one has no room beside it, or a file can't be read.
    """
    if blob_bytes < MIN_BLOB_BYTES:
        raise InvalidInput(f"blob size must be at least {MIN_BLOB_BYTES} bytes, got {blob_bytes}")
    if jobs is not None and not 1 <= jobs <= MOST_JOBS:
        raise InvalidInput(f"jobs must be 1 to {MOST_JOBS}, got {jobs}")
    if classes not in ("auto", "yes", "no"):
        raise InvalidInput(f"classes must be auto, yes or no, got {classes!r}")
    _check_folders(source, url)
    store = open_store(url, settings)
    try:
        claim = PackClaim(store)
        await claim.look(force=force)
        scan = await _scan(source, seed, include, split_names)
        try:
            if scan.num_files == 0:
                excluded = f" ({scan.num_excluded} left out by --include)" if scan.num_excluded else ""
                dangling = f" ({scan.num_dangling} links to nothing: {scan.dangling_link})" if scan.num_dangling else ""
                raise EmptyDataset(f"{source} holds no files to pack{excluded}{dangling}")
            class_names = _class_names(scan, classes)
            metadata = {"made_by": "pack", "seed": seed, "classes": class_names, "num_files": scan.num_files}
            if scan.split.at == LAST and scan.split.num_dotted:
                metadata["split_names"] = LAST
            for remark in remarks_on(scan, classes, class_names):
                say(remark)
            added_bytes = _INDEXED_BYTES + (_CLASS_BYTES if class_names is not None else 0)
            tar_bytes = await asyncio.to_thread(lambda: scan.tar_bytes)
            ends_bytes = _END_BYTES * (1 + 2 * tar_bytes // blob_bytes)  # blobs may be half full
            await claim.check_room(tar_bytes + scan.num_samples * added_bytes + ends_bytes)
            with (
                _temporary_folder_errors(),
                Progress("packing", scan.num_bytes, quiet=quiet) as progress,
                tempfile.TemporaryDirectory(prefix="refill-pack-") as folder,
                IndexWriter(Path(folder)) as writer,
            ):
                # Before a dataset that is there goes.
                await asyncio.to_thread(writer.check_room, scan.num_samples)
                if claim.replaces:
                    await _check_files(scan)
                try:
                    await claim.begin()
                    if jobs is None:
                        jobs = 1 if tar_bytes < SMALL_BYTES else min(MOST_JOBS, num_cores() + _THREADS)
                    jobs = min(jobs, 1 + tar_bytes // blob_bytes)
                    workers: Workers = (
                        WorkerProcesses(jobs, url, settings, progress.advance)
                        if jobs > 1
                        else WorkerThreads(_THREADS, store, progress.advance)
                    )
                    await _store_blobs(workers, claim, writer, scan, class_names, blob_bytes)
                    index = await to_the_end(asyncio.to_thread(writer.finish, metadata))
                    await claim.check()
                    if writer.labels is not None:
                        await to_the_end(store.write(*writer.labels))
                    await to_the_end(store.write(INDEX_KEY, index))
                except BaseException:
                    await claim.abort()
                    raise
                await claim.commit()
            for warning in writer.warnings:
                say(Remark(warning, True))
            return PackSummary(
                writer.num_samples,
                scan.num_files,
                writer.num_blobs,
                writer.blob_bytes,
                scan.num_hidden,
                scan.num_excluded,
                scan.num_dangling,
                class_names,
            )
        finally:
            scan.close()
    finally:
        await store.close()


async def _scan(source: str, seed: int, include: Sequence[str] | None, split_names: str) -> SourceScan:
    stop = threading.Event()
    scanning = asyncio.to_thread(SourceScan, source, seed=seed, include=include, split_names=split_names, stop=stop)
    return await to_the_end(scanning, on_cancel=stop.set)


async def _check_files(scan: SourceScan) -> None:
    stop = threading.Event()
    checking = asyncio.to_thread(check_files, scan.folder, scan.samples(), stop)
    await to_the_end(checking, on_cancel=stop.set)


@contextmanager
def _temporary_folder_errors() -> Iterator[None]:
    """What the store says of itself is an error of ours already: others are of the temporary folder."""
    try:
        yield
    except OSError as error:
        raise InvalidInput(
            f"can't write to the temporary folder: {error.strerror or error}; TMPDIR names another one"
        ) from error


async def _store_blobs(
    workers: Workers,
    claim: PackClaim,
    writer: IndexWriter,
    scan: SourceScan,
    class_names: list[str] | None,
    blob_bytes: int,
) -> None:
    """Each worker builds a blob, and stores it; what they are comes in the order of the blobs."""
    class_numbers = None if class_names is None else {name: number for number, name in enumerate(class_names)}

    async def blobs() -> AsyncIterator[Coroutine[Any, Any, _StoredBlob]]:
        samples_of = blobs_of(scan.samples(), blob_bytes=blob_bytes, class_numbers=class_numbers)
        for number in count():
            if (samples := await to_the_end(asyncio.to_thread(next, samples_of, None))) is None:
                return
            await claim.check()
            what = scan.folder, samples, class_numbers, blob_name(number), claim.run
            yield workers.carry_out(_build_and_store, *what)

    def take(stored: _StoredBlob) -> None:
        size_bytes, records, labels = stored
        writer.add_blob(blob_name(writer.num_blobs), size_bytes, [records], labels)

    await in_order(workers, blobs(), take)


def _build_and_store(
    worker: Worker,
    folder: str,
    samples: list[SourceSample],
    class_numbers: dict[str, int] | None,
    name: str,
    run: str,
) -> _StoredBlob:
    def on_bytes(num_bytes: int) -> None:
        worker.check()
        worker.on_bytes(num_bytes)

    blob = built_blob(folder, samples, class_numbers, on_bytes)
    worker.wait_for(check_is_of(worker.store, run))
    worker.wait_for(worker.store.write(name, blob.data))
    return len(blob.data), blob.records, blob.labels


def _class_names(scan: SourceScan, classes: str) -> list[str] | None:
    if classes == "no" or (classes == "auto" and scan.file_at_top is not None):
        return None
    if scan.file_at_top is not None:
        raise InvalidInput(
            f"{scan.folder} has {scan.file_at_top} beside its folders, a file of no class: move it away, leave it out"
            " by --include, or use --classes no"
        )
    return scan.top_folders


def _check_folders(source: str, url: str) -> None:
    """Packing into the folder that is packed would pack what was packed before."""
    if not os.path.isdir(source):
        what = f"{source} is a file, and not a folder or list" if os.path.exists(source) else f"there is no {source}"
        raise InvalidInput(what)
    named = parse_url(url)
    if named.scheme != "file":
        return
    inner = os.path.realpath(named.folder)
    outer = os.path.realpath(source)
    if inner == outer or inner.startswith(outer.rstrip("/") + "/"):
        raise InvalidInput(f"{url} lies in {source}, the folder to be packed; choose another place")


class Remark(NamedTuple):
    """A line that ``refill pack`` says before it begins."""

    text: str
    is_warning: bool
    """Else it is what one expects, and only good to know."""


def remarks_on(scan: SourceScan, classes: str, class_names: list[str] | None) -> list[Remark]:
    """:param classes: as it was asked for: ``auto``, ``yes`` or ``no``."""
    files, samples = _count(scan.num_files, "file"), _count(scan.num_samples, "sample")
    found = [Remark(f"{scan.folder}: {files}, {samples}", False)]
    if scan.split.num_dotted:
        found.append(_on_names(scan))
    elif scan.num_samples < scan.num_files:
        found.append(Remark("files with the same name but for what follows the dot are one sample", False))
    if class_names is not None:
        number = _count(len(class_names), "class", "classes")
        found.append(Remark(f"{number}, the folders at its top: {_some(class_names)}", False))
        if empty := scan.empty_top_folders:
            found.append(Remark(f"{_count(len(empty), 'class', 'classes')} without any sample: {_some(empty)}", True))
    elif classes == "auto" and scan.top_folders:
        found.append(
            Remark(
                f"no classes, since {scan.file_at_top} lies beside the folders ({_some(scan.top_folders)}): if these"
                " are classes, move it away or leave it out by --include; --classes no says that they are not",
                True,
            )
        )
    if scan.mixed_members:
        members = _some([f"{name or 'no extension'} {count:,}" for name, count in scan.mixed_members])
        found.append(
            Remark(
                f"samples have different members ({members} of {scan.num_samples:,}), which a DataLoader does not put"
                " into one batch: CacheDataset(..., transform=function) can name them alike",
                True,
            )
        )
    if scan.num_empty:
        found.append(Remark(f"{_count(scan.num_empty, 'empty file')}, packed so: {scan.empty_file}", True))
    if scan.num_dangling:
        found.append(Remark(f"{_count(scan.num_dangling, 'link')} to nothing, left out: {scan.dangling_link}", True))
    if scan.num_outside:
        links = _count(scan.num_outside, "link")
        found.append(Remark(f"{links} out of the folder, packed with what is there: {scan.outside_link}", True))
    return found


def _on_names(scan: SourceScan) -> Remark:
    split = scan.split
    text = f"{_count(split.num_dotted, 'name')} with more than one dot"
    if not split.example:
        return Remark(f"{text}; all names are split at the {split.at.replace('-', ' ')}, as --split-names says", False)
    if split.at == FIRST:
        why = "as those of WebDataset are; --split-names last-dot makes each of them a sample"
        return Remark(f"{text}, as {split.example}: split at the first, {why}", True)
    why = "as those of photos are; --split-names first-dot joins them, as WebDataset does"
    return Remark(f"{text}, as {split.example}: split at the last, {why}", True)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
