"""What exactly is in the image? ``make lock`` writes it down.

requirements.lock
    every package that the pods need, in one version, with the hashes of its files; for Python 3.11 and newer and any
    platform.
build.lock
    the same for what builds refill's wheel; it is not in the image.
sbom.cdx.json
    the same packages with their licences, hashes and who needs whom, in CycloneDX: read from an environment that is
    installed from the lock.

Versions that are locked stay, as long as pyproject.toml allows them: ``make lock LOCK_FLAGS=--upgrade`` takes newer
ones, ``LOCK_FLAGS='--upgrade-package httpx'`` one of them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
PYTHON = "3.11"


def main() -> None:
    flags = sys.argv[1:]
    _compile(["pyproject.toml", "--extra", "service", "--extra", "parquet"], DOCKER / "requirements.lock", flags)
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    _compile(["-"], DOCKER / "build.lock", flags, "\n".join(needed))
    _write_bill_of_materials(DOCKER / "requirements.lock", DOCKER / "sbom.cdx.json")


def _compile(source: list[str], lock: Path, flags: list[str], stdin: str = "") -> None:
    lock.touch()
    compiling = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version", PYTHON, "--generate-hashes"]
    compiling += ["--no-emit-index-url", "--custom-compile-command", "make lock", "--output-file", str(lock)]
    subprocess.run(
        [*compiling, *flags, *source],
        cwd=ROOT,
        input=stdin,
        text=True,
        check=True,
    )


def _write_bill_of_materials(lock: Path, bill: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="refill-lock-") as folder:
        subprocess.run(["uv", "venv", "--quiet", "--python", PYTHON, folder], check=True)
        install = ["uv", "pip", "install", "--quiet", "--require-hashes", "--no-build", "--python", folder]
        subprocess.run([*install, "-r", str(lock)], check=True)
        read = ["cyclonedx-py", "environment", "--output-reproducible", "--pyproject", "pyproject.toml", folder]
        printed = subprocess.run(read, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    bill.write_text(json.dumps(_with_hashes(_without_links(json.loads(printed)), lock), indent=1) + "\n")


def _without_links(part: Any) -> Any:
    """Homepages and chats of projects make two thirds of the file, and change without a new version."""
    if isinstance(part, dict):
        return {name: _without_links(value) for name, value in part.items() if name != "externalReferences"}
    return [_without_links(value) for value in part] if isinstance(part, list) else part


def _with_hashes(bill: dict[str, Any], lock: Path) -> dict[str, Any]:
    """Each package with those of all files that the lock lets be installed: a wheel a platform, and the source."""
    hashes: dict[tuple[str, str], list[str]] = {}
    for line in lock.read_text().splitlines():
        if locked := re.match(r"([A-Za-z0-9._-]+)==([^\s;]+)", line):
            package = canonicalize_name(locked[1]), locked[2]
        if found := re.search(r"--hash=sha256:([0-9a-f]{64})", line):
            hashes.setdefault(package, []).append(found[1])
    for component in bill["components"]:
        of_package = hashes[canonicalize_name(component["name"]), component["version"]]
        component["hashes"] = [{"alg": "SHA-256", "content": each} for each in of_package]
    return bill


if __name__ == "__main__":
    main()
