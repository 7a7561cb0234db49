"""Datasets in other clouds, on web servers and on the Hub: each sample exactly once, as from S3."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.azurite import AzureServer
from tests.conftest import S3Server
from tests.membership.planned_in_process import Run, new_name
from tests.membership.pods_in_process import PodsInProcess
from tests.web_files import Hub, WebFiles

from refill.errors import InvalidInput, NotAllowed, SampleDamaged, StoreDenied
from refill_service.cli import main
from refill_service.datasets.index_shards import index_shards
from refill_service.datasets.pack import pack

LINES = [b'{"n": %d}\n' % number for number in range(100)]
SHARDS = {"a.jsonl": b"".join(LINES[:60]), "b b.jsonl": b"".join(LINES[60:])}


def epochs_from(url: str, dataset_urls: str, num_epochs: int = 1) -> list[bytes]:
    """Of two ranks at two pods; the samples by their ids."""
    with PodsInProcess(2, dataset_urls=dataset_urls) as pods:
        run = Run(pods, url, new_name(), 2, memory_bytes=100_000, chunk_size=8)
        for epoch in range(num_epochs):
            run.take(epoch)
            run.exact_receipt(epoch)
            assert sorted(run.positions_of(epoch)) == list(range(100))
        run.check(url)
        return [bytes(payload) for payload in run.ranks[0].samples(np.arange(100)).payloads]


def packed_and_indexed(bucket: str, folder: Path, capsys: Any) -> None:
    source = folder / "source"
    source.mkdir()
    for number in range(100):
        (source / f"{number:03}.bin").write_bytes(b"sample %d" % number)
    asyncio.run(pack(str(source), f"{bucket}/packed", seed=1))
    found = epochs_from(f"{bucket}/packed", bucket.partition("://")[0] + "://")
    assert len({each for each in found if b"sample" in each}) == 100
    assert main(["inspect", f"{bucket}/packed", "--verify"]) == 0
    assert "100" in capsys.readouterr().out
    # The same blobs, indexed where they lie.
    asyncio.run(index_shards(f"{bucket}/packed", force=True))
    assert epochs_from(f"{bucket}/packed", bucket) == found


def test_a_bucket_of_google(gcs_environment: S3Server, tmp_path: Path, capsys: Any) -> None:
    packed_and_indexed(f"gs://{gcs_environment.new_bucket()}", tmp_path, capsys)


def test_a_container_of_azure(azure_environment: AzureServer, tmp_path: Path, capsys: Any) -> None:
    packed_and_indexed(f"az://{azure_environment.new_container()}", tmp_path, capsys)


def test_a_web_server_with_an_index_elsewhere(web: WebFiles, tmp_path: Path, capsys: Any) -> None:
    for name, data in SHARDS.items():
        web.put(f"data/{name}", data)
    (tmp_path / "names").write_text("".join(f"{name}\n" for name in SHARDS))
    index = tmp_path / "index"
    assert main(["index", f"{web.url}/data", "--output", str(index)]) == 2
    assert "a web server does not list what it has; name the files by --files" in capsys.readouterr().err
    assert main(["index", f"{web.url}/data", "--output", str(index), "--files", str(tmp_path / "names")]) == 0
    assert epochs_from(index.as_uri(), f"{web.url}/data,{index.as_uri()}", 2) == LINES
    assert main(["inspect", str(index), "--verify"]) == 0
    with pytest.raises(StoreDenied, match="write the index elsewhere by --output"):
        asyncio.run(index_shards(f"{web.url}/data", names=list(SHARDS)))


def test_a_web_server_that_has_the_index_too(web: WebFiles, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name, data in SHARDS.items():
        (tmp_path / "data" / name).write_bytes(data)
    asyncio.run(index_shards((tmp_path / "data").as_uri()))
    for path in (tmp_path / "data").iterdir():
        web.put(f"a folder/{path.name}", path.read_bytes())
    assert epochs_from(f"{web.url}/a%20folder", f"{web.url}/a%20folder") == LINES
    with pytest.raises(NotAllowed, match="asks web servers only where dataset_urls lists them"):
        epochs_from(f"{web.url}/a%20folder", "")


def test_a_dataset_of_the_hub_with_an_index_elsewhere(hub: Hub, tmp_path: Path, capsys: Any) -> None:
    for name, data in SHARDS.items():
        hub.put(f"data/train/{name}", data)
    index = tmp_path / "index"
    url = f"hf://datasets/{hub.dataset}/data/train"
    assert main(["index", url, "--output", str(index)]) == 0
    hub.resolved.clear()
    assert epochs_from(index.as_uri(), f"{url},{index.as_uri()}", 3) == LINES
    # Two pods, three epochs.
    assert all(hub.resolved[f"data/train/{name}"] <= 2 for name in SHARDS), hub.resolved
    hub.put("data/train/a.jsonl", SHARDS["a.jsonl"].replace(b"n", b"m"))
    with pytest.raises(SampleDamaged):
        epochs_from(index.as_uri(), f"{url},{index.as_uri()}")


def test_what_is_not_there_is_named(web: WebFiles, tmp_path: Path) -> None:
    web.put("data/a.jsonl", SHARDS["a.jsonl"])
    for url, names in ((f"{web.url}/data", ["a.jsonl", "../x"]), (f"{web.url}/data", [""])):
        with pytest.raises(InvalidInput, match="is not a key"):
            asyncio.run(index_shards(url, output=(tmp_path / "index").as_uri(), names=names))
