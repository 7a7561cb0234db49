"""What goes into the image is written down: every package in one version, by hashes, as pyproject.toml allows it."""

from __future__ import annotations

import json
import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.docker.locked import PROJECT, ROOT, entries

SERVICE = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["service"]]
WANTED = {"requirements": SERVICE, "build": PROJECT["build-system"]["requires"]}


@pytest.mark.parametrize("lock", WANTED)
def test_every_package_has_one_version_and_hashes(lock: str) -> None:
    assert entries(lock), "an empty lock"
    for package, hashes in entries(lock):
        assert re.fullmatch(r"==[^*,]+", str(package.specifier)), f"{package} is not pinned"
        assert hashes, f"{package} has no hash"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes), package


@pytest.mark.parametrize("lock", WANTED)
def test_versions_are_those_that_the_project_allows(lock: str) -> None:
    locked = [(canonicalize_name(package.name), package) for package, _ in entries(lock)]
    for wanted in map(Requirement, WANTED[lock]):
        found = [package for name, package in locked if name == canonicalize_name(wanted.name)]
        assert found, f"{wanted} is not locked: make lock"
        for package in found:
            version = str(package.specifier).removeprefix("==")
            assert wanted.specifier.contains(version), f"{wanted} does not allow {version}: make lock"


@pytest.mark.parametrize("lock", WANTED)
def test_a_lock_names_no_place_to_download_from(lock: str) -> None:
    assert not re.search(
        r"https?://|--(?:extra-)?index-url|--find-links", (ROOT / "docker" / f"{lock}.lock").read_text()
    )


def test_nothing_of_training_and_development_is_locked() -> None:
    locked = {canonicalize_name(package.name) for package, _ in entries("requirements")}
    assert not locked & {"torch", "pytest", "ruff", "mypy", "setuptools", "matplotlib"}


def test_the_bill_of_materials_lists_what_is_locked() -> None:
    bill = json.loads((ROOT / "docker" / "sbom.cdx.json").read_text())
    here = {
        (canonicalize_name(package.name), str(package.specifier).removeprefix("=="))
        for package, _ in entries("requirements")
        if package.marker is None
        or package.marker.evaluate({"python_version": "3.11", "python_full_version": "3.11.0"})
    }
    assert {(canonicalize_name(each["name"]), each["version"]) for each in bill["components"]} == here
    assert bill["metadata"]["component"]["version"] == PROJECT["project"]["version"]


def test_the_bill_of_materials_has_the_hashes_of_what_may_be_installed() -> None:
    from cyclonedx.schema import SchemaVersion  # slow to import
    from cyclonedx.validation.json import JsonStrictValidator

    text = (ROOT / "docker" / "sbom.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    locked = {(canonicalize_name(each.name), str(each.specifier)): set(has) for each, has in entries("requirements")}
    for each in json.loads(text)["components"]:
        package = canonicalize_name(each["name"]), f"=={each['version']}"
        assert {hash["alg"] for hash in each["hashes"]} == {"SHA-256"}
        assert {f"sha256:{hash['content']}" for hash in each["hashes"]} == locked[package]
