"""Can every file that is to be packed be read? Asked before a dataset goes that the new one replaces."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from refill.errors import InvalidInput
from refill_service.datasets.source_scan import SourceMember, SourceSample

__all__ = ["changed", "check_files", "unreadable"]

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
