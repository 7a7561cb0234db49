"""What does every benchmark say at this commit? Runs them in turn, and writes docs/FIGURES.md and its plots.

    make figures                                  # hours; as root, for those that need networks of their own
    make figures ONLY='bench-tls client_decode'   # the sections of all others stay as they are
    make figures FIGURES_FLAGS=--smallest         # tries it: smallest forms, whose page is build/figures/FIGURES.md

One that fails, or takes longer than it may, is said in the page, and the next one begins. What each prints while it
runs goes into build/figures/. Ends with 1 where one has failed; a bound that was missed is no failure.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.bench_list import BENCHES, Bench, asked_for
from benchmarks.machine import machine
from benchmarks.targets import targets_in

__all__ = ["main", "page_with", "sections_of"]

ROOT = Path(__file__).parents[1]
PAGE, PLOTS = ROOT / "docs" / "FIGURES.md", ROOT / "docs" / "figures"
BUILD = ROOT / "build"
BEGIN, END = "<!-- made by `make figures`: begin -->", "<!-- made by `make figures`: end -->"
FAILED, LEFT_OUT = "**Failed**", "**Not measured**"
BUSY_CORES = 0.2
"""Of others, from which on figures are not worth writing down."""
MINUTES_OF_SMALLEST = 5.0
ENDS_SECONDS = 30
"""Until a program that was told to end is killed."""
LAST_LINES = 15
"""Of what a program printed that failed."""


class Ended(NamedTuple):
    why_failed: str
    """Empty: it ended well."""
    seconds: float
    printed: str
    errors: str
    """What it wrote to standard error, or where that is nothing, what it printed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="targets of make, or programs")
    parser.add_argument("--smallest", action="store_true", help="the smallest forms, which are no figures")
    args = parser.parse_args()
    try:
        benches = asked_for(args.only) or list(BENCHES)
    except ValueError as error:
        parser.error(str(error))
    page, plots = PAGE, PLOTS
    if args.smallest:
        benches = [each for each in benches if not each.not_here]
        page, plots = BUILD / "figures" / "FIGURES.md", BUILD / "figures"
    page.parent.mkdir(parents=True, exist_ok=True)
    if args.smallest:
        page.write_text(f"# Smallest forms: no figures\n\n{BEGIN}\n{END}\n")
    # Programs that are of one target are run together.
    commands = {_command(each, args.smallest): each for each in benches}
    if not args.smallest and (busy := _busy_cores()) > BUSY_CORES:
        print(f"warning: others keep {busy:.1f} cores of this machine busy; the page will say so", flush=True)
    about = f"{_commit()}, {machine()}"
    have_failed = []
    for number, (command, bench) in enumerate(commands.items(), 1):
        print(f"[{number} of {len(commands)}] {command} ... ", end="", flush=True)
        section, failure = _section(bench, command, about, plots, args.smallest)
        print(failure or _verdict(section), flush=True)
        if failure and not failure.startswith(LEFT_OUT):
            have_failed.append(command)
        text = page.read_text()
        had = sections_of(text)
        if failure.startswith(LEFT_OUT) and command in had:
            continue
        page.write_text(page_with(text, had | {command: section}))
    missed = [each for each in targets_in(page.read_text()) if not each.is_reached]
    named = f": {', '.join(have_failed)}" if have_failed else ""
    print(f"{page}: {len(missed)} bounds missed in it; {len(have_failed)} failed now{named}")
    sys.exit(bool(have_failed))


def sections_of(page: str) -> dict[str, str]:
    """By command, in order: the text below each heading of the part that is made here."""
    made = page[page.index(BEGIN) + len(BEGIN) : page.index(END)]
    found = re.split(r"^## `([^`]+)`\n", made, flags=re.MULTILINE)[1:]
    return {command: text.strip() for command, text in zip(found[::2], found[1::2], strict=True)}


def page_with(page: str, sections: dict[str, str]) -> str:
    """The page anew: all bounds in one table, then the sections as the list has them."""
    order = list(dict.fromkeys(each.command for each in BENCHES))
    names = sorted(sections, key=lambda name: order.index(name) if name in order else len(order))
    bounds, without = [], []
    for name in names:
        first = sections[name].partition("\n")[0]
        found = targets_in(sections[name])
        for each in found:
            value = each.value if each.is_reached else f"**{each.value}**"
            bounds.append(
                f"| `{name}` | {each.what} | {value} | {each.bound} | {'' if each.is_reached else 'missed'} |"
            )
        if first.startswith((FAILED, LEFT_OUT)):
            bounds.append(f"| `{name}` | {first} | | | |")
        elif not found:
            without.append(f"`{name}`")
    table = ["| | figure | measured | has to be | |", "| --- | --- | --- | --- | --- |", *bounds]
    head, tail = page[: page.index(BEGIN)], page[page.index(END) :]
    no_bounds = f"\n\nNo bound is set for: {', '.join(without)}." if without else ""
    made = "\n\n".join(f"## `{name}`\n\n{sections[name]}" for name in names)
    return f"{head}{BEGIN}\n\n" + "\n".join(table) + f"{no_bounds}\n\n{made}\n\n{tail}"


def _command(bench: Bench, is_smallest: bool) -> str:
    return f"python benchmarks/smallest.py {bench.program}" if is_smallest else bench.command


def _section(bench: Bench, command: str, about: str, plots: Path, is_smallest: bool) -> tuple[str, str]:
    """What the page has of it, and why it failed or was left out."""
    if bench.needs_root and os.geteuid() != 0:
        why = f"{LEFT_OUT}: it needs root."
        return why, why
    busy = _busy_cores()
    logs = BUILD / "figures"
    logs.mkdir(parents=True, exist_ok=True)
    drawn = [(logs if is_smallest else BUILD) / name for name in bench.plots]
    for path in drawn:
        path.unlink(missing_ok=True)
    minutes = MINUTES_OF_SMALLEST if is_smallest else bench.minutes
    ended = _run(_argv(bench, command, logs if is_smallest else None), logs / Path(bench.program).name, minutes)
    if not ended.why_failed and (missing := [path.name for path in drawn if not path.exists()]):
        ended = ended._replace(why_failed=f"it wrote no {', '.join(missing)}")
    head = f"{datetime.date.today()}, {about}; others kept {busy:.1f} cores busy before; {ended.seconds:.0f} s."
    if ended.why_failed:
        failure = f"{FAILED}: {ended.why_failed}."
        return f"{failure} {head}\n\n{_fenced(ended.errors.rstrip().splitlines()[-LAST_LINES:])}", failure
    lines = ended.printed.rstrip().splitlines()
    shown = [head, _fenced(lines)]
    if bench.page:
        bounds = [line for line in lines if targets_in(line)]
        shown = [f"{head} It has [a page of its own]({bench.page}).", *([_fenced(bounds)] if bounds else [])]
    for path in drawn:
        if not is_smallest:
            plots.mkdir(exist_ok=True)
            shutil.copy(path, plots)
        shown.append(f"![{path.stem}]({'' if is_smallest else 'figures/'}{path.name})")
    return "\n\n".join(shown), ""


def _argv(bench: Bench, command: str, plots_of_smallest: Path | None) -> list[str]:
    if plots_of_smallest is None and bench.target:
        return ["make", "--silent", bench.target]
    more = [] if plots_of_smallest is None else [str(plots_of_smallest)]
    return [sys.executable, *shlex.split(command)[1:], *more]


def _fenced(lines: list[str]) -> str:
    return "\n".join(["```text", *(line.rstrip().replace("```", "'''") for line in lines), "```"])


def _run(argv: list[str], log: Path, minutes: float) -> Ended:
    """:param log: with .out and .err: what it writes."""
    variables = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    started = time.monotonic()
    out, err = log.with_suffix(".out"), log.with_suffix(".err")
    with out.open("wb") as output, err.open("wb") as errors:
        process = subprocess.Popen(
            argv,
            cwd=ROOT,
            env=variables | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdout=output,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = process.wait(60 * minutes)
            why = f"it ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            why = f"it took longer than {minutes:g} minutes"
        finally:
            _end(process)
    printed, said = (path.read_text(errors="replace") for path in (out, err))
    return Ended(why, time.monotonic() - started, printed, said or printed)


def _end(process: subprocess.Popen[bytes]) -> None:
    """And all that it has started in its group. Told first: networks of its own are taken down then."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(ENDS_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _verdict(section: str) -> str:
    found = targets_in(section)
    missed = sum(not each.is_reached for each in found)
    return f"{len(found) - missed} bounds reached, {missed} missed" if found else "ended well"


def _commit() -> str:
    """What is measured, without the docs, which this changes."""
    commit = _git("rev-parse", "--short=12", "HEAD").strip()
    has_changes = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs").strip()
    return f"commit {commit}{' with changes' if has_changes else ''}" if commit else "no commit"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout


def _busy_cores(seconds: float = 1.0) -> float:
    """How many cores others use now."""
    before = _busy_seconds()
    time.sleep(seconds)
    return (_busy_seconds() - before) / seconds


def _busy_seconds() -> float:
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
