"""Jobs share the bytes that pods keep by proof: no dataset gets another one's by what its index says of itself."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import numpy as np
import pytest
from tests.pod_fixtures import rank_of, whole_epoch
from tests.security.hostile_datasets import Claim, index_of, write_index

from refill.errors import SampleDamaged
from refill.pods.received_batch import ReceivedBatch
from refill_service.cache_core.dataset_index import SampleRecords, sample_checksum
from refill_service.cache_core.policies.interface import Read
from refill_service.cache_core.sample_mapping import ChunkLayout
from refill_service.cache_core.shared_room import Asker
from refill_service.datasets.dataset_reader import Dataset
from refill_service.demo.local_cluster import LocalCluster
from refill_service.jobs.chunk_reader import ChunkReader
from refill_service.memory.byte_gate import ByteGate
from refill_service.memory.pinned_tier import PinnedMemory, PinnedTier

Packed = tuple[str, dict[str, bytes]]

TOKENS = {"theirs": "token-of-the-victims", "ours": "token-of-the-thieves"}


@pytest.fixture(scope="module", params=["memory", "disk"])
def pod(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A pod of two teams, that keeps every dataset whole from job to job."""
    folder = tmp_path_factory.mktemp("pods")
    (folder / "tokens").mkdir()
    for team, token in TOKENS.items():
        (folder / "tokens" / team).write_text(token)
    (folder / "of-pods").write_text("token-of-the-pods")
    settings: dict[str, Any] = {
        "memory_bytes": "64MiB",
        "wait_seconds": 5,
        "client_tokens": str(folder / "tokens"),
        "peer_token": str(folder / "of-pods"),
    }
    if request.param == "disk":
        settings |= {"pinned_fraction": 0, "pinned_dir": str(folder / "disk"), "pinned_dir_bytes": "64MiB"}
    with LocalCluster(1, folder, settings) as cluster:
        yield cluster


@pytest.fixture
def as_team(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def become(team: str) -> None:
        monkeypatch.setenv("REFILL_TOKEN", TOKENS[team])

    return become


@pytest.fixture(params=["redox", "planned"])
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def one_rank(pod: LocalCluster, policy: str, name: str, dataset: str, chunk_size: int = 8) -> Any:
    settings = {"dataset": dataset, "memory_bytes": 20_000_000, "policy": policy, "chunk_size": chunk_size}
    return rank_of(pod, {"name": name} | settings)


def samples_of(pod: LocalCluster, rank: Any, ids: Any) -> httpx.Response:
    """As whoever asks by hand for what the thieves' job has."""
    info = rank.info()
    path, of_plan = ("planned/samples", {"plan": info["plan_id"]}) if "plan_id" in info else ("samples", {})
    url = f"{pod.pod_urls[0]}/v1/jobs/thief/{path}"
    return httpx.post(url, params=of_plan, content=ids.astype("<i8").tobytes(), headers=_header("ours"), timeout=30)


def read_all(pod: LocalCluster, policy: str, name: str, dataset: str, *, end: bool = True) -> list[ReceivedBatch]:
    rank = one_rank(pod, policy, name, dataset)
    batches = whole_epoch(rank, 0)
    if end:
        rank.end_job()
    return batches


def copy_of(url: str, folder: Path, change: Callable[[int, Claim], Claim], data: Callable[[bytes], bytes]) -> str:
    """A dataset with another one's index, fingerprint and lengths, but for what ``change`` says of each sample."""
    index, records = index_of(url)
    source = Path(unquote(urlsplit(url).path))
    blobs = []
    folder.mkdir()
    for number, name in enumerate(index.blobs.names):
        first, end = index.blobs.first_sample[number : number + 2].tolist()
        columns = (records.part(first, end).offset, records.part(first, end).length, records.part(first, end).checksum)
        claims = [Claim(*map(int, claim)) for claim in zip(*columns, strict=True)]
        content = data((source / name).read_bytes())
        (folder / name).write_bytes(content)
        claims = [change(first + place, claim) for place, claim in enumerate(claims)]
        blobs.append((name, len(content), claims))
    return write_index(folder, blobs, fingerprint=index.fingerprint, sample_bytes=index.sample_bytes)


def foreign(url: str, batches: list[ReceivedBatch]) -> int:
    """How many samples came with the bytes that this dataset has."""
    checksums = index_of(url)[1].checksum.tolist()
    ids, payloads = (np.concatenate([batch.sample_ids for batch in batches]), [p for b in batches for p in b.payloads])
    return sum(sample_checksum(data) == checksums[sample] for sample, data in zip(ids.tolist(), payloads, strict=True))


@pytest.mark.variants("disk-redox-False")
@pytest.mark.parametrize("ended", [False, True])
def test_a_copied_fingerprint_and_lengths_get_nothing(
    pod: LocalCluster, packed: Packed, tmp_path: Path, as_team: Callable[[str], None], policy: str, ended: bool
) -> None:
    """The thieves know lengths and fingerprint, which pods tell in no secret, and bring bytes of their own."""
    as_team("theirs")
    read_all(pod, policy, f"victim-{ended}", packed[0], end=ended)
    own = bytes(range(256)) * 4000
    hostile = copy_of(
        packed[0],
        tmp_path / "hostile",
        lambda sample, claim: Claim(*claim[:2], sample_checksum(own[claim.offset : claim.offset + claim.length])),
        lambda data: own[: len(data)],
    )
    as_team("ours")
    got = read_all(pod, policy, f"thief-{ended}", hostile)
    assert foreign(packed[0], got) == 0, "samples of the other team's dataset were served"
    assert foreign(hostile, got) == len(packed[1]), "every sample of the thieves' own came, as its index says"
    if not ended:
        as_team("theirs")
        httpx.delete(f"{pod.pod_urls[0]}/v1/jobs/victim-False", headers=_header("theirs")).raise_for_status()


def test_nor_do_copied_checksums(
    pod: LocalCluster, packed: Packed, tmp_path: Path, as_team: Callable[[str], None], policy: str
) -> None:
    """With the whole index of a dataset, but none of its bytes: another place in the store is another dataset."""
    as_team("theirs")
    read_all(pod, policy, "victim", packed[0])
    hostile = copy_of(packed[0], tmp_path / "hostile", lambda sample, claim: claim, lambda data: bytes(len(data)))
    as_team("ours")
    rank = one_rank(pod, policy, "thief", hostile)
    for sample in range(0, len(packed[1]), 50):
        answer = samples_of(pod, rank, np.array([sample]))
        assert answer.json()["error"] == "SampleDamaged", answer.text
    rank.end_job()


def test_guessing_a_byte_of_anothers_dataset(
    pod: LocalCluster, packed: Packed, tmp_path: Path, as_team: Callable[[str], None], policy: str
) -> None:
    """What is kept answers no guess either: whether a record of theirs is right makes no difference to what is read.

    Of what is asked for once: what a job has read of its own may be kept for the next time.
    """
    as_team("theirs")
    read_all(pod, policy, "victim", packed[0])
    _, records = index_of(packed[0])
    right = int(records.checksum[0])
    hostile = copy_of(
        packed[0],
        tmp_path / "hostile",
        lambda sample, claim: claim if sample % 2 else Claim(*claim[:2], right),
        lambda data: data,
    )
    as_team("ours")
    rank = one_rank(pod, policy, "thief", hostile, 1)
    with contextlib.suppress(SampleDamaged):
        rank.batch(0, np.arange(20))
    total = httpx.get(f"{pod.pod_urls[0]}/v1/jobs/thief/epochs/0", headers=_header("ours")).json()["total"]
    assert total["bytes_pinned"] == 0
    rank.end_job()


@pytest.mark.variants("disk-redox", "memory-planned")
def test_one_dataset_is_still_kept_once(
    pod: LocalCluster, packed: Packed, as_team: Callable[[str], None], policy: str
) -> None:
    """Teams that name the same place share what the store gave, however they write it."""
    path = packed[0].removeprefix("file://")
    as_team("theirs")
    read_all(pod, policy, "first", packed[0])
    as_team("ours")
    for name, url in (("second", packed[0]), ("third", f"file://localhost{path}/"), ("fourth", f"file:///%2e{path}")):
        rank = one_rank(pod, policy, name, url, 16)
        got = whole_epoch(rank, 0)
        assert foreign(packed[0], got) == len(packed[1])
        total = httpx.get(f"{pod.pod_urls[0]}/v1/jobs/{name}/epochs/0", headers=_header("ours")).json()["total"]
        assert total["bytes_read"] < 0.05 * total["bytes_pinned"]
        rank.end_job()


def test_a_dataset_that_was_replaced_is_another_one(
    pod: LocalCluster, packed: Packed, tmp_path: Path, as_team: Callable[[str], None], policy: str
) -> None:
    """The same place and fingerprint, later, with other bytes of equal lengths."""
    as_team("ours")
    folder = tmp_path / "set"
    url = copy_of(packed[0], folder, lambda sample, claim: claim, lambda data: data)
    assert foreign(packed[0], read_all(pod, policy, "before", url)) == len(packed[1])
    shutil.rmtree(folder)
    content = b"\1" * 1_000_000
    copy_of(
        packed[0],
        folder,
        lambda sample, claim: Claim(*claim[:2], sample_checksum(content[: claim.length])),
        lambda data: content[: len(data)],
    )
    got = read_all(pod, policy, "after", url)
    assert foreign(packed[0], got) == 0
    assert foreign(url, got) == len(packed[1])


def test_what_another_job_put_there_is_verified_on_the_way_out(packed: Packed) -> None:
    """By the job's own records, once, though it is memory: a fault there ends with the job that it happened to."""

    async def run() -> None:
        dataset = await Dataset.open(packed[0])
        records = await dataset.load_records(0, dataset.num_samples)
        share = ChunkLayout(dataset.blobs.first_sample, 8).share(0, 1)
        pinned = PinnedTier(2 * dataset.index.sample_bytes).lease("proof", records)
        (part,) = pinned.parts
        assert isinstance(part, PinnedMemory)
        wanted = Read(16, 24, np.arange(16, 24))

        async def reads(job: str) -> tuple[ChunkReader, list[bytes | None]]:
            reader, came = ChunkReader(dataset, records, share, ByteGate(10**6), pinned, Asker(job=job)), []
            if (chunk := reader.pinned(wanted)) is None:
                (group,) = reader.together([wanted])
                await reader.read(group, came.append)
                chunk = came[0]
            return reader, [None if payload is None else bytes(payload) for payload in chunk.payloads]

        first, expected = await reads("first")
        second, again = await reads("second")
        assert again == expected
        part.views(17, 18)[0][0] ^= 1  # type: ignore[index, operator]
        third, again = await reads("third")
        assert again == expected, "read from the store again"
        assert part.damaged_samples == 1
        for reader in (first, second, third):
            chunk = reader.pinned(wanted)
            assert chunk is not None, "it is kept again"
            assert [bytes(payload) for payload in chunk.payloads if payload is not None] == expected
        await dataset.close()

    asyncio.run(run())


def test_what_is_shared_agrees_in_place_lengths_and_checksums(tmp_path: Path) -> None:
    """In memory, and for a file that an earlier pod left."""
    records = SampleRecords(0, np.arange(9), np.full(9, 10), np.arange(9, dtype=np.uint64))
    lengths, checksums = records.length.copy(), records.checksum.copy()
    lengths[[3, 4]] = 9, 11
    checksums[8] += 1
    others = [
        ("s3://bucket/b", records),
        ("s3://bucket/a/b", records),
        ("s3://bucket/a", SampleRecords(0, records.offset, lengths, records.checksum)),
        ("s3://bucket/a", SampleRecords(0, records.offset, records.length, checksums)),
        ("s3://bucket/a", SampleRecords(1, records.offset, records.length, records.checksum)),
    ]
    for tier in (PinnedTier(1000), PinnedTier(0, tmp_path, 1000)):
        share = tier.lease("s3://bucket/a", records)
        assert tier.lease("s3://bucket/a", records.part(2, 7)) is share, "however much of it a job owns"
        files = set(tmp_path.glob("*.pinned"))
        for place, claimed in others:
            other = tier.lease(place, claimed)
            assert other is not share
            tier.release(other)
        elsewhere = SampleRecords(0, np.arange(9) * 100, records.length, records.checksum)
        assert tier.lease("s3://bucket/a", elsewhere) is share, "where in the blobs makes no difference"
        assert len(files) == len(set(tmp_path.glob("*.pinned")) & files)
        tier.close()
    assert len(set(tmp_path.glob("*.pinned"))) == 1 + len(others), "each has a file of its own"


def test_what_is_there_is_not_written_again() -> None:
    """Somebody may be sending it."""
    records = SampleRecords(0, np.arange(4) * 2, np.full(4, 2), np.arange(4, dtype=np.uint64))
    (part,) = PinnedTier(100).lease("proof", records).parts
    assert isinstance(part, PinnedMemory)
    assert part.put(0, [b"aa", b"bb"]).tolist() == [True, True]
    assert part.put(1, [b"XX", b"cc"]).tolist() == [False, True]
    assert [bytes(view) for view in part.views(0, 3)] == [b"aa", b"bb", b"cc"]


def _header(team: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKENS[team]}"}
