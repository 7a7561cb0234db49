"""What do all workers of one run of the tests import and compile? They are forked from a process that has collected
them once: importing this module does it, with the arguments of the run."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path

import pytest

__all__ = ["VARIABLE"]

VARIABLE = "REFILL_TESTS_COLLECTED"
"""Of the environment: the arguments of pytest, in JSON."""
NOT_HERE = "helm_python"
"""It starts Go's threads, which no forked process has: each worker imports it itself, with the tests that use it."""

if VARIABLE in os.environ:
    sys.path[0] = str(Path(__file__).parents[1])
    sys.modules[NOT_HERE] = None  # type: ignore[assignment]
    # What can't be imported, for this or another reason, is imported by each worker, which says what is wrong.
    with contextlib.redirect_stderr(io.StringIO()):
        pytest.main([*json.loads(os.environ.pop(VARIABLE)), "-n", "0", "--collect-only"])
    del sys.modules[NOT_HERE]
