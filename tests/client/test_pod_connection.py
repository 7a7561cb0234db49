"""Retries, exactly: what is sent again, what is not, and what is said in the end."""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.client.fake_pod import FakePod, serving, text_samples
from tests.waiting import until

from refill.errors import (
    EpochEnded,
    EpochNotReady,
    InvalidInput,
    JobConflict,
    JobLost,
    NotAuthenticated,
    PodUnreachable,
    RankHeld,
    RefillError,
    StoreUnavailable,
)
from refill.pods import patience
from refill.pods.credentials import Credentials
from refill.pods.own_life import own_life
from refill.pods.pod_connection import PodConnection, RunOfRank
from refill.protocol.job_spec import JobSpec

POSITIONS = np.arange(8, dtype=np.int64)
NOWHERE = "http://127.0.0.1:9"


def connection_to(pod: FakePod, timeout_seconds: float = 10, home: str | None = None, **spec: Any) -> PodConnection:
    return PodConnection(pod.url, JobSpec("job", "file:///data", **spec), 0, home, timeout_seconds)


def test_a_token_that_is_refused_gives_way_to_a_newer_one(pod: FakePod, tmp_path: Path) -> None:
    """Within one try: nobody has to come again for that."""
    file = tmp_path / "token"
    file.write_text("old-0123456789abcdef")
    credentials = Credentials(str(file))
    connection = PodConnection(pod.url, JobSpec("job", "file:///data"), 0, None, 0, credentials=credentials)
    connection.info()
    pod.faults.append(NotAuthenticated("no"))
    with pytest.raises(NotAuthenticated):
        connection.batch(0, POSITIONS)
    file.write_text("new-0123456789abcdef")
    pod.faults.append(NotAuthenticated("no"))
    assert len(connection.batch(0, POSITIONS).payloads) == len(POSITIONS)
    assert credentials.headers() == {"Authorization": "Bearer new-0123456789abcdef"}


@pytest.mark.parametrize(
    ("faults", "requests"),
    [
        ([], 1),
        (["drop"], 2),
        (["reset"], 2),
        (["cut"], 2),
        (["reset", "drop", "cut"], 4),
        ([EpochNotReady("wait"), StoreUnavailable("wait")], 3),
        ([PodUnreachable("wait"), "drop"], 3),
        (["forget"], 2),
    ],
)
def test_a_batch_comes_whatever_happens_on_the_way(pod: FakePod, faults: list[Any], requests: int) -> None:
    connection = connection_to(pod)
    intact = connection.batch(0, POSITIONS)
    pod.faults.extend(faults)
    again = connection.batch(0, POSITIONS)
    assert again.sample_ids.tolist() == intact.sample_ids.tolist()
    assert [bytes(payload) for payload in again.payloads] == [pod.samples[i] for i in again.sample_ids]
    assert pod.count("POST batch") == 1 + requests
    assert pod.count("PUT job") == 1 + ("forget" in faults)


def test_every_retry_asks_for_the_same(pod: FakePod) -> None:
    pod.faults.extend(["drop", StoreUnavailable("wait"), "drop"])
    connection_to(pod).batch(3, POSITIONS)
    assert len(pod.batches) == 3
    assert {(batch.epoch, batch.rank, tuple(batch.positions)) for batch in pod.batches} == {(3, 0, tuple(range(8)))}


@pytest.mark.parametrize("error", [EpochEnded("over"), InvalidInput("wrong"), JobConflict("other")])
def test_an_error_that_time_does_not_mend_is_raised_at_once(pod: FakePod, error: RefillError) -> None:
    pod.faults.append(error)
    with pytest.raises(type(error), match=error.message):
        connection_to(pod).batch(0, POSITIONS)
    assert pod.count("POST batch") == 1


@pytest.mark.parametrize(("fault", "why"), [("garbage", "frame starts with"), ("swap", "answers other requests")])
def test_a_wrong_frame_is_refused_and_the_next_is_read(pod: FakePod, fault: str, why: str) -> None:
    connection = connection_to(pod)
    pod.faults.append(fault)
    with pytest.raises(RefillError, match=f"{pod.url} sent what no pod sends: .*{why}"):
        connection.batch(0, POSITIONS)
    assert len(connection.batch(0, POSITIONS).payloads) == 8


def test_the_last_error_is_one_line_that_names_the_pod(pod: FakePod) -> None:
    connection = connection_to(pod, timeout_seconds=0.5)
    connection.info()
    pod.faults.extend([EpochNotReady("rank 1 has yet to finish", ranks=[1])] * 50)
    started = time.monotonic()
    with pytest.raises(EpochNotReady, match=f"rank 0 gives up on {pod.url} after . s: rank 1 has yet") as caught:
        connection.batch(0, POSITIONS)
    assert "\n" not in str(caught.value)
    assert caught.value.details == {"ranks": [1]}
    assert time.monotonic() - started < 20, "far longer than it may"


def test_without_a_timeout_a_request_is_made_once(pod: FakePod) -> None:
    connection = connection_to(pod, timeout_seconds=0)
    pod.faults.append(EpochNotReady("wait"))
    with pytest.raises(EpochNotReady):
        connection.batch(0, POSITIONS)
    assert pod.count("POST batch") == 1


def test_a_silent_pod_is_given_up_in_time(pod: FakePod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_LAST_REQUEST_SECONDS", 0.1)
    connection = connection_to(pod, timeout_seconds=0.4)
    connection.info()
    pod.faults.append("hang")
    started = time.monotonic()
    with pytest.raises(PodUnreachable, match="timed out"):
        connection.batch(0, POSITIONS)
    assert time.monotonic() - started < 20, "far longer than it may"


def test_the_last_error_is_what_a_pod_said_before_it_was_silent(pod: FakePod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_LAST_REQUEST_SECONDS", 0.1)
    connection = connection_to(pod, timeout_seconds=0.4)
    connection.info()
    pod.faults.extend([EpochNotReady("rank 1 has yet to finish", ranks=[1]), "hang"])
    with pytest.raises(EpochNotReady, match="rank 1 has yet to finish"):
        connection.batch(0, POSITIONS)


def test_a_pod_that_was_silent_for_long_is_blamed(pod: FakePod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_LAST_REQUEST_SECONDS", 0.1)
    monkeypatch.setattr(patience, "_REQUEST_SECONDS", 0.1)
    connection = connection_to(pod, timeout_seconds=1)
    connection.info()
    pod.faults.extend([EpochNotReady("rank 1 has yet to finish"), *["hang"] * 50])
    with pytest.raises(PodUnreachable, match="timed out"):
        connection.batch(0, POSITIONS)


def test_what_is_waited_for_is_said_while_no_answer_comes(
    pod: FakePod, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "_SAY_EVERY_SECONDS", 1.0)
    connection = connection_to(pod, timeout_seconds=3)
    connection.info()
    pod.faults.extend([StoreUnavailable("the store is slow"), "hang"])
    with caplog.at_level(logging.WARNING), pytest.raises(StoreUnavailable):
        connection.batch(0, POSITIONS)
    assert re.search("no answer for [12] s; before that: the store is slow", caplog.text)


def test_a_pod_that_is_not_there_is_named() -> None:
    connection = PodConnection(NOWHERE, JobSpec("job", "file:///data"), 0, None, 0.3)
    with pytest.raises(PodUnreachable, match=f"gives up on {NOWHERE} after 0 s: .*refused"):
        connection.info()


def test_a_pod_that_has_said_what_it_waits_for_is_asked_until_the_time_is_up_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only where none has answered yet is the first answer, after the pod's 10 s, worth a delay."""
    clock = FakeClock(monkeypatch)
    tried = patience.Patience(0, 15)
    assert tried.next_try().seconds == 15
    clock.now += 10
    tried.failed(EpochNotReady("waits for rank 1"), "http://pod")
    assert tried.next_try().seconds == 5
    clock.now += 5
    with pytest.raises(EpochNotReady, match=r"^rank 0 gives up on http://pod after 15 s: waits for rank 1$"):
        tried.failed(PodUnreachable("http://pod does not answer", silent=True), "http://pod")
    assert patience.Patience(0, 5).next_try().seconds == 15


class FakeClock:
    """That of :mod:`refill.pods.patience`, which moves only here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=lambda: self.now))


def test_what_is_waited_for_is_said(
    pod: FakePod, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "_SAY_EVERY_SECONDS", 0.0)
    pod.faults.append(StoreUnavailable("the store is slow"))
    with caplog.at_level(logging.WARNING):
        connection_to(pod).batch(0, POSITIONS)
    assert [record.getMessage() for record in caplog.records] == [
        f"rank 0 has waited 0 s for {pod.url}: the store is slow"
    ]


LOST = (
    r"^job job is lost: pod 0 was restarted, and policy redox keeps who got what only in memory\. The epoch begins "
    r"anew: start training again without a state, from the epoch's beginning \(set_epoch\(4\)\); policy planned "
    r"survives this$"
)


def test_a_run_that_pods_have_lost_is_not_gone_on_with(pod: FakePod) -> None:
    connection = connection_to(pod, policy="redox")
    connection.batch(4, POSITIONS)
    pod.faults.append("restart")
    for _ in range(2):
        with pytest.raises(JobLost, match=LOST):
            connection.batch(4, POSITIONS)
    assert pod.registered_by == [None, "1", "1"]
    assert pod.jobs == {}, "nothing was begun in its place"


def test_a_run_of_which_nothing_has_come_is_left_for_a_new_one(pod: FakePod) -> None:
    connection = connection_to(pod, policy="redox")
    connection.info()
    pod.faults.append("restart")
    assert len(connection.batch(0, POSITIONS).payloads) == 8
    assert (pod.registered_by, pod.asked_by) == ([None, None], ["1", "10"])
    pod.faults.append("forget")
    connection.batch(0, POSITIONS)
    assert pod.registered_by == [None, None, "10"], "of this one something has come"


def test_a_pod_that_says_itself_that_a_run_is_lost_of_which_nothing_has_come(pod: FakePod) -> None:
    """The home knew the job, and another pod did not."""
    connection = connection_to(pod, policy="redox")
    connection.info()
    pod.faults.append(connection.spec.lost("pod 1 was restarted"))
    assert len(connection.batch(0, POSITIONS).payloads) == 8
    pod.faults.append(connection.spec.lost("pod 1 was restarted", epoch=3))
    with pytest.raises(JobLost, match=r"pod 1 was restarted, .* from the epoch's beginning \(set_epoch\(3\)\); policy"):
        connection.batch(3, POSITIONS)
    assert pod.registered_by == [None, None]


def test_what_pods_keep_of_a_rank_is_lost_with_them(pod: FakePod) -> None:
    connection = connection_to(pod, policy="exact", order="explicit")
    connection.post_trace(0, np.arange(8))
    pod.faults.append("restart")
    with pytest.raises(JobLost, match="policy exact keeps"):
        connection.batch(0, POSITIONS)


def test_loader_workers_know_of_which_run_something_has_come(pod: FakePod) -> None:
    """They share a number; each has registered, or inherited, the job."""
    run = RunOfRank(np.zeros(RunOfRank.NUM_SHARED, dtype=np.int64))
    spec = JobSpec("job", "file:///data", policy="redox")
    first, second, third = (PodConnection(pod.url, spec, 0, None, 10, run=run) for _ in range(3))
    first.info()
    second.info()
    pod.faults.append("restart")
    first.batch(0, POSITIONS)
    second.batch(0, POSITIONS)
    assert pod.asked_by == ["1", "10", "1", "10"], "what another one goes on by is no loss"
    pod.faults.append("restart")
    for connection in (second, first, third):
        with pytest.raises(JobLost):
            connection.batch(0, POSITIONS)


def test_a_state_names_its_run(pod: FakePod) -> None:
    connection = connection_to(pod, policy="redox")
    connection.goes_on("1", 4)
    assert pod.registered_by == ["1"]
    pod.faults.append("restart")
    with pytest.raises(JobLost):
        connection.batch(0, POSITIONS)
    other = connection_to(pod, policy="redox")
    with pytest.raises(JobLost, match=LOST):
        other.goes_on("1", 4)
    other.batch(0, POSITIONS)
    with pytest.raises(JobLost, match=r"registered anew since the state was saved.*\(set_epoch\(4\)\)"):
        other.goes_on("1", 4)
    other.batch(0, POSITIONS)


def test_a_rank_goes_on_in_place_of_a_process_that_has_ended(pod: FakePod) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    holder = dataclasses.replace(own_life(os.getpid()), process=child)
    held = RankHeld("another process is rank 0", rank=0, holder=holder.encode(), held_seconds=1.0)
    connection = connection_to(pod, timeout_seconds=0)
    pod.faults.append(held)
    assert len(connection.batch(0, POSITIONS).payloads) == 8
    assert pod.requests == ["PUT job", "POST batch", "PUT lease", "POST batch"]
    pod.faults.append(RankHeld("still there", rank=0, holder=own_life(os.getpid()).encode(), held_seconds=1.0))
    with pytest.raises(RankHeld):
        connection.batch(0, POSITIONS)


def test_the_home_hears_of_a_rank_whose_loop_stands_still(pod: FakePod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PodConnection, "look_every_seconds", 0.01)
    connection = connection_to(pod, policy="redox")
    connection.info()
    until(lambda: pod.count("GET 0") >= 3, "three looks at the home")
    pod.restart()
    seen = pod.count("GET 0")
    until(lambda: pod.count("GET 0") >= seen + 3, "three looks at the home that was started anew")
    assert pod.registered_by == [None], "it registers nothing: the next request does"


def test_batches_share_one_connection(pod: FakePod) -> None:
    connection = connection_to(pod)
    connection.info()
    before = pod.connections
    pod.faults.extend([None, EpochNotReady("wait")])
    for _ in range(3):
        connection.batch(0, POSITIONS)
    assert pod.connections == before


def test_a_connection_that_was_closed_while_idle_costs_no_pause(pod: FakePod, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = connection_to(pod)
    pod.faults.append("leave")
    connection.batch(0, POSITIONS)
    pauses: list[float] = []
    monkeypatch.setattr(patience.time, "sleep", pauses.append)  # type: ignore[attr-defined]
    connection.batch(0, POSITIONS)
    assert pauses == []
    assert pod.count("POST batch") == 2


def test_a_pickled_connection_opens_its_own_and_registers_nothing(pod: FakePod) -> None:
    connection = connection_to(pod)
    connection.batch(0, POSITIONS)
    copy = pickle.loads(pickle.dumps(connection))
    copy.batch(0, POSITIONS)
    assert pod.count("PUT job") == 1


def test_a_forked_process_opens_its_own(pod: FakePod) -> None:
    connection = connection_to(pod)
    connection.batch(0, POSITIONS)
    before = pod.connections
    child = os.fork()
    if child == 0:  # no assertions and no pytest in here
        ids = connection.batch(1, POSITIONS).sample_ids
        os._exit(0 if len(ids) == 8 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(connection.batch(0, POSITIONS).payloads) == 8
    assert pod.connections == before + 1


def test_threads_do_not_share_a_connection(pod: FakePod) -> None:
    connection = connection_to(pod)
    found: list[list[int]] = []
    threads = [
        threading.Thread(
            target=lambda: found.extend(connection.batch(0, POSITIONS).sample_ids.tolist() for _ in range(20))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    assert len({tuple(ids) for ids in found}) == 1


@pytest.fixture
def second_pod() -> Iterator[FakePod]:
    with serving(FakePod(text_samples(40))) as running:
        running.jobs["job"] = JobSpec("job", "file:///data", world_size=2)
        yield running


def test_a_rank_has_one_home(pod: FakePod, second_pod: FakePod) -> None:
    pod.pods = [pod.url, second_pod.url]
    for rank, home in enumerate(pod.pods):
        connection = PodConnection(pod.url, JobSpec("job", "file:///data", world_size=2), rank, None, 5)
        assert connection.home == home
        connection.batch(0, POSITIONS)
    assert (pod.count("POST batch"), second_pod.count("POST batch")) == (1, 1)


def test_the_service_is_asked_when_the_home_pod_can_not_be_reached(
    pod: FakePod, caplog: pytest.LogCaptureFixture
) -> None:
    pod.pods = [NOWHERE]
    connection = connection_to(pod)
    assert len(connection.batch(0, POSITIONS).payloads) == 8
    assert f"home pod can't be reached from here, so {pod.url} is asked" in caplog.text


def test_a_home_can_be_given(pod: FakePod) -> None:
    pod.pods = [NOWHERE]
    assert connection_to(pod, home=pod.url).home == pod.url


def test_ending_a_job_twice_is_fine(pod: FakePod) -> None:
    connection = connection_to(pod)
    connection.info()
    connection.end_job()
    connection.end_job()
    assert pod.jobs == {}
    assert pod.count("PUT job") == 1


@pytest.mark.parametrize("url", ["refill:8000", "ftp://refill", "http://", "http://refill:8000/path", ""])
def test_a_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="not the URL of a service"):
        PodConnection(url, JobSpec("job", "file:///data"), 0, None, 5)
