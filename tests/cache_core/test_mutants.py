"""Do the tests of the core find a core that is wrong? Each mutant is one line of it, changed; its tests must fail,
drawn as often as in ``make test-all``."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 280

MUTATED = """
import importlib.util, pathlib, sys, pytest
name, before, after, *tests = sys.argv[1:]
spec = importlib.util.find_spec(name)
text = pathlib.Path(spec.origin).read_text()
sys.modules[name] = module = importlib.util.module_from_spec(spec)
exec(compile(text.replace(before, after), spec.origin, "exec"), module.__dict__)
sys.exit(pytest.main(["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-profile=full", *tests]))
"""


class Mutant(NamedTuple):
    """What is wrong with it, where, and who must find it."""

    what: str
    module: str
    before: str
    after: str
    tests: str


CORE, PROTOCOL = "refill_service.cache_core", "refill.protocol"
CONTRACT = "tests/cache_core/test_policy_contract.py"
SHARES = "tests/cache_core/test_share_memory_faults.py"
MUTANTS = [
    Mutant(
        "a sample that was sent ahead stays in its slot",
        f"{CORE}.policies.redox",
        "        self.memory.slots[locations[chosen]] = EMPTY\n",
        "",
        CONTRACT,
    ),
    Mutant(
        "two are sent ahead out of one slot",
        f"{CORE}.policies.redox",
        "        chosen = chosen[first_of_each(locations[chosen])]\n",
        "",
        CONTRACT,
    ),
    Mutant(
        "misses are not counted",
        f"{CORE}.policies.redox",
        "self.counts.misses += not self._at_hand(read.first, read.end)",
        "self.counts.misses += 0",
        CONTRACT,
    ),
    Mutant(
        "everything is said to be ordered",
        f"{CORE}.policies.interface",
        """so that the memory that is freed from now on is for the next epoch.\"\"\"
        return False""",
        """so that the memory that is freed from now on is for the next epoch.\"\"\"
        return True""",
        CONTRACT,
    ),
    Mutant(
        "who asks again gets another sample",
        f"{CORE}.policies.interface",
        "        self._assigned[asked] = samples + 1\n",
        "        self._assigned[asked] = samples[::-1] + 1\n",
        CONTRACT,
    ),
    Mutant(
        "what was asked for for the last time still counts as held",
        f"{CORE}.planned.share_memory",
        "        self.held_bytes -= int(at.placed.lengths[new[held & last]].sum())\n",
        "",
        SHARES,
    ),
    Mutant(
        "a read whose bytes will not come is not read again",
        f"{CORE}.planned.share_memory",
        "            self._to_be_read(at, read.chunk)\n",
        "",
        SHARES,
    ),
    Mutant(
        "a damaged sample stays in memory",
        f"{CORE}.planned.share_memory",
        "        intact[np.searchsorted(read.samples, damaged)] = False\n",
        "",
        SHARES,
    ),
    Mutant(
        "a position at the end of a round is of the round before",
        f"{PROTOCOL}.weaving",
        "return guess + (positions >= self._starts[guess + 1])",
        "return guess",
        "tests/cache_core/test_epoch_plan.py",
    ),
    Mutant(
        "the last batches are dealt as the others",
        f"{PROTOCOL}.dealing",
        "return np.where(places < whole, found, last) + self.start",
        "return found + self.start",
        "tests/protocol/test_dealing.py",
    ),
    Mutant(
        "spans that touch are not joined",
        f"{PROTOCOL}.position_set",
        "low, high = bisect_left(self._ends, first), bisect_right(self._firsts, end)",
        "low, high = bisect_right(self._ends, first), bisect_left(self._firsts, end)",
        "tests/protocol/test_position_set.py",
    ),
    Mutant(
        "a receipt is exact though a rank's list is not known",
        f"{CORE}.planned.received",
        '"exact": all_known and received == planned',
        '"exact": received == planned',
        "tests/cache_core/test_received.py tests/membership/test_planned_lists.py",
    ),
    Mutant(
        "a dealing that another process has overtaken is not refused",
        f"{CORE}.planned.received",
        "if other != process and abs(now - at) <= _LIVES_SECONDS:",
        "if False:",
        "tests/cache_core/test_received.py",
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.what for mutant in MUTANTS])
def test_what_a_mutant_changes_is_there_once(mutant: Mutant) -> None:
    spec = importlib.util.find_spec(mutant.module)
    assert spec is not None
    assert spec.origin is not None
    found = Path(spec.origin).read_text().count(mutant.before)
    assert found == 1, f"{mutant.module} has {mutant.before!r} {found} times: name what is there now"


@pytest.mark.variant
@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.what for mutant in MUTANTS])
def test_a_mutant_is_found(mutant: Mutant) -> None:
    named = (mutant.module, mutant.before, mutant.after, *mutant.tests.split())
    ran = subprocess.run(
        [sys.executable, "-c", MUTATED, *named], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
    )
    assert ran.returncode == 1, f"{mutant.tests} passes though {mutant.what}:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}"
    assert " failed" in ran.stdout or "FAILED" in ran.stdout, ran.stdout[-2000:]
