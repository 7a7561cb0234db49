"""The ``refill`` command. Errors are one line on standard error; exit status 2 for them, 1 for damage found.

It lives in the service package, since all that it does is done there; a training pod needs no command.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from refill.errors import InvalidInput, RefillError

__all__ = ["main", "run"]

_COMMANDS = {
    "pack": "datasets",
    "index": "datasets",
    "inspect": "datasets",
    "serve": "serve",
    "receipt": "receipt",
    "jobs": "jobs",
    "end": "jobs",
    "warm": "warm",
    "top": "top",
    "simulate": "simulate",
    "analyze": "analyze",
    "cost": "cost",
    "plan": "plan",
    "demo": "demo",
}
"""The file of ``commands`` for each, in the order of ``refill --help``. A pod need not import what packs and draws."""

_WITH_STORES = ("pack", "index", "inspect", "analyze", "plan")

_SERVICE = "pip install 'refill-cache[service]'"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        args = _parser(argv).parse_args(argv)
        status: int = args.func(args)
        sys.stdout.flush()
        return status
    except RefillError as error:
        print(f"refill: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("refill", "refill_service"):
            raise
        print(f"refill: {error.name} is not installed; the command needs: {_SERVICE}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("refill: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone, as in `refill inspect ... | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def run() -> NoReturn:
    """The process of one command.

    Those that read or write a store end at once when they are done: threads of its library may still call into Python,
    and an interpreter that is being taken down then aborts.
    """
    status = main()
    if sys.argv[1:2] and sys.argv[1] in _WITH_STORES:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


class _Parser(argparse.ArgumentParser):
    """Refuses in one line, as every other error is said, in place of a page of usage before it."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Of a command, too, which argparse would let leave what it does not know to the whole."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            misspelt = [each.partition("=")[0] for each in unknown if each.startswith("--")]
            near = [name for each in misspelt for name in difflib.get_close_matches(each, options, 1)]
            meant = f" (is {near[0]} meant?)" if near else ""
            self.error(f"unrecognized arguments: {' '.join(misspelt or unknown)}{meant}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        raise InvalidInput(f"{message}; see {self.prog} --help")


def _parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """:param argv: of the command that it names, only what that needs is imported; otherwise everything."""
    from refill import __version__

    parser = _Parser(prog="refill", description="A data cache for model training: every sample exactly once an epoch.")
    parser.add_argument("--version", action="version", version=f"refill {__version__}")
    if argv and not argv[0].startswith("-") and argv[0] not in _COMMANDS:
        near = difflib.get_close_matches(argv[0], _COMMANDS, 1)
        meant = f" (is {near[0]} meant?)" if near else f": there are {', '.join(_COMMANDS)}"
        parser.error(f"there is no command {argv[0]}{meant}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    named = _COMMANDS.get(argv[0]) if argv else None
    for module in [named] if named else dict.fromkeys(_COMMANDS.values()):
        try:
            importlib.import_module(f"refill_service.commands.{module}").add_commands(commands)
        except ModuleNotFoundError:
            if named:
                raise
            for name in (name for name, place in _COMMANDS.items() if place == module):
                commands.add_parser(name, help=f"needs: {_SERVICE}")
    return parser


if __name__ == "__main__":
    run()
