"""Is what a cluster tells of its pods read right? When they started, and the most memory that they had."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from tests.cluster.cluster import Failed, steps_of
from tests.cluster.memory import Memory, MemoryWatch


class _Pods:
    """A cluster whose pods have the memory that the test says."""

    def __init__(self) -> None:
        self.told: dict[str, tuple[str, str]] = {}
        """By pod, its life, and what its cgroup tells."""
        self.looks = 0

    def pods(self) -> dict[str, dict[str, Any]]:
        self.looks += 1
        if not self.told:
            raise Failed("no API server")
        return {pod: {"metadata": {"uid": life}} for pod, (life, _) in self.told.items() if pod != "rank-0"}

    def kubectl(self, command: str, pod: str, *arguments: str, seconds: float) -> str:
        return self.told[pod][1]


def test_the_most_of_a_name_is_that_of_any_of_its_lives() -> None:
    cluster = _Pods()
    watch = MemoryWatch(cluster, ["rank-0"])  # type: ignore[arg-type]
    watch.end()  # from here on it looks when it is told to
    assert watch.looked == []
    rank = ("rank-0", "9000000 9000000 10000000 anon 1")
    cluster.told = {"pod-0": ("a", "5000000 7000000 10000000 anon 4000000"), "rank-0": rank}
    watch.look()
    cluster.told = {"pod-0": ("b", "2000000 3000000 10000000 anon 1000000"), "rank-0": rank}
    watch.look()
    assert {looked.life for looked in watch.looked} == {"a", "b", "rank-0"}
    assert watch.highest_since(0) == {"pod-0": Memory(5_000_000, 7_000_000, 10_000_000, 4_000_000)}
    assert str(watch.highest_since(0)["pod-0"]) == "7 of 10 MB"
    assert watch.highest_since(watch.looked[2].at)["pod-0"].most_bytes == 3_000_000


def test_a_kernel_that_does_not_tell_the_peak_is_asked_often_enough_to_know_what_there_was() -> None:
    cluster = _Pods()
    watch = MemoryWatch(cluster, [])  # type: ignore[arg-type]
    watch.end()
    for now in (4_000_000, 6_000_000, 5_000_000):
        cluster.told = {"pod-0": ("a", f"{now} 0 max anon 1")}
        watch.look()
    assert watch.highest_since(0) == {"pod-0": Memory(6_000_000, 0, 0, 1)}


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
