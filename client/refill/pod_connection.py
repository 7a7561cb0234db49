"""How does a client talk to pods? The only file of the client that touches the network.

Batches go over one HTTP/1.1 connection per process, read straight into one buffer; everything else over httpx. A
request is idempotent, so it is sent again after a lost answer, a timeout or a "not ready", until ``timeout_seconds``
have passed. Connections open lazily, in the process that uses them: DataLoader workers are forked or spawned.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx
import numpy as np

from refill.errors import InvalidInput, JobLost, PodUnreachable, RefillError, UnknownJob, error_from_wire
from refill.protocol.job_spec import JobSpec
from refill.protocol.wire_format import (
    FRAME_HEADER_BYTES,
    BatchRequest,
    FrameHeader,
    Int64Array,
    decode_frame_arrays,
)

__all__ = ["PodConnection", "ReceivedBatch"]

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 5.0
_REPORT_EVERY_SECONDS = 10.0
_REQUEST_SECONDS = 60.0


class ReceivedBatch:
    """Samples of one answer. ``payloads`` are views into one buffer, which lives as long as any of them."""

    def __init__(self, sample_ids: Int64Array, payloads: list[memoryview]) -> None:
        self.sample_ids = sample_ids
        self.payloads = payloads
        self.num_bytes = sum(map(len, payloads))


class PodConnection:
    """A rank's connection to its home pod. Picklable; the copy opens connections of its own.

    :param service_url: any pod, or the service in front of them; asked to register the job.
    :param home: the URL of the pod to fetch batches from; None: the pod that the rank's number falls to.
    :param timeout_seconds: how long a request is tried again before its last error is raised.
    """

    def __init__(self, service_url: str, spec: JobSpec, rank: int, home: str | None, timeout_seconds: float) -> None:
        self.service_url = _checked_url(service_url)
        self.spec = spec
        self.rank = rank
        self.timeout_seconds = timeout_seconds
        self._home = None if home is None else _checked_url(home)
        self._info: dict[str, Any] | None = None
        self._process = -1
        self._bulk: http.client.HTTPConnection | None = None
        self._control: httpx.Client | None = None
        self._last_wait_seconds = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": -1, "_bulk": None, "_control": None}

    def info(self) -> dict[str, Any]:
        """What the pods say of the job; registers it the first time."""
        if self._info is None:
            self._info = self._retried(self.service_url, lambda: self._register(self.service_url))
        return self._info

    @property
    def home(self) -> str:
        """The pod that this rank's requests go to; the service itself when that pod can't be reached from here."""
        if self._home is None:
            pods = self.info()["pods"]
            self._home = pods[self.rank % len(pods)].rstrip("/") if pods else self.service_url
            if self._home != self.service_url and not self._answers(self._home):
                log.warning("home pod %s can't be reached from here: asking %s", self._home, self.service_url)
                self._home = self.service_url
        return self._home

    def batch(self, epoch: int, positions: Int64Array) -> ReceivedBatch:
        """The samples that answer positions of this rank, in their order."""
        path = self._data_path("batch")
        home = self.home
        started = time.perf_counter()
        body = BatchRequest(epoch, self.rank, positions, waited_seconds=self._last_wait_seconds).encode()
        received = self._retried(home, lambda: self._fetch(home, path, body))
        self._last_wait_seconds = time.perf_counter() - started
        return received

    def samples(self, sample_ids: Int64Array) -> ReceivedBatch:
        """Exactly these samples, outside of any epoch."""
        path = self._data_path("samples")
        home = self.home
        body = np.ascontiguousarray(sample_ids, dtype="<i8").tobytes()
        return self._retried(home, lambda: self._fetch(home, path, body))

    def post_trace(self, epoch: int, sample_ids: Int64Array) -> None:
        """Say which samples this rank asks for in an epoch, in which order."""
        body = np.ascontiguousarray(sample_ids, dtype="<i8").tobytes()
        path = self._data_path(f"epochs/{epoch}/ranks/{self.rank}/trace")
        home = self.home
        self._retried(home, lambda: self._call("PUT", home + path, content=body))

    def report(self, data_wait_seconds: float, samples: int, num_bytes: int) -> None:
        """Tell the home pod what the loop has seen since the last report; tried once."""
        seen = {"rank": self.rank, "data_wait_seconds": data_wait_seconds, "samples": samples, "bytes": num_bytes}
        self._call("POST", self.home + self._data_path("report"), json=seen)

    def epoch_counts(self, epoch: int) -> dict[str, Any]:
        """Counts of an epoch, of each pod and in sum."""
        home = self.home
        counts: dict[str, Any] = self._retried(
            home, lambda: self._call("GET", home + self._job_path(f"epochs/{epoch}")).json()
        )
        return counts

    def end_job(self) -> None:
        """End the job on all pods and free its memory."""
        self._call("DELETE", self.service_url + self._job_path("").rstrip("/"))

    def _register(self, url: str) -> dict[str, Any]:
        path = self._job_path("").rstrip("/")
        answer: dict[str, Any] = self._call("PUT", url + path, json=self.spec.to_dict()).json()
        return answer

    def _fetch(self, home: str, path: str, body: bytes) -> ReceivedBatch:
        """One POST that is answered with a frame; its payload is read into one buffer and not copied again."""
        self._own_process()
        if self._bulk is None:
            self._bulk = _connect(home)
        try:
            self._bulk.request("POST", path, body, {"Content-Type": "application/octet-stream"})
            response = self._bulk.getresponse()
            if response.status != 200:
                _raise_answer(response.status, response.read(), home)
            return _read_frame(response, home)
        except BaseException as error:
            # Whatever is left of this answer must not be taken for the next one's.
            self._bulk.close()
            self._bulk = None
            if isinstance(error, (OSError, http.client.HTTPException)):
                raise PodUnreachable(f"{home} does not answer: {error or type(error).__name__}", url=home) from error
            raise

    def _call(self, method: str, url: str, **content: Any) -> httpx.Response:
        self._own_process()
        if self._control is None:
            self._control = httpx.Client(timeout=_REQUEST_SECONDS, trust_env=False)
        try:
            response = self._control.request(method, url, **content)
        except httpx.HTTPError as error:
            raise PodUnreachable(f"{url} does not answer: {error or type(error).__name__}", url=url) from error
        if response.status_code >= 400:
            _raise_answer(response.status_code, response.content, url)
        return response

    def _answers(self, url: str) -> bool:
        try:
            return httpx.get(f"{url}/healthz", timeout=5, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def _retried(self, url: str, attempt: Callable[[], Answer]) -> Answer:
        """Try until it works, an error is final, or time is up. The pause doubles, with jitter."""
        started = reported = time.monotonic()
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return self._known(url, attempt)
            except RefillError as error:
                waited = time.monotonic() - started
                if error.status != 503 or waited >= self.timeout_seconds:
                    raise
                if time.monotonic() - reported >= _REPORT_EVERY_SECONDS:
                    reported = time.monotonic()
                    log.warning("rank %d still waits after %.0f s: %s", self.rank, waited, error)
            time.sleep(min(pause, self.timeout_seconds) * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _known(self, url: str, attempt: Callable[[], Answer]) -> Answer:
        try:
            return attempt()
        except UnknownJob:
            self._register_again(url)
            return attempt()

    def _register_again(self, url: str) -> None:
        """A pod that does not know the job gets it again, unless it has lost samples that were delivered already."""
        known = self._info
        again = self._register(url)
        if known is not None and again["incarnation"] != known["incarnation"]:
            raise JobLost(
                f"job {self.spec.name} was removed from the pods, or they were restarted, while it ran: its epoch "
                "can't go on with every sample exactly once; end the job and start it anew, or use another name",
                job=self.spec.name,
            )
        self._info = again

    def _job_path(self, what: str) -> str:
        return f"/v1/jobs/{quote(self.spec.name, safe='')}/{what}"

    def _data_path(self, what: str) -> str:
        """A path that names this registration of the job: pods refuse it when theirs is a later one."""
        return f"{self._job_path(what)}?incarnation={quote(self.info()['incarnation'], safe='')}"

    def _own_process(self) -> None:
        """Drop connections that were opened before a fork: two processes must not share one."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._bulk = self._control = None


def _read_frame(response: http.client.HTTPResponse, source: str) -> ReceivedBatch:
    length = int(response.headers.get("Content-Length") or 0)
    buffer = memoryview(bytearray(length))
    filled = 0
    while filled < length:
        count = response.readinto(buffer[filled:])
        if count == 0:
            raise http.client.IncompleteRead(b"", length - filled)
        filled += count
    header = FrameHeader.decode(buffer)
    if header.total_bytes != length:
        raise InvalidInput(f"{source} answered with {length} bytes, its frame says {header.total_bytes}")
    payload_start = FRAME_HEADER_BYTES + header.arrays_bytes
    _, sample_ids, lengths = decode_frame_arrays(header, buffer[FRAME_HEADER_BYTES:payload_start])
    payloads, start = [], payload_start
    for size in lengths.tolist():
        payloads.append(buffer[start : start + size])
        start += size
    return ReceivedBatch(sample_ids, payloads)


def _raise_answer(status: int, body: bytes, source: str) -> None:
    try:
        answer = json.loads(body)
    except ValueError:
        answer = body.decode("utf-8", "replace")
    raise error_from_wire(answer, status=status, source=source)


def _connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=_REQUEST_SECONDS)


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and parts.hostname and not parts.path.strip("/") and parts.port != 0
    except ValueError:  # a port that is no number, or a bracket that is not closed
        right = False
    if not right:
        raise InvalidInput(f"{url!r} is not the URL of a service, like http://refill:8000")
    return url.rstrip("/")
