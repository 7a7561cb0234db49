"""Each variant is run by ``make test`` after one of a few commits in a row."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from tests import variants

NUM_SLICES = 4

TESTS = """
    import pytest

    @pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.variant) for n in range(1, 60))])
    def test_numbers(number): ...

    @pytest.mark.other
    @pytest.mark.variant
    def test_that_is_left_out_for_another_reason(): ...
"""
WORDS = """
    import pytest

    @pytest.mark.variants("1", "b-10", "a b-2")
    @pytest.mark.parametrize("number", [1, 10, 2])
    @pytest.mark.parametrize("letters", ["a b", "c"])
    def test_pairs(letters, number): ...
"""
SETTINGS = """
    [pytest]
    addopts = -m 'not other and not variant'
    markers =
        variant:
        variants:
        other:
"""


class Collected:
    def __init__(self) -> None:
        self.tests: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.tests = [item.name for item in session.items]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(variants, "NUM_SLICES", NUM_SLICES)
    (tmp_path / "pytest.ini").write_text(textwrap.dedent(SETTINGS))
    (tmp_path / "test_few.py").write_text(textwrap.dedent(TESTS))
    return tmp_path


def run(folder: Path, *flags: str) -> list[str]:
    """The names of tests that are run with these flags."""
    collected = Collected()
    common = ["--collect-only", "-s", "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:xdist"]
    pytest.main([*common, "-p", "tests.variants", *flags, str(folder)], plugins=[collected])
    return collected.tests


def test_every_variant_is_in_exactly_one_slice(folder: Path) -> None:
    slices = [run(folder, f"--variants-slice={number}") for number in range(NUM_SLICES)]
    assert all(tests[0] == "test_numbers[0]" for tests in slices), "what is no variant is run each time"
    found = [name for tests in slices for name in tests[1:]]
    assert sorted(found) == sorted(f"test_numbers[{number}]" for number in range(1, 60))
    assert all(len(tests) > 1 for tests in slices)


def test_without_the_option_none_is_run(folder: Path) -> None:
    assert run(folder) == ["test_numbers[0]"]


def test_the_next_one_is_a_slice_that_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tests = run(folder, "--variants-slice=next")
    said = capsys.readouterr().out
    [number] = [number for number in range(NUM_SLICES) if f"(again: make test VARIANTS={number})" in said]
    assert run(folder, f"--variants-slice={number}") == tests


def test_parameters_are_variants_by_words_of_their_ids(folder: Path) -> None:
    """Whole words between hyphens: 1 is not in 10."""
    (folder / "test_few.py").rename(folder / "test_words.py").write_text(textwrap.dedent(WORDS))
    assert run(folder) == ["test_pairs[a b-10]", "test_pairs[c-10]", "test_pairs[c-2]"]
