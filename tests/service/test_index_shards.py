"""`refill index`: shards that are there already become a dataset, each read once."""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import random
import subprocess
import tarfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.service.datasets_on_disk import digest, image_folder, tar_of, write_files

from refill.errors import DatasetExists, EmptyDataset, InvalidInput, RefillError, SampleDamaged
from refill_service.cache_core.dataset_index import INDEX_KEY
from refill_service.cli import main
from refill_service.datasets import index_shards as index_shards_module
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.index_shards import IndexSummary, index_shards
from refill_service.formats import shard_reader
from refill_service.formats.interface import ShardReport
from refill_service.object_store.base import StoredRange
from refill_service.object_store.file_store import FileStore


def indexed(folder: Path, **options: Any) -> IndexSummary:
    return asyncio.run(index_shards(folder.as_uri(), **options))


def samples_at(url: str) -> list[tuple[str, int, bytes]]:
    """Blob, offset and verified bytes of every sample."""

    async def read() -> list[tuple[str, int, bytes]]:
        dataset = await Dataset.open(url)
        records = await dataset.load_records(0, dataset.num_samples)
        found = []
        for sample in range(dataset.num_samples):
            payload = await dataset.read_samples(records, sample, sample + 1)
            dataset.verify_sample(payload, records, sample)
            name = dataset.blobs.names[dataset.blobs.blob_of(sample)]
            found.append((name, int(records.offset[sample]), bytes(payload)))
        await dataset.close()
        return found

    return asyncio.run(read())


def keys_at(url: str) -> list[list[str]]:
    names = []
    for _, _, payload in samples_at(url):
        with tarfile.open(fileobj=io.BytesIO(payload + bytes(1024))) as tar:
            names.append(tar.getnames())
    return names


def shards(count: int = 5, per_shard: int = 30, form: int = tarfile.PAX_FORMAT) -> dict[str, bytes]:
    made = random.Random(1)
    return {
        f"part-{shard}.tar": tar_of(
            [
                (f"{shard}/{number:03}{'x' * (number * 5)}.{extension}", made.randbytes(made.randrange(0, 3000)))
                for number in range(per_shard)
                for extension in ("cls", "jpg")
            ],
            form,
        )
        for shard in range(count)
    }


class TestSamples:
    @pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
    @pytest.mark.parametrize("range_bytes", [700, 1 << 20])
    def test_all_are_found(self, tmp_path: Path, form: int, range_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shard_reader, "RANGE_BYTES", range_bytes)
        monkeypatch.setattr(index_shards_module, "RANGE_BYTES", range_bytes)
        monkeypatch.setattr(shard_reader, "_BATCH", 7)
        made = shards(form=form)
        write_files(tmp_path, made)
        summary = indexed(tmp_path, jobs=3)
        assert (summary.num_samples, summary.num_blobs, summary.warnings) == (150, 5, [])
        found = samples_at(tmp_path.as_uri())
        for name, data in made.items():
            with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                members = tar.getmembers()
            starts = [members[place].offset for place in range(0, len(members), 2)]
            last = members[-1].offset_data + -(-members[-1].size // 512) * 512
            ends = [*starts[1:], last]
            assert [(offset, payload) for blob, offset, payload in found if blob == name] == [
                (start, data[start:end]) for start, end in zip(starts, ends, strict=True)
            ]
        assert {name: (tmp_path / name).read_bytes() for name in made} == made

    def test_same_samples_as_packed(self, tmp_path: Path) -> None:
        image_folder(tmp_path / "src")
        out = tmp_path / "out"
        assert main(["pack", str(tmp_path / "src"), str(out), "--blob-size", "40kB", "--quiet"]) == 0
        before = samples_at(out.as_uri())
        assert main(["index", str(out), "--quiet"]) == 2
        assert main(["index", str(out), "--quiet", "--force"]) == 0
        assert samples_at(out.as_uri()) == before

    def test_names_of_classes_that_pack_has_written_stay_with_its_files(self, tmp_path: Path) -> None:
        """Tars don't say them; ``refill index --force`` is what helps where the index is damaged."""
        write_files(tmp_path / "src", {"cat/1.jpg": b"1", "dog/2.jpg": b"2"})
        out = tmp_path / "out"
        assert main(["pack", str(tmp_path / "src"), str(out), "--quiet"]) == 0

        def classes() -> Any:
            dataset = asyncio.run(Dataset.open(out.as_uri()))
            return dataset.index.metadata.get("classes")

        for _ in range(2):
            assert indexed(out, force=True).warnings == []
            assert classes() == ["cat", "dog"]
        (out / "more.tar").write_bytes(tar_of([("3.jpg", b"3")]))
        assert "the index that was there named classes of other files" in indexed(out, force=True).warnings[-1]
        assert classes() is None
        (out / "refill.index").write_bytes(b"damaged")
        assert indexed(out, force=True).num_samples > 2

    def test_shards_of_gnu_tar(self, tmp_path: Path) -> None:
        write_files(
            tmp_path / "src", {"a.jpg": b"1" * 700, "a.json": b"{}", "b.jpg": b"2", "y" * 140 + ".jpg": b"long"}
        )
        names = ["a.jpg", "a.json", "b.jpg", "y" * 140 + ".jpg"]
        for form in ("gnu", "pax", "ustar"):
            folder = tmp_path / form
            folder.mkdir()
            taken = names[:3] if form == "ustar" else names
            command = ["tar", f"--format={form}", "-C", str(tmp_path / "src"), "-cf", str(folder / "x.tar"), *taken]
            subprocess.run(command, check=True)
            assert indexed(folder).num_samples == len(taken) - 1
            assert keys_at(folder.as_uri())[0] == ["a.jpg", "a.json"]

    def test_s3_and_folders_below(self, s3_environment: Any) -> None:
        bucket = s3_environment.new_bucket()
        client = s3_environment.client()
        made = shards(3)
        for name, data in made.items():
            client.put_object(Bucket=bucket, Key=f"data/sub/{name}", Body=data)
        client.put_object(Bucket=bucket, Key="data/readme.txt", Body=b"")
        url = f"s3://{bucket}/data"
        assert main(["index", url, "--quiet", "--jobs", "2"]) == 0
        found = samples_at(url)
        assert len(found) == 90
        assert {name for name, _, _ in found} == {f"sub/{name}" for name in made}

    def test_what_is_no_member_of_a_sample(self, tmp_path: Path) -> None:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", pax_headers={"comment": "for all of them"}) as tar:

            def add(name: str, content: bytes = b"x", kind: bytes = tarfile.REGTYPE) -> None:
                info = tarfile.TarInfo(name)
                info.type = kind
                info.size = len(content) if kind == tarfile.REGTYPE else 0
                info.linkname = "a.jpg"
                tar.addfile(info, io.BytesIO(content))

            add("folder", kind=tarfile.DIRTYPE)
            add("README")
            add("a.jpg")
            add("link.jpg", kind=tarfile.SYMTYPE)
            add("LICENSE")
            add("a.json")
            add("dir", kind=tarfile.DIRTYPE)
            add("dir2", kind=tarfile.DIRTYPE)
            add("b.jpg")
            add("tail", kind=tarfile.DIRTYPE)
        write_files(tmp_path, {"x.tar": buffer.getvalue()})
        summary = indexed(tmp_path)
        assert (summary.num_samples, summary.num_passed_over) == (2, 7)
        assert keys_at(tmp_path.as_uri()) == [["a.jpg", "link.jpg", "LICENSE", "a.json"], ["b.jpg"]]

    def test_keys_that_come_again(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        members = [("a.jpg", b"1"), ("b.jpg", b"2"), ("a.json", b"3")]
        write_files(tmp_path, {"x.tar": tar_of(members), "empty.tar": tar_of([])})
        assert main(["index", str(tmp_path), "--quiet"]) == 0
        said = capsys.readouterr()
        assert "x.tar: its samples 0 and 2 have the same key" in said.err
        assert "empty.tar: holds no samples" in said.err
        assert keys_at(tmp_path.as_uri()) == [["a.jpg"], ["b.jpg"], ["a.json"]]


class TestOnce:
    def test_every_byte_is_read_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shard_reader, "RANGE_BYTES", 10_000)
        monkeypatch.setattr(index_shards_module, "RANGE_BYTES", 10_000)
        made = shards()
        write_files(tmp_path, made)
        asked: list[tuple[str, int, int]] = []
        read = FileStore.read_version

        async def noted(store: FileStore, key: str, start: int, end: int, *how: Any, **more: Any) -> StoredRange:
            asked.append((key, start, end))
            return await read(store, key, start, end, *how, **more)

        monkeypatch.setattr(FileStore, "read_version", noted)
        indexed(tmp_path)
        for name, data in made.items():
            ranges = sorted((start, end) for key, start, end in asked if key == name)
            assert ranges[0][0] == 0
            assert all(before[1] == after[0] for before, after in pairwise(ranges))
            assert len(data) - 10_240 <= ranges[-1][1] <= len(data)  # what is behind the end is padding


class TestDamage:
    def message(self, folder: Path, kind: type[RefillError] = SampleDamaged) -> str:
        with pytest.raises(kind) as caught:
            indexed(folder)
        assert not (folder / INDEX_KEY).exists()
        return caught.value.message

    def test_compressed_in_spite_of_its_name(self, tmp_path: Path) -> None:
        (tmp_path / "x.tar").write_bytes(gzip.compress(bytes(10_240)))
        assert "it is compressed with gzip; unpack it" in self.message(tmp_path)

    def test_truncated_anywhere(self, tmp_path: Path) -> None:
        data = tar_of([("a.jpg", b"1" * 600), ("b" * 120 + ".jpg", b"2" * 10), ("c.jpg", b"")])
        end = data.rstrip(b"\0").__len__()
        end = -(-end // 512) * 512
        for cut in [*range(0, end, 100), end - 1, end, end + 100]:
            write_files(tmp_path, {"x.tar": data[:cut]})
            assert f"{tmp_path.as_uri()}/x.tar: can't be read as a tar from byte" in self.message(tmp_path), cut
        write_files(tmp_path, {"x.tar": data[: end + 512]})
        indexed(tmp_path)

    def test_garbage(self, tmp_path: Path) -> None:
        data = bytearray(tar_of([("a.jpg", b"1" * 600), ("b.jpg", b"2" * 600), ("c.jpg", b"3")]))
        write_files(tmp_path, {"x.tar": b"not a tar" * 1000})
        assert "from byte 0 on (of 9000)" in self.message(tmp_path)
        data[1536 + 20] ^= 1
        write_files(tmp_path, {"x.tar": bytes(data)})
        assert "from byte 1536 on" in self.message(tmp_path)
        with pytest.raises(SampleDamaged) as caught:
            indexed(tmp_path)
        assert caught.value.details == {"blob": "x.tar", "sample": None, "start": 1536, "end": len(data)}

    def test_zeros_where_a_member_should_begin(self, tmp_path: Path) -> None:
        """A hole of a copy that was broken off, and tars that were put one behind the other. tarfile ends there."""
        data = bytearray(shards(1)["part-0.tar"])
        end = len(bytes(data).rstrip(b"\0"))
        half = end // 2 // 512 * 512
        for wrong in (data[:half] + bytes(10_240) + data[half + 10_240 :], data + data):
            write_files(tmp_path, {"x.tar": bytes(wrong)})
            message = self.message(tmp_path)
            assert "bytes follow the mark of its end" in message or "can't be read as a tar" in message
        write_files(tmp_path, {"x.tar": bytes(data) + bytes(100 << 10)})
        assert indexed(tmp_path).num_samples == 30, "zeros alone may follow"

    def test_links_to_folders_and_names_that_are_no_text(self, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        folder = tmp_path / "data"
        folder.mkdir()
        write_files(folder, shards(1))
        (folder / "linked").symlink_to(tmp_path / "elsewhere")
        (said, *_) = indexed(folder).warnings
        assert "1 links to folders were not followed, such as linked/" in said
        (folder / INDEX_KEY).unlink()
        os.rename(folder / "part-0.tar", os.fsdecode(os.fsencode(folder) + b"/caf\xe9.tar"))
        assert "its name is no UTF-8" in self.message(folder, InvalidInput)

    def test_random_damage_is_noticed_or_harmless(self, tmp_path: Path) -> None:
        made = random.Random(5)
        data = shards(1, 6)["part-0.tar"]
        for _ in range(150):
            damaged = bytearray(data)
            for _ in range(made.randrange(1, 4)):
                place = made.randrange(len(damaged)) // 512 * 512 + made.randrange(0, 345)
                damaged[place % len(damaged)] = made.randrange(256)
            view = memoryview(bytes(damaged))
            try:
                for batch in shard_reader.read_shard(
                    "x",
                    "x",
                    len(view),
                    lambda start, end, view=view: view[start:end],  # type: ignore[misc]
                    ShardReport(),
                ):
                    offset: Any = batch["offset"]  # else mypy tries all that + may be, for a second
                    assert (offset + batch["length"] <= len(view)).all()
                    for record in batch:
                        start, length = int(record["offset"]), int(record["length"])
                        assert digest(bytes(view[start : start + length])) == int(record["checksum"])
            except SampleDamaged:
                pass

    def test_one_of_many(self, tmp_path: Path) -> None:
        made = shards(12, 5)
        made["part-7.tar"] = made["part-7.tar"][:1000]
        write_files(tmp_path, made)
        assert "part-7.tar" in self.message(tmp_path)

    def test_files_that_are_none_are_named(self, tmp_path: Path) -> None:
        write_files(tmp_path, shards() | {"1.jpg": b"", "b/2.JPG": b"", "README": b"", ".git/x": b"", "_SUCCESS": b""})
        said: list[str] = []
        indexed(tmp_path, say=said.append)
        assert said[0].endswith("; 3 other files are left alone (2 .jpg, 1 without ending)")
        indexed(tmp_path, say=said.append, force=True)
        assert said[1] == said[0], "its own index is none of them"

    def test_hidden_files_are_left_out_and_counted(self, tmp_path: Path) -> None:
        """Unfinished output of Spark, copies of Jupyter and of macOS, and a column of Hive, which hides nothing."""
        left = ("_temporary/0/part-7.tar", "b/.ipynb_checkpoints/x.tar", "._a.tar", "_a.tar", "_SUCCESS", ".DS_Store")
        hidden = dict.fromkeys(left, tar_of([("h.jpg", b"")]))
        write_files(tmp_path, {"a.tar": tar_of([("a.jpg", b"")]), "_c=1/b.tar": tar_of([("b.jpg", b"")])} | hidden)
        said: list[str] = []
        assert indexed(tmp_path, say=said.append).num_files == 2
        assert said[0].endswith(
            "; 4 more are hidden, by a name or folder that begins with . or _ (--files takes those it names)"
        )
        assert indexed(tmp_path, names=["a.tar", "_a.tar"], force=True).num_files == 2
        for name in ("a.tar", "_c=1/b.tar"):
            (tmp_path / name).unlink()
        (tmp_path / INDEX_KEY).unlink()
        assert "all 6 files are hidden" in self.message(tmp_path, EmptyDataset)

    def test_nothing_there(self, tmp_path: Path) -> None:
        assert "holds no .tar" in self.message(tmp_path / "none", EmptyDataset)
        (tmp_path / "none").mkdir()
        (tmp_path / "none" / "0.tar.gz").write_bytes(b"x")
        assert "but 1 that are compressed: pods read parts of a tar" in self.message(tmp_path / "none", EmptyDataset)
        write_files(tmp_path, {"x.tar": tar_of([("noextension", b"")])})
        assert "no samples" in self.message(tmp_path, EmptyDataset)

    def test_existing_index(self, tmp_path: Path) -> None:
        write_files(tmp_path, shards(1))
        indexed(tmp_path)
        before = (tmp_path / INDEX_KEY).read_bytes()
        write_files(tmp_path, {"more.tar": tar_of([("a.jpg", b"")])})
        with pytest.raises(DatasetExists, match="--force"):
            indexed(tmp_path)
        assert (tmp_path / INDEX_KEY).read_bytes() == before
        assert indexed(tmp_path, force=True).num_blobs == 2
