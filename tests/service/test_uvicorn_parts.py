"""Is uvicorn made as serving/client_protocol.py takes it to be? It overrides parts that are not uvicorn's interface.

When this fails with another version: compare these parts, adapt client_protocol.py, run tests/security and
tests/integration/test_slow_clients.py, and move the bound in pyproject.toml.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

import refill_service.serving.client_protocol as ours

ROOT = Path(__file__).parents[2]

OVERRIDDEN = {
    uvicorn.Server: {
        "main_loop": "(self)",
        "startup": "(self, sockets)",
        "shutdown": "(self, sockets)",
        "capture_signals": "(self)",
    },
    httptools_impl.HttpToolsProtocol: {
        "connection_made": "(self, transport)",
        "connection_lost": "(self, exc)",
        "resume_writing": "(self)",
        "data_received": "(self, data)",
        "on_message_begin": "(self)",
        "on_url": "(self, url)",
        "on_header": "(self, name, value)",
        "on_headers_complete": "(self)",
        "on_body": "(self, body)",
        "on_message_complete": "(self)",
        "on_response_complete": "(self)",
        "send_400_response": "(self, msg)",
        "_start_asgi_task": "(self, cycle, app)",
    },
}
USED = {
    uvicorn.Server: {"config", "server_state", "servers", "started", "should_exit", "force_exit", "on_tick"},
    uvicorn.Config: {"ssl", "host", "port", "backlog", "timeout_keep_alive", "loaded_app"},
    ServerState: {"connections", "default_headers"},
    httptools_impl.HttpToolsProtocol: {
        "access_log",
        "access_logger",
        "config",
        "cycle",
        "flow",
        "headers",
        "logger",
        "parser",
        "pipeline",
        "scope",
        "server_state",
        "timeout_keep_alive",
        "transport",
        "url",
        "pause_writing",
        "eof_received",
    },
    httptools_impl.RequestResponseCycle: {
        "body",
        "disconnected",
        "keep_alive",
        "more_body",
        "response_complete",
        "response_started",
        "scope",
        "waiting_for_100_continue",
    },
    FlowControl: {"read_paused", "pause_reading", "write_paused"},
}


def test_the_installed_version_is_one_that_was_compared() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (bound,) = (found for found in map(Requirement, extras["service"]) if found.name == "uvicorn")
    assert any(each.operator == "<" for each in bound.specifier), "uvicorn's bound is open above"
    assert version("uvicorn") in bound.specifier, f"uvicorn {version('uvicorn')} is installed; {__doc__}"


@pytest.mark.parametrize(
    ("kind", "name", "parameters"),
    [(kind, name, parameters) for kind, parts in OVERRIDDEN.items() for name, parameters in parts.items()],
)
def test_what_is_overridden_is_there_with_these_parameters(kind: type, name: str, parameters: str) -> None:
    found = getattr(kind, name, None)
    assert found is not None, f"uvicorn {version('uvicorn')} has no {kind.__name__}.{name}; {__doc__}"
    has = f"({', '.join(inspect.signature(inspect.unwrap(found)).parameters)})"
    assert has == parameters, f"uvicorn {version('uvicorn')}: {kind.__name__}.{name}{has}; {__doc__}"


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in USED.items() for name in sorted(names)])
def test_what_is_used_is_there(kind: type, name: str) -> None:
    made = inspect.getsource(kind)
    there = hasattr(kind, name) or re.search(rf"\bself\.{name}\b[^=\n]*=", made)
    assert there, f"uvicorn {version('uvicorn')}: {kind.__name__} has no {name}; {__doc__}"


@pytest.mark.parametrize(
    "kind", [(uvicorn.Server, "ClientServer"), (httptools_impl.HttpToolsProtocol, "_LimitedProtocol")]
)
def test_nothing_else_of_uvicorn_is_overridden(kind: tuple[type, str]) -> None:
    """Else the list above says less than it should."""
    theirs, name = kind
    mine: Any = getattr(ours, name)

    class OfEveryClass:
        """Python 3.13 has more names in each."""

    overridden = {each for each in vars(mine) if hasattr(theirs, each) and each not in dir(OfEveryClass)}
    assert overridden == set(OVERRIDDEN[theirs])
