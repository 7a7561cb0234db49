"""The image has little that no pod reads, and all that one does. Tried on the packages of this environment: those of
the lock, though in other versions at times."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.docker.locked import ROOT, entries

spec = importlib.util.spec_from_file_location("slim", ROOT / "docker" / "slim.py")
assert spec is not None
assert spec.loader is not None
slim = importlib.util.module_from_spec(spec)
spec.loader.exec_module(slim)

MOST_BYTES = 220e6
"""Of all packages, without their bytecode. With docker/requirements.lock as it is there are 200 MB: 86 of pyarrow."""

READING = """
import asyncio, importlib, pkgutil, sys
import boto3, numpy, pyarrow, pyarrow.parquet, uvloop
import refill_service.cli, refill_service.commands, refill_service.serving.serve

for module in pkgutil.iter_modules(refill_service.commands.__path__, "refill_service.commands."):
    importlib.import_module(module.name)
session = boto3.Session("a", "b", region_name="eu-west-1")
for service in ("s3", "sts", "sso", "sso-oidc", "signin"):
    session.client(service)
assert numpy.linalg.inv(numpy.eye(2) * 4)[0, 0] == 0.25
out = pyarrow.BufferOutputStream()
pyarrow.parquet.write_table(pyarrow.table({"x": [1]}), out, compression="zstd")
assert pyarrow.parquet.read_table(pyarrow.BufferReader(out.getvalue())).num_rows == 1
assert uvloop.run(asyncio.sleep(0, "ran")) == "ran"
used = {name.partition(".")[0]: module for name, module in sys.modules.items()}
print(*(module.__file__ for module in used.values() if getattr(module, "__file__", None)), sep="\\n")
"""
"""What commands and pods import, and what has a part that is compiled."""


@pytest.fixture(scope="module")
def slimmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages of the lock, after docker/slim.py: links, and copies of libraries."""
    packages = tmp_path_factory.mktemp("image") / "packages"
    for requirement, _ in entries("requirements"):
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        distribution = importlib.metadata.distribution(requirement.name)
        installed = str(distribution.locate_file(""))
        for name in map(str, distribution.files or ()):
            unread = slim.unread(name)
            if name.startswith("..") or name.endswith(".pyc") or (unread and name.startswith("botocore/data/")):
                continue  # of the last there are thousands
            # With its bytecode, or it would be compiled here.
            bytecode = os.path.relpath(importlib.util.cache_from_source(f"{installed}/{name}"), installed)
            for each in [name] if unread or not name.endswith(".py") else [name, bytecode]:
                if os.path.exists(f"{installed}/{each}"):
                    os.makedirs(os.path.dirname(packages / each), exist_ok=True)
                    os.symlink(f"{installed}/{each}", packages / each)
    slim.main(packages)
    return packages


def test_packages_are_no_larger_than_they_need_to_be(slimmed: Path) -> None:
    sizes: Counter[str] = Counter()
    for path in slimmed.rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            sizes[path.relative_to(slimmed).parts[0]] += path.stat().st_size
    largest = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in sizes.most_common(8))
    assert sizes.total() < MOST_BYTES, f"{sizes.total() / 1e6:.0f} MB; the largest: {largest}. See docker/slim.py"


def test_what_is_left_out_is_never_read(slimmed: Path) -> None:
    paths = os.pathsep.join(map(str, (slimmed, ROOT / "client", ROOT / "service")))
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    # Without the environment's own packages.
    done = subprocess.run([sys.executable, "-S", "-c", READING], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "site-packages" not in done.stdout, "packages of this environment were imported"
    assert done.stdout.count(str(slimmed)) > 20


def test_symbols_of_libraries_are_left_out_once(slimmed: Path) -> None:
    """That they work without is tried above."""
    from xxhash import _xxhash  # type: ignore[attr-defined]

    whole = Path(str(_xxhash.__file__)).read_bytes()
    (left,) = (path.read_bytes() for path in slimmed.glob("xxhash/_xxhash*.so"))
    assert len(left) < len(whole) / 4
    assert left == slim.without_symbols(whole) == slim.without_symbols(left)
    assert slim.without_symbols(b"#!/bin/sh") == b"#!/bin/sh"
