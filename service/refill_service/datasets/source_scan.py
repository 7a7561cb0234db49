"""Which samples are in a folder, and in what shuffled order are they packed?

Names go into a temporary SQLite database on disk, which also sorts them: memory does not grow with the folder.
A sample is all files whose path is the same up to the first dot of the base name, or the last (:mod:`.sample_names`).
"""

from __future__ import annotations

import fnmatch
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter

import xxhash

from refill.errors import InvalidInput
from refill_service.cache_core.dataset_index import INDEX_KEY
from refill_service.datasets.pack_claim import OUR_BLOB, is_ours
from refill_service.datasets.sample_names import FIRST, LAST, Split, choose_split, split_name

_INSERT_BATCH = 1000
_OF_DESKTOPS = {"thumbs.db", "ehthumbs.db", "desktop.ini", "__macosx"}
"""What Windows and macOS leave in folders, and show to nobody."""


@dataclass(frozen=True)
class SourceMember:
    """A file that becomes a member of a sample."""

    extension: str
    """What follows the dot at which its name is split; the member's name in the tar is key, dot, extension."""
    path: str
    """Of the file, relative to the source folder."""
    size_bytes: int


@dataclass(frozen=True)
class SourceSample:
    """Files that become one sample."""

    key: str
    members: list[SourceMember]
    """In the order of their extensions."""


class SourceScan:
    """Scans ``folder`` at once. Raises :class:`InvalidInput` for what can't be read.

    The shuffle orders samples by a hash of seed and key (Brand 3.2): the same folder and seed give the same order,
    whatever order the file system lists in.

    :param stop: set it to break off a scan in another thread.
    :param split_names: ``first-dot``, ``last-dot`` or ``auto``.
    :param include: globs; a file is taken if its base name or its relative path matches one. None: all files.
    """

    def __init__(
        self,
        folder: str,
        *,
        seed: int,
        include: Sequence[str] | None = None,
        split_names: str = "auto",
        stop: threading.Event | None = None,
    ) -> None:
        self.folder = folder
        self.num_files = 0
        self.num_samples = 0
        self.num_bytes = 0
        self.num_hidden = 0
        """Hidden files and folders, which are left out, as are those that desktops hide, and what ``refill index``
        has written beside the files."""
        self.num_excluded = 0
        """Files that ``include`` leaves out, and what is neither file nor folder."""
        self.top_folders: list[str] = []
        """Sorted names of the folders at the top, without hidden ones."""
        self._with_files: set[str] = set()
        self.file_at_top: str | None = None
        """A file that is to be packed and lies beside these."""
        self.num_empty = 0
        self.empty_file = ""
        """One of them."""
        self.num_dangling = 0
        """Links that lead nowhere, which are left out."""
        self.dangling_link = ""
        self.num_outside = 0
        """Links that lead out of the folder, and are followed."""
        self.outside_link = ""
        self._real_folder = os.path.join(os.path.realpath(folder), "")
        self.mixed_members: list[tuple[str, int]] = []
        """Where no member is in all samples, the extensions and how many have each; the most frequent first."""
        self.split = Split(FIRST)
        self._num_dotted = 0
        self._seed = seed
        self._include = include
        self._stop = stop
        with self._sorting():
            self._open_and_scan(split_names)

    def _open_and_scan(self, split_names: str) -> None:
        # "" is SQLite's database in a temporary file, gone with the connection, also if the process is killed.
        self._database = sqlite3.connect("", check_same_thread=False, isolation_level=None)
        for statement in (
            "PRAGMA journal_mode=OFF",
            "PRAGMA synchronous=OFF",
            "PRAGMA temp_store=FILE",
            "PRAGMA cache_size=-16384",
            "CREATE TABLE member (place INTEGER, key BLOB, extension BLOB, path BLOB, size INTEGER)",
        ):
            self._database.execute(statement)
        try:
            self._scan()
            self._split_names(split_names)
            self._check_extensions()
        except BaseException:
            self.close()
            raise

    @property
    def empty_top_folders(self) -> list[str]:
        """Of :attr:`top_folders`, those without a file that is to be packed."""
        return [folder for folder in self.top_folders if folder not in self._with_files]

    @property
    def tar_bytes(self) -> int:
        """About as much as it takes as tars: what surrounds files is counted, what surrounds long names is not."""
        blocks = "SELECT total((size + 511) / 512 * 512 + 512) FROM member"
        with self._sorting():
            return int(self._database.execute(blocks).fetchone()[0])

    def close(self) -> None:
        self._database.close()

    def samples(self) -> Iterator[SourceSample]:
        """All samples in shuffled order. One iteration at a time; it may move from thread to thread."""
        with self._sorting():
            rows = self._database.execute(
                "SELECT key, extension, path, size FROM member ORDER BY place, key, extension, path"
            )
            for key, group in groupby(rows, key=itemgetter(0)):
                yield _sample(os.fsdecode(key), [(os.fsdecode(row[1]), os.fsdecode(row[2]), row[3]) for row in group])

    @contextmanager
    def _sorting(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            folder = os.environ.get("SQLITE_TMPDIR") or os.environ.get("TMPDIR") or "/var/tmp"
            raise InvalidInput(
                f"the names of {self.folder} can't be sorted in {folder}: {error}; SQLITE_TMPDIR, or TMPDIR, names "
                "another folder"
            ) from error

    def _scan(self) -> None:
        self._database.execute("BEGIN")
        batch: list[tuple[int, bytes, bytes, bytes, int]] = []
        for path, size_bytes in self._files():
            folder, slash, name = path.rpartition("/")
            stem, extension = split_name(name, FIRST)
            key = os.fsencode(folder + slash + stem)
            batch.append((self._place(key), key, os.fsencode(extension), os.fsencode(path), size_bytes))
            self._num_dotted += "." in extension
            if size_bytes == 0:
                self.num_empty, self.empty_file = self.num_empty + 1, self.empty_file or path
            self.num_files += 1
            self.num_bytes += size_bytes
            if len(batch) == _INSERT_BATCH:
                self._insert(batch)
                if self._stop is not None and self._stop.is_set():
                    raise InvalidInput(f"broken off while reading {self.folder}")
        self._insert(batch)
        self._database.execute("COMMIT")
        self.top_folders.sort()

    def _place(self, key: bytes) -> int:
        return xxhash.xxh3_64_intdigest(f"{self._seed}:".encode() + key) - 2**63  # SQLite's integers are signed

    def _split_names(self, rule: str) -> None:
        self.split = choose_split(rule, self._database, self._num_dotted)
        if self.split.at == LAST and self._num_dotted:
            self._database.create_function("place", 1, self._place, deterministic=True)
            self._database.create_function("key_of", 1, _key_at_last_dot, deterministic=True)
            self._database.create_function("extension_of", 1, _extension_at_last_dot, deterministic=True)
            self._database.execute(
                "UPDATE member SET key = key_of(path), extension = extension_of(path), place = place(key_of(path))"
                " WHERE instr(extension, X'2E') > 0"
            )
        (self.num_samples,) = self._database.execute("SELECT count(DISTINCT key) FROM member").fetchone()
        extension = "CAST(lower(CAST(extension AS TEXT)) AS BLOB)"  # as a loader calls it
        counts = self._database.execute(
            f"SELECT {extension}, count(*) FROM member GROUP BY 1 ORDER BY 2 DESC, 1"
        ).fetchall()
        if counts and counts[0][1] < self.num_samples:
            self.mixed_members = [(os.fsdecode(extension), count) for extension, count in counts]

    def _check_extensions(self) -> None:
        """Before anything is written: members whose names differ only in case are one to a loader."""
        extension = "CAST(extension AS TEXT)"
        if not self._database.execute(
            f"SELECT 1 FROM member WHERE {extension} != lower({extension}) LIMIT 1"
        ).fetchone():
            return
        twins = "SELECT min(path), max(path) FROM member WHERE length(extension)"
        twins += f" GROUP BY key, lower({extension}) HAVING count(*) > 1 LIMIT 1"
        if (found := self._database.execute(twins).fetchone()) is not None:
            one, other = map(os.fsdecode, found)
            raise InvalidInput(f"{one} and {other} differ only in the case of their extension; rename one")

    def _insert(self, batch: list[tuple[int, bytes, bytes, bytes, int]]) -> None:
        self._database.executemany("INSERT INTO member VALUES (?, ?, ?, ?, ?)", batch)
        batch.clear()

    def _files(self) -> Iterator[tuple[str, int]]:
        """Relative path and size of every file that is to be packed."""
        is_dataset = os.path.exists(os.path.join(self.folder, INDEX_KEY))
        pending: list[tuple[str, frozenset[tuple[int, int]]]] = [("", frozenset())]
        while pending:
            above, ancestors = pending.pop()
            try:
                here = os.stat(os.path.join(self.folder, above))
                identity = (here.st_dev, here.st_ino)
                if identity in ancestors:
                    raise InvalidInput(
                        f"{os.path.join(self.folder, above)} is a link back to a folder that holds it; remove the link"
                    )
                with os.scandir(os.path.join(self.folder, above)) as entries:
                    for entry in entries:
                        path = f"{above}/{entry.name}" if above else entry.name
                        is_beside = is_dataset and not above and is_ours(entry.name)
                        if is_beside and OUR_BLOB.fullmatch(entry.name):
                            raise InvalidInput(
                                f"{self.folder} is a packed dataset already, with {entry.name} in it: jobs can read it "
                                "as it is; to pack its samples anew, give pack the folder that it was made from"
                            )
                        if is_beside or entry.name.startswith(".") or entry.name.lower() in _OF_DESKTOPS:
                            self.num_hidden += 1
                        elif entry.is_dir():
                            self._look_where_it_leads(entry, path)
                            if not above:
                                self.top_folders.append(entry.name)
                            pending.append((path, ancestors | {identity}))
                        else:
                            size_bytes = self._size_of(entry, path)
                            if size_bytes is not None:
                                self._look_where_it_leads(entry, path)
                                if not above:
                                    self.file_at_top = min(path, self.file_at_top or path)
                                else:
                                    self._with_files.add(above.partition("/")[0])
                                yield path, size_bytes
            except OSError as error:
                raise InvalidInput(f"can't read {error.filename or self.folder}: {error.strerror}") from error

    def _look_where_it_leads(self, entry: os.DirEntry[str], path: str) -> None:
        if entry.is_symlink() and not os.path.realpath(entry.path).startswith(self._real_folder):
            self.num_outside, self.outside_link = self.num_outside + 1, self.outside_link or path

    def _size_of(self, entry: os.DirEntry[str], path: str) -> int | None:
        """None: it is not packed, and counted."""
        if not self._included(path, entry.name):
            self.num_excluded += 1
            return None
        try:
            status = entry.stat()
        except FileNotFoundError:
            if not entry.is_symlink():
                raise
            self.num_dangling, self.dangling_link = self.num_dangling + 1, self.dangling_link or path
            return None
        if not entry.is_file():
            self.num_excluded += 1
            return None
        return status.st_size

    def _included(self, path: str, name: str) -> bool:
        if self._include is None:
            return True
        return any(fnmatch.fnmatchcase(name, glob) or fnmatch.fnmatchcase(path, glob) for glob in self._include)


def _key_at_last_dot(path: bytes) -> bytes:
    folder, slash, name = os.fsdecode(path).rpartition("/")
    return os.fsencode(folder + slash + split_name(name, LAST)[0])


def _extension_at_last_dot(path: bytes) -> bytes:
    return os.fsencode(split_name(os.fsdecode(path).rpartition("/")[2], LAST)[1])


def _sample(key: str, rows: list[tuple[str, str, int]]) -> SourceSample:
    """Members with extensions that WebDataset can tell apart; files without one are called ``bin``."""
    taken = {extension.lower(): path for extension, path, _ in rows if extension}
    if len(taken) < sum(1 for extension, _, _ in rows if extension):
        clash = next(path for extension, path, _ in rows if extension and taken[extension.lower()] != path)
        other = taken[next(extension for extension, path, _ in rows if path == clash).lower()]
        raise InvalidInput(f"{clash} and {other} differ only in the case of their extension; rename one")
    members = []
    for extension, path, size_bytes in rows:
        number = 0
        while not extension:
            name = f"bin{number or ''}"
            number += 1
            if name not in taken:
                extension = name
                taken[name] = path
        members.append(SourceMember(extension, path, size_bytes))
    return SourceSample(key, sorted(members, key=lambda member: member.extension))


_THREADS = 8
_AT_ONCE = 1000


def check_files(folder: str, samples: Iterable[SourceSample], stop: threading.Event) -> None:
    """Opens each file and reads its first byte, which a damaged disk refuses where opening it succeeds.

    Raises :class:`InvalidInput` for the first file that can't be read, or is not as it was listed. What happens to a
    file later is found when it is packed.

    :param stop: set it to break off a check in another thread.
    """
    members = (member for sample in samples for member in sample.members)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="pack-check") as pool:
        while (some := list(islice(members, _AT_ONCE))) and not stop.is_set():
            for _ in pool.map(lambda member: _check(folder, member), some):
                pass


def unreadable(path: str, error: OSError) -> InvalidInput:
    if isinstance(error, FileNotFoundError):
        return InvalidInput(f"{path} vanished while packing; pack again when nothing changes in the folder")
    return InvalidInput(f"can't read {path}: {error.strerror}")


def changed(path: str, was_bytes: int, now_bytes: int) -> InvalidInput:
    return InvalidInput(
        f"{path} changed while packing ({was_bytes} bytes before, {now_bytes} now); pack again when the folder is at"
        " rest"
    )


def _check(folder: str, member: SourceMember) -> None:
    path = os.path.join(folder, member.path)
    try:
        with open(path, "rb", buffering=0) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            file.read(1)
    except OSError as error:
        raise unreadable(path, error) from error
    if size_bytes != member.size_bytes:
        raise changed(path, member.size_bytes, size_bytes)
