"""Whose is a job's name at a pod that was restarted? Theirs who train under it, as other pods know."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.pod_fixtures import NUM_SAMPLES, kind_of

from refill.errors import JobLost
from refill.pods.credentials import Credentials
from refill.protocol.job_spec import JobSpec
from refill_service.demo.local_cluster import LocalCluster

Packed = tuple[str, dict[str, bytes]]
VISION, SPEECH, PODS = "vision-0123456789abcdef", "speech-0123456789abcdef", "pods-0123456789abcdef"
INVENTED = "0123456789abcdef0123456789abcdef"


class Pods:
    """Of two teams."""

    def __init__(self, cluster: LocalCluster, folder: Path, dataset: str) -> None:
        self.cluster = cluster
        self.folder = folder
        self.dataset = dataset

    def rank(self, name: str, home: int, policy: str = "redox") -> Any:
        url, token = self.cluster.pod_urls[home], self.folder / "tokens" / "vision"
        spec = JobSpec(name, self.dataset, chunk_size=16, memory_bytes=600_000, policy=policy)
        return kind_of(spec)(url, spec, 0, url, 30, credentials=Credentials(str(token)))

    def ask(self, pod: int, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """As the other team does."""
        headers = {"authorization": f"Bearer {SPEECH}"}
        return httpx.request(method, self.cluster.pod_urls[pod] + path, headers=headers, json=body, timeout=30)

    def lose_memory(self, *pods: int) -> None:
        for pod in pods:
            self.cluster.kill(pod)
        for pod in pods:
            self.cluster.restart(pod)


def pods_in(folder: Path, num_pods: int, dataset: str) -> Pods:
    (folder / "tokens").mkdir()
    (folder / "tokens" / "vision").write_text(VISION)
    (folder / "tokens" / "speech").write_text(SPEECH)
    (folder / "peers").write_text(PODS)
    settings: dict[str, Any] = {"memory_bytes": "4MiB", "pinned_fraction": 0, "wait_seconds": 1}
    settings |= {"dataset_urls": dataset, "client_tokens": folder / "tokens", "peer_token": folder / "peers"}
    return Pods(LocalCluster(num_pods, folder, settings), folder, dataset)


@pytest.fixture(scope="module")
def secured(packed: Packed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    pods = pods_in(tmp_path_factory.mktemp("secured"), 3, packed[0])
    with pods.cluster:
        yield pods


@pytest.mark.variants("[0, 1]")
@pytest.mark.parametrize("lost", [[1], [0, 1]], ids=str)
def test_another_team_takes_no_name_from_a_live_job(secured: Pods, lost: list[int]) -> None:
    """Whatever it says the run is called, and though that is lost: the pods that are left know whose it is until its
    own team has been told."""
    name = f"taken-{'-'.join(map(str, lost))}"
    mine = secured.rank(name, home=lost[-1])
    mine.batch(0, np.arange(100))
    real = mine.info()["incarnation"]
    secured.lose_memory(*lost)
    body = {"dataset": secured.dataset, "memory_bytes": 600_000, "policy": "redox"}
    path = f"/v1/jobs/{name}"
    for pod in lost:
        for query in ("", f"?incarnation={INVENTED}", f"?incarnation={real}"):
            answer = secured.ask(pod, "PUT", path + query, body)
            assert answer.status_code in (403, 409), query
        assert secured.ask(pod, "DELETE", path).status_code == 403
        assert secured.ask(pod, "GET", "/v1/jobs").json() == []
    assert secured.ask(2, "GET", path).status_code == 403, "the other team has ended what is left of it"
    with pytest.raises(JobLost, match=f"job {name} is lost"):
        mine.batch(0, np.arange(50, NUM_SAMPLES))
    fresh = secured.rank(name, home=lost[-1])
    assert len(fresh.batch(0, np.arange(NUM_SAMPLES)).sample_ids) == NUM_SAMPLES
    fresh.end_job()


@pytest.mark.variants("[0]")
@pytest.mark.parametrize("lost", [[1], [0], [0, 1]], ids=str)
def test_another_team_takes_no_name_from_a_planned_job_that_runs(secured: Pods, lost: list[int]) -> None:
    """Whichever plan it brings, and not for a moment: ranks whose name is another team's give up."""
    name = f"planned-{'-'.join(map(str, lost))}"
    mine = secured.rank(name, lost[-1], "planned")
    mine._watched = True  # else it looks after its home now and then, and brings it the job again
    before = mine.batch(0, np.arange(100)).sample_ids.tolist()
    settings = {"dataset": secured.dataset, "chunk_size": 16, "memory_bytes": 600_000}
    path, made = f"/v1/jobs/{name}", f"job {name}: {secured.dataset}, plan "
    secured.lose_memory(*lost)
    had = {pod: secured.cluster.log(pod).count(made) for pod in lost}
    for pod in lost:
        other = mine.plan | {"seed": 1}
        plans = [{}, {"plan": mine.plan}, {"plan": mine.plan, "begun": True}, {"plan": other}]
        for brought in [*plans, {"plan": other, "begun": True, "again": True}]:
            of_plan = settings | {"seed": brought.get("plan", {}).get("seed", 0)}
            answer = secured.ask(pod, "PUT", f"{path}/planned", {"settings": of_plan} | brought)
            assert (answer.status_code, answer.json()["error"]) == (403, "NotAllowed"), answer.text
        assert secured.ask(pod, "PUT", path, settings).status_code == 403
        assert secured.ask(pod, "DELETE", path).status_code == 403
        assert secured.ask(pod, "GET", "/v1/jobs").json() == []
        assert secured.cluster.log(pod).count(made) == had[pod], "it had the name for a while"
    after = mine.batch(0, np.arange(100, NUM_SAMPLES)).sample_ids.tolist()
    assert sorted(before + after) == list(range(NUM_SAMPLES))
    mine.end_job()


def test_a_planned_name_is_given_to_nobody_new_while_half_of_the_pods_are_silent(
    packed: Packed, tmp_path: Path
) -> None:
    """Who brings a plan that it has received samples by is believed: its own job's pods may be gone for good."""
    pods = pods_in(tmp_path, 2, packed[0])
    with pods.cluster:
        mine = pods.rank("away", 0, "planned")
        before = mine.batch(0, np.arange(100)).sample_ids.tolist()
        pods.lose_memory(0)
        pods.cluster.pause(1)
        answer = pods.ask(0, "PUT", "/v1/jobs/away", {"dataset": packed[0]})
        assert answer.status_code == 503, answer.text
        assert "no plan is made for job away while half of the pods" in answer.json()["message"]
        assert pods.ask(0, "GET", "/v1/jobs").json() == []
        came = mine.batch(0, np.arange(100, 200)).sample_ids.tolist()
        pods.cluster.resume(1)
        after = mine.batch(0, np.arange(200, NUM_SAMPLES)).sample_ids.tolist()
        assert sorted(before + came + after) == list(range(NUM_SAMPLES))
