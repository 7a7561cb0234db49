"""Ranks that read parts of a dataset: when is it certain that the next one has made others?"""

from __future__ import annotations

import pytest
from tests.client.fake_pod import FakePod

from refill.errors import JobConflict
from refill.pods import other_parts
from refill.pods.other_parts import OtherParts
from refill.pods.pod_connection import PodConnection
from refill.protocol.job_spec import JobSpec

MINE, LATER, ELSES = "job-part-a", "job-part-b", "job-part-c"


@pytest.fixture
def connection(pod: FakePod) -> PodConnection:
    return PodConnection(pod.url, JobSpec(MINE, "s3://b/data", world_size=2), 0, None, 5.0)


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> OtherParts:
    """Of a rank that has made two parts. It looks each time, and is sure at once."""
    monkeypatch.setattr(other_parts, "_EVERY_SECONDS", 0)
    monkeypatch.setattr(other_parts, "_SURE_SECONDS", 0)
    return OtherParts([MINE, LATER])


def test_a_rank_that_reads_other_parts_only_is_named_with_them(
    pod: FakePod, connection: PodConnection, others: OtherParts
) -> None:
    pod.parts = {"here": False, "others": [ELSES]}
    with pytest.raises(JobConflict, match=r"rank 0 reads job-part-a, and rank 1 reads job-part-c\. Have all ranks"):
        others.look(connection)


def test_a_rank_that_is_late_or_ahead_is_waited_for(
    pod: FakePod, connection: PodConnection, others: OtherParts
) -> None:
    for answer in ({"here": False, "others": []}, None):  # it has not come; its home knows nothing of the job
        pod.parts = answer
        others.look(connection)
        assert not others.is_alike
    pod.parts = {"here": False, "others": [ELSES, LATER]}
    others.look(connection)
    assert others.is_alike, "it is at a part that this one has made, too"


def test_who_reads_the_same_is_not_looked_for_again(
    pod: FakePod, connection: PodConnection, others: OtherParts
) -> None:
    pod.parts = {"here": True, "others": [ELSES]}
    for _ in range(3):
        others.look(connection)
    assert pod.count("GET parts") == 1


def test_one_look_is_not_enough(pod: FakePod, connection: PodConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read by a process that has been killed counts for a while."""
    monkeypatch.setattr(other_parts, "_EVERY_SECONDS", 0)
    others = OtherParts([MINE])
    pod.parts = {"here": False, "others": [ELSES]}
    others.look(connection)
    pod.parts = {"here": False, "others": []}
    others.look(connection)
    monkeypatch.setattr(other_parts, "_SURE_SECONDS", 1e-9)
    pod.parts = {"here": False, "others": [ELSES]}
    others.look(connection)
    with pytest.raises(JobConflict):
        others.look(connection)
