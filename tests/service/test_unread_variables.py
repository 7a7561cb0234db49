"""A misspelt variable is named, and options come before variables."""

from __future__ import annotations

import pytest

from refill.errors import InvalidInput
from refill_service.cli import _parser
from refill_service.commands.serve import _take_store_options, unread_variables
from refill_service.object_store.store_settings import StoreSettings


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("REFILL_MEMORY_BYTE", "REFILL_MEMORY_BYTES"),
        ("REFILL_CLIENT_TOKEN", "REFILL_CLIENT_TOKENS"),
        ("REFILL_STORE_ENDPOINTURL", "REFILL_STORE_ENDPOINT_URL"),
        ("REFILL_POD_URL", "REFILL_POD_URLS"),
        ("refill_pinneddir", "REFILL_PINNED_DIR"),
        ("REFILL_DATASETS_URLS", "REFILL_DATASET_URLS"),
    ],
)
def test_a_misspelt_variable_is_refused_and_named(name: str, meant: str) -> None:
    with pytest.raises(InvalidInput, match=rf"variable {name} \(is {meant} meant\?\)"):
        unread_variables(["PATH", name])


def test_what_is_read_and_what_others_set_is_no_mistake() -> None:
    """Kubernetes tells pods of every service, also of those that are called as this one is."""
    ours = ["REFILL_MEMORY_BYTES", "refill_port", "REFILL_STORE_REGION", "REFILL_TOKEN_FILE", "REFILL_URL"]
    of_kubernetes = [
        "REFILL_SERVICE_HOST",
        "REFILL_SERVICE_PORT",
        "REFILL_SERVICE_PORT_CLIENTS",
        "REFILL_PORT_8000_TCP",
        "REFILL_PORT_8000_TCP_ADDR",
        "REFILL_PEERS_SERVICE_PORT",
    ]
    assert unread_variables(["PATH", *ours, *of_kubernetes, "REFILL_IMAGE_TAG"]) == ["REFILL_IMAGE_TAG"]


def test_options_of_the_store_come_before_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "REFILL_STORE_ENDPOINT_URL": "http://variable:1",
        "AWS_ENDPOINT_URL_S3": "http://aws:1",
        "REFILL_STORE_REGION": "of-the-variable",
        "REFILL_STORE_ANONYMOUS": "false",
    }.items():
        monkeypatch.setenv(name, value)
    arguments = ["serve", "--endpoint-url", "http://option:1", "--no-sign-request"]
    _take_store_options(_parser(arguments).parse_args(arguments))
    found = StoreSettings.from_environment()
    assert (found.endpoint_url, found.region, found.anonymous) == ("http://option:1", "of-the-variable", True)
