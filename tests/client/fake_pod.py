"""A pod in one thread: the real HTTP API over samples in memory, with faults to order. Redirects nothing.

Of planned jobs it knows those whose ranks name their samples.
"""

from __future__ import annotations

import json
import socket
import struct
import tarfile
import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qsl

import numpy as np

from refill.errors import EpochEnded, InvalidInput, JobConflict, RefillError, UnknownJob
from refill.protocol.job_spec import JobSpec
from refill.protocol.plan_memory import PlanMemory
from refill.protocol.plan_settings import PLAN_VERSION, WITHIN_CLASSES_VERSION, PlanSettings, is_within_classes
from refill.protocol.wire_format import BatchRequest, Int64Array, encode_frame_head

BLOCK = 512


def tar_range(members: list[tuple[str, bytes]], format: int = tarfile.PAX_FORMAT) -> bytes:
    """Headers and data of members, without the blocks that end an archive."""
    pieces = []
    for name, content in members:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        pieces += [info.tobuf(format), content, bytes(-len(content) % BLOCK)]
    return b"".join(pieces)


def text_samples(count: int) -> list[bytes]:
    """Sample i: key ``d/00i``, ``txt`` its number in words, ``cls`` its number modulo 10."""
    return [tar_range([(f"d/{i:05}.txt", b"sample %d" % i), (f"d/{i:05}.cls", b"%d" % (i % 10))]) for i in range(count)]


@dataclass
class FakePod:
    """``faults`` is a queue, one entry for each data request (batch, samples, trace): what goes wrong with it.

    - ``"drop"``: it is carried out, and the answer lost; ``"cut"``: half of the answer; ``"leave"``: the connection is
      closed after the answer
    - ``"reset"``: the connection breaks instead of an answer; ``"hang"``: no answer until the pod ends
    - ``"garbage"``, ``"swap"``: a wrong frame
    - ``"forget"``: the job is gone; ``"restart"``: it is, and whoever registers it next begins a new run; a
      :class:`RefillError`: that is answered
    - ``None``: nothing
    """

    samples: list[bytes]
    pods: list[str] | None = None
    faults: deque[str | RefillError | None] = field(default_factory=deque)
    url: str = ""
    jobs: dict[str, JobSpec] = field(default_factory=dict)
    incarnation: str = "1"
    plan_ids: dict[str, str] = field(default_factory=dict)
    traces: dict[tuple[str, int, int], Int64Array] = field(default_factory=dict)
    lists: dict[str, dict[str, str]] = field(default_factory=dict)
    """By rank and epoch, the digests of those that came."""
    registered_by: list[str | None] = field(default_factory=list)
    """Of each registration, the incarnation that it named."""
    asked_by: list[str | None] = field(default_factory=list)
    """The same of each batch."""
    requests: list[str] = field(default_factory=list)
    """``METHOD what`` of each request."""
    batches: list[BatchRequest] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    report_error: RefillError | None = None
    parts: dict[str, Any] | None = None
    """What the next rank reads; None: the pod does not know."""
    oldest_epoch: int = 0
    connections: int = 0
    over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, request: str) -> int:
        return Counter(self.requests)[request]

    def trace(self, spec: JobSpec, epoch: int, rank: int) -> Int64Array:
        if spec.order == "explicit":
            if (spec.name, epoch, rank) not in self.traces:
                raise InvalidInput(f"no trace of epoch {epoch} and rank {rank}")
            return self.traces[spec.name, epoch, rank]
        ids = np.arange(len(self.samples))
        if spec.shuffle:
            ids = np.random.default_rng([spec.seed % 2**63, epoch]).permutation(ids)
        ids = np.resize(ids, self.per_rank(spec) * spec.world_size)
        return ids[rank :: spec.world_size]

    def per_rank(self, spec: JobSpec) -> int:
        return (len(self.samples) + (0 if spec.drop_last else spec.world_size - 1)) // spec.world_size

    def register(self, spec: JobSpec, incarnation: str | None = None) -> dict[str, Any]:
        self.registered_by.append(incarnation)
        if incarnation is not None and incarnation != self.incarnation:
            raise spec.lost("pod 0 was restarted")
        known = self.jobs.setdefault(spec.name, spec)
        if differences := known.differences(spec):
            raise JobConflict(f"job {spec.name}: {differences[0]}")
        return {
            "spec": spec.to_dict(),
            "incarnation": self.incarnation,
            "num_samples": len(self.samples),
            "num_blobs": 1,
            "total_bytes": sum(map(len, self.samples)),
            "samples_per_rank": self.per_rank(spec),
            "metadata": {"classes": ["cat", "dog"]},
            "pods": [self.url] if self.pods is None else self.pods,
            "ordinal": 0,
        }

    def register_planned(self, spec: JobSpec, brought: Any) -> dict[str, Any]:
        selection = spec.policy_settings.get("selection", "")
        version = WITHIN_CLASSES_VERSION if is_within_classes(selection) else PLAN_VERSION
        made = PlanSettings(
            "fake", len(self.samples), 4, 1, 1 << 14, seed=spec.seed, selection=selection, version=version
        )
        plan = made if brought is None else PlanSettings.from_dict(brought)
        info = self.register(spec)
        self.plan_ids[spec.name] = plan.plan_id
        memory = PlanMemory(1 << 30, 1 << 14).to_dict()
        about = {"plan": plan.to_dict(), "plan_id": plan.plan_id, "incarnation": plan.plan_id}
        return info | about | {"num_pods": 1, "plan_memory": memory}

    def restart(self) -> None:
        """It forgets jobs: whoever registers one next begins a new run."""
        self.jobs.clear()
        self.incarnation += "0"

    def batch(self, spec: JobSpec, request: BatchRequest) -> bytes:
        with self.lock:
            self.batches.append(request)
        if request.epoch < self.oldest_epoch:
            raise EpochEnded(f"epoch {request.epoch} has ended")
        if request.sample_ids is not None:
            return self.frame(request.positions, request.sample_ids)
        trace = self.trace(spec, request.epoch, request.rank)
        return self.frame(request.positions, trace[request.positions])

    def frame(self, positions: Int64Array, ids: Int64Array) -> bytes:
        return self._frame(positions, ids, [self.samples[sample_id] for sample_id in ids])

    def numbers(self, body: bytes, numbers: Int64Array) -> bytes:
        """Those of the samples between two ids."""
        first, end = np.frombuffer(body, dtype="<i8")
        return self._frame(np.array([-1]), np.array([first]), [numbers[first:end].astype("<i8").tobytes()])

    @staticmethod
    def _frame(positions: Int64Array, ids: Int64Array, payloads: list[bytes]) -> bytes:
        lengths = np.array([len(payload) for payload in payloads], dtype=np.int64)
        return b"".join([encode_frame_head(positions, ids, lengths), *payloads])


@contextmanager
def serving(pod: FakePod) -> Iterator[FakePod]:
    class Handler(_Handler):
        fake = pod

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    pod.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield pod
    finally:
        pod.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Lost(Exception):
    """The connection ends here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    fake: ClassVar[FakePod]

    def setup(self) -> None:
        super().setup()
        with self.fake.lock:
            self.fake.connections += 1

    def handle(self) -> None:
        try:
            super().handle()
        except (_Lost, ConnectionError):
            self.close_connection = True

    def do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            status, answer = 200, self._answer(self.path.partition("?")[0].strip("/").split("/"), body)
        except RefillError as error:
            status, answer = error.status, json.dumps(error.to_wire()).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_PUT = do_POST = do_DELETE = do  # noqa: N815  # names that http.server looks up

    def _answer(self, path: list[str], body: bytes) -> bytes:
        pod = self.fake
        if path == ["healthz"]:
            return b"{}"
        if path == ["v1", "pods"]:
            return json.dumps({"pods": [pod.url] if pod.pods is None else pod.pods}).encode()
        if path == ["v1", "dataset"]:
            return json.dumps({"num_samples": len(pod.samples)}).encode()
        name, what = path[2], path[-1] if len(path) > 3 else "job"
        query = dict(parse_qsl(self.path.partition("?")[2]))
        by = query.get("incarnation")
        with pod.lock:
            pod.requests.append(f"{self.command} {what}")
            fault = pod.faults.popleft() if what in ("batch", "samples", "trace") and pod.faults else None
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            raise _Lost
        if fault == "hang":
            pod.over.wait()
            raise _Lost
        if fault == "forget":
            pod.jobs.clear()
        if fault == "restart":
            pod.restart()
        if isinstance(fault, RefillError):
            raise fault
        if (self.command, what) == ("PUT", "job"):
            return json.dumps(pod.register(JobSpec.from_dict(json.loads(body)), by)).encode()
        if (self.command, what) == ("PUT", "planned"):
            said = json.loads(body)
            return json.dumps(pod.register_planned(JobSpec.from_dict(said["settings"]), said["plan"])).encode()
        if what == "batch":
            pod.asked_by.append(by)
        is_live = name not in pod.jobs or not pod.jobs[name].is_planned
        is_of_another = is_live and by not in (None, pod.incarnation)
        if name not in pod.jobs or is_of_another or (what == "parts" and pod.parts is None):
            raise UnknownJob(f"no job {name}")
        answer = self._of_job(pod.jobs[name], what, path, body, query)
        if fault == "drop":
            raise _Lost
        if fault == "cut":
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer[: len(answer) // 2])
            raise _Lost
        if fault == "leave":
            self.close_connection = True
        if fault == "garbage":
            return b"<html>" * 20
        if fault == "swap":
            request = BatchRequest.decode(body)
            return pod.frame(request.positions[::-1].copy(), request.positions)
        return answer

    def _of_job(self, spec: JobSpec, what: str, path: list[str], body: bytes, query: dict[str, str]) -> bytes:
        pod = self.fake
        if what == "batch":
            return pod.batch(spec, BatchRequest.decode(body))
        if what == "samples":
            ids = np.frombuffer(body, dtype="<i8")
            return pod.frame(np.full(len(ids), -1), ids)
        if what == "parts":
            return json.dumps(pod.parts).encode()
        if what in ("chunks", "order", "lengths"):
            ids = np.arange(len(pod.samples))
            shuffled = np.random.default_rng(int(path[5]) if what == "order" else 0).permutation(ids)
            lengths = np.array([len(sample) for sample in pod.samples])
            return pod.numbers(body, {"chunks": ids // 4 << 16, "order": shuffled, "lengths": lengths}[what])
        if what == "list":
            with pod.lock:
                pod.traces[spec.name, int(path[5]), int(path[7])] = np.frombuffer(body, dtype="<i8")
                pod.lists[path[7]] = pod.lists.get(path[7], {}) | {path[5]: query["digest"]}
            return b"{}"
        if what == "planned":
            return json.dumps({"lists": pod.lists.get(query["list_of"], {})}).encode()
        if what == "received":
            return b"{}"
        if what == "trace":
            with pod.lock:
                pod.traces[spec.name, int(path[4]), int(path[6])] = np.frombuffer(body, dtype="<i8")
            return b"{}"
        if what == "report":
            if pod.report_error is not None:
                raise pod.report_error
            with pod.lock:
                pod.reports.append(json.loads(body))
            return b""
        if what == "lease":
            return b"{}"
        if self.command == "DELETE":
            pod.jobs.pop(spec.name)
            return b'{"removed": true}'
        if what == "job":
            return json.dumps({"incarnation": pod.plan_ids.get(spec.name, pod.incarnation)}).encode()
        return json.dumps({"total": {"batches": len(pod.batches)}}).encode()

    def log_message(self, format: str, *args: Any) -> None:
        """Tests look at ``requests`` instead."""
