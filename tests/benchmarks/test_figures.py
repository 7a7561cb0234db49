"""`make figures`: one benchmark after another, and a page that says what was measured, missed, and what failed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from benchmarks import figures
from benchmarks.bench_list import Bench
from benchmarks.targets import Target, target, targets_in

PAGE = f"# Figures\n\nSome words.\n\n{figures.BEGIN}\n\nNothing yet.\n\n{figures.END}\n\nMore words.\n"


def test_bounds_are_read_as_they_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    target("first batch: round trips", 4.4, at_most=4)
    target("a name that is longer than its column, which has room for seventy-two letters", 61234.5, at_least=60_000)
    target("never", float("nan"), at_least=0.95)
    assert targets_in(capsys.readouterr().out + "what else is reached\n") == [
        Target("first batch: round trips", "4.400", "<= 4", False),
        Target(
            "a name that is longer than its column, which has room for seventy-two letters",
            "61,234.500",
            ">= 60,000",
            True,
        ),
        Target("never", "nan", ">= 0.95", False),
    ]


def test_the_page_has_all_bounds_in_one_table_and_keeps_what_is_around_it(capsys: pytest.CaptureFixture[str]) -> None:
    target("near", 0.5, at_least=0.95)
    printed = capsys.readouterr().out
    sections = {
        "make bench-tls": f"today\n\n```text\n{printed}```",
        "make bench-core": "today\n\n```text\n## no heading\n```",
        "make bench-stalls": f"{figures.FAILED}: it ended with 3. today",
    }
    page = figures.page_with(PAGE, sections)
    assert figures.sections_of(page) == sections
    assert list(figures.sections_of(page)) == ["make bench-core", "make bench-tls", "make bench-stalls"]
    assert page.startswith("# Figures\n\nSome words.")
    assert page.endswith("More words.\n")
    assert "Nothing yet" not in page
    assert "| `make bench-tls` | near | **0.500** | >= 0.95 | missed |" in page
    assert "| `make bench-stalls` | **Failed**: it ended with 3. today | | | |" in page
    assert "No bound is set for: `make bench-core`." in page
    assert figures.page_with(page, figures.sections_of(page)) == page


def test_one_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    benches = (Bench("no_such_program"), Bench("cut_samples", "bench-cuts"), Bench("elsewhere", not_here="peers"))
    monkeypatch.setattr(figures, "BENCHES", benches)
    monkeypatch.setattr(figures, "BUILD", tmp_path)
    monkeypatch.setattr("sys.argv", ["figures", "--smallest"])
    with pytest.raises(SystemExit) as ended:
        figures.main()
    assert ended.value.code == 1
    said = capsys.readouterr().out
    assert "[1 of 2] python benchmarks/smallest.py no_such_program ... **Failed**: it ended with 1." in said
    assert "[2 of 2] python benchmarks/smallest.py cut_samples ... ended well" in said
    sections = figures.sections_of((tmp_path / "figures" / "FIGURES.md").read_text())
    failed, cut = sections.values()
    assert "there is no benchmark 'no_such_program'" in failed
    assert "members=jpg" in cut
    assert "commit " in cut


def test_one_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "endless.py"
    program.write_text("import signal\nprint('begun', flush=True)\nsignal.pause()\n")
    of_benchmarks = os.path.relpath(program.with_suffix(""), figures.ROOT / "benchmarks")
    monkeypatch.setattr(figures, "BENCHES", (Bench(of_benchmarks, minutes=0.05),))
    monkeypatch.setattr(figures, "PAGE", tmp_path / "FIGURES.md")
    monkeypatch.setattr(figures, "BUILD", tmp_path)
    monkeypatch.setattr("sys.argv", ["figures"])
    figures.PAGE.write_text(PAGE)
    with pytest.raises(SystemExit):
        figures.main()
    assert "it took longer than 0.05 minutes" in figures.PAGE.read_text()
