"""An index that names data elsewhere: pods read what the operator lists, and nothing else, whoever wrote the index."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from tests.conftest import S3Server
from tests.membership.planned_in_process import Run, new_name
from tests.membership.pods_in_process import PodsInProcess

from refill.errors import IndexDamaged, NotAllowed, RefillError
from refill_service.cache_core.dataset_index import INDEX_KEY, decode_header, decode_index, encode_head
from refill_service.cli import main
from refill_service.datasets.index_shards import index_shards

LINES = [b'{"n": %d}\n' % number for number in range(100)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder that is not to be written to."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(b"".join(LINES[:60]))
    (folder / "b.jsonl").write_bytes(b"".join(LINES[60:]))
    return folder


def answer_to(pods: PodsInProcess, url: str) -> RefillError:
    run = Run(pods, url, new_name(), 1, memory_bytes=100_000, chunk_size=8, timeout_seconds=2)
    with pytest.raises(RefillError) as raised:
        run.take(0, 0, 20)
    assert len(str(raised.value).splitlines()) == 1
    assert "unexpectedly" not in str(raised.value)
    return raised.value


def naming(folder: Path, data_url: Any) -> str:
    """A copy of an index that says so of its data."""
    data = (folder / INDEX_KEY).read_bytes()
    header = decode_header(data, "")
    index = decode_index(header, data[128 : header.head_bytes])
    metadata = {name: value for name, value in index.metadata.items() if name != "data"}
    _, head = encode_head(
        index.blobs,
        sample_bytes=header.sample_bytes,
        fingerprint=header.fingerprint,
        wide=False,
        metadata=metadata,
        data_url=data_url,
    )
    copy = folder / f"copy-{len(list(folder.iterdir()))}"
    copy.mkdir()
    (copy / INDEX_KEY).write_bytes(head + data[header.head_bytes :])
    return copy.as_uri()


def test_each_sample_comes_once_from_where_the_index_says(data: Path, tmp_path: Path, capsys: Any) -> None:
    index = tmp_path / "index"
    os.chmod(data, 0o555)
    before = sorted(path.name for path in data.iterdir())
    assert main(["index", str(data), "--output", str(index)]) == 0
    assert f"which the index at {index.as_uri()} names" in capsys.readouterr().out
    assert sorted(path.name for path in data.iterdir()) == before
    with PodsInProcess(2, dataset_urls=f"{data.as_uri()},{index.as_uri()}") as pods:
        run = Run(pods, index.as_uri(), new_name(), 2, memory_bytes=100_000, chunk_size=8)
        run.take(0)
        assert sorted(run.positions_of(0)) == list(range(100))
        run.check(index.as_uri())
        run.exact_receipt(0)
        found = run.ranks[0].samples(np.arange(100))
        assert [bytes(payload) for payload in found.payloads] == LINES
    assert main(["inspect", str(index), "--verify"]) == 0
    assert data.as_uri() in capsys.readouterr().out
    assert main(["index", str(data), "--output", str(index)]) == 2
    assert "has an index already; replace it with --force" in capsys.readouterr().err


def test_from_a_bucket_that_is_only_read(s3_environment: S3Server, data: Path, tmp_path: Path) -> None:
    bucket = s3_environment.new_bucket()
    for path in data.iterdir():
        s3_environment.client().put_object(Bucket=bucket, Key=f"data/{path.name}", Body=path.read_bytes())
    index = tmp_path / "index"
    asyncio.run(index_shards(f"s3://{bucket}/data", output=index.as_uri()))
    with PodsInProcess(1, dataset_urls=f"s3://{bucket},{index.as_uri()}") as pods:
        run = Run(pods, index.as_uri(), new_name(), 1, memory_bytes=100_000, chunk_size=8)
        run.take(0)
        assert sorted(run.positions_of(0)) == list(range(100))
    listed = s3_environment.client().list_objects_v2(Bucket=bucket)["Contents"]
    assert [each["Key"] for each in listed] == ["data/a.jsonl", "data/b.jsonl"]


def test_pods_read_neither_without_the_other(data: Path, tmp_path: Path) -> None:
    index = tmp_path / "index"
    asyncio.run(index_shards(data.as_uri(), output=index.as_uri()))
    for listed in (data, index):
        with PodsInProcess(1, dataset_urls=listed.as_uri()) as pods:
            error = answer_to(pods, index.as_uri())
            assert isinstance(error, NotAllowed), error
            if listed == index:
                assert f"{index.as_uri()}/{INDEX_KEY} says that its data lies elsewhere" in str(error)


def test_a_hostile_index_reads_nothing_else(data: Path, tmp_path: Path) -> None:
    """Whatever it names: folders and buckets that are not listed, ways out of those that are, and what is no place."""
    index = tmp_path / "index"
    asyncio.run(index_shards(data.as_uri(), output=index.as_uri()))
    secret = tmp_path / "secret"
    secret.mkdir()
    for path in data.iterdir():
        (secret / path.name).write_bytes(path.read_bytes())
    (index / "link").symlink_to(secret)
    named = [
        (secret.as_uri(), NotAllowed),
        (f"{index.as_uri()}/../secret", NotAllowed),
        (f"{index.as_uri()}/%2e%2e/secret", NotAllowed),
        (f"file://{quote(str(tmp_path))}", NotAllowed),
        ("file:///", NotAllowed),
        ("s3://somebody", NotAllowed),
        ("http://169.254.169.254/latest", RefillError),
        ("s3://127.0.0.1:80/x", RefillError),
        ("nonsense", RefillError),
    ]
    with PodsInProcess(1, dataset_urls=f"{index.as_uri()}") as pods:
        node = pods.node(0)
        for url, kind in named:
            assert isinstance(answer_to(pods, naming(index, url)), kind), url
            assert node.index_room.used_bytes == 0, "what a refused index takes is not given back"
        for wrong in ("", "x" * 3000, 7, ["file:///"]):
            assert isinstance(answer_to(pods, naming(index, wrong)), IndexDamaged), wrong
        error = answer_to(pods, naming(index, f"{index.as_uri()}/link"))  # listed, and a link leads out of there
        assert "a link leads out of the dataset's folder" in str(error)


def test_pods_that_list_nothing_read_no_data_elsewhere(s3_environment: S3Server, tmp_path: Path) -> None:
    """They read datasets of every bucket that they may, but an index of a stranger's must not choose objects that no
    index was ever made of."""
    client, theirs, mine = s3_environment.client(), s3_environment.new_bucket(), s3_environment.new_bucket()
    client.put_object(Bucket=theirs, Key="secrets/a.jsonl", Body=b"".join(LINES))
    asyncio.run(index_shards(f"s3://{theirs}/secrets", output=f"s3://{mine}/index"))
    with PodsInProcess(1, dataset_urls="") as pods:
        error = answer_to(pods, f"s3://{mine}/index")
        assert isinstance(error, NotAllowed), error
        assert "only where dataset_urls lists it" in str(error)
    with PodsInProcess(1, dataset_urls="s3://") as pods:
        run = Run(pods, f"s3://{mine}/index", new_name(), 1, memory_bytes=100_000, chunk_size=8)
        run.take(0)
        assert sorted(run.positions_of(0)) == list(range(100))
