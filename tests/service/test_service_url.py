"""Which pod do commands ask where nobody says so? In a pod's container, that pod."""

from __future__ import annotations

import argparse

import pytest

from refill_service.commands.service_arguments import add_service_arguments


@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"REFILL_PORT": "9000"}, "http://127.0.0.1:9000"),
        ({"REFILL_PORT": "9000", "REFILL_HOST": "::"}, "http://[::1]:9000"),
        ({"REFILL_HOST": "0.0.0.0", "REFILL_PORT": "8000"}, "http://127.0.0.1:8000"),
        ({"REFILL_PORT": "tcp://10.0.0.1:8000"}, "http://127.0.0.1:8000"),
        ({"REFILL_PORT": "9000", "REFILL_URL": "http://refill:8000"}, "http://refill:8000"),
    ],
    ids=str,
)
def test_a_command_asks_the_pod_of_its_container(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], url: str
) -> None:
    for name in ("REFILL_URL", "REFILL_PORT", "REFILL_HOST", "REFILL_TLS_CERT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    parser = argparse.ArgumentParser()
    add_service_arguments(parser, "--url")
    assert parser.parse_args([]).url == url
