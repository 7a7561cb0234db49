"""What a dependency audit says: of known vulnerabilities, of packages that nobody knows, and without a network.

pip-audit runs as it is; the advisory service is one on loopback that speaks OSV's protocol.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.conftest import free_port

ROOT = Path(__file__).parents[2]
AUDIT = ROOT / "docker" / "audit.py"
VULNERABLE = {
    "id": "OSV-1",
    "summary": "bad",
    "details": "bad",
    "published": "2020-01-01T00:00:00Z",
    "affected": [
        {
            "package": {"name": "six", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99.0"}]}],
        }
    ],
}


@pytest.fixture
def advisories() -> Iterator[ThreadingHTTPServer]:
    """A service that knows of one vulnerability, in six. ``asked`` are the packages that it was asked about."""

    class Advisories(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            name = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["package"]["name"]
            server.asked.add(name)  # type: ignore[attr-defined]
            answer = json.dumps({"vulns": [VULNERABLE]} if name == "six" else {}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Advisories)
    server.asked = set()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def audit(*arguments: str, port: int) -> subprocess.CompletedProcess[str]:
    service = ["--vulnerability-service", "osv", "--osv-url", f"http://127.0.0.1:{port}/v1/query"]
    return subprocess.run(
        [sys.executable, str(AUDIT), *arguments, *service], capture_output=True, text=True, timeout=120
    )


def test_a_known_vulnerability_fails_whatever_is_allowed_and_says_what_fixes_it(
    advisories: ThreadingHTTPServer,
) -> None:
    done = audit("--allow-offline", port=advisories.server_port)
    assert done.returncode == 1
    assert "OSV-1, fixed in 99.0" in done.stdout
    assert {"six", "numpy", "httpx", "granian"} <= advisories.asked  # type: ignore[attr-defined]


@pytest.mark.variant
def test_nothing_known_is_a_pass(advisories: ThreadingHTTPServer, tmp_path: Path) -> None:
    lock = tmp_path / "some.lock"
    lock.write_text(f"idna==3.20 --hash=sha256:{'0' * 64}\n")
    done = audit(str(lock), port=advisories.server_port)
    assert (done.returncode, done.stdout) == (0, "audit: 1 packages asked about, 0 vulnerabilities known\n")


def test_without_the_service_nothing_was_audited_which_is_no_pass() -> None:
    done = audit(port=free_port())
    assert done.returncode == 1
    first, second = done.stdout.splitlines()
    assert first.startswith("audit: not audited: the advisory service can't be reached")
    assert second == "audit: --allow-offline lets that pass"
    assert done.stderr == ""


def test_a_build_without_network_says_so_in_one_line_and_passes() -> None:
    done = audit("--allow-offline", port=free_port())
    assert done.returncode == 0
    assert done.stdout.startswith("audit: not audited: the advisory service can't be reached")
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


def test_a_service_that_knows_no_package_has_audited_nothing() -> None:
    """As the mirror of an index, which has packages and no advisories."""
    verdict = runpy.run_path(str(AUDIT))["verdict"]
    report = {"dependencies": [{"name": "six", "skip_reason": "not found"}, {"name": "idna", "skip_reason": "too"}]}
    assert verdict(report) == (["not audited: the advisory service knows none of the 2 packages"], 1)
    assert verdict(report, unaudited=0)[1] == 0


def test_a_vulnerability_is_no_pass_beside_what_is_not_known() -> None:
    verdict = runpy.run_path(str(AUDIT))["verdict"]
    six = {"name": "six", "version": "1.0", "vulns": [{"id": "OSV-1", "fix_versions": []}]}
    report = {"dependencies": [six, {"name": "idna", "skip_reason": "not found"}]}
    assert verdict(report)[1] == verdict(report, unaudited=0)[1] == 1


def test_a_lock_that_is_not_there_is_no_pass(advisories: ThreadingHTTPServer) -> None:
    done = audit("no.lock", port=advisories.server_port)
    assert done.returncode == 1
    assert "no.lock" in done.stdout
    assert done.stderr == ""
