"""What every store promises, tried on each; then what each must say when something is wrong."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from tests.azurite import ACCOUNT
from tests.s3_gate import gate_of
from tests.web_files import Hub, WebFiles

from refill.errors import InvalidInput, RefillError, StoreDenied, StoreNotFound, StoreUnavailable
from refill_service.object_store.base import ObjectReplaced, ObjectStore, ObjectTooShort, WritableData
from refill_service.object_store.open_store import open_store
from refill_service.object_store.store_counters import CountedRequest, OperationCounters, StoreCounters
from refill_service.object_store.store_settings import StoreSettings
from refill_service.object_store.store_url import parse_url


@pytest.fixture(params=["file", "s3", "gs", "az", "http", "hf"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "file":
            return (tmp_path / "a folder").as_uri()
        case "s3":
            return f"s3://{request.getfixturevalue('s3_environment').new_bucket()}/some/prefix"
        case "gs":
            return f"gs://{request.getfixturevalue('gcs_environment').new_bucket()}/some/prefix"
        case "az":
            return f"az://{request.getfixturevalue('azure_environment').new_container()}/some/prefix"
        case "http":
            web = request.getfixturevalue("web")
            request.getfixturevalue("monkeypatch").setitem(WRITTEN, f"{web.url}/some/prefix", (web, "some/prefix/"))
            return f"{web.url}/some/prefix"
    hub = request.getfixturevalue("hub")
    hub_url = f"hf://datasets/{hub.dataset}/some/prefix"
    request.getfixturevalue("monkeypatch").setitem(WRITTEN, hub_url, (hub, "some/prefix/"))
    return hub_url


WRITTEN: dict[str, tuple[WebFiles | Hub, str]] = {}
"""What refill only reads is written at the server: by URL, the server and the path there."""


class WrittenAtServer:
    """A store whose objects others write."""

    def __init__(self, store: ObjectStore, server: WebFiles | Hub, folder: str) -> None:
        self._store, self._server, self._folder = store, server, folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def write(self, key: str, data: WritableData) -> None:
        await self._store.read_range(key, 0, 0)  # no request, but keys that can't be are refused
        with self._store.counters.counted("write") as request:
            written = data.read_bytes() if isinstance(data, Path) else bytes(data)
            self._server.put(self._folder + key, written)
            request.num_bytes = len(written)

    async def delete(self, key: str) -> None:
        self._server.remove(self._folder + key)


def on_store(
    url: str, work: Callable[[ObjectStore], Awaitable[Any]], counters: StoreCounters | None = None, **settings: Any
) -> Any:
    async def run() -> Any:
        store = open_store(url, StoreSettings.from_environment(**settings), counters=counters)
        try:
            return await work(cast(ObjectStore, WrittenAtServer(store, *WRITTEN[url])) if url in WRITTEN else store)
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
    return [(key, size) async for key, size, _ in store.list(prefix)]


def lists(url: str) -> bool:
    """A web server does not."""
    return not url.startswith("http")


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

    @pytest.mark.variants("gs")
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
        if not lists(url):
            assert "does not list" in refused(InvalidInput, url, listed)
            return
        keys = ["a-b", "a/b", "a/c/d", "a.tar", "ab", "b/x", "Z", "ü/é", "blob-000001.tar", "blob-000000.tar"]

        async def work(store: ObjectStore) -> None:
            assert await listed(store) == []
            for number, key in enumerate(keys):
                await store.write(key, b"x" * number)
            sizes = {key: number for number, key in enumerate(keys)}
            for key, size, etag in [each async for each in store.list()]:
                assert (size, etag) == (sizes[key], await store.etag(key))
            for prefix in ("", "a", "a/", "a/c", "blob-", "ü", "none", "b/x/y"):
                wanted = sorted((key for key in keys if key.startswith(prefix)), key=lambda key: key.encode())
                assert await listed(store, prefix) == [(key, sizes[key]) for key in wanted], prefix

        on_store(url, work)

    @pytest.mark.variants("gs")
    def test_lists_more_than_a_page(self, url: str) -> None:
        if not lists(url):
            pytest.skip("a web server lists nothing")

        num_objects = 50 if url.startswith("az:") else 1050  # a page of Azure's has 5,000, and no test writes so many

        async def work(store: ObjectStore) -> None:
            await asyncio.gather(*(store.write(f"k{number:04}", b"") for number in range(num_objects)))
            assert [key for key, _ in await listed(store)] == [f"k{number:04}" for number in range(num_objects)]

        on_store(url, work)

    def test_odd_keys(self, url: str) -> None:
        async def work(store: ObjectStore) -> None:
            keys = ["a b.tar", "50%.tar", "a+b&c=d.tar", "q?x#y.tar", "~t'(1).tar", "日本.tar", "%41"]
            for key in keys:
                await store.write(key, key.encode())
                assert bytes(await store.read_range(key, 0, len(key.encode()))).decode() == key
            if lists(url):
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
            with pytest.raises(StoreNotFound):
                await store.head("x")
            if lists(url):
                assert await listed(store) == []

        on_store(url, delete_twice)

    @pytest.mark.variants("gs")
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

        async def work(store: ObjectStore) -> dict[str, OperationCounters]:
            await store.write("x", b"12345")
            await store.read_range("x", 1, 4)
            with pytest.raises(ObjectTooShort):
                await store.read_range("x", 1, 9)
            with pytest.raises(StoreNotFound):
                await store.head("y")
            with nullcontext() if lists(url) else pytest.raises(InvalidInput):
                await listed(store)
            return store.counters.operations

        operations = on_store(url, work, StoreCounters(seen.append))
        assert (operations["write"].requests, operations["write"].bytes) == (1, 5)
        assert operations["read_range"].requests == 2
        assert operations["read_range"].errors == {"ObjectTooShort": 1}
        assert operations["head"].errors == {"StoreNotFound": 1}
        assert operations["list"].requests == 1
        assert all(each.in_flight == 0 for each in operations.values())
        assert [each.operation for each in seen] == ["write", "read_range", "read_range", "head", "list"]
        assert seen[1].num_bytes == 3

    def test_a_dataset_that_is_not_there_is_no_error_of_the_store(self, url: str) -> None:
        """Else whoever misspells one calls those who run the cache. A blob that is gone is another matter."""

        async def work(store: ObjectStore) -> OperationCounters:
            with pytest.raises(StoreNotFound):
                await store.read_start("refill.index", 4)
            with pytest.raises(StoreNotFound):
                await store.read_range("blob-0.tar", 0, 4)
            return store.counters.operations["read_range"]

        counters = on_store(url, work)
        assert (counters.requests, counters.errors) == (2, {"StoreNotFound": 1})


class TestUrls:
    @pytest.mark.parametrize(
        "url", ["", "data", "/data", "s4://bucket/x", "ftp://host/x", "s3://", "s3:///x", "file://data/x", "s3:/b"]
    )
    def test_wrong_ones(self, url: str) -> None:
        with pytest.raises(InvalidInput, match=r"s3://|file://"):
            open_store(url)

    @pytest.mark.parametrize(
        ("url", "why"),
        [
            ("gs://UPPER/x", "not the name of a bucket"),
            ("az://a--b/x", "not the name of a bucket"),
            ("az://a_b/x", "not the name of a bucket"),
            ("gs://", "names no bucket"),
            ("https://", "names no server"),
            ("https://user@host/x", "names no server"),
            ("https://host:99999/x", "names no server"),
            ("https://host/x?list", "has a query"),
            ("https://host/x#y", "has a query"),
            ("https://host/a/../b", "holds an empty part"),
            ("https://host/a/%2e%2e/b", "holds an empty part"),
            ("https://host/a%2f..%2fb", "written as %2F"),
            ("hf://datasets/some", "names no dataset"),
            ("hf://models/some/name", "only datasets"),
            ("hf://datasets/so me/name", "no owner"),
            ("hf://datasets/some/na me", "no name"),
            ("hf://datasets/some/name@a..b", "no revision"),
            ("hf://datasets/some/name@", "no revision"),
            ("hf://datasets/some/name/../x", "holds an empty part"),
            ("az://container/x", "REFILL_STORE_AZURE_ACCOUNT"),
        ],
    )
    def test_wrong_ones_of_each_kind(self, url: str, why: str) -> None:
        with pytest.raises(InvalidInput, match=why):
            open_store(url, StoreSettings())

    @pytest.mark.parametrize(
        ("url", "written"),
        [
            ("GS://a.b_c/x/", "gs://a.b_c/x"),
            ("https://Example.org:443/a%20b/%C3%A9", "https://example.org/a%20b/%C3%A9"),
            ("http://[::1]:80/x", "http://[::1]/x"),
            ("https://example.org:8443/", "https://example.org:8443"),
            ("hf://datasets/some/name@refs%2Fpr%2F1/x/", "hf://datasets/some/name@refs%2Fpr%2F1/x"),
        ],
    )
    def test_each_place_is_written_in_one_way(self, url: str, written: str) -> None:
        assert str(parse_url(url)) == str(parse_url(written)) == written

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
            {"GOOGLE_BASE_URL": "localhost:9000"},
            {"HF_ENDPOINT": "localhost:9000"},
            {"AZURE_STORAGE_ACCOUNT_NAME": "evil.example.org/x"},
            {"REFILL_STORE_GCS_USER_PROJECT": "a\r\nx: y"},
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
    """In threads of this process."""
    server = gate_of([upstream, *arguments])
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


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


@dataclass(frozen=True)
class Place:
    """Where an object ``x`` lies that holds ten digits."""

    url: str
    server: str
    through: Callable[[str], tuple[str, dict[str, Any]]]
    """URL and settings by which it is reached at another server than that one."""


@pytest.fixture(params=["s3", "gs", "az", "http", "hf"])
def place(request: pytest.FixtureRequest) -> Place:
    def given(name: str) -> Any:
        return request.getfixturevalue(name)

    match request.param:
        case "s3":
            server = given("s3_environment")
            url = f"s3://{server.new_bucket()}/p"
            place = Place(url, server.endpoint_url, lambda other: (url, {"endpoint_url": other}))
        case "gs":
            server = given("gcs_environment")
            url = f"gs://{server.new_bucket()}/p"
            place = Place(url, server.endpoint_url, lambda other: (url, {"gcs_endpoint_url": other}))
        case "az":
            server = given("azure_environment")
            url = f"az://{server.new_container()}/p"
            root = server.endpoint_url.removesuffix(f"/{ACCOUNT}")
            place = Place(url, root, lambda other: (url, {"azure_endpoint_url": f"{other}/{ACCOUNT}"}))
        case "http":
            server = given("web")
            given("monkeypatch").setitem(WRITTEN, f"{server.url}/p", (server, "p/"))
            place = Place(f"{server.url}/p", server.url, lambda other: (f"{other}/p", {}))
        case _:
            server = given("hub")
            url = f"hf://datasets/{server.dataset}/p"
            given("monkeypatch").setitem(WRITTEN, url, (server, "p/"))
            place = Place(url, server.url, lambda other: (url, {"hub_endpoint_url": other}))
    on_store(place.url, lambda store: store.write("x", b"0123456789"))
    return place


class TestFaults:
    """Against the real server, or a relay in front of it that misbehaves."""

    def test_unreachable(self, place: Place) -> None:
        quick = {"max_retries": 1, "first_backoff_seconds": 0.01}
        for endpoint, why in (("http://127.0.0.1:1", "refused"), ("http://no-such-host.invalid", "resolved")):
            url, settings = place.through(endpoint)
            message = refused(StoreUnavailable, url, lambda store: store.head("x"), **settings, **quick)
            assert why in message
            assert endpoint.removeprefix("http://") in message
            assert "after 1 retries" in message

    def test_stalled(self, place: Place) -> None:
        with gate(place.server, "--stall") as endpoint:
            url, settings = place.through(endpoint)
            settings |= {"max_retries": 0, "request_timeout_seconds": 0.3}
            message = refused(StoreUnavailable, url, lambda store: store.read_range("x", 0, 3), **settings)
            assert "no answer in time" in message

    def test_retries(self, place: Place) -> None:
        async def work(store: ObjectStore) -> None:
            assert await store.read_range("x", 0, 10) == b"0123456789"

        for misbehaves in (("--fail-first", "3"), ("--cut-first", "2")):
            with gate(place.server, *misbehaves) as endpoint:
                url, settings = place.through(endpoint)
                on_store(url, work, first_backoff_seconds=0.01, **settings)
        with gate(place.server, "--fail-first", "3") as endpoint:
            url, settings = place.through(endpoint)
            settings |= {"max_retries": 2, "first_backoff_seconds": 0.01}
            message = refused(StoreUnavailable, url, work, **settings)
            assert "after 2 retries: status 503" in message

    def test_a_server_that_has_no_etags_is_read_all_the_same(self, place: Place) -> None:
        if place.url.startswith(("gs", "az")):
            pytest.skip("these clouds send them always")

        async def work(store: ObjectStore) -> None:
            found = await store.read_version("x", 0, 3)
            assert (found.data, found.etag) == (b"012", await store.etag("x"))
            assert (await store.read_version("x", 0, 3, etag=found.etag)).data == b"012"

        with gate(place.server, "--without", "etag") as endpoint:
            url, settings = place.through(endpoint)
            on_store(url, work, **settings)

    def test_what_a_server_has_in_place_of_etags_tells_versions_apart(self, web: WebFiles) -> None:
        """Time and size, as of files."""
        web.has_etags = False
        web.put("x", b"0123456789")

        async def work(store: ObjectStore) -> None:
            found = await store.read_version("x", 0, 3)
            assert await store.read_version("x", 4, 6, etag=found.etag) == (b"45", found.etag)
            web.put("x", b"9876543210")
            with pytest.raises(ObjectReplaced):
                await store.read_version("x", 4, 6, etag=found.etag)

        on_store(web.url, work)

    def test_a_server_that_knows_no_if_match_gives_no_other_object(self, place: Place) -> None:
        if place.url.startswith("az"):
            pytest.skip("its signature is of this header, too")

        async def work(store: ObjectStore) -> None:
            found = await store.read_version("x", 0, 3)
            assert found.etag is not None
            assert await store.read_version("x", 0, 3, etag=found.etag) == found
            await asyncio.to_thread(on_store, place.url, lambda store: store.write("x", b"9876543210"))
            with pytest.raises(ObjectReplaced, match="its ETag is"):
                await store.read_version("x", 0, 3, etag=found.etag)

        with gate(place.server, "--without", "if-match") as endpoint:
            url, settings = place.through(endpoint)
            on_store(url, work, **settings)

    def test_cancelled_reads_free_their_connection(self, place: Place) -> None:
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

        on_store(place.url, work, max_connections=1)

    def test_a_token_that_is_refused(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        """One line, without the token."""
        if not place.url.startswith(("az", "hf")):
            pytest.skip("the server takes any credentials, or none")
        secret = "c2VjcmV0LW9mLW5vYm9keQ=="
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", secret)
        monkeypatch.setenv("HF_TOKEN", secret.rstrip("="))
        kind = StoreDenied if place.url.startswith("az") else StoreNotFound
        for work in (lambda store: store.read_range("x", 0, 3), lambda store: store.head("x"), listed):
            message = refused(kind, place.url, work)
            assert place.url in message
            assert secret.rstrip("=") not in message


class TestBuckets:
    """Of other clouds."""

    @pytest.mark.parametrize("scheme", ["gs", "az"])
    def test_no_such_bucket(self, scheme: str, request: pytest.FixtureRequest) -> None:
        request.getfixturevalue({"gs": "gcs_environment", "az": "azure_environment"}[scheme])
        url = f"{scheme}://no-such-bucket/p"
        for work in (
            lambda store: store.read_range("x", 0, 1),
            lambda store: store.write("x", b""),
            lambda store: listed(store),
        ):
            assert "no bucket 'no-such-bucket'" in refused(StoreNotFound, url, work)
        refused(StoreNotFound, url, lambda store: store.head("x"))
