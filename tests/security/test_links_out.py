"""Whoever may write to a dataset's folder gets nothing else out of a pod: no link is followed out of the folder.

A link in place of a blob and an index of one-byte samples with guessed checksums would read any file of the pod's
machine, byte by byte: a sample that comes says that the guess was right, and so does an error that tells of the length.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from tests.pod_fixtures import rank_of
from tests.security.hostile_datasets import Claim, claim_of, write_index

from refill.errors import RefillError, SampleDamaged, StoreDenied, StoreNotFound
from refill_service.demo.local_cluster import LocalCluster
from refill_service.object_store import open_beneath
from refill_service.object_store.base import ObjectStore
from refill_service.object_store.open_store import open_store
from refill_service.object_store.store_url import parse_url

CLIENT = httpx.Client(timeout=30)
TOKEN = b"token-of-another-team"
GUESSES = b"tT \nabcxABCX019"
"""The right one is among them."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pods serve, as its operator lists it: by a link."""
    folder = tmp_path_factory.mktemp("machine")
    (folder / "disk").mkdir()
    (folder / "data").symlink_to("disk")
    (folder / "secret").write_bytes(TOKEN)
    return folder / "data"


@pytest.fixture(scope="module")
def pod(served: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    settings = {"memory_bytes": "8MiB", "wait_seconds": 1, "dataset_urls": served.as_uri()}
    environment = {"AWS_SECRET_ACCESS_KEY": "secret-of-the-pod"}
    with LocalCluster(1, tmp_path_factory.mktemp("pods"), settings, environment) as cluster:
        yield cluster


def guesses(folder: Path, size: int = 256) -> str:
    """A dataset whose blob is to be a link: what its first byte may be, each guess as a blob of its own."""
    return write_index(folder, [("blob", size, [claim_of(bytes([guess]))]) for guess in GUESSES])


def answers(pod: LocalCluster, url: str) -> list[str]:
    """What each guess is answered with, but for what the client knows anyway; the same whatever the policy."""
    found = answers_by(pod, url, "planned")
    assert answers_by(pod, url, "redox") == found
    return found


def answers_by(pod: LocalCluster, url: str, policy: str) -> list[str]:
    job = f"guess-{abs(hash(url))}"
    settings = {"name": job, "dataset": url, "memory_bytes": 500_000, "chunk_size": 1, "policy": policy}
    try:
        info = rank_of(pod, settings, timeout_seconds=0).info()
    except RefillError as error:
        return [type(error).__name__]
    path = f"{pod.pod_urls[0]}/v1/jobs/{job}"
    samples, of_plan = ("planned/samples", {"plan": info["plan_id"]}) if policy == "planned" else ("samples", {})
    try:
        found = []
        for guess in range(len(GUESSES)):
            asked = np.array([guess]).astype("<i8").tobytes()
            answer = CLIENT.post(f"{path}/{samples}", params=of_plan, content=asked)
            found.append(f"{answer.status_code} {answer.json()['error'] if answer.status_code >= 400 else 'bytes'}")
        return found
    finally:
        CLIENT.delete(path)


@pytest.mark.parametrize(
    "target", ["../../secret", "{served}/../secret", "/proc/self/environ", "/proc/1/status", "none"]
)
def test_a_link_in_place_of_a_blob_tells_nothing(pod: LocalCluster, served: Path, target: str) -> None:
    folder = served / f"link-{target.strip('./{').replace('/', '-')}"
    url = guesses(folder)
    (folder / "blob").symlink_to(target.format(served=served))
    found = answers(pod, url)
    assert len(set(found)) == 1, "one of the guesses was told from the others"
    assert "bytes" not in found[0]


def test_a_link_in_place_of_the_folder_tells_nothing(pod: LocalCluster, served: Path) -> None:
    outside = served.parent / "outside"
    guesses(outside)
    (outside / "blob").write_bytes(TOKEN)
    for name, target in (("one", "../outside"), ("two", str(outside)), ("three", "/proc/self/root" + str(outside))):
        (served / name).symlink_to(target)
        assert answers(pod, (served / name).as_uri()) == ["StoreDenied"]
    (served / "in-between").mkdir()
    (served / "in-between" / "up").symlink_to("../..")
    assert answers(pod, (served / "in-between" / "up" / "outside").as_uri()) == ["StoreDenied"]


def test_a_link_in_place_of_the_index_tells_nothing(pod: LocalCluster, served: Path) -> None:
    for name, target in (("of-a-file", served.parent / "secret"), ("of-nothing", served.parent / "nothing")):
        (served / name).mkdir()
        (served / name / "refill.index").symlink_to(target)
        assert answers(pod, (served / name).as_uri()) == ["StoreDenied"]


def test_links_that_stay_inside_are_followed(pod: LocalCluster, served: Path) -> None:
    """`current -> version-3`, and blobs that two names share."""
    data = os.urandom(64)
    claims = [Claim(place, 1, claim_of(data[place : place + 1]).checksum) for place in range(64)]
    write_index(served / "version-3", [("link", 64, claims)])
    (served / "version-3" / "blob").write_bytes(data)
    (served / "version-3" / "link").symlink_to("blob")
    (served / "current").symlink_to("version-3")
    settings = {"name": "inside", "dataset": (served / "current").as_uri(), "memory_bytes": 500_000, "chunk_size": 8}
    batch = rank_of(pod, settings).batch(0, np.arange(64))
    assert sorted(batch.sample_ids.tolist()) == list(range(64))
    assert all(bytes(got) == data[i : i + 1] for i, got in zip(batch.sample_ids, batch.payloads, strict=True))


def test_a_pipe_holds_nobody(pod: LocalCluster, served: Path) -> None:
    """Who opens a pipe that nobody writes to waits for ever; it would hold a thread of the store for each try."""
    url = guesses(served / "pipe")
    os.mkfifo(served / "pipe" / "blob")
    assert set(answers(pod, url)) == {"500 SampleDamaged"}


def test_a_blob_name_leads_nowhere_else(pod: LocalCluster, served: Path) -> None:
    for number, name in enumerate(("../secret", "/etc/passwd", "a/../../../secret", "..", "a//b")):
        url = write_index(served / f"name-{number}", [(name, 9, [claim_of(bytes([byte]))]) for byte in GUESSES])
        found = answers(pod, url)
        assert len(set(found)) == 1
        assert "bytes" not in found[0]


@pytest.fixture(params=["openat2", "by segments"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Some sandboxes do not know the call that the kernel has for it."""
    if request.param == "by segments":

        def unknown(*_: object) -> int:
            raise OSError(errno.ENOSYS, "Function not implemented")

        monkeypatch.setattr(open_beneath, "_openat2", unknown)
    return str(request.param)


def confined(folder: Path, served: Path) -> ObjectStore:
    return open_store(folder.as_uri(), within=parse_url(served.as_uri()))


def test_the_store_reads_what_is_inside_and_nothing_else(way: str, tmp_path: Path) -> None:
    inside = tmp_path / "served" / "data" / "set"
    (inside / "folder").mkdir(parents=True)
    (inside / "folder" / "blob").write_bytes(b"inside")
    (tmp_path / "served" / "other").write_bytes(b"of the operator")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "blob").write_bytes(b"outside")
    (inside / "file").symlink_to("../../other")
    (inside / "up").symlink_to("../../../outside")
    (inside / "far").symlink_to(tmp_path / "outside")
    (inside / "loop").symlink_to("loop")

    async def run() -> None:
        store = confined(inside, tmp_path / "served")
        assert bytes(await store.read_range("folder/blob", 1, 4)) == b"nsi"
        assert await store.head("folder/blob") == 6
        assert bytes((await store.read_start("folder/blob", 100))[0]) == b"inside"
        assert [found.key async for found in store.list()] == ["folder/blob"]
        for key in ("file", "up/blob", "far/blob", "loop", "loop/x"):
            for asked in (store.read_range(key, 0, 1), store.head(key), store.read_start(key, 1)):
                with pytest.raises(StoreDenied, match="a link leads out of the dataset's folder"):
                    await asked
        for key in ("none", "folder", "folder/none", "folder/blob/x"):
            for asked in (store.read_range(key, 0, 1), store.head(key)):
                with pytest.raises(StoreNotFound):
                    await asked
        for asked in (store.write("new", b""), store.delete("folder/blob")):  # type: ignore[assignment]
            with pytest.raises(StoreDenied, match="pods only read it"):
                await asked
        await store.close()

    asyncio.run(run())


def test_a_folder_that_is_swapped_for_a_link_meanwhile(way: str, tmp_path: Path) -> None:
    """Each read looks anew, and the kernel decides: there is no moment between a check and a use."""
    inside, outside = tmp_path / "served" / "set", tmp_path / "outside"
    for folder, data in ((inside, b"inside"), (outside, b"outside")):
        folder.mkdir(parents=True)
        (folder / "blob").write_bytes(data)

    async def run() -> None:
        store = confined(inside, tmp_path / "served")
        assert bytes(await store.read_range("blob", 0, 6)) == b"inside"
        inside.rename(tmp_path / "served" / "away")
        inside.symlink_to(outside)
        with pytest.raises(StoreDenied):
            await store.read_range("blob", 0, 6)
        await store.close()

    asyncio.run(run())


def test_people_follow_their_own_links(tmp_path: Path) -> None:
    """`refill pack`, `index` and `inspect` run with the rights of who calls them, as before."""
    (tmp_path / "elsewhere").write_bytes(b"data")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "blob").symlink_to("../elsewhere")

    async def run() -> None:
        store = open_store((tmp_path / "set").as_uri())
        assert bytes(await store.read_range("blob", 0, 4)) == b"data"
        await store.close()

    asyncio.run(run())


def test_errors_of_samples_name_no_bytes(pod: LocalCluster, served: Path) -> None:
    """What is wrong with a sample is told, not what is there in its place."""
    url = write_index(served / "wrong", [("blob", 21, [Claim(0, 21, 1)])])
    (served / "wrong" / "blob").write_bytes(TOKEN)
    with pytest.raises(SampleDamaged) as raised:
        rank_of(pod, {"name": "wrong", "dataset": url, "memory_bytes": 500_000}).batch(0, np.arange(1))
    assert TOKEN.decode() not in str(raised.value)
    assert str(raised.value).endswith("is damaged: its checksum is wrong")
