"""Plain files: a sample is a file, and a listing is all that is read. Folders name classes, as in ImageFolder.

Each sample is an object of its own, so neighbours can't be read by one request: an epoch takes as many GETs as there
are samples. What that costs is said, with the way out: ``refill pack``.

A sample has one field, with the extension that all files have, or ``image`` where there are several for pictures. If
all files are in folders, those at the top are classes, numbered in sorted order: ``cls``, and ``dataset.classes``, as
of ``refill pack``. The order is that of names. At S3's prices an epoch costs $0.40 for a million samples, and waits for
each.

Refused: files that belong together (``1.jpg`` and ``1.json``), which ``refill pack`` takes. Tested against the files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from refill.errors import EmptyDataset, InvalidInput
from refill_service.cache_core.dataset_index import RecordArray
from refill_service.formats.interface import Listing, Options, Plan, Shard, ShardBytes, ShardReport, Source, records_of
from refill_service.object_store.base import ListedVersion

NAME = "objects"

IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "pbm", "pnm")
_OTHERS = ("npy", "npz", "wav", "flac", "mp3", "ogg", "opus", "mp4", "mkv", "webm", "pt", "pth", "pdf", "txt", "json")
_LEFT_OUT = ("thumbs.db", "desktop.ini")
_DOLLARS_A_MILLION_GETS = 0.4
"""Of S3's standard class."""
_MOST_CLASSES = 100_000


def found(listing: Listing, options: Options) -> bool:
    files = _files(listing)
    known = sum(_extension(each.key) in IMAGES + _OTHERS for each in files)
    return known > 0 and 2 * known >= len(files)


async def plan(listing: Listing, source: Source, options: Options) -> Plan:
    files = _files(listing)
    if not files:
        raise EmptyDataset(f"{listing.url} holds no files")
    names = Counter(_extension(each.key) for each in files)
    if len(names) == 1:
        field = next(iter(names)) or "bin"
    elif names.keys() <= set(IMAGES):
        field = "image"
    else:
        few = ", ".join(f"{count:,} .{name}" for name, count in names.most_common(4)) + ", ..." * (len(names) > 4)
        raise InvalidInput(
            f"{listing.url} holds files of several kinds ({few}), and a sample is one file here: `refill pack` finds "
            "out which belong together, and writes tars; or index what is alike, in a folder of its own"
        )
    classes = _classes(files)
    numbers = {name: number for number, name in enumerate(classes or ())}
    shards = [Shard.of(each, numbers[each.key.partition("/")[0]] if classes else None) for each in files]
    in_classes = f" in {len(classes):,} folders, which are classes" if classes else ""
    dollars = len(files) * _DOLLARS_A_MILLION_GETS / 1e6
    why = (
        f"{len(files):,} plain files{in_classes}, each a sample with field {field}, each a GET an epoch (at "
        f"S3's prices ${dollars:.2g} an epoch; `refill pack` joins neighbours)"
    )
    about = {"classes": classes is not None, "field": field, "kind": "jpg" if field == "image" else field}
    metadata = {"classes": classes} if classes else {}
    return Plan(why, shards, about, False, reads_none=True, metadata=metadata)


def scan(shard: Shard, data: ShardBytes, report: ShardReport) -> Iterator[RecordArray]:
    if shard.about is not None:
        report.labels.append(shard.about)
    yield records_of(np.zeros(1, np.int64), np.array([shard.size_bytes], np.int64))


def _files(listing: Listing) -> list[ListedVersion]:
    """Without what is hidden, and what desktops leave behind. An underscore hides none here: it may begin a class."""
    return [
        each
        for each in listing.all
        if not any(part.startswith(".") or part == "__MACOSX" for part in each.key.split("/"))
        and each.key.rpartition("/")[2].lower() not in _LEFT_OUT
    ]


def _classes(files: list[ListedVersion]) -> list[str] | None:
    """The folders at the top, sorted; None where files lie beside them, or there is one alone."""
    names = sorted({each.key.partition("/")[0] for each in files if "/" in each.key})
    if any("/" not in each.key for each in files) or not 1 < len(names) <= _MOST_CLASSES:
        return None
    return names


def _extension(key: str) -> str:
    return key.rpartition("/")[2].rpartition(".")[2].lower() if "." in key.rpartition("/")[2] else ""
