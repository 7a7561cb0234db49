"""By which plan does a rank go whose samples came while another plan took the place of theirs?"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

from refill.errors import JobConflict, UnknownJob
from refill.pods import planned_pods
from refill.pods.planned_connection import PlannedConnection
from refill.pods.planned_place import RankPlace
from refill.pods.received_batch import ReceivedBatch
from refill.protocol.job_spec import JobSpec
from refill.protocol.plan_settings import PlanSettings

POD = "http://pod-0:8000"
FIRST, SECOND = (PlanSettings("dataset", 100, 8, 1, memory_bytes) for memory_bytes in (1000, 2000))


def info_of(plan: PlanSettings) -> dict[str, Any]:
    return {
        "plan": plan.to_dict(),
        "plan_id": plan.plan_id,
        "incarnation": plan.plan_id,
        "num_samples": 100,
        "num_pods": 1,
        "pods": [POD],
    }


class Channel:
    """Answers by the plan that it is asked for; just before it does, the connection learns of the second plan."""

    def __init__(self) -> None:
        self.connection: PlannedConnection | None = None
        self.plan = FIRST
        self.silent_seconds: float | None = None

    def may_ask(self, pod: str, service: str) -> bool:
        return True

    def call(self, method: str, pod: str, path: str, wait: object, *, sent: object = None) -> dict[str, Any]:
        return info_of(self.plan)

    def fetch(self, pod: str, path: str, *_: object) -> ReceivedBatch:
        assert self.connection is not None
        by = parse_qs(urlsplit(path).query)["plan"]
        if "/samples" in path:
            if by == [FIRST.plan_id]:
                self.plan = SECOND
                raise UnknownJob("the pod was restarted", job="a-job")
            return ReceivedBatch(np.arange(1), [memoryview(b"")])
        assert by == [FIRST.plan_id]
        self.connection.samples(np.arange(1))  # as another thread does, whose request the pod refuses
        return ReceivedBatch(np.arange(4), [memoryview(b"")] * 4)


def test_it_goes_by_the_plan_that_it_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refill.pods.planned_connection.watch_home", lambda connection: None)
    place, channel = RankPlace([0] * RankPlace.NUM_SHARED), Channel()
    monkeypatch.setattr(planned_pods, "PodChannel", lambda *_, **__: channel)
    spec = JobSpec.from_dict({"name": "a-job", "dataset": "file:///a", "policy": "planned"})
    connection = channel.connection = PlannedConnection(POD, spec, 0, None, 5, place=place)
    connection.batch(0, np.arange(4))
    place.goes_by(FIRST.plan_id)
    with pytest.raises(JobConflict, match="by another plan"):
        place.goes_by(SECOND.plan_id)
