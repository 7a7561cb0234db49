"""Which pods does a rank ask while some of them are away, and others come in another number?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from refill.errors import PodUnreachable, UnknownJob
from refill.pods import planned_pods
from refill.pods.planned_connection import PlannedConnection
from refill.pods.received_batch import ReceivedBatch
from refill.protocol.job_spec import JobSpec
from refill.protocol.plan_settings import PlanSettings

PLAN = PlanSettings("dataset", 100, 8, 1, 1000)


class Channel:
    """To pods that are replaced by more of them: the first one is gone, and the others know no job."""

    def __init__(self) -> None:
        self.num_pods = 3
        self.asked: list[str] = []
        self.silent_seconds: float | None = None

    def may_ask(self, pod: str, service: str) -> bool:
        return True

    def asks_pods(self, num_pods: int) -> None:
        pass

    def call(self, method: str, pod: str, path: str, wait: object, **_: object) -> dict[str, Any]:
        pods = [f"http://pod-{ordinal}:8000" for ordinal in range(self.num_pods)]
        about = {"plan": PLAN.to_dict(), "plan_id": PLAN.plan_id, "incarnation": PLAN.plan_id, "num_samples": 100}
        return about | {"num_pods": self.num_pods, "pods": pods, "share_sizes": [100]}

    def fetch(self, pod: str, *_: object) -> ReceivedBatch:
        self.asked.append(pod)
        if pod == "http://pod-0:8000" and len(self.asked) > 1:
            raise PodUnreachable("it is gone", url=pod)
        if self.num_pods == 3 and pod != "http://pod-0:8000":
            self.num_pods = 5
            raise UnknownJob("it was started just now", job="a-job")
        return ReceivedBatch(np.arange(1), [memoryview(b"")])


def test_one_that_was_found_away_is_not_waited_for_again_when_pods_change_in_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("refill.pods.planned_connection.watch_home", lambda connection: None)
    channel = Channel()
    monkeypatch.setattr(planned_pods, "PodChannel", lambda *_, **__: channel)
    spec = JobSpec.from_dict({"name": "a-job", "dataset": "file:///a", "policy": "planned"})
    connection = PlannedConnection("http://pods:8000", spec, 0, None, 5)
    for _ in range(3):
        connection.samples(np.arange(1))
    assert channel.asked == [f"http://pod-{ordinal}:8000" for ordinal in (0, 0, 1, 1, 1)]
    assert connection.info()["num_pods"] == 5
