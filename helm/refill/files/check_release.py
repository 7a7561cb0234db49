"""Do all pods of a release answer, know each other, and read the dataset? Run by ``helm test``.

``python check_release.py SERVICE_URL NUM_PODS DATASET_URL TOKENS CA [PATIENCE]``; an empty DATASET_URL leaves the
dataset out. TOKENS is a folder, of whose files the first holds the token to show; CA is a file of certificates to
trust, which need not be there. Both may be empty. PATIENCE: seconds for what a release that was just installed or
updated gets over by itself, such as pods that start; what is refused is not asked again. Exit status 1 and one line
when something is wrong. The standard library only, since it runs before anything is known to work.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
import uuid
from typing import Any, NoReturn

_PATIENCE_SECONDS = 60
_LONGEST_PAUSE_SECONDS = 2
_TRY_SECONDS = {"GET": 10, "DELETE": 10, "PUT": 60}
"""For one answer. Every pod reads its part of the index before a PUT is answered."""


def main(
    service_url: str, num_pods: int, dataset_url: str, tokens: str, ca: str, patience: float = _PATIENCE_SECONDS
) -> None:
    pods = _Pods(tokens, ca, patience)
    while (known := pods.call("GET", f"{service_url}/readyz").get("pods")) != num_pods:
        pods.wait(f"a pod knows of {known} pods, and there are to be {num_pods}: are they being replaced?")
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

    def __init__(self, tokens: str, ca: str, patience: float) -> None:
        self._patience, self._deadline = patience, time.monotonic() + patience
        self._pause, self._waited_for = 0.1, ""
        self._headers = {"Content-Type": "application/json"}
        if tokens:
            self._headers["Authorization"] = f"Bearer {_first_token(tokens)}"
        try:
            self._trusted = ssl.create_default_context(cafile=ca if os.path.exists(ca) else None)
        except ssl.SSLError:
            _end(f"{ca} holds no certificates: ca.crt of tls.secret is to be PEM")

    def call(self, method: str, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        while True:
            try:
                return self._call_once(method, url, body)
            except _NotNow as reason:
                self.wait(f"{method} {url}: {reason}")

    def wait(self, what: str) -> None:
        """For a moment; ends where patience has. ``what`` is wrong, and may be right the next time."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            _end(f"{what} (waited {self._patience:g} s)")
        if what != self._waited_for:
            print(f"waiting, for {left:.0f} s at most: {what}", flush=True)
        self._waited_for = what
        time.sleep(min(self._pause, left))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)

    def _call_once(self, method: str, url: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, self._headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_TRY_SECONDS[method], context=self._trusted) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError as error:
            said = _said(error) or str(error)
            if error.code in (502, 503, 504):
                raise _NotNow(said) from error
            _end(f"{method} {url}: {said}")
        except (OSError, http.client.IncompleteRead) as error:
            reason = getattr(error, "reason", error)
            if not isinstance(reason, ssl.SSLError):
                raise _NotNow(reason) from error
            _end(f"{method} {url}: {reason}")
        except (ValueError, http.client.HTTPException):
            _end(f"{method} {url}: this is no pod of refill")


class _NotNow(Exception):
    """Nobody answered, or somebody who asks to be asked again."""


def _first_token(folder: str) -> str:
    """Of a mounted Secret, which keeps its versions under names with a dot. The teams' names are its keys."""
    teams = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    if not teams:
        _end("the Secret of access.clientTokens is empty: it needs a key for each team")
    with open(os.path.join(folder, teams[0]), encoding="ascii", errors="replace") as file:
        return file.readline().strip()


def _said(answer: urllib.error.HTTPError) -> str:
    """What a pod says is wrong; empty if it was not a pod that answered."""
    try:
        return str(json.load(answer)["message"])
    except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
        return ""


def _end(wrong: str) -> NoReturn:
    sys.exit(f"wrong: {wrong}")


if __name__ == "__main__":
    service_url, num_pods, dataset_url, tokens, ca, *patience = sys.argv[1:]
    main(service_url.rstrip("/"), int(num_pods), dataset_url, tokens, ca, *map(float, patience))
