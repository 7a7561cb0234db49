"""What ``refill analyze --ranks`` says of pods is what pods do."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refill.errors import InvalidInput
from refill.protocol.share_owners import share_owners
from refill_service.cache_core.dataset_index import RECORD
from refill_service.cache_core.planned.shares import Shares
from refill_service.cache_core.sample_mapping import ChunkLayout
from refill_service.cli import main
from refill_service.datasets.dataset_reader import Dataset, record_requests
from refill_service.datasets.index_writer import IndexWriter
from refill_service.object_store.store_counters import StoreCounters
from refill_service.planning.analysis import StoreTerms
from refill_service.planning.scale import PodLimits, ScaleShape, scaled
from refill_service.settings import default_pod_memory

SHAPE = ScaleShape(40_000_000, 100_000, 50, 400, 200_000.0, 32, 4, 64_000_000)
LIMITS = PodLimits(default_pod_memory(64 << 30, 50), StoreTerms(), 4096, 4.0, 3e9, 25e-6, 1.2)


def test_all_pods_together_do_what_the_job_needs() -> None:
    found = scaled(SHAPE, LIMITS)
    assert found.shares_of_pod == -(-found.num_shares // SHAPE.num_pods)
    even = SHAPE.samples_per_second * SHAPE.sample_bytes / SHAPE.num_pods
    assert even <= found.sent_bytes_per_second <= even * 2
    assert found.store_bytes_per_second < found.sent_bytes_per_second, "what is pinned is not read again"
    assert found.connections == SHAPE.num_ranks * SHAPE.num_workers
    assert found.index_held_bytes < found.index_read_bytes <= found.index_bytes
    assert 1 <= found.pods_of_batch <= 4


def test_one_pod_has_everything() -> None:
    one = replace(SHAPE, num_pods=1, num_samples=4_000_000)
    found = scaled(one, replace(LIMITS, memory=default_pod_memory(64 << 30, 1)))
    assert found.samples_of_pod == one.num_samples
    assert found.pods_of_batch == 1
    assert found.requests_per_second == pytest.approx(one.samples_per_second / one.batch)
    assert found.sent_bytes_per_second == pytest.approx(one.samples_per_second * one.sample_bytes)


@pytest.mark.variants("little2", "little3")
@pytest.mark.parametrize(
    ("little", "bottleneck"),
    [
        ({"cores": 1e-3}, "CPU"),
        ({"max_connections": 1}, "connections"),
        ({"network_bytes_per_second": 1e6, "store": StoreTerms(bytes_per_second=1e12)}, "network, to training"),
        ({"store": StoreTerms(bytes_per_second=1e6)}, "network, from the store"),
    ],
)
def test_the_bottleneck_is_what_there_is_least_of(little: dict[str, Any], bottleneck: str) -> None:
    plenty = replace(LIMITS, cores=1e6, max_connections=10**6, network_bytes_per_second=1e15)
    plenty = replace(plenty, store=StoreTerms(bytes_per_second=1e15, latency_seconds=0))
    found = scaled(SHAPE, replace(plenty, **little))
    assert found.bottleneck == bottleneck, found.needs
    assert found.needs[bottleneck] > 1


def test_a_blob_without_a_sample_is_refused() -> None:
    with pytest.raises(InvalidInput, match="--blob-size"):
        scaled(replace(SHAPE, blob_bytes=1000), LIMITS)


@pytest.mark.parametrize(("num_shares", "num_pods"), [(8, 4), (64, 32), (512, 200)])
def test_parts_of_an_index_are_read_by_the_requests_that_are_foretold(
    tmp_path: Path, num_shares: int, num_pods: int
) -> None:
    """And they are those of the whole index."""
    num_samples, per_blob = 300_000, 1000
    records = np.zeros(per_blob, dtype=RECORD)
    records["length"], records["offset"] = 7, np.arange(per_blob) * 7
    with IndexWriter(tmp_path) as writer:
        for number in range(num_samples // per_blob):
            records["checksum"] = number * 1000 + np.arange(per_blob)
            writer.add_blob(f"blob-{number:06}.tar", 7 * per_blob, [records])
        writer.finish({}).rename(tmp_path / "refill.index")

    async def run() -> None:
        counters = StoreCounters()
        dataset = await Dataset.open(tmp_path.as_uri(), counters=counters)
        shares = Shares(ChunkLayout(dataset.blobs.first_sample, 8), num_shares)
        pieces = shares.pieces(np.flatnonzero(share_owners(num_shares, num_pods) == 1).tolist())
        header, reads = dataset.index.header, counters.operations["read_range"]
        before = reads.requests, reads.bytes
        found = await dataset.load_pieces(*pieces)
        requests, samples = record_requests(*pieces, header.block_samples, num_samples, header.record_bytes)
        # The first of them may lie in what was read when it was opened.
        assert requests - 1 <= reads.requests - before[0] <= requests
        assert reads.bytes - before[1] <= samples * header.record_bytes * 1.001 + 8 * requests
        whole = await dataset.load_records(0, num_samples)
        ids = found.ids(0, len(found))
        assert len(ids) < num_samples
        for name in ("offset", "length", "checksum"):
            assert np.array_equal(getattr(found, name), getattr(whole, name)[ids]), name
        await dataset.close()

    asyncio.run(run())


def test_by_command(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["analyze", "--pods", "50", "--ranks", "400", "--samples", "4e7", "--sample-bytes", "100kB"]
    assert main([*command, "--samples-per-second", "2e5", "--workers", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bottleneck"] in found["needs"]
    assert found["connections"] == 1600
    assert main([*command, "--samples-per-second", "2e5"]) == 0
    assert "the bottleneck: " in capsys.readouterr().out
    assert main(command) == 2
    assert "--ranks needs" in capsys.readouterr().err
