"""Zip archives with stored members, and .npz, where they lie; written by zipfile, numpy and torch."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from refill.errors import SampleDamaged
from refill_service.cli import main
from refill_service.demo.local_cluster import LocalCluster
from tests.conftest import S3Server
from tests.formats.reading import asked_of, bytes_at, epoch_of, opened, put


def said(folder: Path, capsys: Any) -> str:
    assert main(["index", str(folder), "--quiet", "--format", "zip"]) == 2
    assert not (folder / "refill.index").exists()
    found: str = capsys.readouterr().err
    return found


def test_members_of_one_key_are_a_sample(tmp_path: Path, pod: LocalCluster) -> None:
    made = {f"train/é{place}": (os.urandom(place * 10), str(place % 3).encode()) for place in range(40)}
    for part in range(2):
        with zipfile.ZipFile(tmp_path / f"{part}.zip", "w") as archive:
            archive.writestr("train/", b"")
            archive.writestr("README", b"of no sample")
            for key, (picture, label) in list(made.items())[20 * part : 20 * part + 20]:
                archive.writestr(f"{key}.JPG", picture)
                with archive.open(f"{key}.cls", "w", force_zip64=True) as member:
                    member.write(label)
            archive.comment = b"a comment" * part
    assert main(["index", str(tmp_path), "--quiet"]) == 0
    index, _ = opened(tmp_path.as_uri())
    assert (index.num_samples, index.header.has_checksums) == (40, False)
    found = epoch_of(pod, tmp_path.as_uri())
    assert [(each["__key__"], each["jpg"], each["cls"]) for each in found] == [(k, *v) for k, v in made.items()]


def _archive(path: Path, names: list[str]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, name)


def _without(path: Path, name: str) -> None:
    """Its entry in the directory is deleted, its bytes stay: as tools do that don't write an archive anew."""
    archive: Any = zipfile.ZipFile(path, "a")
    archive.filelist = [each for each in archive.filelist if each.filename != name]
    archive._didModify = True  # noqa: SLF001
    archive.close()


def test_a_member_of_no_sample_within_one_and_samples_apart(tmp_path: Path, pod: LocalCluster, capsys: Any) -> None:
    _archive(tmp_path / "a.zip", ["1.jpg", "README", "1.cls", "2.jpg", "3.jpg", "2.cls"])
    assert main(["index", str(tmp_path), "--quiet"]) == 0
    assert "its samples 1 and 3 have the same key but lie apart" in capsys.readouterr().err
    found = [
        (each["__key__"], sorted(each.keys() - {"__key__", "__id__"}))
        for each in epoch_of(pod, tmp_path.as_uri(), chunk_size=1)
    ]
    assert found == [("1", ["cls", "jpg"]), ("2", ["jpg"]), ("3", ["jpg"]), ("2", ["cls"])]


def test_members_that_were_deleted_or_replaced_are_not_there(tmp_path: Path, pod: LocalCluster) -> None:
    _archive(tmp_path / "a.zip", ["1.jpg", "1.cls", "2.jpg"])
    _without(tmp_path / "a.zip", "1.cls")
    _archive(tmp_path / "b.zip", ["3.txt", "4.txt"])
    with zipfile.ZipFile(tmp_path / "b.zip", "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("3.txt", b"NEW")
    assert main(["index", str(tmp_path), "--quiet"]) == 0
    found = [
        {name: value for name, value in each.items() if name[0] != "_"}
        for each in epoch_of(pod, tmp_path.as_uri(), chunk_size=1)
    ]
    assert found == [{"jpg": b"1.jpg"}, {"jpg": b"2.jpg"}, {"txt": b"4.txt"}, {"txt": b"NEW"}]


@pytest.mark.parametrize("checksums", ["all", "first-read"])
def test_an_npz_is_a_sample_as_numpy_reads_it(tmp_path: Path, pod: LocalCluster, checksums: str) -> None:
    for place in range(12):
        arrays = {
            "x": np.random.default_rng(place).random((place, 3)),
            "y": np.arange(place),
            "in.it": np.float32(place),
        }
        np.savez(tmp_path / f"{place:02}.npz", **arrays)
    assert main(["index", str(tmp_path), "--quiet", "--checksums", checksums]) == 0
    found = epoch_of(pod, tmp_path.as_uri(), chunk_size=1, decode=True)
    for place, sample in enumerate(found):
        with np.load(tmp_path / f"{place:02}.npz") as theirs:
            assert sample.keys() - {"__key__", "__id__"} == set(theirs.files)
            for name in theirs.files:
                assert sample[name].dtype == theirs[name].dtype
                assert np.array_equal(sample[name], theirs[name])


def test_directories_alone_are_read(tmp_path: Path, s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for place in range(50):
            archive.writestr(f"{place}.bin", bytes(200_000))
    url = put(s3_environment, tmp_path)
    with asked_of(s3_environment) as asked:
        monkeypatch.setenv("AWS_ENDPOINT_URL", asked.url)
        assert main(["index", url, "--quiet"]) == 0
    requests, num_bytes = asked.of("a.zip")
    assert requests <= 2
    assert num_bytes <= (tmp_path / "a.zip").stat().st_size / 1000


def test_one_of_many_members_has_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 10)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for place in range(11):
            archive.writestr(f"{place}.x", b"")
    data = (tmp_path / "a.zip").read_bytes()
    assert b"PK\6\6" in data
    (tmp_path / "a.zip").write_bytes(data[:-14] + b"\xff" * 12 + data[-2:])
    assert main(["index", str(tmp_path), "--quiet"]) == 0
    assert opened(tmp_path.as_uri())[0].num_samples == 11


class TestRefused:
    def test_an_archive_without_members(self, tmp_path: Path, capsys: Any) -> None:
        zipfile.ZipFile(tmp_path / "a.zip", "w").close()
        assert "1 zip archives, a sample the members of one key, and no samples in them" in said(tmp_path, capsys)

    def test_compressed_members(self, tmp_path: Path, capsys: Any) -> None:
        np.savez_compressed(tmp_path / "a.npz", x=np.arange(9))
        error = said(tmp_path, capsys)
        assert "member 'x.npy' is compressed (method 8), and only stored ones are read" in error
        assert "numpy.savez" in error

    def test_what_torch_writes(self, tmp_path: Path, capsys: Any) -> None:
        torch.save({"a": torch.arange(3)}, tmp_path / "a.pt")
        (tmp_path / "a.pt").rename(tmp_path / "a.zip")
        assert "was written as a stream (as torch.save does)" in said(tmp_path, capsys)

    def test_encrypted_members(self, tmp_path: Path, capsys: Any) -> None:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            archive.writestr("a.txt", b"x")
        data = bytearray(out.getvalue())
        data[data.index(b"PK\1\2") + 8] |= 1
        (tmp_path / "a.zip").write_bytes(data)
        assert "is encrypted, and pods have no keys" in said(tmp_path, capsys)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda data: data[:-5], "it has no directory at its end"),
            (lambda data: b"x" + data, "can't lie at byte 36, but 1 bytes later: if these were put before the archive"),
            (lambda data: data.replace(b"PK\1\2", b"PK\1\3"), "its directory is damaged: an entry is cut off, or none"),
            (lambda data: data[:-12] + struct.pack("<H", 9) + data[-10:], "a part of an archive of several"),
            (lambda data: data[:-14] + struct.pack("<HH", 9, 9) + data[-10:], "can't lie at byte"),
        ],
    )
    def test_what_is_no_archive(self, tmp_path: Path, capsys: Any, change: Any, says: str) -> None:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            archive.writestr("a.txt", b"x")
        (tmp_path / "a.zip").write_bytes(change(out.getvalue()))
        assert says in said(tmp_path, capsys)

    def test_a_sample_with_a_deleted_member_within_it(self, tmp_path: Path, capsys: Any) -> None:
        _archive(tmp_path / "a.zip", ["1.jpg", "1.txt", "1.cls"])
        _without(tmp_path / "a.zip", "1.txt")
        assert "before member '1.cls' lie bytes of no member, within a sample" in said(tmp_path, capsys)

    def test_members_that_overlap(self, tmp_path: Path, capsys: Any) -> None:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            archive.writestr("a.txt", b"x" * 9)
            archive.writestr("b.txt", b"x" * 9)
        data = bytearray(out.getvalue())
        second = data.rindex(b"PK\1\2")
        data[second + 42 : second + 46] = struct.pack("<I", 5)
        (tmp_path / "a.zip").write_bytes(data)
        assert "can't lie there: the next one begins at byte 5" in said(tmp_path, capsys)


def test_a_range_that_holds_other_than_members_is_damaged(tmp_path: Path) -> None:
    from refill.formats import parser_of

    parse = parser_of({"format": {"name": "zip", "whole": False}})
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.txt", b"hello")
    assert main(["index", str(tmp_path), "--quiet"]) == 0
    (data,) = bytes_at(tmp_path)
    assert parse(memoryview(data), 0) == ("a", {"txt": b"hello"})
    for damaged in (b"", data[:-1], data + b"x", data + data, b"x" + data, data[:20]):
        with pytest.raises(SampleDamaged, match="sample 0 is no zip member"):
            parse(memoryview(damaged), 0)


def test_archives_of_the_zip_command(tmp_path: Path) -> None:
    for place in range(5):
        (tmp_path / f"{place}.txt").write_bytes(bytes([65 + place]) * place)
    try:
        subprocess.run(["zip", "-0", "-q", "a.zip", *(f"{place}.txt" for place in range(5))], cwd=tmp_path, check=True)
    except FileNotFoundError:
        pytest.skip("zip is not installed")
    assert main(["index", str(tmp_path), "--quiet", "--format", "zip"]) == 0
    assert opened(tmp_path.as_uri())[0].num_samples == 5
