"""A trace that a request belongs to goes on to other pods, whether this pod collects spans or not."""

from __future__ import annotations

from contextvars import copy_context

import pytest

from refill_service.observing.tracing import continue_trace, span, trace_headers

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def carried_on(headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    def run() -> dict[str, str]:
        continue_trace(headers)
        with span("batch", positions=1):
            return trace_headers()

    return copy_context().run(run)


def test_a_trace_is_passed_on() -> None:
    headers = [(b"host", b"pod"), (b"traceparent", PARENT.encode()), (b"tracestate", b"vendor=1")]
    assert carried_on(headers) == {"traceparent": PARENT, "tracestate": "vendor=1"}


@pytest.mark.parametrize("headers", [[], [(b"traceparent", b"nonsense")], [(b"traceparent", b"\xff\r\n")]])
def test_what_is_no_trace_is_not(headers: list[tuple[bytes, bytes]]) -> None:
    assert carried_on(headers) == {}
