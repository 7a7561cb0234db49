"""Pods without processes: N real nodes in one event loop, whose requests to each other are calls that a test can lose.

All that decides is the pods' own and the client's own: tables, owners, homes, routes, connections of ranks. What is
left out is the network and the process: a pod that is killed, or ends, loses all that it knew.
"""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import unquote

import httpx
import numpy as np

from refill.errors import PodUnreachable, RefillError, error_from_wire
from refill.pods.credentials import Credentials
from refill.pods.pod_channel import Asked, PodChannel, Wait
from refill.pods.pod_connection import PodConnection, RunOfRank
from refill.pods.received_batch import Expected, ReceivedBatch, decode_frame
from refill.protocol.job_spec import JobSpec
from refill.protocol.rank_life import RankLife
from refill_service.memory.loop_turns import LoopTurns
from refill_service.peers.peers import PODS_HEADER, Body, BodyPieces, FrameReader, Peers
from refill_service.pod.cache_node import CacheNode, PodPhase
from refill_service.serving.app import doors_of
from refill_service.serving.batch_door import BatchAtOnce
from refill_service.serving.silent_peers import SilentPeers
from refill_service.settings import load_settings

__all__ = ["CalledPods", "Packed", "PodsInProcess", "Rank", "Rule", "Training", "scope_of", "spec_of"]

_LOOKS = 500
Result = TypeVar("Result")
Packed = tuple[str, dict[str, bytes]]


@dataclass
class Rule:
    """What becomes of requests whose method and path hold ``what``, to pod ``to`` (None: any), of pod ``by`` (None: of
    anybody).

    :param answer: whether they are carried out, and only the answer does not come.
    :param times: of so many; -1: of all.
    """

    what: str
    to: int | None = None
    answer: bool = False
    times: int = 1
    held: asyncio.Event | None = None
    """They wait for it; None: they are lost."""
    by: int | None = None
    seen: int = field(default=0)

    def applies(self, request: str, to: int, by: int | None) -> bool:
        if self.times == 0 or self.what not in request or self.to not in (None, to) or self.by not in (None, by):
            return False
        self.times -= 1
        self.seen += 1
        return True


class PodsInProcess:
    """``num_pods`` pods, as ``LocalCluster`` has them in processes. Its methods are called from the test's thread."""

    def __init__(self, num_pods: int, *, loop: asyncio.AbstractEventLoop | None = None, **settings: Any) -> None:
        self.num_pods = num_pods
        self.nodes: list[CacheNode | None] = []
        self._ended: list[CacheNode] = []
        self.rules: list[Rule] = []
        self.settings = {
            "memory_bytes": "4MiB",
            "pinned_fraction": 0,
            "wait_seconds": 1,
            "dataset_urls": "file:///",
        } | settings
        """Of pods that are started from now on."""
        self._apps: dict[tuple[str, int], Any] = {}
        self.at_once: dict[int, BatchAtOnce] = {}
        self._loop = loop or asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda _, context: self._errors.append(context))
        self._errors: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> PodsInProcess:
        self._thread.start()
        self._start_all()
        return self

    def __exit__(self, *_: object) -> None:
        for pod in range(self.num_pods):
            self.kill(pod)
        left = self.do(self._left())
        self._ended.clear()
        self._apps.clear()
        self.at_once.clear()
        gc.collect()  # what nobody has looked at is told of
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        assert not left, f"pods that have ended hold {left}"
        assert not self._errors, f"nobody was told of {self._errors}"

    @property
    def are_over(self) -> bool:
        return self._loop.is_closed()

    @property
    def pod_urls(self) -> list[str]:
        return [f"http://pod-{pod}" for pod in range(self.num_pods)]

    def node(self, pod: int) -> CacheNode:
        found = self.nodes[pod]
        assert found is not None, f"pod {pod} is down"
        return found

    def do(self, work: Coroutine[Any, Any, Result], seconds: float = 60) -> Result:
        """In the loop of the pods."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)
        except TimeoutError:
            if self.are_over:
                raise RuntimeError("the pods have ended") from None
            raise

    def kill(self, *pods: int) -> None:
        for pod in pods:
            self.do(self._kill(pod))

    def start(self, *pods: int) -> None:
        for pod in pods:
            self.do(self._start(pod))

    def scale(self, num_pods: int) -> None:
        """End all, the last one first, as those of a StatefulSet end, and start another number."""
        self.kill(*reversed(range(self.num_pods)))
        self.num_pods = num_pods
        self._start_all()

    def rule(self, what: str, **how: Any) -> Rule:
        self.rules.append(Rule(what, **how))
        return self.rules[-1]

    def event(self) -> asyncio.Event:
        """For what a rule holds."""

        async def made() -> asyncio.Event:
            return asyncio.Event()

        return self.do(made())

    def set(self, event: asyncio.Event) -> None:
        self._loop.call_soon_threadsafe(event.set)

    def get(self, pod: int, path: str) -> dict[str, Any]:
        status, _, body = self.do(self.request("client", pod, "GET", path))
        if status != 200:
            raise error_from_wire(json.loads(body), status=status, source=f"pod {pod}")
        found: dict[str, Any] = json.loads(body)
        return found

    def _start_all(self) -> None:
        self.nodes = [None] * self.num_pods
        for pod in range(self.num_pods):
            self.start(pod)

    async def _start(self, pod: int) -> None:
        settings = load_settings(
            ordinal=pod,
            pod_urls=",".join(self.pod_urls),
            peer_urls=",".join(self.pod_urls),
            **self.settings,
        )
        node = CacheNode(settings, peers=CalledPeers(settings.peer_urls, self, pod))
        doors = doors_of(node, LoopTurns(), SilentPeers(settings.host, settings.peer_port, settings.num_pods))
        self._apps["client", pod], self._apps["peer", pod] = doors.clients, doors.pods
        self.at_once[pod] = doors.at_once
        node.start()
        node.phase = PodPhase.READY
        self.nodes[pod] = node

    async def _kill(self, pod: int) -> None:
        node, self.nodes[pod] = self.nodes[pod], None
        if node is not None:
            node.phase = PodPhase.STOPPING
            await node.close()
            self._ended.append(node)

    async def _left(self) -> list[str]:
        """What pods that have ended hold still."""
        rooms = {"gate": "used_bytes", "sending_to_clients": "inside_bytes", "sending_to_pods": "inside_bytes"}
        rooms |= {"bodies": "used_bytes", "bodies_of_pods": "used_bytes"}
        held = [(name, getattr(getattr(node, name), of)) for node in self._ended for name, of in rooms.items()]
        for _ in range(_LOOKS):  # a rank's last requests may be on their way
            if not (tasks := asyncio.all_tasks() - {asyncio.current_task()}):
                break
            await asyncio.sleep(0.01)
        return [f"{name} {count}" for name, count in held if count] + [str(task) for task in tasks]

    async def request(
        self,
        asker: str,
        pod: int,
        method: str,
        path: str,
        content: bytes | None = None,
        headers: Any = None,
        by: int | None = None,
    ) -> tuple[int, httpx.Headers, bytes]:
        """Raises :class:`PodUnreachable` when the pod is down, or the request or its answer is lost.

        :param by: the pod that asks.
        """
        gone = PodUnreachable(f"pod {pod} does not answer", pod=pod)
        for rule in [rule for rule in self.rules if not rule.answer and rule.applies(f"{method} {path}", pod, by)]:
            if rule.held is None:
                raise gone
            await rule.held.wait()
        node = self.nodes[pod] if pod < self.num_pods else None
        if node is None:
            raise gone
        scope = scope_of(method, path, content or b"", headers)
        # In a task of its own, as with servers: else a pod would wait for its turn within one of another pod, and that
        # one for it.
        called = asyncio.create_task(_called(self._apps[asker, pod], scope, content or b""), context=Context())
        status, answer_headers, answer = await called
        if self.nodes[pod] is not node:
            raise gone
        for rule in [rule for rule in self.rules if rule.answer and rule.applies(f"{method} {path}", pod, by)]:
            if rule.held is None:
                raise gone
            await rule.held.wait()
        return status, answer_headers, answer


def scope_of(method: str, path: str, content: bytes, headers: Any = None) -> dict[str, Any]:
    """A request, as a server has it."""
    path, _, query = path.partition("?")
    given = {"host": "pod", "content-length": str(len(content))} | dict(headers or {})
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 123),
        "server": ("pod", 80),
    }


async def _called(app: Any, scope: dict[str, Any], content: bytes) -> tuple[int, httpx.Headers, bytes]:
    """What a server does for one request. An HTTP client in between would take as long as all that is tested."""
    body: list[bytes] = []
    started: dict[str, Any] = {}
    answered = asyncio.Event()
    bodies = iter([{"type": "http.request", "body": content, "more_body": False}])

    async def receive() -> dict[str, Any]:
        if (message := next(bodies, None)) is not None:
            return message
        await answered.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            started.update(message)
        elif message["type"] == "http.response.body":
            body.append(message.get("body", b""))
            if not message.get("more_body", False):
                answered.set()

    async with asyncio.timeout(60):
        try:
            await app(scope, receive, send)
        except Exception:  # as a server says it
            return 500, httpx.Headers(), b""
    return started["status"], httpx.Headers(started["headers"]), b"".join(body)


class CalledPeers(Peers):
    """The other pods, called in their own event loop."""

    def __init__(self, urls: tuple[str, ...], pods: PodsInProcess, own: int) -> None:
        super().__init__(urls, 60)
        self._pods, self._own = pods, own

    async def _answer(self, *request: Any) -> bytes:
        return (await self._answered(*request))[1]

    async def _answered(
        self, pod: int, method: str, path: str, content: bytes | None, headers: Any = None
    ) -> tuple[httpx.Headers, bytes]:
        said = {PODS_HEADER: str(self._pods.num_pods)} | (headers or {})
        status, answered, body = await self._pods.request("peer", pod, method, path, content, said, self._own)
        if status >= 400:
            raise error_from_wire(json.loads(body), status=status, source=self.name(pod))
        return answered, body

    async def call(self, pod: int, method: str, path: str, body: Body = None, *, apart: bool = False) -> Any:
        headers = {"content-type": "application/json"} if isinstance(body, dict) else {}
        if isinstance(body, dict):
            body = json.dumps(body).encode()
        elif isinstance(body, BodyPieces):
            body = body.numbers.astype("<i8").tobytes()
        answer = await self._answer(pod, method, path, body, headers)
        return json.loads(answer) if answer else None

    async def get_bytes(self, pod: int, path: str, most_bytes: int) -> bytes:
        return await self._answer(pod, "GET", path, None)

    @asynccontextmanager
    async def frames(self, pod: int, path: str, body: bytes) -> AsyncIterator[FrameReader]:
        _, answer = await self._answered(pod, "POST", path, body)
        pieces = [answer]

        class Reader:
            async def read_chunk(self) -> bytes | None:
                return pieces.pop() if pieces else None

        yield FrameReader(Reader(), self.name(pod))  # type: ignore[arg-type]


class CalledPods(PodChannel):
    """Pods are called, not asked over a network."""

    def __init__(self, pods: PodsInProcess) -> None:
        super().__init__(Credentials(), 1)
        self._pods = pods

    def _request(self, method: str, url: str, path: str, content: bytes | None, headers: Any = None) -> Any:
        pod = int(url.rpartition("-")[2])
        request = self._pods.request("client", pod, method, path, content, headers)
        try:
            return self._pods.do(request)
        except RuntimeError as error:  # the test is over, and somebody looks after a home of its
            request.close()
            if not self._pods.are_over:
                raise
            raise PodUnreachable(f"pod {pod} does not answer", pod=pod) from error

    def call(
        self,
        method: str,
        pod: str,
        path: str,
        wait: Wait,
        *,
        sent: Any = None,
        content: bytes = b"",
        params: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        url = httpx.URL(f"http://x{path}").copy_merge_params(params or {})
        request = httpx.Request(method, url, **({"content": content} if sent is None else {"json": sent}))
        status, _, body = self._request(method, pod, request.url.raw_path.decode(), request.content, request.headers)
        if status >= 300:
            raise error_from_wire(json.loads(body), status=status, source=pod)
        found: dict[str, Any] = json.loads(body) if body else {}
        return found

    def fetch(self, pod: str, path: str, body: bytes, expected: Expected, wait: Wait) -> ReceivedBatch:
        status, _, answer = self._request("POST", pod, path, body)
        if status != 200:
            raise error_from_wire(json.loads(answer), status=status, source=pod)
        return decode_frame(memoryview(answer), expected, pod)

    def fetch_all(self, asked: list[Asked], wait: Wait) -> list[ReceivedBatch | RefillError]:
        found: list[ReceivedBatch | RefillError] = []
        for each in asked:
            try:
                found.append(self.fetch(*each, wait))
            except RefillError as error:
                found.append(error)
        return found


class Rank(PodConnection):
    """A rank's connection as it is, but that pods are called.

    :param process: tells training processes apart.
    :param first_pod: whose URL it is given.
    """

    def __init__(
        self,
        pods: PodsInProcess,
        spec: JobSpec,
        rank: int,
        *,
        process: int = 1,
        first_pod: int = 0,
        timeout_seconds: float = 30,
        goes_without_damaged: bool = False,
        run: RunOfRank | None = None,
    ) -> None:
        url = pods.pod_urls[first_pod]
        super().__init__(url, spec, rank, None, timeout_seconds, goes_without_damaged=goes_without_damaged, run=run)
        self._channel = CalledPods(pods)
        self.process = process

    @property
    def life(self) -> RankLife:
        """Of no process of this machine: nothing of it looks after a home, or says goodbye."""
        return RankLife("test", 10 * self.process + self.rank + 1_000_000, 1, "")

    def _life(self) -> RankLife:
        return self.life

    def says_goodbye(self) -> None:
        """As its process does when it ends."""
        path = f"/v1/jobs/{self.spec.name}/ranks/{self.rank}/lease"
        self._channel.call("DELETE", self.home, path, Wait(30), params={"life": self.life.encode()})


def spec_of(dataset: str, **settings: Any) -> JobSpec:
    """Of a live job."""
    how = {"policy": "redox", "chunk_size": 16, "memory_bytes": 600_000, "world_size": 2}
    return JobSpec(f"live-{uuid.uuid4().hex[:8]}", dataset, **(how | settings))


class Training:
    """Ranks of a job that ask for batches, and what came of it: the truth that receipts are held against."""

    def __init__(self, pods: PodsInProcess, spec: JobSpec, num_samples: int, batch: int = 100, **how: Any) -> None:
        self.pods = pods
        self.spec = spec
        self.num_samples = num_samples
        self.batch = batch
        self.ranks = [Rank(pods, spec, rank, **how) for rank in range(spec.world_size)]
        self.samples: dict[tuple[int, int, int], int] = {}
        self.length = int(self.ranks[0].info()["samples_per_rank"])

    def ask(self, rank: int, epoch: int, first: int = 0, end: int | None = None) -> None:
        end = self.length if end is None else min(end, self.length)
        for start in range(first, end, self.batch):
            positions = np.arange(start, min(start + self.batch, end))
            batch = self.ranks[rank].batch(epoch, positions)
            if batch.damaged:
                places = list(batch.damaged)
                why = list(batch.damaged.values())
                self.ranks[rank].goes_without(epoch, positions[places], batch.sample_ids[places], why)
            for position, sample in zip(positions.tolist(), batch.sample_ids.tolist(), strict=True):
                before = self.samples.setdefault((epoch, rank, position), sample)
                assert before == sample, (
                    f"rank {rank} epoch {epoch} position {position}: {before}, asked again {sample}"
                )

    def all_ask(self, epoch: int, first: int = 0, end: int | None = None) -> None:
        """At the same time, as ranks do: an epoch begins when all of them have come."""
        self.together(*((lambda rank=rank: self.ask(rank, epoch, first, end)) for rank in range(self.spec.world_size)))  # type: ignore[misc]

    def together(self, *work: Callable[[], object]) -> None:
        errors: list[BaseException] = []

        def carry_out(each: Callable[[], object]) -> None:
            try:
                each()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=carry_out, args=(each,)) for each in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "a rank hangs"
        if errors:
            raise errors[0]

    def receipt(self, epoch: int, pod: int = 0) -> dict[str, Any]:
        return self.pods.get(pod, f"/v1/jobs/{self.spec.name}/epochs/{epoch}/receipt")

    def truth(self, epoch: int) -> tuple[int, int]:
        """``(missing, twice)``: samples of an epoch that nobody has had, and deliveries beyond the first, of jobs whose
        ranks divide the dataset."""
        had = [sample for (of_epoch, _, _), sample in self.samples.items() if of_epoch == epoch]
        return self.num_samples - len(set(had)), len(had) - len(set(had))

    def check(self, epoch: int) -> None:
        assert self.truth(epoch) == (0, 0), f"epoch {epoch}: (missing, twice) {self.truth(epoch)}"
        found = self.receipt(epoch)
        counts = {name: found[name] for name in ("delivered", "duplicates", "missing", "exact")}
        assert counts == {"delivered": self.num_samples, "duplicates": 0, "missing": 0, "exact": True}
