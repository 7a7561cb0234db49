"""The page of `make papers`: what is printed beside the papers' figures agrees with them."""

from __future__ import annotations

from types import ModuleType

import pytest
from benchmarks.papers import coordl, deepio, deli
from benchmarks.papers.page import Row, print_rows


@pytest.mark.parametrize("paper", [deepio, coordl], ids=["DeepIO", "CoorDL"])
def test_what_comes_out_is_what_is_expected(paper: ModuleType) -> None:
    for row in paper.rows():
        tolerance = 0.5 if "blocks" in row.what else 0.015
        assert float(row.got) == pytest.approx(float(row.expected), abs=tolerance), row.what


def test_delis_epoch_by_the_clock() -> None:
    size, threshold, memory, computing, misses, seconds = deli.FETCHED[3]
    found = deli.fetched(size, threshold, memory, computing)
    assert (found.misses, found.run_seconds) == (3 * misses, pytest.approx(seconds))


@pytest.mark.variants("0.25", "0.75")
@pytest.mark.parametrize(("part", "missed"), deli.CACHE_ONLY)
def test_delis_cache_only(part: float, missed: float) -> None:
    assert deli.cache_only(part) == pytest.approx(missed, abs=0.005)


@pytest.mark.parametrize(("seconds", "dollars"), deli.TABLE_2)
def test_machines_of_delis_table_2(seconds: float, dollars: float) -> None:
    assert round(deli.machines(seconds), 2) == dollars


def test_a_row_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows("DELI", [Row("misses", "0.95", "0.953")])
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        [],
        ["DELI"],
        ["expected", "got"],
        ["misses", "0.95", "0.953"],
    ]
