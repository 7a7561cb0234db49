"""``refill serve``: every setting of a pod as an option."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    from refill_service.settings import Settings

    parser = commands.add_parser(
        "serve",
        help="run a cache pod",
        description="Run one cache pod. Each option can be set in the environment too, as REFILL_<NAME>.",
        epilog="example: refill serve --port 8000 --memory-bytes 4GiB",
    )
    for name, field in Settings.model_fields.items():
        default = field.default
        shown = "none" if default in ((), "") else default
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            metavar=name.split("_")[-1].upper(),
            help=f"{field.description} (default: {shown}; REFILL_{name.upper()})".replace("%", "%%"),
        )
    parser.set_defaults(func=_run)


def _run(args: argparse.Namespace) -> int:
    from refill_service.serving.serve import serve
    from refill_service.settings import Settings, load_settings

    serve(load_settings(**{name: getattr(args, name) for name in Settings.model_fields}))
    return 0
