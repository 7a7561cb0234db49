"""Whoever names a dataset chooses neither where pods send their credentials, nor which folders of theirs they read."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import httpx
import pytest
from tests.pod_fixtures import rank_of, whole_epoch

from refill.errors import DatasetNotFound, InvalidInput, NotAllowed, RefillError
from refill_service.demo.local_cluster import LocalCluster
from refill_service.object_store.store_url import parse_url
from refill_service.settings import load_settings

Packed = tuple[str, dict[str, bytes]]

SECRET, SESSION = "wJalrXUtnFEMI/not-for-you", "session-token-of-the-pod"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "AKIAPODS", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": SESSION}
OF_OTHERS = {
    "GOOGLE_BEARER_TOKEN": "ya29.not-for-you",
    "AZURE_STORAGE_ACCOUNT_NAME": "pictures",
    "AZURE_STORAGE_ACCOUNT_KEY": "bm90LWZvci15b3U=",
    "HF_TOKEN": "hf_not_for_you",
}
"""Of other clouds."""


class ClientsHost:
    """A server of somebody who would like to be asked by the pods."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        asked = self.asked

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(f"{self.path} {dict(self.headers)}")
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def host() -> Iterator[ClientsHost]:
    host = ClientsHost()
    yield host
    host.close()


@pytest.fixture(scope="module")
def pods(packed: Packed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Two pods with credentials for AWS, which may read one folder and, of buckets, what lies below one prefix."""
    settings = {
        "memory_bytes": "4MiB",
        "pinned_fraction": 0,
        "wait_seconds": 1,
        "dataset_urls": f"{packed[0]},{','.join(LISTED)}",
    }
    environment = CREDENTIALS | OF_OTHERS | {"AWS_EC2_METADATA_DISABLED": "true"}
    with LocalCluster(2, tmp_path_factory.mktemp("pods"), settings, environment) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def open_pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """As `refill serve` is by default: no dataset_urls."""
    settings: dict[str, Any] = {"memory_bytes": "4MiB", "dataset_urls": ""}
    environment = CREDENTIALS | OF_OTHERS | {"AWS_EC2_METADATA_DISABLED": "true", "REFILL_STORE_MAX_RETRIES": "0"}
    with LocalCluster(1, tmp_path_factory.mktemp("pod"), settings, environment) as cluster:
        yield cluster


def answer_to(cluster: LocalCluster, dataset: str) -> RefillError:
    """The same whatever the policy."""
    for policy in ("redox", "planned"):
        settings = {"name": "guess", "dataset": dataset, "policy": policy}
        rank = rank_of(cluster, settings, timeout_seconds=0)
        with pytest.raises(RefillError) as raised:
            rank.info()
        with pytest.raises(type(raised.value)):
            rank.num_samples()
    assert len(str(raised.value).splitlines()) == 1
    return raised.value


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize(
    "bucket",
    [
        "127.0.0.1:{port}?", "127.0.0.1:{port}#", "user@127.0.0.1:{port}?", "127.0.0.1:{port}%3f", "127.0.0.1",
        "..", "a..b", "Upper", "ab", "x" * 223, "bucket\\", "buck et", "[::1]:{port}?", "-bucket", "bucket.",
    ],
)  # fmt: skip
def test_no_bucket_is_a_host(open_pod: LocalCluster, host: ClientsHost, bucket: str, scheme: str) -> None:
    error = answer_to(open_pod, f"{scheme}://{bucket.format(port=host.port)}/x")
    assert isinstance(error, InvalidInput)
    assert "is not the name of a bucket" in str(error)
    assert host.asked == [], "a request was sent where the client said"


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("http://127.0.0.1:{port}/x", NotAllowed),
        ("http://127.0.0.1:{port}", NotAllowed),
        ("https://127.0.0.1:{port}/x", NotAllowed),
        ("HTTP://LOCALHOST:{port}/x", NotAllowed),
        ("http://user@127.0.0.1:{port}/x", InvalidInput),
        ("http://example.org@127.0.0.1:{port}/x", InvalidInput),
        ("http://127.0.0.1:{port}?x", InvalidInput),
        ("http://127.0.0.1:{port}\\@example.org/x", InvalidInput),
        ("hf://127.0.0.1:{port}/some/name", InvalidInput),
        ("hf://datasets@127.0.0.1:{port}/some/name", InvalidInput),
        ("hf://datasets/127.0.0.1:{port}/name", InvalidInput),
        ("hf://datasets/some/name@127.0.0.1:{port}", InvalidInput),
        ("hf://datasets/some/name@main%2F..%2F..", InvalidInput),
        ("hf://datasets/some%2F..%2Fother/name", InvalidInput),
        ("az://pictures@127.0.0.1:{port}/x", InvalidInput),
        ("gs://127.0.0.1/x", InvalidInput),
    ],
)
def test_nor_is_anything_else_that_is_not_listed(
    open_pod: LocalCluster, host: ClientsHost, url: str, kind: type[RefillError]
) -> None:
    error = answer_to(open_pod, url.format(port=host.port))
    assert isinstance(error, kind), error
    assert host.asked == [], "a request was sent where the client said"


PREFIXES = ("a?list-type=2", "a#b", "a%2fb", "a b", "@127.0.0.1:1")


@pytest.mark.variants("gs://bucket", "az://bucket")
@pytest.mark.parametrize(
    ("place", "variable", "sent"),
    [
        ("s3://bucket", "AWS_ENDPOINT_URL", "/bucket/{}/refill.index"),
        ("gs://bucket", "GOOGLE_BASE_URL", "/bucket/{}/refill.index"),
        ("az://bucket", "AZURE_STORAGE_ENDPOINT", "/bucket/{}/refill.index"),
        ("hf://datasets/some/name", "HF_ENDPOINT", "/datasets/some/name/resolve/main/{}/refill.index"),
        ("http://127.0.0.1:{port}/bucket", "", "/bucket/{}/refill.index"),
    ],
)
def test_keys_are_escaped(tmp_path: Path, host: ClientsHost, place: str, variable: str, sent: str) -> None:
    """The prefix is the client's, too: what is sent ends in the bucket's folder, whatever it holds."""
    place = place.format(port=host.port)
    environment = {
        variable or "UNUSED": f"http://127.0.0.1:{host.port}",
        "AZURE_STORAGE_ACCOUNT_NAME": "pictures",
        "REFILL_STORE_ANONYMOUS": "true",
        "REFILL_STORE_MAX_RETRIES": "0",
    }
    settings = {"memory_bytes": "4MiB", "dataset_urls": place.partition("/bucket")[0] if not variable else ""}
    if not variable:  # it asks as ever, and shows nobody's credentials
        environment |= CREDENTIALS | OF_OTHERS
    try:
        with LocalCluster(1, tmp_path, settings, environment) as cluster:
            for prefix in PREFIXES:
                written = quote(prefix, safe="") if not variable else prefix
                assert isinstance(answer_to(cluster, f"{place}/{written}"), RefillError)
            for prefix in ("../other", "a/../../other", "%2e%2e/other", "./a", "a//b"):
                assert "holds an empty part, '.' or '..'" in str(answer_to(cluster, f"{place}/{prefix}"))
        paths = {asked.split()[0] for asked in host.asked if asked.split()[0].endswith("index")}
        assert {unquote(path) for path in paths} == {sent.format(each) for each in PREFIXES}
        assert not any(letter in path for path in paths for letter in "?#")
        assert not any(secret in asked for asked in host.asked for secret in (SECRET, SESSION, *OF_OTHERS.values()))
    finally:
        host.asked.clear()


LISTED = (
    "s3://pictures/of cats/a%2fb",
    "gs://pictures/of cats",
    "az://pictures/of cats",
    "https://pictures.example.org/of%20cats",
    "hf://datasets/some/pictures/of cats",
    "hf://datasets/others",
)


WRONG = (
    "file:///etc", "{packed}-2", "{packed}/../secret", "{packed}/%2e%2e/secret", "{packed}/.%2E/secret",
    "{packed}%2f..%2fsecret", "{packed}/x/../../secret", "file://localhost/etc", "FILE:///etc", "file:///",
    "s3://pictures", "s3://pictures/of", "s3://pictures/of cats", "s3://pictures/of cats/a",
    "s3://pictures/of cats/a/b",
    "s3://pictures/of cats/a%2fbc", "s3://pictures/of%20cats/a%2fb", "s3://pictures2/of cats/a%2fb",
    "s3://pictures.of/cats",
    "gs://pictures", "gs://pictures/of", "gs://pictures/of%20cats", "gs://pictures_of/cats",
    "az://pictures", "az://pictures/of", "az://pictures/of cats2", "az://pictures2/of cats",
    "http://pictures.example.org/of%20cats", "https://pictures.example.org", "https://pictures.example.org/of",
    "https://pictures.example.org/of%2520cats", "https://pictures.example.org:8443/of%20cats",
    "https://pictures.example.org.evil.org/of%20cats", "https://127.0.0.1/of%20cats",
    "hf://datasets/some/pictures", "hf://datasets/some/pictures/of", "hf://datasets/some/pictures@x/of cats",
    "hf://datasets/some/pictures@refs%2Fpr%2F1/of cats", "hf://datasets/some/Pictures/of cats",
    "hf://datasets/others2/x",
)  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_not_listed_is_not_served(pods: LocalCluster, packed: Packed, wrong: str) -> None:
    url = wrong.format(packed=packed[0])
    error = answer_to(pods, url)
    assert isinstance(error, NotAllowed), error
    assert "does not serve" in str(error)


@pytest.mark.parametrize("wrong", WRONG[:4])
def test_nor_by_the_peers_routes(pods: LocalCluster, packed: Packed, wrong: str) -> None:
    """Another pod may run with other settings; without a peer token, anybody may be one."""
    url = wrong.format(packed=packed[0])
    spec = {"name": "guess", "dataset": url}
    peers = f"http://127.0.0.1:{pods.peer_ports[0]}/peer/v1/jobs/guess"
    with httpx.Client(http1=False, http2=True) as peer:
        for method, path, body in (
            ("PUT", "", {"spec": spec | {"policy": "redox"}}),
            ("POST", "/begins", {"spec": spec | {"policy": "redox"}}),
            ("PUT", "/planned", {"spec": spec | {"policy": "planned"}}),
            ("POST", "/opening", {"dataset": url}),
        ):
            answer = peer.request(method, peers + path, json=body)
            assert (answer.status_code, answer.json()["error"]) == (403, "NotAllowed"), (path, answer.text)


def test_what_is_listed_is_served_however_it_is_written(pods: LocalCluster, packed: Packed) -> None:
    path = packed[0].removeprefix("file://")
    for number, url in enumerate((packed[0], f"file://localhost{path}/", f"file://{path.replace('/', '/%2e/')}")):
        rank = rank_of(pods, {"name": f"right-{number}", "dataset": url, "memory_bytes": 400_000})
        assert rank.num_samples() == rank.info()["num_samples"] == len(packed[1])
        if number == 2:
            assert sum(len(batch.sample_ids) for batch in whole_epoch(rank, 0)) == len(packed[1])
        rank.end_job()


def test_folders_are_served_only_where_they_are_listed(open_pod: LocalCluster, packed: Packed) -> None:
    """Who tries it on a laptop reads in one line what to give."""
    for url in (packed[0], "file:///proc/self", "file:///no/such/folder"):
        error = answer_to(open_pod, url)
        assert isinstance(error, NotAllowed)
        assert f"refill serve --dataset-urls {url}" in str(error)


def test_nothing_is_told_of_what_is_not_served(pods: LocalCluster, packed: Packed, tmp_path: Path) -> None:
    """The answer is the same whether there is a dataset, a file, nothing, or no permission."""
    (tmp_path / "there").mkdir()
    (tmp_path / "locked").mkdir(mode=0)
    answers = {
        str(answer_to(pods, (tmp_path / name).as_uri())).replace(name, "NAME") for name in ("there", "locked", "none")
    }
    assert len(answers) == 1


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("s3://", ("s3://",)),
        ("file:///", ("file:///",)),
        ("s3://bucket/a/, FILE:///data/%61/../b/", ("s3://bucket/a", "file:///data/b")),
        ("gs://,az://,hf://,hf://datasets/some/", ("gs://", "az://", "hf://", "hf://datasets/some")),
        ("HTTPS://Example.org:443/a%20b/", ("https://example.org/a%20b",)),
    ],
)
def test_the_setting_is_read_as_urls(given: str, kept: tuple[str, ...]) -> None:
    assert load_settings(dataset_urls=given).dataset_urls == kept


@pytest.mark.parametrize(
    "given",
    ["data", "s3:/bucket", "s3://UPPER", "ftp://bucket", "file://host/x", "s3://a-b/../c", "https://", "hf://x"],
)
def test_a_setting_that_is_no_url_is_refused(given: str) -> None:
    with pytest.raises(InvalidInput, match="dataset_urls"):
        load_settings(dataset_urls=given)


def test_places_are_compared_part_by_part() -> None:
    def within(url: str, place: str) -> bool:
        return load_settings(dataset_urls=place).check_dataset(url) is not None

    assert within("s3://bucket/a/b", "s3://bucket/a")
    assert within("s3://bucket", "s3://")
    assert within("file:///data/%C3%A9", "file:///data/é")
    assert within("https://example.org/a%20b/c", "https://example.org/a b")
    assert within("hf://datasets/some/name@dev/x", "hf://datasets/some")
    for url in ("s3://bucket/ab", "s3://bucket", "file:///bucket/a", "gs://bucket/a", "https://bucket/a"):
        with pytest.raises(NotAllowed):
            within(url, "s3://bucket/a")
    assert parse_url("file:///a%2Fb") == parse_url("file:///a/b"), "the system takes them for one"
    assert parse_url("s3://bucket/a%2Fb") != parse_url("s3://bucket/a/b"), "the store does not"


def test_the_demo_and_its_users_see_no_difference(packed: Packed, tmp_path: Path) -> None:
    """A folder that is listed, with the setting that the error named."""
    with LocalCluster(1, tmp_path, {"memory_bytes": "4MiB", "dataset_urls": packed[0]}) as cluster:
        rank = rank_of(cluster, {"name": "job", "dataset": packed[0]})
        assert rank.info()["num_samples"] == len(packed[1])
        with pytest.raises(DatasetNotFound):
            rank_of(cluster, {"name": "none", "dataset": f"{packed[0]}/none"}).info()
