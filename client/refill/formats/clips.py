"""Frames of a video among the rows of a window: how do they become a clip that any decoder takes?

A row has the frame that is decoded in its turn, as it is coded:

    head    u32 the row's place in its episode, i32 how many places later the frame is shown, u16 bytes of the entry
    entry   of a frame at which decoding may begin: what a decoder has to know, as ``stsd`` of an mp4 has it
    frame   the rest

Rows begin at the keyframe before the window, if that does not begin with one. So a clip may have a few frames more than
the window, and says which are of it. It is an mp4 of one track (ISO 14496-12).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

VIDEO = "video"
"""The kind of a column of frames."""
FRAME_HEAD = struct.Struct("<IiH")
_TICKS = 1000
"""Of a frame, as times of an mp4 are counted."""
_MOST_FRAMES = 1 << 20
"""Of a clip: more have times that an mp4 can't count so."""
_IDENTITY = struct.pack(">9i", 0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)
"""A matrix: pictures are shown as they are."""


class Cut(NamedTuple):
    """What windows of a dataset are."""

    length: int
    """Rows of each."""
    stride: int
    """Rows of an episode from the start of one to that of the next."""
    cameras: Sequence[str]
    fps: float

    @classmethod
    def checked(cls, length: int, stride: int, cameras: Sequence[str], fps: float) -> Cut:
        """Raises :class:`ValueError` for what no windows are."""
        if length < 1 or stride < 1 or not 0 < fps < 1e6:
            raise ValueError(f"windows of {length} rows, one each {stride}, {fps} a second")
        return cls(length, stride, cameras, fps)

    @property
    def most_rows(self) -> int:
        """That may be read for one: before it as many as a stride, and behind it a few."""
        return self.length + (3 * self.stride + 32 if self.cameras else 0)


class _Frame(NamedTuple):
    place: int
    shown: int
    """Its place in the order in which frames are shown, in the same count."""
    entry: memoryview
    data: memoryview


def cut_window(rows: list[dict[str, Any]], cut: Cut) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of the window among those that were read for it; of each camera ``NAME``, an mp4, and ``NAME.frames``,
    which of its frames, as they are shown, are those of the rows. Raises :class:`ValueError` for what is no window.
    """
    if not cut.cameras:
        if len(rows) != cut.length:
            raise ValueError(f"it has {len(rows)} rows, and not {cut.length}")
        return rows, {}
    if len(rows) > _MOST_FRAMES:
        raise ValueError(f"it has {len(rows)} frames, and a clip has {_MOST_FRAMES} at most")
    clips, start = dict[str, Any](), 0
    for name in cut.cameras:
        frames = [_frame(row[name]) for row in rows]
        first = frames[0].place if frames else 0
        start = -first % cut.stride
        if start + cut.length > len(rows) or any(each.place != first + place for place, each in enumerate(frames)):
            raise ValueError(f"its {len(rows)} rows, from the one at place {first} on, are no {cut.length} of a window")
        clip, places = _clip(frames, first + start, cut)
        clips |= {name: clip, f"{name}.frames": places}
    return rows[start : start + cut.length], clips


def _frame(coded: memoryview | None) -> _Frame:
    if coded is None or len(coded) < FRAME_HEAD.size:
        raise ValueError("a row has no frame")
    place, later, entry_bytes = FRAME_HEAD.unpack_from(coded)
    data = FRAME_HEAD.size + entry_bytes
    if len(coded) <= data or 0 < entry_bytes < 86:
        raise ValueError(f"the frame at place {place} ends within its head")
    return _Frame(place, place + later, coded[FRAME_HEAD.size : data], coded[data:])


def _clip(frames: list[_Frame], begins: int, cut: Cut) -> tuple[memoryview, np.ndarray]:
    """:param begins: the place of the window's first row."""
    key = max((at for at, each in enumerate(frames) if len(each.entry) and each.place <= begins), default=None)
    if key is None:
        raise ValueError(f"no keyframe is at place {begins} or before it")
    frames = frames[key:]
    order = {shown: place for place, shown in enumerate(sorted(each.shown for each in frames))}
    wanted = [order.get(place) for place in range(begins, begins + cut.length)]
    if len(order) != len(frames) or None in wanted:
        raise ValueError("it does not have each frame of the window")
    places = [order[each.shown] for each in frames]
    return memoryview(_mp4(frames, places, cut.fps)), np.array(wanted, dtype=np.int64)


def _mp4(frames: list[_Frame], shown: list[int], fps: float) -> bytes:
    """:param shown: the place of each frame in the order in which they are shown."""
    count, entry = len(frames), bytes(frames[0].entry)
    width, height = struct.unpack_from(">HH", entry, 32)
    timescale, lasts = max(1, round(fps * _TICKS)), count * _TICKS
    # What is shown earlier than it is decoded has a shift below 0: version 1 of ctts.
    shifts = [(place - number) * _TICKS for number, place in enumerate(shown)]
    keys = [number for number, each in enumerate(frames, 1) if len(each.entry)]
    mvhd = _full(
        b"mvhd", struct.pack(">IIIIIH10x", 0, 0, timescale, lasts, 0x10000, 0x100), _IDENTITY, bytes(24), _u32(2)
    )
    tkhd = _full(
        b"tkhd",
        struct.pack(">IIIII8xHHHH", 0, 0, 1, 0, lasts, 0, 0, 0, 0),
        _IDENTITY,
        struct.pack(">II", width << 16, height << 16),
        flags=3,
    )
    mdhd = _full(b"mdhd", struct.pack(">IIIIHH", 0, 0, timescale, lasts, 0x55C4, 0))
    hdlr = _full(b"hdlr", bytes(4), b"vide", bytes(12), b"\0")
    dinf = _box(b"dinf", _full(b"dref", _u32(1), _full(b"url ", flags=1)))

    def moov(offset: int) -> bytes:
        table = _box(
            b"stbl",
            _full(b"stsd", _u32(1), entry),
            _full(b"stts", _u32(1, count, _TICKS)),
            _full(b"ctts", _u32(count), *(struct.pack(">Ii", 1, each) for each in shifts), version=1),
            _full(b"stss", _u32(len(keys), *keys)),
            _full(b"stsc", _u32(1, 1, count, 1)),
            _full(b"stsz", _u32(0, count, *(len(each.data) for each in frames))),
            _full(b"stco", _u32(1, offset)),
        )
        media = _box(b"minf", _full(b"vmhd", bytes(8), flags=1), dinf, table)
        return _box(b"moov", mvhd, _box(b"trak", tkhd, _box(b"mdia", mdhd, hdlr, media)))

    head = _box(b"ftyp", b"isom", _u32(0x200), b"isomiso2")
    before = len(head) + len(moov(0)) + 8
    return b"".join((head, moov(before), _box(b"mdat", *(each.data for each in frames))))


def _box(kind: bytes, *parts: bytes | memoryview) -> bytes:
    return b"".join((_u32(8 + sum(map(len, parts))), kind, *parts))


def _full(kind: bytes, *parts: bytes, version: int = 0, flags: int = 0) -> bytes:
    return _box(kind, _u32(version << 24 | flags), *parts)


def _u32(*numbers: int) -> bytes:
    return struct.pack(f">{len(numbers)}I", *numbers)
