"""`refill index --append`: samples keep their ids, and jobs keep the version that they began with."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tests.membership.planned_in_process import PlannedDataset, Run, new_name
from tests.membership.pods_in_process import PodsInProcess

from refill import EpochSampler
from refill.errors import InvalidInput, JobConflict
from refill_service.cache_core.dataset_index import INDEX_KEY
from refill_service.cli import main
from refill_service.datasets import dataset_reader
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.index_shards import IndexSummary, index_shards
from refill_service.formats.interface import Options

SETTINGS: dict[str, Any] = {"memory_bytes": 100_000, "chunk_size": 8, "timeout_seconds": 10}


def line(number: int) -> bytes:
    return b'{"n": %d, "more": "%s"}\n' % (number, b"x" * (number % 50))


def put(folder: Path, name: str, first: int, end: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"".join(map(line, range(first, end))))


def index(url: str, **more: Any) -> IndexSummary:
    return asyncio.run(index_shards(url, **more))


@pytest.fixture(params=["beside", "elsewhere"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A dataset of 100 samples, to which 60 come in files whose names lie before and behind."""
    folder = tmp_path / "data"
    put(folder, "b.jsonl", 0, 70)
    put(folder, "d.jsonl", 70, 100)
    output = (tmp_path / "index").as_uri() if request.param == "elsewhere" else None
    index(folder.as_uri(), output=output)
    return output or folder.as_uri()


def append(url: str, **more: Any) -> IndexSummary:
    folder = Path(unquote(urlsplit(url).path)).parent / "data"
    put(folder, "a.jsonl", 100, 130)
    put(folder, "e.jsonl", 130, 160)
    return index(url, append=True, **more)


@pytest.fixture
def pods() -> Iterator[PodsInProcess]:
    with PodsInProcess(2) as found:
        yield found


def all_of(run: Run, count: int) -> list[bytes]:
    return [bytes(payload) for payload in run.ranks[0].samples(np.arange(count)).payloads]


@pytest.mark.variants("elsewhere")
def test_a_job_that_runs_keeps_its_version(url: str, pods: PodsInProcess) -> None:
    """Also where a pod is restarted, and reads the dataset anew; a job that begins has all."""
    run = Run(pods, url, new_name(), 2, **SETTINGS)
    run.take(0, 0, 20)
    assert append(url).num_samples == 160
    run.take(0, 20, 30)
    pods.kill(1)
    pods.start(1)
    run.take(0, 30)
    assert sorted(run.positions_of(0)) == list(range(100))
    run.exact_receipt(0)
    run.take(1)
    assert sorted(run.positions_of(1)) == list(range(100))
    new = Run(pods, url, new_name(), 2, **SETTINGS)
    new.take(0)
    assert sorted(new.positions_of(0)) == list(range(160))
    new.check(url)
    assert all_of(new, 160) == [line(number) for number in range(160)], "ids are no longer those of the same samples"


@pytest.mark.variants("beside-load", "elsewhere-resume")
@pytest.mark.parametrize("way", ["resume", "load"])
def test_a_state_goes_on_with_the_version_it_was_made_with(url: str, way: str) -> None:
    with PodsInProcess(2) as pods:
        run = Run(pods, url, new_name(), 2, **SETTINGS)
        run.take(0, 0, 20)
        states, had = run.states(0, 20), run.came
    append(url)
    with PodsInProcess(3) as pods:
        again = Run(pods, url, run.name, 2, states=states, way=way, **SETTINGS)
        assert len(again.datasets[0]) == 100
        again.take(0, 20)
        assert sorted(place for _, place, _ in had + again.came) == list(range(100))
        assert sorted(sample for _, _, sample in had + again.came) == list(range(100))
        again.exact_receipt(0)
        assert all_of(again, 100) == [line(number) for number in range(100)]


def test_a_sampler_counts_what_the_version_of_its_state_has(url: str) -> None:
    """A learning rate's schedule, and a bar of progress, are made of it."""
    with PodsInProcess(2) as pods:
        run = Run(pods, url, new_name(), 2, **SETTINGS)
        run.take(0, 0, 20)
        states = run.states(0, 20)
    append(url)
    with PodsInProcess(2) as pods:
        dataset = PlannedDataset(pods, dataset=url, job=run.name, rank=0, world_size=2, **SETTINGS)
        sampler = EpochSampler(dataset)
        assert (len(sampler), sampler.total_size) == (80, 160)
        sampler.load_state_dict(states[0])
        assert (len(sampler), sampler.total_size, len(dataset)) == (50, 100, 100)


def test_a_version_that_was_not_kept_is_one_clear_line(url: str) -> None:
    with PodsInProcess(1) as pods:
        run = Run(pods, url, new_name(), 1, **SETTINGS)
        run.take(0, 0, 20)
        (state,) = run.states(0, 20)
    append(url)
    (kept,) = Path(unquote(urlsplit(url).path)).glob(f"{INDEX_KEY}.*")
    kept.unlink()
    with PodsInProcess(1) as pods, pytest.raises(JobConflict, match=r"is of version \w{16}, which was not kept; end"):
        PlannedDataset(pods, dataset=url, job=run.name, resume=state, **SETTINGS).register()


@pytest.mark.variants("beside")
def test_versions_follow_one_another(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with PodsInProcess(1) as pods:
        first = Run(pods, url, new_name(), 1, **SETTINGS)
        first.take(0, 0, 20)
        append(url)
        second = Run(pods, url, new_name(), 1, **SETTINGS)
        second.take(0, 0, 20)
        folder = Path(unquote(urlsplit(url).path)).parent / "data"
        put(folder, "c.jsonl", 160, 170)
        assert main(["index", url, "--append"]) == 0
        assert "1 of them are new" in capsys.readouterr().err
        pods.kill(0)
        pods.start(0)
        for run, count in ((first, 100), (second, 160)):
            run.take(0, 20)
            assert sorted(run.positions_of(0)) == list(range(count))
        assert all_of(Run(pods, url, new_name(), 1, **SETTINGS), 170) == [line(number) for number in range(170)]
    before = (Path(unquote(urlsplit(url).path)) / INDEX_KEY).read_bytes()
    assert main(["index", url, "--append"]) == 0
    assert "all 5 files are in the index already" in capsys.readouterr().err
    assert (Path(unquote(urlsplit(url).path)) / INDEX_KEY).read_bytes() == before


def class_files(folder: Path, classes: str, first: int, end: int) -> None:
    for name in classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(first, end):
            (folder / name / f"{number:04}.txt").write_bytes(f"{name}{number}".encode())


@pytest.mark.parametrize("checksums", ["all", "first-read"])
def test_who_reads_the_index_piece_by_piece_reads_its_own(
    tmp_path: Path, checksums: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large dataset, pods read records and labels when they need them."""
    monkeypatch.setattr(dataset_reader, "_FIRST_READ_BYTES", 200)
    class_files(tmp_path, "bc", 0, 200)
    index(tmp_path.as_uri(), checksums=checksums)

    async def read() -> None:
        dataset = await Dataset.open(tmp_path.as_uri())
        class_files(tmp_path, "bd", 200, 300)
        await index_shards(tmp_path.as_uri(), append=True)
        labels = await dataset.labels(0, 400)
        assert labels.tolist() == [0] * 200 + [1] * 200
        pieces = await dataset.load_pieces(np.array([0, 300]), np.array([100, 400]))
        records = await dataset.load_records(0, 400)
        assert pieces.offset.tolist() == records.offset[np.r_[0:100, 300:400]].tolist()
        payload = bytes(await dataset.read_samples(records, 399, 400))
        assert payload == b"c199"
        dataset.verify_sample(payload, records, 399)
        await dataset.check_not_replaced(399)
        await dataset.close()
        newest = await Dataset.open(tmp_path.as_uri())
        assert newest.num_samples == 600
        assert newest.index.metadata["classes"] == ["b", "c", "d"]
        labels = await newest.labels(0, 600)
        assert labels.tolist() == [0] * 200 + [1] * 200 + [0] * 100 + [2] * 100
        assert (await newest.load_records(0, 400)).checksum.tolist() == records.checksum.tolist()
        await newest.close()

    asyncio.run(read())


def test_what_would_change_samples_that_are_there_is_refused(tmp_path: Path) -> None:
    class_files(tmp_path, "bc", 0, 20)
    index(tmp_path.as_uri())
    before = (tmp_path / INDEX_KEY).read_bytes()

    def refused(text: str, **more: Any) -> None:
        with pytest.raises(InvalidInput, match=text) as raised:
            index(tmp_path.as_uri(), append=True, **more)
        assert len(str(raised.value).splitlines()) == 1
        assert (tmp_path / INDEX_KEY).read_bytes() == before
        assert not list(tmp_path.glob(f"{INDEX_KEY}.*"))

    refused("--checksums first-read", checksums="all")
    class_files(tmp_path, "a", 0, 1)
    refused("the folders are other classes now")
    (tmp_path / "a" / "0000.txt").unlink()
    (tmp_path / "b" / "0003.txt").write_bytes(b"longer than it was")
    refused(r"b/0003\.txt is another file")
    (tmp_path / "b" / "0003.txt").unlink()
    refused(r"b/0003\.txt, which the index at .* has, is gone")
    put(tmp_path, "x.jsonl", 0, 1)
    refused("was indexed with --format objects: give that again", format_name="jsonl")


@pytest.mark.parametrize(
    ("given", "other", "said"),
    [
        (Options(columns=("n", "steps")), Options(), "with --columns n,steps: do so again"),
        (Options(), Options(columns=("n",)), "with --columns n,steps,x: do so again"),
        (
            Options(columns=("n", "steps"), windows=(4, 2), episodes="n"),
            Options(columns=("n", "steps"), windows=(8, 4), episodes="steps"),
            "with --windows 4,2 --episodes n: do so again",
        ),
        (Options(), Options(windows=(4, 2), episodes="n"), "without --windows or --episodes: do so again"),
    ],
)
def test_options_that_were_given_before_are_named_where_they_are_others(
    tmp_path: Path, given: Options, other: Options, said: str
) -> None:
    rows = {"n": [0] * 8, "steps": [1] * 8, "x": [0.5] * 8}
    parquet.write_table(pyarrow.table(rows), tmp_path / "a.parquet")
    index(tmp_path.as_uri(), options=given)
    parquet.write_table(pyarrow.table(rows), tmp_path / "b.parquet")
    with pytest.raises(InvalidInput, match=f"was indexed {said}, or make another index") as raised:
        index(tmp_path.as_uri(), append=True, options=other)
    assert "{" not in str(raised.value)
    before = index(tmp_path.as_uri(), append=True, options=given).num_blobs
    parquet.write_table(pyarrow.table(rows | {"x": [1] * 8}), tmp_path / "0.parquet")
    if "x" not in (given.columns or ("x",)):
        assert index(tmp_path.as_uri(), append=True, options=given).num_blobs > before
    else:
        with pytest.raises(InvalidInput, match=r"what lies there has columns .*'x', 'int64'.* was indexed with"):
            index(tmp_path.as_uri(), append=True, options=given)
