"""A pod's looks for garbage are short, and find all of it in the end."""

from __future__ import annotations

import json
import subprocess
import sys

POD = """
import gc, json, weakref
from refill_service.serving.serve import looked_for_in_pieces

class Thing:
    def __init__(self):
        self.itself = self

was_there = [Thing() for _ in range(150_000)]
looks = []

def see(phase, info):
    if phase == "start" and info["generation"] > 0:
        looks.append(len(gc.get_objects()))

gc.callbacks.append(see)
looked_for_in_pieces()
kept = []
def works(things):
    for number in range(things):
        kept.append(Thing())
        if len(kept) > 5_000:
            kept.pop(0)
works(50_000)
early, rest = [weakref.ref(each) for each in kept], kept
kept = []
rest.clear()
works(2_000_000)
alive = sum(each() is not None for each in early)
print(json.dumps([alive, sorted(looks), gc.get_freeze_count() + len(gc.get_objects())]))
"""


COUNTS = """
import gc, json
from refill_service.serving.serve import looked_for_in_pieces

class Counted:
    calls = 0
    def __call__(self):
        Counted.calls += 1
        return there_are()

there_are, gc.get_freeze_count = gc.get_freeze_count, Counted()
looked_for_in_pieces()
for _ in range(200):
    kept = [[number] for number in range(10_000)]
print(json.dumps([Counted.calls, there_are() > 0]))
"""


def test_what_is_in_use_is_not_counted_one_by_one() -> None:
    """It stops a pod for 10 ms, whenever a hundred thousand objects have come and gone."""
    said = subprocess.run([sys.executable, "-c", COUNTS], check=True, capture_output=True, text=True, timeout=100)
    assert json.loads(said.stdout) == [0, True]


def test_looks_are_at_what_is_new_and_nothing_is_garbage_for_ever() -> None:
    said = subprocess.run([sys.executable, "-c", POD], check=True, capture_output=True, text=True, timeout=100)
    alive, looks, objects = json.loads(said.stdout)
    assert alive == 0, "what became garbage after it had been found in use was never found again"
    assert objects < 1_500_000
    few, all_of_them = [each for each in looks if each < 100_000], [each for each in looks if each >= 150_000]
    assert len(few) > 10 * len(all_of_them) > 0, looks
    assert max(few) < 60_000
