"""What pods log of requests, in which form, and how a request is followed from pod to pod."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.ordered_cluster import OrderedCluster
from tests.pod_fixtures import rank_of
from tests.waiting import until, until_logged

from refill.protocol.wire_format import BatchRequest
from refill_service.demo.local_cluster import LocalCluster

Packed = tuple[str, dict[str, bytes]]
BATCH = BatchRequest(0, 0, np.arange(60)).encode()


def job_on(packed: Packed) -> dict[str, Any]:
    of_job = {"chunk_size": 16, "memory_bytes": 600_000, "prefetch_window": 0}
    return {"name": "followed", "dataset": packed[0], "policy": "redox"} | of_job


def ask(cluster: LocalCluster, packed: Packed, **headers: str) -> httpx.Response:
    rank_of(cluster, job_on(packed)).info()
    return httpx.post(f"{cluster.pod_urls[0]}/v1/jobs/followed/batch", content=BATCH, headers=headers)


def test_an_id_goes_through_all_pods_into_json_logs(packed: Packed, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"memory_bytes": "4MiB", "log_format": "json", "access_log": "true"}
    with LocalCluster(3, tmp_path, settings) as cluster:
        answer = ask(cluster, packed, **{"X-Request-Id": "from-the-loop.7"})
        assert answer.headers["x-request-id"] == "from-the-loop.7"
        for pod in range(3):
            expected = "client POST /v1/jobs/followed/batch" if pod == 0 else "pod POST /peer/v1/jobs/followed/take"
            until_logged(cluster, pod, expected)
            lines = [json.loads(line) for line in cluster.log(pod).splitlines()]
            of_request = [line for line in lines if line.get("request_id") == "from-the-loop.7"]
            what = [line["message"].split(":")[0] for line in of_request if line["logger"] == "refill.access"]
            assert expected in what
            assert {line["pod"] for line in lines} == {pod}
            assert not any("/readyz" in line["message"] for line in lines), "probes are no news"


@pytest.mark.parametrize("given", ["", "two words", "line\tbreak", "a" * 65, "é"])
def test_an_id_that_may_not_stand_in_a_log_is_replaced(three_pods: LocalCluster, given: str) -> None:
    answer = httpx.get(f"{three_pods.pod_urls[0]}/healthz", headers={"X-Request-Id": given.encode()})
    assert re.fullmatch(r"[0-9a-f]{16}", answer.headers["x-request-id"])


def test_by_default_requests_are_not_logged(three_pods: LocalCluster, packed: Packed) -> None:
    httpx.get(f"{three_pods.pod_urls[0]}/v1/jobs")
    assert "GET /v1/jobs" not in three_pods.log(0)


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Takes what an OpenTelemetry collector takes, over HTTP."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ExportTraceServiceRequest()
            request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
            spans.extend(span for of in request.resource_spans for scope in of.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", spans
        server.shutdown()


def test_a_batch_is_traced_across_pods(packed: Packed, tmp_path: Path) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    with collector() as (endpoint, spans):
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}
        with OrderedCluster(2, tmp_path, {"memory_bytes": "4MiB"}, environment) as cluster:
            ask(cluster, packed, traceparent=f"00-{trace_id}-b7ad6b7169203331-01")
            until(lambda: "batch" in {span.name for span in spans}, "the span of a batch")
            cluster.end()  # the rest of the spans are sent then
        mine = {span.span_id: span for span in spans if span.trace_id.hex() == trace_id}

        def parents(span: Any) -> list[str]:
            parent = mine.get(span.parent_span_id)
            return [] if parent is None else [parent.name, *parents(parent)]

        (batch,) = (span for span in mine.values() if span.name == "batch")
        assert batch.parent_span_id.hex() == "b7ad6b7169203331"
        attributes = {attribute.key: attribute.value for attribute in batch.attributes}
        assert attributes["refill.job"].string_value == "followed"
        assert attributes["refill.positions"].int_value == 60
        at_both = {tuple(parents(span)) for span in mine.values() if span.name == "wait for chunks"}
        assert at_both == {("batch",), ("ask owner", "batch")}
