"""How do tests build and run images? With podman as root, in a storage of their own, and with no network.

What is built stays in ``~/.cache/refill-images``, so that a second run builds only what changed. Nothing touches the
images that podman otherwise has on this machine.

The base image is a stand-in for the official one, made by debootstrap of the same Debian with the same Python: no
registry of images is asked. As in the official one, the standard library comes without bytecode. Packages come from a
folder of wheels that pip downloads here by the lock, with its hashes.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest

__all__ = ["BASE", "IMAGE", "ROOT", "built_image", "built_training_image", "podman"]

ROOT = Path(__file__).parents[2]
BASE = "localhost/refill-test-base"
IMAGE = "localhost/refill"
TRAINING_IMAGE = "localhost/refill-training"

_HERE = Path.home() / ".cache" / "refill-images"
_PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"


def podman(*arguments: str, check: bool = True, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Run podman in the tests' own storage. Where it fails the test does, with what it said, unless ``check`` is false.

    What this process may open bounds what containers may: a container can't be given more.
    """
    storage = ["--root", str(_HERE / "storage"), "--runroot", str(_HERE / "run")]
    # Its own containers.conf: Debian's default runtime, crun, fails where cgroups are old, and its default limits are
    # above what a container that runs podman may set.
    configuration = _HERE / "containers.conf"
    limits = ", ".join(
        f'"{name}={most}:{most}"'
        for name, most in (
            ("nofile", resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
            ("nproc", min(4096, resource.getrlimit(resource.RLIMIT_NPROC)[0] % 2**63)),
        )
    )
    runtime = "runc" if shutil.which("runc") else "crun"
    _HERE.mkdir(parents=True, exist_ok=True)
    configuration.write_text(
        f'[containers]\ndefault_ulimits = [{limits}]\n[engine]\nruntime = "{runtime}"\n'
        'cgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
    )
    done = subprocess.run(
        ["podman", *storage, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "CONTAINERS_CONF": str(configuration)},
    )
    if check and done.returncode:
        pytest.fail(f"podman {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"[-4000:])
    return done


def built_image() -> str:
    """The name of the pods' image, built from this working tree. Skips where it can't be built."""
    _need_base()
    wheels = _HERE / "wheels"
    lock = [f"--requirement={ROOT / 'docker' / name}.lock" for name in ("build", "requirements")]
    _download(wheels, ["--no-deps", "--require-hashes", *lock])
    _build(IMAGE, "Dockerfile", wheels, "REVISION=0123abc")
    return IMAGE


def built_training_image() -> str:
    """The name of the example image for training, built from this working tree. Skips where it can't be built."""
    _need_base()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wheels = _HERE / "wheels-of-training"
    _download(wheels, ["--no-deps", "--require-hashes", f"--requirement={ROOT / 'docker' / 'build.lock'}"])
    _download(wheels, ["torch==2.13.0", *project["dependencies"], *project["optional-dependencies"]["torch"]])
    _build(TRAINING_IMAGE, "train.Dockerfile", wheels)
    return TRAINING_IMAGE


def _need_base() -> None:
    if os.geteuid() != 0:
        pytest.skip("images are built as root only")
    for program in ("podman", "debootstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: apt-get install podman runc debootstrap")
    if podman("image", "exists", BASE, check=False).returncode:
        _make_base()


def _build(name: str, file: str, wheels: Path, *build_arguments: str) -> None:
    offline = _HERE / "pip.conf"
    offline.write_text("[global]\nno-index = true\nfind-links = /wheels-of-lock\n")
    podman(
        *("build", "--format", "docker", "--pull=never", "--network=none", "--tag", name),
        *("--volume", f"{wheels}:/wheels-of-lock:ro", "--volume", f"{offline}:/etc/pip.conf:ro"),
        *(f"--build-arg={argument}" for argument in (f"PYTHON_IMAGE={BASE}", *build_arguments)),
        *("--file", str(ROOT / "docker" / file), str(ROOT)),
    )


def _make_base() -> None:
    with tempfile.TemporaryDirectory(prefix="refill-base-") as folder:
        system = Path(folder) / "system"
        made = subprocess.run(
            ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(system)],
            capture_output=True,
            text=True,
            timeout=600,
        )
        if made.returncode:
            pytest.skip(f"debootstrap could not make a base image: {made.stdout[-300:]}{made.stderr[-300:]}")
        (system / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        for bytecode in (system / "usr/lib").rglob("*.pyc"):
            bytecode.unlink()
        # As slim images of Debian have it; licences stay.
        for needless in ("var/cache/apt", "var/lib/apt/lists", "usr/share/locale", "usr/share/man"):
            shutil.rmtree(system / needless)
        for text in system.glob("usr/share/doc/**/*"):
            if text.is_file() and text.name != "copyright":
                text.unlink()
        archive = Path(folder) / "base.tar"
        subprocess.run(["tar", "-C", str(system), "-cf", str(archive), "."], check=True)
        podman("import", str(archive), BASE)


def _download(wheels: Path, what: list[str]) -> None:
    downloading = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
    subprocess.run(
        [*downloading, f"--dest={wheels}", f"--find-links={wheels}", *what],
        check=True,
        capture_output=True,
    )
