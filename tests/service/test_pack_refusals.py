"""What does `refill pack` refuse to write, and what does the command say, then and when it is done?"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.service.datasets_on_disk import image_folder, tar_of, write_files
from tests.service.packing import everything, names_at, packed

from refill.errors import DatasetExists, DatasetNotFound, EmptyDataset, InvalidInput, StoreNotFound
from refill_service.cache_core.dataset_index import INDEX_KEY
from refill_service.cli import main
from refill_service.datasets.dataset_reader import Dataset


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
            ("none", InvalidInput, "there is no "),
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


class TestCommand:
    def test_end_to_end(self, tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        image_folder(tmp_path / "src")
        assert main(["pack", str(tmp_path / "src"), url, "--blob-size", "40kB"]) == 0
        output = capsys.readouterr()
        assert "packed 60 samples of 3 classes (81 files)" in output.out
        assert output.err.splitlines() == [
            f"{tmp_path}/src: 81 files, 60 samples",
            "files with the same name but for what follows the dot are one sample",
            "3 classes, the folders at its top: class-0, class-1, class-2",
        ]
        assert main(["inspect", url, "--verify", "--json", "--quiet"]) == 0
        assert json.loads(capsys.readouterr().out)["num_samples"] == 60
        assert main(["pack", str(tmp_path / "src"), url]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith("refill: ")
        assert output.err.count("\n") == 1

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
        assert main(["pack", str(tmp_path / "src"), "ftp://bucket/x"]) == 2
        assert "s3://bucket/prefix" in capsys.readouterr().err

    @pytest.mark.parametrize("command", ["pack", "index", "inspect"])
    def test_help(self, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main([command, "--help"])
        assert caught.value.code == 0
        output = capsys.readouterr().out
        assert f"example: refill {command} " in output
        assert "AWS_REGION" in output
