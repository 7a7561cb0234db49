"""Clips of windows: what a client makes of coded frames, and where an index finds frames in such a file."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refill.errors import InvalidInput
from refill.formats import parser_of
from refill.formats.clips import FRAME_HEAD, Cut, cut_window
from refill_service.formats.mp4 import Mp4Damaged, frames_of, moov_range

ENTRY = (90).to_bytes(4, "big") + b"avc1" + bytes(24) + b"\0\x40\0\x20" + bytes(54)
"""What a decoder has to know, of pictures of 64 x 32: as long as one can be, and nothing else."""


class Coded:
    """Frames as rows of a group have them, in the order in which they are decoded."""

    def __init__(self, groups: list[tuple[int, ...]], sizes: list[int]) -> None:
        """:param groups: of frames from one keyframe on, the order in which they are shown."""
        self.shown = [before + each for before, group in _before(groups) for each in group]
        self.starts = [each == 0 for group in groups for each in group]
        self.data = [bytes([place % 256]) * sizes[place % len(sizes)] for place in range(len(self.shown))]

    def rows(self, first: int, end: int) -> list[dict[str, memoryview]]:
        found = []
        for place in range(first, end):
            entry = ENTRY if self.starts[place] else b""
            head = FRAME_HEAD.pack(place, self.shown[place] - place, len(entry))
            found.append({"camera": memoryview(head + entry + self.data[place]), "place": memoryview(bytes([place]))})
        return found


def _before(groups: list[tuple[int, ...]]) -> list[tuple[int, tuple[int, ...]]]:
    starts = np.cumsum([0, *map(len, groups)]).tolist()
    return list(zip(starts, groups, strict=False))


groups_of_frames = st.lists(
    st.integers(1, 5).flatmap(lambda count: st.permutations(range(1, count)).map(lambda later: (0, *later))),
    min_size=1,
    max_size=6,
)


@settings(deadline=None)
@given(groups_of_frames, st.lists(st.integers(1, 300), min_size=1, max_size=5), st.data())
def test_a_clip_has_the_frames_of_its_window(
    groups: list[tuple[int, ...]], sizes: list[int], data: st.DataObject
) -> None:
    coded = Coded(groups, sizes)
    starts = [before for before, _ in _before(groups)]
    key = data.draw(st.sampled_from(range(len(starts))))
    end = data.draw(st.sampled_from([*starts[key + 1 :], len(coded.shown)]))
    # A window begins where its stride says, and each of them begins at place 0.
    begins = data.draw(st.integers(starts[key], starts[key] + len(groups[key]) - 1)) if key else 0
    length = data.draw(st.integers(1, end - begins))
    cut = Cut(length, max(1, begins), ["camera"], 10)
    rows, fields = cut_window(coded.rows(starts[key], end), cut)
    assert [row["place"][0] for row in rows] == list(range(begins, begins + length))
    clip = fields["camera"]
    start, stop = moov_range(len(clip), lambda low, high: clip[low:high])
    frames = frames_of(clip[start:stop])
    decoded = range(starts[key], end)
    assert frames.entry == ENTRY
    assert frames.shown.tolist() == [coded.shown[place] - starts[key] for place in decoded]
    assert frames.starts.tolist() == [coded.starts[place] for place in decoded]
    held = [bytes(clip[at : at + size]) for at, size in zip(frames.offset.tolist(), frames.size.tolist(), strict=True)]
    assert held == [coded.data[place] for place in decoded]
    np.testing.assert_allclose(frames.seconds, np.arange(len(held)) / 10)
    assert fields["camera.frames"].tolist() == [begins - starts[key] + each for each in range(length)]


def test_rows_that_are_no_window_are_refused() -> None:
    coded = Coded([(0, 1), (0, 1), (0, 1)], [4])
    cut = Cut(2, 2, ["camera"], 10)
    for rows in ([], coded.rows(2, 3), coded.rows(1, 3), [*coded.rows(0, 1), *coded.rows(2, 3)]):
        with pytest.raises(ValueError, match="are no 2 of a window"):
            cut_window(rows, cut)
    with pytest.raises(ValueError, match="no keyframe is at place 3 or before it"):
        cut_window(coded.rows(3, 6), Cut(2, 3, ["camera"], 10))
    for bad in (b"", FRAME_HEAD.pack(0, 0, 0), FRAME_HEAD.pack(0, 0, 90) + ENTRY, FRAME_HEAD.pack(0, 0, 4) + bytes(9)):
        with pytest.raises(ValueError, match=r"has no frame|within its head"):
            cut_window([{"camera": memoryview(bad)}] * 2, cut)


@pytest.mark.parametrize("wrong", [{"fps": float("inf")}, {"fps": float("nan")}, {"fps": 0}, {"windows": [0, 1]}])
def test_an_index_that_describes_no_windows_is_refused(wrong: dict[str, object]) -> None:
    about = {"name": "lerobot", "columns": [["camera", "video"]], "windows": [2, 2], "fps": 10} | wrong
    with pytest.raises(InvalidInput, match="describes its format lerobot in an unknown way"):
        parser_of({"format": about})


def test_what_is_no_mp4_is_refused() -> None:
    whole = cut_window(Coded([(0, 1)], [4]).rows(0, 2), Cut(2, 2, ["camera"], 10))[1]["camera"]
    start, end = moov_range(len(whole), lambda low, high: whole[low:high])
    for size in range(8, end - start, 7):
        with pytest.raises(Mp4Damaged):
            frames_of(whole[start : start + size])
    with pytest.raises(Mp4Damaged, match="it has no moov"):
        moov_range(start, lambda low, high: whole[low:high])
    with pytest.raises(Mp4Damaged, match="can't have"):
        moov_range(end - 1, lambda low, high: whole[low:high])


def _with_edits(moov: bytes, *edits: tuple[int, int], version: int = 0) -> memoryview:
    """:param edits: of each where in the media it begins, and its rate."""
    layout = ">QqI" if version else ">IiI"
    entries = b"".join(struct.pack(layout, 0, begins, rate) for begins, rate in edits)
    elst = struct.pack(">I4sII", 16 + len(entries), b"elst", version << 24, len(edits)) + entries
    edts = struct.pack(">I4s", 8 + len(elst), b"edts") + elst
    found = moov
    for kind in (b"trak", b"moov"):
        at = found.index(kind)
        found = found[: at - 4] + (int.from_bytes(found[at - 4 : at]) + len(edts)).to_bytes(4) + found[at:]
    at = found.index(b"mdia") - 4
    return memoryview(found[:at] + edts + found[at:])


@pytest.mark.parametrize("version", [0, 1])
def test_seconds_are_counted_from_where_an_edit_begins(version: int) -> None:
    moov = _moov_of(5)
    assert frames_of(memoryview(moov)).seconds.tolist() == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    frames = frames_of(_with_edits(moov, (2000, 0x10000), version=version))
    assert frames.seconds.tolist() == pytest.approx([-0.2, -0.1, 0, 0.1, 0.2])


@pytest.mark.parametrize("edits", [[], [(-1, 0x10000)], [(0, 0x20000)], [(-1, 0x10000), (0, 0x10000)]])
def test_other_edits_are_refused(edits: list[tuple[int, int]]) -> None:
    with pytest.raises(Mp4Damaged, match="its list of edits"):
        frames_of(_with_edits(_moov_of(5), *edits))


@pytest.mark.parametrize(("box", "at"), [(b"tkhd", 44), (b"mvhd", 40)])
def test_pictures_that_are_shown_turned_are_refused(box: bytes, at: int) -> None:
    moov = bytearray(_moov_of(2))
    place = moov.index(box) + at
    moov[place : place + 36] = struct.pack(">9i", 0, 0x10000, 0, -0x10000, 0, 0, 32 << 16, 0, 0x40000000)
    with pytest.raises(Mp4Damaged, match="turned or mirrored"):
        frames_of(memoryview(moov))


def _moov_of(count: int) -> bytes:
    whole = cut_window(Coded([(0,)] * count, [4]).rows(0, count), Cut(count, 1, ["camera"], 10))[1]["camera"]
    start, end = moov_range(len(whole), lambda low, high: whole[low:high])
    return bytes(whole[start:end])
