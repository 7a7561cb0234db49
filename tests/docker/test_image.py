"""The image as a pod gets it: built from this tree, read-only, as nobody in particular, with no capability. Run by
``make test-image``; docker/Dockerfile says what is in it and why."""

from __future__ import annotations

import json
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import httpx
import pytest
import yaml
from tests.conftest import free_port
from tests.docker.locked import PROJECT, entries
from tests.docker.podman import BASE, ROOT, built_image, built_training_image, podman
from tests.pod_fixtures import NUM_SAMPLES, whole_epoch
from tests.waiting import until_serving

from refill.pods.pod_connection import PodConnection
from refill.protocol.job_spec import JobSpec

pytestmark = [pytest.mark.image, pytest.mark.timeout(900)]

# As the chart's security context has it.
RESTRICTED = ["--read-only", "--read-only-tmpfs=false", "--cap-drop=all", "--security-opt=no-new-privileges"]
MOST_ADDED_BYTES = 160e6
"""What refill and its dependencies may add to the base image."""


@pytest.fixture(scope="module")
def image() -> str:
    return built_image()


@pytest.fixture(scope="module")
def description(image: str) -> dict[str, Any]:
    """What the image says of itself."""
    found: dict[str, Any] = json.loads(podman("image", "inspect", image).stdout)[0]
    return found


@pytest.fixture
def store(packed: tuple[str, dict[str, bytes]], tmp_path: Path) -> Path:
    """The dataset where a user that is not root can read it."""
    folder = tmp_path / "store"
    shutil.copytree(urlparse(packed[0]).path, folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


@pytest.fixture
def pod(image: str, store: Path) -> Iterator[tuple[str, str]]:
    """``(name, URL)`` of a running pod that sees the dataset as file:///data."""
    name, port, peer_port = f"refill-{uuid.uuid4().hex[:8]}", free_port(), free_port()
    variables = {"HOST": "127.0.0.1", "PORT": port, "PEER_PORT": peer_port, "ORDINAL": 0, "MEMORY_BYTES": "64MiB"}
    variables["DATASET_URLS"] = "file:///data"
    settings = [f"--env=REFILL_{setting}={value}" for setting, value in variables.items()]
    data = f"--volume={store}:/data:ro"
    podman("run", "--detach", "--name", name, "--network=host", *RESTRICTED, *settings, data, image)
    try:
        _wait_until_ready(name, f"http://127.0.0.1:{port}/readyz")
        yield name, f"http://127.0.0.1:{port}"
    finally:
        podman("rm", "--force", name, check=False)


def test_it_serves_a_dataset_read_only_and_without_capabilities(
    pod: tuple[str, str], packed: tuple[str, dict[str, bytes]]
) -> None:
    name, url = pod
    assert httpx.get(f"{url}/healthz").status_code == 200
    spec = JobSpec.from_dict({"name": "in-a-container", "dataset": "file:///data", "chunk_size": 16})
    rank = PodConnection(url, spec, 0, None, 30)
    delivered = [int(sample) for batch in whole_epoch(rank, 0) for sample in batch.sample_ids]
    assert sorted(delivered) == list(range(len(packed[1])))

    process = json.loads(podman("inspect", name).stdout)[0]["State"]["Pid"]
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    assert status["Uid"].split() == status["Gid"].split() == ["10001"] * 4
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"] == "1"


def test_its_health_check_tells_a_pod_from_a_dead_one(pod: tuple[str, str]) -> None:
    name, _ = pod
    podman("healthcheck", "run", name)
    # The command that it runs, in a container of its own where no pod is.
    command = json.loads(podman("inspect", name).stdout)[0]["Config"]["Healthcheck"]["Test"]
    assert command[0] == "CMD"
    alone = run(command[1], *command[2:], check=False)
    assert alone.returncode == 1
    assert "no answer" in alone.stderr


def test_it_ends_in_order_when_told_to(pod: tuple[str, str]) -> None:
    name, _ = pod
    podman("stop", "--time=20", name)
    assert json.loads(podman("inspect", name).stdout)[0]["State"]["ExitCode"] == 0


def test_the_file_system_is_read_only_for_it(image: str) -> None:
    refused = run("python", "-c", "open('/home/refill/x', 'w')", check=False)
    assert "Read-only file system" in refused.stderr


def test_commands_of_the_chart_are_on_the_path(image: str) -> None:
    assert run("refill", "--version").stdout.strip() == f"refill {PROJECT['project']['version']}"
    assert run("python", "-c", "import refill, refill_service.serving.serve; print('ready')").stdout.strip() == "ready"
    wrong = run("refill", "serve", "--memory-bytes", "much", check=False)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1), wrong.stderr


def test_nothing_is_compiled_when_a_pod_starts(image: str) -> None:
    """On a read-only file system a module without bytecode would be compiled at every start."""
    without = run(
        "python",
        "-c",
        "import os, sys, refill_service.cli, refill_service.serving.serve, refill_service.commands.serve\n"
        "for name, module in sorted(sys.modules.items()):\n"
        "    bytecode = getattr(module, '__cached__', None)\n"
        "    if bytecode and name != '__main__' and not os.path.exists(bytecode):\n"
        "        print(name)",
    ).stdout.split()
    # What site imports before anything else can write bytecode is of the distribution that made the base image.
    assert without == []


def test_no_compiler_and_nothing_of_development_is_inside(image: str) -> None:
    tools = "gcc cc c++ g++ clang make ld rustc cargo git uv pytest ruff mypy"
    found = run("sh", "-c", f"for tool in {tools}; do command -v $tool; done; true").stdout.split()
    assert found == []
    listing = (
        "import importlib.metadata as m; print(*(d.metadata['Name'] + '==' + d.version for d in m.distributions()))"
    )
    inside = {each.lower().replace("_", "-") for each in run("/opt/refill/bin/python", "-c", listing).stdout.split()}
    locked = {
        f"{package.name}{package.specifier}".lower()
        for package, _ in entries("requirements")
        if package.marker is None or package.marker.evaluate({"python_full_version": "3.11.0"})
    }
    assert inside == locked | {f"{PROJECT['project']['name']}=={PROJECT['project']['version']}"}


def test_only_what_is_needed_of_the_tree_is_inside(image: str) -> None:
    own = set(run("ls", "/opt/refill").stdout.split())
    assert own - {"share", "lib64", "include"} == {"bin", "lib", "pyvenv.cfg", "health_check.py"}
    assert not {"source", "wheels", "build"} & set(run("ls", "/").stdout.split())
    packages = set(run("sh", "-c", "ls /opt/refill/lib/python3*/site-packages").stdout.split())
    assert {"refill", "refill_service"} <= packages
    assert not packages & {"tests", "benchmarks", "dashboards", "setuptools", "pip"}


def test_labels_and_documents_say_what_it_is(image: str, description: dict[str, Any]) -> None:
    labels = description["Config"]["Labels"]
    assert labels["org.opencontainers.image.title"] == "refill"
    assert labels["org.opencontainers.image.version"] == PROJECT["project"]["version"]
    assert labels["org.opencontainers.image.licenses"] == PROJECT["project"]["license"]
    assert labels["org.opencontainers.image.revision"] == "0123abc"
    for label, name in (("refill.lock", "requirements.lock"), ("refill.sbom", "sbom.cdx.json")):
        assert run("cat", labels[label]).stdout == (ROOT / "docker" / name).read_text()


def test_it_runs_as_the_charts_user_without_being_told(description: dict[str, Any]) -> None:
    pod = yaml.safe_load((ROOT / "helm" / "refill" / "values.yaml").read_text())["podSecurityContext"]
    assert description["Config"]["User"] == f"{pod['runAsUser']}:{pod['runAsGroup']}"


def test_it_is_small(image: str, description: dict[str, Any]) -> None:
    base = json.loads(podman("image", "inspect", BASE).stdout)[0]
    assert description["Size"] - base["Size"] < MOST_ADDED_BYTES


def run(program: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A program in a container of the image, as restricted as a pod."""
    return podman(
        "run",
        "--rm",
        "--no-healthcheck",
        "--network=none",
        *RESTRICTED,
        "--entrypoint",
        program,
        "localhost/refill",
        *arguments,
        check=check,
    )


def _wait_until_ready(name: str, url: str) -> None:
    until_serving(url, lambda: False, lambda: podman("logs", name).stderr)


TRAINING = """
import refill, sys
from torch.utils.data import DataLoader
dataset = refill.CacheDataset(sys.argv[1], dataset="file:///data", job="trained-in-an-image", chunk_size=16)
loader = DataLoader(dataset, batch_size=32, sampler=refill.EpochSampler(dataset), num_workers=2, collate_fn=list)
print(*(sample["__id__"] for batch in loader for sample in batch))
"""


def test_the_example_image_for_training_reads_an_epoch(pod: tuple[str, str]) -> None:
    image = built_training_image()
    run = ["run", "--rm", "--network=host", "--cap-drop=all", "--security-opt=no-new-privileges", image]
    read = podman(*run, "python", "-c", TRAINING, pod[1]).stdout.split()
    assert sorted(map(int, read)) == list(range(NUM_SAMPLES)), "not every sample once"
    assert podman(*run, "id", "-u").stdout.strip() != "0"
