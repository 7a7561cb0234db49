"""What survives a restart of a pod? The journals of its jobs: which request got which sample, written down before an
answer leaves.

One folder for each job in ``journal_dir`` (:mod:`.job_files`). What was written survives the process at once, and the
machine after ``journal_sync_seconds`` (:mod:`.job_journal`). A later run of the pod restores a job from its journal if
that is whole (:mod:`.kept_job`); else it asks other pods for their records, too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

from refill.protocol.incarnation import line_of
from refill.protocol.job_spec import is_job_name
from refill.protocol.pod_life import PodLife
from refill_service.journal.folder_owner import FolderOwner
from refill_service.journal.inventory import Inventory
from refill_service.journal.job_files import ENDING, HEADER, ending_folder, inventory_of, job_folder, kept_file, replace
from refill_service.journal.job_journal import JobJournal, Snapshot
from refill_service.journal.kept_job import KeptJob, header_of, read_kept_job
from refill_service.memory.folder_lock import locked
from refill_service.memory.kept_files import put_aside, read_kept

__all__ = ["JobJournal", "Journal", "KeptJob"]

log = logging.getLogger(__name__)

_ENDED = "ended"
_KEPT_ENDED = 10_000
_MOST_ENDED_BYTES = 2 << 20
_UNCLAIMED_SECONDS = 14 * 86_400
"""A journal that was not written to for so long is removed when a pod starts."""


class Journal:
    """The journals of a pod's jobs. The folder belongs to one pod at a time.

    :param folder: None: nothing survives; only the names of ended jobs are kept, while the pod runs. Raises
        :class:`InvalidInput` when it can't be used.
    :param owner: of the folder, this run of the pod; None: it is not written down.
    """

    def __init__(self, folder: Path | None, sync_seconds: float, owner: FolderOwner | None = None) -> None:
        self.errors = 0
        """Writes that failed."""
        self._folder = folder
        self._sync_seconds = sync_seconds
        self._lock = None if folder is None else locked(folder, "journal_dir")
        self._owner = owner
        if folder is not None and owner is not None:
            owner.begin(folder)
        self._doubted: dict[str, str] = {}
        """By job, why what is there of it is not believed."""
        self._open: dict[str, JobJournal] = {}
        self._ended: dict[str, None] = dict.fromkeys(self._read_ended())
        self._said: dict[str, str] = {}
        self._syncing: asyncio.Task[None] | None = None
        if folder is not None:
            self._remove_unclaimed(folder)

    def start(self) -> None:
        if self._folder is not None:
            self._syncing = asyncio.create_task(self._sync_often())

    async def close(self) -> None:
        """Close all journals. What was written is on the disk then, and they are marked as whole."""
        if self._syncing is not None:
            self._syncing.cancel()
            await asyncio.gather(self._syncing, return_exceptions=True)
        for journal in list(self._open.values()):
            await asyncio.to_thread(journal.close)
        self._open.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def abandon(self) -> None:
        """Write nothing more. Another run of the pod may go on with what is there."""
        if self._syncing is not None:
            self._syncing.cancel()
        for journal in self._open.values():
            journal.abandon()
        self._open.clear()

    def find(self, job: str) -> KeptJob | None:
        """What an earlier run of the pod left of a job; None when there is nothing that can be used."""
        folder = self._of(job)
        if folder is None or not (folder / HEADER).exists():
            return None
        try:
            kept = read_kept_job(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._say(job, f"{folder} can't be read, and is not used: {error}")
            return None
        if not kept.reason and job in self._doubted:
            kept = replace_fields(kept, reason=self._doubted[job])
        if kept.reason:
            self._say(job, f"{folder} is not believed to be whole, and others are asked: {kept.reason}")
        return kept

    def _say(self, job: str, what: str) -> None:
        """Log it once, as journals are looked at often."""
        if self._said.get(job) != what:
            self._said[job] = what
            log.warning("%s", what)

    def state_of(self, job: str) -> object:
        """Another one whenever :meth:`find` may find something else; None when there is nothing."""
        folder = self._of(job)
        if folder is None or not (folder / HEADER).exists():
            return None
        with suppress(OSError):
            return sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir())
        return None

    def earlier_run_was(self, life: PodLife) -> None:
        """Fact: the run of this pod before had this life, as other pods know. What it has answered is not in a folder
        that was in use by an earlier one last."""
        if self._folder is None or self._owner is None or (found := self._owner.found) is None:
            return
        if life < found or life.name == found.name:
            return
        for folder in self._folder.glob("job-*"):
            job = folder.name.removeprefix("job-")
            if job not in self._open:
                self._doubted[job] = "the pod has run without it since: an earlier copy"

    def doubt(self, job: str, why: str) -> None:
        """Fact: more was delivered than what is there says."""
        self._doubted[job] = why

    def holder_of(self, job: str) -> str | None:
        """The owner of the token by which a job of an earlier run was registered; None when there is no such job."""
        folder = self._of(job)
        header = None if folder is None else header_of(folder)
        return None if header is None else str(header.get("spec", {}).get("holder", ""))

    def begin(
        self,
        job: str,
        header: dict[str, Any],
        snapshot: Snapshot,
        epochs: Iterable[int] = (),
    ) -> JobJournal | None:
        """Begin the journal of a job. The one that is there is replaced by ``snapshot`` of these epochs."""
        folder = self._of(job)
        if self._ended.pop(line_of(header["incarnation"]), self) is None:
            self._write_ended()
        if folder is None:
            return None
        if (header_of(folder) or {}).get("incarnation") != header["incarnation"]:
            _remove(folder)  # of an earlier job of that name
        check = None if self._owner is None else self._owner.check
        journal = JobJournal(folder, header, snapshot, self._failed, check)
        journal.begin(epochs)
        self._doubted.pop(job, None)
        self._open[job] = journal
        return journal

    def keep(self, job: str, pod: int, records: bytes) -> None:
        """Keep the records that another pod handed over when it ended: that pod, and its volume, may not come back."""
        folder = self._of(job)
        if (journal := self._open.get(job)) is not None:
            journal.keep(pod, records)
        elif folder is not None and folder.exists():
            inventory = Inventory(inventory_of(folder))
            try:
                with inventory.replacing(kept_file(pod), records) if inventory.intact else nullcontext():
                    replace(folder / kept_file(pod), records, sync=True)
            except OSError as error:
                self._failed(error)
            inventory.close()

    def let_go(self, job: str, journal: JobJournal | None) -> None:
        """Fact: the pod has forgotten a job, and may restore it from here. Another of its name may have begun since."""
        if journal is not None and self._open.get(job) is journal:
            del self._open[job]
            journal.close()

    def end(self, job: str, incarnation: str) -> None:
        """Fact: the job has ended. Its name is kept, so that later requests for it are refused. What is there of it
        goes when :meth:`receipts_are_kept`."""
        if (journal := self._open.pop(job, None)) is not None:
            journal.give_up()
        self._ended[line_of(incarnation)] = None
        while len(self._ended) > _KEPT_ENDED:
            self._ended.pop(next(iter(self._ended)))
        self._write_ended()
        if self._folder is not None:
            self._put_aside(job_folder(self._folder, job), incarnation)

    def _write_ended(self) -> None:
        if self._folder is not None:
            try:
                replace(self._folder / _ENDED, "\n".join(self._ended).encode())
            except OSError as error:
                self._failed(error)

    def _put_aside(self, folder: Path, incarnation: str) -> None:
        aside = ending_folder(folder.parent, line_of(incarnation))
        try:
            if inventory_of(folder).exists():
                inventory_of(folder).rename(inventory_of(aside))
            if folder.exists():
                folder.rename(aside)
        except OSError as error:
            self._failed(error)
            _remove(folder)  # a later job of its name must not find it

    def receipts_are_kept(self, incarnation: str) -> None:
        """Fact: whatever is to be had of a job that has ended is elsewhere."""
        if self._folder is not None:
            _remove(ending_folder(self._folder, line_of(incarnation)))

    def was_ending(self) -> list[KeptJob]:
        """Jobs that were ended by an earlier run of this pod, which was killed before their receipts were kept."""
        if self._folder is None:
            return []
        for folder in self._folder.glob("job-*"):
            incarnation = str((header_of(folder) or {}).get("incarnation", ""))
            if incarnation and self.has_ended(incarnation):
                self._put_aside(folder, incarnation)
        found = []
        for folder in self._folder.glob(ENDING):
            try:
                found.append(read_kept_job(folder))
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning("%s can't be read, and receipts of that job are lost: %s", folder, error)
                _remove(folder)
        return found

    def has_ended(self, incarnation: str) -> bool:
        return line_of(incarnation) in self._ended

    @property
    def used_bytes(self) -> int:
        return sum(journal.used_bytes for journal in self._open.values())

    def _of(self, job: str) -> Path | None:
        # The name may come from a URL: one that no job can have must not become a file's name.
        return job_folder(self._folder, job) if self._folder is not None and is_job_name(job) else None

    def _failed(self, error: OSError) -> None:
        self.errors += 1
        log.warning("journal: %s; deliveries are not written down until there is a new one", error)

    def _read_ended(self) -> list[str]:
        if self._folder is None or not os.path.lexists(self._folder / _ENDED):
            return []
        try:
            return read_kept(self._folder / _ENDED, _MOST_ENDED_BYTES).decode(errors="replace").split()
        except OSError as error:
            put_aside(self._folder / _ENDED, error)
            return []

    def _remove_unclaimed(self, folder: Path) -> None:
        for job in folder.glob("job-*"):
            newest = max((path.lstat().st_mtime for path in job.glob("*")), default=0.0)
            if time.time() - newest > _UNCLAIMED_SECONDS:
                _remove(job)

    async def _sync_often(self) -> None:
        while True:
            await asyncio.sleep(self._sync_seconds)
            for journal in list(self._open.values()):
                if journal.unsynced:
                    await asyncio.to_thread(journal.sync)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        inventory_of(folder).unlink(missing_ok=True)
