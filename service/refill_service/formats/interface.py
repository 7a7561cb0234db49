"""What is a format to ``refill index``? It says whether it lies at a URL, and where each of its samples lies.

A module of this package is a format. It has

- ``NAME``, as ``--format`` takes it;
- ``found(listing, options)``: whether this may be the format, from names alone;
- ``plan(listing, source, options)``: what is to be scanned, and what the parser in the client needs to know;
- ``scan(shard, data, report)``: the records of one shard, by as few of its bytes as possible, in the order of offsets.

Scanners read what strangers wrote: they raise :class:`SampleDamaged` with the place, and take memory by what is there,
not by what is claimed.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from refill.errors import EmptyDataset, InvalidInput, SampleDamaged
from refill_service.cache_core.dataset_index import INDEX_KEY, RECORD, Int64Array, RecordArray, is_kept_key
from refill_service.object_store.base import ListedVersion

INDEX_JSON = "index.json"
HIDDEN = "hidden, by a name or folder that begins with . or _ (--files takes those it names)"
"""Why files are left out, for messages."""
_MOST_JSON_BYTES = 256 << 20
"""Of an index beside the data: of some 400,000 shards."""


class Listing:
    """The objects at a URL, in the order of their names; those that refill wrote are left out."""

    def __init__(self, url: str, objects: Sequence[ListedVersion], *, are_named: bool = False) -> None:
        """:param are_named: by the caller, each of them: then none of them is left out as hidden."""
        self.url = url
        self.all = [each for each in objects if each.key != INDEX_KEY and not is_kept_key(each.key)]
        self.objects = [each for each in self.all if are_named or not is_hidden(each.key)]
        """Without what is hidden."""
        self._by_key: dict[str, ListedVersion] | None = None

    def named(self, *endings: str) -> list[ListedVersion]:
        """Those whose names end like this; upper and lower case are the same."""
        return [each for each in self.objects if each.key.lower().endswith(endings)]

    def get(self, key: str) -> ListedVersion | None:
        """Also one that is hidden."""
        if self._by_key is None:
            self._by_key = {each.key: each for each in self.all}
        return self._by_key.get(key)


def is_hidden(key: str) -> bool:
    """As Spark, Hive and pyarrow have it: unfinished and deleted files, and what editors and desktops leave behind."""
    return any(part.startswith(".") or (part.startswith("_") and "=" not in part) for part in key.split("/"))


@dataclass(frozen=True)
class Options:
    """What the caller says of a format."""

    tokens: int | None = None
    """Of each sample."""
    stride: int | None = None
    """Tokens from the start of a sample to that of the next; None: samples follow one another."""
    dtype: str | None = None
    """Of files that don't say it."""
    columns: tuple[str, ...] | None = None
    """Of tables, those that are read; None: all."""
    windows: tuple[int, int] | None = None
    """Of tables and tars, ``(rows of a sample, rows from the start of one to that of the next)``; None: each row is a
    sample."""
    episodes: str = "episode_index"
    """Of tables, the column whose value a window's rows have in common."""
    checksums: str | None = None
    """Which were asked for; None: whichever cost less."""
    allow_pickle: bool = False
    """Whether columns of pickles are let in. They stay bytes, here and in pods; who trains may decode them."""


@dataclass(frozen=True)
class Shard:
    """A file of a dataset that is to be scanned."""

    key: str
    size_bytes: int
    etag: str | None
    about: Any = None
    """What ``scan`` is to know of it; goes to other processes."""

    @classmethod
    def of(cls, found: ListedVersion, about: Any = None) -> Shard:
        return cls(found.key, found.size_bytes, found.etag, about)


@dataclass
class Plan:
    """What is to be done about a dataset."""

    why: str
    """What was decided, and by what, in a line."""
    shards: list[Shard]
    about: dict[str, Any]
    """What the client's parser needs, beside ``name``; goes into the index. Empty: tars."""
    reads_all: bool
    """Whether a scan reads all bytes of a shard, so that checksums cost nothing more."""
    in_parts: bool = False
    """Whether these are asked for here and there, so that what follows one is not read ahead."""
    reads_none: bool = False
    """Whether it reads no byte of it."""
    overlaps: bool = False
    """Whether samples share bytes with their neighbours."""
    how: str = "all bytes are read once, for places and checksums"
    """What is read, where ``reads_all``, and why."""
    passed_over: str = "members"
    """What ``num_passed_over`` of reports counts."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What else goes into the index."""


@dataclass
class ShardReport:
    """What was noticed besides the samples; complete when the last batch was taken."""

    num_samples: int = 0
    num_passed_over: int = 0
    """What belongs to no sample."""
    repeated: tuple[int, int] | None = None
    """Numbers in the shard of two samples with the same key, apart from each other."""
    labels: array[int] = field(default_factory=lambda: array("i"), repr=False)
    """Of the samples, -1 for one without; none at all: no sample has one."""
    key_hashes: array[int] = field(default_factory=lambda: array("Q"), repr=False)
    parts: list[tuple[str, int, int]] = field(default_factory=list)
    """Of a file that is several blobs: what the name of each has behind the file's, its samples, its bytes."""
    warnings: list[str] = field(default_factory=list)


class Source(Protocol):
    """The store, for ``plan``."""

    async def read(self, found: ListedVersion, start: int, end: int) -> memoryview:
        """As much of bytes ``[start, end)`` as there is."""


class ShardBytes(Protocol):
    """One shard, for ``scan``, which runs in a thread."""

    source: str
    """Its URL, for errors."""

    def read(self, start: int, end: int) -> memoryview:
        """Bytes ``[start, end)``, which must lie within the shard. Ranges one after another are read ahead."""

    def damaged(self, why: str, at: int) -> SampleDamaged: ...
    def other(self, found: ListedVersion) -> ShardBytes:
        """Those of an object that lies beside it."""


class Format(Protocol):
    """What a module of this package is."""

    NAME: str

    def found(self, listing: Listing, options: Options) -> bool: ...
    async def plan(self, listing: Listing, source: Source, options: Options) -> Plan: ...
    def scan(self, shard: Shard, data: ShardBytes, report: ShardReport) -> Iterator[RecordArray]: ...


def records_of(offset: Int64Array, length: Int64Array) -> RecordArray:
    """Records without checksums."""
    found = np.zeros(len(offset), dtype=RECORD)
    found["offset"], found["length"] = offset, length
    return found


def offsets_table(shard: Shard, data: ShardBytes, samples: int, if_empty: str = "") -> RecordArray:
    """The records of a shard that begins with u32 n | u32 offsets[n + 1], as MDS and LitData have it: one read.

    :param if_empty: what is wrong where all samples are said to have no bytes, and there are some.
    :param samples: that are said to be in it; raises :class:`SampleDamaged` unless they lie there one after another.
    """
    end = 4 * (samples + 2)
    if end > shard.size_bytes:
        raise data.damaged(f"it has no room for the places of the {samples} samples that it should hold", 0)
    words = np.frombuffer(data.read(0, end), dtype="<u4").astype(np.int64)
    if int(words[0]) != samples:
        raise data.damaged(f"it says that it holds {int(words[0])} samples, and the dataset's index says {samples}", 0)
    offsets = words[1:]
    if if_empty and samples and int(offsets[-1]) == int(offsets[0]) < shard.size_bytes:
        raise data.damaged(if_empty, 4)
    wrong = np.flatnonzero(np.diff(offsets, prepend=end) < 0)
    if len(wrong) or int(offsets[-1]) != shard.size_bytes:
        place = int(wrong[0]) if len(wrong) else samples
        why = (
            f"sample {place} can't begin at byte {int(offsets[place])}"
            if len(wrong)
            else (f"its samples end at byte {int(offsets[-1])}")
        )
        raise data.damaged(why, 4 * (place + 1))
    return records_of(offsets[:-1], np.diff(offsets))


async def index_json(listing: Listing, source: Source, of: str) -> tuple[dict[str, Any], str]:
    """What ``index.json`` says, which names the files of MDS and of LitData, and its URL. Raises :class:`EmptyDataset`
    where there is none, and :class:`InvalidInput` for anything else than an object.

    :param of: what it names, for errors.
    """
    index = listing.get(INDEX_JSON)
    if index is None:
        below = sorted(each.key.rpartition("/")[0] for each in listing.objects if each.key.endswith(f"/{INDEX_JSON}"))
        hint = f": index {listing.url}/{below[0]}" + f", or one of {len(below) - 1} more" * (len(below) > 1)
        raise EmptyDataset(f"{listing.url} holds no {INDEX_JSON}, which names {of}{hint if below else ''}")
    where = f"{listing.url}/{INDEX_JSON}"
    if index.size_bytes > _MOST_JSON_BYTES:
        raise InvalidInput(f"{where} has {index.size_bytes:,} bytes, and {_MOST_JSON_BYTES:,} are read of it")
    try:
        said = json.loads(bytes(await source.read(index, 0, index.size_bytes)))
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{where} is no JSON: {str(error)[:100]}") from error
    if not isinstance(said, dict):
        raise InvalidInput(f"{where} is no JSON object")
    return said, where


def checked_windows(length: int, stride: int) -> list[int]:
    """Raises :class:`InvalidInput` for numbers that can't be."""
    if not 1 <= length < 2**31 or not 1 <= stride < 2**31:
        raise InvalidInput(f"--windows LENGTH,STRIDE must be 1 to 2147483647, got {length},{stride}")
    if 2 * stride < length:
        raise InvalidInput(
            f"--windows {length},{stride}: the stride is less than half of the length, and a window may share rows "
            f"with the one before and the one behind it, and with no other. Give {length},{-(-length // 2)}, and draw "
            "shorter windows of each in the transform"
        )
    return [length, stride]


def allowed_pickle(options: Options, where: str, instead: str) -> None:
    """Raises :class:`InvalidInput` unless pickles were let in.

    :param where: one lies, and ``instead`` what it could be written as.
    """
    if not options.allow_pickle:
        raise InvalidInput(
            f"{where} holds pickles, which run as code when they are read: write it as {instead}, or let it in by "
            '--allow-pickle: samples have the bytes, which decode={"pkl": pickle.loads} runs where you train, and '
            "nothing else does"
        )


def named_file(listing: Listing, key: str, where: str) -> ListedVersion:
    """Raises :class:`EmptyDataset` for one that an index names and that is not there."""
    there = listing.get(key)
    if there is None:
        raise EmptyDataset(f"{where} names {key[:200]!r}, and it is not there")
    return there


def refuse_options(name: str, options: Options) -> None:
    """Of a format that takes none."""
    for option in ("tokens", "stride", "dtype"):
        if getattr(options, option) is not None:
            raise InvalidInput(f"--{option} is for files of tokens, and this is read as {name}")
