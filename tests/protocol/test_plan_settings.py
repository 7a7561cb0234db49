"""plan_id: the same for the same settings, another for any other."""

from __future__ import annotations

import dataclasses

import pytest

from refill.errors import InvalidInput
from refill.protocol.plan_settings import PlanSettings

SETTINGS = PlanSettings("00c0ffee00c0ffee", 1000, 16, 8, 123_456, 64, 7, "")


def test_the_plan_id_never_changes() -> None:
    """It is in states and receipts."""
    assert SETTINGS.plan_id == "76cfe3aca8dab32269849057a1bd556f"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dataset", "00c0ffee00c0ffef"),
        ("num_samples", 1001),
        ("chunk_size", 8),
        ("num_shares", 9),
        ("memory_bytes", 123_457),
        ("run", 32),
        ("seed", -7),
        ("selection", "1"),
        ("read_seed", 7),
    ],
)
def test_any_other_setting_is_another_plan(name: str, value: object) -> None:
    other = dataclasses.replace(SETTINGS, **{name: value})
    assert other.plan_id != SETTINGS.plan_id


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"version": 3}, "plan version 3 is not known here; versions 1 and 2 are"),
        ({"version": 2}, "plan version 2 does not go with selection ''"),
        ({"chunk_size": 0}, "plan setting chunk_size must be 1 to 65536, got 0"),
        ({"seed": True}, "plan setting seed must be int, got True"),
        ({"num_samples": "7"}, "plan setting num_samples must be int, got '7'"),
        ({"read_seed": "7"}, "plan setting read_seed must be int, got '7'"),
        ({"read_seed": 2**63}, "plan setting read_seed must be -9223372036854775808 to 9223372036854775807"),
        ({"run": None}, "plan setting run must be int, got None"),
    ],
)
def test_what_no_plan_has_is_named(given: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidInput) as error:
        dataclasses.replace(SETTINGS, **given)
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


def test_a_plan_without_a_read_seed_is_what_it_was_before_there_were_any() -> None:
    assert "read_seed" not in SETTINGS.to_dict()
    assert PlanSettings.from_dict(SETTINGS.to_dict()) == SETTINGS
    shared = dataclasses.replace(SETTINGS, read_seed=0)
    assert PlanSettings.from_dict(shared.to_dict()) == shared
