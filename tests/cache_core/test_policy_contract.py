"""What every registered policy keeps to, whatever the order of facts: reads that come late, fail or bring damaged
bytes, memory that shrinks, requests that are asked again, and epochs one after another."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cache_core.one_by_one import ONE_BY_ONE, ONE_BY_ONE_TERMS, registered
from tests.draws import draws

from refill.errors import InvalidInput
from refill.protocol.job_spec import JobSpec
from refill.protocol.policies import POLICIES, PolicyTerms, terms_of
from refill_service.cache_core.epoch_order import KeyedTraces
from refill_service.cache_core.policies import registry
from refill_service.cache_core.policies.interface import (
    NOTHING_CARRIED,
    Answers,
    EpochBegan,
    Orders,
    Policy,
    Read,
)
from refill_service.cache_core.policies.registry import KINDS, new_policy
from refill_service.cache_core.sample_mapping import (
    AbstractMapping,
    ChunkLayout,
    Int64Array,
)

NUM_EPOCHS = 2
NUM_RANKS = 2
FACTS = (
    *("ask", "ask", "ask one", "ask again", "repeat", "repeat"),
    *("arrives", "arrives", "pinned", "fails", "damaged", "memory", "there is time", "there is time"),
)


LIVE = sorted(set(KINDS) - {"planned"})
"""An order that is planned is carried out by no policy."""
FETCHING = replace(KINDS["exact"], name="exact-that-fetches")


def fetching_terms() -> PolicyTerms:
    """Those of ``exact``, with a fetch size if nobody says otherwise."""
    defaults: dict[str, str | int] = {"eviction": "fifo", "fetch_size": 7, "fetch_threshold": 3}
    of_exact = POLICIES["exact"].settings
    return PolicyTerms(
        "for tests", tuple(replace(each, default=defaults.get(each.name, each.default)) for each in of_exact)
    )


@pytest.fixture(params=[*LIVE, FETCHING.name, ONE_BY_ONE.name])
def policy(request: pytest.FixtureRequest) -> Iterator[str]:
    for kind, terms in (
        (ONE_BY_ONE, ONE_BY_ONE_TERMS),
        (FETCHING, fetching_terms()),
    ):
        if request.param == kind.name:
            with registered(kind, terms):
                yield request.param
            return
    yield request.param


@dataclass
class Shell:
    """Carries out what a policy decides for one owner, with bytes that are counted and not kept."""

    seed: int
    policy: str
    blobs: list[int]
    chunk_size: int
    window: int = 0
    calls: list[object] = field(default_factory=list)
    """What came of each fact."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        layout = ChunkLayout(np.concatenate([[0], np.cumsum(self.blobs)]), min(self.chunk_size, max(self.blobs)))
        share = layout.share(0, 1)
        self.mapping = AbstractMapping(share, -(-share.num_chunks // 3))
        self.lengths = np.random.default_rng(self.seed).integers(1, 100, layout.num_samples)
        self.bytes_here: set[int] = set()
        self.carried = NOTHING_CARRIED
        self.epoch = -1
        self.begins()

    def begins(self) -> None:
        """The next epoch."""
        self.epoch += 1
        self.given: dict[int, int] = {}
        """asked -> sample"""
        self.core = self.new_core()
        self.bytes_here &= set(self.carried.samples.tolist())
        self.under_way: list[Read] = []
        self.waiting: set[int] = set()
        """Samples that answers wait for."""
        self.damaged: set[int] = set()
        self.lost: set[int] = set()
        """Samples whose bytes did not come, or were let go of: they are read when they are asked for."""
        self.carry_out(self.core.memory_changed(1500))

    def new_core(self) -> Policy:
        self.traces = KeyedTraces(sum(self.blobs), NUM_RANKS, seed=self.seed, epoch=self.epoch)
        return new_policy(
            self.policy,
            EpochBegan(
                self.mapping,
                self.traces,
                self.lengths,
                prefetch_window=self.window,
                key=f"{self.seed} {self.epoch}",
                settings=terms_of(self.policy).settings_with(self.policy, {}),
                carried=self.carried,
            ),
        )

    def carry_out(self, orders: Orders) -> None:
        self.calls.append(([(r.first, r.end, r.samples.tolist()) for r in orders.reads], orders.drops.tolist()))
        for sample in orders.drops.tolist():
            self.bytes_here.discard(sample)
            self.lost.add(sample)
        starts = self.mapping.share.layout.first_sample
        for read in orders.reads:
            assert 0 <= read.first < read.end <= len(self.lengths), "a read of what the share does not have"
            assert ((read.samples >= read.first) & (read.samples < read.end)).all(), "keeps what it does not read"
            assert (np.diff(read.samples) > 0).all(), "samples of a read are not ascending"
            blobs = np.searchsorted(starts, [read.first, read.end - 1], side="right")
            assert blobs[0] == blobs[1], "a read that reaches over the end of a blob"
            self.under_way.append(read)

    def a_read_ends(self, how: str) -> None:
        if not self.under_way:
            return
        read = self.under_way.pop(self.random.randrange(len(self.under_way)))
        if how == "fails":
            self.lost |= set(read.samples.tolist())
            self.carry_out(self.core.failed(read))
            return
        damaged = read.samples[:1] if how == "damaged" else read.samples[:0]
        self.damaged |= set(damaged.tolist())
        self.bytes_here |= set(read.samples.tolist()) - set(damaged.tolist())
        orders = self.core.arrived(read, damaged, pinned=how == "pinned")
        self.deliver()
        self.carry_out(orders)

    def ask(self, rank: int, positions: Int64Array) -> None:
        asked, repeats = self.traces.asked(rank, positions)
        asked = asked[~repeats]
        if not len(asked):
            return
        before, misses, coming = dict(self.given), self.core.counts.misses, self.coming
        answers: Answers = self.core.requested(rank, asked)
        new = {
            sample
            for request, sample in zip(asked.tolist(), answers.samples.tolist(), strict=True)
            if request not in before
        }
        if new - self.bytes_here - coming - self.damaged - self.lost:
            assert self.core.counts.misses > misses, "a miss that is not counted"
        if new <= self.bytes_here:
            assert self.core.counts.misses == misses, "what is in memory is counted as missed"
        self.calls.append(answers.samples.tolist())
        repeated = np.zeros(len(asked), dtype=bool) if answers.repeated is None else answers.repeated
        assert repeated.tolist() == [sample in before for sample in asked.tolist()], "repeats are not marked as such"
        self.enter(asked, answers.samples)
        self.waiting |= set(answers.samples.tolist())
        self.deliver()
        self.carry_out(answers.orders)
        if self.window:
            below, end = 0, int(positions.max()) + 1
            room = self.random.randrange(400)
            ahead = self.core.send_ahead(rank, asked, end, room, below)
            assert int(self.lengths[ahead.samples].sum()) <= room, "more is sent ahead than there is room for"
            assert set(ahead.samples.tolist()) <= self.bytes_here - self.damaged, "sent ahead what is not here"
            self.enter(self.traces.asked(rank, ahead.positions)[0], ahead.samples)
            stays = self.core.stays(ahead.samples)
            self.bytes_here -= set((ahead.samples if stays is None else ahead.samples[~stays]).tolist())
            self.carry_out(ahead.orders)

    @property
    def coming(self) -> set[int]:
        return {sample for read in self.under_way for sample in read.samples.tolist()}

    def check_all_is_ordered(self) -> None:
        """If the policy says so."""
        if self.core.nothing_left_to_read:
            left = set(range(len(self.lengths))) - set(self.given.values()) - self.bytes_here - self.coming
            assert left <= self.damaged | self.lost, f"everything is said to be ordered, and nobody reads {left}"

    def repeat(self) -> None:
        """Positions repeat some samples. Their bytes are taken as they come: nothing in memory waits for that."""
        samples = np.array(self.random.sample(range(len(self.lengths)), min(3, len(self.lengths))))
        self.carry_out(self.core.repeated(samples))

    def enter(self, asked: Int64Array, samples: Int64Array) -> None:
        for request, sample in zip(asked.tolist(), samples.tolist(), strict=True):
            known = self.given.setdefault(request, sample)
            assert known == sample, f"the request for {request} got sample {known}, asked again {sample}"
        assert len(set(self.given.values())) == len(self.given), "a sample was given to two requests"

    def deliver(self) -> None:
        """What is here leaves with the answers that wait for it."""
        here = np.array(sorted(self.waiting & self.bytes_here), dtype=np.int64)
        self.waiting -= self.bytes_here
        stays = self.core.stays(here)
        self.bytes_here -= set((here if stays is None else here[~stays]).tolist())

    def ends(self) -> None:
        """Every rank asks for all; every read ends."""
        for _ in range(1000):
            if not self.core.may_go_on:
                break
            self.carry_out(self.core.go_on())
        else:
            raise AssertionError("says that it may go on, and does not")
        for rank in range(NUM_RANKS):
            self.ask(rank, np.arange(self.traces.length(rank)))
        while self.under_way:
            self.a_read_ends("arrives")
        assert sorted(self.given) == sorted(self.given.values()) == list(range(sum(self.blobs))), "not each sample once"
        assert self.core.finished
        assert self.core.num_answered == self.core.num_requests == len(self.given)
        here = np.array(sorted(self.bytes_here), dtype=np.int64)
        stays = self.core.stays(here)
        assert stays is None or stays.all(), f"{here[~stays]} stay in memory, and nobody will give them back"
        self.carried = self.core.close()
        assert set(self.carried.samples.tolist()) <= self.bytes_here, "hands on bytes that are not here"


@draws(480)
@given(
    seed=st.integers(0, 2**16),
    blobs=st.lists(st.integers(1, 25), min_size=1, max_size=3),
    chunk_size=st.integers(1, 8),
    window=st.sampled_from([0, 20]),
    facts=st.lists(
        st.sampled_from(FACTS),
        max_size=40,
    ),
)
def exactly_once(policy: str, seed: int, blobs: list[int], chunk_size: int, window: int, facts: list[str]) -> None:
    first, second = (drive(Shell(seed, policy, blobs, chunk_size, window), facts) for _ in range(2))
    assert first.calls == second.calls, "the same seed and the same facts gave other decisions"


def test_exactly_once_whatever_happens(policy: str) -> None:
    exactly_once(policy)


def drive(shell: Shell, facts: list[str]) -> Shell:
    for epoch in range(NUM_EPOCHS):
        if epoch:
            shell.begins()
        counts = shell.core.counts
        before = astuple(counts)
        for fact in facts:
            rank = shell.random.randrange(NUM_RANKS)
            length = shell.traces.length(rank)
            start = shell.random.randrange(length)
            if fact == "ask":
                shell.ask(rank, np.arange(start, min(length, start + shell.random.randint(1, 9))))
            elif fact == "ask one":
                shell.ask(rank, np.array([start]))
            elif fact == "ask again" and shell.given:
                request = shell.random.choice(sorted(shell.given))
                ranks, positions = shell.traces.position_of(np.array([request]))
                shell.ask(int(ranks[0]), positions)
            elif fact == "repeat":
                shell.repeat()
            elif fact == "memory":
                shell.carry_out(shell.core.memory_changed(shell.random.randrange(2000)))
            elif fact == "there is time":
                shell.carry_out(shell.core.go_on())
            elif fact != "ask again":
                shell.a_read_ends(fact)
            after = astuple(counts)
            assert all(now >= then for then, now in zip(before, after, strict=True)), f"a count fell after {fact!r}"
            before = after
            shell.check_all_is_ordered()
        if policy_scores(shell):
            shell.carry_out(shell.core.scored(np.array([0]), np.array([1.0])))
        shell.ends()
    return shell


def policy_scores(shell: Shell) -> bool:
    """Scores of samples are a fact like others."""
    return len(shell.blobs) % 2 == 0


def test_drops_and_what_stays_are_carried_over(policy: str) -> None:
    """Of a policy whose memory outlives epochs, the next epoch begins with what the one before left."""
    if policy != ONE_BY_ONE.name:
        return
    shell = Shell(1, policy, [40], 4)
    shell.ends()
    assert len(shell.carried.samples) == 5
    assert shell.bytes_here == set(shell.carried.samples.tolist()), "drops were not ordered for all else"
    shell.begins()
    position = next(p for p in range(20) if shell.traces.asked(0, np.array([p]))[0][0] in shell.carried.samples)
    shell.ask(0, np.array([position]))
    assert shell.core.counts.misses == 0, "read again what was in memory"


def test_client_and_service_know_the_same_policies() -> None:
    assert sorted(POLICIES) == sorted(KINDS)
    for name, kind in KINDS.items():
        assert kind.name == name
        assert all(chunk_size >= 1 for chunk_size in kind.analysed_chunk_sizes)
        assert 1 <= kind.default_chunk_size(10**6, 3_000, 5, False) <= 5
        assert kind.first_batch_gets(256, 8, 100) >= 1


def test_a_policy_that_one_side_alone_knows_is_named_when_the_service_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(POLICIES, "magic", ONE_BY_ONE_TERMS)
    with pytest.raises(ImportError, match=r"^policy magic: the service has no kind for it$"):
        importlib.reload(registry)
    monkeypatch.delitem(POLICIES, "magic")
    others = {name: terms for name, terms in POLICIES.items() if name != "redox"}
    monkeypatch.setattr("refill.protocol.policies.POLICIES", others)  # one that is put back would come last
    with pytest.raises(ImportError, match=r"^policy redox: refill.protocol.policies does not list it$"):
        importlib.reload(registry)


def test_an_unknown_policy_ends_in_one_line_that_lists_those_known() -> None:
    with pytest.raises(InvalidInput, match=rf"^job setting policy must be {' or '.join(POLICIES)}, got 'magic'$"):
        JobSpec("job", "file:///x", policy="magic")
    with pytest.raises(InvalidInput, match="got 'one-by-one'"):
        JobSpec("job", "file:///x", policy="one-by-one")


def test_settings_of_a_policy_are_checked() -> None:
    with registered(ONE_BY_ONE, ONE_BY_ONE_TERMS):
        spec = JobSpec("job", "file:///x", policy="one-by-one", policy_settings={"most_kept": 7})
        assert spec.settings_of_policy() == {"most_kept": 7}
        assert JobSpec.from_dict(spec.to_dict()) == spec
        assert JobSpec("job", "file:///x", policy="one-by-one").settings_of_policy() == {"most_kept": 5}
        for wrong, says in (
            ({"most_kept": 0}, "setting most_kept of policy one-by-one must be at least 1, got 0"),
            ({"most_kept": "7"}, "must be int, got '7'"),
            ({"least_kept": 1}, "policy one-by-one has no setting 'least_kept'; there are: most_kept"),
        ):
            with pytest.raises(InvalidInput, match=says):
                JobSpec("job", "file:///x", policy="one-by-one", policy_settings=wrong)
    with pytest.raises(InvalidInput, match="policy redox has no setting 'most_kept'; there are: refill"):
        JobSpec("job", "file:///x", policy="redox", policy_settings={"most_kept": 1})
    with pytest.raises(InvalidInput, match="refill is a job setting"):
        JobSpec("job", "file:///x", policy="redox", policy_settings={"refill": "best"})
    assert JobSpec("job", "file:///x", policy="redox", refill="random").settings_of_policy() == {"refill": "random"}


def test_docs_list_every_policy() -> None:
    text = (Path(__file__).parents[2] / "docs" / "PROTOCOL.md").read_text()
    for name in KINDS:
        assert f"Policy `{name}`" in text, f"docs/PROTOCOL.md says nothing of policy {name}"


@pytest.mark.parametrize("policy", ["redox", "exact"])
def test_tables_of_millions_get_their_memory_in_pieces(policy: str) -> None:
    """The first batch would touch them all over, while nobody else has a turn."""
    num_samples = 1 << 22
    mapping = AbstractMapping(ChunkLayout(np.array([0, num_samples]), 64).share(0, 1), 1 << 15)
    lengths, settings = np.ones(num_samples, dtype=np.int64), terms_of(policy).settings_with(policy, {})
    core = new_policy(policy, EpochBegan(mapping, KeyedTraces(num_samples), lengths, settings=settings))
    num_bytes = sum(table.nbytes for table in core.untouched)
    assert num_bytes >= 4 * num_samples
    assert sum(1 for _ in core.touching()) >= num_bytes >> 22
    assert not any(True for _ in core.touching())
    assert core.answered()[0].tolist() == []
