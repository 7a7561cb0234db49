"""What is kept of jobs that have ended takes little, however much their ranks had said; teams that have little of it
keep theirs, and that a job has ended stays known."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.membership.pods_in_process import PodsInProcess
from tests.security.hostile_datasets import write_many_samples

from refill.errors import JobLost, UnknownJob
from refill.protocol.dealing import Dealing
from refill.protocol.job_spec import JobSpec
from refill.protocol.plan_settings import PlanSettings
from refill_service.planned import planned_receipts

NUM_SAMPLES, NUM_JOBS, NUM_SPANS = 10_000, 12, 5_000
MOST_BYTES = 2_000_000
"""Four such jobs."""
EVERY_OTHER = [(place, place + 1) for place in range(0, 2 * NUM_SPANS, 2)]


def spec_of(url: str, name: str, team: str) -> JobSpec:
    return JobSpec(name, url, holder=team, policy="planned", chunk_size=100, memory_bytes=3_000_000)


def ended(pods: PodsInProcess, spec: JobSpec, spans: list[tuple[int, int]]) -> PlanSettings:
    planned = pods.node(0).planned
    info = pods.do(planned.register(spec, None, begun=False, again=False))
    for epoch in (0, 1):
        planned.jobs[spec.name].received.received(epoch, Dealing(NUM_SAMPLES), 0, spans, now=1.0)
    pods.do(planned.end_here(spec.name))
    return PlanSettings.from_dict(info["plan"])


def test_receipts_of_ended_jobs_are_bounded_over_all_teams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_receipts, "_LEAST_ENDED_BYTES", MOST_BYTES)
    url = write_many_samples(tmp_path / "bytes", NUM_SAMPLES)
    with PodsInProcess(1, memory_bytes="64MiB", wait_seconds=60) as pods:
        planned = pods.node(0).planned
        ended(pods, spec_of(url, "small", "speech"), [(0, 9)])
        plans = {
            name: ended(pods, spec_of(url, name, "vision"), EVERY_OTHER)
            for name in (f"job-{number}" for number in range(NUM_JOBS))
        }
        kept = [each["job"] for each in planned.receipts.ended("vision")]
        assert kept[0] == f"job-{NUM_JOBS - 1}", "the newest is kept"
        assert 1 <= len(kept) <= MOST_BYTES // (100 * NUM_SPANS)
        assert [each["job"] for each in planned.receipts.ended("speech")] == ["small"]
        receipt = pods.do(planned.receipts.receipt("small", 1, "speech", ""))
        assert receipt is not None
        assert receipt["received"] == 9
        with pytest.raises(UnknownJob, match="epoch 0 of job job-0 has not begun, or is long over"):
            pods.do(planned.receipts.receipt("job-0", 0, "vision", ""))
        for name in ("job-0", kept[0]):
            coming_back = planned.register(spec_of(url, name, "vision"), plans[name], begun=True, again=True)
            with pytest.raises(JobLost, match=f"job {name} was ended"):
                pods.do(coming_back)
