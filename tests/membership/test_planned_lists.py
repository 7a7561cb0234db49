"""Policy ``planned`` with lists of the ranks' own: each position gets the sample that the request names, whoever dies,
and whatever pods know of the lists; what they know is read ahead."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from tests.membership.planned_in_process import PlannedDataset, PlannedRank, new_name
from tests.membership.pods_in_process import Packed, PodsInProcess
from tests.pod_fixtures import NUM_SAMPLES
from tests.waiting import until, until_answered

from refill.errors import InvalidInput, MemoryTooSmall, PodBusy
from refill.protocol.dealing import Dealing
from refill.protocol.wire_format import Int64Array
from refill_service.jobs import job_table, job_use

BATCH = 50


class Listed:
    """Ranks, and the lists by which they ask."""

    def __init__(self, pods: PodsInProcess, packed: str, num_ranks: int, name: str = "", **more: Any) -> None:
        self.pods, self.name = pods, name or new_name()
        self.datasets = [
            PlannedDataset(
                pods, dataset=packed, job=self.name, rank=rank, world_size=num_ranks, order="explicit", **more
            )
            for rank in range(num_ranks)
        ]
        self.lists: dict[tuple[int, int], Int64Array] = {}

    @property
    def ranks(self) -> list[PlannedRank]:
        found = [dataset.connection for dataset in self.datasets]
        return [rank for rank in found if isinstance(rank, PlannedRank)]

    def has(self, epoch: int, *lists: Any) -> Listed:
        """Not posted so far."""
        self.lists |= {(epoch, rank): np.asarray(found, dtype=np.int64) for rank, found in enumerate(lists)}
        return self

    def post(self, epoch: int, *ranks: int, start: int = 0) -> None:
        for rank in ranks or range(len(self.ranks)):
            self.ranks[rank].post_list(epoch, self.lists[epoch, rank], start)

    def ask(self, epoch: int, first: int = 0, end: int | None = None) -> None:
        """Step by step, all ranks, as far as their lists go."""
        longest = max(len(found) for (of, _), found in self.lists.items() if of == epoch)
        for start in range(first, longest if end is None else end, BATCH):
            for rank in range(len(self.ranks)):
                length = len(self.lists[epoch, rank])
                self.ask_for(rank, epoch, np.arange(start, min(start + BATCH, length, end or length)))

    def ask_for(self, rank: int, epoch: int, positions: Int64Array) -> None:
        if not len(positions):
            return
        wanted = self.lists[epoch, rank][positions]
        batch = self.ranks[rank].batch(epoch, positions, wanted)
        assert batch.sample_ids.tolist() == wanted.tolist()
        alone = self.ranks[rank].samples(np.unique(wanted))
        bytes_of = dict(zip(alone.sample_ids.tolist(), map(bytes, alone.payloads), strict=True))
        assert [bytes(each) for each in batch.payloads] == [bytes_of[each] for each in wanted.tolist()]

    def counts(self, epoch: int) -> dict[str, Any]:
        found: dict[str, Any] = self.ranks[0].epoch_counts(epoch)["total"]
        return found

    def receipt(self, epoch: int, pod: int = 0) -> dict[str, Any]:
        for rank in self.ranks:
            until_answered(rank.look)
        return self.pods.get(pod, f"/v1/jobs/{self.name}/epochs/{epoch}/receipt")

    def versions(self, epoch: int) -> list[int]:
        """What each pod knows of the lists."""
        lists = [node.planned.jobs[self.name].lists for node in self.pods.nodes if node is not None]
        return [0 if found is None else found.version(epoch) for found in lists]


def permutation(seed: int) -> Int64Array:
    return np.random.default_rng(seed).permutation(NUM_SAMPLES)


def test_what_is_listed_is_read_ahead_and_comes_to_the_letter(packed: Packed) -> None:
    """Lists of two ranks, of unequal length, with repeats, for two epochs."""
    with PodsInProcess(3) as pods:
        run = Listed(pods, packed[0], 2)
        draws = np.random.default_rng(2).integers(0, NUM_SAMPLES, 700)
        run.has(0, permutation(0)[:300], draws).has(1, draws[:450], permutation(1)[:500])
        for epoch in range(2):
            run.post(epoch)
            assert run.versions(epoch) == [2] * 3, "all pods know both"
            run.ask(epoch)
            assert run.counts(epoch)["exact_reads"] == 0, "nothing is read alone"
            found = run.receipt(epoch)
            planned = sum(len(run.lists[epoch, rank]) for rank in range(2))
            counted = {"planned": planned, "received": planned, "unconfirmed": 0, "exact": True, "lists": 2}
            assert {what: found[what] for what in counted} == counted


def test_lists_are_answered_as_posted_by_another_number_of_pods_that_never_heard_of_them(packed: Packed) -> None:
    """Posted, then all pods are killed, or end in order, and others begin: also in the midst of the epoch."""
    with PodsInProcess(2) as pods:
        run = Listed(pods, packed[0], 2).has(0, permutation(0), permutation(1)[:450])
        run.post(0)
        pods.kill(0, 1)
        pods.start(0, 1)
        run.ask(0, 0, 200)
        for number, num_pods in enumerate((3, 1, 2)):
            pods.scale(num_pods)
            run.ask(0, 200 + 100 * number, 300 + 100 * number)
        pods.kill(1)
        run.ask(0, 500)
        pods.start(1)
        until(lambda: run.receipt(0)["exact"], "an exact receipt: ranks have told pods their lists again")
        assert run.receipt(0)["planned"] == NUM_SAMPLES + 450


def test_a_rank_that_reports_says_which_list_it_asks_by(packed: Packed) -> None:
    """It may end before it hears that the pods have lost its list, and posts it again."""
    with PodsInProcess(2) as pods:
        run = Listed(pods, packed[0], 2).has(0, permutation(0)[:400], permutation(1)[:450])
        run.post(0)
        run.ask(0, 0, 200)
        pods.rule("/list", times=-1)
        pods.kill(0, 1)
        pods.start(0, 1)
        run.ask(0, 200)
        for rank in run.ranks:
            assert rank.report_received()
        found = run.receipt(0)
        assert (found["exact"], found["lists"], found["planned"]) == (True, 2, 850)


def test_loader_workers_say_which_list_their_rank_asks_by(packed: Packed) -> None:
    """The process that posted it may have ended when pods lose it, and a worker reports last."""
    with PodsInProcess(2) as pods:
        run = Listed(pods, packed[0], 1).has(0, permutation(0)[:400]).has(1, permutation(1)[:450])
        (rank,) = run.ranks
        worker = copy.copy(rank)  # as pickle copies it: what processes of a rank share is shared
        run.post(0)
        run.post(1)
        pods.kill(0, 1)
        pods.start(0, 1)
        for epoch, length in ((0, 400), (1, 450)):
            worker.batch(epoch, np.arange(length), run.lists[epoch, 0])
        assert worker.report_received()
        for epoch, length in ((0, 400), (1, 450)):
            found = pods.get(0, f"/v1/jobs/{run.name}/epochs/{epoch}/receipt")
            assert (found["exact"], found["lists"], found["planned"]) == (True, 1, length)


def test_the_loop_reports_what_a_worker_that_was_killed_did_not(packed: Packed) -> None:
    with PodsInProcess(2) as pods:
        run = Listed(pods, packed[0], 1).has(0, permutation(0)[:400])
        run.post(0)
        (rank,) = run.ranks
        worker = copy.copy(rank)
        worker.batch(0, np.arange(400), run.lists[0, 0])  # and is killed
        assert run.receipt(0)["unconfirmed"] == 400
        for first in range(0, 400, BATCH):
            rank.loop_has(0, first, first + BATCH)
        assert run.receipt(0)["exact"]


def test_a_process_that_ends_asks_a_busy_pod_again_to_take_its_report(packed: Packed) -> None:
    with PodsInProcess(1) as pods:
        run = Listed(pods, packed[0], 1).has(0, permutation(0)[:400])
        run.post(0)
        run.ask(0)
        busy = pods.rule("/received", times=3)
        run.ranks[0].report_last()
        assert busy.seen == 3
        found = pods.get(0, f"/v1/jobs/{run.name}/epochs/0/receipt")
        assert found["exact"]
        run.ranks[0].end_job()
        run.ranks[0].loop_has(0, 0, 20)
        run.ranks[0].report_last()
        assert run.name not in pods.node(0).planned.jobs, "a job that is over does not begin anew"


def test_a_process_whose_time_to_end_is_over_tries_once_more(packed: Packed) -> None:
    with PodsInProcess(1) as pods:
        run = Listed(pods, packed[0], 1).has(0, permutation(0)[:400])
        run.post(0)
        run.ask(0)
        busy = pods.rule("/received", times=3)
        run.ranks[0].report_last(ends=0)
        assert busy.seen == 1


def test_what_no_pod_knows_is_read_alone_and_nothing_else_differs(packed: Packed) -> None:
    with PodsInProcess(2) as pods:
        run = Listed(pods, packed[0], 1).has(0, permutation(0)[:200])
        run.ask(0)
        assert run.counts(0)["exact_reads"] >= 150, "but for what has just left"
        found = run.receipt(0)
        assert (found["exact"], found["lists"], found["planned"]) == (False, 0, 0), "nobody has said what it asks for"
        run.post(0)
        assert run.receipt(0)["exact"]


def test_a_list_that_comes_late_costs_reads(packed: Packed) -> None:
    """Rank 1 asks, and posts later; loader workers ask out of order, and again."""
    with PodsInProcess(2) as pods:
        run = Listed(pods, packed[0], 2).has(0, permutation(0)[:500], permutation(1)[:500])
        run.post(0, 0)
        run.ask(0, 0, 100)
        run.post(0, 1)
        assert run.versions(0) == [2, 2]
        late = np.random.default_rng(3).permutation(np.arange(100, 500).reshape(-1, BATCH), axis=0)
        for positions in [*late, late[0], late[-1]]:
            for rank in range(2):
                run.ask_for(rank, 0, positions)
        assert run.receipt(0)["exact"]


def test_a_pod_that_comes_back_is_told_the_lists_again(packed: Packed) -> None:
    with PodsInProcess(3) as pods:
        run = Listed(pods, packed[0], 2).has(0, permutation(0)[:500], permutation(1)[:500])
        run.post(0)
        run.ask(0, 0, 100)
        pods.kill(2)
        pods.start(2)
        until(lambda: run.name in pods.node(0).planned.jobs, "the job")
        run.ask(0, 100, 200)  # brings it the job
        until(lambda: run.versions(0) == [2] * 3, "lists at the new pod")
        pods.kill(0, 1, 2)
        pods.start(0, 1, 2)
        run.ask(0, 200, 300)
        until(lambda: run.receipt(0)["lists"] == 2, "lists at pods that had lost all")
        run.ask(0, 300)
        assert run.receipt(0)["exact"]


def test_a_rank_that_goes_on_posts_what_is_left(packed: Packed) -> None:
    name, wanted = new_name(), permutation(0)[:500]
    with PodsInProcess(2) as pods:
        run = Listed(pods, packed[0], 1, name).has(0, wanted)
        run.post(0)
        run.ask(0, 0, 200)
        state = run.datasets[0].state_at(0, 200, 500)
    with PodsInProcess(3) as pods:
        run = Listed(pods, packed[0], 1, name).has(0, wanted)
        assert run.datasets[0].checked_state(state).next_place == (0, 200)
        run.post(0, start=200)
        run.ask(0, 200)
        assert run.counts(0)["exact_reads"] == 0
        assert run.receipt(0)["exact"]


def test_a_list_that_had_ended_is_in_the_receipt_though_its_rank_and_all_pods_were_lost(packed: Packed) -> None:
    """It is in the state, by length and digest: the process that goes on from the epoch's end posts it no more."""
    name, first, second = new_name(), permutation(0)[:500], permutation(1)[:500]
    with PodsInProcess(2) as pods:
        run = Listed(pods, packed[0], 1, name).has(0, first)
        run.post(0)
        run.ask(0)
        state = run.datasets[0].state_at(0, 500, 500)
    with PodsInProcess(2) as pods:
        run = Listed(pods, packed[0], 1, name).has(1, second)
        assert run.datasets[0].checked_state(state).next_place == (1, 0)
        run.post(1)
        run.ask(1, 0, 100)
        found = run.receipt(0)
        assert (found["exact"], found["lists"], found["planned"]) == (True, 1, 500)


def test_ranks_that_share_batches_ask_by_one_list(packed: Packed) -> None:
    with PodsInProcess(2) as pods:
        run = Listed(pods, packed[0], 2, batch_group=2)
        run.has(0, permutation(0)[:300], permutation(0)[:300])
        run.post(0)
        assert run.versions(0) == [1, 1]
        run.ask(0)
        assert run.counts(0)["exact_reads"] == 0
        found = run.receipt(0)
        assert (found["planned"], found["exact"]) == (300, True)


@pytest.fixture
def memory_for_one() -> dict[str, Any]:
    """Of a job that names its memory, of which pods of 4 MiB have room for one."""
    return {"memory_bytes": 2_500_000}


def test_a_home_that_died_before_it_said_goodbye_keeps_no_memory_from_others(
    packed: Packed, memory_for_one: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_use, "GONE_SECONDS", 0.05)
    monkeypatch.setattr(job_use, "QUIET_SECONDS", 0.0)
    with PodsInProcess(2) as pods:
        dead = Listed(pods, packed[0], 1, **memory_for_one).has(0, permutation(0)[:200])
        dead.post(0)
        dead.ask(0)  # by way of pod 0
        assert pods.node(1).planned.jobs[dead.name].taken_bytes > 2_000_000
        pods.kill(0)
        pods.start(0)
        other = Listed(pods, packed[0], 1, **memory_for_one).has(0, permutation(1)[:200])
        other.post(0)
        other.ask(0)
        assert pods.node(1).planned.jobs[other.name].taken_bytes > 2_000_000
        assert other.receipt(0)["exact"]


def test_a_job_waits_until_it_is_known_whether_others_still_have_ranks(
    packed: Packed, memory_for_one: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_use, "GONE_SECONDS", 0.05)
    monkeypatch.setattr(job_use, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(job_table, "GONE_SECONDS", 0.5)
    with PodsInProcess(3) as pods:
        one = Listed(pods, packed[0], 3, **memory_for_one).has(0, *(permutation(0)[:200] for _ in range(3)))
        one.post(0, 2)
        one.ask_for(2, 0, np.arange(100))  # by way of pod 2
        pods.kill(2)
        with pytest.raises(PodBusy, match="whether all of these jobs still run is not known until pod 2 answers"):
            Listed(pods, packed[0], 1, first_pod=1, timeout_seconds=0, **memory_for_one).ranks[0].info()
        pods.start(2)
        one.ask_for(2, 0, np.arange(100, 200))  # it lives, and has told pod 2 of itself
        with pytest.raises(MemoryTooSmall, match="end a job that is not needed"):
            Listed(pods, packed[0], 1, first_pod=1, timeout_seconds=0, **memory_for_one).ranks[0].info()


def test_what_is_no_request_of_such_a_job_is_refused(packed: Packed) -> None:
    with PodsInProcess(1) as pods:
        run = Listed(pods, packed[0], 2)
        rank = run.ranks[0]
        with pytest.raises(InvalidInput, match="order explicit: a request names the sample of each position"):
            rank.batch(0, np.arange(3))
        with pytest.raises(InvalidInput, match=f"there is no sample {NUM_SAMPLES}; the dataset has samples 0 to"):
            rank.batch(0, np.arange(1), np.array([NUM_SAMPLES]))
        with pytest.raises(InvalidInput, match="there is no sample -1"):
            rank.post_list(0, np.array([3, -1]))
        keyed = PlannedDataset(pods, dataset=packed[0], job=new_name()).connection
        assert isinstance(keyed, PlannedRank)
        with pytest.raises(InvalidInput, match="order keyed: a request names positions alone"):
            keyed.batch(0, np.arange(3), np.arange(3))
        with pytest.raises(InvalidInput, match="has an order of its own: it takes no lists"):
            keyed.post_list(0, np.arange(3))
        state = run.datasets[0].state_at(0, 3, 10)
        other = PlannedDataset(pods, dataset=packed[0], job=run.name, order="explicit", world_size=3, rank=0)
        with pytest.raises(InvalidInput, match="saved with world_size 2, and this job has 3: ranks ask by lists of"):
            other.checked_state(state)


def test_a_position_is_named_by_rank_and_place() -> None:
    """Whatever length lists have."""
    dealing = Dealing.of_lists(3)
    assert dealing.positions(2, np.array([0, 1, 10**9])).tolist() == [2, 5, 3 * 10**9 + 2]
    assert [each.tolist() for each in dealing.places(np.array([2, 5, 3 * 10**9 + 1]))] == [[2, 2, 1], [0, 1, 10**9]]
