"""What has a rank received in the epochs that run? Kept by the rank, for a pod that lost its memory.

All processes of a rank share it: the training process and its loader workers, forked or spawned. So it is a folder with
a file for each epoch, to which each batch is appended (16 bytes a sample), and it outlives a worker that is killed. It
ends with the training process: a lock shows whether any process that uses the folder lives, and the next training
process removes folders that nobody uses. A folder that is removed under a running process is begun anew. Its records
are taken to be complete from the second epoch after that one on; the same holds when a file of an epoch is missing, or
could not be written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import numpy as np

from refill.own_life import has_ended, own_life
from refill.protocol.records import Kind, Record, RecordReader, encode_records
from refill.protocol.wire_format import Int64Array

__all__ = ["DeliveryRecord"]

log = logging.getLogger(__name__)

_NUM_REPORTS, _MOVES, _SINCE, _NUM_EPOCHS, _EPOCHS = range(5)
"""Places of numbers in the lock file: how often the record was reported, how often the job had moved by then, the epoch
from which on the record is complete, and the epochs of which there must be a file, after their number."""
_LEFTOVER_SECONDS = 86_400
_NEW = "refill-new-"
_OF_RANK = "-rank-"
"""Between the name of the first rank's folder and the number of another one."""
_WHOLE = "whole"
"""A file that is there while the record is complete, from the epoch on that the lock file says."""
_NOTHING_LOST = "nothing-lost"
"""A file in the first rank's folder, until anything of any rank is lost: what is not there then was never made."""


@dataclass
class _OpenFiles:
    """What a process has open of a folder. Its own object, since it outlives the record that it is closed for."""

    process: int
    lock: int | None = None
    """The file that is locked. It holds what all processes must agree on, and is not missed unseen as others are."""
    alive: int | None = None
    """A file that stays locked as long as a process lives that has it open."""
    written: tuple[int, int] | None = None
    """``(epoch, descriptor)`` that was written last."""

    def close(self) -> None:
        """What is open is of no use any more. In a forked process it is that of the one that forked it."""
        if self.process == os.getpid():
            for file in (self.lock, self.alive, None if self.written is None else self.written[1]):
                if file is not None:
                    os.close(file)
            self.lock, self.alive, self.written = None, None, None


class DeliveryRecord:
    """Picklable; copies share the folder.

    ``made_in`` is the training process: the one in which the first of the copies was made.
    """

    _files: _OpenFiles
    """Those of this process."""
    _moves_seen: int
    """The moves of the job, as they were read last: they outlive a folder that is removed."""

    def __init__(self) -> None:
        self.made_in = os.getpid()
        self._folder = self._first_folder = Path(tempfile.gettempdir()) / f"refill-{self.made_in}-{uuid.uuid4().hex}"
        self._fails = False
        self._forget_process()
        try:
            # Now: a folder that is not there later has been removed.
            _remove_leftovers(self._folder.parent)
            self._make(whole=True)
            (self._folder / _NOTHING_LOST).touch()
        except OSError as error:
            self._not_complete(error)
        # Last at exit: loader workers end first, and would else take the removal for somebody else's.
        Finalize(self, _remove, args=(self._folder, os.getpid()), exitpriority=-100)

    def __getstate__(self) -> dict[str, Any]:
        names = ("made_in", "_folder", "_first_folder", "_fails")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_process()

    def of_rank(self, rank: int) -> DeliveryRecord:
        """The record of another rank for which this process reads, too. All processes of this rank get the same one."""
        other = DeliveryRecord.__new__(DeliveryRecord)
        folder = Path(f"{self._first_folder}{_OF_RANK}{rank}")
        other.__setstate__(self.__getstate__() | {"_folder": folder, "_fails": False})
        return other

    def num_reports(self) -> int:
        """How often this was reported to a pod. An answer to what was asked before a report must not count after it."""
        self._own_process()
        try:
            return 0 if self._files.lock is None else _number(self._files.lock, _NUM_REPORTS)
        except OSError:
            return 0

    def moves(self) -> int:
        """How often the job had moved to other pods at the last report. A process that asks the pods of before a move
        gets samples that the pods of now give to others."""
        self._own_process()
        try:
            with self._locked() as lock:
                self._moves_seen = max(self._moves_seen, _number(lock, _MOVES))
        except OSError:
            pass
        return self._moves_seen

    def resumes_within(self, epoch: int, consumed: Int64Array) -> bool:
        """Fact: the loop goes on in the middle of an epoch, of which it has consumed these positions. False when the
        record lacks some of them, and was reported as complete to a job that moved."""
        try:
            with self._locked() as lock:
                path = self._path(epoch)
                records = RecordReader(path.read_bytes() if path.exists() else b"")
                known = [record.columns[0] for record in records if record.kind is Kind.RECEIVED]
                if known and np.isin(consumed, np.concatenate(known)).all():
                    return True
                _write(lock, _SINCE, max(_number(lock, _SINCE), epoch + 1))
                return _number(lock, _MOVES) == 0
        except OSError as error:
            self._not_complete(error)
        return True

    def is_unknown_before(self, epoch: int) -> None:
        """Fact: another process was this rank before, and what it received in epochs before this one is not known."""
        try:
            with self._locked() as lock:
                _write(lock, _SINCE, max(_number(lock, _SINCE), epoch))
        except OSError as error:
            self._not_complete(error)

    def begins_again(self, run: str) -> None:
        """Fact: what comes from now on is of a new run of the job, as each process of the rank says once."""
        try:
            with self._locked() as lock:
                self._moves_seen = 0
                marker = self._folder / "run"
                if not marker.exists() or marker.read_text() != run:
                    if not marker.exists() and not self._nothing_lost:
                        # It went with a folder that was removed, perhaps within this run, and what came then with it.
                        (self._folder / _WHOLE).unlink(missing_ok=True)
                    _write(lock, _MOVES, 0, 0, 0)
                    for path in self._folder.glob("epoch-*"):
                        path.unlink()
                    marker.write_text(run)
        except OSError as error:
            self._not_complete(error)

    @property
    def is_used(self) -> bool:
        """Whether anything has come."""
        try:
            with self._locked() as lock:
                return bool(_epochs(lock))
        except OSError:
            return False

    def add(self, record: Record, num_reports: int, moves: int | None = None) -> bool:
        """Fact: a batch has come, or a trace was posted. False when the record was reported since it was asked for: the
        report said that it had not come, so pods may give its samples to another rank.

        :param num_reports: as it was when this was asked for.
        :param moves: of the job that was asked. False, too, when the record was reported to the job after a later move.
        """
        try:
            with self._locked() as lock:
                if _number(lock, _NUM_REPORTS) != num_reports or (moves is not None and _number(lock, _MOVES) > moves):
                    return False
                # Who receives of an epoch may have samples of the one before, that other ranks are in still. A trace
                # may be posted while they are two epochs behind.
                oldest = record.epoch - (1 if record.kind is Kind.RECEIVED else 2)
                if not (self._folder / _WHOLE).exists():
                    self._is_whole_after(lock, record.epoch)
                if not _epochs(lock):  # another process may have been the rank in the epochs before
                    _write(lock, _SINCE, max(_number(lock, _SINCE), record.epoch))
                self._append(lock, record.epoch, record.encode(), oldest)
        except OSError as error:
            self._not_complete(error)
        return True

    def report(self, rank: int, moves: int = 0) -> bytes:
        """All of it, as records, for a pod that lost its memory. From now on, nothing that was asked for before counts
        as received. An empty record says that it is empty, and not that the rank has received nothing: another process
        may have been the rank before.

        :param moves: of the job that it is reported to.
        """
        try:
            with self._locked() as lock:
                _write(lock, _NUM_REPORTS, _number(lock, _NUM_REPORTS) + 1, max(moves, _number(lock, _MOVES)))
                since = _number(lock, _SINCE)
                for epoch in _epochs(lock):
                    self._must_exist(epoch)
                files = [path.read_bytes() for path in sorted(self._folder.glob("epoch-*"))]
                parts = [_intact(file) for file in files]
                # What was cut, where a worker was killed or the disk was full, hides all that was written after it.
                whole = (self._folder / _WHOLE).exists() and parts == files
        except OSError as error:
            self._not_complete(error)
            return b""
        if not whole:
            return b"".join(parts)
        received = [each.epoch for part in parts for each in RecordReader(part) if each.kind is Kind.RECEIVED]
        if received:
            since = max(since, max(received) - 1)  # what is older was dropped
        last = Record(Kind.WHOLE, since, rank) if received or since else Record(Kind.UNUSED, 0, rank)
        return b"".join(parts) + encode_records([last])

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Between threads and between processes."""
        self._own_process()
        with self._threads:
            while True:
                lock = self._files.lock = self._open() if self._files.lock is None else self._files.lock
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not _was_removed(lock):
                    break
                self._files.close()
            try:
                yield lock
            except OSError as error:
                self._not_complete(error)  # before another process reports it
                raise
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)

    def _open(self) -> int:
        # First: another process may make it in a moment.
        was_made = self._folder == self._first_folder or self._marks_made.exists()
        if not self._folder.exists():
            if has_ended(own_life(self.made_in)):
                raise FileNotFoundError(errno.ENOENT, "the training process has ended")
            # Another rank's record is made when it is needed.
            never_made = self._nothing_lost and not was_made
            if not never_made:
                self._not_complete(OSError(errno.ENOENT, "it was removed"))
            self._make(whole=never_made)
            if never_made:
                self._marks_made.touch()
        if self._files.alive is None:
            self._files.alive = _locked_shared(self._folder)
        return os.open(self._folder / "lock", os.O_RDWR | os.O_CLOEXEC)

    def _make(self, *, whole: bool) -> None:
        # The folder of temporary files, too, may have been removed under a process that runs.
        self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Complete from the start: two workers may come at the same time.
        new = Path(tempfile.mkdtemp(prefix=_NEW, dir=self._folder.parent))
        if whole:
            (new / _WHOLE).touch()
        # After a removal, the number of reports is lost. This one is larger than any before, so that no answer that is
        # under way counts.
        num_reports = 0 if whole else time.time_ns()
        (new / "lock").write_bytes(num_reports.to_bytes(8, "little") + self._moves_seen.to_bytes(8, "little"))
        (new / "alive").touch()
        alive = _locked_shared(new)
        try:
            new.rename(self._folder)
            self._files.alive = alive
        except OSError:
            os.close(alive)
            shutil.rmtree(new, ignore_errors=True)

    def _append(self, lock: int, epoch: int, data: bytes, oldest: int) -> None:
        files = self._files
        if files.written is not None and (files.written[0] != epoch or _was_removed(files.written[1])):
            os.close(files.written[1])
            files.written = None
        if files.written is None:
            there_were = _epochs(lock)
            if epoch in there_were:
                self._must_exist(epoch)
            file = os.open(self._path(epoch), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
            files.written = (epoch, file)
            # Between the two that a process makes and drops: one that is killed here leaves no file that seems to lack.
            epochs = sorted(each for each in there_were | {epoch} if each >= oldest)
            _write(lock, _NUM_EPOCHS, len(epochs), *epochs)
            self._drop_before(oldest)
        if os.write(files.written[1], data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _drop_before(self, epoch: int) -> None:
        for path in self._folder.glob("epoch-*"):
            if int(path.name.removeprefix("epoch-")) < epoch:
                path.unlink()

    def _must_exist(self, epoch: int) -> None:
        """The file of an epoch may be removed alone: by what cleans folders of old files."""
        if not self._path(epoch).exists():
            self._not_complete(OSError(errno.ENOENT, f"epoch-{epoch} in it was removed"))

    def _not_complete(self, error: OSError) -> None:
        """Fact: the record could not be read or written. It must not be reported as complete from now on."""
        for file in (self._folder / _WHOLE, self._first_folder / _NOTHING_LOST):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        if not self._fails and not has_ended(own_life(self.made_in)):
            self._fails = True
            log.warning(
                "%s: %s: should a pod lose its memory in this epoch or the next, nobody will know what this rank has "
                "received in them",
                self._folder,
                error.strerror,
            )

    def _is_whole_after(self, lock: int, epoch: int) -> None:
        """Fact: something was lost, and in this epoch records can be written again. Workers are no more than one epoch
        apart, so of the epochs after the next one nothing is lost."""
        _write(lock, _SINCE, max(_number(lock, _SINCE), epoch + 2))
        left = [each for each in sorted(_epochs(lock)) if self._path(each).exists()]
        _write(lock, _NUM_EPOCHS, len(left), *left)
        (self._folder / _WHOLE).touch()

    @property
    def _nothing_lost(self) -> bool:
        return (self._first_folder / _NOTHING_LOST).exists()

    @property
    def _marks_made(self) -> Path:
        """A file that is there once the record of another rank was made."""
        return self._first_folder / self._folder.name

    def _path(self, epoch: int) -> Path:
        return self._folder / f"epoch-{epoch}"

    def _own_process(self) -> None:
        """Open files anew after a fork: a lock on a file that was opened before it would belong to both processes."""
        if self._files.process != os.getpid():
            self._forget_process()

    def _forget_process(self) -> None:
        self._threads = threading.Lock()
        self._moves_seen = 0
        self._files = _OpenFiles(os.getpid())
        # At exit they are closed anyway, and there may be no modules any more to do it with.
        weakref.finalize(self, self._files.close).atexit = False


def _locked_shared(folder: Path) -> int:
    """The descriptor of a file whose lock shows that the folder is used."""
    alive = os.open(folder / "alive", os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(alive, fcntl.LOCK_SH)
    return alive


def _was_removed(file: int) -> bool:
    return os.fstat(file).st_nlink == 0


def _intact(records: bytes) -> bytes:
    """These records without a last one that was cut off."""
    reader = RecordReader(records)
    for _ in reader:
        pass
    return records[: reader.intact_bytes]


def _number(lock: int, place: int) -> int:
    return int.from_bytes(os.pread(lock, 8, 8 * place), "little")


def _write(lock: int, place: int, *numbers: int) -> None:
    """From this place on, all at once: who writes may be killed."""
    os.pwrite(lock, b"".join(number.to_bytes(8, "little") for number in numbers), 8 * place)


def _epochs(lock: int) -> set[int]:
    """The epochs of which there must be a file."""
    return {_number(lock, _EPOCHS + n) for n in range(_number(lock, _NUM_EPOCHS))}


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:
        for path in (folder, *folder.parent.glob(f"{folder.name}{_OF_RANK}*")):
            shutil.rmtree(path, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Remove the folders of this user's training processes that were killed."""
    for path in folder.glob("refill-*-*"):
        try:
            status = path.stat()
            if status.st_uid == os.getuid() and _has_ended(_kept_by(path), status.st_mtime):
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue


def _kept_by(path: Path) -> Path:
    """The folder whose lock shows that its training process lives. Another rank's is open in loader workers alone, and
    between two epochs there may be none."""
    first = path.with_name(path.name.partition(_OF_RANK)[0])
    return first if first.exists() else path


def _has_ended(path: Path, changed_at: float) -> bool:
    """Whether nobody has the folder open, in this container or in others that share the disk."""
    try:
        if path.name.startswith(_NEW):
            raise FileNotFoundError  # it may be locked in a moment
        alive = os.open(path / "alive", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # of an earlier version
        number = path.name.split("-")[1]
        is_old = time.time() - changed_at > _LEFTOVER_SECONDS
        return is_old and (not number.isdigit() or not _lives(int(number)))
    try:
        fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(alive)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
