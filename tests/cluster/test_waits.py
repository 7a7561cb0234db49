"""Is what Kubernetes tells of a pod's start read right?"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from tests.cluster.waits import steps_of


class _OnePod:
    def pods(self) -> dict[str, dict[str, Any]]:
        return {
            "refill-try-1": {
                "metadata": {"creationTimestamp": "2026-11-01T10:00:09Z"},
                "status": {
                    "containerStatuses": [{"state": {"running": {"startedAt": "2026-11-01T10:00:11Z"}}}],
                    "conditions": [
                        {"type": "PodScheduled", "lastTransitionTime": "2026-11-01T10:00:09Z"},
                        {"type": "Ready", "lastTransitionTime": "2026-11-01T10:00:17Z"},
                    ],
                },
            }
        }


def test_the_steps_of_a_replacement_are_counted_from_the_delete() -> None:
    deleted = datetime.fromisoformat("2026-11-01T10:00:00Z").timestamp()
    assert steps_of(_OnePod(), "refill-try-1", deleted) == (  # type: ignore[arg-type]
        "the next pod was made after 9 s, its container started after 11 s, it was ready after 17 s"
    )
