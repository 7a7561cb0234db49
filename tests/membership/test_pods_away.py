"""Which pods and ranks do others wait for? By signs of life and by what has come, never by lateness."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.membership.planned_in_process import PlannedRank, Run, new_name
from tests.membership.pods_in_process import Packed, PodsInProcess
from tests.waiting import until

from refill.pods import planned_pods
from refill_service.planned import pods_away
from refill_service.top.scrape import PodScrape, Scrape
from refill_service.top.top_figures import RankBehind, figures_between


@pytest.fixture
def by_way_of_homes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks ask no other pod themselves."""
    monkeypatch.setattr(PlannedRank, "is_direct", False)


BY_WAY_OF_HOMES = pytest.mark.usefixtures("by_way_of_homes")


def test_pods_that_are_all_away_are_named_now_and_then(
    packed: Packed, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at each turn from one to the next."""
    monkeypatch.setattr(planned_pods, "_SAY_EVERY_SECONDS", 1e6)
    with PodsInProcess(2) as pods, ThreadPoolExecutor(1) as pool:
        run = Run(pods, packed[0], new_name(), 1)
        run.take(0, 0, 20)
        pods.kill(0, 1)
        gone = pods.rule("/planned/batch", to=0, times=-1)
        taken = pool.submit(partial(run.take, 0, 20, 40))
        until(lambda: gone.seen >= 4, "the rank to turn to the same pod several times")
        pods.start(0, 1)
        taken.result(60)
    said = [each for each in caplog.messages if "does not answer: rank 0 asks" in each]
    assert 1 <= len(said) <= 2, said


@BY_WAY_OF_HOMES
def test_a_pod_that_stands_still_is_asked_once_for_all_who_wait_for_it(packed: Packed) -> None:
    with PodsInProcess(2) as pods, ThreadPoolExecutor(16) as pool:
        run = Run(pods, packed[0], new_name(), 16)
        for what in ("/planned/take", "/peer/v1/alive"):  # the first batch is asked of its home in any case
            pods.rule(what, to=1, times=-1, held=pods.event())
        stands_still = pods.rules[-1]
        wait([pool.submit(partial(run.take, 0, 0, 20, [rank])) for rank in range(0, 16, 2)])
        assert len(run.came) == 8 * 20
        assert 1 <= stands_still.seen <= 4, "8 requests waited for it"


@BY_WAY_OF_HOMES
def test_what_two_pods_that_are_gone_were_asked_for_comes_in_the_order_asked_for(packed: Packed) -> None:
    """All of a batch, from one that answers in the place of both."""
    with PodsInProcess(3) as pods:
        run = Run(pods, packed[0], new_name(), 1)
        run.take(0, 0, 20)
        job, positions = pods.node(0).planned.jobs[run.name], np.arange(20, 200)
        owners = job.shares.owners[job.orders.places(0, positions)[0]]
        of_both = zip(*(positions[owners == pod][:10].tolist() for pod in (1, 2)), strict=True)
        pods.kill(1, 2)
        run.take_batch(0, 0, np.array(list(of_both)).ravel())
        run.check(packed[0])


@BY_WAY_OF_HOMES
def test_a_pod_that_stood_still_itself_takes_no_other_to_be_away(
    packed: Packed, caplog: pytest.LogCaptureFixture
) -> None:
    """Its time to hear a sign of life passes while it can hear none."""
    with PodsInProcess(2) as pods, ThreadPoolExecutor(1) as pool:
        run = Run(pods, packed[0], new_name(), 1)
        run.take(0, 0, 20)
        of_samples, of_life = (
            pods.rule(what, to=1, times=1, held=pods.event()) for what in ("/planned/take", "/peer/v1/alive")
        )
        taken = pool.submit(partial(run.take, 0, 20, 40))
        until(lambda: of_life.seen == 1, "a question for a sign of life")

        async def stands_still() -> None:
            assert of_life.held is not None
            time.sleep(2)  # noqa: ASYNC251 - longer than the pod waits for it, and nothing is heard meanwhile
            asyncio.get_running_loop().call_soon(of_life.held.set)  # what has come is read after that

        pods.do(stands_still())
        assert of_samples.held is not None
        pods.set(of_samples.held)
        taken.result()
        run.check(packed[0])
        assert "is away" not in caplog.text


def test_what_a_rank_has_heard_nothing_of_is_not_waited_for_as_long_again(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its home asks such a pod for a sign of life at once, and not when half a second has passed."""
    monkeypatch.setattr(pods_away, "_PATIENCE_SECONDS", 1000.0)
    with PodsInProcess(2) as pods, ThreadPoolExecutor(1) as pool:
        run = Run(pods, packed[0], new_name(), 1)
        run.take(0, 0, 20)
        for what in ("/planned/take", "/peer/v1/alive"):
            pods.rule(what, to=1, times=-1, held=pods.event())
        pods.rule("/planned/batch", to=1, times=-1)
        taken = pool.submit(partial(run.take, 0, 20, 40))
        until(taken.done, "what another pod answers in its place")
        taken.result()
        run.check(packed[0])


@BY_WAY_OF_HOMES
def test_a_pod_that_stands_still_is_named(packed: Packed) -> None:
    """First what it was asked for is late, then it gives no sign of life."""
    with PodsInProcess(2) as pods, ThreadPoolExecutor(1) as pool:
        run = Run(pods, packed[0], new_name(), 1)
        run.take(0, 0, 20)
        (pod,) = (pod for pod in _scraped(pods, 0).pods if pod == "1")
        assert _scraped(pods, 0).total("refill_peer_away", "0", peer=pod) == 0
        for what in ("/planned/take", "/peer/v1/alive"):
            pods.rule(what, to=1, times=-1, held=pods.event())
        pool.submit(partial(run.take, 0, 20, 40)).result()
        found = figures_between(_scraped(pods, 0), _scraped(pods, 10))
        assert [pod.is_away for pod in found.pods] == [False, True]


def test_a_share_that_moves_and_comes_back_is_read_again_but_in_part(packed: Packed) -> None:
    with PodsInProcess(3) as pods:
        run = Run(pods, packed[0], new_name(), 1, chunk_size=4, memory_bytes=900_000)
        run.take(0, 0, 400)
        lost = ("/planned/take", "/planned/batch", "/peer/v1/alive", "/healthz")
        rules = [pods.rule(what, to=1, times=-1) for what in lost]
        run.take(0, 400, 500)
        for rule in rules:
            rule.times = 0
        until(lambda: not _scraped(pods, 0).total("refill_peer_away"), "a sign of life")
        run.look()
        run.take(0, 500)
        run.check(packed[0])
        counts = pods.get(0, f"/v1/jobs/{run.name}/epochs/0")["total"]
        again = counts["bytes_read"] + counts["exact_bytes"] - run.ranks[0].info()["total_bytes"]
        assert 0 < again < 2.5 * run.plan.memory_bytes / 3


def test_a_rank_that_stands_still_is_named(packed: Packed) -> None:
    with PodsInProcess(2) as pods:
        run = Run(pods, packed[0], new_name(), 3)
        run.take(0, 0, 100)
        run.look()
        before = _scraped(pods, 0)
        run.take(0, 100, 160, [0, 2])
        run.look()
        (job,) = figures_between(before, _scraped(pods, 10)).jobs
        assert list(job.behind) == [RankBehind(1, 100, 160)]
        run.take(0, 160, ranks=[0, 2])
        run.take(1, 0, 20, [0, 2])
        run.look()
        (job,) = figures_between(before, _scraped(pods, 10)).jobs
        assert not job.behind, "in another epoch it has received something else"
        (job,) = figures_between(_scraped(pods, 10), _scraped(pods, 20)).jobs
        assert list(job.behind) == [RankBehind(1, 0, 20)]
        run.take(0, 100, ranks=[1])
        run.take(1, 0, 20, [1])
        run.look()
        (job,) = figures_between(before, _scraped(pods, 30)).jobs
        assert not job.behind


def test_a_pod_that_waits_for_the_store_says_for_how_long(packed: Packed) -> None:
    with PodsInProcess(1) as pods, ThreadPoolExecutor(1) as pool:
        run = Run(pods, packed[0], new_name(), 1)
        dataset = pods.node(0).planned.find(run.ranks[0].spec.name).dataset if run.ranks[0].info() else None
        assert dataset is not None
        read, goes_on = dataset.read_samples, pods.event()

        async def stands_still(*arguments: Any, **named: Any) -> Any:
            await goes_on.wait()
            return await read(*arguments, **named)

        dataset.read_samples = stands_still  # type: ignore[method-assign]
        taken = pool.submit(partial(run.take, 0, 0, 20))
        until(lambda: _scraped(pods, 0).total("refill_oldest_take_seconds") > 0.3, "a request that waits")
        pods.set(goes_on)
        taken.result()
        assert _scraped(pods, 0).total("refill_oldest_take_seconds") == 0


def _scraped(pods: PodsInProcess, at_seconds: float) -> Scrape:
    def scrape(pod: int) -> PodScrape:
        _, _, text = pods.do(pods.request("client", pod, "GET", "/metrics"))
        return PodScrape.parse(text.decode(), f"pod {pod}")

    return Scrape(at_seconds, {str(pod): scrape(pod) for pod in range(pods.num_pods)})
