"""Does a secret get into what pods and clients say? With every kind of credential in use, at debug level."""

from __future__ import annotations

import asyncio
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
from tests.chaos.chaos_dataset import dataset_in_s3
from tests.conftest import S3Server
from tests.pod_fixtures import kind_of
from tests.security.aws_identities import aws_identities
from tests.web_files import Hub

from refill.errors import InvalidInput, NotAuthenticated, RefillError, StoreDenied
from refill.pods.credentials import Credentials
from refill.protocol.job_spec import JobSpec
from refill_service.datasets.index_shards import index_shards
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster
from refill_service.object_store.s3_store import S3Store
from refill_service.object_store.store_settings import StoreSettings

TEAM, PODS, STRANGER = "vision-0123456789abcdef", "pods-0123456789abcdef", "stranger-0123456789abcdef"


def test_no_pod_tells_a_secret_at_debug_level(s3_server: S3Server, tmp_path: Path) -> None:
    """Each pod gets its credentials for the store in another way; between them and to clients are tokens and TLS."""
    dataset = dataset_in_s3(s3_server.environment)
    (tmp_path / "team").write_text(TEAM)
    (tmp_path / "pods").write_text(PODS)
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", common_name="refill")
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    settings: dict[str, Any] = {
        "memory_bytes": "4MiB",
        "log_level": "debug",
        "access_log": "true",
        "client_tokens": tmp_path / "team",
        "peer_token": tmp_path / "pods",
        "tls_cert": tmp_path / "cert.pem",
        "tls_key": tmp_path / "key.pem",
        "peer_tls_cert": tmp_path / "cert.pem",
        "peer_tls_key": tmp_path / "key.pem",
        "peer_tls_ca": tmp_path / "ca.pem",
    }
    with aws_identities() as identities:
        num_pods, environment = identities.profiles(tmp_path)
        environment |= {"REFILL_CA_FILE": str(tmp_path / "ca.pem"), "AWS_ENDPOINT_URL": s3_server.endpoint_url}
        environment |= {"REFILL_STORE_PROFILE": "pod-{ordinal}"}
        environment |= {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=secret-of-the-collector-0123456789"}
        with LocalCluster(num_pods, tmp_path, settings, environment) as cluster:
            url = cluster.pod_urls[0]
            (tmp_path / "stranger").write_text(STRANGER)
            for policy in ("redox", "planned"):
                spec = JobSpec(f"debugged-{policy}", dataset.url, chunk_size=16, memory_bytes=600_000, policy=policy)
                kind = kind_of(spec)
                rank = kind(url, spec, 0, None, 30, credentials=shown(tmp_path / "team", tmp_path))
                assert len(rank.batch(0, np.arange(500)).sample_ids) == 500
                with pytest.raises(NotAuthenticated):
                    kind(url, spec, 0, None, 0, credentials=shown(tmp_path / "stranger", tmp_path)).info()
                missing = JobSpec("missing", f"{dataset.url}/nothing-there", policy=policy)
                with pytest.raises(RefillError):
                    kind(url, missing, 0, None, 0, credentials=shown(tmp_path / "team", tmp_path)).info()
            logs = [cluster.log(pod) for pod in range(num_pods)]
        secrets = identities.secrets
    assert identities.signed_by == {"ASIACONTAINER", "ASIAMACHINE", "AKIAENVIRONMENT"}
    assert {"AssumeRole", "AssumeRoleWithWebIdentity", "container", "machine", "machine's token"} <= secrets.keys()
    assert secrets["AssumeRoleWithWebIdentity, shown"] == secrets["web identity"]
    secrets |= {"team": TEAM, "pods": PODS, "stranger": STRANGER, "collector": "secret-of-the-collector"}
    key = (tmp_path / "key.pem").read_text().splitlines()
    secrets |= {f"line {number} of the private key": line for number, line in enumerate(key) if line}
    for log in logs:
        assert "/v1/jobs/debugged-redox" in log
        assert "/v1/jobs/debugged-planned" in log
        assert [whose for whose, secret in secrets.items() if secret in log] == []


def test_a_role_that_is_refused_is_one_line_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with aws_identities() as identities:
        identities.refuses = True
        _, environment = identities.profiles(tmp_path)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        store = S3Store("bucket", "", StoreSettings(endpoint_url=identities.url, profile="pod-1"))
        with pytest.raises(StoreDenied, match="InvalidIdentityToken") as raised:
            asyncio.run(store.read_range("key", 0, 1))
    assert "\n" not in raised.value.message
    said = "".join(traceback.format_exception(raised.value))
    assert [whose for whose, secret in identities.secrets.items() if secret in said] == []


def test_no_pod_tells_a_secret_of_another_cloud(gcs_environment: S3Server, hub: Hub, tmp_path: Path) -> None:
    """Nor a URL that was signed, whatever becomes of the request."""
    lines = [b'{"n": %d}\n' % number for number in range(100)]
    hub.put("data/a.jsonl", b"".join(lines))
    shared = {"GOOGLE_BASE_URL": gcs_environment.endpoint_url, "GOOGLE_BEARER_TOKEN": "ya29.secret-of-google-0123"}
    shared |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token or ""}
    sas = "sv=2021-12-02&sp=rl&sig=c2VjcmV0LW9mLWF6dXJl0123"
    shared |= {"AZURE_STORAGE_ACCOUNT_NAME": "pictures", "AZURE_STORAGE_SAS_TOKEN": sas}
    shared |= {"AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:1", "REFILL_STORE_MAX_RETRIES": "1"}
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "a.jsonl").write_bytes(b"".join(lines))
    index, bucket = f"gs://{gcs_environment.new_bucket()}/index", f"gs://{gcs_environment.new_bucket()}/data"
    with pytest.MonkeyPatch.context() as patched:
        for name, value in shared.items():
            patched.setenv(name, value)
        asyncio.run(index_shards(f"hf://datasets/{hub.dataset}/data", output=index))
        asyncio.run(pack(str(tmp_path / "lines"), bucket))
    settings = {"memory_bytes": "4MiB", "log_level": "debug", "access_log": "true", "dataset_urls": "gs://,az://,hf://"}
    answers = []
    with LocalCluster(1, tmp_path, settings, shared) as cluster:
        for number, dataset in enumerate((index, bucket, "az://container/data", f"hf://datasets/{hub.dataset}/none")):
            spec = JobSpec(f"job-{number}", dataset, chunk_size=16, memory_bytes=600_000, policy="planned")
            rank = kind_of(spec)(cluster.pod_urls[0], spec, 0, None, 5)
            if number == 0:
                assert len(rank.batch(0, np.arange(100)).sample_ids) == 100
                hub.stored.says = lambda path, headers: (403, {}, b"")
                with pytest.raises(RefillError) as raised:
                    rank.samples(np.arange(100))
                answers.append(str(raised.value))
            elif number > 1:
                with pytest.raises(RefillError) as raised:
                    rank.info()
                answers.append(str(raised.value))
        log = cluster.log(0)
    assert "connection refused" in answers[1]
    secrets = {"google": "secret-of-google", "hub": str(hub.token), "azure": "c2VjcmV0LW9mLWF6dXJl"}
    secrets |= {"a signed URL": "Signature="}
    assert [
        whose for whose, secret in secrets.items() if secret in log or any(secret in each for each in answers)
    ] == []


@pytest.mark.parametrize("token", [f"{TEAM}\nsecond-line-0123456789", f"{TEAM}\rx", f"{TEAM} two", f"{TEAM}é"])
@pytest.mark.parametrize("policy", ["redox", "planned"])
def test_a_token_that_no_header_can_hold_is_not_printed(
    token: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """REFILL_TOKEN is often filled from a file, by whatever reads it."""
    monkeypatch.delenv("REFILL_TOKEN_FILE", raising=False)
    monkeypatch.setenv("REFILL_TOKEN", token)
    spec = JobSpec("any", "s3://any/data", policy=policy)
    with pytest.raises(InvalidInput, match="REFILL_TOKEN holds no token") as raised:
        kind_of(spec)("http://127.0.0.1:1", spec, 0, None, 0).info()
    said = "".join(traceback.format_exception(raised.value))
    assert TEAM not in said
    assert "second-line" not in said


def test_a_newline_at_the_end_of_a_token_is_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REFILL_TOKEN_FILE", raising=False)
    monkeypatch.setenv("REFILL_TOKEN", f"{TEAM}\n")
    assert Credentials().headers() == {"Authorization": f"Bearer {TEAM}"}


def shown(token: Path, folder: Path) -> Credentials:
    return Credentials(str(token), str(folder / "ca.pem"))
