"""What do pods say that came of an epoch? Asked until who knows has had time to say it."""

from __future__ import annotations

import contextlib
import time

import httpx

from refill_service.demo.local_cluster import LocalCluster

__all__ = ["Receipts"]

_ANSWERED_SECONDS = 120.0
"""Pods that were just restarted are given time, as anybody gives them who asks."""
_REPORTED_SECONDS = 30.0
"""Ranks report what they have received a few seconds later."""


class Receipts:
    """
    :param cluster: whose first pod is asked.
    """

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster

    def of(self, job: str, epoch: int) -> httpx.Response:
        url = f"{self._cluster.pod_urls[0]}/v1/jobs/{job}/epochs/{epoch}/receipt"
        deadline = time.monotonic() + _ANSWERED_SECONDS
        while True:
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.get(url, timeout=30)
                if answer.status_code != 503 or time.monotonic() > deadline:
                    return answer
            if time.monotonic() > deadline:
                return httpx.Response(503, text="pod 0 does not answer")
            time.sleep(0.2)

    def last(self, job: str, epoch: int, *, num_epochs: int, may_lack: bool) -> httpx.Response:
        """Of a planned job. When it is exact, or those who know have had time to say so.

        :param may_lack: whether receipts of all but the last epoch may lack something.
        """
        deadline = time.monotonic() + _REPORTED_SECONDS
        while True:
            answer = self.of(job, epoch)
            is_last = epoch + 1 == num_epochs or not may_lack
            if not is_last or time.monotonic() > deadline or (answer.status_code == 200 and answer.json()["exact"]):
                return answer
            time.sleep(0.2)

    def of_pass(self, job: str, dataset: str, number: int, count: int, *, may_lack: bool) -> httpx.Response:
        """Of a mixture's dataset; when it says so many, or those who know have had time to."""
        deadline = time.monotonic() + (0 if may_lack else _REPORTED_SECONDS)
        while True:
            answer = self.of(f"{job}.{dataset}", number)
            is_known = answer.status_code == 200 and answer.json()["received"] >= count
            if is_known or time.monotonic() > deadline:
                return answer
            time.sleep(0.2)
