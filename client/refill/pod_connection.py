"""How does a client talk to pods? The only file of the client that touches the network.

Batches go over one HTTP/1.1 connection per process and thread, read straight into one buffer; everything else over
httpx. A request is idempotent, so it is sent again after a lost answer, a timeout or a "not ready", until
``timeout_seconds`` have passed. Connections open lazily, in the process that uses them: DataLoader workers are
forked or spawned.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar
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
Attempt = Callable[[float], Answer]
"""One try; gets the seconds that it may wait for each piece of the answer."""

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 5.0
_SAY_EVERY_SECONDS = 10.0
_REQUEST_SECONDS = 60.0
"""A pod that is silent for longer is asked again."""
_LAST_REQUEST_SECONDS = 5.0
"""What even a request just before the end of its time may take: to be told why it waits is worth more."""
_REPORT_SECONDS = 5.0
_PROBE_SECONDS = 5.0
_PROBES = 3
_PROBE_PAUSE_SECONDS = 0.5
_RETRIED_STATUS = 503


class ReceivedBatch:
    """Samples of one answer. ``payloads`` are views into one buffer, which lives as long as any of them."""

    def __init__(self, sample_ids: Int64Array, payloads: list[memoryview]) -> None:
        self.sample_ids = sample_ids
        self.payloads = payloads
        self.num_bytes = sum(map(len, payloads))


class PodConnection:
    """A rank's connection to its home pod. Picklable; the copy opens connections of its own.

    Raises errors of :mod:`refill.errors`: those of the pod as they are, everything else that can go wrong on the way
    as :class:`PodUnreachable`.

    :param service_url: any pod, or the service in front of them; asked to register the job.
    :param home: the URL of the pod to fetch batches from; None: the pod that the rank's number falls to.
    :param timeout_seconds: how long a request is tried again before its last error is raised; 0: tried once.
    """

    def __init__(self, service_url: str, spec: JobSpec, rank: int, home: str | None, timeout_seconds: float) -> None:
        if not timeout_seconds >= 0:
            raise InvalidInput(f"timeout_seconds must be at least 0, got {timeout_seconds!r}")
        self.service_url = _checked_url(service_url)
        self.spec = spec
        self.rank = rank
        self.timeout_seconds = timeout_seconds
        self._home = None if home is None else _checked_url(home)
        self._info: dict[str, Any] | None = None
        self._control: dict[str, httpx.Client] = {}
        self._forget_connections()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_process", "_bulk", "_control")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_connections()

    def info(self) -> dict[str, Any]:
        """What the pods say of the job; registers it the first time."""
        if self._info is None:
            self._info = self._retried(self.service_url, lambda seconds: self._register(self.service_url, seconds))
            self._home = self._home or self._find_home(self._info["pods"])
        return self._info

    @property
    def home(self) -> str:
        """The pod that this rank's requests go to."""
        self.info()
        assert self._home is not None
        return self._home

    def batch(self, epoch: int, positions: Int64Array) -> ReceivedBatch:
        """The samples that answer positions of this rank, in their order."""
        home, waited = self.home, getattr(self._bulk, "waited_seconds", 0.0)
        body = BatchRequest(epoch, self.rank, positions, waited_seconds=waited).encode()
        started = time.perf_counter()
        received = self._retried(home, lambda seconds: self._fetch(home, "batch", body, positions, None, seconds))
        self._bulk.waited_seconds = time.perf_counter() - started
        return received

    def samples(self, sample_ids: Int64Array) -> ReceivedBatch:
        """Exactly these samples, outside of any epoch."""
        home = self.home
        body = np.ascontiguousarray(sample_ids, dtype="<i8").tobytes()
        return self._retried(home, lambda seconds: self._fetch(home, "samples", body, None, sample_ids, seconds))

    def post_trace(self, epoch: int, sample_ids: Int64Array) -> None:
        """Say which samples this rank asks for in an epoch, in which order."""
        body = np.ascontiguousarray(sample_ids, dtype="<i8").tobytes()
        url = self.home + self._data_path(f"epochs/{epoch}/ranks/{self.rank}/trace")
        self._retried(self.home, lambda seconds: self._call("PUT", url, seconds, content=body))

    def report(self, data_wait_seconds: float, samples: int, num_bytes: int) -> None:
        """Tell the home pod what the loop has seen since the last report; tried once."""
        seen = {"rank": self.rank, "data_wait_seconds": data_wait_seconds, "samples": samples, "bytes": num_bytes}
        self._call("POST", self.home + self._data_path("report"), _REPORT_SECONDS, json=seen)

    def epoch_counts(self, epoch: int) -> dict[str, Any]:
        """Counts of an epoch, of each pod and in sum."""
        url = self.home + self._job_path(f"epochs/{epoch}")
        return self._retried(self.home, lambda seconds: self._call("GET", url, seconds))

    def end_job(self) -> None:
        """End the job on all pods and free its memory; nothing happens when that was done before."""
        url = self.service_url + self._job_path()
        try:
            self._retried(self.service_url, lambda seconds: self._call("DELETE", url, seconds), register=False)
        except UnknownJob:
            log.info("job %s had ended before", self.spec.name)

    def _register(self, url: str, seconds: float) -> dict[str, Any]:
        return self._call("PUT", url + self._job_path(), seconds, json=self.spec.to_dict())

    def _find_home(self, pods: list[str]) -> str:
        """The pod that the rank's number falls to; the service itself when that pod can't be reached from here."""
        if not pods:
            return self.service_url
        home = _checked_url(pods[self.rank % len(pods)])
        if home == self.service_url:
            return home
        for probe in range(_PROBES):
            try:
                self._call("GET", f"{home}/healthz", _PROBE_SECONDS)
                return home
            except RefillError as error:
                if probe + 1 == _PROBES:
                    log.warning("home pod can't be reached from here, so %s is asked: %s", self.service_url, error)
                else:
                    time.sleep(_PROBE_PAUSE_SECONDS)  # it may just be starting
        return self.service_url

    def _retried(self, url: str, attempt: Attempt[Answer], register: bool = True) -> Answer:
        """Try until it works, an error is final, or time is up. The pause doubles, with jitter."""
        started = said = time.monotonic()
        pause = _FIRST_PAUSE_SECONDS
        while True:
            left = started + self.timeout_seconds - time.monotonic()
            try:
                return self._known(url, attempt, min(max(left, _LAST_REQUEST_SECONDS), _REQUEST_SECONDS), register)
            except RefillError as error:
                if error.status != _RETRIED_STATUS:
                    raise
                now = time.monotonic()
                if now + pause >= started + self.timeout_seconds:
                    why = f"rank {self.rank} gives up on {url} after {now - started:.0f} s: {error.message}"
                    given_up = type(error)(why)
                    given_up.details = error.details
                    raise given_up from error
                if now - said >= _SAY_EVERY_SECONDS:
                    said = now
                    log.warning("rank %d waits for %s since %.0f s: %s", self.rank, url, now - started, error)
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _known(self, url: str, attempt: Attempt[Answer], seconds: float, register: bool) -> Answer:
        """One attempt, and another when the pod had to be told of the job first."""
        try:
            return attempt(seconds)
        except UnknownJob:
            if not register:
                raise
        self._register_again(url, seconds)
        return attempt(seconds)

    def _register_again(self, url: str, seconds: float) -> None:
        """A pod that does not know the job gets it again, unless it has lost samples that were delivered already."""
        again = self._register(url, seconds)
        if self._info is not None and again.get("incarnation") != self._info.get("incarnation"):
            raise JobLost(
                f"job {self.spec.name} was removed from the pods, or they were restarted, while it ran: its epoch "
                "can't go on with every sample exactly once; end the job and start it anew, or use another name",
                job=self.spec.name,
            )

    def _call(self, method: str, url: str, seconds: float, **content: Any) -> dict[str, Any]:
        """One request that is answered with a JSON object, or with nothing."""
        self._own_process()
        scheme = urlsplit(url).scheme
        if scheme not in self._control:
            # Pods are asked directly: http.client, which fetches the batches, knows no proxies either.
            # Certificates are read for TLS only: that takes as long as a round trip to a store.
            self._control[scheme] = httpx.Client(trust_env=False, verify=scheme == "https")
        try:
            response = self._control[scheme].request(method, url, timeout=seconds, **content)
        except httpx.HTTPError as error:
            raise _unreachable(url, error) from error
        if response.status_code >= 300:
            _raise_answer(response.status_code, response.content, url)
        try:
            answer = response.json() if response.content else {}
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise RefillError(f"{url} answered with something else than a pod would: {response.text[:100]!r}")
        return answer

    def _fetch(
        self,
        home: str,
        what: str,
        body: bytes,
        positions: Int64Array | None,
        sample_ids: Int64Array | None,
        seconds: float,
    ) -> ReceivedBatch:
        """One POST that is answered with a frame, which must answer these positions or hold these samples."""
        response = self._post(home, self._data_path(what), body, seconds)
        try:
            if response.status != 200:
                _raise_answer(response.status, response.read(), home)
            return _read_frame(response, positions, sample_ids, home)
        except BaseException as error:
            # Whatever is left of this answer must not be taken for the next one's; KeyboardInterrupt included.
            if not response.isclosed() or not isinstance(error, RefillError):
                self._hang_up()
            if isinstance(error, (OSError, http.client.HTTPException)):
                raise _unreachable(home, error) from error
            raise

    def _post(self, home: str, path: str, body: bytes, seconds: float) -> http.client.HTTPResponse:
        self._own_process()
        while True:
            connection: http.client.HTTPConnection | None = getattr(self._bulk, "connection", None)
            was_idle = connection is not None
            if connection is None:
                connection = self._bulk.connection = _connect(home)
            connection.timeout = seconds
            if connection.sock is not None:
                connection.sock.settimeout(seconds)
            try:
                connection.request("POST", path, body, {"Content-Type": "application/octet-stream"})
                return connection.getresponse()
            except BaseException as error:
                self._hang_up()
                if was_idle and isinstance(error, ConnectionError):
                    continue  # the pod had closed a connection that was not in use: no reason to wait
                if isinstance(error, (OSError, http.client.HTTPException)):
                    raise _unreachable(home, error) from error
                raise

    def _hang_up(self) -> None:
        connection: http.client.HTTPConnection | None = getattr(self._bulk, "connection", None)
        if connection is not None:
            connection.close()
        self._bulk.connection = None

    def _data_path(self, what: str) -> str:
        """A path that names this registration of the job: pods refuse it when theirs is a later one."""
        return f"{self._job_path(what)}?incarnation={quote(self.info()['incarnation'], safe='')}"

    def _own_process(self) -> None:
        """Drop connections that were opened before a fork: two processes must not share one."""
        if self._process != os.getpid():
            self._forget_connections()

    def _forget_connections(self) -> None:
        self._process = os.getpid()
        self._bulk = threading.local()
        self._control = {}

    def _job_path(self, what: str = "") -> str:
        return f"/v1/jobs/{quote(self.spec.name, safe='')}{what and '/'}{what}"


def _read_frame(
    response: http.client.HTTPResponse, positions: Int64Array | None, sample_ids: Int64Array | None, source: str
) -> ReceivedBatch:
    """Reads the answer's body into one buffer; its payload is not copied again."""
    length = response.length or 0
    head = bytearray(min(FRAME_HEADER_BYTES, length))
    _read_into(response, memoryview(head))
    try:
        header = FrameHeader.decode(head)
        if header.total_bytes != length:
            raise InvalidInput(f"frame says that it has {header.total_bytes} bytes, but {length} come")
        buffer = np.empty(length - FRAME_HEADER_BYTES, dtype=np.uint8).data
        _read_into(response, buffer)
        found_positions, found_ids, lengths = decode_frame_arrays(header, buffer[: header.arrays_bytes])
        for asked, found in ((positions, found_positions), (sample_ids, found_ids)):
            if asked is not None and not np.array_equal(asked, found):
                raise InvalidInput(f"frame answers other requests than the {len(asked)} that were made")
    except InvalidInput as error:
        raise RefillError(f"{source} sent something else than a pod would: {error.message}") from error
    payloads, start = [], header.arrays_bytes
    for size in lengths.tolist():
        payloads.append(buffer[start : start + size])
        start += size
    return ReceivedBatch(found_ids.copy(), payloads)


def _read_into(response: http.client.HTTPResponse, buffer: memoryview) -> None:
    filled = 0
    while filled < len(buffer):
        count = response.readinto(buffer[filled:])
        if count == 0:
            raise http.client.IncompleteRead(b"", len(buffer) - filled)
        filled += count


def _raise_answer(status: int, body: bytes, source: str) -> NoReturn:
    try:
        answer = json.loads(body)
    except ValueError:
        answer = body.decode("utf-8", "replace")
    raise error_from_wire(answer, status=status, source=source)


def _unreachable(url: str, error: Exception) -> PodUnreachable:
    return PodUnreachable(f"{url} does not answer: {str(error) or type(error).__name__}", url=url)


def _connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port)


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and parts.hostname and not parts.path.strip("/") and parts.port != 0
    except ValueError:  # a port that is no number, or a bracket that is not closed
        right = False
    if not right:
        raise InvalidInput(f"{url!r} is not the URL of a service, like http://refill:8000")
    return url.rstrip("/")
