"""Who pods are towards each cloud: by its own token servers, on loopback, and what each request then carries."""

from __future__ import annotations

import asyncio
import base64
import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from refill.errors import StoreDenied
from refill_service.object_store.open_store import open_store
from refill_service.object_store.store_settings import StoreSettings

SECRET = "ya29.secret-of-the-identity"


class Cloud:
    """The store, and what gives out tokens for it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, str], str]] = []
        self.refuses = False
        cloud = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0)).decode()
                headers = {name.lower(): value for name, value in self.headers.items()}
                cloud.asked.append((self.command, self.path, headers, body))
                answer, status = b"0123456789"[:3], 206
                if "token" in self.path:
                    status = 400 if cloud.refuses else 200
                    ends = int(time.time()) + 3600
                    found = {"access_token": SECRET, "expires_in": 3600, "expires_on": str(ends)}
                    answer = json.dumps(found | {"token_type": "Bearer"}).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(answer)))
                self.send_header("content-range", "bytes 0-2/10")
                self.send_header("etag", '"e"')
                self.send_header("last-modified", "Wed, 21 Oct 2015 07:28:00 GMT")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer)

            do_HEAD = do_PUT = do_POST = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self._server.server_port}"
        self.url = f"http://{self.host}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def reads(self, url: str) -> dict[str, str]:
        """The headers of a GET of one object."""
        store = open_store(url, StoreSettings.from_environment(max_retries=0))
        assert asyncio.run(store.read_range("x", 0, 3)) == b"012"
        method, path, headers, _ = self.asked[-1]
        assert (method, path) == ("GET", f"/{url.partition('://')[2]}/x")
        return headers


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    cloud = Cloud()
    for name, value in {
        "GOOGLE_BASE_URL": cloud.url,
        "GCE_METADATA_HOST": cloud.host,
        "AZURE_STORAGE_ACCOUNT_NAME": "pictures",
        "AZURE_STORAGE_ENDPOINT": cloud.url,
        "AWS_ENDPOINT_URL": cloud.url,
        "AWS_ACCESS_KEY_ID": "AKIATEST",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }.items():
        monkeypatch.setenv(name, value)
    yield cloud
    cloud.close()


def test_the_metadata_server_of_gke_says_who_a_pod_is(cloud: Cloud) -> None:
    assert cloud.reads("gs://bucket")["authorization"] == f"Bearer {SECRET}"
    _, path, headers, _ = cloud.asked[0]
    assert path.startswith("/computeMetadata/v1/instance/service-accounts/default/token")
    assert headers["metadata-flavor"] == "Google"


@pytest.mark.parametrize("variable", ["GOOGLE_SERVICE_ACCOUNT", "GOOGLE_APPLICATION_CREDENTIALS", ""])
def test_a_service_account_signs_its_own_tokens(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    """By a key in a file, in either variable, or in the variable itself."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    account = {"type": "service_account", "client_email": "refill@project.example", "private_key": pem}
    written = json.dumps(account | {"private_key_id": "one"})
    (tmp_path / "key.json").write_text(written)
    monkeypatch.setenv(variable or "GOOGLE_SERVICE_ACCOUNT_KEY", str(tmp_path / "key.json") if variable else written)
    token = cloud.reads("gs://bucket")["authorization"].removeprefix("Bearer ")
    claims = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))
    assert claims["iss"] == "refill@project.example"
    assert len(cloud.asked) == 1


def test_workload_identity_of_aks_gives_its_token_for_another(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the variables that its webhook sets."""
    (tmp_path / "token").write_text("federated")
    monkeypatch.setenv("AZURE_CLIENT_ID", "client")
    monkeypatch.setenv("AZURE_TENANT_ID", "tenant")
    monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AZURE_AUTHORITY_HOST", cloud.url)
    assert cloud.reads("az://container")["authorization"] == f"Bearer {SECRET}"
    _, path, _, body = cloud.asked[0]
    assert path == "/tenant/oauth2/v2.0/token"
    assert "client_assertion=federated" in body


def test_a_client_of_azure_shows_its_secret(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CLIENT_ID", "CLIENT_SECRET", "TENANT_ID"):
        monkeypatch.setenv(f"AZURE_{name}", name)
    monkeypatch.setenv("AZURE_AUTHORITY_HOST", cloud.url)
    assert cloud.reads("az://container")["authorization"] == f"Bearer {SECRET}"
    assert "client_secret=CLIENT_SECRET" in cloud.asked[0][3]


def test_managed_identity_is_asked_of_the_machine(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_IDENTITY_ENDPOINT", f"{cloud.url}/token")
    monkeypatch.setenv("AZURE_CLIENT_ID", "client")
    assert cloud.reads("az://container")["authorization"] == f"Bearer {SECRET}"
    assert "client_id=client" in cloud.asked[0][1]


@pytest.mark.parametrize("url", ["gs://bucket", "az://container"])
def test_a_machine_that_gives_none_is_named_in_one_line(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("AZURE_IDENTITY_ENDPOINT", f"{cloud.url}/token")
    cloud.refuses = True
    store = open_store(url, StoreSettings.from_environment(max_retries=0))
    with pytest.raises(StoreDenied, match="can't get credentials") as raised:
        asyncio.run(store.read_range("x", 0, 3))
    assert "or read a public" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_nothing_is_shown_where_nobody_is_to_be(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFILL_STORE_ANONYMOUS", "true")
    for url in ("gs://bucket", "az://container", "s3://bucket"):
        assert "authorization" not in cloud.reads(url)
    assert len(cloud.asked) == 3


def test_who_pays_and_what_it_is_encrypted_with_go_along(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFILL_STORE_REQUESTER_PAYS", "true")
    monkeypatch.setenv("REFILL_STORE_GCS_USER_PROJECT", "project-1")
    assert cloud.reads("s3://bucket")["x-amz-request-payer"] == "requester"
    assert cloud.reads("gs://bucket")["x-goog-user-project"] == "project-1"
    key = base64.b64encode(bytes(32)).decode()
    monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "sse-c")
    monkeypatch.setenv("AWS_SSE_CUSTOMER_KEY_BASE64", key)
    assert cloud.reads("s3://bucket")["x-amz-server-side-encryption-customer-key"] == key
    monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "aws:kms")
    monkeypatch.setenv("AWS_SSE_KMS_KEY_ID", "arn:aws:kms:key")
    store = open_store("s3://bucket", StoreSettings.from_environment())
    asyncio.run(store.write("x", b"1"))
    method, _, headers, _ = cloud.asked[-1]
    assert (method, headers["x-amz-server-side-encryption-aws-kms-key-id"]) == ("PUT", "arn:aws:kms:key")
