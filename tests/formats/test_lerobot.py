"""LeRobot's datasets where they lie: windows of rows and of frames, each once an epoch, bytes read once."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from refill_service.cli import main
from refill_service.demo.local_cluster import LocalCluster
from tests.conftest import S3Server
from tests.formats.lerobot_files import FPS, grey, rows_of_episode, video, write_lerobot
from tests.formats.reading import asked_of, epoch_of, put

av = pytest.importorskip("av", reason="videos are written, and read again, by PyAV")

EPISODES = (30, 17, 24)


def index(folder: Path | str, windows: str, *more: str) -> int:
    return main(["index", str(folder), "--quiet", "--windows", windows, *more])


def greys_of(clip: memoryview) -> list[float]:
    with av.open(io.BytesIO(clip)) as container:
        return [float(frame.to_ndarray(format="rgb24").mean()) for frame in container.decode(video=0)]


def check(found: Sequence[dict[str, Any]], cameras: Sequence[str], length: int, stride: int) -> None:
    """By hand: windows of each episode, in order; of the frames those that were written."""
    starts = [
        (episode, start) for episode, count in enumerate(EPISODES) for start in range(0, count - length + 1, stride)
    ]
    assert len(found) == len(starts)
    for sample, (episode, start) in zip(found, starts, strict=True):
        rows = rows_of_episode(episode, EPISODES[episode])
        assert sample["episode_index"].tolist() == [episode] * length
        assert sample["frame_index"].tolist() == list(range(start, start + length))
        np.testing.assert_allclose(sample["action"], rows["action"][start : start + length], rtol=1e-6)
        for camera, name in enumerate(cameras):
            shown = np.array(greys_of(sample[name]))[sample[f"{name}.frames"]]
            wanted = [grey(camera, episode, frame) for frame in range(start, start + length)]
            np.testing.assert_allclose(shown, wanted, atol=3)


@pytest.mark.variants("as LeRobot writes them-v2.1", "between keyframes-v3.0", "frames that need later ones-v3.0")
@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
@pytest.mark.parametrize(
    ("windows", "gop", "later"),
    [((8, 4), 2, None), ((5, 3), 2, 0), ((8, 8), 8, 2)],
    ids=["as LeRobot writes them", "between keyframes", "frames that need later ones"],
)
def test_a_window_has_the_rows_and_the_frames(
    tmp_path: Path, pod: LocalCluster, version: str, windows: tuple[int, int], gop: int, later: int | None
) -> None:
    cameras = write_lerobot(tmp_path, EPISODES, version=version, cameras=2, gop=gop, later=later)
    assert index(tmp_path, "{},{}".format(*windows)) == 0
    check(epoch_of(pod, tmp_path.as_uri(), chunk_size=None), cameras, *windows)
    check(epoch_of(pod, tmp_path.as_uri(), chunk_size=None, policy="redox"), cameras, *windows)
    assert main(["inspect", str(tmp_path), "--verify", "--quiet"]) == 0


def test_episodes_may_share_a_row_group_or_lie_in_several(tmp_path: Path, pod: LocalCluster) -> None:
    """As after a conversion: what lies behind the last whole window of a group is in none."""
    cameras = write_lerobot(tmp_path, EPISODES)
    path = tmp_path / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    pq.write_table(table, path)
    assert index(tmp_path, "8,4") == 0
    check(epoch_of(pod, tmp_path.as_uri(), chunk_size=None), cameras, 8, 4)
    pq.write_table(table, path, row_group_size=13)
    assert index(tmp_path, "4,4", "--force") == 0
    found = epoch_of(pod, tmp_path.as_uri(), chunk_size=None)
    places = [(int(sample["episode_index"][0]), int(sample["frame_index"][0])) for sample in found]
    # Groups begin at frames 0, 13 and 26 of episode 0; at 13 there is no keyframe, and windows begin at the next turn.
    assert places[:6] == [(0, 0), (0, 4), (0, 8), (0, 17), (0, 21), (0, 26)]
    for sample, (episode, start) in zip(found, places, strict=True):
        shown = np.array(greys_of(sample[cameras[0]]))[sample[f"{cameras[0]}.frames"]]
        np.testing.assert_allclose(shown, [grey(0, episode, start + each) for each in range(4)], atol=3)


def test_bytes_are_read_once(tmp_path: Path, s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    (camera,) = write_lerobot(tmp_path / "data", EPISODES, version="v2.1")
    url = put(s3_environment, tmp_path / "data")
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "data").rglob("*.mp4")}
    assert len(sizes) == len(EPISODES)
    with asked_of(s3_environment) as asked:
        monkeypatch.setenv("AWS_ENDPOINT_URL", asked.url)
        assert index(url, "8,4") == 0
        asked.reads.clear()
        with LocalCluster(1, tmp_path, {"memory_bytes": "64MiB", "dataset_urls": "s3://"}) as pods:
            check(epoch_of(pods, url, chunk_size=None), [camera], 8, 4)
        for name, size in sizes.items():
            requests, num_bytes = asked.of(name)
            assert requests == 2, "its moov, and its frames"
            assert num_bytes <= size


def test_columns_and_cameras_are_chosen_together(tmp_path: Path, pod: LocalCluster) -> None:
    _, camera = write_lerobot(tmp_path, EPISODES, cameras=2)
    assert index(tmp_path, "8,8", "--columns", f"episode_index,timestamp,action,{camera}") == 0
    found = epoch_of(pod, tmp_path.as_uri(), chunk_size=None)
    fields = {"episode_index", "timestamp", "action", camera, f"{camera}.frames", "__id__", "__key__"}
    assert all(set(sample) == fields for sample in found)
    assert greys_of(found[0][camera])[0] == pytest.approx(grey(1, 0, 0), abs=3)


def test_frames_that_an_edit_hides_are_of_no_row(tmp_path: Path, pod: LocalCluster) -> None:
    """As a cut without encoding writes it: the file begins at a keyframe, and hides what is before the cut."""
    hidden, count = 4, 12
    (camera,) = write_lerobot(tmp_path, [count], version="v2.1")
    whole = video([250, 240, 230, 220, *(grey(0, 0, frame) for frame in range(count))], later=0)
    path = tmp_path / f"videos/chunk-000/{camera}/episode_000000.mp4"
    with av.open(io.BytesIO(whole)) as source, av.open(path, "w", options={"use_editlist": "1"}) as cut:
        of = source.streams.video[0]
        stream = cut.add_stream_from_template(of, opaque=True)
        stream.time_base = of.time_base
        for packet in source.demux(of):
            if packet.dts is not None:
                before = round(hidden / FPS / of.time_base)
                packet.pts, packet.dts, packet.stream = packet.pts - before, packet.dts - before, stream
                cut.mux(packet)
    written = [grey(0, 0, frame) for frame in range(count)]
    np.testing.assert_allclose(greys_of(memoryview(path.read_bytes())), written, atol=3)
    assert index(tmp_path, "4,4") == 0
    found = epoch_of(pod, tmp_path.as_uri(), chunk_size=None)
    shown = [np.array(greys_of(sample[camera]))[sample[f"{camera}.frames"]] for sample in found]
    np.testing.assert_allclose(np.concatenate(shown), written, atol=3)


def _later(folder: Path) -> None:
    path = folder / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    column = "videos/observation.images.c0/from_timestamp"
    moved = pa.array([each + 2.0 for each in table[column].to_pylist()])
    pq.write_table(table.set_column(table.schema.get_field_index(column), column, moved), path)


def _cut_off(folder: Path) -> None:
    path = folder / "videos/observation.images.c0/chunk-000/file-000.mp4"
    path.write_bytes(path.read_bytes()[:-100])


def _other_info(**more: Any) -> Any:
    def write(folder: Path) -> None:
        path = folder / "meta/info.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | more))

    return write


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (_later, r"is at [\d.]+ s of videos/.*, and there is (no frame|one at)"),
        (_cut_off, "a box at byte|it has no moov"),
        (lambda folder: (folder / "videos/observation.images.c0/chunk-000/file-000.mp4").unlink(), "is not there"),
        (lambda folder: (folder / "meta/episodes/chunk-000/file-000.parquet").unlink(), "holds no meta/episodes"),
        (_other_info(codebase_version="v1.6"), "v2 and v3 are read"),
        (_other_info(fps=0), "0.0 frames a second"),
        (_other_info(video_path="{video_key.__class__}"), "is not there"),
        (_other_info(video_path="{other}"), "names 'other', which is not known"),
        (_other_info(features=[]), "is not as LeRobot writes it"),
    ],
)
def test_what_is_no_whole_dataset_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: Any, said: str
) -> None:
    write_lerobot(tmp_path, EPISODES)
    broken(tmp_path)
    assert index(tmp_path, "8,4") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(said, line), line


def test_keyframes_far_apart_are_refused_unless_windows_begin_at_them(
    tmp_path: Path, pod: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cameras = write_lerobot(tmp_path, EPISODES, gop=8)
    assert index(tmp_path, "8,4") == 2
    assert "give a stride that is a multiple of the distance of keyframes" in capsys.readouterr().err
    assert index(tmp_path, "8,8") == 0
    check(epoch_of(pod, tmp_path.as_uri(), chunk_size=None), cameras, 8, 8)
    assert main(["index", str(tmp_path), "--quiet", "--force"]) == 2
    assert "a sample is a window of an episode: --windows" in capsys.readouterr().err


def test_a_video_that_was_replaced_is_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lerobot(tmp_path, EPISODES, version="v2.1")
    assert index(tmp_path, "8,4") == 0
    (tmp_path / "other").mkdir()
    write_lerobot(tmp_path / "other", (40,), version="v2.1", gop=8)
    name = "videos/chunk-000/observation.images.c0/episode_000000.mp4"
    (tmp_path / name).write_bytes((tmp_path / "other" / name).read_bytes())
    assert main(["inspect", str(tmp_path), "--verify", "--quiet"]) == 1
    assert "episode_000000" in capsys.readouterr().out
