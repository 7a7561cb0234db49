"""Does a `refill pack` that fails, is killed or overtaken leave nothing that looks complete?"""

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
from pathlib import Path

import pytest
from tests.forked_processes import PODS, ForkedProcess, start
from tests.service.datasets_on_disk import image_folder, write_files
from tests.service.packing import everything, names_at, packed
from tests.waiting import until, until_in_loop

from refill.errors import DatasetExists, DatasetNotFound, InvalidInput, StoreNotFound
from refill_service.cache_core.dataset_index import INDEX_KEY
from refill_service.cli import main
from refill_service.datasets import pack_claim
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.pack_claim import MARKER_KEY
from refill_service.object_store.base import WritableData
from refill_service.object_store.file_store import FileStore


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
        write = FileStore.write
        for victim in ("blob-000003.tar", INDEX_KEY):

            async def full(store: FileStore, key: str, data: WritableData, victim: str = victim) -> None:
                if key == victim:
                    raise StoreNotFound("no space left")
                await write(store, key, data)

            monkeypatch.setattr(FileStore, "write", full)
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

    @pytest.mark.variants("s3-9", "file-2")
    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
    def test_killed(self, tmp_path: Path, url: str, how: signal.Signals) -> None:
        image_folder(tmp_path / "src", per_class=100)
        process, log = stopped_pack(tmp_path / "src", url)
        process.send_signal(how)
        process.send_signal(signal.SIGCONT)
        returncode, errors = process.wait(30), said(log)
        assert returncode == (-9 if how == signal.SIGKILL else 130), errors
        if how == signal.SIGINT:
            assert errors == ["refill: interrupted"]
        with pytest.raises(DatasetNotFound):
            asyncio.run(Dataset.open(url))
        if how == signal.SIGKILL:
            assert main(["index", url, "--quiet"]) == 2  # half the blobs are no dataset
        packed(tmp_path / "src", url)
        packed(tmp_path / "src", (tmp_path / "reference").as_uri())
        assert everything(url)[0] == everything((tmp_path / "reference").as_uri())[0]

    @pytest.mark.variants("s3")
    def test_two_at_once(self, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        image_folder(tmp_path / "src", per_class=100)
        process, log = stopped_pack(tmp_path / "src", url)
        try:
            for force in (False, True):
                with pytest.raises(DatasetExists, match=f"process {process.pid}"):
                    packed(tmp_path / "src", url, force=force)
            assert main(["index", url, "--quiet"]) == 2
            # Asleep for so long that it is taken for dead.
            monkeypatch.setattr(pack_claim.Marker, "is_stale", True)
            packed(tmp_path / "src", url, seed=9)
            before = everything(url)[0]
        finally:
            process.send_signal(signal.SIGCONT)
        assert process.wait(30) == 2
        assert "another pack took over" in " ".join(said(log))
        assert INDEX_KEY in before
        assert MARKER_KEY not in before
        assert everything(url)[0] == before

    def test_a_marker_that_comes_after_a_long_sleep_takes_nothing_away(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another pack took over meanwhile, and has ended."""

        async def run() -> None:
            claim = pack_claim.PackClaim(FileStore(str(tmp_path)))
            await claim.begin()
            write_files(tmp_path, {"blob-000000.tar": b"theirs", INDEX_KEY: b"theirs"})
            with pytest.raises(DatasetExists, match="stood still"):
                await until_it_fails(claim)
            await claim.abort()

        async def until_it_fails(claim: pack_claim.PackClaim) -> None:
            while True:
                await asyncio.sleep(0)
                await claim.check()

        monkeypatch.setattr(pack_claim, "RENEW_SECONDS", 0.0)
        monkeypatch.setattr(pack_claim, "STALE_SECONDS", -1.0)
        asyncio.run(asyncio.wait_for(run(), 30))
        assert names_at(tmp_path) == ["blob-000000.tar", INDEX_KEY]

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

            async def is_renewed() -> bool:
                return await pack_claim.marker_of(store) != first

            await until_in_loop(is_renewed, "the next time of the marker")
            renewed = await pack_claim.marker_of(store)
            assert first is not None
            assert renewed is not None
            assert (renewed.run, renewed.at > first.at) == (first.run, True)
            await claim.commit()
            assert await pack_claim.marker_of(store) is None
            with pytest.raises(DatasetExists, match="was removed"):
                await claim.check()
            await store.close()

        asyncio.run(run())


STOPPED = "stopped"
STOPPING = """
import asyncio, os, signal, sys
from refill_service.cli import main
from refill_service.datasets import pack, pack_claim
from refill_service.object_store.base import ObjectStore
check, check_is_of, write = pack_claim.PackClaim.check, pack.check_is_of, ObjectStore.write
checked, stored = [], []
async def stop_with_two_stored(claim):
    if len(checked) >= 2 and "stopped" not in stored:
        while len(stored) < len(checked):  # no upload may be on its way
            await asyncio.sleep(0.001)
        stored.append("stopped")
        print("stopped", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    await check(claim)
async def counted(store, run):
    checked.append(run)
    await check_is_of(store, run)
async def write_and_count(store, key, data):
    await write(store, key, data)
    if key.startswith("blob-"):
        stored.append(key)
pack_claim.PackClaim.check, pack.check_is_of, ObjectStore.write = stop_with_two_stored, counted, write_and_count
sys.exit(main(sys.argv[1:]))
"""


def stopped_pack(source: Path, url: str) -> tuple[ForkedProcess, Path]:
    """A pack in a process that has stopped itself with some blobs stored and none on its way, and what it has said."""
    log, command = (
        source.parent / "log",
        ["-c", STOPPING, "pack", str(source), url, "--blob-size", "40kB", "--jobs", "1", "--quiet"],
    )
    environment = {**os.environ, "TMPDIR": str(source.parent)}  # what it leaves when killed goes with the test
    with log.open("wb") as output:
        process = start(PODS, command, environment, output)
    until(lambda: process.poll() is not None or STOPPED in log.read_text().splitlines(), "the stop of the process")
    assert process.returncode is None, log.read_text()
    status = Path(f"/proc/{process.pid}/status")
    until(lambda: re.search(r"State:\s+T", status.read_text()) is not None, "the stop of the process")
    return process, log


def said(log: Path) -> list[str]:
    """Since it went on."""
    return [line for line in log.read_text().splitlines() if line != STOPPED]
