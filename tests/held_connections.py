"""What do tests of the connection holder share? A folder of its own, its process, and the kernel's connections."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.util import get_temp_dir
from pathlib import Path

import pytest

from refill.pods.credentials import HOLDER_VARIABLE
from refill.pods.holder_door import door
from tests.waiting import until

__all__ = ["connections_to", "holder_folder", "holders", "until_gone"]

_ESTABLISHED = "01"


@pytest.fixture
def holder_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this test's holder listens; it is asked whatever the number of ranks."""
    gc.collect()  # ranks of earlier tests go on telling their pods that they are there, by way of this one
    get_temp_dir()  # multiprocessing's, which outlives the test
    base = tempfile.mkdtemp(prefix="refill-", dir="/tmp")  # a Unix socket's path has 107 bytes
    monkeypatch.setenv("TMPDIR", base)
    monkeypatch.setattr(tempfile, "tempdir", None)
    door.alone_until, door.alone_seconds, door.is_doubted = 0.0, 30.0, False
    monkeypatch.setenv(HOLDER_VARIABLE, "on")
    folder = Path(base) / f"refill-{os.geteuid()}"
    yield folder
    door.alone_until = float("inf")  # what is left of this test starts none for a later one
    gc.collect()
    for process in holders(folder):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    shutil.rmtree(base, ignore_errors=True)


def holders(folder: Path) -> list[int]:
    """Processes that hold connections for who uses this folder."""
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            said = (process / "cmdline").read_bytes() if process.name.isdigit() else b""
            if b"refill.holder.connection_holder" in said and os.fsencode(f"{folder}/") in said:
                found.append(int(process.name))
    return found


def until_gone(folder: Path) -> None:
    until(lambda: not holders(folder), "the end of the connection holder")


def connections_to(ports: list[int]) -> int:
    """That there are to pods of this machine."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return sum(each[3] == _ESTABLISHED and int(each[1].rpartition(":")[2], 16) in ports for each in fields)
