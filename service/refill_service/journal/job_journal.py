"""What is written of a job while it runs here? Each record before the answer leaves that it is about.

Records are only ever appended. A file that has grown to twice what its epoch needs is written anew, and an epoch that
is over for good loses its file: a journal is bounded by 32 bytes for each sample of the pod's share and three epochs. A
journal that can't be written is given up as a whole, not left half: the pod goes on without, and begins a new one with
the next epoch.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from refill.errors import JournalUnwritable, PodReplaced
from refill.protocol.records import Record, encode_records
from refill_service.journal.inventory import Inventory
from refill_service.journal.job_files import (
    CLEAN,
    EPOCHS,
    HANDED_OVER,
    HEADER,
    RECEIPTS,
    VERSION,
    epoch_file,
    inventory_of,
    kept_file,
    replace,
    sync_folder,
)
from refill_service.journal.kept_job import boot_id, read_contents
from refill_service.memory.kept_files import open_kept

__all__ = ["JobJournal", "Snapshot"]

_MIN_COMPACTED_BYTES = 1 << 20
_TO_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND

Snapshot = Callable[[int], Iterable[Record]]
"""All that is to be known of an epoch, in as few records as it takes."""


class JobJournal:
    """The journal of one job that runs here.

    :param check_owner: raises an error when the folder is that of a later run of the pod.
    """

    def __init__(
        self,
        folder: Path,
        header: dict[str, Any],
        snapshot: Snapshot,
        failed: Callable[[OSError], None],
        check_owner: Callable[[], None] | None = None,
    ) -> None:
        self.unsynced = False
        self._folder = folder
        self._inventory = Inventory(inventory_of(folder))
        self._header = header | {
            "version": VERSION,
            "boot": boot_id(),
            "inventory": True,
        }
        self._snapshot = snapshot
        self._failed = failed
        self._check_owner = check_owner or (lambda: None)
        self._files: dict[int, int] = {}
        """Descriptors, by epoch."""
        self._sizes: dict[int, int] = {}
        self._compact_sizes: dict[int, int] = {}
        self._given_up = False
        self._abandoned = False

    @property
    def used_bytes(self) -> int:
        return sum(self._sizes.values())

    def begin(self, epochs: Iterable[int]) -> None:
        """Write the journal anew, from what is known of these epochs."""
        self._check_owner()
        self._given_up = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._adopt_what_is_there()
            self._remove(CLEAN, sync=True)  # before anything is delivered that it does not know of
            self._remove(HANDED_OVER)
            wanted = set(epochs)
            for epoch in wanted:
                self._compact(epoch)
            for path in self._folder.glob(EPOCHS):
                if path.name not in map(epoch_file, wanted):
                    self._remove(path.name)
            # Last: without it nothing else is looked at.
            self._replace(HEADER, json.dumps(self._header).encode())
        except OSError as error:
            self._give_up(error)

    def write(self, record: Record) -> None:
        """Returns when the record would survive the process, or the journal has been given up.

        Raises :class:`JournalUnwritable` when it can't be written and can't be given up either, or was abandoned: then
        nothing may be delivered, since a journal that lacks it would be believed.
        """
        self._check_owner()
        if self._abandoned:
            raise JournalUnwritable(
                f"the journal in {self._folder} is that of a later run of this pod: nothing is delivered here any more",
                path=str(self._folder),
                errno=errno.EPERM,
            )
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
        if size > _MIN_COMPACTED_BYTES and size > 2 * self._compact_sizes[record.epoch]:
            try:
                self._compact(record.epoch)
            except OSError as error:
                self._give_up(error)

    def epoch_begins(self, live: Iterable[int]) -> None:
        """Fact: a good time to begin a new journal, should this one have been given up."""
        if self._given_up and not self._abandoned:
            self.begin(live)

    def forget(self, epoch: int) -> None:
        """Fact: nothing will be asked of this epoch again."""
        self._check_owner()
        if self._abandoned:
            return
        if (file := self._files.pop(epoch, None)) is not None:
            os.close(file)
            self._sizes.pop(epoch)
        try:
            self._remove(epoch_file(epoch))
        except OSError as error:
            self._give_up(error)

    def keep(self, pod: int, records: bytes) -> None:
        """Keep the records that another pod handed over when it ended."""
        self._check_owner()
        if not self._given_up:
            try:
                self._replace(kept_file(pod), records, sync=True)
            except OSError as error:
                self._failed(error)

    def keep_receipt(self, receipt: dict[str, Any]) -> None:
        """The receipt of an ``epoch`` that has ended."""
        self._check_owner()
        if not self._given_up:
            try:
                line = (json.dumps(receipt) + "\n").encode()
                self._inventory.will_append(RECEIPTS)
                with open(open_kept(self._folder / RECEIPTS, _TO_APPEND), "ab", buffering=0) as receipts:
                    receipts.write(line)
                self._inventory.appended(RECEIPTS, line)
            except OSError as error:
                self._give_up(error)

    def sync(self) -> bool:
        """To the disk. Called in a thread. False when not all of it is there."""
        self.unsynced = False
        try:
            for file in list(self._files.values()):
                os.fdatasync(file)
            self._inventory.sync()
        except OSError as error:
            if error.errno != errno.EBADF:  # closed meanwhile: its epoch has ended
                self._failed(error)
                return False
        return True

    def hands_over_to(self, pod: int) -> None:
        """Fact: the records of what was delivered are about to be handed over to another pod. This pod's next run must
        ask for them before it delivers anything: else a later run would get them as if they were complete."""
        self._check_owner()
        if not self._given_up:
            note = self._folder / HANDED_OVER
            before = note.read_text() if note.exists() else ""
            self._replace(HANDED_OVER, f"{before} {pod}".encode(), sync=True)

    def close(self) -> None:
        """It is whole, whatever becomes of the machine; but for one that a later run of the pod goes on with."""
        on_disk = self.sync()
        self._close_files()
        if on_disk and not self._given_up:
            try:
                self._check_owner()
                self._replace(CLEAN, b"", sync=True)
            except OSError as error:
                self._failed(error)
            except PodReplaced:
                pass
        self._inventory.close()

    def abandon(self) -> None:
        """Fact: a later run of the pod goes on with what is there. Nothing of it is touched any more, nor removed."""
        self._abandoned = True
        self.give_up()

    def give_up(self) -> None:
        """Nothing is written any more."""
        self._given_up = True
        self._close_files()
        self._inventory.close()

    def _append(self, epoch: int, data: bytes) -> None:
        name = epoch_file(epoch)
        if epoch not in self._files:
            self._inventory.will_append(name)
            self._files[epoch] = open_kept(self._folder / name, _TO_APPEND)
            self._sizes[epoch] = self._compact_sizes[epoch] = 0
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._files[epoch], rest) :]
        self._sizes[epoch] += len(data)
        if data:
            self._inventory.appended(name, data)
        self.unsynced = True

    def _compact(self, epoch: int) -> None:
        data = encode_records(self._snapshot(epoch))
        if (file := self._files.pop(epoch, None)) is not None:
            os.close(file)
        self._replace(epoch_file(epoch), data)
        self._append(epoch, b"")
        self._sizes[epoch] = self._compact_sizes[epoch] = len(data)

    def _give_up(self, error: OSError) -> None:
        self._check_owner()  # a successor's must not be removed
        self._failed(error)
        self.give_up()
        self._header_is_gone()
        with suppress(OSError):
            self._inventory.remove()
        shutil.rmtree(self._folder, ignore_errors=True)  # makes room, if that was it

    def _header_is_gone(self) -> None:
        try:
            (self._folder / HEADER).unlink(missing_ok=True)
        except OSError as error:
            raise JournalUnwritable(
                f"the journal in {self._folder} can be neither written nor removed ({error.strerror or error}): "
                "nothing is delivered until it can. Make the pod's journal_dir writable, and see that it has room",
                path=str(self._folder),
                errno=error.errno,
            ) from error

    def _close_files(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        self._sizes.clear()

    def _adopt_what_is_there(self) -> None:
        """What this journal goes on with: receipts, and what other pods left here."""
        contents = read_contents(self._folder)
        if HEADER in contents and self._inventory.contradiction(contents) is not None:
            # It is being replaced by what others knew: until that is done, nothing of it is to be believed.
            (self._folder / HEADER).unlink()
            del contents[HEADER]
        self._inventory.adopt(contents)
        receipts, newline, cut = contents.get(RECEIPTS, b"").rpartition(b"\n")
        if cut:  # its writer was killed; the next line is one of its own
            self._replace(RECEIPTS, receipts + newline)

    def _replace(self, name: str, data: bytes, *, sync: bool = False) -> None:
        with self._inventory.replacing(name, data, sync=sync):
            replace(self._folder / name, data, sync=sync)

    def _remove(self, name: str, *, sync: bool = False) -> None:
        path = self._folder / name
        if path.exists() or name in self._inventory:
            with self._inventory.replacing(name, None):
                path.unlink(missing_ok=True)
                if sync:
                    sync_folder(self._folder)
