"""What does an error of a connection say of the pod at its other end?"""

from __future__ import annotations

import errno
import http.client
import ssl

from refill.errors import PodUnreachable
from refill.pod_link import GONE_SECONDS, HandshakeBroken

__all__ = ["OTHER_PORT", "no_sign_of_life", "unreachable"]

OTHER_PORT = "is that the port of clients, and is its URL https where pods have TLS?"
"""What to look at where a connection is closed before anything was ever answered."""


def unreachable(pod: str, error: Exception) -> PodUnreachable:
    """Its detail ``silent`` says that the pod was reached, and that no answer came in time; ``handshake`` that TLS with
    it was begun, and did not come to an end, which is no sign that it is gone; ``closed`` that it took the connection,
    and closed it without an answer."""
    if isinstance(error, TimeoutError) and error.errno is None:
        return PodUnreachable(f"{pod} does not answer: it was reached, and timed out", url=pod, silent=True)
    why = str(error) or type(error).__name__
    if isinstance(error, HandshakeBroken):
        return PodUnreachable(f"{pod} does not answer: {why}", url=pod, handshake=True)
    if isinstance(error, OSError) and error.errno == errno.ETIMEDOUT:
        why = f"it is gone, or the network is: nothing has come from its machine for {GONE_SECONDS} s"
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        why = "it speaks no TLS there: write http://"
    if isinstance(error, (http.client.RemoteDisconnected, ConnectionResetError)):
        return PodUnreachable(f"{pod} does not answer: {why}", url=pod, closed=True)
    return PodUnreachable(f"{pod} does not answer: {why}", url=pod)


def no_sign_of_life(pod: str) -> PodUnreachable:
    return PodUnreachable(f"{pod} gives no sign of life", url=pod)
