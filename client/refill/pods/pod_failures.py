"""What does an error of a connection say of the pod at its other end?"""

from __future__ import annotations

import errno
import http.client
import socket
import ssl
from urllib.parse import urlsplit

from refill.errors import PodUnreachable
from refill.pods.pod_link import GONE_SECONDS, HandshakeBroken

OTHER_PORT = "is that the port of clients, and is its URL https where pods have TLS?"
"""What to look at where a connection is closed before anything was ever answered."""
_SHOWN_LETTERS = 40
_OTHER_NAME = (62, 64)
"""Codes of OpenSSL for a certificate of another host, or address."""
_LOOK_SECONDS = 2.0


def unreachable(pod: str, error: Exception) -> PodUnreachable:
    """Its detail ``silent`` says that the pod was reached, and that no answer came in time; ``handshake`` that TLS with
    it was begun, and did not come to an end, which is no sign that it is gone; ``closed`` that it took the connection,
    and closed it without an answer; ``wrong`` that time does not mend it, if nothing was ever answered: it is the URL;
    ``certificate`` that its certificate is not trusted, as may be for a minute while certificates are replaced."""
    if isinstance(error, TimeoutError) and error.errno is None:
        return PodUnreachable(f"{pod} does not answer: it was reached, and timed out", url=pod, silent=True)
    why = str(error) or type(error).__name__
    if isinstance(error, HandshakeBroken):
        return PodUnreachable(f"{pod} does not answer: {why}", url=pod, handshake=True)
    if isinstance(error, OSError) and error.errno == errno.ETIMEDOUT:
        why = f"it is gone, or the network is: nothing has come from its machine for {GONE_SECONDS} s"
    if isinstance(error, (http.client.RemoteDisconnected, ConnectionResetError)):
        return PodUnreachable(f"{pod} does not answer: {why}", url=pod, closed=True)
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code not in _OTHER_NAME:
        return PodUnreachable(f"{pod} does not answer: {why}", url=pod, certificate=True)
    if (wrong := _never_right(error)) is not None:
        return PodUnreachable(f"{pod} does not answer: {wrong}", url=pod, wrong=True)
    return PodUnreachable(f"{pod} does not answer: {why}", url=pod)


def _never_right(error: Exception) -> str | None:
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return "it speaks no TLS there: write http://"
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error)
    if isinstance(error, http.client.BadStatusLine):
        return f"no pod is there, but something that begins with {str(error).strip()[:_SHOWN_LETTERS]}"
    return None


def speaks_tls(pod: str) -> bool:
    """Whether TLS is spoken where a plain connection was closed without an answer. Takes a moment."""
    url = urlsplit(pod)
    if url.scheme != "http" or url.hostname is None:
        return False
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent there, nor believed
    try:
        with socket.create_connection((url.hostname, url.port or 80), _LOOK_SECONDS) as plain:
            context.wrap_socket(plain, server_hostname=url.hostname).close()
    except OSError:
        return False
    return True


def no_sign_of_life(pod: str) -> PodUnreachable:
    return PodUnreachable(f"{pod} gives no sign of life", url=pod)
