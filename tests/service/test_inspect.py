"""`refill inspect`: what is there, and every damaged sample by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.service.datasets_on_disk import image_folder, tar_of

from refill_service.cache_core.dataset_index import BLOCK_SAMPLES, INDEX_KEY
from refill_service.cli import main


@pytest.fixture
def dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    image_folder(tmp_path / "src")
    assert main(["pack", str(tmp_path / "src"), str(tmp_path / "out"), "--blob-size", "40kB", "--quiet"]) == 0
    capsys.readouterr()
    return tmp_path / "out"


def inspected(dataset: Path, capsys: pytest.CaptureFixture[str], status: int, *options: str) -> dict[str, Any]:
    assert main(["inspect", str(dataset), "--json", "--quiet", *options]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_summary(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspected(dataset, capsys, 0)
    blobs = sorted(path.stat().st_size for path in dataset.glob("*.tar"))
    assert (found["num_samples"], found["num_blobs"], found["blob_bytes"]) == (60, len(blobs), sum(blobs))
    assert found["sample_bytes"] == sum(blobs) - 1024 * len(blobs)
    assert (found["blob_sizes"]["min"], found["blob_sizes"]["max"]) == (blobs[0], blobs[-1])
    assert found["index_bytes"] == (dataset / INDEX_KEY).stat().st_size
    assert found["sample_sizes_exact"] is True
    assert found["metadata"]["classes"] == ["class-0", "class-1", "class-2"]
    assert found["verified"] is False
    assert "damage" not in found


def test_table(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(dataset), "--verify"]) == 0
    said = capsys.readouterr().out
    for text in ("60, ", "class-0, class-1, class-2", "median", "all 60 samples are as they were packed"):
        assert text in said


def test_damage_is_named(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspected(dataset, capsys, 0, "--verify")["damage"] == []
    # One flipped byte, one blob cut in its last sample, one blob gone.
    names = sorted(path.name for path in dataset.glob("*.tar"))
    flipped, cut, gone = (dataset / name for name in names[:3])
    data = bytearray(flipped.read_bytes())
    data[700] ^= 1
    flipped.write_bytes(data)
    cut.write_bytes(cut.read_bytes()[: -1024 - 10])
    gone.unlink()
    damage = inspected(dataset, capsys, 1, "--verify")["damage"]
    assert all(each["error"] == "SampleDamaged" for each in damage)
    assert [each["blob"] for each in damage[:2]] == names[:2]
    assert damage[0]["start"] <= 700 < damage[0]["end"]
    assert damage[1]["end"] == cut.stat().st_size + 10
    assert {each["blob"] for each in damage[2:]} == {names[2]}
    assert [each["sample"] for each in damage[1:]] == list(range(damage[1]["sample"], damage[-1]["sample"] + 1))

    assert main(["inspect", str(dataset), "--verify", "--quiet"]) == 1
    said = capsys.readouterr().out
    assert f"{flipped.as_uri()}: sample {damage[0]['sample']}, bytes {damage[0]['start']}-{damage[0]['end']}" in said
    assert f"{len(damage)} damaged" in said


def test_a_damaged_index(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = dataset / INDEX_KEY
    whole = index.read_bytes()
    for damaged in (whole[:-1], whole[:100], b"", bytes([whole[0] ^ 1]) + whole[1:]):
        index.write_bytes(damaged)
        assert main(["inspect", str(dataset)]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert f"{index.as_uri()} is damaged in its" in said
    index.write_bytes(whole[:8] + b"\x09" + whole[9:])
    assert main(["inspect", str(dataset)]) == 2
    assert "version 9" in capsys.readouterr().err


def test_a_damaged_block_of_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "src"
    source.mkdir()
    for number in range(BLOCK_SAMPLES + 10):
        (source / f"{number}.txt").write_bytes(b"")
    out = tmp_path / "out"
    assert main(["pack", str(source), str(out), "--blob-size", "1MB", "--quiet"]) == 0
    capsys.readouterr()
    index = out / INDEX_KEY
    data = bytearray(index.read_bytes())
    data[-20] ^= 1
    index.write_bytes(data)
    assert main(["inspect", str(out), "--json", "--quiet"]) == 2
    assert "block 1 of records" in capsys.readouterr().err
    damage = inspected(out, capsys, 1, "--verify")["damage"]
    assert [(each["error"], each["section"]) for each in damage] == [("IndexDamaged", "block 1 of records")]


def test_nothing_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == 2
    assert "refill pack" in capsys.readouterr().err


def test_what_short_chunks_cost_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, per_blob in (("uneven", 33), ("even", 64)):
        folder = tmp_path / name
        folder.mkdir()
        for blob in range(3):
            members = [(f"{blob}-{sample:02}.bin", b"1") for sample in range(per_blob if blob < 2 else 5)]
            (folder / f"{blob}.tar").write_bytes(tar_of(members))
        assert main(["index", str(folder), "--quiet", "--jobs", "1"]) == 0
    capsys.readouterr()
    # 33 samples are 5 chunks of 8, where 4.125 would do; of 16 they are 3 in place of 2.0625.
    more = {
        "8": pytest.approx(5 / 4.125 - 1),
        "16": pytest.approx(3 / 2.0625 - 1),
        "32": pytest.approx(2 / 1.03125 - 1),
    }
    assert inspected(tmp_path / "uneven", capsys, 0)["more_for_short_chunks"] == more
    assert inspected(tmp_path / "even", capsys, 0)["more_for_short_chunks"] == dict.fromkeys(("8", "16", "32", "64"), 0)
    assert main(["inspect", str(tmp_path / "uneven")]) == 0
    assert "at the ends of blobs; more GETs for them: K=8 21%, K=16 45%, K=32 94%" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "even")]) == 0
    assert "short chunks" not in capsys.readouterr().out
