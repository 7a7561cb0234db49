"""A folder as an object store.

Reads are ``os.pread`` in threads of our own: on page-cached files as fast as obstore's LocalStore or faster, for less
CPU (docs/decisions/store-library.md has the numbers and the command).
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import itertools
import os
import re
import shutil
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from refill.errors import StoreDenied, StoreError, StoreNotFound, StoreUnavailable
from refill_service.object_store.base import ListedVersion, ObjectStore, StoredRange, WritableData
from refill_service.object_store.open_beneath import LinkLeadsOut, open_beneath, regular
from refill_service.object_store.store_counters import StoreCounters
from refill_service.object_store.store_url import StoreUrl

T = TypeVar("T")

PART_SUFFIX = ".refill-part"
"""Files that are being written; never listed."""
_PART = re.compile(r"\.(.+)\.[0-9a-f]+-\d+\.refill-part", re.DOTALL)


class FileStore(ObjectStore):
    """Keys are paths below ``folder``, which need not exist before the first write."""

    def __init__(self, folder: str, *, max_threads: int = 32, counters: StoreCounters | None = None) -> None:
        super().__init__("file://" + quote(folder), counters)
        self._folder = folder.rstrip("/") or "/"
        self._threads = ThreadPoolExecutor(max_threads, thread_name_prefix="file-store")
        self._writer, self._write_numbers = uuid.uuid4().hex[:12], itertools.count()
        """Containers that share a folder may have the same process number."""

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def discard_unfinished(self, keys: re.Pattern[str]) -> None:
        await self._in_thread(self._discard_parts, keys)

    async def free_bytes(self) -> int | None:
        return await self._in_thread(self._free_bytes)

    async def try_room(self, key: str, size_bytes: int) -> None:
        await self._in_thread(self._try_room, key, size_bytes)

    async def _read_range(
        self, key: str, start: int, end: int, *, etag: str | None = None, once: bool = False
    ) -> StoredRange:
        return await self._in_thread(self._pread, key, start, end)

    async def _read_start(self, key: str, most_bytes: int) -> tuple[memoryview, int]:
        size_bytes, _ = await self._head(key)
        return (await self._in_thread(self._pread, key, 0, min(size_bytes, most_bytes))).data, size_bytes

    async def _write(self, key: str, data: WritableData) -> int:
        return await self._in_thread(self._replace, key, data)

    async def _list(self, prefix: str) -> AsyncIterator[ListedVersion]:
        # One folder of the tree is held at a time and level, sorted; '/' takes part in the order as in S3.
        start = prefix.rpartition("/")[0]
        pending: list[Iterator[ListedVersion]] = [iter(await self._in_thread(self._scan, start, prefix))]
        while pending:
            entry = next(pending[-1], None)
            if entry is None:
                pending.pop()
            elif entry.key.endswith("/"):
                pending.append(iter(await self._in_thread(self._scan, entry.key[:-1], prefix)))
            else:
                yield entry

    async def _head(self, key: str) -> tuple[int, str | None]:
        found = await self._in_thread(self._stat, key)
        return found.st_size, _etag(found)

    def _is_same(self, one: str, other: str) -> bool:
        # Mounts of FUSE may give a file another inode at any time: that alone ends no run.
        return one.rpartition("-")[0] == other.rpartition("-")[0]

    async def _delete(self, key: str) -> None:
        await self._in_thread(self._unlink, key)

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    # What follows runs in the threads.

    def _path(self, key: str) -> str:
        return f"{self._folder}/{key}"

    def _open(self, key: str) -> int:
        """A descriptor of a file's bytes. A pipe, that nobody writes to, must not hold a thread for ever."""
        return regular(os.open(self._path(key), os.O_RDONLY | os.O_NONBLOCK))

    def _pread(self, key: str, start: int, end: int) -> StoredRange:
        with self._translated("read", key):
            file = self._open(key)
            try:
                end = max(start, min(end, os.fstat(file).st_size))  # memory is taken for what is there
                data = _read_of(file, start, end)
                # Looked at afterwards: who wrote to the file meanwhile has changed its time.
                return StoredRange(data, _etag(os.fstat(file)))
            finally:
                os.close(file)

    def _free_bytes(self) -> int | None:
        folder = Path(self._folder)
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            return None  # what is wrong is said when something is written

    def _try_room(self, key: str, size_bytes: int) -> None:
        part = self._part(key)
        with self._translated("write", key):
            os.makedirs(os.path.dirname(part), exist_ok=True)
            file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
            try:
                if (number := allocate(file, size_bytes)) in (errno.ENOSPC, errno.EDQUOT):
                    raise OSError(number, os.strerror(number))
            finally:
                os.close(file)
                os.unlink(part)

    def _part(self, key: str) -> str:
        folder, _, name = self._path(key).rpartition("/")
        return f"{folder}/.{name}.{self._writer}-{next(self._write_numbers)}{PART_SUFFIX}"

    def _replace(self, key: str, data: WritableData) -> int:
        path, part = self._path(key), self._part(key)
        with self._translated("write", key):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            try:
                with open(part, "xb", buffering=0) as file:
                    if isinstance(data, Path):
                        with open(data, "rb") as source:
                            shutil.copyfileobj(source, file, 1 << 20)
                    else:
                        left = memoryview(data).cast("B")
                        while left:
                            left = left[file.write(left) :]
                    num_bytes = file.tell()
                    # Without this a crash of the machine may leave the name with none of the bytes.
                    os.fsync(file.fileno())
                os.replace(part, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(part)
                raise
        return num_bytes

    def _scan(self, folder: str, prefix: str) -> list[ListedVersion]:
        """Files, and folders as ``key + '/'``, sorted, as far as they can match."""
        above = f"{folder}/" if folder else ""
        found: list[ListedVersion] = []
        with (
            self._translated("list", folder),
            suppress(FileNotFoundError, NotADirectoryError),
            self._scandir(folder) as entries,
        ):
            for entry in entries:
                key = above + entry.name
                with suppress(FileNotFoundError):  # deleted meanwhile
                    if entry.is_dir():
                        key += "/"
                        if not (key.startswith(prefix) or prefix.startswith(key)):
                            continue
                        if entry.is_symlink():  # it could lead back up
                            self.not_followed.append(key)
                        else:
                            found.append(ListedVersion(key, 0, None))
                    elif key.startswith(prefix) and entry.is_file() and not key.endswith(PART_SUFFIX):
                        stat = entry.stat()
                        found.append(ListedVersion(key, stat.st_size, _etag(stat)))
        return sorted(found, key=lambda item: os.fsencode(item.key))

    def _scandir(self, folder: str) -> AbstractContextManager[Iterator[os.DirEntry[str]]]:
        return os.scandir(self._path(folder))

    def _stat(self, key: str) -> os.stat_result:
        with self._translated("look at", key):
            if os.path.isdir(self._path(key)):
                raise IsADirectoryError
            return os.stat(self._path(key))

    def _unlink(self, key: str) -> None:
        with self._translated("delete", key), suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(self._path(key))

    def _discard_parts(self, keys: re.Pattern[str]) -> None:
        with self._translated("delete", ""), suppress(FileNotFoundError, NotADirectoryError):
            for name in os.listdir(self._folder):
                part = _PART.fullmatch(name)
                if part and keys.fullmatch(part.group(1)):
                    os.unlink(f"{self._folder}/{name}")

    @contextmanager
    def _translated(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except LinkLeadsOut as error:
            raise StoreDenied(
                f"{self.url_of(key)}: a link leads out of the dataset's folder, and pods follow none that does; put "
                "the file itself there",
                key=key,
            ) from error
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise StoreNotFound(f"{self.url_of(key)}: no such file", key=key) from error
        except PermissionError as error:
            raise StoreDenied(
                f"{self.url_of(key)}: user {os.geteuid()} has no permission to {verb} it", key=key
            ) from error
        except OSError as error:
            raise StoreUnavailable(f"{self.url_of(key)}: can't {verb} it: {error.strerror}", key=key) from error


def _read_of(file: int, start: int, end: int) -> memoryview:
    first = os.pread(file, end - start, start)
    if len(first) in (0, end - start):
        return memoryview(first)
    # Linux moves at most 2 GiB at once; anything else that is short is the end of the file.
    pieces = [first]
    while piece := os.pread(file, end - start - sum(map(len, pieces)), start + sum(map(len, pieces))):
        pieces.append(piece)
    return memoryview(b"".join(pieces))


def _etag(found: os.stat_result) -> str:
    """What changes when a file is written to, or replaced: its time, its size, its inode."""
    return f"{found.st_mtime_ns:x}-{found.st_size:x}-{found.st_ino:x}"


def allocate(file: int, size_bytes: int) -> int:
    """Give a file so much room without writing it. Returns 0, or the number of the error: ``EOPNOTSUPP`` where a file
    system can't. ``os.posix_fallocate`` would write to every block then."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "fallocate64"):
        return errno.EOPNOTSUPP
    if libc.fallocate64(file, 0, ctypes.c_int64(0), ctypes.c_int64(size_bytes)) == 0:
        return 0
    return ctypes.get_errno()


_FOLDER = os.O_PATH | os.O_DIRECTORY


class ConfinedFileStore(FileStore):
    """A folder that clients name, and that others may write to: below what is served, only reading. Keys are paths
    below the folder ``named``.

    What the operator lists is opened as it is, links and all. From there to the dataset's folder, and from that to its
    files, no link is followed that leads out: who may write to a dataset's folder could else have the pod read its
    secrets.

    :param served: what the operator has listed, which holds ``named``.
    """

    def __init__(
        self, named: StoreUrl, served: StoreUrl, *, max_threads: int = 32, counters: StoreCounters | None = None
    ) -> None:
        super().__init__(named.folder, max_threads=max_threads, counters=counters)
        self._served = served.folder
        self._below = "/".join(named.segments[len(served.segments) :])

    def _open(self, key: str) -> int:
        return regular(self._open_beneath(key, os.O_RDONLY | os.O_NONBLOCK))

    def _stat(self, key: str) -> os.stat_result:
        with self._translated("look at", key):
            file = regular(self._open_beneath(key, os.O_PATH))
            try:
                return os.fstat(file)
            finally:
                os.close(file)

    def _scandir(self, folder: str) -> AbstractContextManager[Iterator[os.DirEntry[str]]]:
        return self._scanned(folder)

    @contextmanager
    def _scanned(self, folder: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        opened = self._open_beneath(folder or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            with os.scandir(opened) as entries:
                yield (entry for entry in entries if not entry.is_symlink())
        finally:
            os.close(opened)

    def _replace(self, key: str, data: WritableData) -> int:
        raise self._only_read(key)

    def _unlink(self, key: str) -> None:
        raise self._only_read(key)

    def _only_read(self, key: str) -> StoreDenied:
        return StoreDenied(f"{self.url_of(key)}: pods only read it", key=key)

    def _open_beneath(self, path: str, flags: int) -> int:
        """The folder is looked up anew each time: it may be replaced while the store is open."""
        served = os.open(self._served, _FOLDER)
        try:
            if self._served == "/":  # nothing leads out of it
                folder = os.open(f"/{self._below}", _FOLDER)
            else:
                folder = open_beneath(served, self._below or ".", _FOLDER)
        finally:
            os.close(served)
        try:
            return open_beneath(folder, path, flags)
        finally:
            os.close(folder)
