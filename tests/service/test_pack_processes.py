"""``pack`` and ``index`` by several processes write what one process writes, fail as it does, and leave nothing."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.forked_processes import PODS, ForkedProcess, run_refill, start
from tests.service.datasets_on_disk import image_folder, write_files
from tests.service.packing import everything, names_at, packed
from tests.waiting import until

from refill.errors import DatasetNotFound
from refill_service.cli import main
from refill_service.datasets.blob_builder import END_OF_ARCHIVE, FillingBlob, blobs_of, built_blob
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.pack_claim import MARKER_KEY
from refill_service.datasets.source_scan import SourceMember, SourceSample
from refill_service.num_cores import num_cores


def pack_command(source: Path, url: str, *more: str) -> list[str]:
    return ["pack", str(source), url, "--blob-size", "40kB", "--jobs", "3", *more]


def stored(url: str) -> dict[str, bytes]:
    return everything(url)[0]


@pytest.mark.variants("s3")
def test_packed_by_processes_is_the_same_byte_by_byte(tmp_path: Path, url: str) -> None:
    """A sample larger than a blob, names that need more than one header, classes and labels included."""
    image_folder(tmp_path / "src", per_class=40)
    letters = random.Random(1)
    odd = {"class-0/" + "x" * 150 + ".jpg": b"long", "class-1/größe.jpg": b"wide", "class-2/0.jpg": bytes(90_000)}
    odd |= {f"class-0/{number}.jpg": letters.randbytes(512 * (number % 7)) for number in range(30)}
    write_files(tmp_path / "src", odd)
    packed(tmp_path / "src", (tmp_path / "one").as_uri(), seed=3)
    assert main(pack_command(tmp_path / "src", url, "--seed", "3", "--quiet")) == 0
    one, several = stored((tmp_path / "one").as_uri()), stored(url)
    assert len(one) > 8, "many blobs"
    assert sorted(one) == sorted(several)
    assert [key for key in one if one[key] != several[key]] == []


def test_indexed_by_processes_is_the_same_byte_by_byte(tmp_path: Path) -> None:
    image_folder(tmp_path / "src", per_class=40)
    url = (tmp_path / "out").as_uri()
    packed(tmp_path / "src", url)
    found = []
    for jobs in ("1", "3"):
        assert main(["index", url, "--force", "--quiet", "--jobs", jobs]) == 0
        found.append(stored(url))
    assert found[0] == found[1]


extensions = st.sampled_from(["jpg", "cls", "json", "ü" * 40, "e" * 120])
drawn_samples = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.text(st.characters(exclude_characters="/.\0", exclude_categories=["Cs"]), min_size=1, max_size=90),
        st.dictionaries(extensions, st.integers(0, 5000), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda drawn: drawn[:2],
)


@given(drawn_samples, st.integers(4096, 30_000), st.booleans())
def test_where_blobs_end_is_known_before_files_are_read(
    tmp_path_factory: pytest.TempPathFactory, drawn: Any, blob_bytes: int, with_classes: bool
) -> None:
    folder = tmp_path_factory.mktemp("files")
    samples = []
    for number, (above, name, members) in enumerate(drawn):
        of_sample = []
        for extension, size in sorted(members.items()):
            path = f"{number}-{len(of_sample)}"
            (folder / path).write_bytes(b"1" * size)
            of_sample.append(SourceMember(extension, path, size))
        samples.append(SourceSample(f"{above}/{name}", of_sample))
    classes = {"a": 0, "b": 12} if with_classes else None
    groups = list(blobs_of(samples, blob_bytes=blob_bytes, class_numbers=classes))
    blobs = [built_blob(str(folder), group, classes, lambda num_bytes: None) for group in groups]
    assert [len(group) for group in groups] == [len(blob.records) for blob in blobs]
    filling = FillingBlob(blob_bytes - len(END_OF_ARCHIVE))
    ends = [count for blob in blobs for size in blob.records["length"].tolist() for count in filling.add(size)]
    assert [len(group) for group in groups[:-1]] == ends


def test_a_file_that_changes_is_one_line_and_nothing_is_left(tmp_path: Path) -> None:
    """A file of a file system that says it is empty has bytes when it is read."""
    write_files(tmp_path / "src", {f"{number:02}.bin": bytes(20_000) for number in range(20)})
    (tmp_path / "src" / "x.bin").symlink_to("/proc/self/status")  # of size 0, and not empty
    done = run_refill(pack_command(tmp_path / "src", str(tmp_path / "out")))
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("refill: "), done.stderr
    assert "x.bin changed while packing" in last, done.stderr
    assert "Traceback" not in done.stderr
    assert "semaphore" not in done.stderr
    assert names_at(tmp_path / "out") == []


def test_a_damaged_tar_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image_folder(tmp_path / "src")
    url = (tmp_path / "out").as_uri()
    packed(tmp_path / "src", url)
    for path in (tmp_path / "out").glob("refill.*"):
        path.unlink()
    victim = sorted((tmp_path / "out").glob("*.tar"))[1]
    os.truncate(victim, 2000)
    assert main(["index", url, "--quiet", "--jobs", "3"]) == 2
    assert victim.name in capsys.readouterr().err
    with pytest.raises(DatasetNotFound):
        asyncio.run(Dataset.open(url))


def begun(folder: Path) -> ForkedProcess:
    """A pack of ``src`` into ``out``, in a session of its own; what it says is in ``log``."""
    command = pack_command(folder / "src", str(folder / "out"), "--quiet", "--blob-size", "8kB")
    with (folder / "log").open("wb") as log:
        return start(PODS, ["-m", "refill_service.cli", *command], dict(os.environ), log)


@pytest.mark.variants("2")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_broken_off(tmp_path: Path, how: signal.Signals) -> None:
    """As a terminal does it: the interrupt goes to all processes. A killed one leaves no other behind."""
    image_folder(tmp_path / "src", per_class=400)
    process = begun(tmp_path)
    out = tmp_path / "out"
    until(lambda: any(name.startswith("blob-") for name in names_at(out)), "a blob to be stored")
    children = [int(pid) for pid in children_of(process.pid)]
    if how == signal.SIGINT:
        os.killpg(process.pid, how)
    else:
        process.kill()
    returncode, errors = process.wait(60), (tmp_path / "log").read_text()
    until(lambda: not any(is_running(pid) for pid in children), "its processes to end")
    if how == signal.SIGINT:
        assert (returncode, errors.strip()) == (130, "refill: interrupted")
        assert names_at(out) == []
    else:
        assert MARKER_KEY in names_at(out)
    with pytest.raises(DatasetNotFound):
        asyncio.run(Dataset.open(out.as_uri()))
    packed(tmp_path / "src", out.as_uri())


def test_a_process_that_is_killed_is_one_line(tmp_path: Path) -> None:
    image_folder(tmp_path / "src", per_class=400)
    process = begun(tmp_path)
    until(lambda: any(name.startswith("blob-") for name in names_at(tmp_path / "out")), "a blob to be stored")
    os.kill(max(workers_of(process.pid)), signal.SIGKILL)
    assert process.wait(60) == 2
    errors = (tmp_path / "log").read_text()
    assert len(errors.strip().splitlines()) == 1, errors
    assert "killed from outside" in errors
    assert names_at(tmp_path / "out") == []


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split() + [
        child
        for task in Path(f"/proc/{pid}/task").iterdir()
        if task.name != str(pid)
        for child in (task / "children").read_text().split()
    ]


def workers_of(pid: int) -> list[int]:
    """Those that pack, and not the one that looks after their semaphores."""
    return [int(child) for child in children_of(pid) if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def is_running(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("limit", "most"), [("150000 100000", 2), ("100000 100000", 1), ("10000 100000", 1), ("max 100000", None)]
)
def test_cores_of_a_container(tmp_path: Path, limit: str, most: int | None) -> None:
    (tmp_path / "cpu.max").write_text(limit + "\n")
    here = num_cores(tmp_path / "none")
    assert num_cores(tmp_path / "cpu.max") == (here if most is None else min(here, most))
