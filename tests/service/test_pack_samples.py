"""`refill.pack`: what a script has in Python becomes a dataset, in processes, and a pack that was killed goes on."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.conftest import S3Server
from tests.draws import draws
from tests.service.made_samples import breaks_at_170, sample_of
from tests.service.packing import everything
from tests.waiting import until

import refill
from refill.errors import DatasetExists, EmptyDataset, InvalidInput
from refill.formats.decoders import make_decode
from refill.formats.tar_samples import parse_members
from refill_service.datasets.blob_builder import tar_range
from refill_service.datasets.sample_members import members_of

BLOB = {"blob_bytes": 20_000, "quiet": True}


def parsed(samples: list[bytes]) -> list[tuple[str, dict[str, bytes]]]:
    found = [parse_members(memoryview(each), place) for place, each in enumerate(samples)]
    return [(key, {name: bytes(view) for name, view in members.items()}) for key, members in found]


def numbers_at(url: str) -> list[int]:
    found = []
    for key, members in parsed(everything(url)[3]):
        number = json.loads(members["json"])["n"]
        assert members["bin"] == sample_of(number)["bin"]
        assert key == f"{number:09}"
        found.append(number)
    return found


@pytest.mark.variants("1")
@pytest.mark.parametrize("jobs", [1, 3])
def test_the_same_samples_give_the_same_bytes_whoever_makes_them(tmp_path: Path, jobs: int) -> None:
    found = refill.pack(range(400), (tmp_path / "out").as_uri(), function=sample_of, jobs=jobs, **BLOB)
    assert (found.num_samples, found.jobs, found.num_kept) == (400, jobs, 0)
    objects, metadata, records, _ = everything((tmp_path / "out").as_uri())
    numbers = numbers_at((tmp_path / "out").as_uri())
    assert sorted(numbers) == list(range(400))
    assert numbers != list(range(400)), "it is not shuffled"
    assert len(records) == 400
    assert metadata["labels"]["classes"] == 7
    of_labels = next(key for key in objects if key.startswith("refill.column.cls."))
    blobs = {f"blob-{number:06}.tar" for number in range(found.num_blobs)}
    assert set(objects) == blobs | {"refill.index", of_labels}
    refill.pack([sample_of(number) for number in range(400)], (tmp_path / "again").as_uri(), jobs=1, **BLOB)
    assert everything((tmp_path / "again").as_uri())[0] == objects


def test_an_iterator_keeps_its_order(tmp_path: Path) -> None:
    out = tmp_path.as_uri()
    refill.pack((sample_of(number) for number in range(300)), out, classes=list("abcdefg"), **BLOB)
    assert numbers_at(out) == list(range(300))
    assert everything(out)[1]["classes"] == list("abcdefg")
    with pytest.raises(DatasetExists, match="--force"):
        refill.pack([sample_of(1)], out, **BLOB)
    refill.pack([sample_of(1)], out, force=True, **BLOB)
    assert len(everything(out)[3]) == 1


@pytest.mark.variants("sequence-2")
@pytest.mark.parametrize(
    ("form", "jobs"),
    [
        ("sequence", 2),
        ("iterator", 1),
        pytest.param("sequence", 1, marks=pytest.mark.variant),
        pytest.param("iterator", 2, marks=pytest.mark.variant),
    ],
)
def test_after_an_error_it_goes_on(tmp_path: Path, jobs: int, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path.as_uri()

    def packed() -> Any:
        given: Any = range(300) if form == "sequence" else iter(range(300))
        return refill.pack(given, out, function=breaks_at_170, shuffle=False, jobs=jobs, **BLOB)

    with pytest.raises(InvalidInput, match=r"^item 170: ValueError: no such photo; what is packed stays"):
        packed()
    assert not (tmp_path / "refill.index").exists()
    parts = len(list(tmp_path.glob("refill.part.*")))
    assert parts
    monkeypatch.setenv("REPAIRED", "1")
    times = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("blob-*")}
    found = packed()
    assert 0 < found.num_kept < 300
    assert numbers_at(out) == list(range(300))
    assert not list(tmp_path.glob("refill.p*"))
    kept = [name for name, changed in times.items() if (tmp_path / name).stat().st_mtime_ns == changed]
    assert len(kept) >= parts, "what was stored was stored again"
    assert found.made_bytes < found.blob_bytes


@pytest.mark.variant
def test_into_a_bucket_it_goes_on_too(s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    out = f"s3://{s3_environment.new_bucket()}/data"
    with pytest.raises(InvalidInput, match=r"^item 170: "):
        refill.pack(range(300), out, function=breaks_at_170, shuffle=False, jobs=1, **BLOB)
    monkeypatch.setenv("REPAIRED", "1")
    found = refill.pack(range(300), out, function=breaks_at_170, shuffle=False, jobs=1, **BLOB)
    assert 0 < found.num_kept < 300
    assert numbers_at(out) == list(range(300))
    assert not [key for key in everything(out)[0] if key.startswith("refill.p")]


def test_after_a_kill_it_goes_on(tmp_path: Path) -> None:
    """With all of its processes, in the middle of a blob."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, os, refill\n"
        "from tests.service.made_samples import sample_of\n"
        "def make(number):\n"
        "    while number == 250 and not os.path.exists(sys.argv[2]):\n"
        "        import time; time.sleep(0.05)\n"
        "    return sample_of(number)\n"
        "if __name__ == '__main__':\n"
        "    found = refill.pack(range(400), sys.argv[1], function=make, shuffle=False, jobs=2, blob_bytes=20_000)\n"
        "    print(found.num_kept, found.num_samples)\n"
    )
    out = tmp_path / "out"
    command = [sys.executable, str(script), out.as_uri(), str(tmp_path / "go")]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    killed = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.DEVNULL)
    try:
        until(lambda: len(list(out.glob("refill.part.*"))) >= 4, "four parts")
    finally:
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
    assert not (out / "refill.index").exists()
    (tmp_path / "go").touch()
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    kept, samples = map(int, ran.stdout.split())
    assert samples == 400
    assert 0 < kept < 400
    assert numbers_at(out.as_uri()) == list(range(400))


def test_another_pack_goes_on_with_nothing_of_it(tmp_path: Path) -> None:
    out = tmp_path.as_uri()
    with pytest.raises(InvalidInput):
        refill.pack(range(300), out, function=breaks_at_170, jobs=1, **BLOB)
    found = refill.pack(range(200, 500), out, function=sample_of, jobs=1, **BLOB)
    assert found.num_kept == 0
    assert found.num_samples == 300
    assert len(everything(out)[3]) == 300
    assert not list(tmp_path.glob("refill.part.*"))


def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import refill\n"
        "from tests.service.made_samples import sample_of\n"
        f"refill.pack(range(400), {(tmp_path / 'out').as_uri()!r}, function=sample_of, jobs=2, blob_bytes=20_000)\n"
    )
    ran = subprocess.run(
        [sys.executable, str(script)], env=os.environ | {"PYTHONPATH": os.getcwd()}, capture_output=True, text=True
    )
    assert ran.returncode
    assert "refill: call refill.pack below `if __name__ == '__main__':`" in ran.stderr


def test_what_can_not_be_packed_is_one_line(tmp_path: Path) -> None:
    out = tmp_path.as_uri()

    def refused(samples: Any, text: str, **more: Any) -> None:
        with pytest.raises((InvalidInput, EmptyDataset), match=text) as raised:
            refill.pack(samples, out, **(BLOB | more))
        assert len(str(raised.value).splitlines()) == 1
        assert "no running event loop" not in str(raised.getrepr(chain=True)), (
            "of how refill.pack works nothing is said"
        )

    refused([], "no samples")
    refused({"a": 1}, "takes an iterable of samples, got a dict")
    refused([3], "item 0: a sample is a dict")
    refused([{"jpg": object()}], "item 0: member 'jpg' is a object")
    refused([{"": b""}], "item 0: a member is called ''")
    refused([{"a/b": b""}], "item 0: a member is called 'a/b'")
    refused([{"__key__": "a/"}], "is no name of a file")
    refused([{"__key__": "a"}], "has no members")
    refused([{"x.json": {}, "X": {}}], "two members are called 'x.json'")
    refused([{"a": np.array([object()])}], "array of Python's objects")
    refused(iter([{"a": b""}]), "shuffle=True needs", shuffle=True)
    refused([{"a": b""}], "blob_bytes must be at least", blob_bytes=7)
    refused([{"a": b""}], "blob_bytes: '7 stones' is not a number of bytes", blob_bytes="7 stones")
    refused([{"a": b""}], "blob_bytes must be at least", blob_bytes="1kB")
    refused([{"cls": 1.5}], "member 'cls' is 1.5: a label is a whole number")
    refused([{"a": b"x" * 9000}] * 9, "can't be given to other processes", function=lambda each: each, jobs=2)
    assert not list(tmp_path.iterdir())


values = st.one_of(
    st.binary(max_size=600),
    st.text(max_size=50),
    st.integers(-5, 5),
    st.floats(allow_nan=False),
    st.lists(st.integers(), max_size=4),
    st.dictionaries(st.text(max_size=3), st.booleans(), max_size=3),
    st.lists(st.floats(width=32), max_size=4).map(lambda given: np.array(given, np.float32)),
)


@draws(150)
@given(
    st.dictionaries(st.from_regex(r"[a-z][a-z0-9_]{0,9}", fullmatch=True), values, min_size=1, max_size=4),
    st.one_of(st.none(), st.from_regex(r"[a-zA-Z0-9 _.é-]{1,40}", fullmatch=True)),
)
def test_clients_decode_what_was_packed(sample: dict[str, Any], key: str | None) -> None:
    try:
        name, members = members_of(sample | ({} if key is None else {"__key__": key}), 7)
    except InvalidInput:
        assert {"cls", "txt", "json", "npy"} & set(sample) or any(each in sample for each in ("text", "transcript"))
        return
    found_key, found = parse_members(memoryview(b"".join(tar_range(name, members)[0])), 0)
    assert found_key == name == ("000000007" if key is None else key.replace(".", "%2E"))
    decode = make_decode(True)
    assert decode is not None
    for member, value in sample.items():
        stored = next(each for each in found if each == member or each.rpartition(".")[0] == member)
        if isinstance(value, bytes):
            assert bytes(found[stored]) == value
        else:
            back = decode(stored, bytes(found[stored]))
            assert np.array_equal(back, value, equal_nan=True) if isinstance(value, np.ndarray) else back == value


def test_pictures_and_tensors(tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 255, (5, 4, 3)).astype(np.uint8)
    sample = {
        "image": Image.fromarray(pixels),
        "photo.jpg": Image.fromarray(pixels),
        "mask": pytest.importorskip("torch").arange(6),
    }
    members = dict(members_of(sample, 0)[1])
    assert sorted(members) == ["image.png", "mask.npy", "photo.jpg"]
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(members["image.png"]))), pixels)
    assert Image.open(io.BytesIO(members["photo.jpg"])).format == "JPEG"
    assert np.load(io.BytesIO(members["mask.npy"])).tolist() == list(range(6))
