"""What does the example Job leave alone in the namespace of somebody who has it there already?"""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from tests.cluster.cluster import CHART
from tests.cluster.example import Example, example

_OWN = "refill-try-train"


def _of(*, indexed: bool) -> Example:
    return example("training:1", "Never", {"JOB": "run-9", "CACHE": "http://refill-try:8000"}, indexed=indexed)


def _names(objects: list[dict[str, Any]]) -> set[str]:
    return {found["metadata"]["name"] for found in objects}


@pytest.mark.parametrize("indexed", [True, False])
def test_no_object_has_a_name_of_the_examples(indexed: bool) -> None:
    shown = list(yaml.safe_load_all((CHART.parent / "examples" / "train.yaml").read_text()))
    jobs, others = _of(indexed=indexed)
    assert not _names(shown) & _names([*jobs, *others])
    assert all(name.startswith(_OWN) for name in _names([*jobs, *others]))


@pytest.mark.parametrize("indexed", [True, False])
def test_its_objects_find_each_other_by_the_new_names(indexed: bool) -> None:
    jobs, others = _of(indexed=indexed)
    (service,) = (found for found in others if found["kind"] == "Service")
    (script,) = (found for found in others if found["kind"] == "ConfigMap")
    for job in jobs:
        template = job["spec"]["template"]
        assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        assert template["spec"]["subdomain"] == service["metadata"]["name"]
        assert [volume["configMap"]["name"] for volume in template["spec"]["volumes"] if "configMap" in volume] == [
            script["metadata"]["name"]
        ]
        (container,) = template["spec"]["containers"]
        variables = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert variables["MASTER_ADDR"] == f"{_OWN}-0.{_OWN}"
        assert (variables["JOB"], variables["CACHE"]) == ("run-9", "http://refill-try:8000")
    if not indexed:
        assert [job["spec"]["template"]["spec"]["hostname"] for job in jobs] == [f"{_OWN}-0", f"{_OWN}-1"]
