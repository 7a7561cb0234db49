"""Which files does the journal of a job have, and how is one of them replaced?

A folder for each job, ``job-NAME``, and beside it what must be in it, ``inventory-NAME`` (:mod:`.inventory`). Both are
renamed when the job ends, and removed when its receipts are kept.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from refill_service.memory.kept_files import write_kept

__all__ = [
    "CLEAN",
    "ENDING",
    "EPOCHS",
    "HANDED_OVER",
    "HEADER",
    "KEPT",
    "RECEIPTS",
    "VERSION",
    "ending_folder",
    "epoch_file",
    "inventory_of",
    "job_folder",
    "kept_file",
    "replace",
    "sync_folder",
]

VERSION = 1
"""Of all files, and in the header. A journal of another version is not used: other pods are asked for their records."""
HEADER = "job.json"
"""What the job is. Without this file the others are ignored."""
RECEIPTS = "receipts.jsonl"
"""A line for each epoch that has ended."""
CLEAN = "clean"
"""Empty: all that was written is on the disk, whatever becomes of the machine."""
HANDED_OVER = "left-with"
"""Numbers of the pods to which records may have been handed over when the pod ended. The file's name is part of the
format."""
EPOCHS = "epoch-*.records"
KEPT = "kept-*.records"
ENDING = "ending~*"
"""Folders of jobs that end, until their receipts are kept. No job has such a name."""


def epoch_file(epoch: int) -> str:
    """The records of a running epoch."""
    return f"epoch-{epoch}.records"


def kept_file(pod: int) -> str:
    """What another pod had delivered when it ended."""
    return f"kept-{pod}.records"


def job_folder(journal_dir: Path, job: str) -> Path:
    return journal_dir / f"job-{job}"


def ending_folder(journal_dir: Path, run: str) -> Path:
    return journal_dir / ENDING.replace("*", hashlib.blake2b(run.encode(), digest_size=16).hexdigest())


def inventory_of(folder: Path) -> Path:
    """Not in the folder: whoever puts back an earlier copy of that does not put back this as well."""
    return folder.with_name(f"inventory-{folder.name.removeprefix('job-')}")


def replace(path: Path, data: bytes, *, sync: bool = False) -> None:
    """The file has either its old or its new content, whenever the process stops; with ``sync``, whenever the machine
    does. Without it nothing waits for a disk, and a journal that a machine took down with it is not taken to be whole.
    """
    new = path.with_name(f"{path.name}.new")
    with open(write_kept(new), "wb") as file:
        file.write(data)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    new.replace(path)
    if sync:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """The names in it are on the disk, and those that were removed are not."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
