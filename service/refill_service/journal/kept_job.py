"""What does a pod find in the journal of its earlier run, and can something be missing there?

A journal is *whole* when nothing that was delivered can be missing in it: its files are those of its inventory, and the
machine has not been restarted since, or the pod ended in order. The records of a journal that is not whole are true all
the same: other pods are asked for the rest.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from refill.protocol.records import Kind, Record, RecordReader
from refill.protocol.wire_format import Int64Array
from refill_service.journal.inventory import Inventory
from refill_service.journal.job_files import (
    CLEAN,
    EPOCHS,
    HANDED_OVER,
    HEADER,
    KEPT,
    RECEIPTS,
    VERSION,
    inventory_of,
)
from refill_service.memory.kept_files import read_kept

__all__ = ["KeptJob", "boot_id", "header_of", "read_contents", "read_kept_job"]


_MOST_HEADER_BYTES = 1 << 20
_MOST_BYTES = 4 << 30
"""Of what was delivered of a share in an epoch, with all traces."""


@dataclass(frozen=True)
class KeptJob:
    """A job as an earlier run of this pod left it."""

    header: dict[str, Any]
    records: list[Record]
    receipts: dict[int, dict[str, Any]]
    reason: str
    """Why something that was delivered can be missing; empty: nothing can."""
    handed_over_to: tuple[int, ...] = ()
    """Pods to which records may have been handed over when that run ended. They must not keep them for later runs."""

    num_own: int = 0
    """Of the records, how many are of this pod's own answers; the others were left here."""

    @property
    def whole(self) -> bool:
        return not self.reason

    def num_answered(self) -> dict[int, int]:
        """By epoch, how many requests this pod has answered."""
        asked: dict[int, list[Int64Array]] = {}
        for record in self.records[: self.num_own]:
            of_epoch = asked.setdefault(record.epoch, [])
            if record.kind is Kind.ANSWERED:
                of_epoch.append(record.columns[0])
        return {epoch: len(np.unique(np.concatenate(parts))) if parts else 0 for epoch, parts in asked.items()}


def read_kept_job(folder: Path) -> KeptJob:
    """Raises OSError, ValueError, KeyError or TypeError for what can't be read as a journal."""
    contents = read_contents(folder)
    try:
        header = json.loads(contents[HEADER])
    except RecursionError:
        raise ValueError(f"{HEADER} is nested too deep") from None
    if not isinstance(header, dict):
        raise ValueError(f"{HEADER} holds {str(header)[:100]!r}")
    if (version := header.get("version", 1)) != VERSION:  # the first had none
        raise ValueError(f"it is of version {version}, and this pod reads version {VERSION}")
    if header.get("resumed") is not None:
        raise ValueError("its epoch was dealt anew from a checkpoint, which an earlier version did")
    records: list[Record] = []
    reason = ""
    if CLEAN not in contents and header["boot"] != boot_id():
        reason = "the machine was restarted since, and what was written last may not have reached its disk"
    for name in sorted(each for each in contents if fnmatch(each, EPOCHS)):
        reader = RecordReader(contents[name])
        records += list(reader)
        if reader.damaged:
            reason = f"{name} is damaged after byte {reader.intact_bytes}"
    num_own = len(records)
    for name in contents:
        if fnmatch(name, KEPT):
            records += list(RecordReader(contents[name]))
    if header.get("inventory"):  # those of earlier versions have none
        reason = Inventory(inventory_of(folder)).contradiction(contents) or reason
    lines = contents.get(RECEIPTS, b"").decode().splitlines()
    receipts = {receipt["epoch"]: receipt for receipt in map(_json_or_none, lines) if receipt is not None}
    handed_over_to = tuple(map(int, contents.get(HANDED_OVER, b"").split()))
    return KeptJob(header, records, receipts, reason, handed_over_to, num_own)


def read_contents(folder: Path) -> dict[str, bytes]:
    """All files of a job's journal, by name; none if there is no such folder."""
    if folder.is_symlink():
        raise ValueError("a link, and no folder")
    return {path.name: read_kept(path, _MOST_BYTES) for path in folder.glob("*") if path.suffix != ".new"}


def header_of(folder: Path) -> dict[str, Any] | None:
    """None where there is no journal that can be used."""
    try:
        found: dict[str, Any] = json.loads(read_kept(folder / HEADER, _MOST_HEADER_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def boot_id() -> str:
    """Names this run of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux: never taken to be whole unless the pod ended in order
        return str(time.monotonic_ns())


def _json_or_none(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
