"""Is what comes out of `refill pack` what went in?"""

from __future__ import annotations

import asyncio
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.service.datasets_on_disk import digest, image_folder, members_of, write_files
from tests.service.packing import blobs_of, everything, packed

from refill.errors import InvalidInput, SampleDamaged
from refill_service.cache_core.dataset_index import INDEX_KEY
from refill_service.datasets.dataset_reader import Dataset


class TestContents:
    def test_image_folder(self, tmp_path: Path, url: str) -> None:
        files = image_folder(tmp_path / "src")
        summary = packed(tmp_path / "src", url, seed=3)
        objects, metadata, records, samples = everything(url)
        assert metadata["classes"] == ["class-0", "class-1", "class-2"]
        assert (metadata["seed"], metadata["made_by"]) == (3, "pack")
        assert set(objects) == {
            INDEX_KEY,
            *(key for key in objects if key.startswith("refill.column.cls.")),
            *(f"blob-{number:06}.tar" for number in range(summary.num_blobs)),
        }
        assert sum(key.startswith("refill.column.") for key in objects) == 1
        assert summary.num_samples == len(samples) == 60
        assert summary.num_blobs > 2

        members = [member for blob in blobs_of(objects).values() for member in members_of(blob)]
        labels = {name.rsplit(".", 1)[0]: content for name, content in members if name.endswith(".cls")}
        assert {name: content for name, content in members if not name.endswith(".cls")} == files
        assert labels == {name[:-4]: name[6:7].encode() for name in files if name.endswith(".jpg")}

        # A sample's bytes are its members, whole; all samples together are the blobs without their ends.
        stems = [{name.split(".")[0] for name, _ in members_of(sample + bytes(1024))} for sample in samples]
        assert all(len(stem) == 1 for stem in stems)
        assert len(set().union(*stems)) == 60
        assert b"".join(samples) == b"".join(blob[:-1024] for blob in blobs_of(objects).values())
        assert [int(value) for value in records.checksum] == [digest(sample) for sample in samples]
        assert all(blob[-1024:] == bytes(1024) and len(blob) <= 40_000 for blob in blobs_of(objects).values())

    def test_shuffled_by_the_seed_and_reproducible(self, tmp_path: Path) -> None:
        image_folder(tmp_path / "src", per_class=40)
        urls = [(tmp_path / name).as_uri() for name in "abc"]
        for url, seed in zip(urls, (1, 1, 2), strict=True):
            packed(tmp_path / "src", url, seed=seed)
        first, again, other = (everything(url)[0] for url in urls)
        assert first == again
        assert first != other
        labels = [
            content for blob in blobs_of(first).values() for name, content in members_of(blob) if name.endswith(".cls")
        ]
        assert labels != sorted(labels)
        changes = sum(before != after for before, after in pairwise(labels))
        assert changes > 50  # 80 are expected of 120 in random order

    def test_plain_files(self, tmp_path: Path) -> None:
        files = {
            "a.txt": b"1",
            "a.json": b"2",
            "b": b"no extension",
            "b.bin": b"taken",
            "c.": b"an empty one",
            "d.e/x.y.z": b"folder with a dot",
            "d.e/x.w": b"",
            "own.cls": b"7",
            "x" * 130 + ".txt": b"long name",
            "ü.txt": "é".encode(),
            ".hidden": b"",
            ".git/config": b"",
            ".DS_Store": b"of a Mac",
            "d.e/Thumbs.db": b"of Windows",
            "desktop.ini": b"of Windows",
            "__MACOSX/._a.txt": b"of an archive that was made on a Mac",
        }
        write_files(tmp_path / "src", files)
        os.symlink(tmp_path / "src" / "a.txt", tmp_path / "src" / "link.txt")
        summary = packed(tmp_path / "src", (tmp_path / "out").as_uri())
        objects, metadata, _, samples = everything((tmp_path / "out").as_uri())
        assert metadata["classes"] is None
        assert (summary.num_hidden, summary.num_files, summary.num_samples) == (6, 11, len(samples))
        found = {tuple(sorted(members_of(sample + bytes(1024)))) for sample in samples}
        assert found == {
            (("a.json", b"2"), ("a.txt", b"1")),
            (("b.bin", b"taken"), ("b.bin1", b"no extension")),
            (("c.bin", b"an empty one"),),
            (("d.e/x.w", b""), ("d.e/x.y.z", b"folder with a dot")),
            (("own.cls", b"7"),),
            (("x" * 130 + ".txt", b"long name"),),
            (("ü.txt", "é".encode()),),
            (("link.txt", b"1"),),
        }
        assert len(objects) == 2

    def test_classes_and_include(self, tmp_path: Path) -> None:
        write_files(tmp_path / "src", {"cat/1.jpg": b"1", "cat/1.cls": b"9", "cat/1.txt": b"", "dog/2.jpg": b"2"})
        out = (tmp_path / "out").as_uri()

        def names(**options: Any) -> dict[str, bytes]:
            packed(tmp_path / "src", out, force=True, **options)
            return dict(member for blob in blobs_of(everything(out)[0]).values() for member in members_of(blob))

        assert names()["cat/1.cls"] == b"9"  # the sample's own
        assert names()["dog/2.cls"] == b"1"
        assert set(names(classes="no")) == {"cat/1.jpg", "cat/1.cls", "cat/1.txt", "dog/2.jpg"}
        assert set(names(include=["*.jpg"], classes="no")) == {"cat/1.jpg", "dog/2.jpg"}
        assert set(names(include=["cat/*.jpg", "2.*"], classes="no")) == {"cat/1.jpg", "dog/2.jpg"}
        write_files(tmp_path / "src", {"readme.txt": b""})
        assert "dog/2.cls" not in names()
        with pytest.raises(InvalidInput, match="--classes no"):
            names(classes="yes")

    def test_a_class_of_its_own_in_large_letters(self, tmp_path: Path) -> None:
        files = {"cat/1.jpg": b"1", "cat/1.CLS": b"9", "dog/2.jpg": b"2", "dog/2.CLS": b"8"}
        write_files(tmp_path / "src", files)
        packed(tmp_path / "src", (tmp_path / "out").as_uri())
        objects, metadata, _, _ = everything((tmp_path / "out").as_uri())
        assert dict(member for blob in blobs_of(objects).values() for member in members_of(blob)) == files
        assert metadata["labels"]["classes"] == 2

    def test_what_refill_wrote_is_no_sample(self, tmp_path: Path) -> None:
        """A folder that has been indexed, and one that has been packed."""
        files = image_folder(tmp_path / "src")
        once = packed(tmp_path / "src", (tmp_path / "once").as_uri())
        write_files(
            tmp_path / "src", {INDEX_KEY: b"1", f"refill.column.cls.{'0' * 16}": b"2", f"{INDEX_KEY}.{'0' * 16}": b"3"}
        )
        again = packed(tmp_path / "src", (tmp_path / "again").as_uri())
        assert (again.num_samples, again.num_files) == (once.num_samples, len(files))
        assert everything((tmp_path / "again").as_uri())[1]["classes"] == ["class-0", "class-1", "class-2"]
        with pytest.raises(InvalidInput, match="is a packed dataset already, with blob-0000"):
            packed(tmp_path / "once", (tmp_path / "twice").as_uri())

    def test_a_sample_larger_than_a_blob(self, tmp_path: Path) -> None:
        write_files(tmp_path / "src", {"a.bin": bytes(100_000), "b.bin": b"1", "c.bin": bytes(100_000)})
        packed(tmp_path / "src", (tmp_path / "out").as_uri())
        _, _, records, _ = everything((tmp_path / "out").as_uri())
        assert sorted(records.length.tolist()) == [1024, 100_864, 100_864]

    def test_reading(self, tmp_path: Path, url: str) -> None:
        image_folder(tmp_path / "src")
        packed(tmp_path / "src", url)

        async def read() -> None:
            dataset = await Dataset.open(url)
            records = await dataset.load_records(0, dataset.num_samples)
            end = int(dataset.blobs.first_sample[1])
            buffer = await dataset.read_samples(records, 1, end)
            for sample in range(1, end):
                start = int(records.offset[sample] - records.offset[1])
                dataset.verify_sample(buffer[start : start + int(records.length[sample])], records, sample)
            with pytest.raises(SampleDamaged, match=r"blob-000000.tar: sample 1, bytes \d+-\d+, is damaged"):
                dataset.verify_sample(bytes(buffer[: int(records.length[1]) - 1]) + b"?", records, 1)
            with pytest.raises(InvalidInput, match="more than one blob"):
                await dataset.read_samples(records, 0, end + 1)
            for cut in (int(records.offset[end - 1]) + 5, int(records.offset[2]) + 1, 0):
                data = bytes(await dataset.store.read_range("blob-000000.tar", 0, cut))
                await dataset.store.write("blob-000000.tar", data)
                with pytest.raises(SampleDamaged) as caught:
                    await dataset.read_samples(records, 0, end)
                sample = int((records.offset + records.length <= cut)[:end].sum())
                assert caught.value.details == {
                    "blob": "blob-000000.tar",
                    "sample": sample,
                    "start": int(records.offset[sample]),
                    "end": int(records.offset[sample] + records.length[sample]),
                }
            await dataset.store.delete("blob-000000.tar")
            with pytest.raises(SampleDamaged, match="gone"):
                await dataset.read_samples(records, 0, end)
            await dataset.close()

        asyncio.run(read())
