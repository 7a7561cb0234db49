"""Do the programs in benchmarks/ and examples/ import what there is? Nobody runs them often enough to notice."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest
from tests.end_to_end.doc_pages import ROOT

PROGRAMS = sorted([*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("examples/*.py")])


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_program_imports_of_refill_exists(program: Path) -> None:
    for statement in ast.walk(ast.parse(program.read_text())):
        if isinstance(statement, ast.ImportFrom) and statement.module:
            if statement.module.split(".")[0] not in ("refill", "refill_service", "tests"):
                continue
            module = importlib.import_module(statement.module)
            for name in (alias.name for alias in statement.names):
                is_package = hasattr(module, "__path__")
                there = hasattr(module, name) or (is_package and importlib.util.find_spec(f"{module.__name__}.{name}"))
                assert there, f"{program.name} imports {name} of {statement.module}, which has none"
