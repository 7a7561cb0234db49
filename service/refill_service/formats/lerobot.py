"""LeRobot's datasets, v2.1 and v3: rows of Parquet, and mp4 that have the pictures of all rows. A sample is a window.

``meta/info.json`` names the cameras (``lerobot_layout.py``). Rows and frames of an episode go together by their times.
A group is a row group, as of ``parquet``, with a column more for each camera (``video_frames.py``). Where its frames
lie the group's name says, behind the row group's place: of each episode and camera ``;CAMERA,MOOV START,MOOV END,FIRST
FRAME,FRAMES,KEY``. So pods read a ``moov`` and the frames of a group, once for all windows, and decode rows alone.

An index reads rows and frames once. It needs ``--windows``; ``--columns`` chooses columns and cameras. Fields are those
of windows of ``parquet``, and of each camera ``NAME``, an mp4 of the window's frames and those before it up to a
keyframe, and ``NAME.frames``, which of its frames, as they are shown, the rows have.

Any even stride suits LeRobot's keyframes, each 2 frames. Where they are farther apart, the stride is a multiple of
their distance. A row group is read with all its frames, 256 MiB at most: write one for each episode, as LeRobot v3
does.

Refused: rows whose times are not the video's, mp4 that is fragmented, turned or of several edits, keyframes that do not
suit the stride. Tested against
PyAV 18 and torchcodec 0.13.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refill.errors import EmptyDataset, InvalidInput
from refill.formats.clips import VIDEO
from refill_service.cache_core.dataset_index import RecordArray
from refill_service.formats import parquet
from refill_service.formats.interface import Listing, Options, Plan, Shard, ShardBytes, ShardReport, Source
from refill_service.formats.lerobot_layout import INFO, Episodes, files_of_rows, footage_of, read_info
from refill_service.formats.mp4 import Frames, Mp4Damaged, frames_of, moov_range
from refill_service.formats.rows import (
    AboutFile,
    Group,
    GroupDamaged,
    ReadFile,
    bounds_of,
    fixed_values,
    joined,
    same_columns,
    window_records,
)
from refill_service.formats.video_frames import FrameColumns, Run
from refill_service.object_store.base import ListedVersion

NAME = "lerobot"

_Known = dict[str, tuple[tuple[int, int], Frames]]
"""By the key of a video, where its ``moov`` lies, and what that says."""


def found(listing: Listing, options: Options) -> bool:
    return listing.get(INFO) is not None and bool(files_of_rows(listing))


async def plan(listing: Listing, source: Source, options: Options) -> Plan:
    files, info = files_of_rows(listing), await read_info(listing, source)
    if not files or info is None:
        raise EmptyDataset(f"{listing.url} holds no {INFO} and no data/*.parquet")
    if options.windows is None:
        raise InvalidInput(
            f"{listing.url} is a dataset of LeRobot, and a sample is a window of an episode: --windows LENGTH,STRIDE "
            f"says how many rows it has. Without pictures, index {listing.url}/data"
        )
    cameras = [each for each in info.cameras if options.columns is None or each in options.columns]
    of_rows = options
    if options.columns is not None:
        of_rows = replace(options, columns=tuple(each for each in options.columns if each not in cameras))
    of_table = await parquet.plan(Listing(listing.url, files, are_named=True), source, of_rows)
    kinds = {str(name): str(kind) for name, kind in of_table.about["columns"]}
    if cameras and kinds.get("timestamp") not in ("float32", "float64"):
        raise InvalidInput(
            f"{listing.url}/{files[0].key}: frames are found by the times of rows, and there is no column timestamp"
        )
    if both := sorted(kinds.keys() & set(cameras)):
        raise InvalidInput(f"{listing.url}: {both[0]!r:.60} is a video and a column")
    columns = [*of_table.about["columns"], *([name, VIDEO] for name in cameras)]
    about = of_table.about | {"columns": columns, "fps": info.fps}
    footage = await footage_of(info, cameras, listing, source)
    shards = [replace(each, about=AboutFile(about, known=footage.get(each.key, {}))) for each in of_table.shards]
    few = ", ".join(cameras[:3]) + ", ..." * (len(cameras) > 3)
    why = of_table.why.replace("files of Parquet", "files of LeRobot", 1) + (
        f", with the frames of {few}" if few else ""
    )
    how = "rows and frames are read once, for lengths and checksums"
    return replace(of_table, why=why, shards=shards, about=about, how=how, overlaps=True)


def scan(shard: Shard, data: ShardBytes, report: ShardReport) -> Iterator[RecordArray]:
    about, episodes = shard.about.format, shard.about.known
    known: _Known = {}
    files = {each.file.key: each.file for episode in episodes.values() for each in episode}
    try:
        start, footer = parquet.footer_in(data, shard.size_bytes)
        columns = same_columns(footer.schema, _of_rows(about), data.source)
    except GroupDamaged as error:
        raise data.damaged(str(error), max(0, shard.size_bytes - 8)) from error
    for number in range(footer.metadata.num_row_groups):
        if not footer.metadata.row_group(number).num_rows:
            continue
        try:
            runs = _runs_in(footer.group(number, columns, start), about, episodes, data, known)
            frames = {key: each for key, (_, each) in known.items()}
            beside = FrameColumns(runs, frames, _cameras(about))
            group = footer.group(number, columns, start, beside=beside)
            pieces = [data.read(*each) for each in group.ranges]
            pieces += [_footage(data, files[key], low, high) for key, low, high in group.of_others]
            blocks = list(group.decode(pieces))
            records = window_records(blocks, about, report, beside.reach(group.num_rows))
        except GroupDamaged as error:
            raise data.damaged(f"row group {number}: {error}", start) from error
        if records:
            place = ";".join([f"{number},{start},{shard.size_bytes}", *(each.written() for each in runs)])
            report.parts.append((f"#{place}", sum(map(len, records)), sum(len(block.data) for block in blocks)))
            yield from records


async def group(place: str, about: dict[str, Any], read: ReadFile, kept: dict[str, Any]) -> Group:
    of_rows, *written = place.split(";")
    cameras = _cameras(about)
    runs = [Run.read(each, len(cameras)) for each in written]
    number, start, footer = await parquet.footer_at(of_rows, read, kept)
    frames: dict[str, Frames] = kept.setdefault("frames", {})
    for each in runs:
        if each.key not in frames:
            frames[each.key] = _frames(each.key, await read(*each.moov, each.key))
    columns = same_columns(footer.schema, _of_rows(about), "")
    return await asyncio.to_thread(footer.group, number, columns, start, beside=FrameColumns(runs, frames, cameras))


def _runs_in(
    group: Group,
    about: dict[str, Any],
    of_episodes: Episodes,
    data: ShardBytes,
    known: _Known,
) -> list[Run]:
    """What the episodes of a group's rows have of each camera, found by times."""
    columns, cameras = _of_rows(about)["columns"], len(_cameras(about))
    if not cameras:
        return []
    rows, starts, _ = joined(list(group.decode([data.read(*each) for each in group.ranges])))
    episodes = fixed_values(rows, starts, columns, about["episodes"])
    seconds = fixed_values(rows, starts, columns, "timestamp").astype(np.float64)
    found = []
    bounds = bounds_of(episodes).tolist()
    for camera in range(cameras):
        for low, high in pairwise(bounds):
            number = int(episodes[low])
            footage = of_episodes.get(number)
            if footage is None:
                raise GroupDamaged(f"nothing says in which files the pictures of episode {number} are")
            file, first_second = footage[camera]
            if file.key not in known:
                known[file.key] = _read_frames(file, data.other(file))
            moov, frames = known[file.key]
            first = _first_frame(frames, first_second + seconds[low:high], about["fps"], number, file.key)
            found.append(Run(camera, file.key, moov, first, high - low))
    return found


def _first_frame(frames: Frames, seconds: NDArray[np.float64], fps: float, episode: int, key: str) -> int:
    """Of a video, the frame that is shown at the first of these times; at the others those behind it have to be."""
    first = int(np.abs(frames.seconds - seconds[0]).argmin())
    shown = frames.seconds[first : first + len(seconds)]
    far = ~(np.abs(shown - seconds[: len(shown)]) <= 0.5 / fps)
    if len(shown) < len(seconds) or far.any():
        row = len(shown) if not far.any() else int(far.argmax())
        when = "no frame" if row >= len(shown) else f"one at {shown[row]:.4f} s"
        raise GroupDamaged(
            f"row {row} of episode {episode} is at {seconds[row]:.4f} s of {key[:200]}, and there is {when} ({fps:g} a "
            "second): are they of one version of the dataset?"
        )
    return first


def _read_frames(file: ListedVersion, data: ShardBytes) -> tuple[tuple[int, int], Frames]:
    try:
        start, end = moov_range(file.size_bytes, data.read)
        return (start, end), _frames(file.key, data.read(start, end))
    except Mp4Damaged as error:
        raise GroupDamaged(f"{file.key[:200]}: {error}") from error


def _footage(data: ShardBytes, file: ListedVersion, start: int, end: int) -> memoryview:
    """:raises GroupDamaged: the video says that frames are where it has nothing."""
    if not start <= end <= file.size_bytes:
        raise GroupDamaged(f"{file.key[:200]}: frames are at bytes {start}-{end} of {file.size_bytes}")
    return data.other(file).read(start, end)


def _frames(key: str, moov: memoryview) -> Frames:
    try:
        return frames_of(moov)
    except Mp4Damaged as error:
        raise GroupDamaged(f"{key[:200]}: {error}") from error


def _of_rows(about: dict[str, Any]) -> dict[str, Any]:
    """The description of a table without cameras."""
    return about | {"columns": [each for each in about["columns"] if each[1] != VIDEO]}


def _cameras(about: dict[str, Any]) -> list[str]:
    return [str(name) for name, kind in about["columns"] if kind == VIDEO]
