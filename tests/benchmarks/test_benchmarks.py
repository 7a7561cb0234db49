"""Each benchmark runs, in its smallest form, and prints its rows: two had rotted where nobody looked."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.bench_list import BENCHES, PARTS, Bench, asked_for

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
SECONDS = 280
NOT_HERE = re.compile(r"error: (network namespaces need root|tools are missing)|no network namespaces here")


def smallest(bench: Bench) -> str:
    """What its smallest form prints. Skips where it says that it can't work here."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / "smallest.py"), bench.program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    if bench.needs_root and (why := NOT_HERE.search(done.stderr)):
        pytest.skip(done.stderr[why.start() :].splitlines()[0])
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.variants("start_up", "exact_reads", "decode_rows", "planned_reads")
@pytest.mark.parametrize(
    "bench",
    [pytest.param(each, id=each.program, marks=[pytest.mark.variant] * each.is_long) for each in BENCHES],
)
def test_its_smallest_form_prints_its_rows(bench: Bench) -> None:
    if bench.not_here:
        pytest.skip(bench.not_here)
    printed = smallest(bench)
    assert bench.rows
    for row in bench.rows:
        assert re.search(row, printed, re.MULTILINE), f"no line has {row!r}:\n{printed}"


def test_every_program_and_every_target_is_in_the_list() -> None:
    programs = {path.stem for path in FOLDER.glob("*.py") if '\nif __name__ == "__main__":\n' in path.read_text()}
    assert programs == {each.program for each in BENCHES if "/" not in each.program} | set(PARTS)
    targets = set(re.findall(r"^(bench-[\w-]+|papers):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets == {each.target for each in BENCHES if each.target}


def test_benchmarks_are_asked_for_by_target_or_program() -> None:
    assert [each.program for each in asked_for(["planned", "bench-tls", "exact_reads"])] == [
        "planned_orders",
        "planned_reads",
        "tls_cost",
        "exact_reads",
    ]
    for wrong in ("no-such", ""):
        with pytest.raises(ValueError, match="there is no benchmark"):
            asked_for([wrong])
