"""What can be set on a pod? Each setting has one name: ``memory_bytes`` here and in the OpenAPI docs,
``REFILL_MEMORY_BYTES`` in the environment, ``--memory-bytes`` on the command line."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Collection
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from refill.errors import InvalidInput, NotAllowed
from refill.protocol.sizes import parse_bytes
from refill_service.cache_core.job_memory import PodMemory
from refill_service.cache_core.team_quotas import TeamQuotas
from refill_service.object_store.store_url import WEB, StoreUrl, parse_url, parse_url_beginning
from refill_service.peers.certificates import Certificates

_MAX_REPLICAS = 10_000
_LEAST_SENDING_BYTES = 64 << 20
_LARGE_ANSWER_BYTES = 256 << 20
_TLS_CONNECTION_BYTES = 64 << 10
"""What one takes that has been answered."""
_TLS_PART, _LEAST_TLS_BYTES = 50, 32 << 20


def _split_urls(value: Any) -> Any:
    return [url.strip().rstrip("/") for url in value.split(",") if url.strip()] if isinstance(value, str) else value


def _whole_number(value: Any, *, least: int, most: int) -> int | None:
    """None for anything else: the field's own check says what is wrong with it."""
    try:
        number = int(value)
    except (TypeError, ValueError):
        return None
    return number if least <= number <= most else None


def _places(value: Any) -> Any:
    """Each in the one way to write it."""
    if not isinstance(value, str):
        return value
    try:
        return [str(parse_url_beginning(url.strip())) for url in value.split(",") if url.strip()]
    except InvalidInput as error:
        raise ValueError(error.message) from None


def _ordinal_by_name(pod_urls: tuple[str, ...], peer_urls: tuple[str, ...]) -> int:
    """Of the pod whose URL names this host, as in a StatefulSet. Two pods that guess the same number would both hand
    out that one's samples."""
    if len(peer_urls) < 2:
        return 0
    host = socket.gethostname().split(".")[0]
    number = re.search(r"-(\d+)$", host)
    if number is None:
        raise ValueError(
            f"there are {len(peer_urls)} pods, and this host's name, {host}, does not end in the number of one, as in "
            "refill-2: set ordinal (REFILL_ORDINAL), another one for each pod"
        )
    ordinal = int(number[1])
    urls = [each[ordinal] for each in (pod_urls, peer_urls) if ordinal < len(each)]
    if urls and not any((urlsplit(url).hostname or "").split(".")[0] == host.lower() for url in urls):
        raise ValueError(
            f"this host is called {host}, and the URL of pod {ordinal} is {urls[0]}: set ordinal (REFILL_ORDINAL), "
            "another one for each pod"
        )
    return ordinal


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Urls = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_urls)]
Places = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_places)]


class Settings(BaseSettings):
    """Settings of one pod; frozen, validated once at start."""

    model_config = SettingsConfigDict(env_prefix="REFILL_", frozen=True, extra="forbid")

    host: str = Field("0.0.0.0", description="Address that the pod listens on.")
    port: int = Field(8000, ge=1, le=65535, description="Port for clients and people (HTTP/1.1).")
    peer_port: int = Field(
        8001,
        ge=1,
        le=65535,
        description=(
            "Port for other pods (HTTP/2). A pod that is alone leaves it closed if clients need a token and pods need "
            "none."
        ),
    )
    unix_socket: str = Field(
        "",
        description=(
            "Path of a Unix socket for training processes on the pod's own machine, which name it `unix:PATH` in "
            "place of a URL. Empty: none."
        ),
    )
    ordinal: int = Field(
        -1,
        ge=-1,
        description=(
            "Number of this pod, from 0. -1: taken from this host's name, such as `refill-2`, if the URL of pod 2 "
            "names that host; else it has to be set."
        ),
    )
    replicas: int = Field(
        1, ge=1, le=_MAX_REPLICAS, description="Number of pods. Needed where `pod_urls` and `peer_urls` are templates."
    )
    pod_urls: Urls = Field(
        (),
        description=(
            "URLs of all pods for clients: in the order of their numbers, separated by commas, or one template "
            "with `{ordinal}`: `http://refill-{ordinal}.refill:8000`."
        ),
    )
    peer_urls: Urls = Field(
        (),
        description="URLs of all pods for each other, written like `pod_urls`: `http://refill-{ordinal}.refill:8001`.",
    )
    memory_bytes: Bytes = Field(
        2**30,
        ge=2**20,
        description=(
            "Memory for samples, such as `4GiB`, `512Mi` or `1500MB`: the pinned tier, and what jobs hold (chunks, "
            "samples that other pods sent ahead, reads under way, samples that were just sent)."
        ),
    )
    extra_memory_bytes: Bytes = Field(
        0,
        ge=0,
        description=(
            "What a pod may take beyond `memory_bytes` + 15 % + 200 MB: for the indexes of many samples (the chart's "
            "`extraMemory`). Only metrics and alerts look at it."
        ),
    )
    remote_memory_fraction: float = Field(
        0.1, ge=0, le=0.9, description="Part of a job's memory for samples that other pods send ahead."
    )
    in_flight_fraction: float = Field(
        0.1, gt=0, le=0.5, description="Part of the jobs' memory for chunks that are being read from the store."
    )
    pinned_fraction: float = Field(
        0.2,
        ge=0,
        le=0.9,
        description=(
            "Part of `memory_bytes` for the pinned tier: samples that stay from epoch to epoch, for all jobs on the "
            "same dataset."
        ),
    )
    pinned_dir: str = Field(
        "",
        description="Folder on a local disk for more of the pinned tier. Each pod needs one of its own. Empty: none.",
    )
    pinned_dir_bytes: Bytes = Field(0, ge=0, description="How much of that disk the pinned tier may use.")
    job_memory_fraction: float = Field(
        0.5,
        gt=0,
        le=1,
        description=(
            "The part of the jobs' memory that one job keeps at most while others want some, if it names no "
            "`memory_bytes`. A job that can't give memory back while it runs (policies `redox` and `exact`, "
            '`order="explicit"`, `shuffle=False`) gets at most this part of what is left.'
        ),
    )
    job_idle_seconds: float = Field(
        3600,
        gt=0,
        allow_inf_nan=False,
        description="A job is ended when nobody has asked anything of it for this long.",
    )
    wait_seconds: float = Field(
        10,
        gt=0,
        allow_inf_nan=False,
        description=(
            "How long the pod holds a request that waits for other ranks, or for a store that sends nothing. Then it "
            "answers what the request waits for, and the client asks again."
        ),
    )
    peer_timeout_seconds: float = Field(
        60, gt=0, le=86_400, description="How long a pod waits for the answer of another pod."
    )
    peer_connect_timeout_seconds: float = Field(
        2,
        gt=0,
        le=86_400,
        description="How long connecting to another pod may take. Then its address is looked up again.",
    )
    sending_bytes: Bytes = Field(
        0,
        ge=0,
        description=(
            "Bytes of answers that may be on their way to clients and pods at once; further requests wait. 0: a "
            "tenth of `memory_bytes`, 64 MiB at least; what is beyond that adds to the memory that the pod needs."
        ),
    )
    client_timeout_seconds: float = Field(
        60,
        gt=0,
        allow_inf_nan=False,
        description=(
            "A client or pod that stops in the middle of a request or an answer is cut off if it moved less than 64 "
            "KiB in this time."
        ),
    )
    max_connections: int = Field(
        4096,
        ge=1,
        le=1_000_000,
        description=(
            "Connections of clients, and requests of other pods, that are served at once. More are told that the "
            "pod is busy, and ask again."
        ),
    )
    drain_seconds: float = Field(
        3,
        ge=0,
        allow_inf_nan=False,
        description=(
            "How long a pod that was told to end (SIGTERM) still takes requests of its jobs. By then Kubernetes sends "
            "nobody to it any more."
        ),
    )
    grace_seconds: float = Field(
        25,
        gt=0,
        allow_inf_nan=False,
        description=(
            "This long after SIGTERM the pod breaks off the requests that are still under way. Keep it below "
            "`terminationGracePeriodSeconds` of Kubernetes."
        ),
    )
    client_tokens: str = Field(
        "",
        description=(
            "File with the bearer tokens of clients, one a line; or a folder with such a file for each team, as a "
            "mounted Secret is. Each team then has its jobs to itself. Empty: whoever reaches the port may ask."
        ),
    )
    peer_token: str = Field(
        "",
        description=(
            "File with the bearer token that pods show each other. Tokens on further lines are accepted, too. "
            "Empty: none."
        ),
    )
    token_overlap_seconds: float = Field(
        300,
        ge=0,
        allow_inf_nan=False,
        description=(
            "How long a token is still accepted after it was removed from its file, so that its holders have time to "
            "get the new one. 0: it ends within seconds; to replace one, keep both in the file for a while."
        ),
    )
    team_reserved_fraction: float = Field(
        0.5,
        ge=0,
        le=1,
        description=(
            "Part of the jobs' memory and of the connections that is kept for teams in equal shares. No other team can "
            "take a team's share. This and the next setting count where `client_tokens` names several teams."
        ),
    )
    team_max_jobs: int = Field(200, ge=1, description="How many jobs one team may have at a pod.")
    dataset_urls: Places = Field(
        (),
        description=(
            "The datasets that jobs may name, by where they lie, separated by commas: `s3://bucket/prefix`, "
            "`file:///folder`, `https://host/folder`, or `s3://`, `gs://`, `az://` or `hf://` for all that are there. "
            "Empty: all buckets and all datasets of the Hub that the pod can read, no folder and no web server."
        ),
    )
    tls_cert: str = Field("", description="File with the certificate for clients, PEM, with its chain. Empty: no TLS.")
    tls_key: str = Field("", description="File with the private key of `tls_cert`.")
    peer_tls_cert: str = Field(
        "",
        description=(
            "File with the certificate that a pod shows other pods, as a server and as a client. Empty: no TLS "
            "between pods."
        ),
    )
    peer_tls_key: str = Field("", description="File with the private key of `peer_tls_cert`.")
    peer_tls_ca: str = Field(
        "",
        description="File with the certificates of the authorities that must have signed the other pods' certificates.",
    )
    metrics_port: int = Field(
        0,
        ge=0,
        le=65535,
        description=(
            "A port only for `/metrics`, `/healthz` and `/readyz`, without token or TLS. 0: none; with "
            "`client_tokens`, `/metrics` on the clients' port then needs a token."
        ),
    )
    log_level: str = Field("info", description="`debug`, `info`, `warning` or `error`.")
    log_format: str = Field("text", description="`text`, or `json`: one object a line.")
    access_log: bool = Field(
        False, description="`true`: log a line for each request of clients and pods, except probes and `/metrics`."
    )

    @field_validator("log_level")
    @classmethod
    def _known_level(cls, value: str) -> str:
        if value.lower() not in ("debug", "info", "warning", "error"):
            raise ValueError("must be debug, info, warning or error")
        return value.lower()

    @field_validator("log_format")
    @classmethod
    def _known_format(cls, value: str) -> str:
        if value.lower() not in ("text", "json"):
            raise ValueError("must be text or json")
        return value.lower()

    @field_validator("host")
    @classmethod
    def _address(cls, value: str) -> str:
        """Not each of the servers looks up names."""
        try:
            return str(ipaddress.ip_address("127.0.0.1" if value == "localhost" else value))
        except ValueError:
            raise ValueError(
                f"{value!r} is no address: choose 127.0.0.1 for this machine alone, 0.0.0.0 for all, or ::"
            ) from None

    @field_validator("unix_socket")
    @classmethod
    def _possible_socket(cls, value: str) -> str:
        if value and (not value.startswith("/") or len(value.encode()) > 100 or "\0" in value):
            raise ValueError(f"{value!r} is not a path that begins with / and has at most 100 bytes")
        return value

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: dict[str, Any]) -> dict[str, Any]:
        given = dict(given)
        replicas = _whole_number(given.get("replicas", 1), least=1, most=_MAX_REPLICAS) or 0
        for name in ("pod_urls", "peer_urls"):
            urls = _split_urls(given.get(name) or ())
            if len(urls) == 1 and "{ordinal}" in urls[0]:
                urls = [urls[0].replace("{ordinal}", str(i)) for i in range(replicas)]
            given[name] = tuple(urls)
        if _whole_number(given.get("ordinal", -1), least=-1, most=-1) == -1:
            given["ordinal"] = _ordinal_by_name(given["pod_urls"], given["peer_urls"])
        return given

    @model_validator(mode="after")
    def _agree(self) -> Settings:
        if len(self.pod_urls) != len(self.peer_urls):
            raise ValueError(f"pod_urls names {len(self.pod_urls)} pods and peer_urls {len(self.peer_urls)}")
        if self.replicas > 1 and not self.pod_urls:
            raise ValueError(
                f"replicas is {self.replicas}, and pod_urls and peer_urls name no pods: set them (REFILL_POD_URLS, "
                f"REFILL_PEER_URLS); for pods on one machine: refill serve --pods {self.replicas}"
            )
        for name in ("pod_urls", "peer_urls"):
            urls = getattr(self, name)
            if len(set(urls)) < len(urls):
                raise ValueError(f"{name} names {next(url for url in urls if urls.count(url) > 1)} twice")
        for url in (*self.pod_urls, *self.peer_urls):
            if not re.match(r"https?://[^/]+", url):
                raise ValueError(f"{url!r} is not a URL like http://refill-0.refill:8000")
        ports = {"port": self.port, "peer_port": self.peer_port, "metrics_port": self.metrics_port}
        for (name, port), (other, same) in combinations(ports.items(), 2):
            if port == same != 0:
                raise ValueError(f"{name} and {other} are both {port}: they need a port each")
        if self.ordinal >= self.num_pods:
            raise ValueError(
                f"ordinal is {self.ordinal} but there are {self.num_pods} pods, numbered from 0: all pods are to be "
                "told of one more (on Kubernetes: helm upgrade --set replicas=..., not kubectl scale)"
            )
        if self.remote_memory_fraction + self.in_flight_fraction > 0.9:
            raise ValueError("remote_memory_fraction and in_flight_fraction leave no memory for chunks")
        if self.drain_seconds >= self.grace_seconds:
            raise ValueError(
                f"drain_seconds is {self.drain_seconds:g} and leaves no time of grace_seconds, {self.grace_seconds:g}, "
                "to finish requests"
            )
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key need each other: a certificate and its private key")
        of_peers = (self.peer_tls_cert, self.peer_tls_key, self.peer_tls_ca)
        if any(of_peers) and not all(of_peers):
            raise ValueError("peer_tls_cert, peer_tls_key and peer_tls_ca need each other")
        if self.client_tokens and self.num_pods > 1 and not self.peers_are_known:
            raise ValueError(
                "client_tokens is set, and without peer_token or peer_tls_cert whoever reaches peer_port may read and "
                "end every job: set one of them, too"
            )
        for name, certificate, urls in (
            ("tls_cert", self.tls_cert, self.pod_urls),
            ("peer_tls_cert", self.peer_tls_cert, self.peer_urls),
        ):
            scheme = "https" if certificate else "http"
            if wrong := [url for url in urls if not url.startswith(f"{scheme}:")]:
                has = "is set" if certificate else "is not set"
                raise ValueError(f"{name} {has}, and {wrong[0]} does not begin with {scheme}://")
        if bool(self.pinned_dir) != bool(self.pinned_dir_bytes):
            raise ValueError("pinned_dir and pinned_dir_bytes need each other: which folder, and how much of its disk")
        return self

    @property
    def sending_limit_bytes(self) -> int:
        return self.sending_bytes or self._usual_sending_bytes

    @property
    def _usual_sending_bytes(self) -> int:
        return max(_LEAST_SENDING_BYTES, self.memory_bytes // 10)

    @property
    def answer_limit_bytes(self) -> int:
        """Most bytes of samples in one answer. It passes even if it is larger than what may be on its way at once."""
        return max(self.sending_limit_bytes, min(self.memory_bytes // 4, _LARGE_ANSWER_BYTES))

    @property
    def client_certificates(self) -> Certificates | None:
        return Certificates(Path(self.tls_cert), Path(self.tls_key)) if self.tls_cert else None

    @property
    def peer_certificates(self) -> Certificates | None:
        if not self.peer_tls_cert:
            return None
        return Certificates(Path(self.peer_tls_cert), Path(self.peer_tls_key), Path(self.peer_tls_ca))

    def quotas(self, teams: Callable[[], Collection[str]]) -> TeamQuotas:
        return TeamQuotas(teams, self.team_reserved_fraction, self.team_max_jobs)

    @property
    def peers_are_known(self) -> bool:
        """Whether who asks as a pod has to show that it is one."""
        return bool(self.peer_token or self.peer_tls_cert)

    @property
    def serves_peers(self) -> bool:
        """A pod that is alone needs no port for others, and where clients need a token it has none that is open."""
        return self.num_pods > 1 or self.peers_are_known or not self.client_tokens

    def check_dataset(self, url: str) -> StoreUrl | None:
        """The place in ``dataset_urls`` that holds a dataset; None when they are empty, and it lies in a bucket or on
        the Hub.

        Raises :class:`NotAllowed` for a dataset that no job may name.
        """
        named = parse_url(url)
        served = [parse_url_beginning(each) for each in self.dataset_urls]
        holding = [each for each in served if named.is_within(each)]
        if holding:
            return min(holding, key=lambda each: len(each.segments))
        if named.scheme == "file" and not any(each.scheme == "file" for each in served):
            raise NotAllowed(
                f"this pod does not serve {named}: it reads folders of its own machine only where it was started with "
                f"dataset_urls that hold them (refill serve --dataset-urls {named}, or REFILL_DATASET_URLS)"
            )
        if named.scheme in WEB and not served:
            raise NotAllowed(
                f"this pod does not serve {named}: it asks web servers only where dataset_urls lists them (refill "
                f"serve --dataset-urls {named}, or REFILL_DATASET_URLS)"
            )
        if served:
            raise NotAllowed(f"this pod does not serve {named}: it has {', '.join(self.dataset_urls)} (dataset_urls)")
        return None

    def check_data(self, url: str) -> StoreUrl:
        """The same of what an index, which may be anybody's, says where its blobs lie: only what is listed. Else an
        index in a stranger's bucket could have the pod read, with its own rights, what no index was ever made of."""
        held = self.check_dataset(url)
        if held is None:
            raise NotAllowed(
                f"this pod does not serve {parse_url(url)}: an index may name data elsewhere only where dataset_urls "
                "lists it (REFILL_DATASET_URLS)"
            )
        return held

    @property
    def pod_memory(self) -> PodMemory:
        """How memory is divided."""
        return PodMemory(
            self.memory_bytes,
            self.num_pods,
            pinned_fraction=self.pinned_fraction,
            remote_fraction=self.remote_memory_fraction,
            in_flight_fraction=self.in_flight_fraction,
            kept_fraction=self.job_memory_fraction,
        )

    @property
    def promised_bytes(self) -> int:
        """What the pod's resident set stays below, with all that it needs beside samples."""
        more_answers = max(0, self.sending_bytes - self._usual_sending_bytes)
        return int(self.memory_bytes * 1.15) + 200_000_000 + more_answers + self.extra_memory_bytes

    @property
    def max_tls_connections(self) -> int:
        """Of ``max_connections``, so many as there is memory for."""
        most_bytes = max(_LEAST_TLS_BYTES, self.memory_bytes // _TLS_PART)
        return min(self.max_connections, most_bytes // _TLS_CONNECTION_BYTES)

    @property
    def other_pods(self) -> list[int]:
        return [pod for pod in range(self.num_pods) if pod != self.ordinal]

    @property
    def num_pods(self) -> int:
        return max(1, len(self.peer_urls))


def default_pod_memory(memory_bytes: int, num_pods: int) -> PodMemory:
    """How pods divide so much memory each, whose other settings nobody has changed."""
    return Settings.model_construct(memory_bytes=memory_bytes, peer_urls=("",) * num_pods).pod_memory


def load_settings(**overrides: Any) -> Settings:
    """Settings from ``REFILL_*`` variables and ``overrides``, which win.

    Raises :class:`InvalidInput` with one line that names the first wrong setting and its variable.
    """
    try:
        return Settings(**{name: value for name, value in overrides.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        name = "_".join(str(part) for part in first["loc"]) if first["loc"] else ""
        where = f"setting {name} (REFILL_{name.upper()}): " if name else "settings: "
        raise InvalidInput(where + first["msg"].removeprefix("Value error, ")) from error
