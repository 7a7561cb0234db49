"""Who stands at a pod's door? What a request's head says of that, for the one order of checks
(:mod:`refill_service.cache_core.admission`).

A job belongs to the holder of the token that it was registered with: others may not read its data, look at it or end
it. Where there are no tokens, everybody may do everything, but for web pages. A page can give its own name the address
127.0.0.1 (DNS rebinding), and then reads what a pod there answers; the browser still says by which name it asks. So a
pod that listens on loopback alone answers to names of loopback, and to those of its URLs. Where it listens for other
machines, it can't know all its names: there pages are refused that name another origin than the pod.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from refill.errors import RefillError
from refill_service.cache_core.admission import admission, is_of
from refill_service.memory.loop_turns import KEEPERS, STRANGERS
from refill_service.peers.peers import PODS_HEADER
from refill_service.serving.access_log import HOLDER
from refill_service.serving.silent_peers import SilentPeers
from refill_service.serving.tokens import Tokens
from refill_service.settings import Settings

HEALTH, READY, METRICS = "/healthz", "/readyz", "/metrics"

CONNECTION = "refill.connection"
"""In a request's scope: what it came over, where that wants to know whose it is."""
OVER_LIMIT = "refill.over_limit"
"""In a request's scope: its connection is one more than these, as many as there may be."""

_JOBS, _JOBS_OF_PODS = "/v1/jobs/", "/peer/v1/jobs/"
_BATCH, _BATCHES = "/batch", "/v1/batches"
_PODS_HEADER = PODS_HEADER.encode()
_KEPT = 64
"""Names that were looked at: those who ask for batches ask by few."""


class Door:
    """Checks every request that comes to one of a pod's ports before any route sees it.

    :param tokens: None: anybody may come in.
    :param job_holder: who holds a job of this pod; None when it has none of that name.
    :param names: by which the pod may be asked; None: by any.
    :param of_pods: other pods ask here, and not clients: nothing is answered without a token, and who has one is no
        silent peer. To clients, probes are answered, for the kubelet, which has none.
    :param of_runs: routes whose path has a job's name, and that answer of all runs that had it: these look themselves
        at who holds each run. The name may be another team's by now.
    :param for_keepers: those who look after the pod ask here, and nobody is asked who they are.
    """

    def __init__(
        self,
        settings: Settings,
        job_holder: Callable[[str], str | None],
        tokens: Tokens | None = None,
        *,
        names: PodNames | None = None,
        of_pods: SilentPeers | None = None,
        of_runs: Iterable[BaseRoute] = (),
        for_keepers: bool = False,
    ) -> None:
        self.asker = "client" if of_pods is None else "pod"
        """As it is counted."""
        self.most_requests = settings.max_connections
        self.under_way = 0
        self.stopping: RefillError | None = None
        """Once set, the answer to every request that is not under way yet."""
        self.pod = settings.ordinal, settings.num_pods
        self.job_holder, self.tokens, self.names, self.of_pods = job_holder, tokens, names, of_pods
        self.of_runs, self.for_keepers = list(of_runs), for_keepers

    def admission(self, scope: Scope) -> RefillError | None:
        """As :func:`refill_service.cache_core.admission.admission`."""
        return admission(Head(self, scope))

    def turn_of(self, scope: Scope) -> str | None:
        """In whose turn a request is answered that was looked at. What pods ask for a job is asked by the job's
        team."""
        if self.for_keepers:
            return KEEPERS
        if self.tokens is not None and HOLDER not in scope:
            return STRANGERS
        if self.of_pods is not None:
            return self.job_holder(_job_in(scope["path"], _JOBS_OF_PODS)) or ""
        return str(scope.get(HOLDER, ""))


class Head:
    """Of one request; see :class:`refill_service.cache_core.admission.Head`."""

    def __init__(self, door: Door, scope: Scope) -> None:
        self._door, self._scope = door, scope
        self.of_pods = door.of_pods is not None
        self.most_requests = scope.get(OVER_LIMIT, door.most_requests)
        self.stopping, self.pod = door.stopping, door.pod

    @property
    def looks_after_the_pod(self) -> bool:
        return not self.of_pods and looks_after_the_pod(self._scope["path"])

    @property
    def is_health(self) -> bool:
        scope = self._scope
        return not self.of_pods and scope["path"] in (HEALTH, READY) and scope["method"] in ("GET", "HEAD")

    @property
    def is_one_too_many(self) -> bool:
        return OVER_LIMIT in self._scope or self._door.under_way >= self._door.most_requests

    @property
    def foreign_name(self) -> str | None:
        return None if self._door.names is None else self._door.names.foreign_in(self._scope)

    @property
    def shows_token(self) -> bool:
        return bool(_presented(self._scope))

    @property
    def team(self) -> str | None:
        if self._door.tokens is None:
            return ""
        holder = self._door.tokens.holder_of(_presented(self._scope))
        if holder is not None:
            self._scope[HOLDER] = holder  # also of what is refused
        return holder

    def comes_from(self, team: str) -> bool:
        door, connection = self._door, self._scope.get(CONNECTION)
        if door.of_pods is not None:
            door.of_pods.is_known(self._scope["client"])
            return True
        return door.for_keepers or connection is None or bool(connection.belongs_to(team))

    @property
    def said_num_pods(self) -> bytes | None:
        return _value(self._scope, _PODS_HEADER) if self.of_pods else None

    @property
    def job_of_others(self) -> str | None:
        scope, door = self._scope, self._door
        if door.tokens is None or self.of_pods or not scope["path"].startswith(_JOBS):
            return None
        job = _job_in(scope["path"], _JOBS)  # the server has decoded it, for the routes too
        if is_of(door.job_holder(job) or "", scope[HOLDER]):
            return None
        return None if any(route.matches(scope)[0] is Match.FULL for route in door.of_runs) else job


class PodNames:
    """The names by which a pod that wants no token may be asked. Its Unix socket has no name, and no web page reaches
    it."""

    def __init__(self, settings: Settings) -> None:
        self._listens_on_loopback = _is_of_loopback(settings.host)
        self._configured = {urlsplit(url).hostname for url in settings.pod_urls} | {settings.host.lower()}

    def foreign_in(self, scope: Scope) -> str | None:
        """Another host's name that a request is for, or from a page of; None: there is none."""
        if (scope.get("server") or ("", None))[1] is None:
            return None
        hosts = [_name_in(f"//{value}") for value in _values(scope, b"host")]
        names = hosts if self._listens_on_loopback else []
        origins = [_name_in(value) for value in _values(scope, b"origin")]
        # Where any name may be the pod's, a page of the pod itself names the same one.
        of_pod = {} if self._listens_on_loopback else set(hosts)
        asked = (*names, *(each for each in origins if each not in of_pod))
        return next((name for name in asked if name not in self._configured and not _is_of_loopback(name)), None)


def looks_after_the_pod(path: str) -> bool:
    """Such requests are answered when the pod is busy, too: else it would be restarted for being busy."""
    return path in (HEALTH, READY, METRICS)


def asks_for_batches(path: str) -> bool:
    """As far as its path says: there may be no such route."""
    return path == _BATCHES or (path.startswith(_JOBS) and path.endswith(_BATCH))


def holder_of(request: Request) -> str:
    """Whose token a request came with."""
    return str(request.scope.get(HOLDER, ""))


def _job_in(path: str, before: str) -> str:
    return path.removeprefix(before).split("/", 1)[0]


def _presented(scope: Scope) -> bytes:
    scheme, _, token = bytes(_value(scope, b"authorization") or b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def _value(scope: Scope, header: bytes) -> bytes | None:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    return next((value for name, value in headers if name == header), None)


def _values(scope: Scope, header: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == header]


@lru_cache(maxsize=_KEPT)
def _name_in(url: str) -> str:
    """Empty where there is none, as in ``null``."""
    try:
        return urlsplit(url.strip()).hostname or ""
    except ValueError:
        return ""


@lru_cache(maxsize=_KEPT)
def _is_of_loopback(host: str) -> bool:
    name = host.lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):  # nobody else can own these: RFC 6761
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
