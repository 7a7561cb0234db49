"""`helm upgrade` from the chart before is taken by the cluster, with the values from there, too; so is the way back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.helm.chart_before import BEFORE, fixed_fields
from tests.helm.rendering import merged, release_as_given

from refill_service.commands.serve import unread_variables

CHART_BEFORE = json.loads(BEFORE.read_text())
releases_before = pytest.mark.parametrize(
    "before", [pytest.param(found, id=name) for name, found in CHART_BEFORE["releases"].items()]
)


@releases_before
def test_what_a_cluster_lets_nobody_change_is_what_it_was(before: dict[str, Any]) -> None:
    """A rollback changes it back, so this is what both need."""
    assert fixed_fields(release_as_given(before["values"])) == before["fixed"]


@releases_before
def test_values_of_the_chart_before_are_still_taken(before: dict[str, Any]) -> None:
    """All of them, its defaults, too."""
    reused = merged(CHART_BEFORE["defaults"], before["values"])
    assert fixed_fields(release_as_given(reused)) == before["fixed"]


def test_pods_of_this_version_know_the_variables_of_the_chart_before() -> None:
    """Who builds a newer image may not have the newer chart yet. A variable that nobody reads keeps a pod from
    starting, or is a setting that is not in force any more."""
    assert unread_variables(CHART_BEFORE["variables"]) == []


def test_a_change_that_a_cluster_refuses_is_found() -> None:
    volumes = {"pinnedDisk": {"enabled": True, "persistent": True}}
    for values in ({"fullnameOverride": "other"}, volumes, {"nameOverride": "cache"}):
        found = fixed_fields(release_as_given({"insecure": True} | values))
        assert found != CHART_BEFORE["releases"]["defaults-values"]["fixed"], values
