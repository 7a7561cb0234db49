"""Does docker/bake.json, from which ``docker buildx bake`` builds both images, fit the Dockerfiles?

It is read here, and nothing is built.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.docker.locked import PROJECT, ROOT

BAKE = json.loads((ROOT / "docker" / "bake.json").read_text())
TARGETS: dict[str, dict[str, Any]] = BAKE["target"]


def dockerfile(target: dict[str, Any]) -> Path:
    """Where it is run from the root of the repository: paths are the context's, and that is the working directory's."""
    return ROOT / Path(target["context"], target["dockerfile"])


def test_every_image_is_built() -> None:
    built = {dockerfile(target) for target in TARGETS.values()}
    assert built == set((ROOT / "docker").glob("*Dockerfile"))
    assert BAKE["group"]["default"]["targets"] == list(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_an_image_is_for_both_platforms_and_gets_what_its_dockerfile_takes(name: str) -> None:
    target = TARGETS[name]
    assert target["platforms"] == ["linux/amd64", "linux/arm64"]
    takes = re.findall(r"^ARG (\w+)", dockerfile(target).read_text(), re.MULTILINE)
    assert set(target.get("args", {})) <= set(takes)


def test_variables_are_those_that_are_used() -> None:
    used = set(re.findall(r"\$\{(\w+)\}", json.dumps(TARGETS)))
    assert used == set(BAKE["variable"])


def test_tags_are_those_that_the_chart_and_the_examples_name() -> None:
    assert TARGETS["refill"]["tags"] == [f"${{REGISTRY}}/refill:{PROJECT['project']['version']}"]
    (tag,) = TARGETS["training"]["tags"]
    named = re.findall(r"image: (\S+)", (ROOT / "helm" / "examples" / "train.yaml").read_text())
    assert {tag.removeprefix("${REGISTRY}/")} == set(named)
