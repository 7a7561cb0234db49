"""Pods and ranks of a job that lose answers, memory, journals and each other in any order, over several epochs,
restarts and moves: never two samples for one request, never one sample for two, and in the end every sample. What
nobody can know is said to be unknown.

A schedule follows from its seed. ``CORE_SCHEDULES=10000`` tries so many in place of some hundreds. A failure prints the
fewest facts that repeat it: put them below, beside those that were found so.
"""

from __future__ import annotations

import os
import random

import pytest
from tests.cache_core.pod_model import Shape
from tests.cache_core.schedules import Fact, cut_down, drawn_facts, drawn_shape, replay

SCHEDULES = int(os.environ.get("CORE_SCHEDULES", "400"))


@pytest.mark.timeout(240 if SCHEDULES < 1000 else 7200)
@pytest.mark.parametrize("part", range(4))
def test_schedules(part: int) -> None:
    receipts = 0
    for seed in range(part, SCHEDULES, 4):
        generator = random.Random(seed)
        shape, facts = drawn_shape(generator), drawn_facts(generator)
        try:
            receipts += replay(shape, facts).num_receipts
        except Exception as error:
            fewest = cut_down(shape, facts, error)
            listed = "\n".join(f"    {fact}," for fact in fewest)
            raise AssertionError(
                f"schedule {seed}: {error}\nreplay(\n    {shape},\n    [\n{listed}\n    ],\n)"
            ) from error
    assert receipts > SCHEDULES // 8, "schedules end before there is a receipt to hold against what came"


def shape_of(**settings: object) -> Shape:
    usual = {
        "blobs": (13,),
        "chunk_size": 5,
        "num_pods": 3,
        "num_ranks": 3,
        "policy": "drain",
        "num_epochs": 3,
        "journals": True,
        "window": 100,
        "remote_bytes": 150,
        "memory_bytes": 3000,
        "drop_last": False,
        "seed": 1,
    }
    return Shape(**usual | settings)  # type: ignore[arg-type]


# Where the client was wrong and not the core, its tests have it, too (tests/client/test_delivery_record_*.py).
FOUND: dict[str, tuple[Shape, list[Fact]]] = {
    "a pod that nobody had asked in the first epoch opened the second before all ranks had entered the first": (
        shape_of(blobs=(3,), chunk_size=1, policy="exact", window=0, remote_bytes=2000, drop_last=True, seed=37335),
        [("finishes epoch", 50, 34, 29), ("asks", 59, 25, 33)],
    ),
    "a pod that nobody had asked in the first epoch opened the second while ranks were in the first": (
        shape_of(blobs=(4, 3), chunk_size=3, num_ranks=2, window=0, remote_bytes=2000, drop_last=True, seed=63146),
        [("finishes epoch", 33, 9, 13), ("asks", 52, 55, 42), ("asks", 51, 10, 46)],
    ),
    "a process that began with the second epoch said that it knew all of the first, which another one had had": (
        shape_of(blobs=(2, 11, 13), chunk_size=1, policy="exact", num_epochs=2, memory_bytes=700, seed=59565),
        [
            ("finishes epoch", 38, 41, 62),
            ("process is killed", 8, 46, 4),
            ("asks", 62, 33, 57),
            ("asks for all", 18, 43, 8),
            ("all pods are replaced", 46, 46, 1),
            ("asks", 34, 44, 48),
            ("message moves", 9, 5, 20),
            ("asks", 50, 1, 36),
            ("finishes epoch", 42, 36, 9),
            ("all pods are replaced", 33, 43, 2),
        ],
    ),
    "policy exact did not recover on a pod that owns nothing, as there are fewer chunks than pods": (
        shape_of(blobs=(6,), chunk_size=3, policy="exact", journals=False, remote_bytes=2000, drop_last=True),
        [("pods are killed", 27, 5, 7), ("asks for all", 58, 42, 61)],
    ),
    "pods that knew nothing any more began with the epoch of a rank that was ahead, and refused the one behind it": (
        shape_of(blobs=(14,), num_pods=1, num_ranks=2, policy="redox", num_epochs=2, journals=False, seed=9044),
        [("finishes epoch", 26, 2, 48), ("all pods are replaced", 62, 47, 60), ("process is killed", 28, 54, 25)],
    ),
    "a pod that was restarted began with the epoch of the one rank that had begun, and refused the others in theirs": (
        shape_of(blobs=(1,), chunk_size=1, num_epochs=2, journals=False, window=0, memory_bytes=700, seed=38970),
        [("asks", 19, 52, 55), ("pods are killed", 2, 15, 46), ("finishes epoch", 1, 0, 30), ("asks", 34, 52, 1)],
    ),
    "a pod went on without a rank that had had all and was gone, and the other one waited for it for ever": (
        shape_of(
            blobs=(8, 3, 11),
            chunk_size=4,
            num_pods=1,
            num_ranks=2,
            policy="redox",
            num_epochs=2,
            journals=False,
            memory_bytes=700,
            drop_last=True,
            seed=9504,
        ),
        [
            ("finishes epoch", 13, 35, 61),
            ("asks for all", 6, 16, 55),
            ("all arrives", 35, 19, 44),
            ("asks for all", 49, 9, 9),
            ("all arrives", 35, 19, 44),
            ("all pods are replaced", 4, 14, 31),
            ("asks", 52, 44, 53),
            ("recovers some", 52, 18, 44),
        ],
    ),
    "a pod killed before any epoch opened, after it had gone on without a rank, did not know that any more": (
        shape_of(
            blobs=(3, 16), chunk_size=2, num_pods=1, num_ranks=1, policy="exact", num_epochs=1, window=0, seed=60541
        ),
        [
            ("asks", 56, 17, 26),
            ("all arrives", 59, 20, 45),
            ("process is killed", 34, 28, 22),
            ("pods are killed", 11, 7, 10),
            ("all recover", 44, 19, 20),
            ("pods are killed", 21, 7, 18),
        ],
    ),
    "a pod opened the epoch after next, in which a rank waited, and refused the other one the next": (
        shape_of(blobs=(13, 1, 2), num_ranks=2, window=0, seed=47051),
        [
            ("asks for all", 10, 25, 53),
            ("finishes epoch", 11, 54, 5),
            ("finishes epoch", 13, 62, 39),
            ("asks for all", 27, 12, 14),
            ("pods are killed", 37, 54, 18),
        ],
    ),
    "of two ranks, the one that had had an epoch was all that was known, and the other was refused in that epoch": (
        shape_of(
            blobs=(2, 8, 7), num_pods=1, policy="redox", journals=False, remote_bytes=150, memory_bytes=3000, seed=39646
        ),
        [
            ("finishes epoch", 40, 32, 29),
            ("asks for all", 38, 31, 55),
            ("asks", 57, 11, 40),
            ("response arrives", 31, 50, 16),
            ("response arrives", 25, 38, 0),
            ("asks", 34, 63, 8),
            ("process is killed", 12, 6, 39),
            ("all arrives", 22, 50, 27),
            ("pods are killed", 53, 45, 29),
        ],
    ),
}


@pytest.mark.parametrize("what", FOUND)
def test_what_was_found(what: str) -> None:
    replay(*FOUND[what])
