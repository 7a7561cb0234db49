"""Where does LeRobot say that its rows and pictures are? In ``meta``, as versions 2 and 3 have it.

``meta/info.json`` names the cameras, and how files are called. Up to v2.1 an episode has files of its own. From v3 on a
file has many, and ``meta/episodes`` says which, and the second at which each begins in its videos.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from refill.errors import EmptyDataset, InvalidInput
from refill_service.formats.interface import Listing, Source
from refill_service.formats.rows import WRONG, one_line
from refill_service.object_store.base import ListedVersion

INFO = "meta/info.json"
_MOST_INFO_BYTES = 16 << 20
_MOST_EPISODES_BYTES = 256 << 20
"""Of ``meta/episodes``, which also has statistics of each episode."""
_FIELD = re.compile(r"\{(\w+)(?::0?(\d)d)?\}")
_NO_KEY = frozenset("#;")
"""What separates parts of a group's name."""


class Footage(NamedTuple):
    """Where the pictures of an episode are."""

    file: ListedVersion
    first_second: float
    """At which the episode begins there."""


Episodes = dict[int, tuple[Footage, ...]]
"""By number, what there is of each camera."""


def files_of_rows(listing: Listing) -> list[ListedVersion]:
    return [each for each in listing.named(".parquet") if each.key.startswith("data/")]


async def read_info(listing: Listing, source: Source) -> Info | None:
    """None: it is no dataset of LeRobot's. Raises :class:`InvalidInput` for one that can't be read."""
    file = listing.get(INFO)
    return None if file is None else Info(await _json(file, source), f"{listing.url}/{INFO}")


class Info:
    """What ``meta/info.json`` says. Raises :class:`InvalidInput` where it says nothing that can be."""

    def __init__(self, said: Any, where: str) -> None:
        try:
            self.where = where
            self.version = str(said["codebase_version"])
            self.fps = float(said["fps"])
            features = said["features"].items()
            self.cameras = [str(name) for name, each in features if each["dtype"] == "video"]
            self._data = str(said["data_path"])
            self._video = str(said.get("video_path") or "")
            self._chunk = int(said.get("chunks_size") or 1000)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise InvalidInput(f"{where} is not as LeRobot writes it: {one_line(error)}") from error
        if not 0 < self.fps < 1e6 or self._chunk < 1:
            raise InvalidInput(f"{where} says {self.fps} frames a second, and {self._chunk} episodes a folder")
        if self.version.lstrip("v").partition(".")[0] not in ("2", "3"):
            raise InvalidInput(f"{where} is of version {self.version[:20]}, and v2 and v3 are read: convert it")

    @property
    def many_in_a_file(self) -> bool:
        """Whether a file has several episodes, as from v3 on."""
        return self.version.startswith("v3")

    def rows_of(self, episode: int) -> str:
        return self._filled(self._data, episode_index=episode, episode_chunk=episode // self._chunk)

    def rows_in(self, chunk: int, file: int) -> str:
        return self._filled(self._data, chunk_index=chunk, file_index=file)

    def video_of(self, camera: str, episode: int) -> str:
        return self._filled(self._video, episode_index=episode, episode_chunk=episode // self._chunk, video_key=camera)

    def video_in(self, camera: str, chunk: int, file: int) -> str:
        return self._filled(self._video, chunk_index=chunk, file_index=file, video_key=camera)

    def _filled(self, template: str, **values: int | str) -> str:
        """Not by ``str.format``: the template is a stranger's."""

        def value(found: re.Match[str]) -> str:
            if found[1] not in values:
                raise InvalidInput(f"{self.where}: {template[:100]!r} names {found[1][:60]!r}, which is not known")
            return str(values[found[1]]).zfill(int(found[2] or 0))

        return _FIELD.sub(value, template)


async def footage_of(info: Info, cameras: Sequence[str], listing: Listing, source: Source) -> dict[str, Episodes]:
    """By the file that has their rows, where the pictures of episodes are."""
    found: dict[str, Episodes] = {}
    if not cameras:
        return found
    if not info.many_in_a_file:
        numbers = {each: re.search(r"(\d+)\.parquet$", each) for each in (file.key for file in files_of_rows(listing))}
        for key, match in numbers.items():
            episode = -1 if match is None else int(match[1][:18])
            if match is None or info.rows_of(episode) != key:
                raise InvalidInput(f"{listing.url}/{key} is not named as {info.where} says")
            files = [_listed(info.video_of(name, episode), listing, info) for name in cameras]
            found[key] = {episode: tuple(Footage(each, 0.0) for each in files)}
        return found
    for each in await _episodes(cameras, listing, source):
        files = [_listed(info.video_in(name, *each.files[name]), listing, info) for name in cameras]
        seconds = [each.first_seconds[name] for name in cameras]
        found.setdefault(info.rows_in(*each.rows), {})[each.number] = tuple(map(Footage, files, seconds))
    return found


def _listed(key: str, listing: Listing, info: Info) -> ListedVersion:
    there = listing.get(key)
    if there is None:
        raise EmptyDataset(f"{info.where} says that pictures are in {key[:200]!r}, and it is not there")
    if _NO_KEY.intersection(key):
        raise InvalidInput(f"{key[:200]!r}: names of videos may have no # and no ;")
    return there


class _Episode(NamedTuple):
    """A row of ``meta/episodes``. Files are (chunk, file)."""

    number: int
    rows: tuple[int, int]
    files: dict[str, tuple[int, int]]
    first_seconds: dict[str, float]


async def _episodes(cameras: Sequence[str], listing: Listing, source: Source) -> list[_Episode]:
    import pyarrow.parquet as pq

    files = [each for each in listing.named(".parquet") if each.key.startswith("meta/episodes/")]
    if not files:
        raise EmptyDataset(f"{listing.url} holds no meta/episodes, which says where episodes are in their videos")
    if (size := sum(each.size_bytes for each in files)) > _MOST_EPISODES_BYTES:
        raise InvalidInput(f"{listing.url}/meta/episodes has {size:,} bytes, and {_MOST_EPISODES_BYTES:,} are read")
    of_file = ("chunk_index", "file_index")
    names = ["episode_index", *(f"data/{each}" for each in of_file)]
    names += [f"videos/{name}/{each}" for name in cameras for each in (*of_file, "from_timestamp")]
    found = []
    for file in files:
        try:
            data = await source.read(file, 0, file.size_bytes)
            rows = pq.read_table(io.BytesIO(data), columns=names, use_threads=False).to_pylist()
            for row in rows:
                places = {name: _two(row, f"videos/{name}") for name in cameras}
                seconds = {name: float(row[f"videos/{name}/from_timestamp"]) for name in cameras}
                found.append(_Episode(int(row["episode_index"]), _two(row, "data"), places, seconds))
        except WRONG as error:
            raise InvalidInput(f"{listing.url}/{file.key} is not as LeRobot writes it: {one_line(error)}") from error
    return found


def _two(row: Mapping[str, Any], of: str) -> tuple[int, int]:
    return int(row[f"{of}/chunk_index"]), int(row[f"{of}/file_index"])


async def _json(file: ListedVersion, source: Source) -> Any:
    if file.size_bytes > _MOST_INFO_BYTES:
        raise InvalidInput(f"{file.key} has {file.size_bytes:,} bytes, and {_MOST_INFO_BYTES:,} are read of it")
    try:
        return json.loads(bytes(await source.read(file, 0, file.size_bytes)))
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{file.key} is no JSON: {str(error)[:100]}") from error
