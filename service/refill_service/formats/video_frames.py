"""Which frames of videos do the rows of a group have, and what has to be read of them? They become columns.

A row gets the frame that is decoded in its turn (``refill/formats/clips.py``), so that a window of rows has what is
needed to decode its pictures, from the keyframe before it on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from refill.formats.clips import FRAME_HEAD, VIDEO
from refill_service.formats.mp4 import MOST_MOOV_BYTES, Frames
from refill_service.formats.rows import MOST_GROUP_BYTES, Column, GroupDamaged, Reach, too_large

if TYPE_CHECKING:
    import pyarrow as pa

_GAP_BYTES = 1 << 20
"""Between frames of two episodes: less is read with them."""


class Run(NamedTuple):
    """Rows of one episode in a group, and the frames of a camera that are theirs."""

    camera: int
    key: str
    moov: tuple[int, int]
    """Where it lies in that file: bytes ``[start, end)``."""
    first_frame: int
    """Of the file's, the one of the first row."""
    num_rows: int

    def written(self) -> str:
        """As part of the name of a group."""
        return f"{self.camera},{self.moov[0]},{self.moov[1]},{self.first_frame},{self.num_rows},{self.key}"

    @classmethod
    def read(cls, text: str, cameras: int) -> Run:
        """What :meth:`written` wrote. Raises :class:`GroupDamaged` for what it did not.

        :param cameras: how many there are.
        """
        *numbers, key = text.split(",", 5)
        found = [int(each) if each.isdigit() and len(each) < 19 else -1 for each in numbers]
        if len(found) != 5 or min(found) < 0 or found[0] >= cameras or not 8 < found[2] - found[1] <= MOST_MOOV_BYTES:
            raise GroupDamaged(f"{text[:60]!r} is no place of frames")
        camera, start, end, first, count = found
        return cls(camera, key, (start, end), first, count)


class FrameColumns:
    """The columns of cameras in a group: of each row its frame, in the order in which frames are decoded.

    Raises :class:`GroupDamaged` for runs that name other frames than there are.
    """

    def __init__(self, runs: Sequence[Run], frames: Mapping[str, Frames], cameras: Sequence[str]) -> None:
        self._runs: list[list[Run]] = [[each for each in runs if each.camera == place] for place in range(len(cameras))]
        self._frames, self._cameras = frames, cameras
        self.ranges: list[tuple[str, int, int]] = []
        self._at: dict[Run, int] = {}
        """In which of the ranges the frames of a run are."""
        for run in runs:
            self._add(run)
        if (num_bytes := sum(end - start for _, start, end in self.ranges)) > MOST_GROUP_BYTES:
            raise GroupDamaged(too_large(num_bytes))

    def joined_to(
        self, batch: pa.RecordBatch, leaves: list[Column], first_row: int, pieces: Sequence[memoryview]
    ) -> tuple[pa.RecordBatch, list[Column]]:
        import pyarrow as pa

        leaves = list(leaves)
        for name, runs in zip(self._cameras, self._runs, strict=True):
            coded, row = list[bytes](), 0
            for run in runs:
                low, high = max(row, first_row), min(row + run.num_rows, first_row + batch.num_rows)
                coded += [self._coded(run, place - row, pieces) for place in range(low, high)]
                row += run.num_rows
            if len(coded) != batch.num_rows:
                raise GroupDamaged(f"it names frames of {row} rows for camera {name!r:.60}, and has others")
            leaves.append(Column(name, VIDEO, (batch.num_columns,)))
            batch = batch.append_column(name, pa.array(coded, pa.binary()))
        return batch, leaves

    def reach(self, num_rows: int) -> Reach | None:
        """None: there are no cameras."""
        if not self._cameras:
            return None
        first, end = np.arange(num_rows), np.arange(1, num_rows + 1)
        for runs in self._runs:
            row = 0
            for run in runs:
                rows = slice(row, row + run.num_rows)
                low, high = _reach_in(self._frames[run.key], run)
                cant = (first[rows] < 0) | (low < 0)
                first[rows] = np.where(cant, -1, np.minimum(first[rows], row + low))
                last = np.where(high > run.num_rows, num_rows + 1, row + high)
                end[rows] = np.maximum(end[rows], last)
                row += run.num_rows
        return Reach(first, end)

    def _add(self, run: Run) -> None:
        frames, last = self._frames[run.key], run.first_frame + run.num_rows
        if not run.num_rows or last > len(frames.size):
            raise GroupDamaged(f"{run.key[:200]} has {len(frames.size)} frames, and rows go on to {last}")
        low = int(frames.offset[run.first_frame : last].min())
        high = int((frames.offset + frames.size)[run.first_frame : last].max())
        if self.ranges and self.ranges[-1][0] == run.key and 0 <= low - self.ranges[-1][2] <= _GAP_BYTES:
            self.ranges[-1] = run.key, self.ranges[-1][1], high
        else:
            self.ranges.append((run.key, low, high))
        self._at[run] = len(self.ranges) - 1

    def _coded(self, run: Run, place: int, pieces: Sequence[memoryview]) -> bytes:
        frames, number = self._frames[run.key], run.first_frame + place
        at = self._at[run]
        start = int(frames.offset[number]) - self.ranges[at][1]
        shown = int(frames.shown[number]) - number
        entry = frames.entry if frames.starts[number] else b""
        return FRAME_HEAD.pack(place, shown, len(entry)) + entry + pieces[at][start : start + int(frames.size[number])]


def _reach_in(frames: Frames, run: Run) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """As :class:`Reach` has it, of rows of the run: what has to be read to decode the frame that is shown with each."""
    part, places = slice(run.first_frame, run.first_frame + run.num_rows), np.arange(run.num_rows)
    shown, starts = frames.shown[part] - run.first_frame, frames.starts[part]
    first = np.maximum.accumulate(np.where(starts, places, -1))
    decoded_at = np.full(run.num_rows, run.num_rows)
    within = (shown >= 0) & (shown < run.num_rows)
    decoded_at[shown[within]] = places[within]
    decoded_at[first < 0] = 0  # nothing begins there
    return first, np.maximum.accumulate(decoded_at) + 1
