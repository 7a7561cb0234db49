"""Does a folder belong to one pod at a time, and does the next one wait for it?"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from pathlib import Path

import pytest

from refill.errors import InvalidInput
from refill_service.memory.folder_lock import locked, wait_until_left


def test_a_folder_is_locked_by_one_at_a_time(tmp_path: Path) -> None:
    lock = locked(tmp_path / "a", "pinned_dir")
    with pytest.raises(InvalidInput, match=r"pinned_dir .*/a is used by another pod: give each pod"):
        locked(tmp_path / "a", "pinned_dir")
    os.close(lock)
    os.close(locked(tmp_path / "a", "pinned_dir"))


def test_a_folder_is_waited_for_and_then_free(tmp_path: Path) -> None:
    lock = locked(tmp_path, "pinned_dir")
    enough = threading.Timer(0.3, lambda: os.close(lock))
    enough.start()
    wait_until_left(tmp_path, "pinned_dir", 60)
    assert enough.finished.is_set()
    os.close(locked(tmp_path, "pinned_dir"))


def test_it_is_waited_for_no_longer_than_was_said(tmp_path: Path) -> None:
    lock = locked(tmp_path, "pinned_dir")
    began = time.monotonic()
    wait_until_left(tmp_path, "pinned_dir", 0.5)
    assert 0.5 <= time.monotonic() - began < 2
    os.close(lock)


def test_a_file_system_without_locks_is_not_taken_for_another_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(lock: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(InvalidInput, match=f"pinned_dir .* can't be used: {os.strerror(errno.ENOLCK)}"):
        wait_until_left(tmp_path, "pinned_dir", 60)
    with pytest.raises(InvalidInput, match=f"pinned_dir .* can't be used: {os.strerror(errno.ENOLCK)}"):
        locked(tmp_path, "pinned_dir")
