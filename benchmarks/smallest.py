"""Does a benchmark still run? Its smallest form, as bench_list.py has it; what it prints are no figures.

``python benchmarks/smallest.py PROGRAM [FOLDER]`` runs it, and writes plots into the folder.
"""

from __future__ import annotations

import importlib
import shlex
import sys
import tempfile
from pathlib import Path

from bench_list import Bench, asked_for


def main() -> None:
    if len(sys.argv) not in (2, 3):
        raise SystemExit(f"usage: {sys.argv[0]} PROGRAM [FOLDER]")
    try:
        bench = asked_for(sys.argv[1:2])[0]
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    if bench.not_here:
        raise SystemExit(f"error: {bench.not_here}")
    with tempfile.TemporaryDirectory(prefix="refill-bench-") as folder:
        run(bench, sys.argv[2] if len(sys.argv) == 3 else folder)


def run(bench: Bench, plots: str) -> None:
    sys.path.append(str(Path(__file__).parents[1]))  # some find others as benchmarks.NAME
    program = importlib.import_module(bench.program)
    for name, value in bench.constants.items():
        had = getattr(program, name)
        setattr(program, name, value(had) if callable(value) else value)
    arguments = shlex.split(bench.smallest.format(plots=shlex.quote(plots)))
    sys.argv = [str(Path(__file__).with_name(f"{bench.program}.py")), *arguments]
    program.main()


if __name__ == "__main__":
    main()
