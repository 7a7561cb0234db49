"""What do processes that run tests share? All modules of the tests, imported once, in what they are forked from.

Importing this module where :data:`ASKED` is set looks for the same tests as the command, with the same options, and
runs none. A process that is forked then still makes its own list of tests, half of the work; the modules are there.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest

__all__ = ["ASKED"]

ASKED = "TESTS_ASKED_FOR"
"""A variable with the arguments of pytest, a list in JSON."""
_BEGINS_THREADS: Any = "helm_python"
"""No forked process would have them. Modules of tests that import it at once are imported by each process."""


def _import(arguments: list[str]) -> None:
    """A module that can't be imported is left to the processes that are to run its tests: they say why."""
    sys.modules[_BEGINS_THREADS] = None  # type: ignore[assignment]
    pytest.main([*arguments, "--numprocesses=0", "--collect-only", "--quiet", "--capture=no"])
    del sys.modules[_BEGINS_THREADS]


if (_asked := os.environ.pop(ASKED, None)) is not None:
    _import(json.loads(_asked))
