"""How does a test make a dataset in LeRobot's layout? Rows by pyarrow and videos by PyAV, as LeRobot writes them.

A picture is of one grey that says which frame of which episode and camera it is, so what was decoded can be told.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["FPS", "grey", "rows_of_episode", "video", "write_lerobot"]

FPS = 10
_SIDE = 64


def grey(camera: int, episode: int, frame: int) -> int:
    """Two within 25 frames of each other differ by 8 at least."""
    return 24 + 8 * ((frame + 5 * episode + 11 * camera) % 25)


def rows_of_episode(episode: int, count: int) -> dict[str, Any]:
    """An arm that goes to a light, of which pictures show how bright it is."""
    light = [grey(0, episode, frame) / 255 for frame in range(count)]
    return {
        "observation.state": [[each, 1 - each] for each in light],
        "action": [[2 * each - 1] for each in light],
        "timestamp": np.arange(count, dtype=np.float32) / FPS,
        "frame_index": np.arange(count),
        "episode_index": np.full(count, episode),
        "task_index": np.zeros(count, np.int64),
    }


def video(pictures: Sequence[int], *, gop: int = 2, later: int | None = None) -> bytes:
    """An mp4 of pictures of these greys, with a keyframe each so many.

    :param later: frames between two others that may refer to later ones, as H.264 has them. None: AV1, as LeRobot
        writes it.
    """
    import av

    found = io.BytesIO()
    with av.open(found, "w", format="mp4") as container:
        if later is None:
            stream = container.add_stream("libsvtav1", rate=FPS, options={"g": str(gop), "crf": "30", "preset": "12"})
        else:
            options = {"g": str(gop), "bf": str(later), "sc_threshold": "0"}
            stream = container.add_stream("libx264", rate=FPS, options=options)
        stream.width, stream.height, stream.pix_fmt = _SIDE, _SIDE, "yuv420p"
        for level in pictures:
            frame = av.VideoFrame.from_ndarray(np.full((_SIDE, _SIDE, 3), level, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return found.getvalue()


def _concatenated(videos: Sequence[bytes]) -> tuple[bytes, list[float]]:
    """One mp4 of all, their frames as they are, and the second at which each begins."""
    import av

    found, starts, ticks = io.BytesIO(), list[float](), 0
    with av.open(found, "w", format="mp4") as container:
        stream: Any = None
        for each in videos:
            source: Any  # of its fields PyAV says that they may be None
            with av.open(io.BytesIO(each)) as source:
                of = source.streams.video[0]
                if stream is None:
                    stream = container.add_stream_from_template(of, opaque=True)
                    stream.time_base = of.time_base
                starts.append(float(ticks * of.time_base))
                first = None
                for packet in source.demux(of):
                    if packet.dts is None:
                        continue
                    first = packet.pts if first is None else first
                    packet.pts, packet.dts = packet.pts + ticks - first, packet.dts + ticks - first
                    packet.stream = stream
                    container.mux(packet)
                ticks += round(of.frames / FPS / of.time_base)
    return found.getvalue(), starts


def write_lerobot(
    folder: Path,
    episodes: Sequence[int],
    *,
    version: str = "v3.0",
    cameras: int = 1,
    gop: int = 2,
    later: int | None = 0,
) -> list[str]:
    """Episodes of so many frames. Returns the names of the cameras. Parameters are those of :func:`video`, too."""
    names = [f"observation.images.c{camera}" for camera in range(cameras)]
    rows = [pa.table(rows_of_episode(number, count)) for number, count in enumerate(episodes)]
    videos = [
        [
            video([grey(camera, number, frame) for frame in range(count)], gop=gop, later=later)
            for number, count in enumerate(episodes)
        ]
        for camera in range(cameras)
    ]
    info: dict[str, Any] = {"codebase_version": version, "fps": FPS, "chunks_size": 1000}
    info["features"] = {name: {"dtype": "video"} for name in names} | {"action": {"dtype": "float32"}}
    if version == "v3.0":
        info["data_path"] = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
        info["video_path"] = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
        of_episodes: dict[str, Any] = {"episode_index": range(len(episodes))}
        of_episodes |= dict.fromkeys(("data/chunk_index", "data/file_index"), [0] * len(episodes))
        for name, each in zip(names, videos, strict=True):
            whole, starts = _concatenated(each)
            _write(folder / f"videos/{name}/chunk-000/file-000.mp4", whole)
            of_episodes |= {f"videos/{name}/chunk_index": [0] * len(episodes), f"videos/{name}/from_timestamp": starts}
            of_episodes[f"videos/{name}/file_index"] = [0] * len(episodes)
        path = folder / "data/chunk-000/file-000.parquet"
        path.parent.mkdir(parents=True)
        with pq.ParquetWriter(path, rows[0].schema) as writer:
            for table in rows:
                writer.write_table(table)
        below = folder / "meta/episodes/chunk-000"
        below.mkdir(parents=True)
        pq.write_table(pa.table(of_episodes), below / "file-000.parquet")
    else:
        info["data_path"] = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
        info["video_path"] = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
        for number, table in enumerate(rows):
            path = folder / f"data/chunk-000/episode_{number:06}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(table, path)
            for name, each in zip(names, videos, strict=True):
                _write(folder / f"videos/chunk-000/{name}/episode_{number:06}.mp4", each[number])
    _write(folder / "meta/info.json", json.dumps(info).encode())
    return names


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
