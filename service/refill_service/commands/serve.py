"""``refill serve``: every setting of a pod as an option, and how its object store is reached."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import socket
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any, NoReturn

from refill.pods.credentials import VARIABLES
from refill.pods.environment import check_spelling
from refill_service.machine_memory import machine_memory, too_much
from refill_service.object_store.store_settings import StoreSettings
from refill_service.settings import Settings, load_settings

_METAVARS = {
    "access_log": "{true,false}",
    "client_tokens": "PATH",
    "peer_token": "FILE",
    "unix_socket": "PATH",
} | dict.fromkeys(("tls_cert", "tls_key", "peer_tls_cert", "peer_tls_key", "peer_tls_ca"), "FILE")
"""For options whose last word does not say what to give."""
_STORE_OPTIONS = {"endpoint_url": "ENDPOINT_URL", "region": "REGION", "profile": "PROFILE"}


def add_commands(commands: Any) -> None:
    from refill_service.commands.datasets import add_store_options

    parser = commands.add_parser(
        "serve",
        description="Run one pod, or several to try refill on one machine. Each option can also be set as a variable, "
        "REFILL_<NAME>. docs/SETTINGS.md lists them, docs/GLOSSARY.md explains the words.",
        epilog="example: refill serve --port 8000 --memory-bytes 4GiB; on a laptop: refill serve --pods 3",
    )
    parser.add_argument(
        "--pods",
        type=int,
        metavar="N",
        help="run N pods that know each other, reachable from this machine only, which also serve the datasets in this "
        "folder. The ports of pod n are 10 n above --port, --peer-port and --metrics-port (default: one pod)",
    )
    for name, field in Settings.model_fields.items():
        default = field.default
        shown = "none" if default in ((), "") else default
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            metavar=_METAVARS.get(name, name.split("_")[-1].upper()),
            help=f"{field.description} (default: {shown}; REFILL_{name.upper()})".replace("%", "%%"),
        )
    add_store_options(parser)
    parser.set_defaults(func=_run)


def _run(args: argparse.Namespace) -> int:
    for variable in unread_variables(os.environ):
        print(f"refill: warning: refill has no variable {variable}", file=sys.stderr)
    _take_store_options(args)
    given = {name: getattr(args, name) for name in Settings.model_fields}
    if args.pods is not None:
        from refill_service.commands.local_pods import run_local_pods

        return run_local_pods(args.pods, given)
    # Until it serves, too: to a signal that nobody handles, the first process of a container is deaf.
    signal.signal(signal.SIGTERM, _end)
    settings = load_settings(**given)
    if (warning := too_much(settings.memory_bytes, machine_memory())) is not None:
        print(f"refill: warning: {warning}", file=sys.stderr)
    listening = _listening_for_metrics(settings)
    from refill_service.serving.serve import serve

    serve(settings, listening)
    return 0


def _listening_for_metrics(settings: Settings) -> socket.socket | None:
    """Before the imports of a pod, which take most of its start, and seconds on a busy node: a kubelet that asks
    meanwhile waits for the answer, where it would warn of a port that is closed. None: there is none, or it can't be
    had, which the pod says itself."""
    if not settings.metrics_port:
        return None
    from refill_service.serving.listener import listening_on

    try:
        return listening_on(settings.host, settings.metrics_port)
    except OSError:
        return None


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """At once, and by no exception: libraries that are being imported, and finalizers, swallow one, and the pod would
    go on. It has not begun to serve, so there is nothing to clear away."""
    os._exit(0)


def _take_store_options(args: argparse.Namespace) -> None:
    """As variables of refill's own, which come before all others: the pod opens its stores by them, one by one."""
    for option, variable in _STORE_OPTIONS.items():
        if (value := getattr(args, option)) is not None:
            os.environ[f"REFILL_STORE_{variable}"] = value
    if args.no_sign_request:
        os.environ["REFILL_STORE_ANONYMOUS"] = "true"


def unread_variables(names: Iterable[str]) -> list[str]:
    """Those that nobody reads, and that are not like any that is read.

    Raises :class:`InvalidInput` for one that is: it is misspelt.
    """
    known = {f"REFILL_{name.upper()}" for name in Settings.model_fields} | {*VARIABLES}
    known |= {f"REFILL_STORE_{field.name.upper()}" for field in dataclasses.fields(StoreSettings)}
    return check_spelling(list(names), known)
