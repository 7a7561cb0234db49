"""What did the chart before this one fix for ever? chart_before.json has it:

    python -m tests.helm.chart_before     write it anew, when a version is released

Nothing was released yet: what is there is from a chart of 0.1.0 while that was written.

A StatefulSet that is there refuses every change but of a few fields, and so does ``helm upgrade`` then. It may give the
new chart all values that the one before had.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import yaml
from tests.helm.rendering import CHART, VALUES_FILES, Release, release_as_given, values_in

__all__ = ["BEFORE", "fixed_fields"]

BEFORE = Path(__file__).with_suffix(".json")

_CHANGEABLE = {
    *("replicas", "ordinals", "template", "updateStrategy", "minReadySeconds", "revisionHistoryLimit"),
    "persistentVolumeClaimRetentionPolicy",
}
"""Of a StatefulSet's spec, since Kubernetes 1.34. The history limit was fixed before, and the chart has none."""


def fixed_fields(found: Release) -> dict[str, Any]:
    """What an upgrade must leave as it is, or the cluster refuses it; and which address is the release's."""
    stateful = found.the("StatefulSet")
    services = {each["metadata"]["name"]: each["spec"].get("clusterIP", "") for each in found.of_kind("Service")}
    spec = {name: value for name, value in stateful["spec"].items() if name not in _CHANGEABLE}
    return {"name": stateful["metadata"]["name"], "spec": copy.deepcopy(spec), "cluster IPs of services": services}


if __name__ == "__main__":
    given = {path.stem: values_in(path) for path in VALUES_FILES}
    made = {
        "version": yaml.safe_load((CHART / "Chart.yaml").read_text())["version"],
        "defaults": values_in(CHART / "values.yaml"),
        "variables": sorted(
            {
                name
                for values in given.values()
                for name in release_as_given(values).environment
                if name.startswith("REFILL_")
            }
        ),
        "releases": {
            name: {"values": values, "fixed": fixed_fields(release_as_given(values))} for name, values in given.items()
        },
    }
    BEFORE.write_text(json.dumps(made, indent=1) + "\n")
