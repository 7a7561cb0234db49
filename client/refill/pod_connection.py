"""How does a client talk to pods? The only file of the client that touches the network.

Batches go over one HTTP/1.1 connection per process and thread, read straight into one buffer; everything else over
httpx. A request is idempotent, so it is sent again after a lost answer, a timeout or a "not ready", until
``timeout_seconds`` have passed. Connections open lazily, in the process that uses them: DataLoader workers are
forked or spawned.

A pod is named by a URL, ``http://refill:8000``, or on its own machine by its Unix socket, ``unix:/run/refill.sock``.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import random
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, TypeVar
from urllib.parse import quote, urlsplit

import httpx
import numpy as np

from refill.credentials import Credentials
from refill.delivery_record import DeliveryRecord
from refill.errors import (
    InvalidInput,
    JobLost,
    JobMoved,
    PodUnreachable,
    RankHeld,
    RecordsWanted,
    RefillError,
    RequestTooLarge,
    UnknownJob,
    error_from_wire,
)
from refill.home_watch import watch_home
from refill.own_life import has_ended, is_of_this_process, leaves_the_rank_to, own_life
from refill.protocol.incarnation import incarnation_of, line_of, moves_of
from refill.protocol.job_spec import JobSpec
from refill.protocol.rank_life import RankLife
from refill.protocol.records import Kind, Record
from refill.protocol.wire_format import (
    FRAME_BYTES_HEADER,
    FRAME_HEADER_BYTES,
    MAX_SAMPLES,
    MEMORY_HEADER,
    BatchRequest,
    FrameHeader,
    Int64Array,
    decode_frame_arrays,
)
from refill.shared_segments import SharedSegment, SharedSegments

__all__ = ["PodConnection", "ReceivedBatch"]

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Attempt = Callable[[str, float], Answer]
"""One try; gets the URL of the pod to ask and the seconds that it may wait for each piece of the answer."""

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 5.0
_HELD_PAUSE_SECONDS = 1.0
"""While another process may still be this rank: training stands still until it has gone."""
_LONG_SECONDS = 2.0
"""After so long, the home may be a pod that is not wanted any more, and waits for others that do not talk to it."""
_SAY_EVERY_SECONDS = 10.0
_REQUEST_SECONDS = 60.0
"""A pod that is silent for longer is asked again."""
_LAST_REQUEST_SECONDS = 5.0
"""What even a request just before the end of its time may take: to be told why it waits is worth more."""
_REPORT_SECONDS = 5.0
_PROBE_SECONDS = 5.0
_PROBES = 3
_LOOKS_A_LOOK_AT_PODS = 5
"""Looks after the home for each one at the pods that there are."""
_TURNS = 4
"""A pod may want to be told of the job, then of what the rank has received, and the job may have moved meanwhile."""
_PROBE_PAUSE_SECONDS = 0.5
_RETRIED_STATUS = 503
_ANSWERED_BY_ITSELF = (UnknownJob, JobMoved, RecordsWanted)
"""The pod is told what it lacks, and asked again; if that takes too many turns, later."""
_UNIX = "unix:"
_OF_ONE_PROCESS = ("_process", "_bulk", "_control", "_of_ranks", "_watched")
_LONGEST_UNIX_PATH_BYTES = 100
"""Linux takes 107, of which ``.memory`` needs 7."""


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
    :param home: the URL of the pod to fetch batches from; None: the pod that the rank's number falls to, or the one
        behind ``service_url`` if that is a Unix socket.
    :param timeout_seconds: how long a request is tried again before its last error is raised; 0: tried once.
    :param record: of what the rank has received; all processes of a rank share one. None: one of its own.
    :param credentials: None: those of the environment.
    :param allow_skipped: whether this rank may leave out positions below ones that it asks for.
    """

    def __init__(
        self,
        service_url: str,
        spec: JobSpec,
        rank: int,
        home: str | None,
        timeout_seconds: float,
        record: DeliveryRecord | None = None,
        credentials: Credentials | None = None,
        allow_skipped: bool = False,
    ) -> None:
        if not timeout_seconds >= 0:
            raise InvalidInput(f"timeout_seconds must be at least 0, got {timeout_seconds!r}")
        self.service_url = _checked_url(service_url)
        self.spec = spec
        self.rank = rank
        self.timeout_seconds = timeout_seconds
        self._home = None if home is None else _checked_url(home)
        self._home_is_given = home is not None
        self._record = record or DeliveryRecord()
        self._credentials = credentials or Credentials()
        self.allow_skipped = allow_skipped
        self.is_rank = True
        """False: it has only looked so far, and knows nothing of what the rank has received."""
        self._info: dict[str, Any] | None = None
        self._looks = 0
        self._control: dict[str, httpx.Client] = {}
        self._forget_connections()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OF_ONE_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_connections()

    def info(self) -> dict[str, Any]:
        """What the pods say of the job; registers it the first time."""
        if self._info is None:
            self._registered(self._retried(self.service_url, self._register))
        assert self._info is not None
        return self._info

    def resume(self, incarnation: str, epoch: int, position: int) -> dict[str, Any]:
        """Register the job as it goes on from a checkpoint, in place of :meth:`info` the first time.

        :param incarnation: of the job when the checkpoint was saved, as :meth:`info` tells it.
        :param position: up to which every rank had consumed the epoch, exclusive.

        Where ranks and pods are the same as then, the job goes on as it is. Else, from then on, it has another
        incarnation, and ``info()["resumed"]`` says how many positions are left of the epoch for each rank, from 0 on.
        """
        checkpoint = {"incarnation": incarnation, "epoch": epoch, "position": position}
        body = {"settings": self.spec.to_dict(), "checkpoint": checkpoint}
        path = self._job_path("resume")
        info = self._retried(self.service_url, lambda url, seconds: self._call("POST", url, path, seconds, json=body))
        self._registered(info)
        return info

    def _registered(self, info: dict[str, Any]) -> None:
        self._info = info
        self._home = self._home or self._find_home(info["pods"])
        self._watch_home()

    def _watch_home(self) -> None:
        self._watched = True
        watch_home(self)

    def _asks_as_rank(self) -> None:
        """Fact: this process asks as the rank. So it is to be heard of from now on, though it was copied to here."""
        self._own_process()
        self.is_rank = True
        if not self._watched and self._info is not None and is_of_this_process(self._life()):
            self._watch_home()

    def _life(self) -> RankLife:
        return own_life(self._record.made_in)

    def look_after_home(self) -> None:
        """Bring the job back to a home pod that was restarted, or to another one, and tell it what this rank has
        received, if it has not been told. And that this process is still there, if it is the one that asks. Who only
        looks tells nothing: it would say that the rank has received nothing."""
        self._looks += 1
        try:
            self._known(None, self._calls("GET", f"ranks/{self.rank}"), _PROBE_SECONDS, register=True)
        except PodUnreachable:
            self._follow_pods()
            raise
        if self._looks % _LOOKS_A_LOOK_AT_PODS == 0:
            self._follow_pods()  # a pod that is not wanted any more may answer for a while

    @property
    def home(self) -> str:
        """The pod that this rank's requests go to."""
        self.info()
        assert self._home is not None
        return self._home

    def batch(self, epoch: int, positions: Int64Array) -> ReceivedBatch:
        """The samples that answer positions of this rank, in their order."""
        self._asks_as_rank()
        waited = getattr(self._bulk, "waited_seconds", 0.0)
        body = BatchRequest(epoch, self.rank, positions, waited_seconds=waited).encode()
        started = time.perf_counter()
        while True:
            moves, times_told = moves_of(self._incarnation()), self._record.times_told()
            received = self._retried(
                None, lambda home, seconds: self._fetch(home, "batch", body, positions, None, seconds)
            )
            came = Record(Kind.RECEIVED, epoch, self.rank, (positions, received.sample_ids))
            if self._record.add(came, times_told, moves):
                break
            if self._record.moves() > moves_of(self._incarnation()):
                self._retried(self.service_url, self._register_again)
        self._bulk.waited_seconds = time.perf_counter() - started
        return received

    def samples(self, sample_ids: Int64Array) -> ReceivedBatch:
        """Exactly these samples, outside of any epoch. In as many requests as pods want it split into."""
        parts = []
        to_ask = [sample_ids[start : start + MAX_SAMPLES] for start in range(0, len(sample_ids), MAX_SAMPLES)]
        while to_ask:
            ids = to_ask.pop(0)
            try:
                parts.append(self._samples(ids))
            except RequestTooLarge:
                if len(ids) < 2:
                    raise
                to_ask[:0] = np.array_split(ids, 2)
        if len(parts) == 1:
            return parts[0]
        return ReceivedBatch(sample_ids.copy(), [payload for part in parts for payload in part.payloads])

    def _samples(self, sample_ids: Int64Array) -> ReceivedBatch:
        body = np.ascontiguousarray(sample_ids, dtype="<i8").tobytes()
        return self._retried(None, lambda home, seconds: self._fetch(home, "samples", body, None, sample_ids, seconds))

    def post_trace(self, epoch: int, sample_ids: Int64Array) -> None:
        """Say which samples this rank asks for in an epoch, in which order."""
        body = np.ascontiguousarray(sample_ids, dtype="<i8").tobytes()
        what = f"epochs/{epoch}/ranks/{self.rank}/trace"
        self.info()
        self._asks_as_rank()
        posted = Record(Kind.TRACE, epoch, self.rank, (sample_ids,))
        while not self._record.add(posted, self._record.times_told()):
            pass  # told in between; a trace holds all the same
        self._retried(None, self._calls("PUT", what, content=body))

    def report(self, data_wait_seconds: float, samples: int, num_bytes: int) -> None:
        """Tell the home pod what the loop has seen since the last report; tried once."""
        seen = {"rank": self.rank, "data_wait_seconds": data_wait_seconds, "samples": samples, "bytes": num_bytes}
        self._call("POST", self.home, self._data_path("report"), _REPORT_SECONDS, json=seen)

    def of_rank(self, rank: int) -> PodConnection:
        """A connection of this process for another rank, which asks for nothing itself: its process is given what this
        one reads. It keeps a record of its own."""
        if rank not in self._of_ranks:
            self.info()
            other = PodConnection.__new__(PodConnection)
            other.__setstate__(self.__getstate__())
            other.rank, other._record = rank, self._record.of_rank(rank)
            if not self._home_is_given:
                other._home = other._find_home(self.info()["pods"])
            self._of_ranks[rank] = other
        return self._of_ranks[rank]

    def skipped(self, epoch: int, start: int, end: int) -> bool:
        """Whether this rank has left out some of the positions ``[start, end)`` of an epoch so far: in all its
        processes, those of earlier lives, too. False when the pods can't tell."""
        path = f"epochs/{epoch}/ranks/{self.rank}"
        params = {"start": start, "end": end, "incarnation": self._incarnation()}
        answer = self._retried(
            None, lambda pod, seconds: self._call("GET", pod, self._job_path(path), seconds, params=params)
        )
        return answer["skipped"] is not None

    def epoch_counts(self, epoch: int) -> dict[str, Any]:
        """Counts of an epoch, of each pod and in sum."""
        path = self._job_path(f"epochs/{epoch}")
        return self._retried(None, lambda home, seconds: self._call("GET", home, path, seconds))

    def end_job(self) -> None:
        """End the job on all pods and free its memory; nothing happens when that was done before."""
        path = self._job_path()
        try:
            self._retried(
                self.service_url, lambda pod, seconds: self._call("DELETE", pod, path, seconds), register=False
            )
        except UnknownJob:
            log.info("job %s had ended before", self.spec.name)

    def _register(self, url: str, seconds: float) -> dict[str, Any]:
        path = self._job_path()
        if self._info is not None:
            known = self._info["incarnation"]
            # Another process of this rank may have followed the job further.
            latest = incarnation_of(line_of(known), max(moves_of(known), self._record.moves()))
            path += f"?incarnation={quote(latest, safe='')}"
            if "num_pods" in self._info:  # older pods do not say it
                path += f"&pods={self._info['num_pods']}"
        return self._call("PUT", url, path, seconds, json=self.spec.to_dict())

    def _find_home(self, pods: list[str]) -> str:
        """The pod that the rank's number falls to; the service itself when that pod can't be reached from here."""
        if not pods or self.service_url.startswith(_UNIX):
            return self.service_url
        home = _checked_url(pods[self.rank % len(pods)])
        if home == self.service_url:
            return home
        for probe in range(_PROBES):
            try:
                self._call("GET", home, "/healthz", _PROBE_SECONDS)
                return home
            except RefillError as error:
                if probe + 1 == _PROBES:
                    log.warning("home pod can't be reached from here, so %s is asked: %s", self.service_url, error)
                else:
                    time.sleep(_PROBE_PAUSE_SECONDS)  # it may just be starting
        return self.service_url

    def _calls(self, method: str, what: str, **content: Any) -> Attempt[dict[str, Any]]:
        """Makes one small request to the job, by the name that it has then."""
        return lambda pod, seconds: self._call(method, pod, self._data_path(what), seconds, **content)

    def _answers(self, pod: str) -> bool:
        try:
            self._call("GET", pod, "/healthz", _PROBE_SECONDS)
        except RefillError:
            return False
        return True

    def _retried(self, url: str | None, attempt: Attempt[Answer], register: bool = True) -> Answer:
        """Try until it works, an error is final, or time is up. The pause doubles, with jitter.

        :param url: of the pod that is asked; None: the home, which is another one when the job has moved.
        """
        started = said = time.monotonic()
        pause = _FIRST_PAUSE_SECONDS
        while True:
            left = started + self.timeout_seconds - time.monotonic()
            try:
                return self._known(url, attempt, min(max(left, _LAST_REQUEST_SECONDS), _REQUEST_SECONDS), register)
            except RefillError as error:
                if error.status != _RETRIED_STATUS and not (register and isinstance(error, _ANSWERED_BY_ITSELF)):
                    raise
                now = time.monotonic()
                if now + pause >= started + self.timeout_seconds:
                    asked = url or self.home
                    why = f"rank {self.rank} gives up on {asked} after {now - started:.0f} s: {error.message}"
                    given_up = type(error)(why)
                    given_up.details = error.details
                    raise given_up from error
                held = isinstance(error, RankHeld)
                if now - said >= _SAY_EVERY_SECONDS or (held and said == started):
                    said = now
                    log.warning(
                        "rank %d waits for %s since %.0f s: %s", self.rank, url or self.home, now - started, error
                    )
                if url is None and (isinstance(error, PodUnreachable) or now - started > _LONG_SECONDS):
                    self._follow_pods()
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _HELD_PAUSE_SECONDS if held else _LONGEST_PAUSE_SECONDS)

    def _known(self, url: str | None, attempt: Attempt[Answer], seconds: float, register: bool) -> Answer:
        """One attempt, and others when the pod was restarted and had to be told of the job first, or of what the rank
        has received, or that the process that was this rank before has ended, or has started this one."""
        first: Callable[[str, float], None] | None = None
        for turn in range(_TURNS):
            try:
                if first is not None:
                    first(url or self.home, seconds)
                return attempt(url or self.home, seconds)
            except (UnknownJob, JobMoved):
                if not register or turn + 1 == _TURNS:
                    raise
                first = self._register_again
            except RecordsWanted:
                if turn + 1 == _TURNS or not self.is_rank:
                    raise
                first = self._tell
            except RankHeld as error:
                holder = RankLife.decode(str(error.details.get("holder")))
                is_free = has_ended(holder) or leaves_the_rank_to(holder, self._record.made_in)
                if turn + 1 == _TURNS or not is_free:
                    raise
                first = partial(self._take_over, holder)
        raise AssertionError("the last turn returns or raises")

    def _follow_pods(self) -> None:
        """The home gives nothing: perhaps there are fewer pods now, and it is not one of them."""
        info = self._info
        if info is None or self._home == self.service_url:
            return
        try:
            if self._call("GET", self.service_url, "/v1/pods", _PROBE_SECONDS)["pods"] != info["pods"]:
                self._register_again(self.service_url, _REQUEST_SECONDS)
        except RefillError as error:
            if error.status != _RETRIED_STATUS:  # else they are asked again soon, as the home is
                raise

    def _register_again(self, url: str, seconds: float) -> None:
        """A pod that does not know the job gets it again, and takes it up where it was, or says that it can't be."""
        again = self._register(url, seconds)
        if self._info is None:
            return
        if line_of(str(again.get("incarnation"))) != line_of(self._info["incarnation"]):
            raise JobLost(
                f"job {self.spec.name} was ended on the pods and begun anew while it ran here: its epoch can't go on "
                "with every sample exactly once; end the job and start it anew, or use another name",
                job=self.spec.name,
            )
        if moves_of(again["incarnation"]) < self._record.moves():
            raise PodUnreachable(f"{url} does not know yet that job {self.spec.name} has moved to other pods")
        before, self._info = self._info, again
        if again["incarnation"] != before["incarnation"]:
            log.warning("job %s goes on with %d pods, as there are now", self.spec.name, again["num_pods"])
        if again.get("pods", before["pods"]) != before["pods"] and not (
            self._home_is_given and self._answers(self.home)
        ):
            self._home = self._find_home(again["pods"])

    def _tell(self, url: str, seconds: float) -> None:
        """A pod that was restarted is told what this rank has received."""
        log.info("rank %d tells %s, which was restarted, what it has received", self.rank, url)
        path = self._data_path(f"ranks/{self.rank}/records")
        self._call("PUT", url, path, seconds, content=self._record.tell(self.rank, moves_of(self._incarnation())))

    def _take_over(self, holder: RankLife, url: str, seconds: float) -> None:
        """The pod need not wait for a process that was here, and has gone, or has left the rank to this one."""
        log.info("rank %d goes on in place of %s", self.rank, holder)
        path = f"{self._data_path(f'ranks/{self.rank}/lease')}&ended={holder.encode()}"
        self._call("PUT", url, path, seconds)

    def _call(self, method: str, pod: str, path: str, seconds: float, **content: Any) -> dict[str, Any]:
        """One request that is answered with a JSON object, or with nothing."""
        self._own_process()
        url = pod + path
        if pod not in self._control:
            self._control[pod] = _control_client(pod, self._credentials)
        headers = self._credentials.headers()
        try:
            response = self._control[pod].request(method, path, timeout=seconds, headers=headers, **content)
        except httpx.HTTPError as error:
            raise _unreachable(pod, error) from error
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
        segments = self._shared_segments(home)
        segment = segments.lend() if segments is not None else None
        response: http.client.HTTPResponse | None = None
        try:
            path = self._data_path(what)
            if what == "batch" and self.allow_skipped:
                path += "&allow_skipped=true"
            response = self._post(home, path, body, seconds, segment)
            if response.status != 200:
                _raise_answer(response.status, response.read(), home)
            written = response.getheader(FRAME_BYTES_HEADER)
            if segments is not None and segment is not None and written is not None:
                response.read()  # nothing
                frame = segments.frame_in(segment, int(written))
                return _decode_frame(frame, positions, sample_ids, home)
            received = _read_frame(response, positions, sample_ids, home)
        except BaseException as error:
            if segments is not None and segment is not None:
                segments.drop(segment)  # the pod may still write there
            if response is None:
                raise
            # Whatever is left of this answer must not be taken for the next one's; KeyboardInterrupt included.
            if not response.isclosed() or not isinstance(error, RefillError):
                self._hang_up()
            if isinstance(error, (OSError, http.client.HTTPException)):
                raise _unreachable(home, error) from error
            raise
        if segments is not None:
            segments.seen(int(response.getheader("Content-Length") or 0))
            if segment is not None:
                segments.drop(segment)  # too small, or the pod was restarted
        return received

    def _shared_segments(self, home: str) -> SharedSegments | None:
        """What this thread lends to a pod on its own machine."""
        self._own_process()
        if not home.startswith(_UNIX):
            return None
        if not hasattr(self._bulk, "segments"):
            # No cycle: memory is let go of as soon as nobody has the connection any more.
            here = weakref.ref(self)

            def ask_for_name() -> str:
                connection = here()
                if connection is None:
                    raise PodUnreachable("the connection is gone")
                return connection._name_for_memory(home)

            self._bulk.segments = SharedSegments(home.removeprefix(_UNIX), ask_for_name)
        segments: SharedSegments = self._bulk.segments
        return segments

    def _name_for_memory(self, home: str) -> str:
        return str(self._call("POST", home, "/v1/memory", _PROBE_SECONDS).get("name"))

    def _post(
        self, home: str, path: str, body: bytes, seconds: float, segment: SharedSegment | None
    ) -> http.client.HTTPResponse:
        self._own_process()
        headers = {"Content-Type": "application/octet-stream"} | self._credentials.headers()
        if segment is not None:
            headers[MEMORY_HEADER] = segment.name
        if getattr(self._bulk, "home", home) != home:
            self._hang_up()
        self._bulk.home = home
        while True:
            connection: http.client.HTTPConnection | None = getattr(self._bulk, "connection", None)
            was_idle = connection is not None
            if connection is None:
                connection = self._bulk.connection = _connect(home, self._credentials)
            connection.timeout = seconds
            if connection.sock is not None:
                connection.sock.settimeout(seconds)
            try:
                connection.request("POST", path, body, headers)
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
        """A path that names this registration of the job, and this process: pods refuse it when theirs is a later one,
        or the rank is another process."""
        incarnation = quote(self._incarnation(), safe="")
        return f"{self._job_path(what)}?incarnation={incarnation}&life={self._life().encode()}"

    def _incarnation(self) -> str:
        return str(self.info()["incarnation"])

    def _own_process(self) -> None:
        """Drop connections that were opened before a fork: two processes must not share one."""
        if self._process != os.getpid():
            self._forget_connections()

    def _forget_connections(self) -> None:
        self._process = os.getpid()
        self._bulk = threading.local()
        self._control = {}
        self._of_ranks: dict[int, PodConnection] = {}
        self._watched = False

    def _job_path(self, what: str = "") -> str:
        return f"/v1/jobs/{quote(self.spec.name, safe='')}{what and '/'}{what}"


def _read_frame(
    response: http.client.HTTPResponse, positions: Int64Array | None, sample_ids: Int64Array | None, source: str
) -> ReceivedBatch:
    """Reads the answer's body into one buffer; its payload is not copied again."""
    length = response.length or 0
    frame = np.empty(length, dtype=np.uint8).data
    head = frame[:FRAME_HEADER_BYTES]
    _read_into(response, head)
    with _translated(source):
        _checked_header(head, length)  # before the rest is waited for
    _read_into(response, frame[FRAME_HEADER_BYTES:])
    return _decode_frame(frame, positions, sample_ids, source)


def _decode_frame(
    frame: memoryview, positions: Int64Array | None, sample_ids: Int64Array | None, source: str
) -> ReceivedBatch:
    """Payloads are views into ``frame``."""
    with _translated(source):
        header = _checked_header(frame[:FRAME_HEADER_BYTES], len(frame))
        found_positions, found_ids, lengths = decode_frame_arrays(header, frame[FRAME_HEADER_BYTES:])
        for asked, found in ((positions, found_positions), (sample_ids, found_ids)):
            if asked is not None and not np.array_equal(asked, found):
                raise InvalidInput(f"frame answers other requests than the {len(asked)} that were made")
    payloads, start = [], FRAME_HEADER_BYTES + header.arrays_bytes
    for size in lengths.tolist():
        payloads.append(frame[start : start + size])
        start += size
    return ReceivedBatch(found_ids.copy(), payloads)


def _checked_header(head: memoryview, length: int) -> FrameHeader:
    header = FrameHeader.decode(head)
    if header.total_bytes != length:
        raise InvalidInput(f"frame says that it has {header.total_bytes} bytes, but {length} come")
    return header


@contextmanager
def _translated(source: str) -> Iterator[None]:
    try:
        yield
    except InvalidInput as error:
        raise RefillError(f"{source} sent something else than a pod would: {error.message}") from error


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


class _UnixConnection(http.client.HTTPConnection):
    """HTTP/1.1 over the Unix socket of a pod on this machine."""

    def __init__(self, path: str) -> None:
        super().__init__("pod")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _connect(url: str, credentials: Credentials) -> http.client.HTTPConnection:
    if url.startswith(_UNIX):
        return _UnixConnection(url.removeprefix(_UNIX))
    parts = urlsplit(url)
    if parts.scheme == "https":
        context = credentials.ssl_context()
        return http.client.HTTPSConnection(parts.hostname or "", parts.port, context=context)
    return http.client.HTTPConnection(parts.hostname or "", parts.port)


def _control_client(url: str, credentials: Credentials) -> httpx.Client:
    # Pods are asked directly: http.client, which fetches the batches, knows no proxies either.
    if url.startswith(_UNIX):
        transport = httpx.HTTPTransport(uds=url.removeprefix(_UNIX), verify=False)
        return httpx.Client(base_url="http://pod", transport=transport)
    # Certificates are read for TLS only: that takes as long as a round trip to a store.
    verify = credentials.ssl_context() if url.startswith("https:") else False
    return httpx.Client(base_url=url, trust_env=False, verify=verify)


def _checked_url(url: str) -> str:
    if url.startswith(_UNIX):
        path = url.removeprefix(_UNIX)
        if not path.startswith("/") or len(os.fsencode(path)) > _LONGEST_UNIX_PATH_BYTES:
            raise InvalidInput(
                f"{url!r} is not the Unix socket of a pod: write unix: and a path that begins with / and has at most "
                f"{_LONGEST_UNIX_PATH_BYTES} bytes, like unix:/run/refill/refill.sock"
            )
        return url
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and parts.hostname and not parts.path.strip("/") and parts.port != 0
    except ValueError:  # a port that is no number, or a bracket that is not closed
        right = False
    if not right:
        raise InvalidInput(
            f"{url!r} is not the URL of a service, like http://refill:8000 or unix:/run/refill/refill.sock"
        )
    return url.rstrip("/")
