"""What do all tests share? A real S3 server on loopback, started once, pods that start fast, and the same draws."""

from __future__ import annotations

import functools
import gc
import json
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx._config as httpx_config
import httpx._transports.default as httpx_transport
import pytest
import yaml
from hypothesis import HealthCheck, settings

from refill_service.demo import local_cluster
from refill_service.demo.local_cluster import PortClaims
from tests import forked_processes, imported_tests
from tests.azurite import AzureServer, azurite, installed
from tests.draws import FULL
from tests.waiting import until_serving
from tests.web_files import Hub, WebFiles

pytest_plugins = ["tests.pod_fixtures", "tests.variants"]

_exit = local_cluster.LocalCluster.__exit__


def _exited(pods: local_cluster.LocalCluster, kind: Any, error: Any, trace: Any) -> None:
    """Whatever clients, stores and other pods have done: nothing was an error that a pod did not foresee."""
    _exit(pods, kind, error, trace)
    if kind is None:
        for log in sorted(pods._log_folder.glob("pod-*.log")):  # noqa: SLF001  # also of pods that are no more
            before, traceback, after = log.read_text(errors="replace").partition("Traceback")
            assert not traceback, f"{log.name}: a pod has failed: {before[-300:]}{traceback}{after[:10_000]}"


# Looked at when torch is imported, by all that tests start, too: its threads wait for each other at full speed.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell that starts tests in the background has it ignored, and so would be what they start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# What a test leaves behind need not end in order, which takes a fifth of the CPU of a pod's whole life here.
local_cluster.STOP_SIGNAL = signal.SIGKILL
local_cluster.start_process = forked_processes.start_pod  # type: ignore[assignment]  # what is used of Popen
local_cluster.LocalCluster.__exit__ = _exited  # type: ignore[assignment, method-assign]
# ``httpx.get`` reads all certificates of the machine for each request: 26 ms of CPU, thousands of times.
httpx_transport.create_ssl_context = functools.cache(httpx_transport.create_ssl_context)  # type: ignore[attr-defined]
# It waits 5 s for an answer unless told otherwise. A pod may take longer on a machine that is busy with other tests.
for _part in ("connect", "read", "write", "pool"):
    setattr(httpx_config.DEFAULT_TIMEOUT_CONFIG, _part, 60.0)
# ``yaml.safe_load`` in C: a tenth of the time.
yaml.SafeLoader = yaml.CSafeLoader
# As before Python 3.14, whose loader workers can have no function that a test made inside. Tests that spawn say so.
multiprocessing.set_start_method("fork", force=True)
# jsonschema makes a grammar of international addresses, 2 s of CPU in each process. No schema of ours has one.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]

# How long a draw takes says how busy the machine is. The same ones each time, so that a change fails by its own doing;
# four times as many in make test-all, fewer in make quick; others with TEST_FLAGS=--hypothesis-profile=thorough, and in
# make test-plans. A property that wants more or fewer than others says so by tests/draws.py.
_UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", _UNHURRIED, derandomize=True, max_examples=FULL // 4)
settings.register_profile("full", _UNHURRIED, derandomize=True, max_examples=FULL)
settings.register_profile("quick", _UNHURRIED, derandomize=True, max_examples=15)
settings.register_profile("thorough", _UNHURRIED, max_examples=2000)
settings.register_profile("ten-thousand", _UNHURRIED, max_examples=10_000)
settings.load_profile("same")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Four more than there are cores: tests of pods wait for half of their time. ``logical``: as many."""
    return len(os.sched_getaffinity(0)) + 4 * (config.option.numprocesses == "auto")


def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Forked from one process that has imported these tests: else each would need 3 s of CPU more for all of them."""
    os.environ[imported_tests.ASKED] = json.dumps(config.invocation_params.args)
    for spec in specs:
        spec.python = shlex.join(forked_processes.python_of(forked_processes.TESTS))
    del os.environ[imported_tests.ASKED]


LONG = (
    *("tests/trainers/", "tests/end_to_end/test_demo", "tests/end_to_end/test_strangers_hour"),
    *("tests/integration/test_lost_machines", "tests/integration/test_planned_samplers"),
    "tests/security/test_whatever_clients_do",
    *("tests/security/test_silent_peers", "tests/security/test_names_after_restart"),
    *("tests/integration/test_orphans", "tests/integration/test_subsets"),
    *("tests/cache_core/test_mutants", "tests/chaos/test_chaos"),
)
"""Where there are tests that take as long as a hundred others."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each process has an equal run of all tests. Long ones come first in it: begun last, they would be waited for."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    modules: dict[str, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.nodeid.partition("::")[0], []).append(item)
    long = [module for module in modules if module.startswith(LONG)]
    others = [item for module in modules if module not in long for item in modules[module]]
    num_left, ordered = len(items), list[pytest.Item]()
    for process in range(processes):
        first = [item for module in long[process::processes] for item in modules[module]]
        num_others = max(0, num_left // (processes - process) - len(first))
        ordered += first + others[:num_others]
        del others[:num_others]
        num_left = len(items) - len(ordered)
    items[:] = ordered + others


def pytest_collection_finish() -> None:
    """What was imported stays: it need not be looked through again and again, least of all in forked processes."""
    gc.collect()
    gc.freeze()
    # A loader that goes with the garbage can't tell its workers to end, and torch waits for each: 5 s, unless told so.
    if (loaders := sys.modules.get("torch.utils.data._utils")) is not None:
        loaders.MP_STATUS_CHECK_INTERVAL = 2.0  # type: ignore[attr-defined]


ACCESS_KEY = "test"
SECRET_KEY = "test-secret"


@dataclass(frozen=True)
class S3Server:
    """ministack in a process of its own. It checks neither secrets nor rights; tests/s3_gate.py does."""

    endpoint_url: str
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY

    @property
    def environment(self) -> dict[str, str]:
        """For processes that are to use this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self) -> Any:
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
        )

    def new_bucket(self) -> str:
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        self.client().create_bucket(Bucket=name)
        return name


_ports = PortClaims()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    port = free_port()
    log = tmp_path_factory.mktemp("s3") / "server.log"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
        "BIND_HOST": "127.0.0.1",
        "GATEWAY_PORT": str(port),
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "ministack"], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        until_serving(f"http://127.0.0.1:{port}/", lambda: process.poll() is not None, log.read_text, ok=False)
        yield S3Server(f"http://127.0.0.1:{port}")
    finally:
        process.kill()  # asked to end, it would wait 10 s for connections that tests have left open
        process.wait()


@pytest.fixture
def s3_environment(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, with this process's environment set so that it is the default."""
    _set_environment(monkeypatch, s3_server.environment)
    return s3_server


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    if why_not := installed():
        pytest.skip(why_not)
    log = tmp_path_factory.mktemp("azurite") / "server.log"
    with azurite(free_port(), log) as (server, process):
        until_serving(server.endpoint_url, lambda: process.poll() is not None, log.read_text, ok=False)
        yield server


@pytest.fixture
def azure_environment(azure_server: AzureServer, monkeypatch: pytest.MonkeyPatch) -> AzureServer:
    """As :func:`s3_environment`."""
    _set_environment(monkeypatch, azure_server.environment)
    return azure_server


@pytest.fixture
def gcs_environment(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The same server speaks Google's protocol. It ignores put-if-absent, which refill does not ask for."""
    environment = {"GOOGLE_BASE_URL": s3_server.endpoint_url, "GOOGLE_BEARER_TOKEN": "test-token"}
    _set_environment(monkeypatch, environment)
    return s3_server


@pytest.fixture
def web() -> Iterator[WebFiles]:
    files = WebFiles()
    yield files
    files.close()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub(token="hf_test_token")
    _set_environment(monkeypatch, {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_test_token"})
    yield hub
    hub.close()


def _set_environment(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "HF_", "REFILL_")):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def free_port() -> int:
    """Another one each time, and in every process: who got one may not listen on it yet."""
    return _ports.take(1)[0]
