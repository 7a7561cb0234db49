"""Is the base image named by its digest, where a registry can be asked? The registry is one on loopback."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.conftest import free_port

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docker" / "base_image.py"
TAG = "docker.io/library/python:3.11-slim-bookworm"
NAMES = ["Dockerfile", "train.Dockerfile"]
INDEX = b'{"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": []}'
DIGEST = f"sha256:{hashlib.sha256(INDEX).hexdigest()}"


@pytest.fixture
def registry() -> Iterator[ThreadingHTTPServer]:
    """Wants a token of its own, as public registries do. ``says``: the digest that it claims."""

    class Registry(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server, url = self.server, f"http://127.0.0.1:{self.server.server_address[1]}"  # type: ignore[index]
            if self.path == "/token?service=images&scope=repository%3Alibrary%2Fpython%3Apull":
                self.answer(200, b'{"token": "for-now"}')
            elif self.headers["authorization"] != "Bearer for-now":
                scope = f'Bearer realm="{url}/token",service="images",scope="repository:library/python:pull"'
                self.answer(401, b"", ("www-authenticate", scope))
            elif (
                self.path == "/v2/library/python/manifests/3.11-slim-bookworm"
                and "image.index" in self.headers["accept"]
            ):
                self.answer(200, INDEX, ("docker-content-digest", server.says))  # type: ignore[attr-defined]
            else:
                self.answer(404, b"")

        def answer(self, status: int, body: bytes, *headers: tuple[str, str]) -> None:
            self.send_response(status)
            for name, value in (*headers, ("content-length", str(len(body)))):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        server.says = DIGEST  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    for name in NAMES:
        (tmp_path / name).write_bytes((ROOT / "docker" / name).read_bytes())
    return [tmp_path / name for name in NAMES]


def pin(port: int, files: list[Path], *flags: str) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, str(SCRIPT), "--registry", f"http://127.0.0.1:{port}", *flags, *map(str, files)]
    return subprocess.run(run, capture_output=True, text=True, timeout=60)


def test_the_digest_is_written_beside_the_tag_and_replaced_by_a_newer_one(
    registry: ThreadingHTTPServer, files: list[Path]
) -> None:
    for file in files:
        file.write_text(file.read_text().replace(TAG, f"{TAG}@sha256:{'0' * 64}", 1))
    done = pin(registry.server_port, files)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, file in zip(NAMES, files, strict=True):
        expected = re.sub(
            rf"{TAG}(@\S+)?$", f"{TAG}@{DIGEST}", (ROOT / "docker" / name).read_text(), flags=re.MULTILINE
        )
        assert file.read_text() == expected


def test_an_image_that_is_not_what_the_registry_says_is_not_taken(
    registry: ThreadingHTTPServer, files: list[Path]
) -> None:
    registry.says = f"sha256:{'1' * 64}"  # type: ignore[attr-defined]
    before = files[0].read_text()
    done = pin(registry.server_port, files)
    assert done.returncode == 1
    assert "is not pinned" in done.stdout
    assert files[0].read_text() == before


@pytest.mark.parametrize(("flags", "status"), [([], 1), (["--allow-offline"], 0)], ids=str)
def test_a_registry_that_can_not_be_asked(files: list[Path], flags: list[str], status: int) -> None:
    before = files[0].read_text()
    done = pin(free_port(), files, *flags)
    assert done.returncode == status
    assert done.stdout.startswith("base image: Dockerfile is not pinned")
    assert (done.stdout.count("\n"), done.stderr) == (1, "")
    assert files[0].read_text() == before


def test_all_images_have_one_base() -> None:
    bases = {
        base
        for name in NAMES
        for base in re.findall(r"^ARG PYTHON_IMAGE=(.+)$", (ROOT / "docker" / name).read_text(), re.M)
    }
    assert len(bases) == 1
    assert bases.pop().startswith(TAG)
