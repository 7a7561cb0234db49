"""Policy ``planned`` at pods that remember nothing: what comes is what the plan says, whoever dies and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.membership.planned_in_process import BATCH, PlannedDataset, PlannedRank, Run, new_name, order_of
from tests.membership.pods_in_process import Packed, PodsInProcess, Rule, Training
from tests.pod_fixtures import NUM_SAMPLES, write_files
from tests.waiting import until

from refill.errors import EpochNotReady, InvalidInput, JobConflict, JobLost, RankTaken, SampleDamaged, SamplesSkipped
from refill.protocol.job_spec import JobSpec
from refill.protocol.wire_format import BatchRequest
from refill_service.cache_core import rank_leases
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.pack import pack
from refill_service.object_store.base import ObjectStore, ObjectTooShort, StoredRange
from refill_service.top.scrape import PodScrape


@pytest.fixture(params=["/planned/batch", "/planned/take"], ids=["direct", "by way of a home"])
def asked_for_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The route by which pods are asked for their parts of a batch: by ranks themselves, or by their homes."""
    monkeypatch.setattr(PlannedRank, "is_direct", request.param == "/planned/batch")
    return str(request.param)


BOTH_WAYS = pytest.mark.usefixtures("asked_for_parts")


@pytest.mark.variants("by way of a home")
@BOTH_WAYS
def test_pods_that_die_change_nothing(packed: Packed) -> None:
    """One is gone for good from the middle of epoch 0 on, both ranks' home in turn; then all are, and come back with
    nothing and other memory."""
    with PodsInProcess(3) as pods:
        run = Run(pods, packed[0], new_name(), 2)
        run.take(0, 0, 200)
        pods.kill(1)
        run.take(0, 200, 400)
        pods.kill(0)
        run.take(0, 400)
        pods.start(0)
        found = run.exact_receipt(0)
        assert (found["planned"], found["received"], found["unconfirmed"]) == (NUM_SAMPLES, NUM_SAMPLES, 0)
        assert found["ranks"] == {"0": 500, "1": 500}
        run.take(1, 0, 100)
        pods.kill(0, 2)
        pods.settings["memory_bytes"] = "2MiB"
        pods.start(0, 1, 2)
        run.take(1, 100)
        run.check(packed[0])
        for epoch in (0, 1):
            assert sorted(run.positions_of(epoch)) == list(range(NUM_SAMPLES)), f"epoch {epoch}"
        run.exact_receipt(1, pod=2)
        pods.kill(0, 1)  # who had been told it, and never comes back
        run.exact_receipt(1, pod=2)


def test_a_pod_reads_for_all_of_its_shares_what_is_needed_soonest(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one connection to the store: else all that one share reads ahead would come before what the next one needs."""
    monkeypatch.setenv("REFILL_STORE_MAX_CONNECTIONS", "1")
    read_samples, reads, shares = Dataset.read_samples, list[range](), {"shares": 8, "run": 4}

    async def noted(dataset: Dataset, records: Any, first: int, end: int, room: Any = None) -> memoryview:
        for _ in range(100):  # all shares order what they can meanwhile
            await asyncio.sleep(0)
        reads.append(range(first, end))
        return await read_samples(dataset, records, first, end, room)

    monkeypatch.setattr(Dataset, "read_samples", noted)
    with PodsInProcess(1) as pods:
        run = Run(pods, packed[0], new_name(), 1, chunk_size=8, memory_bytes=3_000_000, policy_settings=shares)
        run.take(0, 0, BATCH)
        place_of = np.argsort(order_of(packed[0], run.plan, 0))

        def ahead() -> list[int]:
            """Of each read since the last one that the first batch waited for, the first place that it has. One more
            may have been ordered before."""
            firsts = [int(place_of[list(each)].min()) for each in list(reads)]
            return firsts[max(at for at, first in enumerate(firsts) if first < BATCH) + 2 :]

        until(lambda: len(ahead()) > 50, "much is read ahead")
        places = ahead()
    soonest = np.minimum.accumulate(places[::-1])[::-1].tolist()
    early = [(place, sooner) for place, sooner in zip(places, soonest, strict=True) if place > sooner + 200]
    assert not early, f"read before what is needed much sooner: {early}"


@pytest.mark.variants("resume-False")
@pytest.mark.parametrize(("way", "drop_last"), [("resume", False), ("load", True)])
def test_a_run_goes_on_anywhere_with_any_number_of_ranks(
    packed: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drop_last: bool, way: str
) -> None:
    """2, 3, 2 and 2 ranks, on pods of other numbers and memory that have never heard of it, within an epoch and over
    its end. What was fetched behind a checkpoint comes again, the same."""
    name, state, left = new_name(), None, list(range(NUM_SAMPLES))
    seen = None
    for leg, (num_ranks, num_pods, memory, took) in enumerate(
        [(2, 2, "4MiB", 100), (3, 3, "6MiB", 60), (2, 1, "3MiB", 140), (2, 2, "4MiB", None)]
    ):
        with PodsInProcess(num_pods, memory_bytes=memory) as pods:
            run = Run(pods, packed[0], name, num_ranks, state, way, memory_bytes=0, drop_last=drop_last)
            first = 0 if num_ranks != 2 or leg < 3 else 140
            end = run.length(0) if took is None else took
            run.take(0, first, end)
            asked = num_ranks * (end - first)
            assert sorted(run.positions_of(0)) == sorted([*left[:asked], *range(asked - len(left))]), f"leg {leg}"
            seen = seen or run.plan
            assert run.plan == seen, f"leg {leg}: another plan"
            left = left[asked:]
            state = run.states(0, end)[0]
            if took is not None:
                run.take(0, end, end + 2 * BATCH)  # fetched, and not consumed
                run.check(packed[0])
                continue
            run.check(packed[0])
            assert not left
            found = run.exact_receipt(0)
            assert (found["from_checkpoint"], found["world_size"]) == (380, 2)
            monkeypatch.setattr(rank_leases, "LEASE_SECONDS", 0.0)  # as if those ranks had been silent for so long
            again = Run(pods, packed[0], name, 3, state, way, memory_bytes=0, drop_last=drop_last)
            again.take(1)
            again.check(packed[0])
            assert again.length(1) == (NUM_SAMPLES // 3 if drop_last else -(-NUM_SAMPLES // 3))
            found = again.exact_receipt(1)
            asked = 3 * again.length(1)
            counted = {"planned": min(NUM_SAMPLES, asked), "dropped": max(0, NUM_SAMPLES - asked)}
            counted |= {"repeats": max(0, asked - NUM_SAMPLES), "from_checkpoint": 0, "unconfirmed": 0}
            assert {what: found[what] for what in counted} == counted


def test_at_the_end_of_an_epoch_a_job_may_name_other_memory(packed: Packed) -> None:
    """It goes on by a plan for that, once the run by the other plan has ended. Within an epoch it may not."""
    name, more = new_name(), {"memory_bytes": 0, "policy_settings": {"plan_bytes": 500_000}}
    with PodsInProcess(2) as pods:
        run = Run(pods, packed[0], name, 2, memory_bytes=0)
        run.take(0, 0, 100)
        in_the_middle = run.states(0, 100)[0]
        run.take(0, 100)
        state, before = run.states(0, run.length(0))[0], run.plan
        with pytest.raises(JobConflict, match="end that job first"):
            assert Run(pods, packed[0], name, 2, state, **more).plan
        run.datasets[0].end_job()
        with pytest.raises(JobConflict, match="is to go on by a plan with plan_bytes"):
            assert Run(pods, packed[0], name, 2, in_the_middle, **more).plan
        again = Run(pods, packed[0], name, 2, state, **more)
        assert (again.plan.memory_bytes, again.plan.seed) == (500_000, before.seed)
        assert again.plan.plan_id != before.plan_id
        assert again.datasets[0].checked_state(state).next_place == (1, 0)
        again.take(1)
        again.check(packed[0])
        assert again.exact_receipt(1)["plan_id"] == again.plan.plan_id


@pytest.mark.parametrize("drop_last", [False, True])
def test_fewer_samples_than_ranks_are_resumed_epoch_after_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drop_last: bool
) -> None:
    """2 samples for 5 ranks: each has one of the two, or none."""
    monkeypatch.setattr(rank_leases, "LEASE_SECONDS", 0.0)  # as if the ranks of before had been silent for so long
    (tmp_path / "files").mkdir()
    write_files(tmp_path / "files", 2)
    dataset = f"file://{tmp_path / 'dataset'}"
    asyncio.run(pack(str(tmp_path / "files"), dataset, blob_bytes=100_000))
    name, states = new_name(), None
    with PodsInProcess(1) as pods:
        for epoch in range(3):
            run = Run(pods, dataset, name, 5, states, memory_bytes=0, chunk_size=2, drop_last=drop_last)
            assert run.length(epoch) == (0 if drop_last else 1)
            run.take(epoch)
            assert set(run.positions_of(epoch)) == (set() if drop_last else {0, 1})
            states = run.states(epoch, run.length(epoch))


def test_the_same_ranks_go_on_and_what_lies_in_their_checkpoint_is_received(packed: Packed) -> None:
    name = new_name()
    with PodsInProcess(2) as pods:
        run = Run(pods, packed[0], name, 2)
        run.take(0, 0, 200)
        states = run.states(0, 200)
    with PodsInProcess(2) as pods:
        again = Run(pods, packed[0], name, 2, states)
        again.take(0, 200, 300)
        again.look()
        assert again.receipt(0)["received"] == 600, "what the checkpoint says, and what came since"
        again.take(0, 300)
        again.exact_receipt(0)
        assert sorted(run.positions_of(0) + again.positions_of(0)) == list(range(NUM_SAMPLES))


@pytest.mark.variants("direct")
@BOTH_WAYS
def test_ranks_live_on_while_pods_become_more_and_fewer_and_lose_memory(packed: Packed) -> None:
    """Each time all pods end in order, and another number of them starts; at last one has less memory than the job."""
    with PodsInProcess(2) as pods:
        run = Run(pods, packed[0], new_name(), 2, memory_bytes=2_000_000)
        run.take(0, 0, 100)
        for number, num_pods in enumerate((3, 1, 2)):
            pods.scale(num_pods)
            run.take(0, 100 * number + 100, 100 * number + 200)
        pods.kill(1)
        pods.settings["memory_bytes"] = "1MiB"
        pods.start(1)
        run.take(0, 400)
        run.take(1)
        run.check(packed[0])
        for epoch in (0, 1):
            assert sorted(run.positions_of(epoch)) == list(range(NUM_SAMPLES))
            run.exact_receipt(epoch)


def test_jobs_of_a_team_that_come_back_to_less_memory_have_a_part_each(packed: Packed) -> None:
    """As those of a mixture: not all of it the first one, and nothing the last one."""
    with PodsInProcess(2, memory_bytes="8MiB") as pods:
        runs = [Run(pods, packed[0], new_name(), 1, memory_bytes=size) for size in (2_000_000, 1_000_000, 1_000_000)]
        for run in runs:
            run.take(0, 0, 100)
        for pod in range(2):
            pods.kill(pod)
        pods.settings["memory_bytes"] = "1MiB"
        for pod in range(2):
            pods.start(pod)
        for run in runs:
            run.take(0, 100, 200)
        have = [pods.node(0).planned.jobs[run.name].memory_bytes for run in runs]
        assert have[0] == pytest.approx(2 * have[1], rel=0.1)
        assert have[1] == pytest.approx(have[2], rel=0.1)
        for run in runs:
            run.take(0, 200)
            run.check(packed[0])
            run.exact_receipt(0)


def test_a_job_that_loses_memory_in_mid_epoch_reads_more_and_says_so(
    packed: Packed, caplog: pytest.LogCaptureFixture
) -> None:
    with PodsInProcess(1, memory_bytes="3MB") as pods:
        run = Run(pods, packed[0], new_name(), 1, memory_bytes=0)
        run.take(0, 0, 300)
        job = pods.node(0).planned.jobs[run.name]
        alone, plan = job.memory_bytes, run.plan
        Run(pods, packed[0], new_name(), 1, memory_bytes=0).take(0, 0, 20)
        run.take(0, 300)
        run.check(packed[0])
        assert (run.plan, job.memory_bytes < alone) == (plan, True)
        assert caplog.text.count(f"job {run.name} has memory for") == 1
        found = run.exact_receipt(0)
        assert found["given_up_bytes"] > 0
        _, _, metrics = pods.do(pods.request("client", 0, "GET", "/metrics"))
        counted = PodScrape.parse(metrics.decode(), "pod 0").matching(
            "refill_given_up_bytes_total", {"training_job": run.name}
        )
        assert [value for _, value in counted] == [found["given_up_bytes"]]
        counts = pods.get(0, f"/v1/jobs/{run.name}/epochs/0")["total"]
        more = counts["bytes_read"] + counts["exact_bytes"] - run.ranks[0].info()["total_bytes"]
        assert more >= found["given_up_bytes"], "it is read again"


def test_ranks_may_be_an_epoch_apart(packed: Packed) -> None:
    with PodsInProcess(2) as pods:
        run = Run(pods, packed[0], new_name(), 2)
        run.take(0, ranks=[0])
        run.take(1, ranks=[0])
        run.take(0, ranks=[1])
        run.take(1, ranks=[1])
        run.check(packed[0])
        for epoch in (0, 1):
            run.exact_receipt(epoch)


@pytest.mark.variants("direct")
def test_who_gets_what_it_had_asked_for_does_not_ask_again_for_what_others_have(
    packed: Packed, asked_for_parts: str
) -> None:
    """A pod can't be reached for a while. Nothing is lost, and it is asked again."""
    with PodsInProcess(2) as pods:
        run = Run(pods, packed[0], new_name(), 1)
        run.take(0, 0, 100)
        lost = pods.rule(asked_for_parts, to=1, times=3)
        run.take(0, 100, 300)
        assert lost.seen >= 1
        run.take(0, 300)
        run.check(packed[0])
        run.exact_receipt(0)


def test_a_loop_that_is_broken_off_has_left_nothing_out_and_one_that_is_divided_has(packed: Packed) -> None:
    """Its workers had batches under way, and one of them had not begun with its own."""
    with PodsInProcess(2) as pods:
        run = Run(pods, packed[0], new_name(), 1)
        for epoch, batches in enumerate(([0, 1, 3, 5], [0, 1, 2], [1, 3])):
            for number in batches:
                run.take_batch(0, epoch, np.arange(BATCH) + number * BATCH)
        for position in (0, *range(400, 1000)):  # so many batches that no loader has as many under way
            run.take_batch(0, 3, np.array([position]))
        with pytest.raises(SamplesSkipped, match="has left epoch 3 and never asked for its positions 1 to 399"):
            run.take(4)
        run.check(packed[0])


def test_a_second_process_of_a_rank_is_refused_by_name(packed: Packed) -> None:
    with PodsInProcess(2) as pods:
        first = Run(pods, packed[0], new_name(), 2)
        first.take(0, 0, 100)
        twin = Run(pods, packed[0], first.name, 2, timeout_seconds=0)
        with pytest.raises(RankTaken, match=r"rank 1 of job .* is process \d+ on test"):
            twin.take(0, 0, 20, ranks=[1])
        first.take(0, 100, 200)


def test_loaders_of_two_batch_sizes_are_refused_by_name(packed: Packed) -> None:
    """Else some samples would come twice, and some never."""
    with PodsInProcess(2) as pods:
        run = Run(pods, packed[0], new_name(), 2, timeout_seconds=0)
        for dataset, batch in zip(run.datasets, (20, 10), strict=True):
            dataset.asks_in_batches(batch)
        run.take(0, 0, 20, ranks=[0])
        run.take(0, 0, 20, ranks=[1])

        def go_on() -> None:
            for turn in range(6):
                with contextlib.suppress(EpochNotReady):  # the other may be one that only looks
                    run.take(0, 20 * (1 + turn // 2), 20 * (2 + turn // 2), ranks=[turn % 2])

        with pytest.raises(JobConflict) as refused:
            go_on()
        one, other = (
            rf"rank {rank} of 2 goes through epoch 0 from the start in batches of {20 // (1 + rank)}" for rank in (0, 1)
        )
        said = str(refused.value)
        assert re.search(f"{one}, and {other}", said) or re.search(f"{other}, and {one}", said)
        assert "EpochSampler(batch_size=1)" in said


def test_within_a_batch_a_state_goes_on_with_as_many_ranks_only(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_leases, "LEASE_SECONDS", 0.0)  # as if the ranks of before had been silent for so long
    with PodsInProcess(2) as pods:
        run = Run(pods, packed[0], new_name(), 2)
        for dataset in run.datasets:
            dataset.asks_in_batches(40)
        run.take(0, 0, 60)
        states = run.states(0, 60)
        with pytest.raises(InvalidInput, match=r"2 ranks that had 60 samples .* dealt 40 at a time.*and there are 1"):
            Run(pods, packed[0], run.name, 1, states[0], "load")
        again = Run(pods, packed[0], run.name, 2, states, "load")
        for dataset in again.datasets:
            dataset.asks_in_batches(32)  # another loader: what is left of the epoch stays dealt as it was
        again.take(0, 60)
        again.take(1)
        came = {position for _, position, _ in run.came} | {p for epoch, p, _ in again.came if not epoch}
        assert came == set(range(NUM_SAMPLES))
        again.check(packed[0])


def test_a_job_that_has_ended_begins_anew_and_its_last_receipt_stays_till_then(packed: Packed) -> None:
    with PodsInProcess(2) as pods:
        run = Run(pods, packed[0], new_name(), 2)
        run.take(0)
        for rank in run.ranks:
            rank.report_received()
        run.ranks[0].end_job()
        ended = run.receipt(0)
        assert (ended["ended"], ended["exact"], ended["running"]) == (True, True, False)
        with pytest.raises(JobLost, match=r"was ended while it was asked for samples: a new CacheDataset of this name"):
            run.take(1, 0, 20, ranks=[1])
        other = Run(pods, packed[0], run.name, 1, seed=8)
        other.take(0, 0, 100)
        other.look()
        assert (other.receipt(0)["received"], other.receipt(0)["ended"]) == (100, False)
        other.take(0)
        other.check(packed[0])
        assert other.plan != run.plan
        with pytest.raises(JobConflict, match="registered before with other settings"):
            run.take(1, 0, 20, ranks=[1])


def test_a_name_has_one_job_whatever_its_policy(packed: Packed) -> None:
    with PodsInProcess(2) as pods:
        run = Run(pods, packed[0], new_name(), 1)
        run.take(0, 0, 40)
        live = JobSpec(run.name, packed[0], policy="redox", chunk_size=16, memory_bytes=600_000)
        with pytest.raises(JobConflict, match="runs with policy planned, and you ask for redox"):
            Training(pods, live, NUM_SAMPLES, timeout_seconds=5)
        assert [len(pods.get(pod, "/v1/jobs")) for pod in (0, 1)] == [1, 1]
        run.ranks[0].end_job()
        Training(pods, live, NUM_SAMPLES, timeout_seconds=5)
        with pytest.raises(JobConflict, match="runs with policy redox, and you ask for planned"):
            Run(pods, packed[0], run.name, 1).take(0, 0, 20)


def test_a_request_under_way_does_not_bring_back_a_job_that_is_ended(packed: Packed, asked_for_parts: str) -> None:
    """It waits for another pod while the job ends on all pods, or comes when that pod has ended it already."""
    with PodsInProcess(2) as pods, ThreadPoolExecutor(2) as pool:
        name = new_name()
        for what in (f"/{name}{asked_for_parts}", f"/{name}?holder="):
            run = Run(pods, packed[0], name, 1)
            run.take(0, 0, 40)
            goes_on = pods.event()
            rule = pods.rule(what, to=1, held=goes_on, answer="holder" in what)
            first = pool.submit(run.ranks[0].end_job if "holder" in what else partial(run.take, 0, 40, 80))
            until(partial(_was_seen, rule), f"a request for {what}")
            second = pool.submit(partial(run.take, 0, 40, 80) if "holder" in what else run.ranks[0].end_job)
            wait([second])
            pods.set(goes_on)
            wait([first])
            error = (second if "holder" in what else first).exception()
            assert isinstance(error, JobLost), error
            assert "was ended while it was asked for samples" in str(error)
            assert [pods.get(pod, "/v1/jobs") for pod in (0, 1)] == [[], []], f"the job is there again: {what}"


def test_a_job_that_ends_at_any_step_of_a_request_ends_it(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also just when the order of the epoch is known. It waited for reads that nobody makes any more, and held the
    pod's loop for ever."""

    async def at_once(work: Callable[..., Any], *given: Any) -> Any:
        await asyncio.sleep(0)
        return work(*given)

    with PodsInProcess(1) as pods:
        monkeypatch.setattr(asyncio, "to_thread", at_once)
        for steps in range(30):
            run = Run(pods, packed[0], new_name(), 1)
            run.take(0, 0, 20)
            job = pods.node(0).planned.jobs[run.name]

            async def ask_and_end(steps: int = steps, name: str = run.name, job: Any = job) -> Any:
                taking = asyncio.create_task(job.take(BatchRequest(1, 0, np.arange(20)), says_damage=False))
                for _ in range(steps):
                    await asyncio.sleep(0)
                await pods.node(0).planned.end_here(name)
                return (await asyncio.gather(taking, return_exceptions=True))[0]

            found = pods.do(ask_and_end(), 30)
            assert isinstance(found, JobLost | tuple), f"after {steps} steps: {found!r}"


@pytest.mark.parametrize("has_begun", [False, True], ids=["before it begins", "while it waits"])
def test_a_read_under_way_as_its_job_ends_leaves_nothing_behind(packed: Packed, has_begun: bool) -> None:
    """Who waits for it is told so, and another job that waits for what it was to put into the pinned tier goes on."""
    with PodsInProcess(1, pinned_fraction=0.2) as pods:
        first = Run(pods, packed[0], new_name(), 1)
        first.ranks[0].info()
        job = pods.node(0).planned.jobs[first.name]
        reading = pods.event()

        async def stands_still(*_: object) -> memoryview:
            reading.set()
            return await asyncio.Future()

        async def ask_and_end() -> BaseException:
            taking = asyncio.create_task(job.take(BatchRequest(0, 0, np.arange(20)), says_damage=False))
            while not job.counts.owner(0).core.refills:  # noqa: ASYNC110 - the step at which reads are ordered
                await asyncio.sleep(0)
            if has_begun:
                await reading.wait()
            assert reading.is_set() is has_begun
            await pods.node(0).planned.end_here(first.name)
            (error,) = await asyncio.gather(taking, return_exceptions=True)
            assert isinstance(error, BaseException)
            return error

        job.dataset.read_samples = stands_still  # type: ignore[assignment, method-assign]
        error = pods.do(ask_and_end())
        assert isinstance(error, JobLost), repr(error)
        assert "was ended while it was asked for samples" in str(error)
        second = Run(pods, packed[0], new_name(), 1)
        second.take(0)
        assert second.exact_receipt(0)["planned"] == NUM_SAMPLES


def _was_seen(rule: Rule) -> bool:
    return rule.seen == 1


def test_a_dataset_that_was_replaced_while_pods_were_away_is_an_error(tmp_path: Path) -> None:
    store = tmp_path / "store"
    _packed(tmp_path / "one", store, seed=1)
    with PodsInProcess(2) as pods:
        run = Run(pods, store.as_uri(), new_name(), 1, timeout_seconds=5)
        run.take(0, 0, 40)
        (state,) = run.states(0, 40)
        pods.kill(0, 1)
        shutil.rmtree(store)
        _packed(tmp_path / "two", store, seed=2)
        pods.start(0, 1)
        with pytest.raises(JobConflict, match=r"was replaced since job .* began"):
            run.take(0, 40, 60)
        again = PlannedDataset(pods, dataset=store.as_uri(), job=run.name, resume=state, timeout_seconds=5)
        with pytest.raises(JobConflict, match=r"was replaced since job .* began"):
            again.register()


def _packed(files: Path, store: Path, seed: int) -> None:
    files.mkdir()
    write_files(files, 200, seed=seed)
    asyncio.run(pack(str(files), store.as_uri(), blob_bytes=100_000))


def test_states_that_can_not_be_are_refused_in_one_line(packed: Packed) -> None:
    with PodsInProcess(1) as pods:
        run = Run(pods, packed[0], new_name(), 2)
        run.take(0, 0, 100)
        state, other = run.states(0, 100)[0], run.states(0, 40)[0]
        damaged_plan = state["plan"] | {"num_shares": 0}
        for change, kind, why in (
            ({"plan": damaged_plan}, InvalidInput, "plan setting num_shares must be 1 to 65536, got 0"),
            ({"plan": {}}, InvalidInput, "a plan is an object with chunk_size"),
            ({"plan": state["plan"] | {"version": 9}}, InvalidInput, "plan version 9 is not known here"),
            ({"plan": state["plan"] | {"dataset": "0" * 16}}, JobConflict, "was replaced since job"),
            ({"plan": state["plan"] | {"seed": 99}}, JobConflict, "seed 99, and has seed 7"),
            ({"plan": None}, InvalidInput, "by another policy"),
            ({"start": 1001}, InvalidInput, "an epoch of 1000 positions can't go on from position 1001"),
            ({"start": -1}, InvalidInput, "start must be a number of at least 0, got -1"),
            ({"length": 400}, InvalidInput, "counts 400 samples of rank 0 in epoch 0, and there are 500"),
            ({"job": "another"}, InvalidInput, "the state is of job 'another'"),
        ):
            # Nobody is there any more, so that only the state can be wrong.
            run.ranks[0].end_job()
            with pytest.raises(kind, match=why) as refused:
                PlannedDataset(
                    pods,
                    dataset=packed[0],
                    job=run.name,
                    rank=0,
                    world_size=2,
                    resume=state | change,
                    timeout_seconds=2,
                ).register()
            assert "\n" not in str(refused.value), refused.value
        unequal = Run(pods, packed[0], run.name, 2, [state, other])
        unequal.take(0, 100, 120, ranks=[0])
        unequal.take(0, 40, 60, ranks=[1])
        unequal.check(packed[0])


@pytest.mark.parametrize("on_damaged", ["raise", "skip"])
def test_a_store_that_sends_less_than_it_has_damages_nothing(
    packed: Packed, monkeypatch: pytest.MonkeyPatch, on_damaged: str
) -> None:
    """For a while, as a proxy in trouble does: the samples come when it is over."""
    read_version, answers = ObjectStore.read_version, count()

    async def cut(store: ObjectStore, key: str, start: int, end: int, *more: Any, **named: Any) -> StoredRange:
        if key.endswith(".tar") and next(answers) < 60:
            raise ObjectTooShort(f"{key}: bytes {start}-{end} are not there, it ends at byte {(start + end) // 2}")
        return await read_version(store, key, start, end, *more, **named)

    monkeypatch.setattr(ObjectStore, "read_version", cut)
    with PodsInProcess(2) as pods:
        run = Run(pods, packed[0], new_name(), 1, on_damaged=on_damaged)
        run.take(0)
        run.check(packed[0])
        assert sorted(run.positions_of(0)) == list(range(NUM_SAMPLES))
        run.exact_receipt(0)
    assert next(answers) > 60


@pytest.mark.variants("by way of a home")
@BOTH_WAYS
def test_damaged_samples_are_skipped_or_raised_and_named(tmp_path: Path) -> None:
    """As many samples in every receipt, whoever reads in whose place."""
    store = tmp_path / "store"
    _packed(tmp_path / "files", store, seed=3)
    blob = sorted(store.rglob("*.tar"))[1]
    data = bytearray(blob.read_bytes())
    data[700] ^= 0xFF
    blob.write_bytes(data)
    with PodsInProcess(2) as pods:
        strict = Run(pods, store.as_uri(), new_name(), 1, timeout_seconds=5)
        with pytest.raises(SampleDamaged, match=r"is damaged: its checksum is wrong"):
            strict.take(0)
        skipping = Run(pods, store.as_uri(), new_name(), 1, on_damaged="skip")
        for epoch in (0, 1):
            came = [
                sample["__id__"]
                for start in range(0, 200, BATCH)
                for sample in skipping.datasets[0].samples_of(epoch, np.arange(start, start + BATCH))
            ]
            assert len(came) == len(set(came)) == 199
            found = skipping.exact_receipt(epoch)
            assert (found["damaged"], found["damaged_samples"]) == (1, sorted(set(range(200)) - set(came)))
            pods.kill(1)
