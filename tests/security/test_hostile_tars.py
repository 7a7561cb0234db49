"""`refill index` of tars that somebody wrote who wishes it ill: one clear line each, in little memory."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.service.datasets_on_disk import tar_of

from refill.formats.tar_samples import split_name
from refill_service.formats.shard_reader import key_of

GIB = 1 << 30
END = bytes(1024)


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def pax(records: bytes) -> bytes:
    return header("pax", len(records), tarfile.XHDTYPE) + records + bytes(-len(records) % 512)


def old_sparse() -> bytes:
    """A GNU sparse header whose table goes on, and on."""
    info = bytearray(header("a.bin", 512, tarfile.GNUTYPE_SPARSE))
    info[482] = 1
    info[148:156] = b" " * 8
    info[148:156] = b"%06o\0 " % sum(info)
    return bytes(info) + (bytes(504) + b"\1" + bytes(7)) * 5000


SPARSE = pax(b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n")

HOSTILE: dict[str, tuple[Callable[[], bytes], int, str]] = {
    # what the tar begins with, how long it is, what is said
    "a pax header of 1 GiB": (lambda: header("x", GIB, tarfile.XHDTYPE), GIB + 4096, "more than 1 MiB"),
    "a global one": (lambda: header("x", GIB, tarfile.XGLTYPE), GIB + 4096, "more than 1 MiB"),
    "a name of 1 GiB": (lambda: header("x", GIB, tarfile.GNUTYPE_LONGNAME), GIB + 4096, "more than 1 MiB"),
    "a chain of names": (
        lambda: (header("x", 1, tarfile.GNUTYPE_LONGNAME) + b"a" + bytes(511)) * 900,
        0,
        "can't be read",
    ),
    "a chain of pax headers": (lambda: pax(b"12 path=a.x\n") * 900, 0, "can't be read"),
    "a chain of global headers": (
        lambda: b"".join(header("g", 16, tarfile.XGLTYPE) + b"16 abcdefgh=xyz\n"[:16] + bytes(496) for _ in range(900)),
        0,
        "can't be read",
    ),
    "an old sparse table without end": (old_sparse, 0, "can't be read"),
    "a sparse member": (
        lambda: (
            pax(b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n") + header("a.bin", 512) + b"1\n0\n1\n" + bytes(506)
        ),
        0,
        "sparse",
    ),
    "a sparse map that is none": (
        lambda: SPARSE + header("a.bin", 512) + b"x" * 512,
        0,
        "can't be read",
    ),
    "sparse numbers that are none": (lambda: pax(b"20 GNU.sparse.map=x\n") + header("a.bin", 512), 0, "can't be read"),
    "a size below zero": (lambda: pax(b"14 size=-4096\n") + header("a.bin", 512) + bytes(512), 0, "can't be read"),
}


@pytest.mark.variants("a chain of global headers", "a chain of names", "a global one")
@pytest.mark.parametrize("name", HOSTILE)
def test_one_clear_line(name: str, tmp_path: Path) -> None:
    begin, size, said = HOSTILE[name]
    with (tmp_path / "shard.tar").open("wb") as file:
        file.write(begin() + END)
        if size:
            file.truncate(size)
    command = [sys.executable, "-c", _WITH_PEAK, "index", str(tmp_path), "--quiet"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    *lines, peak = found.stderr.strip().splitlines()
    assert found.returncode != 0
    assert len(lines) == 1, found.stderr
    assert "shard.tar" in lines[0]
    assert said in lines[0]
    assert int(peak) < 400_000, "KiB at most"
    assert not (tmp_path / "refill.index").exists()


_WITH_PEAK = r"""
import re, sys
from refill_service.cli import main
try:
    status = main()
except SystemExit as ended:
    status = ended.code
# Of this program alone: getrusage counts what the process had before it became this one, too.
print(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1], file=sys.stderr)
sys.exit(status)
"""


def test_headers_that_people_write_are_read(tmp_path: Path) -> None:
    """Long names, attributes of 100 KB, a global header: none of that is an attack."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", pax_headers={"comment": "c" * 1000}) as tar:
        info = tarfile.TarInfo("d/" * 400 + "a.jpg")
        info.size, info.pax_headers = 3, {"SCHILY.xattr.user.x": "v" * 100_000}
        tar.addfile(info, io.BytesIO(b"abc"))
    (tmp_path / "shard.tar").write_bytes(data.getvalue())
    (tmp_path / "gnu.tar").write_bytes(tar_of([("d/" * 400 + "a.jpg", b"abc")], tarfile.GNU_FORMAT))
    command = [sys.executable, "-m", "refill_service.cli", "index", str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    "name",
    ["a.b", "a/b.c.d", "a.b/c", "x/.hidden", "x/y/.hidden.txt", "v1.0/.hidden", ".x", "/.x", "a//.x", "", "a\n.b"],
)
def test_keys_are_webdatasets(name: str) -> None:
    found = split_name(name)
    assert key_of(name) == (None if found is None else found[0])


def test_a_name_of_a_mebibyte_takes_no_time() -> None:
    """A pattern that tries every slash again takes hours."""
    started = time.process_time()
    assert key_of("a/" * 500_000) is None
    assert time.process_time() - started < 1
