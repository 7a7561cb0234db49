"""`members` and `ranges`: what a rank does not want stays with the pods, and all else holds as before."""

from __future__ import annotations

import asyncio
import json
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.formats.reading import epoch_of
from tests.membership.planned_in_process import PlannedDataset, PlannedRank, Run, new_name
from tests.membership.pods_in_process import PodsInProcess
from torch.utils.data import DataLoader

import refill
from refill.errors import InvalidInput, MemoryTooSmall, RefillError
from refill.formats.sample_decoder import SampleDecoder
from refill.protocol.sample_cut import SampleCut
from refill_service.cli import main
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.index_shards import index_shards
from refill_service.demo.local_cluster import LocalCluster

NUM_SAMPLES, VIDEO_BYTES = 120, 5000
SETTINGS: dict[str, Any] = {"memory_bytes": 400_000, "chunk_size": 8, "timeout_seconds": 10}


def video(number: int) -> bytes:
    return np.random.default_rng(number).bytes(VIDEO_BYTES)


def made(number: int) -> dict[str, Any]:
    mask = {"mask.png": b"mask"} if number % 3 == 0 else {}
    return {"__key__": f"clip/{number}", "mp4": video(number), "cls": number % 5, "json": {"n": number}} | mask


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = (tmp_path_factory.mktemp("clips") / "data").as_uri()
    refill.pack(map(made, range(NUM_SAMPLES)), found, blob_bytes=200_000, quiet=True)
    return found


@pytest.fixture
def pods() -> Iterator[PodsInProcess]:
    with PodsInProcess(2) as found:
        yield found


def samples_of(run: Run, epoch: int, direct: bool) -> tuple[dict[int, dict[str, Any]], int]:
    """By id, as the loop gets them, and how many bytes came."""
    decode, found, num_bytes = SampleDecoder(None, None), {}, 0
    run.ranks[0].is_direct = direct
    for start in range(0, run.length(epoch), 20):
        batch = run.ranks[0].batch(epoch, np.arange(start, min(start + 20, run.length(epoch))))
        num_bytes += batch.num_bytes
        for place, sample in enumerate(batch.sample_ids.tolist()):
            assert sample not in found
            found[sample] = decode(batch, place)
    return found, num_bytes


@pytest.mark.parametrize("direct", [True, False])
def test_what_is_not_wanted_stays_with_the_pods(url: str, pods: PodsInProcess, direct: bool) -> None:
    run = Run(pods, url, new_name(), 1, members=["json", "cls"], **SETTINGS)
    found, num_bytes = samples_of(run, 0, direct)
    assert sorted(found) == list(range(NUM_SAMPLES))
    for number, sample in found.items():
        assert sample == {
            "__id__": number,
            "__key__": f"clip/{number}",
            "json": b'{"n": %d}' % number,
            "cls": str(number % 5).encode(),
        }
    assert num_bytes == NUM_SAMPLES * 4 * 512, "more came than two headers and two blocks a sample"
    run.exact_receipt(0)
    ids = np.array([7, 3])
    assert [len(payload) for payload in run.ranks[0].samples(ids).payloads] == [2048, 2048]


def test_byte_ranges_of_a_member(url: str, pods: PodsInProcess) -> None:
    run = Run(pods, url, new_name(), 1, members=["mp4"], ranges={"mp4": (100, 700)}, **SETTINGS)
    found, num_bytes = samples_of(run, 0, True)
    assert sorted(found) == list(range(NUM_SAMPLES))
    for number, sample in found.items():
        assert sample == {"__id__": number, "__key__": f"clip/{number}", "mp4": video(number)[100:800]}
    assert num_bytes == NUM_SAMPLES * (512 + 1024)
    run.exact_receipt(0)
    past = Run(pods, url, new_name(), 1, ranges={"mp4": (VIDEO_BYTES - 10, 700)}, **SETTINGS)
    for number, sample in samples_of(past, 0, True)[0].items():
        assert sample["mp4"] == video(number)[-10:]
        assert sample["json"], "the other members come whole"


def test_a_run_goes_on_with_other_members(url: str, pods: PodsInProcess) -> None:
    """They are no part of the order."""
    run = Run(pods, url, new_name(), 2, members=["json"], **SETTINGS)
    run.take(0, 0, 20)
    states = run.states(0, 20)
    run.ranks[0].end_job()  # else its processes are waited for
    again = Run(pods, url, run.name, 2, states=states, members=["cls"], **SETTINGS)
    again.take(0, 20)
    assert sorted(place for _, place, _ in run.came + again.came) == list(range(NUM_SAMPLES))
    again.check(url)
    again.exact_receipt(0)


def test_damaged_samples_are_gone_without_and_receipts_say_so(url: str, pods: PodsInProcess, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in Path(unquote(urlsplit(url).path)).iterdir():
        (copy / path.name).write_bytes(path.read_bytes())

    async def place_of(sample: int) -> tuple[str, int]:
        dataset = await Dataset.open(copy.as_uri())
        records = await dataset.load_records(sample, sample + 1)
        await dataset.close()
        return dataset.blobs.names[dataset.blobs.blob_of(sample)], int(records.offset[0])

    name, offset = asyncio.run(place_of(17))
    data = bytearray((copy / name).read_bytes())
    data[offset + 600] ^= 1
    (copy / name).write_bytes(data)
    run = Run(pods, copy.as_uri(), new_name(), 1, on_damaged="skip", members=["json"], **SETTINGS)
    connection = run.ranks[0]
    came: list[int] = []
    for start in range(0, run.length(0), 20):
        batch = connection.batch(0, np.arange(start, start + 20))
        assert [batch.sample_ids[place] for place in batch.damaged] in ([], [17])
        came += [sample for place, sample in enumerate(batch.sample_ids.tolist()) if place not in batch.damaged]
    assert sorted(came) == [number for number in range(NUM_SAMPLES) if number != 17]


def test_what_there_is_not_is_one_line(url: str, pods: PodsInProcess, tmp_path: Path) -> None:
    run = Run(pods, url, new_name(), 1, members=["mask.png"], **SETTINGS)
    with pytest.raises(InvalidInput, match=r"sample \d+ \('clip/\d+'\) has no member 'mask.png'; it has 'cls', 'json'"):
        run.take(0)
    (tmp_path / "a.jsonl").write_bytes(b"1\n" * 20)
    asyncio.run(index_shards(tmp_path.as_uri()))
    run = Run(pods, tmp_path.as_uri(), new_name(), 1, members=["json"], **SETTINGS)
    with pytest.raises(InvalidInput, match=r"are of samples in tars, .* this dataset's format is jsonl"):
        run.take(0)
    for more, text in (
        ({"members": "json"}, "must be names"),
        ({"members": []}, "must be names"),
        ({"members": ["J N"]}, "no name of a member"),
        ({"members": ["a,b"]}, "no name of a member"),
        ({"ranges": {"mp4": 5}}, "must be \\(first byte"),
        ({"ranges": {"mp4": (-1, 5)}}, "must be \\(first byte"),
        ({"ranges": {"mp4": (5, 0)}}, r"ranges\['mp4'\] is of no bytes, got \(5, 0\)"),
        ({"members": ["json"], "ranges": {"mp4": (0, 5)}}, "not among members"),
        ({"transform": 3}, "transform must be a function of a sample, got 3"),
        ({"members": ["json"], "policy": "redox"}, "go with policy planned"),
    ):
        with pytest.raises(InvalidInput, match=text):
            PlannedDataset(pods, dataset=url, job=new_name(), **(SETTINGS | more))
    for query in (
        "members=A%20B",
        "members=../x",
        "ranges=mp4",
        "ranges=mp4:-1:5",
        "ranges=mp4:1:5,mp4:2:3",
        "ranges=a:1:2:3",
    ):
        path = f"/v1/jobs/x/planned/batch?plan=1&{query}"
        status, _, body = pods.do(pods.request("client", 0, "POST", path, b""))
        assert status in (400, 404, 422), body


def test_plain_files_have_one_field(pods: PodsInProcess, tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02}.mp4").write_bytes(video(number))
    asyncio.run(index_shards(tmp_path.as_uri()))
    run = Run(pods, tmp_path.as_uri(), new_name(), 1, ranges={"mp4": (10, 20)}, **(SETTINGS | {"chunk_size": 1}))
    found = run.ranks[0].samples(np.arange(20))
    assert [bytes(payload) for payload in found.payloads] == [video(number)[10:30] for number in range(20)]
    other = Run(pods, tmp_path.as_uri(), new_name(), 1, members=["jpg"], **(SETTINGS | {"chunk_size": 1}))
    with pytest.raises(InvalidInput, match="samples are files of one field, 'mp4', and not jpg"):
        other.take(0)


def written(folder: Path, kind: str) -> list[dict[str, Any]]:
    """20 samples of a format, and what the fields of each are."""
    rows: list[dict[str, Any]] = [
        {"Pic": video(n)[: 40 + n], "n": n, "t": "é" * n if n % 3 else None, "b": n % 2 == 0} for n in range(20)
    ]
    if kind in ("parquet", "arrow"):
        schema = pa.schema([("Pic", "binary"), ("n", "int64"), ("t", "string"), ("b", "bool")])
        table = pa.Table.from_pylist(rows, schema)
        if kind == "parquet":
            pq.write_table(table, folder / "a.parquet", row_group_size=7)
        else:
            with pa.ipc.new_stream(folder / "a.arrow", table.schema) as writer:
                writer.write_table(table, max_chunksize=7)
    elif kind == "zip":
        rows = [{"pic": row["Pic"], "n": str(row["n"]).encode()} for row in rows]
        with zipfile.ZipFile(folder / "a.zip", "w") as archive:
            for place, row in enumerate(rows):
                for name, data in row.items():
                    archive.writestr(f"x/{place:02}.{name}", data)
    elif kind == "mds":
        rows = [{name: value for name, value in row.items() if name in ("Pic", "n")} for row in rows]
        samples = [struct.pack("<Iq", len(row["Pic"]), row["n"]) + row["Pic"] for row in rows]
        starts = np.cumsum([4 * (len(samples) + 2), *map(len, samples)]).astype("<u4")
        data = struct.pack("<I", len(samples)) + starts.tobytes() + b"".join(samples)
        (folder / "shard.00000.mds").write_bytes(data)
        about = {"column_names": ["n", "Pic"], "column_encodings": ["int", "bytes"], "column_sizes": [8, None]}
        about |= {"compression": None, "format": "mds", "hashes": [], "samples": len(samples), "size_limit": 1 << 26}
        about |= {"raw_data": {"basename": "shard.00000.mds", "bytes": len(data), "hashes": {}}, "version": 2}
        about |= {"zip_data": None}
        (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [about]}))
    return rows


@pytest.mark.variants("arrow", "mds")
@pytest.mark.parametrize("kind", ["parquet", "arrow", "zip", "mds"])
def test_fields_of_other_formats(pods: PodsInProcess, tmp_path: Path, kind: str) -> None:
    rows = written(tmp_path, kind)
    asyncio.run(index_shards(tmp_path.as_uri()))
    names = list(rows[0])
    pic = names[0]
    for members, ranges in ((names[:1], None), (names[1:], None), (None, {pic: (5, 30)}), ([pic], {pic: (41, 9)})):
        decoder = SampleDecoder(None, None, cut=SampleCut.of(members, ranges))
        run = Run(
            pods, tmp_path.as_uri(), new_name(), 1, members=members, ranges=ranges, memory_bytes=400_000,
            chunk_size=0, timeout_seconds=10,
        )  # fmt: skip
        batch = run.ranks[0].samples(np.arange(20))
        decoder.dataset_is(run.ranks[0].info()["metadata"], lambda: None)
        for number, row in enumerate(rows):
            wanted = {name: value for name, value in row.items() if members is None or name in members}
            if ranges:
                start, length = ranges[pic]
                wanted[pic] = wanted[pic][start : start + length]
            found = decoder(batch, number)
            assert {name: value for name, value in found.items() if name[:2] != "__"} == wanted
        run.take(0)
        run.exact_receipt(0)
        run.ranks[0].end_job()
    others: list[dict[str, Any]] = [{"members": ["other"]}, {"ranges": {"other": (0, 5)}}]
    bad = [(other, "samples have no field 'other'; they have") for other in others]
    if kind == "zip":
        bad = [({"members": ["other"]}, "has none of the members that are wanted; it has 'pic', 'n'")]
    else:
        bad.append(({"ranges": {"n": (0, 1)}}, "ranges are of fields that are bytes, and 'n' is int"))
    for more, says in bad:
        run = Run(
            pods, tmp_path.as_uri(), new_name(), 1, memory_bytes=400_000, chunk_size=0, timeout_seconds=10, **more
        )
        with pytest.raises(InvalidInput, match=says):
            run.take(0)


def test_over_a_network(url: str, tmp_path: Path) -> None:
    """Also batches that are answered in the moment in which they come."""
    with LocalCluster(2, tmp_path, {"memory_bytes": "8MiB", "dataset_urls": url}) as cluster:
        for epoch in range(2):
            found = epoch_of(cluster, url, epoch=epoch, members=["json"], decode=True)
            assert [sample["json"]["n"] for sample in found] == list(range(NUM_SAMPLES))
            assert all(sorted(sample) == ["__id__", "__key__", "json"] for sample in found)


def test_of_a_mixture(url: str, tmp_path: Path) -> None:
    with LocalCluster(2, tmp_path, {"memory_bytes": "8MiB", "dataset_urls": url}) as cluster:
        mixture = refill.Mixture(
            cluster.pod_urls[0], {"clips": url}, job=new_name(), members=["mp4"], ranges={"mp4": (100, 700)}, **SETTINGS
        )
        loader = DataLoader(mixture, batch_size=20, sampler=refill.EpochSampler(mixture), collate_fn=list)
        found = [sample for batch in loader for sample in batch]
        assert sorted(sample["__id__"] for sample in found) == list(range(NUM_SAMPLES))
        for sample in [*found, mixture[7]]:
            assert set(sample) == {"__id__", "__key__", "__dataset__", "mp4"}
            assert sample["mp4"] == video(sample["__id__"])[100:800]
        num_bytes = mixture.fetched()[1]
        assert num_bytes == (NUM_SAMPLES + 1) * (512 + 1024), "more came than what was asked for"


def test_samples_larger_than_what_is_read_together(tmp_path: Path) -> None:
    """Each is read alone, and charged; one that no memory holds is refused with numbers."""
    large = [np.random.default_rng(number).bytes(700_000 if number % 10 == 3 else 2000) for number in range(40)]
    refill.pack([{"bin": each} for each in large], tmp_path.as_uri(), blob_bytes=3_000_000, shuffle=False, quiet=True)
    with PodsInProcess(2, memory_bytes="6MiB") as pods:
        node = pods.node(0)
        assert node.gate.limit_bytes // 4 < 700_000
        ranges = {"bin": (0, 100)}
        run = Run(
            pods,
            tmp_path.as_uri(),
            new_name(),
            1,
            ranges=ranges,
            chunk_size=8,
            memory_bytes=4 << 20,
            timeout_seconds=10,
        )
        found, _ = samples_of(run, 0, True)
        cut = {number: sample["bin"] for number, sample in found.items()}
        assert cut == {number: each[:100] for number, each in enumerate(large)}
        run.exact_receipt(0)
        small = Run(pods, tmp_path.as_uri(), new_name(), 1, chunk_size=1, memory_bytes=300_000, timeout_seconds=10)
        with pytest.raises(RefillError, match=r"70\d,\d{3}|70\d{4}"):
            small.take(0)


def test_a_sample_too_large_for_an_answer_is_refused_when_a_job_is_made(tmp_path: Path) -> None:
    """Where answers are measured by what is in them. Planned orders measure by the mean, and send it."""
    large = [np.random.default_rng(number).bytes(5 << 20 if number == 11 else 2000) for number in range(40)]
    refill.pack([{"bin": each} for each in large], tmp_path.as_uri(), shuffle=False, quiet=True)
    settings: dict[str, Any] = {"chunk_size": 1, "memory_bytes": 14 << 20, "timeout_seconds": 20}
    with PodsInProcess(1, memory_bytes="20MiB", sending_bytes="1MiB") as pods:
        run = Run(pods, tmp_path.as_uri(), new_name(), 1, **settings)
        assert len(samples_of(run, 0, True)[0]) == 40
        run.exact_receipt(0)
        run.ranks[0].end_job()
        says = r"has a sample of 5,24\d,\d{3} bytes, and a pod answers with 5,242,880"
        listed = PlannedDataset(pods, dataset=tmp_path.as_uri(), job=new_name(), order="explicit", **settings)
        with pytest.raises(MemoryTooSmall, match=says):
            listed.connection.info()
    of_pod = {"memory_bytes": "20MiB", "sending_bytes": "1MiB", "dataset_urls": tmp_path.as_uri()}
    with LocalCluster(1, tmp_path, of_pod) as cluster:
        live = refill.CacheDataset(
            cluster.pod_urls[0], dataset=tmp_path.as_uri(), job="live", policy="redox", **settings
        )
        with pytest.raises(MemoryTooSmall, match=says):
            live.connection.info()


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_batch_of_more_than_an_answer_may_have_is_asked_for_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_direct: bool
) -> None:
    monkeypatch.setattr(PlannedRank, "is_direct", is_direct)
    samples = [{"bin": bytes([number]) * 300_000} for number in range(60)]
    refill.pack(samples, tmp_path.as_uri(), shuffle=False, quiet=True)
    with PodsInProcess(2, memory_bytes="20MiB", sending_bytes="1MiB") as pods:
        run = Run(pods, tmp_path.as_uri(), new_name(), 1, chunk_size=1)
        received = run.ranks[0].batch(0, np.arange(60))
        assert sorted(payload[-600] for payload in received.payloads) == list(range(60))
        assert received.sample_ids.tolist() == [payload[-600] for payload in received.payloads]
        run.exact_receipt(0)


def test_large_samples_are_told_of_when_they_are_indexed_or_packed(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "data").mkdir()
    for number in range(2):
        with (tmp_path / "data" / f"{number}.mp4").open("wb") as file:
            file.truncate(65_000_000 + 3_000_000 * number)
    assert main(["index", str(tmp_path / "data"), "--quiet"]) == 0
    assert "warning: the largest sample, number 0 of 1.mp4, has 68,000,000 bytes: pods" in capsys.readouterr().err
    assert main(["pack", str(tmp_path / "data"), str(tmp_path / "packed")]) == 0
    assert "the largest sample, number" in capsys.readouterr().err


names = st.from_regex(r"[a-z0-9_-]{1,5}(\.[a-z]{1,3})?", fullmatch=True)


@given(
    st.lists(names, max_size=5, unique=True),
    st.dictionaries(names, st.tuples(st.integers(0, 2**61), st.integers(1, 9))),
)
def test_what_is_said_is_what_is_understood(members: list[str], ranges: dict[str, tuple[int, int]]) -> None:
    if members:
        ranges = {name: given for name, given in ranges.items() if name in members}
    said = SampleCut.of(members or None, ranges)
    assert SampleCut.parse(**{"members": "", "ranges": ""} | said.query()) == said
