"""Which request is this done for, and where does it spend its time, across pods? An id that goes along, into logs, too;
and OpenTelemetry spans, where somebody collects them.

On when OTEL_EXPORTER_OTLP_ENDPOINT names a collector (``pip install 'refill-cache[tracing]'``); OpenTelemetry's other
variables hold, too (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER ...). A trace goes from pod to pod, and belongs to that of
whoever sends a ``traceparent`` header; a pod that collects nothing passes it on.
"""

from __future__ import annotations

import logging
import os
import random
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING

from opentelemetry.context import attach
from opentelemetry.propagate import extract, inject
from opentelemetry.trace import Span, Tracer

from refill.errors import InvalidInput

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

REQUEST_ID_HEADER = "x-request-id"

_WIRE_NAME = REQUEST_ID_HEADER.encode()
_MAY_BE_LOGGED = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_current: ContextVar[str] = ContextVar("request_id", default="")

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_CARRIED = (b"traceparent", b"tracestate")
_tracer: Tracer | None = None
"""None in place of OpenTelemetry's own that does nothing: a span of that costs 4 us, of which a batch has several."""
_provider: TracerProvider | None = None


def current_request_id() -> str:
    """Empty outside of requests."""
    return _current.get()


def take_request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """That of the headers, or a new one where they have none that may stand in a log; for this task from now on."""
    given = next((value for name, value in headers if name == _WIRE_NAME), b"")
    found = given.decode() if _MAY_BE_LOGGED.fullmatch(given) else f"{random.getrandbits(64):016x}"
    _current.set(found)
    return found


def begin_tracing(ordinal: int) -> None:
    """Raises :class:`InvalidInput` when spans are wanted and OpenTelemetry's SDK is not installed."""
    global _tracer, _provider
    if not any(os.environ.get(name) for name in _ENDPOINTS):
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise InvalidInput(
            f"{_ENDPOINTS[0]} is set, and {error.name} is not installed: pip install 'refill-cache[tracing]', "
            "or unset it"
        ) from error
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)  # a collector that is away is no news every second
    name = os.environ.get("OTEL_SERVICE_NAME", "refill")
    _provider = TracerProvider(resource=Resource.create({"service.name": name, "service.instance.id": str(ordinal)}))
    _provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    _tracer = _provider.get_tracer("refill")


def end_tracing() -> None:
    """Send what is left."""
    if _provider is not None:
        _provider.shutdown()


def span(name: str, **attributes: str | int) -> AbstractContextManager[Span | None]:
    """Around what takes time, within the trace of the request that it is done for."""
    if _tracer is None:
        return nullcontext()
    return _tracer.start_as_current_span(name, attributes={f"refill.{key}": value for key, value in attributes.items()})


def is_traced(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether what is done for a request with these headers belongs to a trace."""
    return _tracer is not None or any(name in _CARRIED for name, _ in headers)


def continue_trace(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """What this task does belongs to the trace that the headers name, if they name one."""
    if carried := {name.decode(): value.decode("latin-1") for name, value in headers if name in _CARRIED}:
        attach(extract(carried))


def trace_headers() -> dict[str, str]:
    """For a request to another pod."""
    carried: dict[str, str] = {}
    inject(carried)
    return carried
