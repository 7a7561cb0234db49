"""Whatever comes, parsers raise errors of ours: what is kept of earlier searches, mutations of it, and a search by
coverage where atheris is installed (``python -m tests.security.fuzz_parsers``)."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tests.security.parsers import OF_FORMATS, PARSERS, foreign

MUTATIONS = 300
MANY_MUTATIONS = 10_000
SECONDS = 180
"""Of the search by coverage."""
NUMBERS = [0, 1, 2, 0x7F, 0x80, 0xFF]
PIECES = [b"null", b"-1", b"1e999", b'"', b"[", b"{}", b"NaN", b"\xff" * 8, b"\0" * 8, b"99999999999999999999", b"%"]


def mutated(data: bytes, others: list[bytes], draws: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(draws.randint(1, 4)):
        place = draws.randint(0, len(found))
        end = min(len(found), place + draws.choice([1, 1, 2, 8, 64]))
        match draws.randrange(5):
            case 0:
                found[place:end] = bytes(draws.choice(NUMBERS) for _ in range(end - place))
            case 1:
                del found[place:end]
            case 2:
                found[place:place] = draws.choice(PIECES)
            case 3:
                found[place:end] = draws.choice(PIECES)
            case _:
                other = draws.choice(others)
                at = draws.randint(0, len(other))
                found[place:place] = other[at : at + draws.choice([1, 8, 64])]
    return bytes(found)


@pytest.mark.parametrize("name", PARSERS)
def test_what_a_search_begins_with_is_read(name: str) -> None:
    """Else mutations of it are refused for what is wrong with all of them, and try nothing behind that."""
    for data in PARSERS[name].begins():
        PARSERS[name].parse(data)


@pytest.mark.parametrize("name", PARSERS)
def test_what_is_kept_and_mutations_of_it_raise_errors_of_ours(name: str) -> None:
    parser, draws = PARSERS[name], random.Random(name)
    inputs = parser.inputs(name)
    for data in [b"", *inputs]:
        assert (error := foreign(parser, data)) is None, f"{data!r}: {error!r}"
    for _ in range(MUTATIONS):
        data = mutated(draws.choice(inputs), inputs, draws)
        assert (error := foreign(parser, data)) is None, f"{data!r}: {error!r}"


@pytest.mark.slow_attack
@pytest.mark.parametrize("name", OF_FORMATS)
def test_ten_thousand_mutations_of_files_of_each_format(name: str) -> None:
    parser, draws = PARSERS[name], random.Random(f"many {name}")
    inputs = parser.inputs(name)
    for _ in range(MANY_MUTATIONS):
        data = mutated(draws.choice(inputs), inputs, draws)
        assert (error := foreign(parser, data)) is None, f"{data!r}: {error!r}"


@pytest.mark.slow_attack
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
def test_a_search_by_coverage_finds_nothing(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "tests.security.fuzz_parsers", f"-max_total_time={SECONDS}", "-max_len=4096"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"FOUND": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-4000:]
