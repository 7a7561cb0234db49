"""Azure Blob Storage on loopback: azurite, which npm brings. It checks signatures, and knows all that obstore asks."""

from __future__ import annotations

import base64
import datetime
import fcntl
import hashlib
import hmac
import http.client
import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

AZURITE = "azurite@3.37.0"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""As azurite's page has it, and every client of it."""
_LEFT_OUT = ("applicationinsights", "mysql2", "tedious")
"""Packages of azurite's in whose place is an empty one: telemetry, which is off, and databases, which are not used.
They are nine tenths of its files, and took most of the time."""
_FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "refill-tests" / f"{AZURITE}-small"


@dataclass(frozen=True)
class AzureServer:
    port: int

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/{ACCOUNT}"

    @property
    def environment(self) -> dict[str, str]:
        """For processes that are to use this server."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": self.endpoint_url,
        }

    def new_container(self) -> str:
        name = f"container-{uuid.uuid4().hex[:12]}"
        date = datetime.datetime.now(datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        headers = {"x-ms-date": date, "x-ms-version": "2021-12-02"}
        said = "".join(f"{header}:{value}\n" for header, value in headers.items())
        signed = f"PUT{chr(10) * 12}{said}/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
        signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)).decode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
        connection.request("PUT", f"/{ACCOUNT}/{name}?restype=container", headers=headers)
        answer = connection.getresponse()
        assert answer.status == 201, answer.read()
        connection.close()
        return name


def installed() -> str | None:
    """Why there is none; it is installed once for all clones of this machine: that takes 10 s of CPU."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        return "node and npm, which azurite needs, are not installed"
    _FOLDER.mkdir(parents=True, exist_ok=True)
    with (_FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (_FOLDER / "installed").exists():
            return None
        (_FOLDER / "nothing").mkdir(exist_ok=True)
        (_FOLDER / "nothing" / "package.json").write_text(
            '{"name": "nothing", "version": "99.0.0", "main": "index.js"}'
        )
        (_FOLDER / "nothing" / "index.js").write_text("module.exports = {};\n")
        name, _, version = AZURITE.rpartition("@")
        package = {"dependencies": {name: version}, "overrides": dict.fromkeys(_LEFT_OUT, "file:./nothing")}
        (_FOLDER / "package.json").write_text(json.dumps(package))
        command = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--prefix", str(_FOLDER)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            return f"npm can't install azurite: {done.stderr[-300:]}"
        (_FOLDER / "installed").touch()
        return None


@contextmanager
def azurite(port: int, log: Path) -> Iterator[tuple[AzureServer, subprocess.Popen[bytes]]]:
    main = _FOLDER / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    options = ["--skipApiVersionCheck", "--inMemoryPersistence", "--silent", "--disableTelemetry"]
    command = ["node", str(main), "--blobHost", "127.0.0.1", "--blobPort", str(port), *options]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=log.parent)
    try:
        yield AzureServer(port), process
    finally:
        process.kill()
        process.wait()
