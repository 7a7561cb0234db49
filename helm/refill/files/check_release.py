"""Do all pods of a release answer, know each other, and read the dataset? Run by ``helm test``.

``python check_release.py SERVICE_URL NUM_PODS DATASET_URL TOKENS CA``; an empty DATASET_URL leaves the dataset out.
TOKENS is a folder, of whose files the first holds the token to show; CA is a file of certificates to trust, which need
not be there. Both may be empty. Exit status 1 and one line when something is wrong. The standard library only, since it
runs before anything is known to work.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import urllib.error
import urllib.request
import uuid
from typing import Any, NoReturn

_SECONDS = 60


def main(service_url: str, num_pods: int, dataset_url: str, tokens: str, ca: str) -> None:
    pods = _Pods(tokens, ca)
    ready = pods.call("GET", f"{service_url}/readyz")
    if ready.get("pods") != num_pods:
        _end(f"a pod knows of {ready.get('pods')} pods, and there are to be {num_pods}: are they being replaced?")
    print(f"{service_url} answers; it is one of {num_pods} pods")
    if not dataset_url:
        print("dataset.url is not set, so no dataset was read")
        return
    # Registering a job makes every pod read its part of the index, and talk to the others.
    job = f"{service_url}/v1/jobs/helm-test-{uuid.uuid4().hex[:12]}"
    found = pods.call("PUT", job, {"dataset": dataset_url})
    try:
        for ordinal, url in enumerate(found["pods"]):
            if (answers := pods.call("GET", f"{url}/readyz")["ordinal"]) != ordinal:
                _end(f"{url} is pod {answers}, not pod {ordinal}")
            print(f"{url} is ready and has read its part of the index")
    finally:
        pods.call("DELETE", job)
    print(f"{dataset_url} has {found['num_samples']:,} samples")


class _Pods:
    """Whoever answers under the URLs of the release."""

    def __init__(self, tokens: str, ca: str) -> None:
        self._headers = {"Content-Type": "application/json"}
        if tokens:
            self._headers["Authorization"] = f"Bearer {_first_token(tokens)}"
        try:
            self._trusted = ssl.create_default_context(cafile=ca if os.path.exists(ca) else None)
        except ssl.SSLError:
            _end(f"{ca} holds no certificates: ca.crt of tls.secret is to be PEM")

    def call(self, method: str, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, self._headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS, context=self._trusted) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError as error:
            _end(f"{method} {url}: {_said(error.read()) or error}")
        except OSError as error:
            _end(f"{method} {url}: {getattr(error, 'reason', error)}")
        except ValueError:
            _end(f"{method} {url}: this is no pod of refill")


def _first_token(folder: str) -> str:
    """Of a mounted Secret, which keeps its versions under names with a dot. The teams' names are its keys."""
    teams = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    if not teams:
        _end("the Secret of access.clientTokens is empty: it needs a key for each team")
    with open(os.path.join(folder, teams[0]), encoding="ascii", errors="replace") as file:
        return file.readline().strip()


def _said(answer: bytes) -> str:
    """What a pod says is wrong; empty if it was not a pod that answered."""
    try:
        return str(json.loads(answer)["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def _end(wrong: str) -> NoReturn:
    sys.exit(f"wrong: {wrong}")


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"), int(sys.argv[2]), *sys.argv[3:6])
