"""Windows of episodes in tars: samples of WebDataset in a row, which windows share. Each comes once an epoch."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import refill
from refill.errors import SampleDamaged
from refill.formats import parser_of
from refill_service.cli import main
from refill_service.demo.local_cluster import LocalCluster
from refill_service.formats.interface import ShardReport
from refill_service.formats.webdataset import read_windows
from tests.formats.reading import epoch_of

Steps = list[tuple[str, dict[str, bytes]]]
"""Key and members of each sample of a tar."""


def steps_of(episodes: list[int], *, in_folders: bool = True) -> Steps:
    return [
        (
            f"ep{episode}/{step:04}" if in_folders else f"{episode}_{step:04}",
            {"jpg": bytes([episode, step % 256]) * (1 + 300 * (step % 3)), "json": b'{"step": %d}' % step},
        )
        for episode, count in enumerate(episodes)
        for step in range(count)
    ]


def tar_of(steps: Steps, *, folders: bool = False) -> bytes:
    """:param folders: whether the tar has members for folders, too, and files that are of no sample."""
    found, seen = io.BytesIO(), set[str]()
    with tarfile.open(fileobj=found, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for key, members in steps:
            folder = key.rpartition("/")[0]
            if folders and folder not in seen:
                seen.add(folder)
                entry = tarfile.TarInfo(folder)
                entry.type = tarfile.DIRTYPE
                tar.addfile(entry)
            for extension, data in members.items():
                entry = tarfile.TarInfo(f"{key}.{extension}")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
            if folders:
                entry = tarfile.TarInfo(f"{folder}/README")
                entry.size = 3
                tar.addfile(entry, io.BytesIO(b"abc"))
    return found.getvalue()


def windows_of(steps: Steps, length: int, stride: int) -> list[Steps]:
    """By hand."""
    found: list[Steps] = []
    for folder in dict.fromkeys(key.rpartition("/")[0] for key, _ in steps):
        episode = [each for each in steps if each[0].rpartition("/")[0] == folder]
        found += [episode[start : start + length] for start in range(0, len(episode) - length + 1, stride)]
    return found


def check_window(sample: dict[str, object], window: Steps) -> None:
    assert sample["__keys__"] == [key for key, _ in window]
    assert sample["jpg"] == [members["jpg"] for _, members in window]
    assert sample["json"] == [members["json"] for _, members in window]


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=6),
    st.integers(1, 8),
    st.integers(0, 4),
    st.booleans(),
    st.booleans(),
)
def test_windows_are_samples_in_a_row(
    episodes: list[int], length: int, more: int, in_folders: bool, folders: bool
) -> None:
    stride = -(-length // 2) + more
    steps = steps_of(episodes, in_folders=in_folders)
    data, report = tar_of(steps, folders=folders and in_folders), ShardReport()
    view = memoryview(data)
    found = list(read_windows("a.tar", "a.tar", len(data), lambda low, high: view[low:high], report, length, stride))
    records = np.concatenate(found) if found else np.zeros(0, [("offset", int), ("length", int), ("checksum", int)])
    wanted = windows_of(steps, length, stride)
    assert len(records) == len(wanted)
    offset: Any = records["offset"]  # else mypy tries all that + may be, for a second
    ends = offset + records["length"]
    assert (offset[2:] >= ends[:-2]).all()
    assert report.num_passed_over == len(steps) - len({key for window in wanted for key, _ in window})
    parse = parser_of({"format": {"name": "webdataset", "windows": [length, stride]}})
    for record, window in zip(records.tolist(), wanted, strict=True):
        part = view[record[0] : record[0] + record[1]]
        assert xxhash.xxh3_64_intdigest(part) == record[2]
        key, fields = parse(part, 0)
        assert key == window[0][0]
        check_window(fields, window)


def test_each_window_comes_once(tmp_path: Path, pod: LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = steps_of([30, 7, 41]), steps_of([16, 3])
    (tmp_path / "a.tar").write_bytes(tar_of(one, folders=True))
    (tmp_path / "b.tar").write_bytes(tar_of(other))
    assert main(["index", str(tmp_path), "--quiet", "--windows", "8,4"]) == 0
    wanted = windows_of(one, 8, 4) + windows_of(other, 8, 4)
    assert f"indexed {len(wanted)} samples" in capsys.readouterr().out
    for sample, window in zip(epoch_of(pod, tmp_path.as_uri()), wanted, strict=True):
        check_window(sample, window)
    assert main(["inspect", str(tmp_path), "--verify", "--quiet"]) == 0


def test_files_that_were_packed_in_their_order_have_windows(tmp_path: Path, pod: LocalCluster) -> None:
    """A window is a range of one object, and so of no plain files: these are packed first."""
    store, steps = tmp_path / "store", steps_of([20, 9])
    refill.pack(
        [{"__key__": key, **members} for key, members in steps], store.as_uri(), shuffle=False, quiet=True, jobs=1
    )
    assert main(["index", str(store), "--quiet", "--windows", "8,4", "--output", str(tmp_path / "windows")]) == 0
    wanted = windows_of(steps, 8, 4)
    for sample, window in zip(epoch_of(pod, (tmp_path / "windows").as_uri(), chunk_size=4), wanted, strict=True):
        check_window(sample, window)


def test_bytes_that_are_no_window_are_damage() -> None:
    parse = parser_of({"format": {"name": "webdataset", "windows": [3, 2]}})
    data = tar_of(steps_of([2]))
    with pytest.raises(SampleDamaged, match="it holds 2 samples, and not 3"):
        parse(memoryview(data), 0)
    for wrong in (b"", data[:700], bytes(512) + data):
        with pytest.raises(SampleDamaged):
            parse(memoryview(wrong), 0)
