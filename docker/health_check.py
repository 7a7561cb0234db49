"""Does the pod in this container answer? The image's HEALTHCHECK: status 0 if it does, else 1 and a line that says why.

It knows the pod by its environment alone, so a port that is given as an option of the command is not seen. No import of
refill, which would cost as much CPU every 30 seconds as a batch.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys

__all__ = ["answer_of_pod"]

_TIMEOUT_SECONDS = 4


def main() -> int:
    try:
        status = answer_of_pod()
    except (OSError, http.client.HTTPException, ValueError) as error:
        print(f"no answer: {error}", file=sys.stderr)
        return 1
    if status != 200:
        print(f"/healthz answers {status}", file=sys.stderr)
        return 1
    return 0


def answer_of_pod() -> int:
    """The HTTP status of ``/healthz`` on the clients' port."""
    host = os.environ.get("REFILL_HOST", "0.0.0.0")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    port = int(os.environ.get("REFILL_PORT", "8000"))
    connection: http.client.HTTPConnection
    if os.environ.get("REFILL_TLS_CERT"):
        # The certificate is for the pod's name, not for this address, and nothing secret is said.
        trusting = ssl.create_default_context()
        trusting.check_hostname = False
        trusting.verify_mode = ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_SECONDS, context=trusting)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_SECONDS)
    connection.request("GET", "/healthz")
    return connection.getresponse().status


if __name__ == "__main__":
    sys.exit(main())
