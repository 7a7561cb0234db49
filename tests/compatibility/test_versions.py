"""Clients and pods of two versions train together: docs/COMPATIBILITY.md.

``REFILL_OLD_WHEEL`` names the wheel of the other version, as ``make test-compatibility`` does; else it is one that is
built of this tree, which shows that the trial works, and that a wheel is what the tree is. ``REFILL_OLD_PYTHON`` names
the interpreter that it runs on: an order has to be the same on every Python.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from tests.pod_fixtures import NUM_SAMPLES, write_files

from refill_service.demo import local_cluster
from refill_service.demo.local_cluster import LocalCluster

pytestmark = pytest.mark.variant

ROOT = Path(__file__).parents[2]
UV = Path(sysconfig.get_path("scripts")) / "uv"
CLIENT = Path(__file__).with_name("client_of_version.py")
VERSIONS = ("old", "new")
other_of = {"old": "new", "new": "old"}


def run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{command[:4]} ended with {done.returncode}: {done.stdout}{done.stderr}"[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The interpreter of each version. The old one has the packages of this environment behind its own refill, or, on
    another Python than this, what the index has for that."""
    folder = tmp_path_factory.mktemp("old")
    if not (wheel := os.environ.get("REFILL_OLD_WHEEL")):
        run(UV, "build", "--quiet", "--no-build-isolation", "--out-dir", folder / "dist", ROOT)
        (built,) = (folder / "dist").glob("*.whl")
        wheel = str(built)
    other = os.environ.get("REFILL_OLD_PYTHON")
    run(UV, "venv", "--quiet", "--python", other or sys.executable, "--no-project", folder / "venv")
    installing = [UV, "pip", "install", "--quiet", "--python", folder / "venv"]
    if other:
        # Else each pod would compile all that it imports, at the same time.
        run(*installing, "--compile-bytecode", f"refill-cache[service] @ {Path(wheel).absolute().as_uri()}")
    else:
        (packages,) = (folder / "venv").glob("lib/python*/site-packages")
        (packages / "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
        run(*installing, "--no-deps", wheel)
    return {"old": str(folder / "venv" / "bin" / "python"), "new": sys.executable}


class PodsOfVersions(LocalCluster):
    def __init__(self, pythons: list[str], folder: Path) -> None:
        super().__init__(len(pythons), folder, {"memory_bytes": "4MiB", "pinned_fraction": 0})
        self._pythons = pythons

    def _start(self, pod: int) -> subprocess.Popen[bytes]:
        """By a process of that version's own, in place of one that is forked of this one."""

        def start(arguments: list[str], environment: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
            command = [self._pythons[pod], "-m", "refill_service.cli", *arguments]
            return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local_cluster, "start_process", start)
            return super()._start(pod)


@pytest.fixture(scope="module", params=["new", "old", "old and new"])
def pods(
    request: pytest.FixtureRequest, pythons: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    versions = request.param.split(" and ")
    of_pods = [pythons[versions[pod % len(versions)]] for pod in range(2)]
    with PodsOfVersions(of_pods, tmp_path_factory.mktemp("pods")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def datasets(pythons: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of the same files, packed by each version."""
    source = tmp_path_factory.mktemp("files")
    write_files(source, NUM_SAMPLES)
    found = {}
    for version, python in pythons.items():
        found[version] = tmp_path_factory.mktemp("store").as_uri()
        run(python, "-m", "refill_service.cli", "pack", source, found[version])
    return found


def new_job() -> str:
    return f"job-{uuid.uuid4().hex[:8]}"


def epoch_of(
    python: str,
    pods: LocalCluster,
    dataset: str,
    job: str,
    *,
    state: dict[str, Any] | None = None,
    stop_after: int | None = None,
) -> dict[str, Any]:
    asked = {"service": pods.pod_urls[0], "dataset": dataset, "job": job, "epoch": 0}
    asked |= {"state": state, "stop_after": stop_after}
    found: dict[str, Any] = json.loads(run(python, CLIENT, json.dumps(asked)))
    return found


def receipt_is_exact(python: str, pods: LocalCluster, job: str) -> None:
    run(python, "-m", "refill_service.cli", "receipt", job, "0", "--url", pods.pod_urls[1])


def test_two_versions_are_two_installations(pythons: dict[str, str]) -> None:
    """Else a version would be tried with itself."""
    places = {run(python, "-c", "import refill_service; print(refill_service.__file__)") for python in pythons.values()}
    assert len(places) == 2


def test_an_epoch_is_exact_and_has_the_order_that_its_seed_gives_in_either_version(
    pods: LocalCluster, pythons: dict[str, str], datasets: dict[str, str]
) -> None:
    """Whoever packed the dataset, whoever asks, whoever answers."""
    orders = []
    for version in VERSIONS:
        job = new_job()
        orders.append(epoch_of(pythons[version], pods, datasets[other_of[version]], job)["ids"])
        receipt_is_exact(pythons[other_of[version]], pods, job)
    assert sorted(orders[0]) == list(range(NUM_SAMPLES))
    assert orders[0] == orders[1]


@pytest.mark.parametrize("first", VERSIONS)
def test_an_epoch_goes_on_from_the_state_of_the_other_version(
    pods: LocalCluster, pythons: dict[str, str], datasets: dict[str, str], first: str
) -> None:
    job = new_job()
    began = epoch_of(pythons[first], pods, datasets["new"], job, stop_after=400)
    ended = epoch_of(pythons[other_of[first]], pods, datasets["new"], job, state=began["state"])
    assert sorted(began["ids"] + ended["ids"]) == list(range(NUM_SAMPLES))
    receipt_is_exact(pythons[first], pods, job)
