"""What survives a restart of a pod? Its journal: who got what, written down before an answer leaves.

One folder for each job in ``journal_dir``: ``job.json`` says what the job is, ``epoch-N.records`` holds the records of
a running epoch (:mod:`refill.protocol.records`), ``receipts.jsonl`` the receipts of epochs that have ended. Records are
only ever appended; a file that has grown to twice what its epoch needs is written anew, and an epoch that is over for
good loses its file, so a journal is bounded by 32 bytes for each sample of the pod's share and three epochs.

What was written survives the process at once, and the machine after ``journal_sync_seconds``. So a journal is *whole*
when the machine has not been restarted since, or when the pod ended in order; else its last records may be missing and
others are asked what they know. A journal that can't be written is given up as a whole, not left half: the pod goes on
without, and begins a new one with the next epoch.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from refill.errors import StoreUnavailable
from refill.protocol.incarnation import line_of
from refill.protocol.job_spec import is_job_name
from refill.protocol.records import Record, RecordReader, encode_records
from refill_service.cache_core.resumed_epoch import ResumedEpoch
from refill_service.memory.folder_lock import locked

__all__ = ["JobJournal", "Journal", "KeptJob"]

log = logging.getLogger(__name__)

_HEADER = "job.json"
_RECEIPTS = "receipts.jsonl"
_CLEAN = "clean"
_LEFT_WITH = "left-with"
_ENDED = "ended"
_DONE = "done.bits"
_KEPT_ENDED = 10_000
_UNCLAIMED_SECONDS = 14 * 86_400
"""A job's journal that nobody came back for is removed at a start after so long."""
_LEAST_COMPACTED_BYTES = 1 << 20

Snapshot = Callable[[int], Iterable[Record]]
"""All that is to be known of an epoch, in as few records as it takes."""


@dataclass(frozen=True)
class KeptJob:
    """A job as an earlier run of this pod left it."""

    header: dict[str, Any]
    records: list[Record]
    receipts: dict[int, dict[str, Any]]
    whole: bool
    """Whether nothing that was delivered can be missing."""
    resumed: ResumedEpoch | None = None
    left_with: tuple[int, ...] = ()
    """Pods that may have been left a table when that run ended: they must not keep it for later ones."""


class Journal:
    """The journals of a pod's jobs. The folder belongs to one pod at a time.

    :param folder: None: nothing survives; only the names of ended jobs are kept, while the pod runs. Raises
        :class:`InvalidInput` when it can't be used.
    """

    def __init__(self, folder: Path | None, sync_seconds: float) -> None:
        self.errors = 0
        """Writes that failed."""
        self._folder = folder
        self._sync_seconds = sync_seconds
        self._lock = None if folder is None else locked(folder, "journal_dir")
        self._open: dict[str, JobJournal] = {}
        self._ended: dict[str, None] = dict.fromkeys(self._read_ended())
        self._syncing: asyncio.Task[None] | None = None
        if folder is not None:
            self._remove_unclaimed(folder)

    def start(self) -> None:
        if self._folder is not None:
            self._syncing = asyncio.create_task(self._sync_often())

    async def close(self) -> None:
        """All that was written is on the disk then, and says so."""
        if self._syncing is not None:
            self._syncing.cancel()
            await asyncio.gather(self._syncing, return_exceptions=True)
        for journal in list(self._open.values()):
            await asyncio.to_thread(journal.close)
        self._open.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def find(self, job: str) -> KeptJob | None:
        """What an earlier run of the pod left of a job; None when there is nothing that can be used."""
        folder = self._of(job)
        if folder is None or not (folder / _HEADER).exists():
            return None
        try:
            header = json.loads((folder / _HEADER).read_text())
            whole = (folder / _CLEAN).exists() or header["boot"] == _boot_id()
            records: list[Record] = []
            for path in sorted(folder.glob("epoch-*.records")):
                reader = RecordReader(path.read_bytes())
                records += list(reader)
                if reader.damaged:
                    log.warning(
                        "%s: damaged after byte %d, other pods and clients are asked", path, reader.intact_bytes
                    )
                    whole = False
            for path in folder.glob("kept-*.records"):
                records += list(RecordReader(path.read_bytes()))
            resumed = _resumed(folder / _DONE, header)
            lines = (folder / _RECEIPTS).read_text().splitlines() if (folder / _RECEIPTS).exists() else []
            receipts = {receipt["epoch"]: receipt for receipt in map(_json_or_none, lines) if receipt is not None}
            left_with = tuple(
                map(int, (folder / _LEFT_WITH).read_text().split() if (folder / _LEFT_WITH).exists() else ())
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s can't be read, and is not used: %s", folder, error)
            return None
        return KeptJob(header, records, receipts, whole, resumed, left_with)

    def holder_of(self, job: str) -> str | None:
        """Whose token a job of an earlier run of the pod was registered with; None when there is no such job."""
        folder = self._of(job)
        if folder is None or not (folder / _HEADER).exists():
            return None
        header = _json_or_none((folder / _HEADER).read_text())
        return None if header is None else str(header.get("spec", {}).get("holder", ""))

    def begin(
        self,
        job: str,
        header: dict[str, Any],
        snapshot: Snapshot,
        epochs: Iterable[int] = (),
        resumed: ResumedEpoch | None = None,
    ) -> JobJournal | None:
        """The journal of a job from now on; what there was of it is replaced by ``snapshot`` of these epochs."""
        folder = self._of(job)
        if folder is None:
            return None
        if _incarnation_in(folder) != header["incarnation"]:
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier job of that name
        header = header | {"boot": _boot_id(), "resumed": None if resumed is None else _without_done(resumed)}
        journal = JobJournal(folder, header, snapshot, self._failed, resumed)
        journal.begin(epochs)
        self._open[job] = journal
        return journal

    def keep(self, job: str, pod: int, records: bytes) -> None:
        """What another pod had delivered when it ended: it may not come back, and its volume with it."""
        folder = self._of(job)
        if folder is not None and folder.exists():
            try:
                _replace(folder / f"kept-{pod}.records", records, sync=True)
            except OSError as error:
                self._failed(error)

    def let_go(self, job: str, journal: JobJournal | None) -> None:
        """Fact: the pod has let go of a job, and may find it here again. Another of its name may have begun since."""
        if journal is not None and self._open.get(job) is journal:
            del self._open[job]
            journal.close()

    def end(self, job: str, incarnation: str) -> None:
        """Fact: the job has ended; whoever comes back to it is to be told."""
        if (journal := self._open.pop(job, None)) is not None:
            journal.give_up()
        if (folder := self._of(job)) is not None:
            shutil.rmtree(folder, ignore_errors=True)
        self._ended[line_of(incarnation)] = None
        while len(self._ended) > _KEPT_ENDED:
            self._ended.pop(next(iter(self._ended)))
        if self._folder is not None:
            try:
                _replace(self._folder / _ENDED, "\n".join(self._ended).encode())
            except OSError as error:
                self._failed(error)

    def has_ended(self, incarnation: str) -> bool:
        return line_of(incarnation) in self._ended

    @property
    def used_bytes(self) -> int:
        return sum(journal.used_bytes for journal in self._open.values())

    def _of(self, job: str) -> Path | None:
        # Asked for by whatever stands in a URL: what no job is called may be no file's name either.
        return self._folder / f"job-{job}" if self._folder is not None and is_job_name(job) else None

    def _failed(self, error: OSError) -> None:
        self.errors += 1
        log.warning("journal: %s; deliveries are not written down until there is a new one", error)

    def _read_ended(self) -> list[str]:
        if self._folder is None or not (self._folder / _ENDED).exists():
            return []
        return (self._folder / _ENDED).read_text(errors="replace").split()

    def _remove_unclaimed(self, folder: Path) -> None:
        for job in folder.glob("job-*"):
            newest = max((path.stat().st_mtime for path in job.glob("*")), default=0.0)
            if time.time() - newest > _UNCLAIMED_SECONDS:
                shutil.rmtree(job, ignore_errors=True)

    async def _sync_often(self) -> None:
        while True:
            await asyncio.sleep(self._sync_seconds)
            for journal in list(self._open.values()):
                if journal.unsynced:
                    await asyncio.to_thread(journal.sync)


class JobJournal:
    """The journal of one job that runs here."""

    def __init__(
        self,
        folder: Path,
        header: dict[str, Any],
        snapshot: Snapshot,
        failed: Callable[[OSError], None],
        resumed: ResumedEpoch | None,
    ) -> None:
        self.unsynced = False
        self._folder = folder
        self._header = header
        self._snapshot = snapshot
        self._failed = failed
        self._resumed = resumed
        self._files: dict[int, int] = {}
        """Descriptors, by epoch."""
        self._sizes: dict[int, int] = {}
        self._compact_sizes: dict[int, int] = {}
        self._given_up = False

    @property
    def used_bytes(self) -> int:
        return sum(self._sizes.values())

    def begin(self, epochs: Iterable[int]) -> None:
        """Write the journal anew, from what is known of these epochs."""
        self._given_up = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / _CLEAN).unlink(missing_ok=True)
            (self._folder / _LEFT_WITH).unlink(missing_ok=True)
            wanted = set(epochs)
            for epoch in wanted:
                self._compact(epoch)
            for path in self._folder.glob("epoch-*.records"):
                if path not in {self._path(epoch) for epoch in wanted}:
                    path.unlink()
            if self._resumed is not None:
                bits = np.zeros(self._header["num_samples"], dtype=bool)
                bits[self._resumed.done] = True
                _replace(self._folder / _DONE, np.packbits(bits).tobytes(), sync=True)
            # Last: without it nothing else is looked at.
            _replace(self._folder / _HEADER, json.dumps(self._header).encode())
        except OSError as error:
            self._give_up(error)

    def write(self, record: Record) -> None:
        """Returns when the record would survive the process, or the journal has been given up.

        Raises :class:`StoreUnavailable` when it can't be written and can't be given up either: then nothing may be
        delivered, since a journal that lacks it would be believed.
        """
        if self._given_up:
            self._header_is_gone()
            return
        if record.columns and not len(record.columns[0]):
            return
        try:
            self._append(record.epoch, record.encode())
        except OSError as error:
            self._give_up(error)
            return
        size = self._sizes[record.epoch]
        if size > _LEAST_COMPACTED_BYTES and size > 2 * self._compact_sizes[record.epoch]:
            try:
                self._compact(record.epoch)
            except OSError as error:
                self._give_up(error)

    def epoch_begins(self, live: Iterable[int]) -> None:
        """Fact: a good time to begin a new journal, should this one have been given up."""
        if self._given_up:
            self.begin(live)

    def forget(self, epoch: int) -> None:
        """Fact: nothing will be asked of this epoch again."""
        if (file := self._files.pop(epoch, None)) is not None:
            os.close(file)
            self._sizes.pop(epoch)
        try:
            self._path(epoch).unlink(missing_ok=True)
        except OSError as error:
            self._give_up(error)

    def keep_receipt(self, receipt: dict[str, Any]) -> None:
        """The receipt of an ``epoch`` that has ended."""
        if not self._given_up:
            try:
                with (self._folder / _RECEIPTS).open("a") as receipts:
                    receipts.write(json.dumps(receipt) + "\n")
            except OSError as error:
                self._give_up(error)

    def sync(self) -> bool:
        """To the disk. Called in a thread. False when not all of it is there."""
        self.unsynced = False
        try:
            for file in list(self._files.values()):
                os.fdatasync(file)
        except OSError as error:
            if error.errno != 9:  # closed meanwhile: its epoch has ended
                self._failed(error)
                return False
        return True

    def leaves_with(self, pod: int) -> None:
        """Fact: another pod is about to be left what was delivered. What is delivered after that must not begin before
        that pod has been asked for it: else it would give an old table to a later run, as if it was whole."""
        if not self._given_up:
            note = self._folder / _LEFT_WITH
            before = note.read_text() if note.exists() else ""
            _replace(note, f"{before} {pod}".encode(), sync=True)

    def close(self) -> None:
        """It is whole, whatever becomes of the machine."""
        on_disk = self.sync()
        self._close_files()
        if on_disk and not self._given_up:
            try:
                _replace(self._folder / _CLEAN, b"", sync=True)
            except OSError as error:
                self._failed(error)

    def give_up(self) -> None:
        """Nothing is written any more."""
        self._given_up = True
        self._close_files()

    def _append(self, epoch: int, data: bytes) -> None:
        if epoch not in self._files:
            self._files[epoch] = os.open(
                self._path(epoch), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
            self._sizes[epoch] = self._compact_sizes[epoch] = 0
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._files[epoch], rest) :]
        self._sizes[epoch] += len(data)
        self.unsynced = True

    def _compact(self, epoch: int) -> None:
        data = encode_records(self._snapshot(epoch))
        if (file := self._files.pop(epoch, None)) is not None:
            os.close(file)
        _replace(self._path(epoch), data)
        self._append(epoch, b"")
        self._sizes[epoch] = self._compact_sizes[epoch] = len(data)

    def _give_up(self, error: OSError) -> None:
        self._failed(error)
        self.give_up()
        self._header_is_gone()
        shutil.rmtree(self._folder, ignore_errors=True)  # makes room, if that was it

    def _header_is_gone(self) -> None:
        try:
            (self._folder / _HEADER).unlink(missing_ok=True)
        except OSError as error:
            raise StoreUnavailable(
                f"the journal in {self._folder} can be neither written nor removed ({error.strerror}): nothing is "
                "delivered until it can"
            ) from error

    def _close_files(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        self._sizes.clear()

    def _path(self, epoch: int) -> Path:
        return self._folder / f"epoch-{epoch}.records"


def _replace(path: Path, data: bytes, *, sync: bool = False) -> None:
    """The file has either its old or its new content, whenever the process stops; with ``sync``, whenever the machine
    does. Without it nothing waits for a disk, and a journal that a machine took down with it is not taken to be whole.
    """
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        file.write(data)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    new.replace(path)
    if sync:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _without_done(resumed: ResumedEpoch) -> dict[str, Any]:
    return {name: value for name, value in vars(resumed).items() if name != "done"}


def _resumed(path: Path, header: dict[str, Any]) -> ResumedEpoch | None:
    if header.get("resumed") is None:
        return None
    packed = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    if len(packed) != -(-header["num_samples"] // 8):
        raise ValueError(f"{path.name} is cut short")
    bits = np.unpackbits(packed, count=header["num_samples"])
    return ResumedEpoch(done=np.flatnonzero(bits), **header["resumed"])


def _incarnation_in(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / _HEADER).read_text())["incarnation"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _boot_id() -> str:
    """Names this run of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux: never taken to be whole unless the pod ended in order
        return str(time.monotonic_ns())


def _json_or_none(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
