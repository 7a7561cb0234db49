"""How a live job comes to all pods: one run, named by pod 0, however many ask at once, whatever is lost on the way, and
never with two processes of one pod."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.membership.pods_in_process import PodsInProcess
from tests.waiting import until_in_loop

from refill.errors import InvalidInput, JobConflict, JobLost, MemoryTooSmall, NotAllowed, PodUnreachable
from refill.protocol.job_spec import JobSpec
from refill_service.membership.live_jobs import LiveJobs

JOB = "live"


@pytest.fixture
def pods() -> Iterator[PodsInProcess]:
    with PodsInProcess(3) as pods:
        yield pods


@pytest.fixture
def spec(packed: tuple[str, Any]) -> JobSpec:
    return JobSpec(JOB, packed[0], policy="redox", chunk_size=16, memory_bytes=600_000, world_size=2)


def live(pods: PodsInProcess, pod: int) -> LiveJobs:
    return pods.node(pod).live


def register(pods: PodsInProcess, pod: int, spec: JobSpec, incarnation: str = "") -> str:
    found: str = pods.do(live(pods, pod).register(spec, incarnation))["incarnation"]
    return found


def runs_at(pods: PodsInProcess) -> list[str | None]:
    jobs = [pods.node(pod).jobs.get(JOB) for pod in range(pods.num_pods) if pods.nodes[pod]]
    return [None if at_pod is None else at_pod.job.incarnation for at_pod in jobs]


def enters(pods: PodsInProcess, pod: int, epoch: int = 0) -> None:
    pods.do(pods.node(pod).jobs[JOB].home.entry.enter(epoch, 0))


def until_ended(pods: PodsInProcess) -> None:
    async def ended() -> None:
        for pod in range(pods.num_pods):
            ending = pods.node(pod).live.ending
            await until_in_loop(lambda ending=ending: not ending, "the end of runs")  # type: ignore[misc]

    pods.do(ended())


def test_ranks_that_come_at_once_at_all_pods_get_one_run(pods: PodsInProcess, spec: JobSpec) -> None:
    puts = [pods.rule(f"/peer/v1/jobs/{JOB}", to=pod, answer=True, times=0) for pod in range(3)]

    async def all_register() -> set[str]:
        calls = (live(pods, number % 3).register(spec) for number in range(30))
        return {info["incarnation"] for info in await asyncio.gather(*calls)}

    (run,) = pods.do(all_register())
    assert runs_at(pods) == [run] * 3
    assert not any(rule.seen for rule in puts)
    assert register(pods, 2, spec) == run, "and who comes later joins it"
    assert register(pods, 1, spec, run) == run


def test_settings_that_contradict_are_refused_to_one_of_two_that_come_at_once(
    pods: PodsInProcess, spec: JobSpec
) -> None:
    async def both_register() -> list[Any]:
        specs = (spec, replace(spec, seed=7))
        calls = (live(pods, pod).register(each) for pod, each in enumerate(specs, 1))
        return await asyncio.gather(*calls, return_exceptions=True)

    answers = pods.do(both_register())
    (refused,) = [each for each in answers if isinstance(each, BaseException)]
    assert isinstance(refused, JobConflict)
    assert len(set(runs_at(pods))) == 1


@pytest.mark.parametrize("what", ["/begins", f"/jobs/{JOB}"])
@pytest.mark.parametrize("answer", [True, False], ids=["answer", "request"])
def test_what_is_lost_on_the_way_to_a_pod_is_made_good_by_who_comes_again(
    pods: PodsInProcess, spec: JobSpec, what: str, answer: bool
) -> None:
    pods.rule(what, to=2, answer=answer, times=1)
    with pytest.raises(PodUnreachable):
        register(pods, 1, spec)
    run = register(pods, 1, spec)
    assert runs_at(pods) == [run] * 3


def test_the_successor_of_a_pod_does_not_get_the_run(pods: PodsInProcess, spec: JobSpec) -> None:
    """Though pod 0 has it, and nobody has asked for anything: a new one begins at all pods."""
    before = register(pods, 1, spec)
    process = live(pods, 2).process
    pods.kill(2)
    pods.start(2)
    fingerprint = pods.node(0).jobs[JOB].job.info()["fingerprint"]
    with pytest.raises(JobLost, match="pod 2 was restarted"):
        pods.do(live(pods, 2).take_part(spec, before, fingerprint, process))
    assert runs_at(pods) == [before, before, None]
    run = register(pods, 1, spec)
    assert run != before
    assert runs_at(pods) == [run] * 3


@pytest.mark.parametrize("restarted", [0, 1, 2])
def test_a_rank_that_asks_finds_out_that_a_pod_was_restarted_and_all_end_the_run(
    pods: PodsInProcess, spec: JobSpec, restarted: int
) -> None:
    run = register(pods, 0, spec)
    home = 1 if restarted == 0 else 0
    enters(pods, home, epoch=3)
    pods.kill(restarted)
    pods.start(restarted)
    said = (
        rf"job {JOB} is lost: pod {restarted} was restarted, and policy redox .* \(set_epoch\([34]\)\); policy planned"
    )
    with pytest.raises(JobLost, match=said):
        enters(pods, home, epoch=4) if restarted else pods.do(live(pods, 0).register(spec, run))
    until_ended(pods)
    assert runs_at(pods) == [None] * 3
    for pod in {0, 1, 2} - {restarted}:
        with pytest.raises(JobLost, match=said):
            register(pods, pod, spec, run)
    fresh = register(pods, 2, spec)
    assert runs_at(pods) == [fresh] * 3


def test_a_run_that_a_pod_has_not_is_ended_where_it_is(pods: PodsInProcess, spec: JobSpec) -> None:
    run = register(pods, 0, spec)
    pods.kill(1)
    pods.start(1)
    with pytest.raises(JobLost, match="pod 1 was restarted"):
        register(pods, 1, spec, run)
    until_ended(pods)
    assert runs_at(pods) == [None] * 3


def test_an_earlier_run_is_no_reason_to_end_the_next(pods: PodsInProcess, spec: JobSpec) -> None:
    before = register(pods, 0, spec)
    assert pods.do(pods.node(1).end(JOB, ""))
    run = register(pods, 0, spec)
    for pod in range(3):
        with pytest.raises(JobLost, match="was ended"):
            register(pods, pod, spec, before)
        with pytest.raises(JobLost, match="another run of it has begun"):
            register(pods, pod, spec, "made up")
    until_ended(pods)
    assert runs_at(pods) == [run] * 3


def test_a_run_that_ends_while_others_join_it_is_followed_by_another(pods: PodsInProcess, spec: JobSpec) -> None:
    before = register(pods, 0, spec)
    held = pods.event()
    rule = pods.rule(f"/jobs/{JOB}", to=2, held=held, times=1)

    async def end_meanwhile() -> dict[str, Any]:
        registering = asyncio.create_task(live(pods, 1).register(spec))
        await until_in_loop(lambda: bool(rule.seen), "the request that is held")
        await pods.node(0).table.remove(JOB)
        held.set()
        return await registering

    run = pods.do(end_meanwhile())["incarnation"]
    assert run != before
    assert runs_at(pods) == [run] * 3


def test_a_name_that_another_team_has_is_not_given_away_when_pod_0_has_forgotten_it(
    pods: PodsInProcess, spec: JobSpec
) -> None:
    run = register(pods, 1, replace(spec, holder="speech"))
    pods.kill(0)
    pods.start(0)
    for pod in range(3):
        with pytest.raises(NotAllowed):
            register(pods, pod, replace(spec, holder="vision"))
    assert runs_at(pods) == [None, run, run], "nothing of it was ended"
    fresh = register(pods, 2, replace(spec, holder="speech"))
    assert runs_at(pods) == [fresh] * 3


def test_a_planned_job_is_not_ended_by_a_live_one_of_its_name(pods: PodsInProcess, spec: JobSpec) -> None:
    planned = replace(spec, policy="planned", memory_bytes=0)
    pods.do(pods.node(1).planned.register(planned, None, begun=False, again=False))
    pods.kill(0)
    pods.start(0)
    with pytest.raises(JobConflict, match="runs with policy planned, and you ask for redox"):
        register(pods, 2, spec)
    assert runs_at(pods) == [None] * 3
    assert all(JOB in pods.node(pod).planned.jobs for pod in (1, 2))


def test_what_one_pod_refuses_for_good_is_left_at_none(pods: PodsInProcess, spec: JobSpec) -> None:
    pods.kill(2)
    pods.settings["memory_bytes"] = "1MiB"
    pods.start(2)
    with pytest.raises(MemoryTooSmall, match="pod 2"):
        register(pods, 0, replace(spec, memory_bytes=2_000_000))
    assert runs_at(pods) == [None] * 3


def test_pods_that_were_told_of_other_numbers_of_pods_have_no_job_together(pods: PodsInProcess, spec: JobSpec) -> None:
    headers = {"refill-pods": "4", "content-type": "application/json"}
    status, _, body = pods.do(pods.request("peer", 2, "POST", f"/peer/v1/jobs/{JOB}/begins", b"{}", headers))
    assert status == 503
    assert b"one of 3 and was asked by one of 4" in body


def test_only_pod_0_names_runs(pods: PodsInProcess, spec: JobSpec) -> None:
    with pytest.raises(InvalidInput, match="pod 0 does"):
        pods.do(live(pods, 1).lead(spec))


def test_an_idle_job_ends_at_all_pods_and_a_pod_that_is_down_has_it_in_use_perhaps(spec: JobSpec) -> None:
    with PodsInProcess(2, job_idle_seconds=0.2) as pods:
        run = register(pods, 0, spec)
        pods.kill(1)

        async def looks() -> None:
            await asyncio.sleep(0.3)
            await live(pods, 0).remove_idle()

        pods.do(looks())
        assert runs_at(pods) == [run]
        pods.start(1)
        run = register(pods, 0, spec)
        pods.do(looks())
        assert runs_at(pods) == [None, None]
        with pytest.raises(JobLost, match="nobody had asked for it"):
            register(pods, 1, spec, run)
