"""What every plan promises, judged from outside: by what ``refill plan --dump`` writes, the sizes of samples, and M.

``make test-plans`` draws 10,000 plans for each property.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from refill.protocol.job_spec import JobSpec
from refill.protocol.plan_settings import PlanSettings
from refill_service import cli
from refill_service.cache_core.planned import job_plan
from refill_service.cache_core.planned.epoch_plan import EpochPlan
from refill_service.cache_core.planned.job_orders import JobOrders
from refill_service.cache_core.planned.job_plan import plan_of, with_plan
from refill_service.cache_core.planned.shares import Shares
from refill_service.cache_core.sample_mapping import ChunkLayout


class Drawn(NamedTuple):
    first_sample: np.ndarray
    lengths: np.ndarray
    plan: PlanSettings
    epoch: int

    @property
    def layout(self) -> ChunkLayout:
        largest = int(np.diff(self.first_sample).max())
        return ChunkLayout(self.first_sample, min(self.plan.chunk_size, largest))

    def epoch_plan(self, epoch: int | None = None) -> EpochPlan:
        shares = Shares(self.layout, self.plan.num_shares)
        epoch = self.epoch if epoch is None else epoch
        return EpochPlan(self.plan, shares, self.lengths.__getitem__, epoch, ramped=epoch == 0)


KINDS = ["one size", "log-normal", "alike within a blob", "one in 5,000 huge", "some empty"]


def sizes(kind: str, seed: int, blobs: list[int]) -> np.ndarray:
    """Bytes of samples as datasets have them."""
    draws, n = np.random.default_rng(seed), sum(blobs)
    if kind == "log-normal":
        return draws.lognormal(11, 1, n).astype(np.int64)
    if kind == "alike within a blob":
        return np.repeat(draws.lognormal(11, 1.5, len(blobs)).astype(np.int64), blobs) + draws.integers(0, 99, n)
    if kind == "one in 5,000 huge":
        huge = draws.random(n) < 1 / 5000
        huge[draws.integers(0, n)] |= n > 50  # most datasets that are drawn are smaller than 5,000
        return np.where(huge, 10_000_000, 100_000)
    return draws.integers(0, 3, n) * 1000 if kind == "some empty" else np.ones(n, dtype=np.int64)


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    blobs = draw(
        st.one_of(
            st.lists(st.sampled_from([1, 2, 7]), min_size=1, max_size=3),
            st.lists(st.integers(0, 300), min_size=1, max_size=6).filter(max),
            st.builds(lambda n: [n], st.integers(1000, 6000)),
        )
    )
    lengths = sizes(draw(st.sampled_from(KINDS)), draw(st.integers(0, 999)), blobs)
    total = int(lengths.sum())
    memory = draw(
        st.one_of(st.sampled_from([0, total // 1000, total // 20, total // 10, total // 4, total, 3 * total]))
    )
    plan = PlanSettings(
        "drawn",
        len(lengths),
        draw(st.one_of(st.sampled_from([1, 2, 8, 16, 32, 64, 1000]), st.integers(1, 80))),
        draw(st.one_of(st.just(1), st.integers(1, 40))),
        memory,
        draw(st.integers(1, 80)),
        draw(st.integers(-(2**63), 2**63 - 1)),
    )
    return Drawn(np.concatenate([[0], np.cumsum(blobs)]).astype(np.int64), lengths, plan, draw(st.integers(0, 3)))


def check_memory(order: np.ndarray, of: Drawn, shares: np.ndarray, of_share: np.ndarray) -> None:
    """At every position each share holds what it is planned for at most: its chunks of which a sample has come, whole,
    less what was delivered. Or one chunk alone that is larger.

    :param of_share: ``(samples,)`` the share of each sample; ``shares``: the samples of each, as registration says.
    """
    chunk = np.concatenate(
        [
            first * 2**20 + np.arange(end - first) // of.plan.chunk_size
            for first, end in zip(of.first_sample[:-1].tolist(), of.first_sample[1:].tolist(), strict=True)
        ]
    )
    chunk = np.unique(chunk, return_inverse=True)[1]
    chunk_bytes = np.bincount(chunk, of.lengths).astype(np.int64)
    for number, size in enumerate(shares.tolist()):
        mine = order[of_share[order] == number]
        if not len(mine):
            continue
        assert len(mine) == size
        memory = of.plan.memory_bytes * size // of.plan.num_samples
        delivered = np.cumsum(of.lengths[mine]) - of.lengths[mine]
        chunks, first_use = np.unique(chunk[mine], return_index=True)
        comes = np.zeros(len(mine), dtype=np.int64)
        comes[first_use] = chunk_bytes[chunks]
        held = np.cumsum(comes) - delivered
        allowed = np.full(len(mine), memory)
        if of.epoch == 0:  # memory fills up while it runs
            allowed = np.minimum(memory, memory // 5 + delivered // 4 + 1)
        over = held > np.maximum(allowed, chunk_bytes[chunks].max())
        assert not over.any(), f"share {number} holds {held[over][0]} bytes, and {allowed[over][0]} are planned for"


@given(drawn())
def test_each_sample_comes_once_and_memory_holds_what_was_read(of: Drawn) -> None:
    plan = of.epoch_plan()
    order = plan.whole()
    assert np.sort(order).tolist() == list(range(of.plan.num_samples)), "a sample is missing, or comes twice"
    of_share = plan.shares.share_of(of.layout.locate(np.arange(of.plan.num_samples))[0])
    check_memory(order, of, plan.shares.sizes, of_share)


@given(drawn(), st.integers(0, 2**32 - 1))
def test_the_order_is_the_same_whoever_asks_for_what_first(of: Drawn, seed: int) -> None:
    """Another epoch in between, shares in any order, positions in any order and pieces: nothing is remembered."""
    order = of.epoch_plan().whole()
    draws = np.random.default_rng(seed)
    again = of.epoch_plan()
    of.epoch_plan(of.epoch + 1).samples(np.zeros(1, dtype=np.int64))
    again.of_share(int(draws.integers(0, of.plan.num_shares)))
    positions = draws.permutation(len(order))
    for piece in np.array_split(positions, draws.integers(1, 6)):
        assert again.samples(piece).tolist() == order[piece].tolist()


@given(
    drawn(),
    *(st.tuples(st.integers(0, 2**40), st.integers(1, 64), st.integers(1, 64), st.floats(1, 2**24)) for _ in range(2)),
    st.booleans(),
)
def test_nothing_changes_a_job_that_has_its_plan(
    of: Drawn, begins: tuple[int, int, int, float], later: tuple[int, int, int, float], is_listed: bool
) -> None:
    """Pods resolve what a job leaves open once. Its plan, as requests and states hold it, stands with pods of other
    memory, of another number, and of another version with other defaults."""
    spec = JobSpec(
        "drawn",
        "memory://drawn",
        seed=of.plan.seed,
        chunk_size=of.layout.chunk_size,
        policy="planned",
        order="explicit" if is_listed else "keyed",
    )
    plan = plan_of(with_plan(spec, *begins), "drawn", of.layout)
    sent = json.dumps(plan.to_dict())
    others = {
        name: value * 3 + 1
        for name, value in vars(job_plan).items()
        if isinstance(value, int | float) and name[0] == "_"
    }
    with patch.multiple(job_plan, **others):  # type: ignore[call-overload]
        brought = PlanSettings.from_dict(json.loads(sent))
        settings = dataclasses.replace(spec, policy_settings=brought.policy_settings())
        found = plan_of(with_plan(settings, *later), "drawn", of.layout)
        assert (found, found.plan_id) == (plan, plan.plan_id)
        order = JobOrders(found, of.layout, of.lengths.__getitem__).whole(of.epoch)
    assert order.tolist() == JobOrders(plan, of.layout, of.lengths.__getitem__).whole(of.epoch).tolist()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(st.sampled_from([1, 2, 7, 64]), st.integers(1, 3000)),
    st.one_of(st.sampled_from([1, 8, 64, 5000]), st.integers(1, 100)),
    st.integers(1, 400),
    st.integers(-3, 3),
    st.integers(0, 3),
)
def test_the_file_that_the_command_writes(
    tmp_path: Path, num_samples: int, chunk_size: int, memory: int, seed: int, epoch: int
) -> None:
    """``refill plan --dump``: one share, samples of one size; the same twice."""
    options = {"samples": num_samples, "chunk-size": chunk_size, "memory-samples": memory, "seed": seed, "epoch": epoch}
    arguments = ["plan", *(f"--{name}={value}" for name, value in options.items())]
    arguments += ["--first"] if epoch == 0 else []
    dumps = []
    for name in ("one", "other"):
        assert cli.main([*arguments, f"--dump={tmp_path / name}", "--json"]) == 0
        dumps.append((tmp_path / name).read_bytes())
    assert dumps[0] == dumps[1]
    order = np.array(dumps[0].split(), dtype=np.int64)
    assert np.sort(order).tolist() == list(range(num_samples))
    plan = PlanSettings("drawn", num_samples, chunk_size, 1, memory, seed=seed)
    bounds, ones = np.array([0, num_samples]), np.ones(num_samples, dtype=np.int64)
    check_memory(order, Drawn(bounds, ones, plan, epoch), np.array([num_samples]), ones - 1)
