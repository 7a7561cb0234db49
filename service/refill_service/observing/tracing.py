"""Where does a batch spend its time, across pods? OpenTelemetry spans, where somebody collects them.

On when OTEL_EXPORTER_OTLP_ENDPOINT names a collector (``pip install 'refill-cache[tracing]'``); OpenTelemetry's other
variables hold, too (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER ...). A trace goes from pod to pod, and belongs to that of
whoever sends a ``traceparent`` header.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from refill.errors import InvalidInput

__all__ = ["begin_tracing", "continue_trace", "end_tracing", "span", "trace_headers"]

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_CARRIED = (b"traceparent", b"tracestate")
_tracer: Any = None
_provider: Any = None


def begin_tracing(ordinal: int) -> None:
    """Raises :class:`InvalidInput` when spans are wanted and OpenTelemetry is not installed."""
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


def span(name: str, **attributes: str | int) -> AbstractContextManager[Any]:
    """Around what takes time, within the trace of the request that it is done for."""
    if _tracer is None:
        return nullcontext()
    found: AbstractContextManager[Any] = _tracer.start_as_current_span(
        name, attributes={f"refill.{key}": value for key, value in attributes.items()}
    )
    return found


def continue_trace(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """What this task does belongs to the trace that the headers name."""
    if _tracer is not None:
        from opentelemetry.context import attach
        from opentelemetry.propagate import extract

        attach(extract({name.decode(): value.decode("latin-1") for name, value in headers if name in _CARRIED}))


def trace_headers() -> dict[str, str]:
    """For a request to another pod."""
    carried: dict[str, str] = {}
    if _tracer is not None:
        from opentelemetry.propagate import inject

        inject(carried)
    return carried
