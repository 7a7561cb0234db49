"""Whatever clients and pods send to the routes of planned jobs: one clear line, no 5xx, and the job goes on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.membership.planned_in_process import Run, new_name
from tests.membership.pods_in_process import Packed, PodsInProcess
from tests.pod_fixtures import NUM_SAMPLES

from refill.protocol.plan_settings import PlanSettings
from refill.protocol.wire_format import BatchRequest, encode_together
from refill_service.pod.cache_node import PodPhase

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def run(packed: Packed) -> Iterator[Run]:
    """In the middle of epoch 0; after the tests it goes on to the end, exact."""
    with PodsInProcess(2) as pods:
        found = Run(pods, packed[0], new_name(), 2)
        found.take(0, 0, 200)
        yield found
        found.take(0, 200)
        found.check(packed[0])
        assert sorted(found.positions_of(0)) == list(range(NUM_SAMPLES))
        found.exact_receipt(0)


def sent(run: Run, method: str, what: str, body: Any = None, asker: str = "client", **about: Any) -> tuple[int, str]:
    """The status and the error's line."""
    query = "&".join(f"{name}={value}" for name, value in about.items())
    path = f"/{'peer/' if asker == 'peer' else ''}v1/jobs/{run.name}/planned{what}?{query}"
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {} if isinstance(body, bytes) else JSON
    status, _, answer = run.pods.do(run.pods.request(asker, 0, method, path, content, headers))
    return status, json.loads(answer)["message"] if status >= 400 and answer else ""


def batch(epoch: int, rank: int, positions: list[int]) -> bytes:
    return BatchRequest(epoch, rank, np.array(positions, dtype=np.int64)).encode()


@pytest.mark.parametrize(
    ("body", "about", "why"),
    [
        (batch(0, 0, [1000]), {}, "has positions 0 to 999, got 1000"),
        (batch(0, 0, [2**62]), {}, "has positions 0 to 999, got"),
        (batch(0, 2, [0]), {}, "rank 2 is not one of 2 ranks"),
        (batch(2**31, 0, [0]), {}, "epoch"),
        (batch(0, 2**21, [0]), {"ranks": 2**20}, "rank"),
        (batch(0, 0, [0]), {"ranks": 0}, "ranks: Input should be greater"),
        (batch(0, 0, [0]), {"start": 1001}, "can't go on from position 1001"),
        (batch(0, 0, [0]), {"start": -1}, "start: Input should be greater"),
        (batch(0, 0, [0]), {"had": 2**63}, "had: Input should be less"),
        (batch(0, 0, [0]), {"life": "x"}, "names no training process"),
        (batch(0, 0, [0]), {"life": "h:1:1:", "ended": "x"}, "names no training process"),
        (batch(0, 0, [0, 0]), {}, "names a position twice"),
        (batch(0, 0, [-1]), {}, "positions start at 0"),
        (b"", {}, "shorter than its"),
        (batch(0, 0, [0])[:-1], {}, "can't hold the 1 positions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_batches_that_can_not_be(run: Run, body: bytes, about: dict[str, Any], why: str) -> None:
    status, message = sent(run, "POST", "/batch", body, **({"plan": run.plan.plan_id, "ranks": 2} | about))
    assert (status, why in message, "\n" in message) == (400, True, False), message


@pytest.mark.parametrize("asker", ["client", "peer"])
def test_a_header_that_older_pods_believed_says_nothing(run: Run, asker: str) -> None:
    """As a neighbour's they took its number for that of the run of a pod, and one that was larger than their own for a
    successor, before which they ended."""
    what, about = ("/batch", {"ranks": 2}) if asker == "client" else ("/take", {"pod": 1})
    query = "&".join(f"{name}={value}" for name, value in ({"plan": run.plan.plan_id} | about).items())
    path = f"/{'peer/' if asker == 'peer' else ''}v1/jobs/{run.name}/planned{what}?{query}"
    body = batch(0, 0, [0])
    plain = run.pods.do(run.pods.request(asker, 0, "POST", path, body))
    for number in (str(2**63), "9" * 300, f"1 {2**63}"):
        headers = {f"refill-{name}": number for name in ("asked-life", "life")}
        status, answered, found = run.pods.do(run.pods.request(asker, 0, "POST", path, body, headers))
        assert (status, found) == (plain[0], plain[2])
        assert not [name for name in answered if "life" in name]
    assert run.pods.node(0).phase is PodPhase.READY


@pytest.mark.parametrize(
    "body",
    [batch(0, 0, [1000]), batch(2**32 - 1, 0, [0]), b"", b"RFQ2"],
    ids=["position", "epoch", "nothing", "cut"],
)
def test_parts_that_can_not_be(run: Run, body: bytes) -> None:
    status, message = sent(run, "POST", "/take", body, "peer", plan=run.plan.plan_id, pod=1)
    assert status == 400, message


def listed(epoch: int, positions: list[int], samples: list[int]) -> bytes:
    ids = np.array(samples, dtype=np.int64)
    return BatchRequest(epoch, 0, np.array(positions, dtype=np.int64), sample_ids=ids).encode()


@pytest.fixture(scope="module")
def of_lists(run: Run, packed: Packed) -> Iterator[Run]:
    """A job whose ranks have the order in lists; after the tests it gives what is asked for."""
    found = Run(run.pods, packed[0], new_name(), 1, order="explicit")
    ids = np.array([5, 5, 999])
    assert found.ranks[0].batch(0, np.arange(3), ids).sample_ids.tolist() == ids.tolist()
    yield found
    assert found.ranks[0].batch(0, np.arange(3, 6), ids).sample_ids.tolist() == ids.tolist()
    found.ranks[0].end_job()


@pytest.mark.parametrize("asker", ["client", "peer"])
@pytest.mark.parametrize(
    ("body", "why"),
    [
        (listed(0, [0], [1000]), "there is no sample 1000; the dataset has samples 0 to 999"),
        (listed(0, [0], [-1]), "there is no sample -1"),
        (listed(0, [0, 1], [0, 2**62]), "there is no sample"),
        (listed(0, [0, 1], [0, -(2**63)]), "there is no sample"),
        (listed(0, [0, 0], [0, 1]), "names a position twice"),
        (listed(0, [0, 1], [0, 1])[:-1], "can't hold the 2 positions"),
        (listed(0, [0, 1], [0, 1])[:-8], "can't hold the 2 positions"),
        (batch(0, 0, [0]), "a request names the sample of each position"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_samples_that_are_named_and_can_not_be(of_lists: Run, body: bytes, why: str, asker: str) -> None:
    what, about = ("/batch", {}) if asker == "client" else ("/take", {"pod": 1})
    status, message = sent(of_lists, "POST", what, body, asker, plan=of_lists.plan.plan_id, **about)
    assert (status, why in message, "\n" in message) == (400, True, False), message


def test_samples_are_not_named_where_the_plan_has_the_order(run: Run) -> None:
    status, message = sent(run, "POST", "/batch", listed(0, [0], [0]), plan=run.plan.plan_id, ranks=2)
    assert (status, "a request names positions alone" in message) == (400, True), message


@pytest.mark.parametrize("samples", [[1000], [-1], [0, 2**62], [0, -(2**63)]])
def test_ids_that_can_not_be(of_lists: Run, samples: list[int]) -> None:
    """Outside of epochs, in lists, and in parts of the whole order."""
    body, about = np.array(samples, dtype="<i8").tobytes(), {"plan": of_lists.plan.plan_id}
    status, message = sent(of_lists, "POST", "/samples", body, **about)
    assert (status, "there is no sample" in message) == (400, True), message
    for asker in ("client", "peer"):
        how = about | {"num_ranks": 1, "length": len(samples)}
        status, message = sent(of_lists, "PUT", "/epochs/1/ranks/0/list", body, asker, **how)
        assert (status, "there is no sample" in message) == (400, True), message
    for what in ("/chunks", "/epochs/0/order"):
        ends = np.array([0, samples[-1] + 1], dtype="<i8").tobytes()
        status, message = sent(of_lists, "POST", what, ends, **about)
        assert (status, "\n" in message) == (400, False) or samples == [-1], message


DEALT = {"epoch": 0, "rank": 0, "num_ranks": 2}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (DEALT | {"spans": [[0, 501]]}, "rank 0 has 500 positions in epoch 0, got 0-501"),
        (DEALT | {"spans": [[-1, 3]]}, "spans.0.0: Input should be greater"),
        (DEALT | {"spans": [[5, 3]]}, "got 5-3"),
        (DEALT | {"spans": [[0, 2**70]]}, "spans.0.1: Input should be less"),
        (DEALT | {"spans": [[0]]}, "spans.0"),
        (DEALT | {"spans": "0-3"}, "spans"),
        (DEALT | {"damaged": [[500, 1]]}, "rank 0 has 500 positions in epoch 0, got 500"),
        (DEALT | {"damaged": [[2**70, 1]]}, "damaged.0.0: Input should be less"),
        (DEALT | {"damaged": [[1, 2**70]]}, "damaged.0.1: Input should be less"),
        (DEALT | {"damaged": [[1, 1000]]}, "there is no sample 1000"),
        (DEALT | {"rank": 2}, "rank 2 is not one of 2 ranks"),
        (DEALT | {"epoch": -1}, "epoch: Input should be greater"),
        (DEALT | {"num_ranks": 2**21}, "num_ranks: Input should be less"),
        (DEALT | {"start": 1001}, "can't go on from position 1001"),
        (DEALT | {"digests": [[]]}, "this is no part of a digest"),
        (DEALT | {"digests": [[1, 1, 0, False, 0, [[0, float("inf")]], "0"]]}, "this is no part of a digest"),
        (DEALT | {"digests": [[1, 1, 0, False, 0, [[3, 1]], "0"]]}, "this is no part of a digest"),
        (DEALT | {"digests": [[1, 1, 0, False, 0, [[0, 1001]], "0"]]}, "rank 0 has 1000 positions in epoch 0, got"),
        (DEALT | {"digests": [[2**80, 1, 2**80, False, 0, [], "0"]]}, ""),
        ([], "Input should be"),
        ({}, "Field required"),
        (b"no json", "Input should be"),
    ],
)
def test_reports_that_can_not_be_change_nothing(run: Run, body: Any, why: str) -> None:
    run.look()
    before = run.receipt(0)
    status, message = sent(run, "PUT", "/received", body, plan=run.plan.plan_id)
    assert (status, why in message, "\n" in message) == (400, True, False), message
    assert run.receipt(0) == before


def test_a_late_report_of_how_ranks_went_before_does_not_take_the_receipt_over(run: Run) -> None:
    """Though this pod has heard nothing of that before: others were asked for its samples."""
    run.look()
    later = {"epoch": 5, "rank": 0, "num_ranks": 2, "start": 40, "spans": [[0, 480]], "age_seconds": 1.0}
    before = {"epoch": 5, "rank": 0, "num_ranks": 1, "spans": [[0, 56]], "age_seconds": 2.0}
    for report in (later, before):
        assert sent(run, "PUT", "/received", report, plan=run.plan.plan_id)[0] == 200
    assert run.receipt(5)["world_size"] == 2
    assert run.receipt(5)["received"] == 40 + 480


def changed(plan: PlanSettings, **changes: Any) -> dict[str, Any]:
    return plan.to_dict() | changes


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_samples": 999}, "is of 999 samples, and the dataset has 1,000"),
        ({"num_samples": 10**12}, "samples, and the dataset has 1,000"),
        ({"selection": "abc"}, "selection"),
        ({"dataset": "x" * 60_000}, "was replaced since"),
        ({"num_shares": 2**16 + 1}, "num_shares must be 1 to 65536"),
        ({"run": 0}, "run must be 1 to"),
        ({"memory_bytes": True}, "memory_bytes must be int"),
        ({"seed": 2**63}, "seed must be"),
        ({"version": 3}, "plan version 3 is not known here"),
        ({"version": 2}, "plan version 2 does not go with selection ''"),
        ({"other": 1}, "a plan is an object with"),
    ],
)
def test_plans_that_can_not_be_are_refused_and_leave_no_job(
    run: Run, packed: Packed, changes: dict[str, Any], why: str
) -> None:
    other = Run(run.pods, packed[0], new_name(), 1)
    settings = other.datasets[0].connection.spec.to_dict()
    plan = changed(other.plan, **changes)
    other.ranks[0].end_job()
    for asker in ("client", "peer"):
        body = {"settings": settings, "spec": settings, "plan": plan, "begun": True, "confirmed": True}
        status, message = sent(other, "PUT", "", body, asker)
        assert (status in (400, 409), why in message, "\n" in message) == (True, True, False), message
        assert len(message) < 500, "what was sent comes back whole"
    listed = [job["spec"]["name"] for pod in (0, 1) for job in _jobs(run.pods, pod)]
    assert other.name not in listed


def _jobs(pods: PodsInProcess, pod: int) -> Any:
    return pods.get(pod, "/v1/jobs")


def test_extreme_plans_that_can_be_are_carried_out(run: Run, packed: Packed) -> None:
    for shares, memory_bytes, length in ((2**16, 1, 1), (1, 2**60, 2**20), (3, 0, 7)):
        given = {"shares": shares, "plan_bytes": memory_bytes, "run": length}
        settings = {name: value for name, value in given.items() if value}
        other = Run(run.pods, packed[0], new_name(), 1, policy_settings=settings, timeout_seconds=10)
        other.take(0, 0, 100)
        assert len({sample for _, _, sample in other.came}) == 100
        if shares < 2**16:  # all of that order takes a while
            other.check(packed[0])
        other.ranks[0].end_job()


def test_anything_at_all(run: Run) -> None:
    """Bodies of random bytes, and right ones that are damaged."""
    draw = random.Random(4)
    right = {
        ("POST", "/batch"): batch(0, 0, [0, 2, 4]),
        ("POST", "/samples"): np.arange(3, dtype="<i8").tobytes(),
        ("PUT", "/received"): json.dumps(DEALT | {"spans": [[0, 3]], "damaged": []}).encode(),
        ("PUT", ""): json.dumps({"settings": {}, "plan": run.plan.to_dict(), "begun": False}).encode(),
    }
    for (method, what), body in right.items():
        for turn in range(60):
            if turn % 3 == 0:
                content = draw.randbytes(draw.randrange(200))
            elif turn % 3 == 1:
                content = body[: draw.randrange(len(body))]
            else:
                damaged = bytearray(body)
                for _ in range(3):
                    damaged[draw.randrange(len(body))] = draw.randrange(256)
                content = bytes(damaged)
            if what == "/batch" and content[4:8] == body[4:8]:
                continue  # may be the first batch of another epoch or rank
            path = f"/v1/jobs/none/planned{what}" if what == "" else f"/v1/jobs/{run.name}/planned{what}"
            path += f"?plan={run.plan.plan_id}&ranks=2"
            status, _, answer = run.pods.do(run.pods.request("client", 0, method, path, content, JSON))
            assert status < 500, (method, what, content, answer)


@pytest.mark.parametrize(
    ("path", "body", "status", "why"),
    [
        ("/v1/jobs/{job}/planned/batch?plan={plan}&ranks=2", batch(0, 0, [1000]), 400, "has positions 0 to 999"),
        ("/v1/jobs/{job}/planned/batch?plan={plan}&ranks=2", b"", 400, "shorter than its"),
        ("/v1/jobs/{job}/planned/batch?plan={plan}&ranks=0", batch(0, 0, [0]), 400, "ranks: Input should be greater"),
        ("/v1/jobs/{job}/planned/batch?plan=other", batch(0, 0, [0]), 404, "knows no job"),
        ("/v1/jobs/none/planned/batch?plan={plan}", batch(0, 0, [0]), 404, "knows no job none"),
        ("/v1/jobs/a%2fb/planned/batch?plan={plan}", batch(0, 0, [0]), 400, "names no job"),
        ("/v1/jobs/{job}/planned/samples?plan={plan}", batch(0, 0, [0]), 400, "only batches can be asked for together"),
    ],
)
def test_one_of_several_batches_that_can_not_be_is_the_answer_to_all(
    run: Run, path: str, body: bytes, status: int, why: str
) -> None:
    right = f"/v1/jobs/{run.name}/planned/batch?plan={run.plan.plan_id}&ranks=2&batch=20&allow_skipped=true"
    wrong = path.format(job=run.name, plan=run.plan.plan_id)
    together = encode_together([(right, batch(0, 0, [0])), (wrong, body)])
    found, _, answer = run.pods.do(run.pods.request("client", 0, "POST", "/v1/batches", together, {}))
    message = json.loads(answer)["message"]
    assert (found, why in message, "\n" in message) == (status, True, False), message
