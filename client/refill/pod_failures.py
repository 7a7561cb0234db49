"""What does an error of a connection say of the pod at its other end?"""

from __future__ import annotations

import errno

from refill.errors import PodUnreachable
from refill.pod_link import GONE_SECONDS, HandshakeBroken

__all__ = ["no_sign_of_life", "unreachable"]


def unreachable(pod: str, error: Exception) -> PodUnreachable:
    """Its detail ``silent`` says that the pod was reached, and that no answer came in time; ``handshake`` that TLS with
    it was begun, and did not come to an end, which is no sign that it is gone."""
    if isinstance(error, TimeoutError) and error.errno is None:
        return PodUnreachable(f"{pod} does not answer: it was reached, and timed out", url=pod, silent=True)
    why = str(error) or type(error).__name__
    if isinstance(error, HandshakeBroken):
        return PodUnreachable(f"{pod} does not answer: {why}", url=pod, handshake=True)
    if isinstance(error, OSError) and error.errno == errno.ETIMEDOUT:
        why = f"it is gone, or the network is: nothing has come from its machine for {GONE_SECONDS} s"
    return PodUnreachable(f"{pod} does not answer: {why}", url=pod)


def no_sign_of_life(pod: str) -> PodUnreachable:
    return PodUnreachable(f"{pod} gives no sign of life", url=pod)
