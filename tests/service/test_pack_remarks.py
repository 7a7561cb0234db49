"""`refill pack` says what it decided about a folder before it writes, and decides as the folder's owner would."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.service.datasets_on_disk import image_folder, members_of, write_files

from refill.errors import InvalidInput
from refill.formats.tar_samples import parse_members
from refill_service import cli
from refill_service.cache_core.dataset_index import INDEX_KEY
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.pack import PackSummary, pack
from refill_service.datasets.source_scan import SourceScan
from refill_service.object_store import file_store
from refill_service.object_store.file_store import FileStore


def samples_of(folder: Path, **options: Any) -> dict[str, list[str]]:
    scan = SourceScan(str(folder), seed=0, **options)
    found = {sample.key: [member.extension for member in sample.members] for sample in scan.samples()}
    assert len(found) == scan.num_samples
    scan.close()
    return found


def packed(folder: Path, **options: Any) -> tuple[PackSummary, list[str], list[str]]:
    """Its summary, and what was said: warnings, and the rest."""
    said: list[Any] = []
    summary = asyncio.run(pack(str(folder), (folder.parent / "out").as_uri(), say=said.append, **options))
    return summary, [each.text for each in said if each.is_warning], [each.text for each in said if not each.is_warning]


def what_a_loop_gets(folder: Path) -> list[tuple[str, dict[str, bytes]]]:
    async def read() -> list[tuple[str, dict[str, bytes]]]:
        dataset = await Dataset.open(folder.as_uri())
        records = await dataset.load_records(0, dataset.num_samples)
        found = []
        for sample in range(dataset.num_samples):
            key, members = parse_members(await dataset.read_samples(records, sample, sample + 1), sample)
            found.append((key, {extension: bytes(view) for extension, view in members.items()}))
        await dataset.close()
        return sorted(found)

    return asyncio.run(read())


PHOTOS = {
    "with dates": [f"IMG_2024.0{month}.1{day}.jpg" for month in (1, 2) for day in (1, 2, 3)],
    "with dates of two years": [f"IMG_202{year}.01.0{day}.jpg" for year in (3, 4) for day in (1, 2, 3)],
    "with names": ["john.smith.jpg", "mary.jones.jpg", "no-dot.jpg"],
    "with numbers": [f"holiday.{number}.jpeg" for number in range(20)],
    "some with a version": ["a.final.jpg", "b.jpg", "c.final.jpg", "d.jpg"],
    "of one stem": ["a.v1.jpg", "a.v2.jpg"],
}
WEBDATASET = {
    "a mask beside each": [f"{n}.{end}" for n in range(9) for end in ("jpg", "json", "seg.png")],
    "a mask beside some": ["1.jpg", "2.jpg", "2.seg.png", "3.jpg"],
    "one image lost": [f"{n}.{end}" for n in range(9) for end in ("jpg", "seg.png")][1:],
    "two views": [f"{n}.{end}" for n in range(9) for end in ("left.jpg", "right.jpg")],
    "archives": ["a.tar.gz", "b.tar.gz"],
}


@pytest.mark.parametrize("names", PHOTOS.values(), ids=PHOTOS)
def test_each_photo_is_a_sample(tmp_path: Path, names: list[str]) -> None:
    write_files(tmp_path / "src", {f"class/{name}": b"x" for name in names})
    assert samples_of(tmp_path / "src") == {
        f"class/{name.rpartition('.')[0].replace('.', '%2E')}": [name.rpartition(".")[2]] for name in names
    }


@pytest.mark.parametrize("names", WEBDATASET.values(), ids=WEBDATASET)
def test_members_of_webdataset_stay_together(tmp_path: Path, names: list[str]) -> None:
    write_files(tmp_path / "src", dict.fromkeys(names, b"x"))
    expected: dict[str, list[str]] = {}
    for name in sorted(names):
        expected.setdefault(name.partition(".")[0], []).append(name.partition(".")[2])
    assert samples_of(tmp_path / "src") == expected


def test_the_rule_can_be_given(tmp_path: Path) -> None:
    write_files(tmp_path / "src", {"a.1.jpg": b"", "a.2.jpg": b"", "b.c": b"", "d": b""})
    assert samples_of(tmp_path / "src", split_names="first-dot") == {"a": ["1.jpg", "2.jpg"], "b": ["c"], "d": ["bin"]}
    assert samples_of(tmp_path / "src", split_names="last-dot") == {
        "a%2E1": ["jpg"],
        "a%2E2": ["jpg"],
        "b": ["c"],
        "d": ["bin"],
    }
    with pytest.raises(InvalidInput, match="first-dot or the last-dot, or by auto, got 'dots'"):
        SourceScan(str(tmp_path / "src"), seed=0, split_names="dots")


def test_two_photos_that_differ_only_in_the_case_of_their_extension(tmp_path: Path) -> None:
    write_files(tmp_path / "src", {"a.1.jpg": b"", "a.1.JPG": b""})
    with pytest.raises(InvalidInput, match=r"a\.1\.\w+ and a\.1\.\w+ differ only in the case"):
        samples_of(tmp_path / "src")


def test_force_leaves_a_dataset_that_such_a_pair_would_not_replace(tmp_path: Path) -> None:
    image_folder(tmp_path / "src")
    packed(tmp_path / "src")
    write_files(tmp_path / "src", {"z/a.jpg": b"", "z/a.JPG": b""})
    with pytest.raises(InvalidInput, match=r"z/a\.\w+ and z/a\.\w+ differ only in the case"):
        packed(tmp_path / "src", force=True)
    assert (tmp_path / "out" / INDEX_KEY).exists(), "the dataset of before is gone"


def test_extensions_of_both_cases_are_one_member_to_a_loader(tmp_path: Path) -> None:
    write_files(tmp_path / "src", {"a.jpg": b"1", "b.JPG": b"2"})
    assert packed(tmp_path / "src")[1] == []
    assert [list(members) for _, members in what_a_loop_gets(tmp_path / "out")] == [["jpg"], ["jpg"]]


def test_a_class_without_a_sample_is_named(tmp_path: Path) -> None:
    write_files(tmp_path / "src", {"cat/deep/1.jpg": b"1", "dog/2.jpg": b"2", "fish/3.png": b"3"})
    (tmp_path / "src" / "bird").mkdir()
    summary, warnings, _ = packed(tmp_path / "src", include=["*.jpg"])
    assert summary.classes == ["bird", "cat", "dog", "fish"], "others keep their numbers"
    assert warnings == ["2 classes without any sample: bird, fish"]


@pytest.mark.parametrize("place", ["s3:/bucket/x", "S3:bucket", "file:/folder/x", "gs:/bucket"])
def test_a_url_with_too_few_slashes_is_no_folder(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path / "src", {"a.jpg": b"1"})
    monkeypatch.chdir(tmp_path)
    assert cli.main(["pack", "src", place]) == 2
    assert (
        capsys.readouterr().err
        == f"refill: {place!r} is not a URL of a store; write s3://bucket/prefix or file:///folder\n"
    )
    assert os.listdir() == ["src"]


def test_what_is_said_of_names_and_classes(tmp_path: Path) -> None:
    source = tmp_path / "src"
    write_files(source, {"cat/IMG.2024.1.jpg": b"1", "cat/IMG.2024.2.jpg": b"2", "dog/a.jpg": b"3"})
    summary, warnings, rest = packed(source)
    assert (summary.num_samples, summary.classes) == (3, ["cat", "dog"])
    assert len(warnings) == 1
    assert "split at the last, as those of photos are; --split-names first-dot joins them" in warnings[0]
    assert rest == [f"{source}: 3 files, 3 samples", "2 classes, the folders at its top: cat, dog"]
    blob = next((tmp_path / "out").glob("*.tar")).read_bytes()
    assert dict(members_of(blob))["cat/IMG%2E2024%2E1.jpg"] == b"1"
    assert what_a_loop_gets(tmp_path / "out") == [
        ("cat/IMG%2E2024%2E1", {"jpg": b"1", "cls": b"0"}),
        ("cat/IMG%2E2024%2E2", {"jpg": b"2", "cls": b"0"}),
        ("dog/a", {"jpg": b"3", "cls": b"1"}),
    ]


def test_a_stray_file_beside_class_folders_is_named(tmp_path: Path) -> None:
    source = tmp_path / "src"
    write_files(source, {"cat/1.jpg": b"1", "dog/2.jpg": b"2", "README.txt": b"pets", "notes.txt": b""})
    summary, warnings, _ = packed(source)
    assert summary.classes is None
    assert warnings[0].startswith("no classes, since README.txt lies beside the folders (cat, dog)")
    with pytest.raises(InvalidInput, match=r"has README\.txt beside its folders"):
        packed(source, classes="yes", force=True)
    summary, warnings, _ = packed(source, include=["*.jpg"], force=True)
    assert (summary.classes, warnings) == (["cat", "dog"], [])
    assert "1 empty file, packed so: notes.txt" in packed(source, classes="no", force=True)[1]


def test_empty_files_and_links_to_nothing_are_counted_and_named(tmp_path: Path) -> None:
    source = tmp_path / "src"
    write_files(source, {"1.jpg": b"1", "2.jpg": b"", "3.jpg": b""})
    os.symlink("/nowhere/4.jpg", source / "4.jpg")
    summary, warnings, _ = packed(source)
    assert (summary.num_samples, summary.num_dangling) == (3, 1)
    assert sorted(text.rpartition(":")[0] for text in warnings) == [
        "1 link to nothing, left out",
        "2 empty files, packed so",
    ]


def test_links_out_of_the_folder_are_followed_and_named(tmp_path: Path) -> None:
    """Of files and of folders, by any path; links from one place of the folder to another are nobody's surprise."""
    source, elsewhere = tmp_path / "src", tmp_path / "src-of-others"
    write_files(source, {"top/1.jpg": b"1", "deep/2.jpg": b"2"})
    write_files(elsewhere, {"3.jpg": b"3", "more/4.jpg": b"4"})
    os.symlink(source / "top" / "1.jpg", source / "deep" / "5.jpg")
    assert packed(source)[1] == []
    os.symlink("../../src-of-others/3.jpg", source / "deep" / "6.jpg")
    summary, warnings, _ = packed(source, force=True)
    assert (summary.num_samples, warnings) == (
        4,
        ["1 link out of the folder, packed with what is there: deep/6.jpg"],
    )
    os.symlink(elsewhere / "more", source / "deep" / "more")
    summary, warnings, _ = packed(source, force=True)
    assert summary.num_samples == 5
    assert [text.rpartition(":")[0] for text in warnings] == ["2 links out of the folder, packed with what is there"]


def on_a_disk_of(size: str, folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run refill where ``folder`` is a file system of this size, which holds what the folder held."""
    script = (
        f'cp -a "$0" "$0.was" && mount -t tmpfs -o size={size} none "$0" && cp -a "$0.was/." "$0" && "$@"; '
        'status=$?; ls "$0"; exit $status'
    )
    try:
        tried = subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(folder)], capture_output=True)
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if tried.returncode:
        pytest.skip(f"no file system can be mounted here: {tried.stderr.decode()}")
    running = ["unshare", "-rm", "sh", "-c", script, str(folder), sys.executable, "-m", "refill_service.cli"]
    return subprocess.run(
        [*running, *arguments], env=os.environ | environment, capture_output=True, text=True, timeout=120
    )


def test_force_leaves_a_dataset_that_the_new_one_has_no_room_beside(tmp_path: Path) -> None:
    image_folder(tmp_path / "src")
    write_files(tmp_path / "large", {f"{number}.bin": bytes(1 << 20) for number in range(4)})
    disk = tmp_path / "disk"
    packed(tmp_path / "src")
    (tmp_path / "out").rename(disk)
    ran = on_a_disk_of("3m", disk, "pack", str(tmp_path / "large"), str(disk), "--force", "--quiet")
    assert ran.returncode == 2, ran.stderr
    assert "has room for" in ran.stderr
    assert "the dataset that is there stays" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    assert sorted(ran.stdout.split()) == sorted(path.name for path in disk.iterdir()), "something is gone"
    assert INDEX_KEY in ran.stdout.split()


def test_force_leaves_a_dataset_that_a_quota_has_no_room_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free room of the file system says nothing of it; that room can't be taken does."""
    image_folder(tmp_path / "src")
    packed(tmp_path / "src")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    tried: list[int] = []

    def over_quota(file: int, size_bytes: int) -> int:
        tried.append(size_bytes)
        return errno.EDQUOT

    monkeypatch.setattr(file_store, "allocate", over_quota)
    with pytest.raises(InvalidInput, match=r"quota exceeded, and this takes .*; the dataset that is there stays"):
        packed(tmp_path / "src", force=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert tried[0] >= sum(map(len, before.values())), "less than what it takes was tried"


def test_room_is_taken_for_a_moment_without_writing_it(tmp_path: Path) -> None:
    asyncio.run(FileStore(str(tmp_path / "new")).try_room("a/b", 1 << 20))
    assert list((tmp_path / "new" / "a").iterdir()) == []
    with open(tmp_path / "file", "wb") as file:
        assert file_store.allocate(file.fileno(), 1 << 20) in (0, errno.EOPNOTSUPP)
        assert file_store.allocate(file.fileno(), 0) == errno.EINVAL


@pytest.mark.parametrize(
    ("size", "folder_bytes", "said"),
    [("64k", 0, "can't write to the temporary folder: No space left on device"), ("1m", 2000, "can't be sorted in")],
    ids=["the index", "names"],
)
def test_a_full_temporary_folder_is_one_line(tmp_path: Path, size: str, folder_bytes: int, said: str) -> None:
    above = "/".join(["y" * 200] * (folder_bytes // 200))
    write_files(tmp_path / "src", {f"{above}/{number}.bin".lstrip("/"): b"1" for number in range(5000)})
    (tmp_path / "tmp").mkdir()
    destination, tmp = str(tmp_path / "out"), str(tmp_path / "tmp")
    ran = on_a_disk_of(size, tmp_path / "tmp", "pack", str(tmp_path / "src"), destination, "--quiet", TMPDIR=tmp)
    assert ran.returncode == 2, ran.stderr
    assert said in ran.stderr
    assert "TMPDIR" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1, ran.stderr
    assert not (tmp_path / "out" / INDEX_KEY).exists()


def test_pictures_of_several_kinds_side_by_side_are_remarked_on(tmp_path: Path) -> None:
    """A DataLoader does not put them into one batch."""
    folder = tmp_path / "in"
    write_files(
        folder, {f"{name}.{kind}": b"x" for kind in ("jpg", "jpeg", "png") for name in (f"a-{kind}", f"b-{kind}")}
    )
    _, warnings, _ = packed(folder)
    (warning,) = warnings
    assert "samples have different members (jpeg 2, jpg 2, png 2 of 6)" in warning
    assert "transform" in warning
