"""A misspelt variable of the client is named, as one of a pod is; those of pods and of Kubernetes are no mistakes."""

from __future__ import annotations

import pytest

from refill.errors import InvalidInput
from refill.pods.credentials import VARIABLES, Credentials
from refill.pods.environment import check_spelling
from refill_service.settings import Settings


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("REFILL_TOKENFILE", "REFILL_TOKEN_FILE"),
        ("REFILL_TOKENS", "REFILL_TOKEN"),
        ("REFILL_CAFILE", "REFILL_CA_FILE"),
        ("REFILL_ULR", "REFILL_URL"),
    ],
)
def test_a_misspelt_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, meant: str) -> None:
    monkeypatch.setenv(name, "anything")
    with pytest.raises(InvalidInput, match=rf"variable {name} \(is {meant} meant\?\)"):
        Credentials()


def test_variables_of_pods_beside_a_client_are_no_mistakes() -> None:
    of_pods = [f"REFILL_{name.upper()}" for name in Settings.model_fields]
    assert check_spelling(["PATH", *VARIABLES, "REFILL_PORT_8000_TCP"], VARIABLES) == []
    assert check_spelling(of_pods, VARIABLES) == sorted(of_pods)
