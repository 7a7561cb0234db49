"""What does a rank ask of the pods? The requests of a job, each made until it is answered or time is up."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refill.answer_checks import read_as_of_a_pod
from refill.credentials import Credentials
from refill.damage_log import DamageLog
from refill.errors import RefillError, UnknownJob
from refill.index_reads import column_blocks, count_samples, numbers_of_index, samples_by_ids
from refill.job_pods import JobPods, RunOfRank
from refill.orphans import ends_with_its_parent
from refill.patience import check_timeouts
from refill.pod_channel import PodChannel, Wait
from refill.protocol.column_values import ColumnValues
from refill.protocol.job_spec import JobSpec
from refill.protocol.wire_format import MAX_LABELS, MAX_SCORES, BatchRequest, Int64Array
from refill.received_batch import Expected, ReceivedBatch

__all__ = ["PodConnection", "ReceivedBatch"]

log = logging.getLogger(__name__)

_REPORT_SECONDS = 5.0
_OF_ONE_PROCESS = ("_process", "_of_ranks")


class PodConnection:
    """A rank's connection to its home pod. Picklable; the copy opens connections of its own.

    Raises errors of :mod:`refill.errors`: those of the pod as they are, everything else that can go wrong on the way
    as :class:`PodUnreachable`.

    :param service_url: any pod, or the service in front of them; asked to register the job.
    :param home: the URL of the pod to fetch batches from; None: the pod that the rank's number falls to, or the one
        behind ``service_url`` if that is a Unix socket.
    :param timeout_seconds: how long a request is tried again before its last error is raised; 0: tried once.
    :param credentials: None: those of the environment.
    :param allow_skipped: whether this rank may leave out positions below ones that it asks for.
    :param connect_timeout_seconds: how long looking up a pod's name may take, and then reaching its machine, for which
        all of its addresses are tried.
    :param goes_without_damaged: whether a batch comes without the samples that are damaged, which
        ``ReceivedBatch.damaged`` then names. Else that is an error.
    :param run: shared by all copies.
    """

    def __init__(
        self,
        service_url: str,
        spec: JobSpec,
        rank: int,
        home: str | None,
        timeout_seconds: float,
        credentials: Credentials | None = None,
        allow_skipped: bool = False,
        connect_timeout_seconds: float = 2.0,
        *,
        goes_without_damaged: bool = False,
        run: RunOfRank | None = None,
    ) -> None:
        check_timeouts(timeout_seconds, connect_timeout_seconds)
        self.allow_skipped = allow_skipped
        self._goes_without_damaged = goes_without_damaged
        self._damage = DamageLog()
        self._channel = PodChannel(credentials or Credentials(), connect_timeout_seconds)
        self._pods = JobPods(service_url, spec, rank, home, timeout_seconds, self._channel, run)
        self._begin_process()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OF_ONE_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_process()

    @property
    def spec(self) -> JobSpec:
        return self._pods.spec

    @property
    def rank(self) -> int:
        return self._pods.rank

    @property
    def timeout_seconds(self) -> float:
        return self._pods.timeout_seconds

    @timeout_seconds.setter
    def timeout_seconds(self, value: float) -> None:
        self._pods.timeout_seconds = value

    @property
    def home(self) -> str:
        """The pod that this rank's requests go to."""
        return self._pods.home

    @property
    def credentials(self) -> Credentials:
        return self._channel.credentials

    @property
    def service_url(self) -> str:
        return self._pods.service_url

    def info(self) -> dict[str, Any]:
        """What the pods say of the job; registers it the first time."""
        return self._pods.info()

    def goes_on(self, incarnation: str, epoch: int) -> None:
        """Fact: the loop goes on within an epoch, from a state of this run of the job. Raises :class:`JobLost` when
        pods have another one."""
        self._pods.goes_on(incarnation, epoch)

    def num_samples(self) -> int:
        """Of the dataset. The job need not be registered, and is not by this."""
        if self._pods.is_registered:
            return int(self.info()["num_samples"])
        count = partial(count_samples, self.spec.dataset, self._channel)
        return self._pods.retried(self._pods.service_url, count, register=False)

    def batch(
        self, epoch: int, positions: Int64Array, while_waiting: Callable[[], None] | None = None
    ) -> ReceivedBatch:
        """The samples that answer positions of this rank, in their order.

        :param while_waiting: is called about once a second while nothing comes, and may raise.
        """

        asked_by = ""

        def fetch(home: str, wait: Wait) -> ReceivedBatch:
            nonlocal asked_by
            asked_by = self._pods.incarnation

            def still_waits(pod: str) -> None:
                wait.still_waits(pod)
                if while_waiting is not None:
                    while_waiting()

            watched = Wait(wait.seconds, still_waits)
            return self._channel.fetch(home, self._batch_path(asked_by), body, Expected(positions), watched)

        self._own_process()
        ends_with_its_parent()
        self._pods.is_there()
        body = BatchRequest(epoch, self.rank, positions).encode()
        with self._pods.in_epoch(epoch):
            received = self._pods.retried(None, fetch)
            self._pods.has_come(asked_by)
        return received

    def _batch_path(self, incarnation: str) -> str:
        path = self._pods.data_path("batch", incarnation)
        return (
            path
            + ("&allow_skipped=true" if self.allow_skipped else "")
            + ("&damaged=say" if self._goes_without_damaged else "")
        )

    def goes_without(self, epoch: int, positions: Int64Array, sample_ids: Int64Array, why: list[RefillError]) -> None:
        """Fact: this rank goes on without what came for these positions, since it is damaged. Receipts name it."""
        self._damage.goes_without(self.spec.name, why)
        body = np.concatenate([positions, sample_ids]).astype("<i8").tobytes()
        self._pods.retried(None, self._pods.calls("PUT", f"epochs/{epoch}/ranks/{self.rank}/damaged", content=body))

    def samples(self, sample_ids: Int64Array) -> ReceivedBatch:
        """Exactly these samples, outside of any epoch. In as many requests as pods want it split into."""
        return samples_by_ids(sample_ids, partial(self._fetched, "samples"))

    def _fetched(self, what: str, body: bytes, expected: Expected) -> ReceivedBatch:
        def fetch(home: str, wait: Wait) -> ReceivedBatch:
            return self._channel.fetch(home, self._pods.data_path(what, self._pods.incarnation), body, expected, wait)

        return self._pods.retried(None, fetch)

    def lengths(self, num_samples: int) -> Int64Array:
        """Bytes of all samples of a dataset."""
        return numbers_of_index(num_samples, partial(self._fetched, "lengths"), self.home)

    def column(self, name: str, num_samples: int) -> Iterator[ColumnValues]:
        """Of all samples of a dataset, in blocks."""
        return column_blocks(num_samples, partial(self._fetched, f"columns/{name}"), self.home)

    def post_trace(self, epoch: int, sample_ids: Int64Array) -> None:
        """Say which samples this rank asks for in an epoch, in which order."""
        body = np.ascontiguousarray(sample_ids, dtype="<i8").tobytes()
        what = f"epochs/{epoch}/ranks/{self.rank}/trace"
        with self._pods.in_epoch(epoch):
            self._tell(what, body)

    def report_scores(self, sample_ids: Int64Array, scores: NDArray[np.float32]) -> None:
        """Report to pods how important training finds samples, ``(n,)``."""
        for start in range(0, len(sample_ids), MAX_SCORES):
            ids, of_ids = sample_ids[start : start + MAX_SCORES], scores[start : start + MAX_SCORES]
            self._tell(f"ranks/{self.rank}/scores", ids.astype("<i8").tobytes() + of_ids.astype("<f4").tobytes())

    def _tell(self, what: str, body: bytes) -> None:
        """Have pods keep something of this rank; what they keep of a run is lost with it."""
        asked_by = ""

        def put(home: str, wait: Wait) -> None:
            nonlocal asked_by
            asked_by = self._pods.incarnation
            self._channel.call("PUT", home, self._pods.data_path(what, asked_by), wait, content=body)

        self.info()
        self._pods.is_there()
        self._pods.retried(None, put)
        self._pods.has_come(asked_by)

    def drawn_from(self, epoch: int, num_samples: int) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """``(scores, cached)``, each ``(num_samples,)``: what all ranks draw an epoch from, as soon as all have come to
        draw it. The score of a sample that no rank has trained with is NaN."""
        with read_as_of_a_pod(self.home):
            scores, cached = np.empty(num_samples, dtype=np.float32), np.empty(num_samples, dtype=bool)
        for first in range(0, num_samples, MAX_LABELS):
            end = min(first + MAX_LABELS, num_samples)
            body = np.array([first, end], dtype="<i8").tobytes()
            expected = Expected(sample_ids=np.array([first], dtype=np.int64))
            payload = self._fetched(f"epochs/{epoch}/ranks/{self.rank}/scores", body, expected).payloads[0]
            count = end - first
            with read_as_of_a_pod(self.home):
                scores[first:end] = np.frombuffer(payload, dtype="<f4", count=count)
                bits = np.frombuffer(payload, dtype=np.uint8, offset=4 * count)
                cached[first:end] = np.unpackbits(bits, count=count)
        return scores, cached

    def report(self, data_wait_seconds: float, samples: int, num_bytes: int) -> None:
        """Report to the home pod what the loop has seen since the last report; tried once."""
        seen = {"rank": self.rank, "data_wait_seconds": data_wait_seconds, "samples": samples, "bytes": num_bytes}
        self._pods.calls("POST", "report", sent=seen)(self.home, Wait(_REPORT_SECONDS))

    def of_rank(self, rank: int) -> PodConnection:
        """A connection of this process for another rank, which asks for nothing itself: its process is given what this
        one reads."""
        self._own_process()
        if rank not in self._of_ranks:
            other = PodConnection.__new__(PodConnection)
            other.__setstate__(self.__getstate__())
            other._pods = self._pods.of_rank(rank)
            self._of_ranks[rank] = other
        return self._of_ranks[rank]

    def skipped(self, epoch: int, start: int, end: int) -> bool:
        """Whether this rank has left out some of the positions ``[start, end)`` of an epoch so far: in all its
        processes, those of earlier lives, too. False when the pods don't know."""
        path = self._pods.job_path(f"epochs/{epoch}/ranks/{self.rank}")
        params = {"start": start, "end": end, "incarnation": self._pods.incarnation}
        answer = self._pods.retried(None, lambda pod, wait: self._channel.call("GET", pod, path, wait, params=params))
        return answer.get("skipped") is not None

    def epoch_counts(self, epoch: int) -> dict[str, Any]:
        """Counts of an epoch, of each pod and in sum: of this run of the job, also when it has ended. Who has not asked
        for anything yet registers nothing by that, and looks at the run that runs, or ended last."""
        path = self._pods.job_path(f"epochs/{epoch}")
        run = self._pods.incarnation if self._pods.is_registered else None
        return self._pods.retried(
            self._pods.service_url if run is None else None,
            lambda pod, wait: self._channel.call("GET", pod, path, wait, params={"run": run} if run else {}),
            register=False,
        )

    def end_job(self) -> None:
        """End the job on all pods and free its memory; nothing happens when that was done before."""
        path = self._pods.job_path()
        try:
            self._pods.retried(
                self._pods.service_url,
                lambda pod, wait: self._channel.call("DELETE", pod, path, wait),
                register=False,
            )
        except UnknownJob:
            log.info("job %s had ended before", self.spec.name)

    def _own_process(self) -> None:
        if self._process != os.getpid():
            self._begin_process()

    def _begin_process(self) -> None:
        self._process = os.getpid()
        self._of_ranks: dict[int, PodConnection] = {}
