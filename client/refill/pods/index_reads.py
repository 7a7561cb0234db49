"""How are samples read by their ids, and what the index says of all of them? In as many requests as it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from urllib.parse import urlencode

import numpy as np

from refill.errors import RequestTooLarge
from refill.pods.answer_checks import checked_num_samples, read_as_of_a_pod
from refill.pods.pod_channel import PodChannel, Wait
from refill.pods.received_batch import Expected, ReceivedBatch
from refill.protocol.column_values import BLOCK_VALUES, ColumnValues, decode_values, joined_values
from refill.protocol.wire_format import MAX_LABELS, MAX_SAMPLES, Int64Array

Fetch = Callable[[bytes, Expected], ReceivedBatch]
"""One request: its body, and what the answer has to be."""


class DatasetIndex:
    """What the index of a dataset says before a job is registered. Errors as those of a connection.

    :param retried: makes one request, as often as it takes.
    :param pod: who is asked.
    """

    def __init__(
        self, dataset: str, channel: PodChannel, pod: str, retried: Callable[[Callable[[str, Wait], Any]], Any]
    ) -> None:
        self._dataset, self._channel, self._retried = dataset, channel, retried
        self.pod = pod
        self.version = ""
        """The fingerprint that it has to have still; it is known when :meth:`about` was asked."""

    def about(self) -> dict[str, Any] | None:
        """Its ``num_samples``, ``metadata`` and ``fingerprint``. None from pods of a version that does not say so."""

        def look(pod: str, wait: Wait) -> dict[str, Any] | None:
            answer = self._channel.call("GET", pod, "/v1/dataset", wait, params={"url": self._dataset})
            checked_num_samples(answer, pod)
            metadata, fingerprint = answer.get("metadata"), answer.get("fingerprint")
            return answer if isinstance(metadata, dict) and isinstance(fingerprint, str) else None

        found: dict[str, Any] | None = self._retried(look)
        self.version = "" if found is None else str(found["fingerprint"])
        return found

    def lengths(self, num_samples: int) -> Int64Array:
        return numbers_of_index(num_samples, partial(self._fetched, "lengths"), self.pod)

    def column(self, name: str, num_samples: int) -> Iterator[ColumnValues]:
        return column_blocks(num_samples, partial(self._fetched, f"columns/{name}"), self.pod)

    def _fetched(self, what: str, body: bytes, expected: Expected) -> ReceivedBatch:
        path = f"/v1/dataset/{what}?{urlencode({'url': self._dataset, 'version': self.version})}"
        found: ReceivedBatch = self._retried(lambda pod, wait: self._channel.fetch(pod, path, body, expected, wait))
        return found


def count_samples(dataset: str, channel: PodChannel, pod: str, wait: Wait) -> int:
    """How many samples a dataset has, which no job need be registered for."""
    answer = channel.call("GET", pod, "/v1/dataset", wait, params={"url": dataset})
    return checked_num_samples(answer, pod)


def samples_by_ids(sample_ids: Int64Array, fetch: Fetch) -> ReceivedBatch:
    """Exactly these samples ``(n,)``. A request that pods find too large is split."""
    parts = []
    to_ask = [sample_ids[start : start + MAX_SAMPLES] for start in range(0, len(sample_ids), MAX_SAMPLES)]
    while to_ask:
        ids = to_ask.pop(0)
        try:
            parts.append(fetch(np.ascontiguousarray(ids, dtype="<i8").tobytes(), Expected(sample_ids=ids)))
        except RequestTooLarge:
            if len(ids) < 2:
                raise
            to_ask[:0] = np.array_split(ids, 2)
    if len(parts) == 1:
        return parts[0]
    return ReceivedBatch(sample_ids.copy(), [payload for part in parts for payload in part.payloads])


def numbers_of_index(num_samples: int, fetch: Fetch, pod: str) -> Int64Array:
    """A number of each sample of a dataset, ``(num_samples,)``.

    :param pod: who is asked, for errors.
    """
    with read_as_of_a_pod(pod):
        found = np.empty(num_samples, dtype=np.int64)
    for first in range(0, num_samples, MAX_LABELS):
        end = min(first + MAX_LABELS, num_samples)
        body = np.array([first, end], dtype="<i8").tobytes()
        part = fetch(body, Expected(sample_ids=np.array([first], dtype=np.int64)))
        with read_as_of_a_pod(pod):
            found[first:end] = np.frombuffer(part.payloads[0], dtype="<i8", count=end - first)
    return found


def column_blocks(num_samples: int, fetch: Fetch, pod: str) -> Iterator[ColumnValues]:
    """The values of a column of a dataset, a block at a time: of samples 0 and up, as many as ``BLOCK_VALUES``."""
    for first in range(0, num_samples, BLOCK_VALUES):
        end = min(first + BLOCK_VALUES, num_samples)
        body = np.array([first, end], dtype="<i8").tobytes()
        part = fetch(body, Expected(sample_ids=np.array([first], dtype=np.int64)))
        with read_as_of_a_pod(pod):
            found = decode_values(part.payloads[0], end - first)
        yield found


def labels_in(blocks: Iterator[ColumnValues], pod: str) -> Int64Array:
    """Labels ``(num_samples,)``, of the blocks of their column."""
    every = list(blocks)
    with read_as_of_a_pod(pod):
        return np.asarray(joined_values(every), dtype=np.int64)
