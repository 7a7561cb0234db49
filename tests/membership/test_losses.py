"""Pods that lose their memory, in any order of what is said to them afterwards: exact, or said to be unknown."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.membership.jobs import Packed, spec_of
from tests.membership.pods_in_process import PodsInProcess, Rank, Training
from tests.pod_fixtures import NUM_SAMPLES
from tests.waiting import until

from refill.errors import JobLost, MemoryTooSmall, RankTaken, RecordsWanted, RefillError


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[PodsInProcess]:
    with PodsInProcess(3, tmp_path, journal=False) as pods:
        yield pods


@pytest.mark.parametrize("killed", [[0], [1], [0, 1, 2]], ids=str)
def test_killed_without_journals(packed: Packed, pods: PodsInProcess, killed: list[int]) -> None:
    training = Training(pods, spec_of(packed), NUM_SAMPLES)
    training.all_ask(0, 0, 200)
    pods.kill(*killed)
    pods.start(*killed)
    training.all_ask(0)
    training.check(0)
    training.all_ask(1)
    training.check(1)


def test_an_epoch_apart(packed: Packed, pods: PodsInProcess) -> None:
    """Rank 0 has had all of the next epoch that it may, and asks for the one after, while rank 1 is in the first."""
    training = Training(pods, spec_of(packed, policy="drain", memory_bytes=4_000_000 // 2), NUM_SAMPLES)
    training.all_ask(0, 0, 100)
    training.ask(0, 0)
    training.ask(0, 1)
    training.ranks[0].timeout_seconds = 1
    with pytest.raises(Exception, match="waits for rank 1"):
        training.ask(0, 2)
    pods.kill(1)
    pods.start(1)
    training.ranks[0].timeout_seconds = 30
    training.ask(1, 0)
    training.check(0)
    training.ask(1, 1)
    training.check(1)


def test_who_has_received_nothing_is_not_believed(packed: Packed, pods: PodsInProcess) -> None:
    """After all pods lost their memory, an object that was made to look reports first, as an unused record of the rank:
    then the rank itself, which has received something."""
    training = Training(pods, spec_of(packed), NUM_SAMPLES)
    training.all_ask(0, 0, 300)
    observer = Rank(pods, training.spec, 0)
    observer.info()
    pods.kill(0, 1, 2)
    pods.start(0, 1, 2)
    with pytest.raises(RefillError):
        observer.look_after_home()
    with pytest.raises(RefillError):
        observer.look_after_home()
    training.all_ask(0)
    training.check(0)


@pytest.mark.parametrize("num_pods", [1, 3])
def test_who_looks_for_the_first_time_after_a_loss_is_not_in_the_way(
    packed: Packed, tmp_path: Path, num_pods: int
) -> None:
    """Pods have lost all that they knew, and a notebook registers the job before a rank brings it back."""
    with PodsInProcess(num_pods, tmp_path, journal=False) as pods:
        training = Training(pods, spec_of(packed), NUM_SAMPLES)
        training.all_ask(0, 0, 300)
        pods.kill(*range(num_pods))
        pods.start(*range(num_pods))
        observer = Rank(pods, training.spec, 0, process=2)
        observer.is_rank = False
        observer.info()
        training.all_ask(0)
        training.check(0)
        late = Rank(pods, training.spec, 1, process=3)
        late.is_rank = False
        assert late.info()["incarnation"] == training.ranks[0].info()["incarnation"]


@pytest.mark.parametrize(("before", "now"), [(3, 2), (2, 3), (2, 1)])
@pytest.mark.parametrize("at", [0, -1], ids=["at pod 0", "at the last pod"])
def test_who_looks_for_the_first_time_after_pods_were_replaced_by_others_is_not_in_the_way(
    packed: Packed, tmp_path: Path, before: int, now: int, at: int
) -> None:
    """What somebody registered who only looks was taken for another job, and all ranks were refused."""
    with PodsInProcess(before, tmp_path, journal=False) as pods:
        training = Training(pods, spec_of(packed), NUM_SAMPLES)
        training.all_ask(0, 0, 300)
        pods.scale(now)
        observer = Rank(pods, training.spec, 0, process=2)
        observer.is_rank = False
        observer._pods.service_url = pods.pod_urls[at]
        observer.info()
        training.all_ask(0, 300)
        training.check(0)


def test_who_has_begun_is_not_replaced_by_a_rank_of_before(packed: Packed, tmp_path: Path) -> None:
    """Pods have lost all that they knew, and another run of that name has received samples at another pod."""
    with PodsInProcess(2, tmp_path, journal=False) as pods:
        before = Training(pods, spec_of(packed), NUM_SAMPLES)
        before.all_ask(0, 0, 100)
        pods.kill(0, 1)
        pods.start(0, 1)
        again = Training(pods, before.spec, NUM_SAMPLES, process=2)
        again.ask(1, 0, 0, 20)
        with pytest.raises(JobLost, match=r"was ended on the pods and started again|was ended or lost by the pods"):
            before.ask(0, 0, 100, 120)
        again.all_ask(0)
        again.check(0)


def test_a_run_that_was_ended_does_not_end_the_next_one(packed: Packed, tmp_path: Path) -> None:
    """A process that is left over of it comes before the next run has asked for anything."""
    with PodsInProcess(2, tmp_path, journal=False) as pods:
        before = Training(pods, spec_of(packed), NUM_SAMPLES)
        before.all_ask(0, 0, 100)
        before.ranks[0].end_job()
        again = Training(pods, before.spec, NUM_SAMPLES, process=2)
        with pytest.raises(JobLost):
            before.ask(0, 0, 100, 120)
        again.all_ask(0)
        again.check(0)


def test_a_twin_that_comes_first_after_a_loss_is_not_the_rank(packed: Packed, pods: PodsInProcess) -> None:
    """A second process of rank 0, refused before, asks again before the rank itself has reported."""
    training = Training(pods, spec_of(packed), NUM_SAMPLES)
    training.all_ask(0, 0, 300)
    twin = Rank(pods, training.spec, 0, process=2, timeout_seconds=1)
    with pytest.raises(RankTaken):
        twin.batch(0, np.arange(20))
    pods.kill(0, 1, 2)
    pods.start(0, 1, 2)
    with pytest.raises(RefillError):
        twin.batch(0, np.arange(300, 320))
    training.all_ask(0)
    training.check(0)
    with pytest.raises(RankTaken):
        twin.batch(0, np.arange(300, 320))


def unknown_ranks(pods: PodsInProcess, job: str) -> list[float]:
    """The metric of each pod."""
    found = []
    for pod in range(pods.num_pods):
        _, _, body = pods.do(pods.request("client", pod, "GET", "/metrics"))
        begins = f'refill_unknown_ranks{{training_job="{job}"'
        line = next(line for line in body.decode().splitlines() if line.startswith(begins))
        found.append(float(line.split()[-1]))
    return found


def test_unknown_stays_unknown_through_later_losses(
    packed: Packed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All pods and rank 1 are lost at once, then pods again and again: what rank 1 had is never said to be missing."""
    with PodsInProcess(2, tmp_path, journal=False, recovery_seconds=1) as pods:
        training = Training(pods, spec_of(packed, policy="drain"), NUM_SAMPLES)
        training.all_ask(0, 0, 100)
        training.ranks[1] = Rank(pods, training.spec, 1, process=2)
        training.ranks[1].info()
        pods.kill(0, 1)
        pods.start(0, 1)
        training.all_ask(0, 100, 200)
        for killed in ([0], [1], [0, 1]):
            training.look()
            assert training.receipt(0)["unknown"] > 0
            assert unknown_ranks(pods, training.spec.name) == [1, 1], "it is not seen while the epoch runs"
            pods.kill(*killed)
            pods.start(*killed)
            training.all_ask(0, 200, 300)
        training.all_ask(0, 200)
        found = training.receipt(0)
        assert (found["unknown"], found["missing"], found["exact"]) == (100, 0, False)
        assert "goes on without rank 1" in caplog.text
        assert "nobody can tell what rank 1 had received in epochs up to 1" in caplog.text
        for epoch in (1, 2, 3, 4):
            training.all_ask(epoch)
        assert unknown_ranks(pods, training.spec.name) == [0, 0], "those epochs are over for good"


@pytest.mark.parametrize("journal", [True, False], ids=["journal", "no journal"])
def test_unknown_is_written_down(packed: Packed, tmp_path: Path, journal: bool) -> None:
    """The only pod loses its memory with a rank; then it is restarted, with its journal or ended in order."""
    with PodsInProcess(1, tmp_path, journal=journal, recovery_seconds=1) as pods:
        training = Training(pods, spec_of(packed), NUM_SAMPLES)
        training.all_ask(0, 0, 100)
        training.ranks[1] = Rank(pods, training.spec, 1, process=2)
        training.ranks[1].info()
        pods.kill(0)
        shutil.rmtree(tmp_path / "journal-0", ignore_errors=True)
        pods.start(0)
        training.all_ask(0, 100, 200)
        training.look()
        pods.end(0)
        pods.start(0)
        training.all_ask(0, 200)
        found = training.receipt(0)
        assert (found["unknown"], found["missing"]) == (100, 0)
        for epoch in (1, 2, 3, 4):
            training.all_ask(epoch)
            training.check(epoch)
        if journal:
            assert training.receipt(0)["unknown"] == 100, "an epoch that is over says something else than before"


@pytest.mark.parametrize("policy", ["drain", "redox"])
def test_what_is_sent_ahead_in_place_of_what_is_unknown_is_unknown(packed: Packed, tmp_path: Path, policy: str) -> None:
    """A loop asks again for a batch it had, and is sent ahead what follows: it had that, too, and never asks for it."""
    with PodsInProcess(2, tmp_path, journal=False, recovery_seconds=1) as pods:
        training = Training(pods, spec_of(packed, policy=policy), NUM_SAMPLES)
        training.all_ask(0, 0, 200)
        shutil.rmtree(training.ranks[1]._record._folder)
        pods.kill(0, 1)
        pods.start(0, 1)
        training.look()
        training.ranks[1].batch(0, np.arange(50))
        assert any(pods.node(pod).jobs[training.spec.name].home.machine.unused_ahead(0) for pod in (0, 1))
        training.all_ask(0, 200)
        found = training.receipt(0)
        assert (found["unknown"], found["missing"]) == (150, 0), "of rank 1, from position 50 on"
        training.all_ask(1)
        training.check(1)


def test_a_pod_that_goes_on_without_a_rank_is_killed_before_any_epoch_opens(packed: Packed, tmp_path: Path) -> None:
    """Its journal would have nothing yet, and would be believed: the receipt said that samples were missing."""
    with PodsInProcess(1, tmp_path, journal=True, recovery_seconds=0.2) as pods:
        training = Training(pods, spec_of(packed, world_size=1), NUM_SAMPLES)
        training.ask(0, 0, 0, 100)
        training.ranks[0] = Rank(pods, training.spec, 0, process=2)
        training.ranks[0].info()
        pods.kill(0)
        shutil.rmtree(tmp_path / "journal-0")
        pods.start(0)
        with pytest.raises(RecordsWanted):
            training.look()
        job = training.spec.name
        until(lambda: not pods.node(0).jobs[job].job.life.recovering, "a pod that goes on without the rank")
        pods.kill(0)
        pods.start(0)
        training.ask(0, 0, 100)
        found = training.receipt(0)
        assert (found["unknown"], found["missing"]) == (100, 0)


def test_an_epoch_that_is_known_in_part_only_is_not_said_to_be_missing(packed: Packed, pods: PodsInProcess) -> None:
    """All have had epoch 0, and left it; rank 0 is two epochs on and keeps nothing of it, rank 1 does."""
    training = Training(pods, spec_of(packed, policy="drain"), NUM_SAMPLES)
    training.all_ask(0)
    training.all_ask(1, 0, 100)
    training.ask(0, 1)
    training.together(lambda: training.ask(0, 2, 0, 40), lambda: training.ask(1, 1, 100, 480))
    pods.kill(0, 1, 2)
    pods.start(0, 1, 2)
    training.look()
    training.ask(1, 1)
    with pytest.raises(RefillError):  # nothing, rather than something wrong
        training.receipt(0)
    training.all_ask(2)
    for epoch in (1, 2):
        training.check(epoch)


@pytest.mark.parametrize("journal", [True, False])
@pytest.mark.parametrize("policy", ["drain", "exact", "redox"])
def test_a_pod_that_comes_back_with_less_memory(
    packed: Packed, tmp_path: Path, journal: bool, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes its jobs up again with what it has. `redox` keeps as many slots as it had: its error says what to do."""
    with PodsInProcess(2, tmp_path, journal=journal) as pods:
        spec = spec_of(packed, memory_bytes=2_000_000, policy=policy)
        training = Training(pods, spec, NUM_SAMPLES, timeout_seconds=60)
        training.all_ask(0, 0, 200)
        pods.kill(1)
        pods._settings["memory_bytes"] = "1MiB"
        pods.start(1)
        if policy == "redox":
            with pytest.raises(MemoryTooSmall, match=r"policy redox .*its memory back, or end the job"):
                training.all_ask(0)
            return
        training.all_ask(0)
        training.check(0)
        training.all_ask(1)
        training.check(1)
        said = [each.getMessage() for each in caplog.records if "2,000,000 bytes" in each.getMessage()]
        assert len(said) == 1, f"it is said once: {said}"
        assert "goes on with 1,048,576" in said[0]


@pytest.mark.parametrize("seed", range(4))
def test_what_was_sent_ahead_to_a_home_that_the_rank_has_left_was_not_delivered(
    packed: Packed, tmp_path: Path, seed: int
) -> None:
    """Its owner may have sent the last sample ahead, which the rank never asks for: it goes on in the next epoch, by
    way of the other pod."""
    with PodsInProcess(2, tmp_path, journal=False) as pods:
        training = Training(pods, spec_of(packed, world_size=1, seed=seed), NUM_SAMPLES)
        training.ask(0, 0, 0, NUM_SAMPLES - 1)
        training.ranks[0]._pods._home = pods.pod_urls[1]
        training.ask(0, 1, 0, 20)

        def is_counted() -> bool:
            found = training.receipt(0)
            return (found["delivered"], found["missing"], found["exact"]) == (NUM_SAMPLES - 1, 1, False)

        until(is_counted, "a receipt that says of the sample that never came that it is missing")


@pytest.mark.parametrize("copied_at", [100, 200, 300])
def test_a_whole_journal_that_was_put_back(
    packed: Packed, tmp_path: Path, copied_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy of all of it, inventories too, which agrees with itself; one of the run before, and of the same run."""
    with PodsInProcess(2, tmp_path, journal=True) as pods:
        training = Training(pods, spec_of(packed), NUM_SAMPLES)
        for first in (0, 100, 200):
            training.all_ask(0, first, first + 100)
            if first + 100 == copied_at:
                shutil.copytree(tmp_path / "journal-1", tmp_path / "earlier")
            if first == 0:
                pods.kill(1)
                pods.start(1)
        pods.kill(1)
        shutil.rmtree(tmp_path / "journal-1")
        shutil.copytree(tmp_path / "earlier", tmp_path / "journal-1")
        pods.start(1)
        training.all_ask(0)
        training.check(0)
        training.all_ask(1)
        training.check(1)
        said = [each.getMessage() for each in caplog.records if "not believed" in each.getMessage()]
        assert len(said) == (copied_at < 300), f"believed only as it was left: {said}"


def test_copies_that_are_put_back_on_all_pods_are_not_found_out(packed: Packed, tmp_path: Path) -> None:
    """As docs/CORRECTNESS.md says. Should pods come to find out, this test is to say how."""
    with PodsInProcess(2, tmp_path, journal=True) as pods:
        training = Training(pods, spec_of(packed), NUM_SAMPLES)
        training.all_ask(0, 0, 100)
        pods.kill(0, 1)
        for pod in (0, 1):
            shutil.copytree(tmp_path / f"journal-{pod}", tmp_path / f"earlier-{pod}")
        pods.start(0, 1)
        training.all_ask(0, 100, 300)
        pods.kill(0, 1)
        for pod in (0, 1):
            shutil.rmtree(tmp_path / f"journal-{pod}")
            shutil.copytree(tmp_path / f"earlier-{pod}", tmp_path / f"journal-{pod}")
        pods.start(0, 1)
        training.all_ask(0, 300)
        found, (never, twice) = training.receipt(0), training.truth(0)
        assert never == twice > 0
        assert found["missing"] > 0, "of what was asked for between the copy and the loss"
        assert (found["exact"], found["duplicates"], found["unknown"]) == (False, 0, 0)


def test_a_process_that_begins_anew_first_after_all_was_lost_begins_another_run(
    packed: Packed, pods: PodsInProcess
) -> None:
    """Nobody can tell it from the first process of a job that is new. A rank that lived on is told so."""
    training = Training(pods, spec_of(packed), NUM_SAMPLES)
    training.all_ask(0, 0, 100)
    pods.kill(0, 1, 2)
    pods.start(0, 1, 2)
    anew = Training(pods, training.spec, NUM_SAMPLES, process=2)
    anew.ask(0, 0, 0, 20)
    with pytest.raises(JobLost, match="registered again since"):
        training.ask(1, 0, 100)
    anew.all_ask(0)
    anew.check(0)
