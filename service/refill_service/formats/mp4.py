"""Where do the frames of an mp4 lie? Its ``moov`` says it, in tables of samples (ISO 14496-12, 8.5 to 8.7).

A frame can be decoded alone if all frames from the keyframe before it on are there. Frames lie in the order in which
they are decoded; where some refer to later ones, that is not the order in which they are shown.

Files come from strangers: what is made of a table is checked against the bytes that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST_MOOV_BYTES = 64 << 20
"""Some 16 bytes a frame."""
_MOST_FRAMES = 4 << 20
_MOST_BOXES = 64
"""At the top of a file, and within each box that is looked into, of one kind or another."""
_MOST_ENTRY_BYTES = (1 << 16) - 1
"""Of what a decoder has to know of a stream."""

_Array = NDArray[np.int64]


class Mp4Damaged(ValueError):
    """Why its frames can't be found."""


class Frames(NamedTuple):
    """Of the one video in a file, ``(n,)`` each, in the order in which frames are decoded."""

    offset: _Array
    size: _Array
    """Bytes."""
    shown: _Array
    """The place of each in the order in which they are shown."""
    seconds: NDArray[np.float64]
    """When each place of that order is shown; less than 0: the file's edit hides it."""
    starts: NDArray[np.bool_]
    """Whether decoding may begin there: a keyframe, which no frame behind it is shown before."""
    entry: bytes
    """What a decoder has to know: an entry of ``stsd``."""


def moov_range(size_bytes: int, read: Callable[[int, int], memoryview]) -> tuple[int, int]:
    """Bytes ``[start, end)`` of ``moov`` in a file of so many, by the heads of what lies before it.

    Raises :class:`Mp4Damaged` where there is none.
    """
    place = 0
    for _ in range(_MOST_BOXES):
        head = bytes(read(place, min(size_bytes, place + 16)))
        if len(head) < 8:
            break
        size, kind = int.from_bytes(head[:4], "big"), head[4:8]
        if size == 1 and len(head) == 16:
            size = int.from_bytes(head[8:], "big")
        elif size == 0:
            size = size_bytes - place
        if size < 8 or place + size > size_bytes:
            raise Mp4Damaged(f"a box at byte {place} can't have {size} bytes, of {size_bytes}")
        if kind == b"moov":
            if size > MOST_MOOV_BYTES:
                raise Mp4Damaged(f"its moov has {size:,} bytes, and {MOST_MOOV_BYTES:,} are read")
            return place, place + size
        place += size
        if place == size_bytes:
            break
    raise Mp4Damaged("it has no moov: is it an mp4, and complete?")


def frames_of(moov: memoryview) -> Frames:
    """Raises :class:`Mp4Damaged` where it is no whole table of one video."""
    tracks = [track for track in _all_within(_only(moov, b"moov"), b"trak") if _is_video(track)]
    if len(tracks) != 1:
        raise Mp4Damaged(f"it holds {len(tracks)} videos, and one is read of a file")
    _refuse_turned(_only(_only(moov, b"moov"), b"mvhd"), 36)
    _refuse_turned(_only(tracks[0], b"tkhd"), 40)
    media = _only(tracks[0], b"mdia")
    timescale = _timescale(_only(media, b"mdhd"))
    table = _only(_only(media, b"minf"), b"stbl")
    size = _sizes(table)
    offset = _offsets(table, size)
    decoded, shift = _times(table, len(size))
    shown_at = decoded + shift
    order = np.argsort(shown_at, kind="stable")
    shown = np.empty_like(order)
    shown[order] = np.arange(len(order))
    begins = _edited_start(tracks[0])
    seconds = (shown_at[order] - (shown_at[order[0]] if begins is None else begins)) / timescale
    return Frames(offset, size, shown, seconds, _starts(table, shown), _entry(table))


def _edited_start(track: memoryview) -> int | None:
    """The time of the media that is shown at second 0, which players read of a list of edits. None: there is no list.

    One that begins at a time of the media, at the usual rate, is what encoders and cuts without encoding write.
    """
    box = next((each for edits in _all_within(track, b"edts") for each in _all_within(edits, b"elst")), None)
    if box is None:
        return None
    count, wide = _count(box, 4), box[0] == 1
    at, size = (16, 8) if wide else (12, 4)
    if len(box) < at + size + 4:
        raise Mp4Damaged("its list of edits (elst) is cut off, or empty")
    begins = int.from_bytes(box[at : at + size], "big", signed=True)
    if count != 1 or begins < 0 or _number(box, at + size) != 0x10000:
        raise Mp4Damaged(
            f"its list of edits (elst) has {count} edits, or one that waits or changes the speed, and one that begins "
            "somewhere is read: write it anew by ffmpeg, without -c copy"
        )
    return begins


def _refuse_turned(head: memoryview, at: int) -> None:
    """Raises :class:`Mp4Damaged` where pictures are shown turned or mirrored, which clips don't say.

    :param at: where the matrix lies in this head, of version 0.
    """
    at += 12 * (len(head) > 0 and head[0] == 1)
    if len(head) < at + 36 or [_number(head, at + each) for each in (0, 4, 12, 16)] != [0x10000, 0, 0, 0x10000]:
        raise Mp4Damaged(
            "its pictures are shown turned or mirrored, which clips of it would not be: write it anew by ffmpeg, which "
            "turns them, without -c copy"
        )


def _starts(table: memoryview, shown: _Array) -> NDArray[np.bool_]:
    places = np.arange(len(shown))
    least_from = np.minimum.accumulate(shown[::-1])[::-1]
    starts: NDArray[np.bool_] = (shown == places) & (least_from == places)
    sync = next(_all_within(table, b"stss"), None)
    if sync is None:
        return starts  # each is a keyframe
    numbers = _words(sync, 8, _count(sync, 4), 1)[:, 0]
    if len(numbers) and not 1 <= int(numbers.min()) <= int(numbers.max()) <= len(shown):
        raise Mp4Damaged("its table of keyframes (stss) names frames that are not there")
    is_key = np.zeros(len(shown), np.bool_)
    is_key[numbers - 1] = True
    return starts & is_key


def _sizes(table: memoryview) -> _Array:
    box = next(_all_within(table, b"stsz"), None)
    if box is None or len(box) < 12:
        raise Mp4Damaged("it has no table of sizes (stsz)")
    each, count = _number(box, 4), _number(box, 8)
    if not 0 < count <= _MOST_FRAMES:
        raise Mp4Damaged(
            f"its moov names {count:,} frames, and 1 to {_MOST_FRAMES:,} are read"
            + (": is it fragmented? Write it anew as one" if not count else "")
        )
    return np.full(count, each, np.int64) if each else _words(box, 12, count, 1)[:, 0]


def _offsets(table: memoryview, size: _Array) -> _Array:
    """Where frames begin: they lie in chunks, each at an offset, one after another."""
    boxes = [(width, box) for kind, width in ((b"stco", 1), (b"co64", 2)) for box in _all_within(table, kind)]
    runs_box = next(_all_within(table, b"stsc"), None)
    if len(boxes) != 1 or runs_box is None:
        raise Mp4Damaged("it has no one table of chunks (stsc, and stco or co64)")
    width, box = boxes[0]
    words = _words(box, 8, _count(box, 4), width)
    chunk = words[:, 0] if width == 1 else (words[:, 0] << 32) + words[:, 1]
    runs = _words(runs_box, 8, _count(runs_box, 4), 3)
    first = np.append(runs[:, 0] - 1, len(chunk))
    if not len(runs) or first[0] != 0 or (np.diff(first) <= 0).any() or (chunk < 0).any() or (chunk >= 1 << 62).any():
        raise Mp4Damaged("its table of chunks (stsc) can't be")
    of_chunk = np.repeat(runs[:, 1], np.diff(first))
    if int(of_chunk.astype(np.float64).sum()) != len(size):
        raise Mp4Damaged(f"its chunks hold other than {len(size)} frames")
    begins = np.concatenate([[0], np.cumsum(of_chunk)])[:-1]
    before = np.concatenate([[0], np.cumsum(size)])
    found: _Array = np.repeat(chunk - before[begins], of_chunk) + before[:-1]
    return found


def _times(table: memoryview, count: int) -> tuple[_Array, _Array]:
    """When each frame is decoded, and how much later it is shown, in units of the timescale."""
    lasts = next(_all_within(table, b"stts"), None)
    if lasts is None:
        raise Mp4Damaged("it has no table of times (stts)")
    decoded = np.cumsum(_repeated(lasts, count))
    decoded = np.concatenate([[0], decoded[:-1]])
    shifts = next(_all_within(table, b"ctts"), None)
    if shifts is None:
        return decoded, np.zeros(count, np.int64)
    return decoded, _repeated(shifts, count).astype(np.uint32).astype(np.int32).astype(np.int64)


def _repeated(box: memoryview, count: int) -> _Array:
    """``(count,)`` values of a table of (how many frames, the value of each)."""
    runs = _words(box, 8, _count(box, 4), 2)
    if int(runs[:, 0].astype(np.float64).sum()) != count:
        raise Mp4Damaged(f"a table of times is of other than {count} frames")
    return np.repeat(runs[:, 1], runs[:, 0])


def _entry(table: memoryview) -> bytes:
    box = next(_all_within(table, b"stsd"), None)
    if box is None or _count(box, 4) != 1:
        raise Mp4Damaged("its video is not of one kind (stsd)")
    size = _number(box, 8)
    if not 86 <= size <= min(len(box) - 8, _MOST_ENTRY_BYTES):
        raise Mp4Damaged(f"what its decoder has to know can't have {size} bytes")
    return bytes(box[8 : 8 + size])


def _timescale(box: memoryview) -> int:
    at = 20 if len(box) and box[0] == 1 else 12
    found = _number(box, at) if len(box) >= at + 4 else 0
    if not found:
        raise Mp4Damaged("it does not say in what its times are counted (mdhd)")
    return found


def _is_video(track: memoryview) -> bool:
    media = next(_all_within(track, b"mdia"), None)
    handler = None if media is None else next(_all_within(media, b"hdlr"), None)
    return handler is not None and bytes(handler[8:12]) == b"vide"


def _only(data: memoryview, kind: bytes) -> memoryview:
    found = next(_all_within(data, kind), None)
    if found is None:
        raise Mp4Damaged(f"it has no {kind.decode()}")
    return found


def _all_within(data: memoryview, kind: bytes) -> Iterator[memoryview]:
    """What is in each box of a kind that lies in these bytes."""
    place = 0
    for _ in range(_MOST_BOXES):
        if place + 8 > len(data):
            return
        size, head = _number(data, place), 8
        if size == 1 and place + 16 <= len(data):
            size, head = int.from_bytes(data[place + 8 : place + 16], "big"), 16
        elif size == 0:
            size = len(data) - place
        if size < head or place + size > len(data):
            raise Mp4Damaged(f"a box in its moov can't have {size} bytes")
        if bytes(data[place + 4 : place + 8]) == kind:
            yield data[place + head : place + size]
        place += size


def _number(data: memoryview, place: int) -> int:
    return int.from_bytes(data[place : place + 4], "big")


def _count(box: memoryview, place: int) -> int:
    if len(box) < place + 4:
        raise Mp4Damaged("one of its tables is cut off")
    return _number(box, place)


def _words(box: memoryview, place: int, count: int, width: int) -> _Array:
    """``(count, width)`` numbers of 32 bits."""
    if place + 4 * count * width > len(box):
        raise Mp4Damaged("one of its tables is cut off")
    return np.frombuffer(box, ">u4", count * width, place).astype(np.int64).reshape(count, width)
