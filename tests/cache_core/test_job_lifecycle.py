"""What becomes of a job: lists of facts, and what is ordered then."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill.errors import InvalidInput, JobLost, PodUnreachable
from refill.protocol.incarnation import is_later, moves_of, next_run
from refill_service.cache_core.job_lifecycle import (
    AskPeers,
    Begin,
    JobLife,
    JournalFound,
    KnownJob,
    Learned,
    Phase,
    Register,
    Restore,
    RunAtPod,
    StartAgain,
    Wait,
    how_to_begin,
    how_to_move,
    how_to_register,
    how_to_start_again,
    newest_known,
)
from refill_service.cache_core.rank_places import RankPlaces

PODS = 3


def life(incarnation: str = "a", begin: Begin | None = None, *, journal_is_whole: bool = False) -> JobLife:
    return JobLife("job", incarnation, RankPlaces(2), begin, journal_is_whole=journal_is_whole)


def ran_before(incarnation: str = "a", *, moving: bool = False) -> JobLife:
    return life(incarnation, Begin(incarnation, from_journal=False, ran_before=True, moving=moving))


def test_a_job_of_which_nobody_has_asked_for_anything_gives_way_to_one_that_runs() -> None:
    asked = life("a")
    asked.ranks.enters(0, 0)
    assert life("a").is_but_a_name_beside("b")
    assert not life("a").is_but_a_name_beside("")
    assert not life("a").is_but_a_name_beside("a.1"), "it is the same job"
    for here in (asked, life("a.1"), ran_before("a")):
        assert not here.is_but_a_name_beside("b"), here.incarnation


@pytest.mark.parametrize(
    ("here", "journal", "brought", "brought_pods", "order"),
    [
        (None, None, None, None, Register.EVERYWHERE),
        (None, None, "a", PODS, Register.HERE_AFTER_ASKING),
        (None, None, "a", PODS + 1, Register.MOVE),
        (None, JournalFound("a.1", PODS), "a.1", PODS, Register.HERE_AFTER_ASKING),
        (None, JournalFound("a.1", PODS, whole=False), "a.1", PODS, Register.MOVE),
        (None, JournalFound("a.1", PODS + 1), "a.1", PODS, Register.MOVE),
        (None, None, "a.1", PODS, Register.MOVE),
        (life("a"), None, None, None, Register.EVERYWHERE),
        (life("a"), None, "a", PODS, Register.EVERYWHERE),
        (life("a"), None, "b", PODS, Register.EVERYWHERE),  # where it is found to be another job
        (life("a"), None, "a.1", PODS, Register.MOVE),
        (life("a.1"), None, "a", PODS + 1, Register.HERE),
        (ran_before("a.1"), None, "a.1", PODS, Register.MOVE),
    ],
)
def test_how_to_register(
    here: JobLife | None, journal: JournalFound | None, brought: str | None, brought_pods: int | None, order: Register
) -> None:
    assert how_to_register(here, journal, PODS, brought, brought_pods) is order


ASKED = AskPeers.WHO_HAS_IT


@pytest.mark.parametrize(
    ("journal", "named", "begun", "leads", "elsewhere", "order"),
    [
        (None, "", False, False, ASKED, Begin("", from_journal=False, ran_before=False)),
        (None, "", False, True, ASKED, AskPeers.WHO_HAS_IT),
        (None, "", False, True, None, Begin("", from_journal=False, ran_before=False)),
        (None, "", False, True, KnownJob("a"), Begin("a", from_journal=False, ran_before=True)),
        (None, "", False, True, KnownJob("a", begun=False), Begin("a", from_journal=False, ran_before=False)),
        (None, "a", False, False, ASKED, Begin("a", from_journal=False, ran_before=False)),
        (None, "a", True, True, ASKED, Begin("a", from_journal=False, ran_before=True)),
        (JournalFound("a", PODS), "", False, True, ASKED, Begin("a", from_journal=True, ran_before=True)),
        (JournalFound("a", PODS), "a", False, False, ASKED, Begin("a", from_journal=True, ran_before=True)),
        (JournalFound("b", PODS), "a", True, False, ASKED, Begin("a", from_journal=False, ran_before=True)),
        (JournalFound("a", 2), "", False, False, ASKED, AskPeers.WHO_HAS_IT),
        (JournalFound("a", 2), "", False, False, KnownJob("a.1"), Begin("a.1", from_journal=False, ran_before=True)),
    ],
)
def test_how_to_begin(
    journal: JournalFound | None,
    named: str,
    begun: bool,
    leads: bool,
    elsewhere: KnownJob | AskPeers | None,
    order: Begin | AskPeers,
) -> None:
    assert how_to_begin("job", journal, PODS, named, begun=begun, names_jobs=leads, elsewhere=elsewhere) == order


@pytest.mark.parametrize("elsewhere", [None, KnownJob("b"), KnownJob("a")])
def test_a_job_of_another_number_of_pods_is_not_guessed(elsewhere: KnownJob | None) -> None:
    with pytest.raises(JobLost, match="ran on 2 pods, and there are 3 now"):
        how_to_begin("job", JournalFound("a", 2), PODS, "", begun=False, names_jobs=False, elsewhere=elsewhere)


@given(
    st.lists(
        st.builds(
            KnownJob,
            incarnation=st.sampled_from(["a", "a.1", "a.2", "b", "b.3"]),
            running=st.booleans(),
            knows=st.booleans(),
        ),
        max_size=3,
    ),
    st.sampled_from([None, JournalFound("a", PODS), JournalFound("a.1", 2), JournalFound("b", PODS)]),
    st.sampled_from(["a", "a.1", "a.3"]),
)
def test_a_move_never_goes_back(elsewhere: list[KnownJob], journal: JournalFound | None, brought: str) -> None:
    """Whoever has the name that comes out of it takes nothing any more that was asked for by an earlier one."""
    try:
        order = how_to_move("job", journal, brought, elsewhere, journal_is_enough=journal == JournalFound("a", PODS))
    except JobLost:
        assert any(each.running and each.incarnation.startswith("b") for each in elsewhere)
        return
    names = [brought, *(each.incarnation for each in elsewhere)] + ([journal.incarnation] if journal else [])
    of_line = [name for name in names if name.startswith("a")]
    assert not any(is_later(name, order.incarnation) for name in of_line)
    if order.moving:
        assert all(is_later(order.incarnation, name) for name in of_line), "two moves under one name"
    else:
        known = [*elsewhere, *([KnownJob("a", knows=True)] if journal == JournalFound("a", PODS) else [])]
        assert any(each.knows and each.incarnation == order.incarnation for each in known), "nobody knows it"


def test_it_waits_for_who_may_know_then_for_ranks_and_not_for_ever() -> None:
    here = ran_before()
    assert here.phase is Phase.RECOVERING
    assert here.next_step(Learned(silent=("pod 1",), unreported=(0, 1), waited_seconds=None), 5) == Wait(("pod 1",))
    assert here.waits_for == "pod 1"
    assert here.next_step(Learned(unreported=(1,), waited_seconds=5), 5) == Wait(("rank 1",))
    assert here.next_step(Learned(unreported=(1,), waited_seconds=5.1), 5) == Restore(without=(1,))
    assert here.next_step(Learned(), 5) == Restore()
    here.restored(complete=False)
    assert not here.lists_all_ranks
    assert here.phase is Phase.NEW
    here.ranks.enters(0, 0)
    assert here.phase is Phase.RUNNING
    here.closed()
    here.restored(complete=True)
    assert here.phase is Phase.CLOSED


def test_who_moves_a_job_does_not_go_on_without_a_rank() -> None:
    here = ran_before("a.1", moving=True)
    assert here.phase is Phase.MOVING
    assert not here.traces_are_final
    assert here.next_step(Learned(unreported=(1,), waited_seconds=1), 5) == Wait(("rank 1",))
    with pytest.raises(JobLost, match="rank 1 did not tell"):
        here.next_step(Learned(unreported=(1,), waited_seconds=6), 5)


def test_who_does_not_know_how_it_was_dealt_waits_for_one_who_will() -> None:
    here = ran_before("a.1")
    unknown = Learned(deal_is_known=False, another_pod_will_recover=True, waited_seconds=100)
    assert here.next_step(unknown, 5) == Wait(("a pod that knows how the epoch was dealt when the job moved",), True)
    with pytest.raises(PodUnreachable, match="no pod knows any more"):
        here.next_step(replace(unknown, another_pod_will_recover=False), 5)


def test_received_by_traces_that_nobody_knows() -> None:
    with pytest.raises(JobLost, match="a trace of epoch 2 is known to nobody"):
        ran_before().next_step(Learned(missing_traces=("a trace of epoch 2",), waited_seconds=6), 5)


def test_silence_is_never_taken_for_knowledge() -> None:
    """Whatever else is known: while a pod or a rank may know better, nothing is restored as if it was all."""
    silences = [(), ("pod 1",)]
    for silent, unreported, gone, missing, waited in itertools.product(
        silences, [(), (1,), (0, 1)], [(), (1,)], [(), ("a trace of epoch 0",)], [None, 0.0, 100.0]
    ):
        facts = Learned(silent, unreported, gone, missing, waited_seconds=waited)
        try:
            step = ran_before().next_step(facts, 5)
        except JobLost:
            assert missing
            assert not silent
            continue
        if isinstance(step, Restore):
            assert not silent
            assert not missing
            assert step.without == unreported, "a rank that did not report counts as one that did"


def test_moves_are_counted_in_the_name() -> None:
    assert life("a.2").moves == moves_of("a.2") == 2


def test_a_job_with_live_ranks_does_not_move_by_a_name_that_nobody_gave_it() -> None:
    known = [KnownJob("line", ranks_alive=1), KnownJob("line")]
    with pytest.raises(InvalidInput, match=r"no pod knows job run as line\.7, and 1 of its ranks"):
        how_to_move("run", None, "line.7", known, journal_is_enough=False)
    moved = [KnownJob("line", ranks_alive=1), KnownJob("line.7")]
    assert how_to_move("run", None, "line.7", moved, journal_is_enough=False).incarnation == "line.7"
    lost = [KnownJob("line", running=False), KnownJob("line")]
    assert how_to_move("run", None, "line.7", lost, journal_is_enough=False).incarnation == "line.8"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), min_size=1, max_size=4), st.booleans())
def test_a_run_is_replaced_only_when_all_of_it_is_done_and_nobody_is_in_it(
    pods: list[tuple[bool, int]], may_wait: bool
) -> None:
    decided = how_to_start_again([RunAtPod(finished, ranks) for finished, ranks in pods], may_wait=may_wait)
    done, in_it = all(finished for finished, _ in pods), sum(ranks for _, ranks in pods)
    assert (decided is StartAgain.NEW_RUN) == (done and not in_it)
    assert (decided is StartAgain.WAIT) == (done and in_it > 0 and may_wait)


@given(st.lists(st.integers(0, 3), max_size=3), st.booleans())
def test_no_new_run_begins_while_a_restarted_pod_has_yet_to_hear_of_its_ranks(ranks: list[int], may_wait: bool) -> None:
    known = [RunAtPod(True, 0, others_may_be=True), *(RunAtPod(True, count) for count in ranks)]
    assert how_to_start_again(known, may_wait=may_wait) is StartAgain.WAIT
    assert how_to_start_again([RunAtPod(False, 0), *known], may_wait=may_wait) is StartAgain.GO_ON


def test_pods_that_missed_something_do_not_say_which_run_goes_on() -> None:
    missed, runs, journal = KnownJob("a"), KnownJob(next_run("a")), KnownJob(next_run("a"), running=False)
    moved = KnownJob(f"{next_run('a')}.1")
    for known in itertools.permutations([missed, journal, runs, KnownJob("a", running=False)]):
        assert newest_known(known) is runs
    assert newest_known([missed, journal]) is journal
    assert newest_known([runs, moved, missed]) is moved
    assert newest_known([]) is None
