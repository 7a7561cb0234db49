"""The ``refill`` command. Errors are one line on standard error; exit status 2 for them, 1 for damage found.

It lives in the service package, since all that it does is done there; a training pod needs no command.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from refill.errors import InvalidInput, RefillError


@dataclass(frozen=True)
class _Command:
    """What ``refill --help`` says of a command, and where it is."""

    module: str
    """The file of ``commands`` that has it. A pod need not import what packs and draws."""
    summary: str
    """Its line of ``refill --help``, which imports no command."""
    needs_service: bool = True
    """Whether it needs more packages than the distribution alone brings."""


_COMMANDS = {
    "pack": _Command("datasets", "make a dataset of a folder: shuffled WebDataset tars and their index"),
    "index": _Command("datasets", "make the index for files that lie in a bucket already, and stay as they are"),
    "inspect": _Command("datasets", "show what is in a dataset, and check it"),
    "serve": _Command("serve", "run a pod of the cache"),
    "receipt": _Command("receipt", "show whether an epoch delivered every sample exactly once"),
    "jobs": _Command("jobs", "list the jobs: epoch, ranks that are alive, memory, idle time"),
    "end": _Command("jobs", "end a job and free its memory"),
    "warm": _Command("warm", "fill the pods' memory with what a job's epoch begins with"),
    "top": _Command("top", "watch jobs, ranks and pods live in the terminal"),
    "simulate": _Command("simulate", "simulate an epoch, and print its misses and reads"),
    "analyze": _Command(
        "analyze", "compare chunk sizes by what an epoch costs and how well it shuffles, and recommend one"
    ),
    "cost": _Command("cost", "say what a training run costs: requests, storage, machines", needs_service=False),
    "plan": _Command("plan", "write the planned order of an epoch, and say how good it is", needs_service=False),
    "demo": _Command("demo", "train a small model through three pods on this machine"),
}
"""In the order of ``refill --help``."""

_WITH_STORES = ("pack", "index", "inspect", "analyze", "plan")

_SERVICE = "pip install 'refill-cache[service]'"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        args = _parser(list(argv)).parse_args(argv)
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
    except MemoryError as error:
        print(f"refill: there is not enough memory for this: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # of this machine: no room, too many open files
        if argv[:1] == ["serve"] and _is_here():
            raise  # a pod's operator wants to know where
        print(f"refill: {_said(error)}", file=sys.stderr)
        return 2


def _said(error: OSError) -> str:
    if not _is_here():
        return "the folder in which this was started is no more: change to another one"
    where = "" if error.filename is None else f"{error.filename}: "
    return f"{where}{error.strerror or error}"


def _is_here() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True


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


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """:param argv: only the command that it names is imported; it alone can be parsed. The others have their line of
    the help."""
    parser = _Parser(prog="refill", description="A data cache for model training: every sample exactly once an epoch.")
    parser.add_argument("--version", action="version", version=_version() if "--version" in argv[:1] else "")
    is_for_all = argv[:1] in (["-h"], ["--help"])
    named = None if is_for_all else next((word for word in argv if not word.startswith("-")), None)
    if named is not None and named not in _COMMANDS:
        near = difflib.get_close_matches(named, _COMMANDS, 1)
        meant = f" (is {near[0]} meant?)" if near else f": there are {', '.join(_COMMANDS)}"
        parser.error(f"there is no command {named}{meant}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    if named is not None:
        importlib.import_module(f"refill_service.commands.{_COMMANDS[named].module}").add_commands(commands)
        return parser
    without_service = not _is_service_installed()
    for name, command in _COMMANDS.items():
        is_missing = command.needs_service and without_service
        commands.add_parser(name, help=f"needs: {_SERVICE}" if is_missing else command.summary)
    return parser


def _version() -> str:
    from refill.build import version_line

    return version_line()


def _is_service_installed() -> bool:
    """By a package of the extra that nothing else brings; found, and not imported."""
    try:
        return importlib.util.find_spec("granian") is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    run()
