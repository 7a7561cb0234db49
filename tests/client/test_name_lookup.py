"""A resolver that is slow, or away: nobody waits for it longer than the limit, and what it finds late is used."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from tests.client.fake_pod import FakePod
from tests.waiting import until

from refill.errors import PodUnreachable
from refill.pods import name_lookup
from refill.pods.credentials import Credentials
from refill.pods.name_lookup import addresses_of
from refill.pods.pod_connection import PodConnection
from refill.pods.pod_link import PodLink
from refill.protocol.job_spec import JobSpec

LONG_SECONDS = 1000.0
"""Longer than a test may take: whoever waits for so long fails."""

NAME = ("refill-0.refill", 8000)


class Resolver:
    """In place of the system's. Answers as soon as it is let."""

    def __init__(self) -> None:
        self.asked = 0
        self.answers = threading.Event()
        self.address: tuple[str, int] | Exception = ("127.0.0.2", 8000)

    def __call__(self, host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        self.asked += 1
        self.answers.wait()
        if isinstance(self.address, Exception):
            raise type(self.address)(*self.address.args)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", self.address)]


def lookups() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "refill-lookup"]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    made = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", made)
    yield made
    made.answers.set()
    until(lambda: not lookups(), "the end of all lookups")
    with suppress(OSError):
        addresses_of(*NAME, LONG_SECONDS)  # an answer that nobody waited for is taken


def found(ask: Callable[[], Any] = lambda: addresses_of(*NAME, LONG_SECONDS)) -> list[Any]:
    return [address for *_, address in ask()]


def given_up() -> None:
    with pytest.raises(OSError, match=r"the name refill-0.refill is still being looked up after 0.01 s: does DNS"):
        addresses_of(*NAME, 0.01)


def test_connecting_waits_for_a_name_no_longer_than_its_limit_and_uses_what_comes_late(resolver: Resolver) -> None:
    """Each lookup takes longer than the limit, and the pod is reached all the same."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        resolver.address = server.getsockname()
        link = PodLink("http://refill-0.refill:8000", Credentials(), 0.01)
        link.timeout = LONG_SECONDS
        with pytest.raises(OSError, match=r"still being looked up after 0.01 s"):
            link.connect()
        resolver.answers.set()
        until(lambda: not lookups(), "the late answer")
        link = PodLink("http://refill-0.refill:8000", Credentials(), LONG_SECONDS)
        link.timeout = LONG_SECONDS
        link.connect()
        assert link.sock.getpeername() == server.getsockname()
        assert resolver.asked == 1, "the late answer was not used"
        link.close()


def test_batches_come_where_each_lookup_takes_longer_than_the_limit(
    pod: FakePod, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(pod.url.rpartition(":")[2])

    def slow(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        time.sleep(0.3)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    pod.url = f"http://refill-0.refill:{port}"
    spec = JobSpec("job", "file:///data")
    connection = PodConnection(f"http://refill:{port}", spec, 0, None, 60, connect_timeout_seconds=0.05)
    assert len(connection.batch(0, np.arange(8)).payloads) == 8


def test_a_rank_says_which_name_it_waited_for(resolver: Resolver) -> None:
    spec = JobSpec("job", "file:///data")
    connection = PodConnection("http://refill:8000", spec, 0, None, 0.3, connect_timeout_seconds=0.05)
    wanted = r"rank 0 gives up on .*: the name refill is still being looked up after 0.05 s: does DNS answer\?"
    with pytest.raises(PodUnreachable, match=wanted):
        connection.info()


def test_each_connection_looks_its_name_up_anew(resolver: Resolver) -> None:
    resolver.answers.set()
    assert found() == [("127.0.0.2", 8000)]
    resolver.address = ("127.0.0.3", 8000)
    assert found() == [("127.0.0.3", 8000)], "a pod that was replaced is not found"


def test_a_late_answer_is_used_once(resolver: Resolver) -> None:
    given_up()
    resolver.answers.set()
    until(lambda: not lookups(), "the late answer")
    resolver.address = ("127.0.0.3", 8000)
    assert found() == [("127.0.0.2", 8000)]
    assert found() == [("127.0.0.3", 8000)]
    assert resolver.asked == 2


def test_a_late_answer_is_forgotten_in_time(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    given_up()
    resolver.answers.set()
    until(lambda: not lookups(), "the late answer")
    resolver.address = ("127.0.0.3", 8000)
    monkeypatch.setattr(name_lookup, "_LATE_ANSWER_SECONDS", 0.0)
    assert found() == [("127.0.0.3", 8000)]


def test_lookups_do_not_pile_up(resolver: Resolver) -> None:
    """The name is asked for again and again, by several threads; then all who still wait get the answer."""
    for _ in range(20):
        given_up()
    answers: list[list[Any]] = []
    threads = [threading.Thread(target=lambda: answers.append(found())) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert len(lookups()) == 1
    resolver.answers.set()
    for thread in threads:
        thread.join()
    assert answers == [[("127.0.0.2", 8000)]] * 4


def test_names_do_not_wait_for_one_another(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    given_up()
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, **_: [(host, port)])
    assert found(lambda: addresses_of("refill-1.refill", 8000, LONG_SECONDS)) == [8000]


def test_what_a_resolver_says_late_is_heard(resolver: Resolver) -> None:
    given_up()
    resolver.address = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    resolver.answers.set()
    with pytest.raises(socket.gaierror, match="Temporary failure"):
        addresses_of(*NAME, LONG_SECONDS)


def test_an_error_keeps_nobody_who_has_asked(resolver: Resolver) -> None:
    """Who asks may hold memory that it lends to a pod."""

    class Asker:
        def ask(self) -> None:
            try:
                addresses_of(*NAME, LONG_SECONDS)
            except socket.gaierror:
                return
            raise AssertionError("the name was found")

    resolver.address = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    resolver.answers.set()
    asker = Asker()
    gone = weakref.ref(asker)
    gc.disable()
    try:
        asker.ask()
        del asker
        assert gone() is None
    finally:
        gc.enable()


def test_a_forked_process_looks_up_by_itself(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a lookup, and while another thread begins one."""
    given_up()
    parent = os.getpid()

    def of_process(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        return resolver(host, port) if os.getpid() == parent else [("child",)]

    monkeypatch.setattr(socket, "getaddrinfo", of_process)
    begins, goes_on, start = threading.Event(), threading.Event(), threading.Thread.start

    def slow_start(thread: threading.Thread) -> None:
        if thread.name == "refill-lookup" and os.getpid() == parent:
            begins.set()
            goes_on.wait()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", slow_start)
    other = threading.Thread(target=lambda: addresses_of("refill-1.refill", 8000, LONG_SECONDS))
    other.start()
    begins.wait()
    child = os.fork()
    if child == 0:  # no assertions and no pytest in here
        signal.alarm(60)
        os._exit(0 if addresses_of(*NAME, LONG_SECONDS) == [("child",)] else 1)
    goes_on.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    resolver.answers.set()
    other.join()
    assert found() == [("127.0.0.2", 8000)]


def test_where_no_thread_can_be_started_a_name_is_looked_up_all_the_same(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the end of a process."""

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    resolver.answers.set()
    assert found() == [("127.0.0.2", 8000)]
    assert found() == [("127.0.0.2", 8000)]
    assert resolver.asked == 2, "an answer that was taken is kept"
