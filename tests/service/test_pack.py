"""`refill pack`: what comes out is what went in; what goes wrong leaves nothing that looks complete."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.service.datasets_on_disk import digest, image_folder, members_of, tar_of, write_files

from refill.errors import DatasetExists, DatasetNotFound, EmptyDataset, InvalidInput, SampleDamaged, StoreNotFound
from refill_service.cache_core.dataset_index import INDEX_KEY, SampleRecords
from refill_service.cache_core.dataset_labels import LABELS_KEY
from refill_service.cli import main
from refill_service.datasets import pack_claim
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.pack import PackSummary, pack
from refill_service.datasets.pack_claim import MARKER_KEY
from refill_service.object_store.base import WritableData
from refill_service.object_store.file_store import FileStore


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return (tmp_path / "dest").as_uri()
    return f"s3://{request.getfixturevalue('s3_environment').new_bucket()}/data/set"


def packed(source: Path, url: str, **options: Any) -> PackSummary:
    return asyncio.run(pack(str(source), url, **{"blob_bytes": 40_000, **options}))


def everything(url: str) -> tuple[dict[str, bytes], dict[str, Any], SampleRecords, list[bytes]]:
    """Objects by key, metadata, records, and the bytes of each sample, verified."""

    async def read() -> tuple[dict[str, bytes], dict[str, Any], SampleRecords, list[bytes]]:
        dataset = await Dataset.open(url)
        objects = {}
        async for key, size in dataset.store.list():
            objects[key] = bytes(await dataset.store.read_range(key, 0, size))
        records = await dataset.load_records(0, dataset.num_samples)
        samples = []
        for sample in range(dataset.num_samples):
            payload = await dataset.read_samples(records, sample, sample + 1)
            dataset.verify_sample(payload, records, sample)
            samples.append(bytes(payload))
        await dataset.close()
        return objects, dataset.index.metadata, records, samples

    return asyncio.run(read())


def blobs_of(objects: dict[str, bytes]) -> dict[str, bytes]:
    return {key: data for key, data in sorted(objects.items()) if key.endswith(".tar")}


def names_at(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


class TestContents:
    def test_image_folder(self, tmp_path: Path, url: str) -> None:
        files = image_folder(tmp_path / "src")
        summary = packed(tmp_path / "src", url, seed=3)
        objects, metadata, records, samples = everything(url)
        assert metadata["classes"] == ["class-0", "class-1", "class-2"]
        assert (metadata["seed"], metadata["made_by"]) == (3, "pack")
        assert set(objects) == {
            INDEX_KEY,
            LABELS_KEY,
            *(f"blob-{number:06}.tar" for number in range(summary.num_blobs)),
        }
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


class TestRefusals:
    def test_existing_datasets(self, tmp_path: Path, url: str) -> None:
        write_files(tmp_path / "old", {f"{number}.bin": bytes(9000) for number in range(30)})
        write_files(tmp_path / "new", {"one.bin": b"1"})
        packed(tmp_path / "old", url)
        before = everything(url)[0]
        with pytest.raises(DatasetExists, match="--force"):
            packed(tmp_path / "new", url)
        for source in (tmp_path / "none", tmp_path / "empty"):
            (tmp_path / "empty").mkdir(exist_ok=True)
            with pytest.raises((InvalidInput, EmptyDataset)):
                packed(source, url, force=True)
        assert everything(url)[0] == before
        packed(tmp_path / "new", url, force=True)
        assert set(everything(url)[0]) == {INDEX_KEY, "blob-000000.tar"}

    def test_other_files_are_left_alone(self, tmp_path: Path) -> None:
        write_files(tmp_path / "src", {"one.bin": b"1"})
        others = {"readme.txt": b"1", "blob-1.tar": b"2", "sub/blob-000000.tar": b"3", "blob-000000.tar.bak": b"4"}
        write_files(tmp_path / "out", others)
        packed(tmp_path / "src", (tmp_path / "out").as_uri())
        packed(tmp_path / "src", (tmp_path / "out").as_uri(), force=True)
        for name, content in others.items():
            assert (tmp_path / "out" / name).read_bytes() == content

    def test_blobs_of_somebody_else(self, tmp_path: Path) -> None:
        write_files(tmp_path / "src", {"one.bin": b"1"})
        out = tmp_path / "out"
        write_files(out, {"blob-000000.tar": tar_of([("a.txt", b"")])})
        for force in (False, True):
            with pytest.raises(DatasetExists, match=r"blob-000000\.tar"):
                packed(tmp_path / "src", out.as_uri(), force=force)
        assert main(["index", str(out), "--quiet"]) == 0
        with pytest.raises(DatasetExists, match=r"blob-000000\.tar"):
            packed(tmp_path / "src", out.as_uri(), force=True)
        assert names_at(out) == ["blob-000000.tar", INDEX_KEY]

    def test_sources(self, tmp_path: Path) -> None:
        out = (tmp_path / "out").as_uri()
        (tmp_path / "file").write_bytes(b"")
        (tmp_path / "hidden").mkdir()
        (tmp_path / "hidden" / ".x").write_bytes(b"")
        write_files(tmp_path / "case", {"a.jpg": b"1", "a.JPG": b"2"})
        (tmp_path / "dangling").mkdir()
        os.symlink("nowhere", tmp_path / "dangling" / "b.jpg")
        write_files(tmp_path / "loop", {"a/b.jpg": b"1"})
        os.symlink("..", tmp_path / "loop" / "a" / "up")
        for source, kind, text in (
            ("none", InvalidInput, "not a folder"),
            ("file", InvalidInput, "not a folder"),
            ("hidden", EmptyDataset, "no files"),
            ("case", InvalidInput, "case of their extension"),
            ("dangling", EmptyDataset, r"1 links to nothing: b\.jpg"),
            ("loop", InvalidInput, "link back"),
        ):
            with pytest.raises(kind, match=text):
                packed(tmp_path / source, out)
            assert names_at(tmp_path / "out") == []
        with pytest.raises(EmptyDataset, match="--include"):
            packed(tmp_path / "case", out, include=["*.png"])
        for inside in ("case", "case/deeper"):
            with pytest.raises(InvalidInput, match="lies in"):
                packed(tmp_path / "case", (tmp_path / inside).as_uri())

    def test_no_bucket(self, tmp_path: Path, s3_environment: Any) -> None:
        write_files(tmp_path / "src", {"one.bin": b"1"})
        with pytest.raises(StoreNotFound, match="no bucket 'no-such-bucket'"):
            packed(tmp_path / "src", "s3://no-such-bucket/x")
        with pytest.raises(StoreNotFound, match="no bucket 'no-such-bucket'"):
            asyncio.run(Dataset.open("s3://no-such-bucket/x"))
        with pytest.raises(DatasetNotFound, match="refill pack"):
            asyncio.run(Dataset.open(f"s3://{s3_environment.new_bucket()}/x"))


class TestBrokenOff:
    @pytest.mark.parametrize("change", ["grow", "shrink", "vanish"])
    def test_files_that_change(self, tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
        write_files(tmp_path / "src", {f"{number:02}.bin": bytes(20_000) for number in range(20)})
        victim = tmp_path / "src" / "07.bin"
        begin = pack_claim.PackClaim.begin

        async def begin_and_change(claim: pack_claim.PackClaim) -> None:
            await begin(claim)
            if change == "vanish":
                victim.unlink()
            else:
                victim.write_bytes(bytes(20_001 if change == "grow" else 19_999))

        monkeypatch.setattr(pack_claim.PackClaim, "begin", begin_and_change)
        with pytest.raises(InvalidInput, match=r"07\.bin (changed|vanished)"):
            packed(tmp_path / "src", (tmp_path / "out").as_uri())
        assert names_at(tmp_path / "out") == []

    def test_store_that_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_files(tmp_path / "src", {f"{number:02}.bin": bytes(20_000) for number in range(20)})
        write = FileStore._write
        for victim in ("blob-000003.tar", INDEX_KEY):

            async def full(store: FileStore, key: str, data: WritableData, victim: str = victim) -> int:
                if key == victim:
                    raise StoreNotFound("no space left")
                return await write(store, key, data)

            monkeypatch.setattr(FileStore, "_write", full)
            with pytest.raises(StoreNotFound, match="no space left"):
                packed(tmp_path / "src", (tmp_path / "out").as_uri())
            assert names_at(tmp_path / "out") == []

    def test_a_file_that_cannot_be_read_leaves_the_dataset_that_is_there(self, tmp_path: Path) -> None:
        image_folder(tmp_path / "src")
        url = (tmp_path / "out").as_uri()
        packed(tmp_path / "src", url)
        before = everything(url)[0]
        (tmp_path / "src" / "x.jpg").symlink_to("/proc/self/mem")  # opens, and can't be read: not by root either
        with pytest.raises(InvalidInput, match=r"can't read .*x\.jpg: Input/output error"):
            packed(tmp_path / "src", url, force=True)
        assert everything(url)[0] == before

    def test_a_full_temporary_folder_leaves_the_dataset_that_is_there(self, tmp_path: Path) -> None:
        """No file may be larger than 2 KiB: the index is not, and its records in the temporary folder are."""
        write_files(tmp_path / "src", {f"{number:03}.bin": b"x" for number in range(300)})
        packed(tmp_path / "src", (tmp_path / "out").as_uri())
        before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
        code = (
            "import resource, sys; from refill_service.cli import main;"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048)); sys.exit(main(sys.argv[1:]))"
        )
        command = ["pack", str(tmp_path / "src"), str(tmp_path / "out"), "--force", "--quiet"]
        done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2, done.stderr
        assert done.stderr == (
            "refill: can't write to the temporary folder: File too large; TMPDIR names another one\n"
        ), done.stderr
        assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before

    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
    def test_killed(self, tmp_path: Path, url: str, how: signal.Signals) -> None:
        image_folder(tmp_path / "src", per_class=100)
        process = stopped_pack(tmp_path / "src", url)
        process.send_signal(how)
        process.send_signal(signal.SIGCONT)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == (-9 if how == signal.SIGKILL else 130), errors
        if how == signal.SIGINT:
            assert errors.strip().splitlines() == ["refill: interrupted"]
        with pytest.raises(DatasetNotFound):
            asyncio.run(Dataset.open(url))
        if how == signal.SIGKILL:
            assert main(["index", url, "--quiet"]) == 2  # half the blobs are no dataset
        packed(tmp_path / "src", url)
        packed(tmp_path / "src", (tmp_path / "reference").as_uri())
        assert everything(url)[0] == everything((tmp_path / "reference").as_uri())[0]

    def test_two_at_once(self, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        image_folder(tmp_path / "src", per_class=100)
        process = stopped_pack(tmp_path / "src", url)
        try:
            for force in (False, True):
                with pytest.raises(DatasetExists, match=f"process {process.pid}"):
                    packed(tmp_path / "src", url, force=force)
            assert main(["index", url, "--quiet"]) == 2
            # Asleep for so long that it is taken for dead.
            monkeypatch.setattr(pack_claim, "STALE_SECONDS", 0.0)
            packed(tmp_path / "src", url, seed=9)
            before = everything(url)[0]
        finally:
            process.send_signal(signal.SIGCONT)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 2
        assert "another pack took over" in errors
        assert INDEX_KEY in before
        assert MARKER_KEY not in before
        assert everything(url)[0] == before

    def test_markers_of_other_hosts(self, tmp_path: Path) -> None:
        write_files(tmp_path / "src", {"one.bin": b"1"})
        out = tmp_path / "out"
        marker = {"run": "x", "host": "elsewhere", "pid": 1, "at": time.time()}
        write_files(out, {MARKER_KEY: json.dumps(marker).encode(), "blob-000007.tar": b""})
        with pytest.raises(DatasetExists, match="elsewhere"):
            packed(tmp_path / "src", out.as_uri())
        (out / MARKER_KEY).write_text(json.dumps({**marker, "at": time.time() - 100}))
        packed(tmp_path / "src", out.as_uri())
        assert names_at(out) == ["blob-000000.tar", INDEX_KEY]
        (out / MARKER_KEY).write_text("garbage")
        with pytest.raises(InvalidInput, match="not a marker"):
            packed(tmp_path / "src", out.as_uri())

    def test_own_dead_process(self, tmp_path: Path) -> None:
        done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
        marker = {"run": "x", "host": socket.gethostname(), "pid": int(done.stdout), "at": time.time()}
        write_files(tmp_path / "out", {MARKER_KEY: json.dumps(marker).encode()})
        write_files(tmp_path / "src", {"one.bin": b"1"})
        packed(tmp_path / "src", (tmp_path / "out").as_uri())

    def test_renewing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pack_claim, "RENEW_SECONDS", 0.01)

        async def run() -> None:
            store = FileStore(str(tmp_path))
            claim = pack_claim.PackClaim(store)
            await claim.begin()
            first = await pack_claim.marker_of(store)
            while (renewed := await pack_claim.marker_of(store)) == first:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert first is not None
            assert renewed is not None
            assert (renewed.run, renewed.at > first.at) == (first.run, True)
            await claim.commit()
            assert await pack_claim.marker_of(store) is None
            with pytest.raises(DatasetExists, match="was removed"):
                await claim.check()
            await store.close()

        asyncio.run(run())


STOPPING = """
import asyncio, os, signal, sys
from refill_service.cli import main
from refill_service.datasets import pack_claim
check, checks = pack_claim.PackClaim.check, []
async def stop_at_the_fourth(claim):
    checks.append(1)
    if len(checks) == 4:
        uploads = [task for task in asyncio.all_tasks() if task.get_coro().__name__ == "write"]
        await asyncio.gather(*uploads)
        print("stopped", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    await check(claim)
pack_claim.PackClaim.check = stop_at_the_fourth
sys.exit(main(sys.argv[1:]))
"""


def stopped_pack(source: Path, url: str) -> subprocess.Popen[str]:
    """A pack in a process that has stopped itself with two blobs stored and the third built."""
    command = [sys.executable, "-c", STOPPING, "pack", str(source), url, "--blob-size", "40kB", "--quiet"]
    environment = {**os.environ, "TMPDIR": str(source.parent)}  # what it leaves when killed goes with the test
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert process.stdout.readline() == "stopped\n"
    while not re.search(r"State:\s+T", Path(f"/proc/{process.pid}/status").read_text()):
        time.sleep(0.01)
    return process


class TestCommand:
    def test_end_to_end(self, tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        image_folder(tmp_path / "src")
        assert main(["pack", str(tmp_path / "src"), url, "--blob-size", "40kB"]) == 0
        said = capsys.readouterr()
        assert "packed 60 samples of 3 classes (81 files)" in said.out
        assert said.err.splitlines() == [
            f"{tmp_path}/src: 81 files, 60 samples",
            "files with the same name but for what follows the dot are one sample",
            "3 classes, the folders at its top: class-0, class-1, class-2",
        ]
        assert main(["inspect", url, "--verify", "--json", "--quiet"]) == 0
        assert json.loads(capsys.readouterr().out)["num_samples"] == 60
        assert main(["pack", str(tmp_path / "src"), url]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("refill: ")
        assert said.err.count("\n") == 1

    @pytest.mark.parametrize(
        "arguments", [["--blob-size", "many"], ["--blob-size", "1kB"], ["--endpoint-url", "localhost"]]
    )
    def test_bad_input(self, tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        write_files(tmp_path / "src", {"one.bin": b"1"})
        assert main(["pack", str(tmp_path / "src"), str(tmp_path / "out"), *arguments]) == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert not (tmp_path / "out").exists()

    def test_wrong_url(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        write_files(tmp_path / "src", {"one.bin": b"1"})
        assert main(["pack", str(tmp_path / "src"), "gs://bucket/x"]) == 2
        assert "s3://bucket/prefix" in capsys.readouterr().err

    @pytest.mark.parametrize("command", ["pack", "index", "inspect"])
    def test_help(self, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main([command, "--help"])
        assert caught.value.code == 0
        said = capsys.readouterr().out
        assert f"example: refill {command} " in said
        assert "AWS_REGION" in said
