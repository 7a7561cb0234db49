"""Where are the receipts of runs that have ended, so that no restart loses them? A file for each, beside journals."""

from __future__ import annotations

import hashlib
import logging
import zlib
from pathlib import Path

from refill_service.cache_core.kept_runs import KeptRuns, RunPart
from refill_service.journal.job_files import replace
from refill_service.memory.kept_files import NoKeptFile, put_aside, read_kept

__all__ = ["KeptParts"]

log = logging.getLogger(__name__)

_FOLDER = "receipts"
_ENDING = ".run"
_MOST_BYTES = 4 << 20


class KeptParts:
    """Those of one pod, in memory and in its journal's folder.

    :param journal_dir: None: they are in memory alone.
    """

    def __init__(self, journal_dir: Path | None) -> None:
        self._runs = KeptRuns()
        self._folder = None if journal_dir is None else journal_dir / _FOLDER
        if self._folder is not None:
            self._read(self._folder)

    def put(self, part: RunPart) -> None:
        """Raises nothing: receipts that can't be written are kept in memory."""
        dropped = self._runs.put(part)
        if self._folder is None:
            return
        try:
            self._folder.mkdir(exist_ok=True)
            for each in dropped:
                self._path(self._folder, each).unlink(missing_ok=True)
            if part not in dropped:
                replace(self._path(self._folder, part), part.encode())
        except OSError as error:
            log.warning("receipts of job %s are kept in memory alone: %s", part.about["job"], error)

    def of(self, team: str, job: str | None = None) -> list[RunPart]:
        """As :meth:`KeptRuns.of`."""
        return self._runs.of(team, job)

    def _read(self, folder: Path) -> None:
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            put_aside(folder, "no folder")
        for path in folder.glob(f"*{_ENDING}"):
            try:
                dropped = self._runs.put(RunPart.decode(read_kept(path, _MOST_BYTES)))
            except (NoKeptFile, ValueError, KeyError, TypeError, IndexError, zlib.error) as error:
                put_aside(path, error)
                continue
            except OSError as error:
                log.warning("%s can't be read, and is not used: %s", path, error)
                continue
            for each in dropped:
                self._path(folder, each).unlink(missing_ok=True)

    @staticmethod
    def _path(folder: Path, part: RunPart) -> Path:
        name = hashlib.blake2b(repr(part.key).encode(), digest_size=16).hexdigest()
        return folder / f"{name}{_ENDING}"
