"""Are the files of a journal those that the pod left? Their sizes and digests, written down beside them.

Records have checksums. But these don't show that a file was cut between two records, that a file is gone, or that an
earlier copy was put back. So the journal of a job has an inventory: a line for each file, brought up to date before an
answer leaves. A journal that differs from its inventory is not whole (:meth:`Inventory.contradiction`).

    refill inventory 1 BYTES DIGEST                of the lines that follow
    NAME STATE[ STATE]                             two while the file is being replaced: either may be there
    STATE = SIZE:DIGEST, or `absent`

Digests are XXH3, 64 bits: against accidents, not against forgers. A process that is killed between an append and its
line leaves one record, or a part of one, that the inventory lacks: its answer had not left.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import xxhash

from refill.protocol.records import RecordReader
from refill_service.journal.job_files import EPOCHS, RECEIPTS, sync_folder
from refill_service.memory.kept_files import open_or_make, read_kept

__all__ = ["Inventory"]

_TITLE = "refill inventory 1"
_MOST_BYTES = 16 << 20


class _State(NamedTuple):
    size_bytes: int
    digest: str

    def __str__(self) -> str:
        return _NO_FILE if self == _ABSENT else f"{self.size_bytes}:{self.digest}"


_NO_FILE = "absent"
_ABSENT = _State(-1, "")
_EMPTY = _State(0, xxhash.xxh3_64_hexdigest(b""))


class Inventory:
    """Of the files of one job. Each write and each removal of a file has to be entered here.

    :param path: of the inventory. It is read if it is there, and written by the first change.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._states: dict[str, tuple[_State, ...]] = {}
        self._lines: dict[str, str] = {}
        self._appended: dict[str, xxhash.xxh3_64] = {}
        """Digests of files that grow, to be updated by what is appended."""
        self._sizes: dict[str, int] = {}
        self._file: int | None = None
        self._name_on_disk = False
        self.intact = self._read()
        """Whether the inventory was found, and undamaged."""

    def __contains__(self, name: str) -> bool:
        return name in self._states

    def adopt(self, contents: Mapping[str, bytes]) -> None:
        """List these files from now on, in place of all that were listed before. Written with the next change."""
        for name in list(self._states):
            self._forget(name)
        for name, data in contents.items():
            self._begin_to_append(name, data)
            self._set(name, _state_of(data))
        self.intact = True

    @contextmanager
    def replacing(self, name: str, data: bytes | None, *, sync: bool = False) -> Iterator[None]:
        """To be entered around the replacement of a file by this content, or around its removal (None).

        :param sync: write to the disk first, so that the inventory allows both the old file and the new one even if the
            machine stops meanwhile.
        """
        new = _ABSENT if data is None else _state_of(data)
        self._set(name, *self._states.get(name, (_ABSENT,))[:1], new)
        self._write()
        if sync:
            self.sync()
        yield
        if data is None:
            self._forget(name)
        else:
            self._begin_to_append(name, data)
            self._set(name, new)
        self._write()

    def will_append(self, name: str) -> None:
        """To be called before an append to a file. Lists the file if it is a new one."""
        if name in self._appended:
            return
        self._begin_to_append(name, b"")
        self._set(name, _EMPTY)
        self._write()

    def appended(self, name: str, data: bytes) -> None:
        digest = self._appended[name]
        digest.update(data)
        self._sizes[name] += len(data)
        self._set(name, _State(self._sizes[name], digest.hexdigest()))
        self._write()

    def contradiction(self, contents: Mapping[str, bytes]) -> str | None:
        """The first difference between these files and the inventory, in words; None: there is none.

        :param contents: of all files that there are, by name.
        """
        if not self.intact:
            return "its inventory is lost or damaged"
        for name in sorted({*self._states, *contents}):
            states, data = self._states.get(name), contents.get(name)
            if states is None:
                return f"{name} is there, and should not be: an earlier copy?"
            if any(_agrees(name, data, state) for state in states):
                continue
            if data is None:
                return f"{name} is gone"
            expected = states[-1].size_bytes
            if len(data) < expected:
                return f"{name} has {len(data):,} of {expected:,} bytes: cut, or an earlier copy"
            return f"{name} is not what was written last: damaged, or an earlier copy"
        return None

    def sync(self) -> None:
        if self._file is not None:
            os.fdatasync(self._file)
        if not self._name_on_disk:
            sync_folder(self._path.parent)
            self._name_on_disk = True

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def remove(self) -> None:
        self.close()
        for name in list(self._states):
            self._forget(name)
        self._path.unlink(missing_ok=True)

    def _set(self, name: str, *states: _State) -> None:
        self._states[name] = states
        self._lines[name] = " ".join((name, *map(str, states)))

    def _forget(self, name: str) -> None:
        self._states.pop(name, None)
        self._lines.pop(name, None)
        self._appended.pop(name, None)
        self._sizes.pop(name, None)

    def _begin_to_append(self, name: str, data: bytes) -> None:
        self._appended[name] = xxhash.xxh3_64(data)
        self._sizes[name] = len(data)

    def _write(self) -> None:
        """Overwrite the inventory by one call: it is written as a whole or not at all, whenever the process stops."""
        lines = "\n".join(self._lines.values()).encode()
        title = f"{_TITLE} {len(lines)} {xxhash.xxh3_64_hexdigest(lines)}\n".encode()
        if self._file is None:
            self._file = open_or_make(self._path)
        os.pwrite(self._file, title + lines, 0)  # the rest of a longer one before stays behind it, and is not read

    def _read(self) -> bool:
        try:
            title, _, rest = read_kept(self._path, _MOST_BYTES).partition(b"\n")
            kind, size, digest = title.decode().rsplit(" ", 2)
            lines = rest[: int(size)]
            if kind != _TITLE or len(lines) != int(size) or xxhash.xxh3_64_hexdigest(lines) != digest:
                return False
            for line in lines.decode().splitlines():
                name, *states = line.split()
                self._set(name, *map(_parsed, states))
        except (OSError, ValueError):
            return False
        return True


def _state_of(data: bytes) -> _State:
    return _State(len(data), xxhash.xxh3_64_hexdigest(data))


def _parsed(text: str) -> _State:
    if text == _NO_FILE:
        return _ABSENT
    size, _, digest = text.partition(":")
    return _State(int(size), digest)


def _agrees(name: str, data: bytes | None, state: _State) -> bool:
    if data is None:
        return state in (_ABSENT, _EMPTY)
    if state == _ABSENT or _state_of(data[: state.size_bytes]) != state:
        return False
    return len(data) == state.size_bytes or _is_one_append(name, data[state.size_bytes :])


def _is_one_append(name: str, tail: bytes) -> bool:
    """Or the beginning of one."""
    if name == RECEIPTS:
        return b"\n" not in tail[:-1]
    if not fnmatch(name, EPOCHS):
        return False
    reader = RecordReader(tail)
    found = sum(1 for _ in reader)
    return not reader.damaged and (found == 0 or (found == 1 and reader.intact_bytes == len(tail)))
