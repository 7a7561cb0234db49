"""Windows of episodes: rows of a table that samples share. Each comes once an epoch, and bytes are read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refill.errors import InvalidInput, SampleDamaged
from refill.formats import parser_of
from refill.formats.cut import check_cut
from refill.protocol.sample_cut import SampleCut
from refill_service.cli import main
from refill_service.demo.local_cluster import LocalCluster
from refill_service.formats import rows
from refill_service.formats.interface import ShardReport
from tests.conftest import S3Server
from tests.formats.reading import asked_of, epoch_of, opened, put

EPISODES = (30, 7, 41, 16)


def steps(episodes: tuple[int, ...] = EPISODES, first: int = 0) -> pa.Table:
    """As LeRobot has them: a row each frame, arrays of one size, and texts that vary."""
    index = np.repeat(np.arange(first, first + len(episodes)), episodes)
    frames = np.concatenate([np.arange(each) for each in episodes])
    count = len(index)
    state = np.random.default_rng(first).random((count, 6)).astype(np.float32)
    return pa.table(
        {
            "observation.state": pa.FixedSizeListArray.from_arrays(pa.array(state.ravel()), 6),
            "task": [f"task {'x' * (number % 9)}" for number in range(count)],
            "episode_index": index,
            "frame_index": frames,
        }
    )


def windows_of(table: pa.Table, length: int, stride: int, group: int) -> list[pa.Table]:
    """By hand: within a row group, and within an episode."""
    found = []
    for low in range(0, table.num_rows, group):
        part = table.slice(low, group)
        episodes = part["episode_index"].to_numpy()
        for episode in dict.fromkeys(episodes.tolist()):
            (places,) = np.nonzero(episodes == episode)
            for start in range(0, len(places) - length + 1, stride):
                found.append(part.slice(int(places[start]), length))
    return found


def check(found: list[dict[str, Any]], wanted: list[pa.Table]) -> None:
    assert len(found) == len(wanted)
    for sample, window in zip(found, wanted, strict=True):
        state = np.array(window["observation.state"].to_pylist(), np.float32)
        assert sample["observation.state"].dtype == np.float32
        np.testing.assert_array_equal(sample["observation.state"], state)
        assert sample["frame_index"].tolist() == window["frame_index"].to_pylist()
        assert set(sample["episode_index"].tolist()) == {window["episode_index"][0].as_py()}
        assert sample["task"] == window["task"].to_pylist()


@pytest.mark.parametrize(("length", "stride"), [(8, 4), (8, 8), (1, 1), (5, 9), (16, 9)])
@pytest.mark.parametrize("group", [1000, 25])
def test_each_window_is_what_pyarrow_has_there(
    tmp_path: Path, pod: LocalCluster, capsys: pytest.CaptureFixture[str], length: int, stride: int, group: int
) -> None:
    table, other = steps(), steps((12, 40), first=4)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=group)
    pq.write_table(other, tmp_path / "b.parquet", row_group_size=group)
    assert main(["index", str(tmp_path), "--quiet", f"--windows={length},{stride}"]) == 0
    wanted = windows_of(table, length, stride, group) + windows_of(other, length, stride, group)
    said = capsys.readouterr().out
    assert f"indexed {len(wanted)} samples" in said
    check(epoch_of(pod, tmp_path.as_uri(), chunk_size=None), wanted)
    check(epoch_of(pod, tmp_path.as_uri(), chunk_size=None, policy="redox"), wanted)
    assert main(["inspect", str(tmp_path), "--verify", "--quiet"]) == 0


def test_bytes_are_read_once_though_windows_share_them(
    tmp_path: Path, s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    episodes, frame = 40, 1500
    index = np.repeat(np.arange(episodes), 100)
    blob = [bytes([number % 256]) * frame for number in range(len(index))]
    table = pa.table({"episode_index": index, "frame": blob})
    more: dict[str, Any] = {"compression": "none", "use_dictionary": False}
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1000, **more)
    url = put(s3_environment, tmp_path)
    size = (tmp_path / "a.parquet").stat().st_size
    with asked_of(s3_environment) as asked:
        monkeypatch.setenv("AWS_ENDPOINT_URL", asked.url)
        assert main(["index", url, "--quiet", "--windows", "20,10"]) == 0
        asked.reads.clear()
        with LocalCluster(1, tmp_path, {"memory_bytes": "64MiB", "dataset_urls": "s3://"}) as pods:
            found = epoch_of(pods, url, chunk_size=None)
        assert len(found) == episodes * 9
        assert all(len(sample["frame"]) == 20 for sample in found)
        requests, num_bytes = asked.of("a.parquet")
    assert requests == 4 + 1  # groups, and the footer
    assert size - 12 <= num_bytes < 1.02 * size, "all but the magic at both ends"


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 12), st.integers(0, 12), st.integers(0, 3))
def test_windows_lie_in_episodes_in_order_and_share_rows_with_neighbours_alone(
    episodes: list[int], length: int, more: int, cut: int
) -> None:
    stride = -(-length // 2) + more
    table = steps(tuple(episodes))
    columns = rows.chosen_columns(table.schema, None, "x")
    about = {
        "columns": [[each.name, each.kind] for each in columns.leaves],
        "windows": [length, stride],
        "episodes": "episode_index",
    }
    blocks = [rows.rows_of(batch, columns.leaves, 1 << 20) for batch in table.to_batches(max_chunksize=1 + 10 * cut)]
    report = ShardReport()
    found = rows.window_records(blocks, about, report)
    wanted = windows_of(table, length, stride, table.num_rows)
    records = found[0] if found else np.zeros(0, rows.RECORD)
    assert len(records) == len(wanted)
    ends = records["offset"] + records["length"]
    assert (records["offset"][1:] > records["offset"][:-1]).all()
    assert (records["offset"][2:] >= ends[:-2]).all()
    in_windows = {(row["episode_index"], row["frame_index"]) for window in wanted for row in window.to_pylist()}
    assert report.num_passed_over == table.num_rows - len(in_windows)
    parse, data = parser_of({"format": {"name": "parquet"} | about}), b"".join(block.data for block in blocks)
    check(
        [
            parse(memoryview(data)[start:end], number)[1]
            for number, (start, end) in enumerate(zip(records["offset"].tolist(), ends.tolist(), strict=True))
        ],
        wanted,
    )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--windows", "8,3"], "the stride is less than half of the length"),
        (["--windows", "0,1"], "must be 1 to"),
        (["--windows", "8"], "must be LENGTH,STRIDE, two numbers"),
        (["--windows", "8,8", "--episodes", "task"], "has no column 'task' of whole numbers"),
        (["--windows", "8,8", "--columns", "task"], "has no column 'episode_index' of whole numbers"),
        (["--windows", "99,99"], "no samples in them"),
    ],
)
def test_what_is_no_window_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    pq.write_table(steps(), tmp_path / "a.parquet")
    assert main(["index", str(tmp_path), "--quiet", *more]) == 2
    assert said in capsys.readouterr().err
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "a.jsonl").write_text("1\n")
    assert main(["index", str(tmp_path / "lines"), "--quiet", "--windows", "8,8"]) == 2
    assert (
        "--windows is for tables (parquet, arrow, lerobot) and webdataset, and this is read as jsonl"
        in capsys.readouterr().err
    )


def test_bytes_that_are_no_window_are_damage(tmp_path: Path) -> None:
    pq.write_table(steps((9,)), tmp_path / "a.parquet")
    assert main(["index", str(tmp_path), "--quiet", "--windows", "3,3"]) == 0
    index, records = opened(tmp_path.as_uri())
    parse = parser_of(index.metadata)
    zeros = bytes(int(records.length[0]))
    with pytest.raises(InvalidInput, match="members and ranges are not of windows"):
        check_cut(SampleCut.of(["task"], None), index.metadata)
    for data in (b"", zeros[:-1], zeros + zeros, b"\xff" * len(zeros)):
        with pytest.raises(SampleDamaged):
            parse(memoryview(data), 0)
