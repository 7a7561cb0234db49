"""Parquet and Arrow, where they lie: rows that pods decode, held against what pyarrow and datasets read."""

from __future__ import annotations

import asyncio
import base64
import io
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from refill import CacheDataset
from refill.errors import DatasetReplaced, InvalidInput, MemoryTooSmall, SampleDamaged
from refill.formats import parser_of
from refill_service.cli import main
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.index_writer import IndexWriter
from refill_service.demo.local_cluster import LocalCluster
from refill_service.formats import parquet, rows
from refill_service.formats.interface import records_of
from tests.conftest import S3Server
from tests.formats.reading import asked_of, epoch_of, opened, put

OF_PYARROW_17 = (
    "UEFSMRUEFRQVFEwVBBUAEgAAAQAAAGEBAAAAYhUAFRIVEiwVBhUQFQYVBhw2ACgBYhgBYQAAAAIAAAAGAQEDAiaAARwVDBk1AAYQGRgEdGV4dBUA"
    "FgYWeBZ4JjgmCBw2ACgBYhgBYQAZLBUEFQAVAgAVABUQFQIAAAAVBBksNQAYBnNjaGVtYRUCABUMJQIYBHRleHQlAEwcAAAAFgYZHBkcJoABHBUM"
    "GTUABhAZGAR0ZXh0FQAWBhZ4FngmOCYIHDYAKAFiGAFhABksFQQVABUCABUAFRAVAgAAABZ4FgYmCBZ4FAAAKCBwYXJxdWV0LWNwcC1hcnJvdyB2"
    "ZXJzaW9uIDE3LjAuMBkcHAAAAJUAAABQQVIx"
)
"""Column ``text``, a, b, a, as pyarrow 17.0.0 wrote it: with a dictionary, and without size statistics."""
PICTURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
SCHEMA = pa.schema(
    [
        ("n", pa.int64()), ("text", pa.string()), ("long", pa.large_string()), ("image", PICTURE),
        ("data", pa.binary()), ("four", pa.binary(4)), ("ids", pa.list_(pa.int32())),
        ("pair", pa.list_(pa.float32(), 2)), ("flags", pa.large_list(pa.bool_())), ("yes", pa.bool_()),
        ("half", pa.float16()), ("f", pa.float64()), ("u", pa.uint8()),
        ("meta", pa.struct([("x", pa.int16()), ("y", pa.struct([("z", pa.string())]))])),
    ]
)  # fmt: skip


def made_rows(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Each column has nulls, and values of many lengths."""
    draws = np.random.default_rng(seed)

    def some(value: Any) -> Any:
        return None if draws.random() < 0.15 else value

    return [
        {
            "n": some(int(draws.integers(-(2**62), 2**62))),
            "text": some("é" * int(draws.integers(0, 40))),
            "long": some("x" * int(draws.integers(0, 9))),
            "image": some({"bytes": some(draws.bytes(int(draws.integers(0, 300)))), "path": some(f"{place}.png")}),
            "data": some(draws.bytes(int(draws.integers(0, 5)))),
            "four": some(draws.bytes(4)),
            "ids": some(draws.integers(-9, 9, int(draws.integers(0, 7))).tolist()),
            "pair": some(draws.integers(0, 9, 2).astype(float).tolist()),
            "flags": some((draws.random(int(draws.integers(0, 20))) < 0.5).tolist()),
            "yes": some(bool(draws.random() < 0.5)),
            "half": some(float(np.float16(draws.random()))),
            "f": some(draws.random()),
            "u": some(int(draws.integers(0, 256))),
            "meta": some({"x": some(int(draws.integers(0, 99))), "y": some({"z": some("deep")})}),
        }
        for place in range(count)
    ]


def as_sample(row: dict[str, Any]) -> dict[str, Any]:
    """What a row becomes: structs laid flat, and bytes of pictures under the name of their column."""
    found = {name: value for name, value in row.items() if name not in ("image", "meta")}
    image, meta = row["image"] or {}, row["meta"] or {}
    found |= {"image": image.get("bytes"), "image.path": image.get("path"), "meta.x": meta.get("x")}
    return found | {"meta.y.z": (meta.get("y") or {}).get("z")}


def same(found: Any, made: Any) -> bool:
    if isinstance(found, np.ndarray):
        return isinstance(made, list) and found.tolist() == made
    return type(found) is type(made) and bool(found == made)


def check(found: list[dict[str, Any]], made: list[dict[str, Any]]) -> None:
    assert len(found) == len(made)
    for sample, row in zip(found, made, strict=True):
        wanted = as_sample(row)
        assert sample.keys() - {"__key__", "__id__"} == wanted.keys()
        for name, value in wanted.items():
            assert same(sample[name], value), (name, sample[name], value)


def write(folder: Path, kind: str, table: pa.Table, name: str = "a") -> None:
    folder.mkdir(exist_ok=True)
    if kind == "stream":
        with pa.ipc.new_stream(folder / f"{name}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=23)
    elif kind == "file":
        with pa.ipc.new_file(folder / f"{name}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=23)
    else:
        more: dict[str, Any] = {"compression": kind, "data_page_size": 500}
        more |= {"data_page_version": "2.0", "write_page_checksum": True} if kind == "zstd" else {}
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=23, **more)


def said(folder: Path, capsys: Any, *more: str) -> str:
    """What it says that refuses."""
    assert main(["index", str(folder), "--quiet", *more]) == 2
    assert not (folder / "refill.index").exists()
    found: str = capsys.readouterr().err
    assert len(found.splitlines()) == 1
    return found


KINDS = ["none", "snappy", "zstd", "stream", "file"]


class TestEachRow:
    @pytest.mark.parametrize("kind", KINDS)
    def test_is_what_pyarrow_reads(self, tmp_path: Path, pod: LocalCluster, kind: str) -> None:
        made = made_rows(100)
        table = pa.Table.from_pylist(made, SCHEMA)
        write(tmp_path, kind, table.slice(0, 60))
        write(tmp_path, kind, table.slice(60), "b")
        assert main(["index", str(tmp_path), "--quiet", "--checksums", "all"]) == 0
        index, records = opened(tmp_path.as_uri())
        assert [int(count) for count in np.diff(index.blobs.first_sample)] == [23, 23, 14, 23, 17]
        assert index.header.has_checksums
        assert int(records.length.sum()) == int(index.blobs.size_bytes.sum())
        check(epoch_of(pod, tmp_path.as_uri(), chunk_size=None), made)
        check(epoch_of(pod, tmp_path.as_uri(), chunk_size=None, policy="redox"), made)
        assert main(["inspect", str(tmp_path), "--verify", "--quiet"]) == 0

    @pytest.mark.parametrize("kind", KINDS)
    def test_is_the_same_by_an_index_of_headers_alone(
        self, tmp_path: Path, pod: LocalCluster, kind: str, capsys: Any
    ) -> None:
        made = made_rows(100)
        for row in made:  # of Arrow, a null in place of a pair can't be told from nulls in it
            row["pair"] = row["pair"] or [1.0, 2.0]
        table = pa.Table.from_pylist(made, SCHEMA)
        write(tmp_path, kind, table.slice(0, 60))
        write(tmp_path, kind, table.slice(60), "b")
        assert main(["index", str(tmp_path), "--quiet", "--checksums", "first-read"]) == 0
        index, records = opened(tmp_path.as_uri())
        assert [int(count) for count in np.diff(index.blobs.first_sample)] == [23, 23, 14, 23, 17]
        assert not index.header.has_checksums
        assert all(index.blobs.etags or ())
        assert int(records.length.sum()) == int(index.blobs.size_bytes.sum())
        check(epoch_of(pod, tmp_path.as_uri(), chunk_size=None), made)
        # Memory for a few groups, so that what is longer than the mean makes others give way.
        check(epoch_of(pod, tmp_path.as_uri(), chunk_size=None, memory_bytes=200_000), made)
        assert main(["inspect", str(tmp_path), "--verify", "--quiet"]) == 0
        assert "means of groups: min" in capsys.readouterr().out

    @pytest.mark.parametrize("kind", ["snappy", "stream"])
    def test_has_the_columns_that_were_chosen(self, tmp_path: Path, pod: LocalCluster, kind: str) -> None:
        made = made_rows(50)
        write(tmp_path, kind, pa.Table.from_pylist(made, SCHEMA))
        assert main(["index", str(tmp_path), "--quiet", "--columns", "meta, text"]) == 0
        found = epoch_of(pod, tmp_path.as_uri(), chunk_size=None)
        assert {name for name in found[0] if name[:2] != "__"} == {"text", "meta.x", "meta.y.z"}
        assert [sample["text"] for sample in found] == [row["text"] for row in made]

    @pytest.mark.parametrize("kind", ["zstd", "stream"])
    def test_with_lists_of_text_and_structs(self, tmp_path: Path, pod: LocalCluster, kind: str, capsys: Any) -> None:
        words = [["a", None, "é" * place] if place % 4 else None for place in range(60)]
        turns = [[{"role": "user", "content": "x" * n, "more": {"n": n, "at": [[0.1, None]]}}] * n for n in range(60)]
        type_ = pa.list_(
            pa.struct(
                [
                    ("role", pa.string()),
                    ("content", pa.large_string()),
                    ("more", pa.struct([("n", pa.int64()), ("at", pa.list_(pa.list_(pa.float64())))])),
                ]
            )
        )
        table = pa.table(
            {"n": range(60), "words": words, "meta": [{"turns": each} for each in turns]},
            pa.schema([("n", pa.int32()), ("words", pa.list_(pa.string())), ("meta", pa.struct([("turns", type_)]))]),
        )
        write(tmp_path, kind, table)
        assert main(["index", str(tmp_path)]) == 0
        assert "no header says how long the lists of column 'words' are as JSON" in capsys.readouterr().err
        found = epoch_of(pod, tmp_path.as_uri(), chunk_size=None)
        theirs = table.to_pylist()
        assert [(each["n"], each["words"], each["meta.turns"]) for each in found] == [
            (row["n"], row["words"], row["meta"]["turns"]) for row in theirs
        ]

    def test_of_a_column_with_a_dot_beside_a_struct(self, tmp_path: Path, pod: LocalCluster) -> None:
        rows = [{"user": {"id": f"s{n}", "x": 1}, "user.id": f"flat{n}", "m": {"n": 0}, "m.n": n} for n in range(30)]
        write(tmp_path, "snappy", pa.Table.from_pylist(rows))
        for column in ("user.id", "m.n"):
            assert main(["index", str(tmp_path), "--quiet", "--force", "--columns", column]) == 0
            found = epoch_of(pod, tmp_path.as_uri(), chunk_size=None)
            assert [sample[column] for sample in found] == [row[column] for row in rows]

    def test_of_identifiers(self, tmp_path: Path, pod: LocalCluster) -> None:
        """As DuckDB writes UUIDs: without a schema of Arrow."""
        made = [bytes([n]) * 16 for n in range(30)]
        stored = pa.array([None, *made], pa.binary(16))
        table = pa.table({"id": pa.ExtensionArray.from_storage(pa.uuid(), stored)})
        pq.write_table(table, tmp_path / "a.parquet", store_schema=False)
        assert main(["index", str(tmp_path), "--quiet"]) == 0
        assert [each["id"] for each in epoch_of(pod, tmp_path.as_uri(), chunk_size=None)] == [None, *made]

    def test_of_parquet_with_categories(self, tmp_path: Path, pod: LocalCluster) -> None:
        words = ["cat", "dog", None, "cat"] * 20
        write(tmp_path, "snappy", pa.table({"kind": pa.array(words).dictionary_encode()}))
        assert main(["index", str(tmp_path), "--quiet"]) == 0
        assert [sample["kind"] for sample in epoch_of(pod, tmp_path.as_uri(), chunk_size=None)] == words

    def test_is_read_by_workers_and_decoded(self, tmp_path: Path, pod: LocalCluster) -> None:
        """As datasets writes pictures, with its features in the schema."""
        datasets = pytest.importorskip("datasets")
        pixels = [np.random.default_rng(place).integers(0, 255, (8, 6, 3)).astype(np.uint8) for place in range(40)]
        pictures = []
        for each in pixels:
            out = io.BytesIO()
            Image.fromarray(each).save(out, format="PNG")
            pictures.append({"bytes": out.getvalue(), "path": None})
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
        made = datasets.Dataset.from_dict({"image": pictures, "label": [place % 2 for place in range(40)]}, features)
        made.to_parquet(str(tmp_path / "a.parquet"), batch_size=16)
        made.save_to_disk(str(tmp_path / "disk"), num_shards=2)
        (tmp_path / "p").mkdir()
        (tmp_path / "a.parquet").rename(tmp_path / "p" / "a.parquet")
        theirs = datasets.load_from_disk(str(tmp_path / "disk"))
        for folder in ("p", "disk"):
            url = (tmp_path / folder).as_uri()
            assert main(["index", str(tmp_path / folder), "--quiet"]) == 0
            raw = epoch_of(pod, url, chunk_size=None)
            assert [sample["image"] for sample in raw] == [each["bytes"] for each in pictures]
            found = epoch_of(pod, url, chunk_size=None, decode=True)
            for sample, row, each in zip(found, theirs, pixels, strict=True):
                assert np.array_equal(sample["image"], each)
                assert np.array_equal(sample["image"], np.asarray(row["image"]))
                assert sample["label"] == row["label"]


class TestWhatIsRead:
    def test_a_group_once_an_epoch_and_chosen_columns_alone(
        self, tmp_path: Path, s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wide = {"n": pa.array(range(4000)), "blob": pa.array([bytes([n % 256]) * 1500 for n in range(4000)])}
        more: dict[str, Any] = {"compression": "none", "use_dictionary": False}
        pq.write_table(pa.table(wide), tmp_path / "a.parquet", row_group_size=1000, **more)
        url = put(s3_environment, tmp_path)
        size = (tmp_path / "a.parquet").stat().st_size
        with asked_of(s3_environment) as asked:
            monkeypatch.setenv("AWS_ENDPOINT_URL", asked.url)
            assert main(["index", url, "--quiet", "--columns", "n"]) == 0
            _, num_bytes = asked.of("a.parquet")
            assert num_bytes < size / 50
            asked.reads.clear()
            with LocalCluster(1, tmp_path, {"memory_bytes": "64MiB", "dataset_urls": "s3://"}) as pods:
                found = epoch_of(pods, url, chunk_size=None, num_epochs=1)
            assert sorted(sample["n"] for sample in found) == list(range(4000))
            requests, num_bytes = asked.of("a.parquet")
            assert requests == 4 + 1  # and the footer
            assert num_bytes < size / 50

    @pytest.mark.parametrize("kind", ["parquet", "arrow"])
    def test_an_index_reads_no_more_than_headers(
        self, tmp_path: Path, s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        """Of Parquet two requests a file. Of Arrow, whose batches are found one behind the other, one for each."""
        texts = [f"{place} " * (place % 40) for place in range(80)]
        for name in "ab":
            data = [np.random.default_rng(place).bytes(100_000) for place in range(80)]
            table = pa.table({"image": data, "text": texts})
            if kind == "parquet":
                pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=20)
            else:
                with pa.ipc.new_stream(tmp_path / f"{name}.arrow", table.schema) as writer:
                    writer.write_table(table, max_chunksize=40)
        url = put(s3_environment, tmp_path)
        with asked_of(s3_environment) as asked:
            monkeypatch.setenv("AWS_ENDPOINT_URL", asked.url)
            assert main(["index", url, "--quiet", "--checksums", "first-read"]) == 0
            requests, num_bytes = asked.of(f"b.{kind}")
            assert requests <= (2 if kind == "parquet" else 2 + 2)  # the schema, two batches, and the end mark
            assert num_bytes <= (tmp_path / f"b.{kind}").stat().st_size / 1000
            more, bytes_of_first = asked.of(f"a.{kind}")
            assert more <= requests + (kind == "arrow")
            assert bytes_of_first <= num_bytes + (64 << 10) * (kind == "arrow")  # looked at for its schema
            with LocalCluster(1, tmp_path, {"memory_bytes": "64MiB", "dataset_urls": "s3://"}) as pods:
                found = epoch_of(pods, url, chunk_size=None, memory_bytes=30 << 20, num_epochs=1)
        assert [sample["text"] for sample in found] == 2 * texts
        assert bytes(found[-1]["image"]) == data[-1]

    def test_columns_that_folders_name_are_left_out_and_a_line_says_so(self, tmp_path: Path, capsys: Any) -> None:
        pq.write_to_dataset(pa.table({"v": range(4), "label": [0, 0, 1, 1]}), tmp_path, partition_cols=["label"])
        assert main(["index", str(tmp_path)]) == 0
        assert "; columns that folders name (label) are left out" in capsys.readouterr().err

    def test_one_row_group_is_served_by_several_pods(self, tmp_path: Path) -> None:
        """It is decoded whole: a third of it is less than a pod needs."""
        table = pa.table({"image": [np.random.default_rng(place).bytes(20_000) for place in range(1000)]})
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=1000)
        assert main(["index", str(tmp_path), "--quiet"]) == 0
        with LocalCluster(3, tmp_path, {"memory_bytes": "128MiB"}) as pods:
            found = epoch_of(pods, tmp_path.as_uri(), chunk_size=None, memory_bytes=0, num_epochs=1)
        assert len(found) == 1000

    def test_large_batches_of_arrow_are_indexed_by_headers(self, tmp_path: Path, capsys: Any) -> None:
        for size, said in ((100, "these columns are read and decoded once"), (9_000_000, "read are headers alone")):
            write(tmp_path, "stream", pa.table({"data": [bytes(size)]}))
            assert main(["index", str(tmp_path), "--force"]) == 0
            assert said in capsys.readouterr().err

    def test_rows_that_take_more_than_their_file_says(self, tmp_path: Path) -> None:
        """An index of somebody's, which has pods set aside less than they would take."""
        write(tmp_path, "none", pa.table({"data": [bytes(1000)] * 23}))
        assert main(["index", str(tmp_path), "--quiet"]) == 0
        index, records = opened(tmp_path.as_uri())
        (tmp_path / "index").mkdir()
        with IndexWriter(tmp_path / "index", has_checksums=False) as writer:
            small = records_of(records.offset // 2, records.length // 2)
            assert index.blobs.etags is not None
            size = int(index.blobs.size_bytes[0]) // 2
            writer.add_blob(index.blobs.names[0], size, [small], None, index.blobs.etags[0])
            writer.finish(index.metadata).rename(tmp_path / "refill.index")

        async def read() -> None:
            dataset = await Dataset.open(tmp_path.as_uri())
            try:
                with pytest.raises(SampleDamaged, match=r"its rows take more than the 11,\d+ bytes"):
                    await dataset.read_samples(await dataset.load_records(0, 23), 0, 1)
            finally:
                await dataset.close()

        asyncio.run(read())

    def test_who_needs_to_know_how_long_rows_are_is_told_what_to_do(self, tmp_path: Path, pod: LocalCluster) -> None:
        write(tmp_path, "snappy", pa.table({"text": ["x"] * 50}))
        assert main(["index", str(tmp_path), "--quiet"]) == 0
        for policy in ("redox", "exact"):
            why = f"policy {policy} needs to know how long each sample is.*--checksums all"
            with pytest.raises(InvalidInput, match=why):
                epoch_of(pod, tmp_path.as_uri(), chunk_size=None, policy=policy)
        dataset = CacheDataset(pod.pod_urls[0], dataset=tmp_path.as_uri(), job="lengths", policy="planned")
        try:
            with pytest.raises(InvalidInput, match=r"an order or packing by length needs to know"):
                dataset.lengths  # noqa: B018
        finally:
            dataset.end_job()

    def test_rows_of_numbers_alone_are_as_long_as_headers_say(self, tmp_path: Path, pod: LocalCluster) -> None:
        write(tmp_path, "snappy", pa.table({"n": range(50), "yes": [True, None] * 25}))
        assert main(["index", str(tmp_path), "--quiet"]) == 0
        _, records = opened(tmp_path.as_uri())
        assert (set(records.length.tolist()), records.has_checksums) == ({1 + 8 + 1}, False)
        found = epoch_of(pod, tmp_path.as_uri(), chunk_size=None, policy="redox")
        assert [(sample["n"], sample["yes"]) for sample in found] == [(n, None if n % 2 else True) for n in range(50)]

    def test_files_that_do_not_say_how_long_values_are_are_read(self, tmp_path: Path, capsys: Any) -> None:
        (tmp_path / "a.parquet").write_bytes(base64.b64decode(OF_PYARROW_17))
        assert "column 'text' are, which has a dictionary" in said(tmp_path, capsys, "--checksums", "first-read")
        assert main(["index", str(tmp_path)]) == 0
        why = "for lengths and checksums of rows: the footer does not say how long the values of column 'text' are"
        assert why in capsys.readouterr().err
        assert opened(tmp_path.as_uri())[0].header.has_checksums
        # The first file says it, and another one does not.
        (tmp_path / "refill.index").unlink()
        (tmp_path / "a.parquet").rename(tmp_path / "b.parquet")
        pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "a.parquet")
        error = said(tmp_path, capsys)
        assert "b.parquet" in error
        assert "how long the values of column 'text' are" in error
        assert "index it with --checksums all" in error

    @pytest.mark.parametrize("kind", ["snappy", "stream"])
    @pytest.mark.parametrize("checksums", ["all", "first-read"])
    def test_files_that_are_added(self, tmp_path: Path, pod: LocalCluster, kind: str, checksums: str) -> None:
        write(tmp_path, kind, pa.table({"text": ["x" * place for place in range(40)]}), "b")
        assert main(["index", str(tmp_path), "--quiet", "--checksums", checksums]) == 0
        write(tmp_path, kind, pa.table({"text": ["y" * place for place in range(30)]}), "a")
        assert main(["index", str(tmp_path), "--quiet", "--append"]) == 0
        index, _ = opened(tmp_path.as_uri())
        assert index.header.has_checksums == (checksums == "all")
        texts = [sample["text"] for sample in epoch_of(pod, tmp_path.as_uri(), chunk_size=None)]
        assert texts == ["x" * place for place in range(40)] + ["y" * place for place in range(30)]

    def test_nothing_is_added_beside_a_file_that_was_replaced(self, tmp_path: Path, capsys: Any) -> None:
        """Its checksums are those of the rows that it had."""
        write(tmp_path, "snappy", pa.table({"text": ["x"] * 10}), "a")
        assert main(["index", str(tmp_path), "--quiet", "--checksums", "all"]) == 0
        before = (tmp_path / "refill.index").read_bytes()
        write(tmp_path, "snappy", pa.table({"text": ["y"] * 25}), "a")
        write(tmp_path, "snappy", pa.table({"text": ["z"]}), "b")
        assert main(["index", str(tmp_path), "--quiet", "--append"]) == 2
        assert "a.parquet is another file than the one that the index" in capsys.readouterr().err
        assert (tmp_path / "refill.index").read_bytes() == before

    def test_a_file_of_several_groups_counts_as_one(self, tmp_path: Path, capsys: Any) -> None:
        for name, count in (("a", 40), ("b", 0), ("c", 60)):
            write(tmp_path, "snappy", pa.table({"text": pa.array(["x"] * count, pa.string())}), name)
        assert main(["index", str(tmp_path), "--quiet"]) == 0
        assert "indexed 100 samples in 3 files" in capsys.readouterr().out
        write(tmp_path, "snappy", pa.table({"text": ["y"] * 50}), "d")
        for _ in range(2):  # the second time nothing is new
            assert main(["index", str(tmp_path), "--quiet", "--append"]) == 0
            assert "indexed 150 samples in 4 files" in capsys.readouterr().out

    def test_a_file_without_rows_is_added_to(self, tmp_path: Path, pod: LocalCluster) -> None:
        write(tmp_path, "snappy", pa.table({"text": pa.array([], pa.string())}), "a")
        write(tmp_path, "snappy", pa.table({"text": ["x", "y"]}), "b")
        assert main(["index", str(tmp_path), "--quiet"]) == 0
        write(tmp_path, "snappy", pa.table({"text": ["z"]}), "c")
        assert main(["index", str(tmp_path), "--quiet", "--append"]) == 0
        assert [sample["text"] for sample in epoch_of(pod, tmp_path.as_uri(), chunk_size=None)] == ["x", "y", "z"]

    def test_smaller_chunks_are_refused(self, tmp_path: Path, pod: LocalCluster) -> None:
        write(tmp_path, "snappy", pa.table({"n": range(100)}))
        assert main(["index", str(tmp_path), "--quiet", "--checksums", "all"]) == 0
        for policy in ("planned", "redox"):
            with pytest.raises(InvalidInput, match="up to 23 rows, which is decoded whole: leave chunk_size out"):
                epoch_of(pod, tmp_path.as_uri(), chunk_size=8, policy=policy)

    def test_samples_that_are_asked_for_together_are_decoded_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(tmp_path, "snappy", pa.table({"n": range(23)}))
        assert main(["index", str(tmp_path), "--quiet"]) == 0
        count = 0
        decode = rows.rows_of

        def counted(*given: Any) -> rows.Block:
            nonlocal count
            count += 1
            return decode(*given)

        monkeypatch.setattr(parquet, "rows_of", counted)

        async def read() -> None:
            dataset = await Dataset.open(tmp_path.as_uri())
            try:
                records = await dataset.load_records(0, 23)
                reads = [dataset.read_samples(records, place, place + 1) for place in range(23)]
                for place, data in enumerate(await asyncio.gather(*reads)):
                    dataset.verify_sample(data, records, place)
            finally:
                await dataset.close()

        asyncio.run(read())
        assert count == 1

    def test_a_file_that_was_replaced_ends_the_run(self, tmp_path: Path) -> None:
        write(tmp_path, "none", pa.table({"n": range(100)}))
        assert main(["index", str(tmp_path), "--quiet"]) == 0

        async def read() -> None:
            dataset = await Dataset.open(tmp_path.as_uri())
            try:
                records = await dataset.load_records(0, 100)
                await dataset.read_samples(records, 0, 1)
                write(tmp_path, "none", pa.table({"n": range(1, 101)}))
                with pytest.raises(DatasetReplaced):
                    await dataset.read_samples(records, 30, 31)
            finally:
                await dataset.close()

        asyncio.run(read())

    def test_rows_that_are_others_than_when_they_were_indexed_are_damaged(self, tmp_path: Path) -> None:
        write(tmp_path, "none", pa.table({"n": range(100)}))
        assert main(["index", str(tmp_path), "--quiet", "--checksums", "all"]) == 0
        write(tmp_path, "none", pa.table({"n": range(1, 101)}))

        async def read() -> None:
            dataset = await Dataset.open(tmp_path.as_uri())
            try:
                records = await dataset.load_records(0, 100)
                data = await dataset.read_samples(records, 0, 1)
                with pytest.raises(SampleDamaged, match=r"a.parquet#0,.*its checksum is wrong"):
                    dataset.verify_sample(data, records, 0)
            finally:
                await dataset.close()

        asyncio.run(read())


class TestRefused:
    @pytest.mark.parametrize(
        ("value", "given", "type_"),
        [
            ([b"x"], None, "list<item: binary>"),
            ("x", pa.string_view(), "string_view"),
            ([{"at": 0}], pa.list_(pa.struct([("at", pa.timestamp("us"))])), "list<item: struct<at: time"),
            (0, pa.timestamp("us"), "timestamp[us]"),
            (None, None, "null"),
            ([(1, 2)], pa.map_(pa.int8(), pa.int8()), "map<int8, int8>"),
        ],
    )
    def test_types_that_rows_have_not(
        self, tmp_path: Path, capsys: Any, value: Any, given: pa.DataType | None, type_: str
    ) -> None:
        """(Arrays are made here: with the first one pyarrow imports pandas.)"""
        write(tmp_path, "stream", pa.table({"n": [1], "x": pa.array([value], given), "t": ["y"]}))
        error = said(tmp_path, capsys)
        assert f"column 'x' is of type {type_}" in error
        assert "or leave it out: --columns n,t" in error

    def test_a_group_that_is_too_large(self, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(parquet, "MOST_GROUP_BYTES", 1000)
        write(tmp_path, "none", pa.table({"data": [bytes([n]) * 100 for n in range(23)]}))
        error = said(tmp_path, capsys)
        assert "a.parquet: can't be read from byte" in error
        assert "row group 0: it takes 2," in error
        assert "write it with smaller row groups (row_group_size=)" in error

    def test_few_bytes_that_become_many(self, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """A dictionary of one value of 10 kB, a thousand times."""
        for module in (parquet, rows):
            monkeypatch.setattr(module, "MOST_GROUP_BYTES", 1 << 20)
        pq.write_table(pa.table({"data": ["x" * 10_000] * 1000}), tmp_path / "a.parquet")
        assert (tmp_path / "a.parquet").stat().st_size < 50_000
        assert "bytes decoded, and a group may take 1,048,576" in said(tmp_path, capsys)

    def test_pages_that_claim_more_than_their_column(self, tmp_path: Path, capsys: Any) -> None:
        pq.write_table(pa.table({"n": range(100)}), tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
        data = bytearray((tmp_path / "a.parquet").read_bytes())
        header = data.index(b"\x15\x00\x15", 4)  # a data page; then how large it becomes
        data[header + 3 : header + 5] = b"\xfe\xff"  # and the rest of the header is another field
        (tmp_path / "a.parquet").write_bytes(data)
        assert "a.parquet: can't be read from byte 4 on" in said(tmp_path, capsys, "--checksums", "all")

    @pytest.mark.parametrize(
        ("name", "data", "says"),
        [
            ("a.parquet", b"PAR1" + bytes(20) + struct.pack("<I", 10) + b"PARE", "it is encrypted, and pods have no"),
            ("a.parquet", b"PAR1" + bytes(20) + struct.pack("<I", 99) + b"PAR1", "or cut off"),
            ("a.parquet", b"PAR1" + bytes(20) + struct.pack("<I", 10) + b"PAR1", "its footer can't be read"),
            ("a.parquet", b"", "it is no file of Parquet"),
            ("a.arrow", b"", "it ends within a message"),
            ("a.arrow", b"x" * 100, "a message begins without its mark"),
            ("a.arrow", struct.pack("<II", 0xFFFFFFFF, 2**31), "the file is cut off, or damaged"),
        ],
    )
    def test_what_is_no_table(self, tmp_path: Path, capsys: Any, name: str, data: bytes, says: str) -> None:
        (tmp_path / name).write_bytes(data)
        assert says in said(tmp_path, capsys)

    def test_compressed_arrow_and_dictionaries_in_it(self, tmp_path: Path, capsys: Any) -> None:
        pa.feather = pytest.importorskip("pyarrow.feather")
        pa.feather.write_feather(pa.table({"n": range(1000)}), tmp_path / "a.feather", compression="lz4")
        assert "it is compressed, as Feather is: write it anew without" in said(tmp_path, capsys)
        (tmp_path / "a.feather").unlink()
        write(tmp_path, "stream", pa.table({"kind": pa.array(["x", "y"]).dictionary_encode()}))
        assert "it has columns of dictionaries" in said(tmp_path, capsys)

    def test_arrow_that_was_cut_off_between_batches(self, tmp_path: Path, capsys: Any) -> None:
        write(tmp_path, "file", pa.table({"n": range(46)}))
        whole = (tmp_path / "a.arrow").read_bytes()
        second = whole.rindex(b"\xff\xff\xff\xff", 0, whole.rindex(b"\xff\xff\xff\xff\0\0\0\0"))
        (tmp_path / "a.arrow").write_bytes(whole[:second])
        assert "it ends without the mark of its end, truncated?" in said(tmp_path, capsys)

    def test_columns_that_are_encrypted_under_a_plain_footer(
        self, tmp_path: Path, pod: LocalCluster, capsys: Any
    ) -> None:
        encryption = pytest.importorskip("pyarrow.parquet.encryption")

        class Keys(encryption.KmsClient):  # type: ignore[misc, name-defined]
            def __init__(self, config: Any) -> None:
                super().__init__()

            def wrap_key(self, key: bytes, master: str) -> bytes:
                return base64.b64encode(key)

        config = encryption.EncryptionConfiguration(footer_key="f", column_keys={"c": ["b"]}, plaintext_footer=True)
        secrets = encryption.CryptoFactory(Keys).file_encryption_properties(encryption.KmsConnectionConfig(), config)
        table = pa.table({"a": range(5), "b": ["x"] * 5})
        with pq.ParquetWriter(tmp_path / "a.parquet", table.schema, encryption_properties=secrets) as writer:
            writer.write_table(table)
        assert "column 'b' is encrypted, and pods have no keys" in said(tmp_path, capsys)
        assert main(["index", str(tmp_path), "--quiet", "--columns", "a"]) == 0
        assert [each["a"] for each in epoch_of(pod, tmp_path.as_uri(), chunk_size=None)] == list(range(5))

    def test_lists_with_nulls_in_them(self, tmp_path: Path, capsys: Any) -> None:
        write(tmp_path, "snappy", pa.table({"x": pa.array([[1], [2, None]])}))
        assert "column 'x' has a null in a list" in said(tmp_path, capsys)

    def test_files_with_other_columns_than_the_first(self, tmp_path: Path, capsys: Any) -> None:
        write(tmp_path, "snappy", pa.table({"x": [1]}))
        write(tmp_path, "snappy", pa.table({"x": ["1"]}), "b")
        error = said(tmp_path, capsys)
        assert "b.parquet" in error
        assert "its columns are not those of the first file" in error

    def test_options_of_others_and_columns_that_are_not_there(self, tmp_path: Path, capsys: Any) -> None:
        write(tmp_path, "snappy", pa.table({"x": [1]}))
        assert "has no column 'y'; it has x" in said(tmp_path, capsys, "--columns", "x,y")
        assert "--tokens is for files of tokens, and this is read as parquet" in said(tmp_path, capsys, "--tokens", "3")
        (tmp_path / "a.parquet").unlink()
        (tmp_path / "a.jsonl").write_bytes(b"{}")
        assert "--columns is for tables (parquet, arrow, lerobot)" in said(tmp_path, capsys, "--columns", "x")

    def test_without_pyarrow_a_line_says_so(self, tmp_path: Path) -> None:
        write(tmp_path, "snappy", pa.table({"x": [1]}))
        code = (
            "import sys; sys.modules['pyarrow'] = None; from refill_service.cli import main; "
            f"sys.exit(main(['index', {str(tmp_path)!r}]))"
        )
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert found.returncode == 2
        assert found.stderr.splitlines()[-1].endswith("pip install 'refill-cache[parquet]'")


def test_a_row_that_is_cut_off_or_too_long_names_the_place() -> None:
    parse = parser_of({"format": {"name": "arrow", "columns": [["n", "int32"], ["text", "str"]]}})
    row = b"\0" + struct.pack("<iI", 7, 2) + b"hi"
    assert parse(memoryview(row), 3)[1] == {"n": 7, "text": "hi"}
    cut = (row[:5], "within its head"), (row[:-1], "column 'text' ends"), (row + b"x", "its columns end")
    for damaged, says in cut:
        with pytest.raises(SampleDamaged, match=says):
            parse(memoryview(damaged), 3)
    with pytest.raises(SampleDamaged, match="can't be decoded"):
        parse(memoryview(row[:-2] + b"\xff\xff"), 3)


def test_a_job_without_memory_for_a_group_is_told_what_to_do(tmp_path: Path, pod: LocalCluster) -> None:
    write(tmp_path, "none", pa.table({"data": [bytes([n]) * 20_000 for n in range(23)]}))
    assert main(["index", str(tmp_path), "--quiet", "--checksums", "all"]) == 0
    for policy in ("planned", "redox"):
        with pytest.raises(MemoryTooSmall, match="or write the dataset with smaller row groups"):
            epoch_of(pod, tmp_path.as_uri(), chunk_size=None, policy=policy, memory_bytes=400_000)
