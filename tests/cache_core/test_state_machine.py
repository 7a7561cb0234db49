"""Pods and ranks of a live job that lose answers, reads and their way in any order, over several epochs: never two
samples for one request, never one sample for two, and in the end every sample.

A schedule is a list of facts: a name of ``FACTS`` and three numbers, which say to whom it happens and how. Whatever was
left out before it, it means something: so a schedule that breaks a promise can be cut down to the few facts that it
takes. It follows from its seed. ``CORE_SCHEDULES=10000`` tries so many in place of a hundred. A failure prints the
fewest facts that repeat it: put them below, beside those that were found so.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import numpy as np
import pytest
from tests.cache_core.job_model import JobModel, Shape
from tests.draws import times

SCHEDULES = int(os.environ.get("CORE_SCHEDULES", times(400)))

Fact = tuple[str, int, int, int]


def drawn_shape(generator: random.Random) -> Shape:
    pick, number = generator.choice, generator.randint
    blobs = tuple(number(1, 16) for _ in range(number(1, 3)))
    return Shape(
        blobs=blobs,
        chunk_size=number(1, min(6, max(blobs))),
        num_pods=number(1, 3),
        num_ranks=number(1, 3),
        policy=pick(["redox", "exact"]),
        num_epochs=number(1, 4),
        window=pick([0, 100]),
        remote_bytes=pick([0, 150, 2000]),
        memory_bytes=pick([700, 3000]),
        drop_last=pick([True, False]),
        seed=number(0, 2**16),
    )


def drawn_facts(generator: random.Random) -> list[Fact]:
    names = generator.choices([*FACTS], [weight for weight, _ in FACTS.values()], k=generator.randint(5, 80))
    return [(name, generator.randrange(64), generator.randrange(64), generator.randrange(64)) for name in names]


def replay(shape: Shape, facts: list[Fact]) -> None:
    """Raises AssertionError when a promise is broken. At the end nothing is lost any more, and all is asked for."""
    model = JobModel(shape)
    for name, *numbers in facts:
        FACTS[name][1](model, *numbers)
        model.check()
    model.deliver_all()
    newest = max(model.epochs)
    for epoch in range(min(model.epochs), newest + 1):
        model.finish_epoch(epoch)
        model.epochs = [max(at, min(epoch + 1, newest)) for at in model.epochs]


def cut_down(shape: Shape, facts: list[Fact], error: BaseException) -> list[Fact]:
    """As few of the facts as break the promise in the same way."""

    def still_fails(fewer: list[Fact]) -> bool:
        try:
            replay(shape, fewer)
        except Exception as found:
            return type(found) is type(error) and str(found)[:20] == str(error)[:20]
        return False

    size = len(facts) // 2
    while size:
        at = 0
        while at < len(facts):
            fewer = facts[:at] + facts[at + size :]
            if still_fails(fewer):
                facts = fewer
            else:
                at += size
        size //= 2
    return facts


def _asks(model: JobModel, who: int, where: int, how: int) -> None:
    """A batch of a rank: of what it lacks, or now and then of what it has had."""
    rank = who % model.spec.world_size
    epoch, size = model.epochs[rank], 1 + how % 7
    missing, length = model.missing(epoch, rank), model.length(epoch, rank)
    if not length:
        return
    if len(missing) and where < 56:
        first = where % len(missing) if where % 4 == 0 else 0
        positions = missing[first : first + size]
    else:
        positions = np.arange(where % length, min(length, where % length + size))
        for position in positions.tolist():  # asked until it is answered
            model.got[epoch].pop((rank, position), None)
    model.ask(rank, positions, cut_off=frozenset([where % 3]) if how >= 56 else frozenset[int]())


def _asks_for_all(model: JobModel, who: int, where: int, how: int) -> None:
    rank = who % model.spec.world_size
    missing = model.missing(model.epochs[rank], rank)
    if len(missing):
        model.ask(rank, missing)


def _enters_next_epoch(model: JobModel, who: int, where: int, how: int) -> None:
    rank = who % model.spec.world_size
    if model.epochs[rank] + 1 < model.shape.num_epochs and not len(model.missing(model.epochs[rank], rank)):
        model.epochs[rank] += 1


def _finishes_epoch(model: JobModel, who: int, where: int, how: int) -> None:
    """It asks for what it lacks, nothing of that is lost, and it goes on to the next."""
    _asks_for_all(model, who, where, how)
    model.deliver_all()
    _enters_next_epoch(model, who, where, how)


def _message_moves(model: JobModel, which: int, where: int, how: int) -> None:
    if model.messages:
        model.message_moves(model.messages[which % len(model.messages)], lost=how < 6)


def _response_arrives(model: JobModel, which: int, where: int, how: int) -> None:
    if model.responses:
        model.response_arrives(model.responses[which % len(model.responses)], lost=how < 10)


def _all_arrives(model: JobModel, who: int, where: int, how: int) -> None:
    model.deliver_all()


def _read_ends(model: JobModel, which: int, where: int, how: int) -> None:
    reading = [pod for pod in model.pods if pod.reading]
    if reading:
        model.read_ends(reading[where % len(reading)], which, fails=how < 10)


def _all_reads_end(model: JobModel, who: int, where: int, how: int) -> None:
    model.all_reads_end()


def _process_is_killed(model: JobModel, who: int, where: int, how: int) -> None:
    """It goes on from the last checkpoint: what it has had up to some position is behind it."""
    rank = who % model.spec.world_size
    missing = model.missing(model.epochs[rank], rank)
    whole = int(missing[0]) if len(missing) else model.length(model.epochs[rank], rank)
    model.asks_again(rank, whole * (how % 4) // 3)


def _other_home(model: JobModel, who: int, where: int, how: int) -> None:
    model.homes[who % model.spec.world_size] = where % model.shape.num_pods


FACTS: dict[str, tuple[int, Callable[[JobModel, int, int, int], None]]] = {
    "asks": (60, _asks),
    "asks for all": (6, _asks_for_all),
    "enters next epoch": (6, _enters_next_epoch),
    "finishes epoch": (10, _finishes_epoch),
    "message moves": (60, _message_moves),
    "response arrives": (30, _response_arrives),
    "all arrives": (8, _all_arrives),
    "read ends": (20, _read_ends),
    "all reads end": (4, _all_reads_end),
    "process is killed": (4, _process_is_killed),
    "other home": (4, _other_home),
}
"""By name: how often it is drawn, and what happens."""


@pytest.mark.timeout(240 if SCHEDULES < 1000 else 7200)
@pytest.mark.parametrize("part", range(4))
def test_schedules(part: int) -> None:
    for seed in range(part, SCHEDULES, 4):
        generator = random.Random(seed)
        shape, facts = drawn_shape(generator), drawn_facts(generator)
        try:
            replay(shape, facts)
        except Exception as error:
            fewest = cut_down(shape, facts, error)
            listed = "\n".join(f"    {fact}," for fact in fewest)
            raise AssertionError(
                f"schedule {seed}: {error}\nreplay(\n    {shape},\n    [\n{listed}\n    ],\n)"
            ) from error


def shape_of(**settings: object) -> Shape:
    usual = {
        "blobs": (13,),
        "chunk_size": 5,
        "num_pods": 3,
        "num_ranks": 3,
        "policy": "redox",
        "num_epochs": 3,
        "window": 100,
        "remote_bytes": 150,
        "memory_bytes": 3000,
        "drop_last": False,
        "seed": 1,
    }
    return Shape(**usual | settings)  # type: ignore[arg-type]


FOUND: dict[str, tuple[Shape, list[Fact]]] = {
    "a pod that nobody had asked in the first epoch opened the second before all ranks had entered the first": (
        shape_of(blobs=(3,), chunk_size=1, policy="exact", window=0, remote_bytes=2000, drop_last=True, seed=37335),
        [("finishes epoch", 50, 34, 29), ("asks", 59, 25, 33)],
    ),
    "a pod that nobody had asked in the first epoch opened the second while ranks were in the first": (
        shape_of(blobs=(4, 3), chunk_size=3, num_ranks=2, window=0, remote_bytes=2000, drop_last=True, seed=63146),
        [("finishes epoch", 33, 9, 13), ("asks", 52, 55, 42), ("asks", 51, 10, 46)],
    ),
}


@pytest.mark.parametrize("what", FOUND)
def test_what_was_found(what: str) -> None:
    replay(*FOUND[what])
