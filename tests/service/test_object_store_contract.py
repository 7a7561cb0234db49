"""What every store promises, tried on each; then what each must say when something is wrong."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from refill.errors import InvalidInput, RefillError, StoreDenied, StoreNotFound, StoreUnavailable
from refill_service.object_store.base import ObjectReplaced, ObjectStore, ObjectTooShort
from refill_service.object_store.open_store import open_store
from refill_service.object_store.store_counters import CountedRequest, StoreCounters
from refill_service.object_store.store_settings import StoreSettings

GATE = Path(__file__).parents[1] / "s3_gate.py"


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return (tmp_path / "a folder").as_uri()
    server = request.getfixturevalue("s3_environment")
    return f"s3://{server.new_bucket()}/some/prefix"


def on_store(url: str, work: Callable[[ObjectStore], Awaitable[Any]], **settings: Any) -> Any:
    async def run() -> Any:
        store = open_store(url, StoreSettings.from_environment(**settings))
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def refused(kind: type[RefillError], url: str, work: Callable[[ObjectStore], Awaitable[Any]], **settings: Any) -> str:
    """The one line of the error; its cause must have been kept."""
    with pytest.raises(kind) as caught:
        on_store(url, work, **settings)
    assert type(caught.value) is kind
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 500
    return caught.value.message


async def write_another(store: ObjectStore, etag: str, data: bytes) -> None:
    """In place of the object ``x`` with that ETag, as long: until a file has another time."""
    while True:
        await store.write("x", data)
        try:
            store.check_same("x", etag, await store.etag("x"))
        except ObjectReplaced:
            return


async def listed(store: ObjectStore, prefix: str = "") -> list[tuple[str, int]]:
    return [(key, size) async for key, size in store.list(prefix)]


class TestContract:
    def test_reads_exactly_the_range(self, url: str) -> None:
        async def work(store: ObjectStore) -> None:
            data = bytes(range(256)) * 40
            await store.write("a/b.tar", data)
            assert await store.head("a/b.tar") == len(data)
            for start, end in ((0, 1), (0, len(data)), (17, 4242), (len(data) - 1, len(data)), (5, 5)):
                buffer = await store.read_range("a/b.tar", start, end)
                assert isinstance(buffer, memoryview)
                assert buffer == data[start:end]

        on_store(url, work)

    def test_the_start_of_an_object_comes_with_its_size(self, url: str) -> None:
        async def work(store: ObjectStore) -> None:
            await store.write("x", b"0123456789")
            await store.write("empty", b"")
            for most_bytes, found in ((4, b"0123"), (10, b"0123456789"), (4000, b"0123456789")):
                assert await store.read_start("x", most_bytes) == (found, 10)
            assert await store.read_start("empty", 4) == (b"", 0)
            with pytest.raises(StoreNotFound):
                await store.read_start("no/such", 4)

        on_store(url, work)

    def test_a_range_past_the_end_is_refused_and_named(self, url: str) -> None:
        async def work(store: ObjectStore) -> None:
            await store.write("x", b"0123456789")
            for start, end in ((0, 11), (9, 12), (10, 11), (4000, 5000)):
                with pytest.raises(ObjectTooShort, match=f"x: bytes {start}-{end} are not there"):
                    await store.read_range("x", start, end)
            with pytest.raises(InvalidInput):
                await store.read_range("x", 5, 2)
            with pytest.raises(InvalidInput):
                await store.read_range("x", -1, 2)

        on_store(url, work)

    def test_another_version_of_an_object_is_refused(self, url: str) -> None:
        async def work(store: ObjectStore) -> None:
            await store.write("x", b"0123456789")
            found = await store.read_version("x", 2, 5)
            assert (found.data, found.etag) == (b"234", await store.etag("x"))
            assert found.etag is not None
            assert await store.read_version("x", 4, 10, etag=found.etag) == (b"456789", found.etag)
            await write_another(store, found.etag, b"9876543210")
            with pytest.raises(ObjectReplaced, match="x was replaced"):
                await store.read_version("x", 2, 5, etag=found.etag)
            await store.write("x", b"98")
            with pytest.raises(ObjectReplaced):
                await store.read_version("x", 0, 5, etag=found.etag)
            now = await store.read_version("x", 0, 2)
            assert now.data == b"98"
            assert await store.read_version("x", 1, 2, etag=now.etag) == (b"8", now.etag)

        on_store(url, work)

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_writes_replace(self, url: str, kind: type) -> None:
        async def work(store: ObjectStore) -> None:
            await store.write("x", kind(b"first, and longer"))
            await store.write("x", kind(b"second"))
            assert await store.read_range("x", 0, 6) == b"second"
            assert await store.head("x") == 6
            await store.write("empty", kind(b""))
            assert await store.head("empty") == 0

        on_store(url, work)

    def test_large_objects_and_paths(self, url: str, tmp_path: Path) -> None:
        # More than one part of a multipart upload.
        data = os.urandom(1 << 20) * 21
        (tmp_path / "large").write_bytes(data)

        async def work(store: ObjectStore) -> None:
            await store.write("from-memory", data)
            await store.write("from-path", tmp_path / "large")
            for key in ("from-memory", "from-path"):
                assert await store.read_range(key, 0, len(data)) == data

        on_store(url, work)

    def test_lists_by_prefix_in_order(self, url: str) -> None:
        keys = ["a-b", "a/b", "a/c/d", "a.tar", "ab", "b/x", "Z", "ü/é", "blob-000001.tar", "blob-000000.tar"]

        async def work(store: ObjectStore) -> None:
            assert await listed(store) == []
            for number, key in enumerate(keys):
                await store.write(key, b"x" * number)
            sizes = {key: number for number, key in enumerate(keys)}
            for prefix in ("", "a", "a/", "a/c", "blob-", "ü", "none", "b/x/y"):
                wanted = sorted((key for key in keys if key.startswith(prefix)), key=lambda key: key.encode())
                assert await listed(store, prefix) == [(key, sizes[key]) for key in wanted], prefix

        on_store(url, work)

    def test_lists_more_than_a_page(self, url: str) -> None:
        async def work(store: ObjectStore) -> None:
            await asyncio.gather(*(store.write(f"k{number:04}", b"") for number in range(1050)))
            assert [key for key, _ in await listed(store)] == [f"k{number:04}" for number in range(1050)]

        on_store(url, work)

    def test_odd_keys(self, url: str) -> None:
        async def work(store: ObjectStore) -> None:
            keys = ["a b.tar", "50%.tar", "a+b&c=d.tar", "q?x#y.tar", "~t'(1).tar", "日本.tar", "%41"]
            for key in keys:
                await store.write(key, key.encode())
                assert bytes(await store.read_range(key, 0, len(key.encode()))).decode() == key
            assert sorted(key for key, _ in await listed(store)) == sorted(keys)

        on_store(url, work)

    @pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/../b", ".", "a\0b"])
    def test_keys_that_lead_elsewhere_are_refused(self, url: str, key: str) -> None:
        refused(InvalidInput, url, lambda store: store.read_range(key, 0, 1))
        refused(InvalidInput, url, lambda store: store.write(key, b""))

    def test_what_is_not_there(self, url: str) -> None:
        for work in (lambda store: store.read_range("no/such", 0, 1), lambda store: store.head("no/such")):
            assert f"{url}/no/such" in refused(StoreNotFound, url, work)

        async def delete_twice(store: ObjectStore) -> None:
            await store.write("x", b"1")
            await store.delete("x")
            await store.delete("x")
            await store.delete("never/there")
            assert await listed(store) == []

        on_store(url, delete_twice)

    def test_many_at_once(self, url: str) -> None:
        data = os.urandom(1 << 16)

        async def work(store: ObjectStore) -> None:
            await store.write("x", data)
            ranges = [(number * 100, number * 100 + 5000) for number in range(300)]
            buffers = await asyncio.gather(*(store.read_range("x", *each) for each in ranges))
            assert all(buffer == data[start:end] for buffer, (start, end) in zip(buffers, ranges, strict=True))

        on_store(url, work, max_connections=3)

    def test_counts(self, url: str) -> None:
        seen: list[CountedRequest] = []

        async def run() -> StoreCounters:
            store = open_store(url, counters=StoreCounters(seen.append))
            await store.write("x", b"12345")
            await store.read_range("x", 1, 4)
            with pytest.raises(ObjectTooShort):
                await store.read_range("x", 1, 9)
            with pytest.raises(StoreNotFound):
                await store.head("y")
            await listed(store)
            await store.close()
            return store.counters

        operations = asyncio.run(run()).operations
        assert (operations["write"].requests, operations["write"].bytes) == (1, 5)
        assert operations["read_range"].requests == 2
        assert operations["read_range"].errors == {"ObjectTooShort": 1}
        assert operations["head"].errors == {"StoreNotFound": 1}
        assert operations["list"].requests == 1
        assert all(each.in_flight == 0 for each in operations.values())
        assert [each.operation for each in seen] == ["write", "read_range", "read_range", "head", "list"]
        assert seen[1].num_bytes == 3


class TestUrls:
    @pytest.mark.parametrize(
        "url", ["", "data", "/data", "gs://bucket/x", "http://host/x", "s3://", "s3:///x", "file://data/x", "s3:/b"]
    )
    def test_wrong_ones(self, url: str) -> None:
        with pytest.raises(InvalidInput, match=r"s3://|file://"):
            open_store(url)

    def test_settings(self) -> None:
        environment = {"AWS_ENDPOINT_URL": "http://a", "AWS_REGION": "r", "REFILL_STORE_MAX_RETRIES": "3"}
        settings = StoreSettings.from_environment(environment, region="given", profile=None)
        assert (settings.endpoint_url, settings.region, settings.max_retries) == ("http://a", "given", 3)
        assert settings.uses_path_style
        assert not StoreSettings().uses_path_style
        for bad in (
            {"REFILL_STORE_MAX_RETRIES": "many"},
            {"REFILL_STORE_ANONYMOUS": "perhaps"},
            {"AWS_ENDPOINT_URL": "localhost:9000"},
            {"REFILL_STORE_CONNECT_TIMEOUT_SECONDS": "nan"},
            {"REFILL_STORE_MAX_CONNECTIONS": "0"},
        ):
            with pytest.raises(InvalidInput):
                StoreSettings.from_environment(bad)


class TestFileStore:
    def test_permission(self) -> None:
        code = """
import asyncio, os, sys
from refill_service.object_store.open_store import open_store
from refill.errors import StoreDenied
async def run():
    store = open_store(sys.argv[1])
    if os.geteuid() == 0:
        os.seteuid(65534)  # root may read anything
    for work in (store.read_range("x", 0, 1), store.write("y", b"")):
        try:
            await work
        except StoreDenied as error:
            print(error)
asyncio.run(run())
"""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "x")
            path.write_bytes(b"1")
            path.chmod(0)
            path.parent.chmod(0o555)
            command = [sys.executable, "-c", code, path.parent.as_uri()]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            path.parent.chmod(0o700)
        assert done.stdout.count("has no permission to") == 2, done.stdout + done.stderr

    def test_half_written_files_are_not_listed_and_can_be_discarded(self, tmp_path: Path) -> None:
        part = tmp_path / ".x.123-0.refill-part"
        part.write_bytes(b"half")
        other = tmp_path / ".y.123-0.refill-part"
        other.write_bytes(b"half")

        async def work(store: ObjectStore) -> None:
            assert await listed(store) == []
            await store.discard_unfinished(re.compile("x"))

        on_store(tmp_path.as_uri(), work)
        assert not part.exists()
        assert other.exists()

    def test_a_failed_write_leaves_nothing(self, tmp_path: Path) -> None:
        refused(StoreNotFound, tmp_path.as_uri(), lambda store: store.write("x", tmp_path / "no such source"))
        (tmp_path / "file").write_bytes(b"")
        refused(StoreUnavailable, tmp_path.as_uri(), lambda store: store.write("file/below", b""))
        assert [path.name for path in tmp_path.iterdir()] == ["file"]


@contextmanager
def gate(upstream: str, *arguments: str) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, str(GATE), upstream, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


class TestS3:
    """Against the real server, or a relay in front of it where that server never says no."""

    @pytest.fixture
    def url(self, s3_environment: Any) -> str:
        bucket = s3_environment.new_bucket()
        s3_environment.client().put_object(Bucket=bucket, Key="p/x", Body=b"0123456789")
        return f"s3://{bucket}/p"

    def test_no_such_bucket(self, url: str) -> None:
        for work in (
            lambda store: store.read_range("x", 0, 1),
            lambda store: store.write("x", b""),
            lambda store: listed(store),
        ):
            assert "no bucket 'no-such-bucket'" in refused(StoreNotFound, "s3://no-such-bucket/p", work)
        refused(StoreNotFound, "s3://no-such-bucket/p", lambda store: store.head("x"))

    def test_wrong_secret_and_unknown_key(self, url: str, s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        with gate(s3_server.endpoint_url, "--secret", "test=test-secret") as endpoint:
            assert on_store(url, lambda store: store.read_range("x", 0, 3), endpoint_url=endpoint) == b"012"
            for name, value, code in (
                ("AWS_SECRET_ACCESS_KEY", "wrong", "SignatureDoesNotMatch"),
                ("AWS_ACCESS_KEY_ID", "nobody", "InvalidAccessKeyId"),
            ):
                monkeypatch.setenv(name, value)
                for work in (
                    lambda store: store.read_range("x", 0, 3),
                    lambda store: store.write("y", b"1"),
                    lambda store: listed(store),
                    lambda store: store.delete("x"),
                ):
                    assert code in refused(StoreDenied, url, work, endpoint_url=endpoint)
                refused(StoreDenied, url, lambda store: store.head("x"), endpoint_url=endpoint)

    def test_rights(self, url: str, s3_server: Any) -> None:
        with gate(s3_server.endpoint_url, "--read-only", "test=test-secret") as endpoint:
            assert on_store(url, listed, endpoint_url=endpoint) == [("x", 10)]
            message = refused(StoreDenied, url, lambda store: store.write("x", b"1"), endpoint_url=endpoint)
            assert "AccessDenied" in message
            assert f"{url}/x" in message
            refused(StoreDenied, url, lambda store: store.delete("x"), endpoint_url=endpoint)
            refused(StoreDenied, url, lambda store: store.read_range("x", 0, 1), endpoint_url=endpoint, anonymous=True)

    def test_no_credentials(self, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        assert "AWS_ACCESS_KEY_ID" in refused(StoreDenied, url, lambda store: store.head("x"))
        assert on_store(url, lambda store: store.head("x"), anonymous=True) == 10
        assert "no-such" in refused(StoreDenied, url, lambda store: store.head("x"), profile="no-such")

    def test_credentials_of_a_profile(
        self, url: str, s3_server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
            monkeypatch.delenv(name)
        (tmp_path / "config").write_text(
            "[profile train]\naws_access_key_id=test\naws_secret_access_key=test-secret\nregion=eu-central-1\n"
        )
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        with gate(s3_server.endpoint_url, "--secret", "test=test-secret") as endpoint:
            assert on_store(url, lambda store: store.head("x"), endpoint_url=endpoint, profile="train") == 10

    def test_unreachable(self, url: str) -> None:
        quick = {"max_retries": 1, "first_backoff_seconds": 0.01}
        for endpoint, why in (("http://127.0.0.1:1", "refused"), ("http://no-such-host.invalid", "resolved")):
            message = refused(StoreUnavailable, url, lambda store: store.head("x"), endpoint_url=endpoint, **quick)
            assert why in message
            assert endpoint in message
            assert "after 1 retries" in message

    def test_stalled(self, url: str, s3_server: Any) -> None:
        with gate(s3_server.endpoint_url, "--stall") as endpoint:
            message = refused(
                StoreUnavailable,
                url,
                lambda store: store.read_range("x", 0, 3),
                endpoint_url=endpoint,
                max_retries=0,
                request_timeout_seconds=0.3,
            )
            assert "no answer in time" in message

    def test_retries(self, url: str, s3_server: Any) -> None:
        async def work(store: ObjectStore) -> None:
            assert await store.read_range("x", 0, 10) == b"0123456789"

        with gate(s3_server.endpoint_url, "--fail-first", "3") as endpoint:
            on_store(url, work, endpoint_url=endpoint, first_backoff_seconds=0.01)
        with gate(s3_server.endpoint_url, "--cut-first", "2") as endpoint:
            on_store(url, work, endpoint_url=endpoint, first_backoff_seconds=0.01)
        with gate(s3_server.endpoint_url, "--fail-first", "3") as endpoint:
            message = refused(
                StoreUnavailable, url, work, endpoint_url=endpoint, max_retries=2, first_backoff_seconds=0.01
            )
            assert "SlowDown" in message

    def test_a_server_that_has_no_etags_is_read_all_the_same(self, url: str, s3_server: Any) -> None:
        async def work(store: ObjectStore) -> None:
            found = await store.read_version("x", 0, 3)
            assert (found.data, found.etag, await store.etag("x")) == (b"012", None, None)
            assert (await store.read_version("x", 0, 3, etag=found.etag)).data == b"012"

        with gate(s3_server.endpoint_url, "--without", "etag") as endpoint:
            on_store(url, work, endpoint_url=endpoint)

    def test_a_server_that_knows_no_if_match_gives_no_other_object(self, url: str, s3_server: Any) -> None:
        async def work(store: ObjectStore) -> None:
            found = await store.read_version("x", 0, 3)
            assert found.etag is not None
            assert await store.read_version("x", 0, 3, etag=found.etag) == found
            await store.write("x", b"9876543210")
            with pytest.raises(ObjectReplaced, match="its ETag is"):
                await store.read_version("x", 0, 3, etag=found.etag)

        with gate(s3_server.endpoint_url, "--without", "if-match") as endpoint:
            on_store(url, work, endpoint_url=endpoint)

    def test_cancelled_reads_free_their_connection(self, url: str, s3_server: Any) -> None:
        async def work(store: ObjectStore) -> None:
            await store.head("x")
            reads = [asyncio.create_task(store.read_range("x", 0, 3)) for _ in range(8)]
            await asyncio.sleep(0)
            for read in reads[:7]:
                read.cancel()
            assert await reads[7] == b"012"
            await asyncio.gather(*reads, return_exceptions=True)
            assert await store.read_range("x", 1, 3) == b"12"
            assert store.counters.operations["read_range"].in_flight == 0

        on_store(url, work, max_connections=1)
