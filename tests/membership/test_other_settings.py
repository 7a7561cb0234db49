"""A pod that lost its memory is asked, before those who train, by somebody with other settings for their job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.membership.jobs import Packed, spec_of
from tests.membership.pods_in_process import PodsInProcess, Rank, Training
from tests.pod_fixtures import NUM_SAMPLES

from refill.errors import JobConflict
from refill.run_start import RunStart
from refill_service.cache_core import rank_leases


@pytest.mark.parametrize("others", [{"seed": 7}, {"world_size": 1}, {"chunk_size": 4}], ids=str)
@pytest.mark.parametrize("brings_its_name", [False, True], ids=["", "and its incarnation"])
def test_who_trains_goes_on(packed: Packed, tmp_path: Path, others: dict[str, int], brings_its_name: bool) -> None:
    with PodsInProcess(3, tmp_path, journal=False) as pods:
        training = Training(pods, spec_of(packed), NUM_SAMPLES)
        training.all_ask(0, 0, 200)
        known = training.ranks[0].info()
        pods.kill(0)
        pods.start(0)
        stranger = Rank(pods, replace(training.spec, **others), 0, process=2, timeout_seconds=5)  # type: ignore[arg-type]
        if brings_its_name:
            stranger._pods._registered(known)
        with pytest.raises(JobConflict, match=r"yours is .*, the job's "):
            stranger.batch(0, np.arange(50))
        training.look()
        training.all_ask(0, 200)
        training.check(0)


@pytest.mark.parametrize("lost", [(), (0,), (0, 1)], ids=str)
def test_a_run_that_has_ended_and_starts_again_is_told_what_to_do(
    packed: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: tuple[int, ...]
) -> None:
    """With another number of ranks: the same at each pod, whether or not some of them lost their memory."""
    with PodsInProcess(3, tmp_path, journal=False) as pods:
        training = Training(pods, spec_of(packed), NUM_SAMPLES)
        training.all_ask(0)
        pods.kill(*lost)
        pods.start(*lost)
        monkeypatch.setattr(rank_leases, "LEASE_SECONDS", -1.0)  # its ranks are gone
        for pod in range(3):
            again = Rank(pods, replace(training.spec, world_size=3), 0, process=2, start=RunStart([0, 0, 0]))
            again._pods.service_url = pods.pod_urls[pod]
            said = r"settings \(world_size: yours is 3, the job's 2\): use another name, or end that job first"
            with pytest.raises(JobConflict, match=said):
                again.batch(0, np.arange(50))
        again.end_job()
        assert len(again.batch(0, np.arange(50)).sample_ids) == 50
