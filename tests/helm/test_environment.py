"""What the chart tells the pods are settings that they have, and a pod starts with them."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.conftest import free_port
from tests.helm.mounted_secrets import mount, secrets_of
from tests.helm.rendering import CHART, VALUES_FILES, Release, release, values_in
from tests.waiting import until_serving

from refill_service.object_store.store_settings import StoreSettings
from refill_service.settings import Settings, load_settings

STORE = "REFILL_STORE_"
BY_THE_CHART = {
    "extra_memory_bytes",
    "memory_bytes",
    "replicas",
    "port",
    "peer_port",
    "metrics_port",
    "client_tokens",
    "peer_token",
    "tls_cert",
    "tls_key",
    "peer_tls_cert",
    "peer_tls_key",
    "peer_tls_ca",
    "pod_urls",
    "peer_urls",
    "pinned_dir",
    "pinned_dir_bytes",
}
"""Settings that follow from values of other names."""
FROM_THE_HOST_NAME = {"ordinal"}
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())

STARTED = [path for path in VALUES_FILES if path.stem in ("defaults-values", "everything-values")]
"""A process sees no more of the others."""

everywhere = pytest.mark.parametrize("path", VALUES_FILES, ids=lambda path: path.stem)


def everything() -> Release:
    return release(values_in(CHART / "ci" / "everything-values.yaml"))


def as_value(setting: Any) -> Any:
    return list(setting) if isinstance(setting, tuple) else setting


def test_every_variable_is_a_setting_and_every_setting_can_be_given() -> None:
    names = {variable["name"] for variable in everything().container["env"]}
    of_pod = {name for name in names if name.startswith("REFILL_") and not name.startswith(STORE)}
    assert of_pod == {f"REFILL_{name.upper()}" for name in set(Settings.model_fields) - FROM_THE_HOST_NAME}
    of_store = {name for name in names if name.startswith(STORE)}
    assert of_store == {f"{STORE}{field.name.upper()}" for field in dataclasses.fields(StoreSettings)}


def test_values_of_settings_are_the_settings_by_name_with_their_defaults() -> None:
    defaults = {name: as_value(field.default) for name, field in Settings.model_fields.items()}
    given = set(defaults) - BY_THE_CHART - FROM_THE_HOST_NAME
    assert VALUES["settings"] == {name: defaults[name] for name in given}
    for_store = {field.name: field.default for field in dataclasses.fields(StoreSettings)}
    assert VALUES["store"] == {name: "" if value is None else value for name, value in for_store.items()}


@everywhere
def test_each_pod_understands_its_environment(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    scheme = "https" if values_in(path).get("tls") else "http"
    found = release(values_in(path))
    for name in [name for name in os.environ if name.startswith("REFILL_")]:
        monkeypatch.delenv(name)
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    name, replicas = found.the("StatefulSet")["metadata"]["name"], found.the("StatefulSet")["spec"]["replicas"]
    for ordinal in range(replicas):
        monkeypatch.setattr(socket, "gethostname", lambda ordinal=ordinal: f"{name}-{ordinal}")
        settings = load_settings()
        assert (settings.ordinal, settings.num_pods) == (ordinal, replicas)
        assert settings.pod_urls[ordinal].startswith(f"{scheme}://{name}-{ordinal}.{name}-peers.ml.svc:")
        assert settings.peer_urls[ordinal].startswith(f"{scheme}://{name}-{ordinal}.{name}-peers.ml.svc:")
    StoreSettings.from_environment(found.environment)


def test_values_reach_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    values, found = values_in(CHART / "ci" / "everything-values.yaml"), everything()
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    settings, store = load_settings(ordinal=0).model_dump(), StoreSettings.from_environment(found.environment)
    assert settings["sending_bytes"] == 128 * 2**20
    for name, value in values["settings"].items():
        assert name == "sending_bytes" or as_value(settings[name]) == value, name
    assert dataclasses.asdict(store) == values["store"]


def test_credentials_come_from_the_secret_alone() -> None:
    found = everything()
    from_secret = {
        variable["name"]: variable["valueFrom"]["secretKeyRef"]
        for variable in found.container["env"]
        if "secretKeyRef" in variable.get("valueFrom", {})
    }
    assert from_secret == {
        "AWS_ACCESS_KEY_ID": {"name": "store-keys", "key": "id"},
        "AWS_SECRET_ACCESS_KEY": {"name": "store-keys", "key": "secret"},
        "AWS_SESSION_TOKEN": {"name": "store-keys", "key": "token"},
        "AZURE_STORAGE_ACCOUNT_KEY": {"name": "store-keys", "key": "azure-key"},
        "HF_TOKEN": {"name": "store-keys", "key": "hub-token"},
    }
    assert not [variable for variable in release().container["env"] if variable["name"].startswith("AWS_")]


@pytest.mark.variants("defaults-values")
@pytest.mark.parametrize("path", STARTED, ids=lambda path: path.stem)
def test_a_real_pod_starts_with_it_and_answers_its_probes(tmp_path: Path, path: Path) -> None:
    values = values_in(path) | {"ports": {name: free_port() for name in VALUES["ports"]}}
    found = release(values)
    mount(found.pod_template["spec"], tmp_path, secrets_of(values))
    host = "[::1]" if found.environment["REFILL_HOST"] == "::" else "127.0.0.1"
    log = tmp_path / "pod.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [Path(sys.executable).with_name(found.container["command"][0]), *found.container["command"][1:]],
            env=_environment_on_this_machine(found, tmp_path),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = found.container[probe]["httpGet"]
            assert asked.get("scheme", "HTTP") == "HTTP"
            _wait_until_ok(f"http://{host}:{values['ports'][asked['port']]}{asked['path']}", process, log)
        scheme = found.service("clients")["spec"]["ports"][0]["appProtocol"]
        jobs = httpx.get(f"{scheme}://{host}:{values['ports']['clients']}/v1/jobs", verify=False)
        assert jobs.status_code == (401 if "access" in values else 200)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _environment_on_this_machine(found: Release, root: Path) -> dict[str, str]:
    """That of the container, whose volumes are folders below ``root``."""
    environment = {name: value for name, value in os.environ.items() if name in ("PATH", "PYTHONPATH")}
    mounts = [mounted["mountPath"] for mounted in found.container["volumeMounts"]]
    for variable in found.container["env"]:
        value = variable.get("value", "from elsewhere")
        if any(f"{value}/".startswith(f"{mounted}/") for mounted in mounts):
            value = f"{root}{value}"
        environment[variable["name"]] = value
    return environment | {"REFILL_ORDINAL": "0"}  # in the cluster its host's name tells


def _wait_until_ok(url: str, process: subprocess.Popen[Any], log: Path) -> None:
    until_serving(url, lambda: process.poll() is not None, log.read_text)
