"""Batches that a pod answers in the moment in which they come are as those that take their way, byte for byte."""

from __future__ import annotations

import http.client
import json
import socket
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from tests.pod_fixtures import rank_of
from tests.waiting import until

from refill.protocol.wire_format import FRAME_HEADER_BYTES, BatchRequest, FrameHeader, decode_frame_arrays
from refill_service.demo.local_cluster import LocalCluster

TAKES_ITS_WAY = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}


class Asking:
    """A rank's own connection to a pod."""

    def __init__(self, cluster: LocalCluster, dataset: str) -> None:
        self.name = f"job-{uuid.uuid4().hex[:8]}"
        settings = {"name": self.name, "dataset": dataset, "policy": "planned", "chunk_size": 8}
        self.rank = rank_of(cluster, settings | {"memory_bytes": 50_000_000, "world_size": 2})
        self.num_samples = self.rank.info()["num_samples"]
        self.url = cluster.pod_urls[0]
        host, _, port = self.url.removeprefix("http://").partition(":")
        self.sock = socket.create_connection((host, int(port)), 30)

    def piece(self, positions: range, headers: dict[str, str] | None = None, rank: int = 0) -> bytes:
        """A request, head and body together."""
        body = BatchRequest(0, rank, np.array(positions)).encode()
        path = f"/v1/jobs/{self.name}/planned/batch?plan={self.rank.plan_id}&ranks=2"
        about = {"Host": "localhost", "Content-Length": str(len(body))} | (headers or {})
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in about.items()), "", ""]
        return "\r\n".join(lines).encode() + body

    def ask(self, positions: range, headers: dict[str, str] | None = None, rank: int = 0) -> tuple[Any, bytes]:
        self.sock.sendall(self.piece(positions, headers, rank))
        answer = http.client.HTTPResponse(self.sock, method="POST")
        answer.begin()
        return answer, answer.read()

    def begins(self) -> None:
        """All shares have begun to read, and the pod knows whose connection this is."""
        for place in range(0, 120, 8):
            self.ask(range(place, place + 1))
        places = iter(range(1, 8))
        until(lambda: was_at_once(self.ask(range(place := next(places), place + 1))[0]), "a sample is in memory")


def was_at_once(answer: http.client.HTTPResponse) -> bool:
    """The server's own answers have a date."""
    return answer.getheader("date") is None


def headers_of(answer: http.client.HTTPResponse) -> dict[str, str]:
    names = {name.lower(): value for name, value in answer.getheaders()}
    return {name: value for name, value in names.items() if name not in ("date", "server", "x-request-id")}


def samples_in(frame: bytes) -> dict[int, bytes]:
    header = FrameHeader.decode(frame)
    _, ids, lengths = decode_frame_arrays(header, memoryview(frame)[FRAME_HEADER_BYTES:])
    ends = FRAME_HEADER_BYTES + header.arrays_bytes + np.cumsum(lengths)
    return {
        int(sample): frame[end - length : end] for sample, end, length in zip(ids, ends, lengths.tolist(), strict=True)
    }


@pytest.fixture
def asking(packed: tuple[str, dict[str, bytes]], tmp_path: Any) -> Iterator[Asking]:
    with LocalCluster(1, tmp_path, {"memory_bytes": "256MiB", "pinned_fraction": 0}) as cluster:
        found = Asking(cluster, packed[0])
        yield found
        found.sock.close()
        httpx.delete(f"{found.url}/v1/jobs/{found.name}")


def test_an_epoch_is_the_same_by_both_ways(asking: Asking) -> None:
    at_once: list[bool] = []
    first: dict[int, bytes] = {}
    for start in range(0, asking.num_samples, 20):
        positions = range(start, min(start + 20, asking.num_samples))
        answer, frame = asking.ask(positions)
        again, same = asking.ask(positions, TAKES_ITS_WAY)
        assert (answer.status, again.status, frame) == (200, 200, same)
        assert not was_at_once(again)
        first |= samples_in(frame)
        at_once.append(was_at_once(answer))
        assert headers_of(answer) == headers_of(again)
        assert answer.getheader("x-request-id")
    assert sum(at_once) > len(at_once) // 2
    assert sorted(first) == list(range(asking.num_samples))


def test_who_is_refused_at_once_takes_nothing(asking: Asking) -> None:
    asking.begins()
    until(lambda: was_at_once(asking.ask(range(41, 48), rank=7)[0]), "its samples are there")
    refused, text = asking.ask(range(41, 48), rank=7)
    assert (refused.status, json.loads(text)["message"]) == (400, "rank 7 is not one of 2 ranks")
    assert refused.getheader("x-request-id")
    assert refused.getheader("content-type") == "application/json"
    answer, frame = asking.ask(range(41, 48))
    assert (answer.status, was_at_once(answer), len(samples_in(frame))) == (200, True, 7)


def test_two_requests_in_one_piece_are_answered_in_their_order(asking: Asking) -> None:
    asking.begins()
    asking.sock.sendall(b"".join(asking.piece(range(start, start + 7)) for start in (49, 57)))
    with asking.sock.makefile("rb") as file:
        for start in (49, 57):
            assert file.readline().startswith(b"HTTP/1.1 200 ")
            head = http.client.parse_headers(file)
            frame = file.read(int(head["content-length"]))
            positions = decode_frame_arrays(FrameHeader.decode(frame), memoryview(frame)[FRAME_HEADER_BYTES:])[0]
            assert positions.tolist() == list(range(start, start + 7))
