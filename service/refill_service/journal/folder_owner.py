"""Which run of the pod has a journal's folder? Its life, in the file ``life`` there.

A lock keeps two processes of one machine from the same folder. Where a volume is taken from a machine that is cut off,
and given to another one, or where the storage knows no locks, an earlier run of the pod may still write there. It looks
at this file first.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from refill.errors import InvalidInput
from refill.protocol.pod_life import PodLife
from refill_service.cache_core.pod_lives import is_ahead
from refill_service.journal.job_files import replace
from refill_service.memory.kept_files import put_aside, read_kept

__all__ = ["FolderOwner"]

log = logging.getLogger(__name__)

_LIFE = "life"
_MOST_BYTES = 256


class FolderOwner:
    """:param life: of this run of the pod.
    :param is_another: called with the life of the run that has the folder by now; raises an error if it is a later one.
    """

    def __init__(self, life: PodLife, is_another: Callable[[PodLife], None]) -> None:
        self.found: PodLife | None = None
        """The run that had the folder before; with number 0 where the one that is written there can't be right."""
        self.life = life
        """Later than that one, should a clock have gone back."""
        self._is_another = is_another
        self._path: Path | None = None
        self._seen: tuple[int, int] | None = None

    def begin(self, folder: Path) -> None:
        """Take the folder over."""
        self._path = folder / _LIFE
        self.found = self._read()
        if self.found is None and os.path.lexists(self._path):
            put_aside(self._path, "it names no process of this pod")
        if self.found is not None and is_ahead(self.found, self.life.number):
            log.warning(
                "%s says that this pod was started last at a time that has not come yet, which is not believed. If the "
                "clock of this machine is behind, set it, and start the pod again",
                self._path,
            )
            self.found = PodLife(0, self.found.name)
        elif self.found is not None and self.found.number >= self.life.number:
            self.life = PodLife(self.found.number + 1, self.life.name)
        with suppress(OSError):  # what is written there fails as well, and the pod goes on without
            replace(self._path, self.life.encode().encode(), sync=True)
            self._seen = self._look()

    def check(self) -> None:
        """To be called before a write. Costs a look at the file's number and time."""
        if self._path is None or self._seen is None:
            return
        try:
            if self._look() == self._seen:
                return
        except OSError:
            return  # what becomes of a folder that is gone is seen by the write itself
        found = self._read()
        if found is not None and found.name != self.life.name:
            self._is_another(found)

    def _look(self) -> tuple[int, int]:
        assert self._path is not None
        found = os.stat(self._path)
        return found.st_ino, found.st_mtime_ns

    def _read(self) -> PodLife | None:
        assert self._path is not None
        try:
            return PodLife.decode(read_kept(self._path, _MOST_BYTES).decode("latin-1").strip())
        except (OSError, InvalidInput):
            return None
