"""``refill demo``: arguments in, what it needs checked."""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

from refill.errors import InvalidInput

_NEEDED = {"torch": "'refill-cache[torch]'", "PIL": "'refill-cache[torch]'", "sklearn": "scikit-learn"}


def add_commands(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        description="Train a small CNN on handwritten digits, once from files and once through three cache pods, "
        "and print what happened. Needs torch, Pillow and scikit-learn beside the service.",
    )
    parser.add_argument("--epochs", type=int, default=4, help="epochs of each training run (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each epoch in place of a table")
    parser.set_defaults(func=_run)


def _run(args: argparse.Namespace) -> int:
    for module, package in _NEEDED.items():
        if importlib.util.find_spec(module) is None:
            raise InvalidInput(f"the demo needs {module}: pip install {package}")
    from refill_service.demo.run import run

    return run(args.epochs, args.json)
