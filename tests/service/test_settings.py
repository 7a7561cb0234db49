"""Settings of a pod: from the environment and options, validated once, each refusal one line that names the setting."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from refill.errors import InvalidInput
from refill.protocol.sizes import parse_bytes
from refill_service.settings import Settings, load_settings

POD_TEMPLATE, PEER_TEMPLATE = "http://refill-{ordinal}.refill:8000", "http://refill-{ordinal}.refill:8001"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("REFILL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(socket, "gethostname", lambda: "laptop")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1024", 1024),
        ("2GiB", 2 * 2**30),
        ("512Mi", 512 * 2**20),
        ("1500MB", 1_500_000_000),
        ("1.5g", 1_500_000_000),
        ("0.5 TiB", 2**39),
        (" 7kb ", 7000),
        (42, 42),
    ],
)
def test_bytes(text: Any, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "lots", "-5GiB", "1 2", "5XB", "GiB", "0x10", "1e9", "i", "5i", "9" * 400 + ".0"])
def test_not_bytes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of bytes; write for example 2GiB"):
        parse_bytes(text)


def test_environment_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFILL_MEMORY_BYTES", "3GiB")
    monkeypatch.setenv("REFILL_PORT", "1234")
    monkeypatch.setenv("REFILL_LOG_LEVEL", "DEBUG")
    monkeypatch.setenv("REFILL_STORE_REGION", "of the store, not of the pod")
    settings = load_settings(port="4321", peer_port=None)
    assert settings.memory_bytes == 3 * 2**30
    assert settings.port == 4321, "an option wins over the environment"
    assert settings.peer_port == 8001, "an option that is not given leaves the default"
    assert settings.log_level == "debug"
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1  # type: ignore[misc]


def test_every_setting_can_be_given_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the environment and the command line give it."""
    defaults = load_settings()
    for name in Settings.model_fields:
        value = getattr(defaults, name)
        monkeypatch.setenv(f"REFILL_{name.upper()}", ",".join(value) if isinstance(value, tuple) else str(value))
    assert load_settings() == defaults


@pytest.mark.parametrize("by_environment", [True, False])
def test_template_urls(monkeypatch: pytest.MonkeyPatch, by_environment: bool) -> None:
    given = {"replicas": "3", "pod_urls": POD_TEMPLATE, "peer_urls": PEER_TEMPLATE, "ordinal": "2"}
    if by_environment:
        for name, value in given.items():
            monkeypatch.setenv(f"REFILL_{name.upper()}", value)
    settings = load_settings(**({} if by_environment else given))
    assert settings.pod_urls == tuple(f"http://refill-{i}.refill:8000" for i in range(3))
    assert settings.peer_urls == tuple(f"http://refill-{i}.refill:8001" for i in range(3))
    assert (settings.num_pods, settings.ordinal) == (3, 2)


def test_listed_urls() -> None:
    settings = load_settings(pod_urls="http://a:1/, http://b:2", peer_urls="http://a:3,http://b:4,", ordinal=1)
    assert settings.pod_urls == ("http://a:1", "http://b:2")
    assert settings.peer_urls == ("http://a:3", "http://b:4")


@pytest.mark.parametrize(("host", "ordinal"), [("refill-1", 1), ("refill-2.refill.default.svc", 2), ("Refill-0", 0)])
def test_ordinal_from_the_host_name(monkeypatch: pytest.MonkeyPatch, host: str, ordinal: int) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert load_settings(replicas=3, pod_urls=POD_TEMPLATE, peer_urls=PEER_TEMPLATE).ordinal == ordinal


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("laptop", "host's name, laptop, does not end in the number of one"),
        ("node-x", "host's name, node-x, does not end"),
        ("node-1", r"is called node-1, and the URL of pod 1 is http://refill-1\.refill:8000: set ordinal"),
        ("refill-3", "ordinal is 3 but there are 3 pods"),
    ],
)
def test_with_several_pods_no_ordinal_is_guessed(monkeypatch: pytest.MonkeyPatch, host: str, why: str) -> None:
    """Two pods that take themselves for the same one would hand out its samples twice."""
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    with pytest.raises(InvalidInput, match=why):
        load_settings(replicas=3, pod_urls=POD_TEMPLATE, peer_urls=PEER_TEMPLATE)
    assert load_settings(replicas=3, pod_urls=POD_TEMPLATE, peer_urls=PEER_TEMPLATE, ordinal=2).ordinal == 2


def test_one_pod_is_pod_0_whatever_its_host_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "machine-17")
    assert load_settings().ordinal == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"memory_bytes": "lots"}, "setting memory_bytes (REFILL_MEMORY_BYTES): 'lots' is not a number of bytes"),
        ({"memory_bytes": "1KiB"}, "setting memory_bytes (REFILL_MEMORY_BYTES): Input should be greater than"),
        ({"port": "http"}, "setting port (REFILL_PORT): Input should be a valid integer"),
        ({"port": "0"}, "setting port (REFILL_PORT): Input should be greater than or equal to 1"),
        ({"peer_port": "0"}, "setting peer_port (REFILL_PEER_PORT): Input should be greater than or equal to 1"),
        ({"port": "70000"}, "setting port (REFILL_PORT): Input should be less than or equal to 65535"),
        ({"peer_port": "-1"}, "setting peer_port (REFILL_PEER_PORT)"),
        ({"port": "9000", "peer_port": "9000"}, "port and peer_port are both 9000"),
        ({"ordinal": "first"}, "setting ordinal (REFILL_ORDINAL)"),
        ({"ordinal": "1"}, "ordinal is 1 but there are 1 pods, numbered from 0: all pods are to be told of one more"),
        ({"replicas": "three", "pod_urls": POD_TEMPLATE, "peer_urls": PEER_TEMPLATE}, "setting replicas (REFILL_REPL"),
        ({"replicas": "3"}, "replicas is 3, and pod_urls and peer_urls name no pods: set them (REFILL_POD_URLS"),
        ({"replicas": "0", "pod_urls": POD_TEMPLATE, "peer_urls": PEER_TEMPLATE}, "setting replicas (REFILL_REPLICAS)"),
        (
            {"replicas": "1000000000000", "pod_urls": POD_TEMPLATE, "peer_urls": PEER_TEMPLATE},
            "setting replicas (REFILL_REPLICAS): Input should be less than or equal to 10000",
        ),
        ({"pod_urls": "http://a:1,http://b:1", "peer_urls": "http://a:2"}, "pod_urls names 2 pods and peer_urls 1"),
        ({"pod_urls": "refill:8000", "peer_urls": "refill:8001"}, "'refill:8000' is not a URL like http://refill-0"),
        (
            {"pod_urls": "http://a:1,http://a:1", "peer_urls": "http://a:2,http://b:2", "ordinal": "0"},
            "pod_urls names http://a:1 twice",
        ),
        ({"remote_memory_fraction": "nan"}, "setting remote_memory_fraction (REFILL_REMOTE_MEMORY_FRACTION)"),
        ({"in_flight_fraction": "0"}, "setting in_flight_fraction (REFILL_IN_FLIGHT_FRACTION)"),
        (
            {"remote_memory_fraction": "0.9", "in_flight_fraction": "0.1"},
            "remote_memory_fraction and in_flight_fraction leave no memory for chunks",
        ),
        ({"job_idle_seconds": "0"}, "setting job_idle_seconds (REFILL_JOB_IDLE_SECONDS)"),
        ({"wait_seconds": "inf"}, "setting wait_seconds (REFILL_WAIT_SECONDS): Input should be a finite number"),
        ({"peer_timeout_seconds": "inf"}, "setting peer_timeout_seconds (REFILL_PEER_TIMEOUT_SECONDS)"),
        ({"log_level": "loud"}, "setting log_level (REFILL_LOG_LEVEL): must be debug, info, warning or error"),
        ({"memory": "1GiB"}, "setting memory (REFILL_MEMORY): Extra inputs are not permitted"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_refusals_are_one_line_that_names_the_setting(given: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        load_settings(**given)
    assert message in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 300


def test_localhost_is_its_address() -> None:
    """Not each of a pod's servers looks up names."""
    assert load_settings(host="localhost").host == "127.0.0.1"
    assert load_settings(host="::").host == "::"
