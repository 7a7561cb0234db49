"""``refill serve --pods 3``: how do several pods run on one machine, to try them? Each as a process, on loopback.

Pod n listens 10 n ports above the first one's. Lines of their logs come out with the pod's number; one that ends takes
the others with it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

import httpx

from refill.errors import InvalidInput
from refill_service.demo.local_cluster import start_process, stop_processes
from refill_service.interrupts import interrupts_after
from refill_service.machine_memory import machine_memory, too_much
from refill_service.serving.serve import cant_listen
from refill_service.settings import Settings, load_settings

_BETWEEN_PORTS = 10
_OF_ONE_POD = ("pinned_dir", "unix_socket")
_PORTS = ("port", "peer_port", "metrics_port")
_GIVEN_HERE = ("ordinal", "replicas", "pod_urls", "peer_urls")
_MAX_PODS = 16
_LOOK_SECONDS = 0.2
_STREAM = socket.SOCK_STREAM
_OPEN = b"open: whoever reaches"


def run_local_pods(num_pods: int, given: dict[str, Any]) -> int:
    """Until SIGINT or SIGTERM, or until a pod ends; returns the exit status.

    :param given: settings of every pod, as options of the command; those that are None come from the environment.
    """
    if not 1 <= num_pods <= _MAX_PODS:
        raise InvalidInput(f"--pods must be 1 to {_MAX_PODS}, got {num_pods}")
    environment = _environment_of_all(given)
    for name in _GIVEN_HERE:
        if environment.get(_variable(name)):
            raise InvalidInput(f"--pods gives each pod its {name}: leave it out, and {_variable(name)}, too")
    settings = {name: environment.get(_variable(name)) for name in Settings.model_fields}
    first = load_settings(**settings | {"ordinal": 0})  # what is wrong is said once
    pods = [_environment_of(first, environment, pod, num_pods) for pod in range(num_pods)]
    for pod in range(num_pods):
        _check_ports(first, pod)
    here = machine_memory()
    warning = too_much(first.memory_bytes, here, num_pods)
    if warning is not None and too_much(first.memory_bytes, here) is None:  # else each pod says it
        print(f"refill: warning: {warning}", file=sys.stderr)
    signal.signal(signal.SIGTERM, _end)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for pod, variables in enumerate(pods):
            with interrupts_after():
                processes.append(_start(pod, variables))
        return _watch(processes, pods[0][_variable("pod_urls")].split(","), first)
    except KeyboardInterrupt:
        return 0
    finally:
        stop_processes(processes)


def _variable(name: str) -> str:
    return f"REFILL_{name.upper()}"


def _environment_of_all(given: dict[str, Any]) -> dict[str, str]:
    """Options before variables; for a laptop, which serves itself and what lies in this folder."""
    beside = {"host": "127.0.0.1", "dataset_urls": f"s3://,{Path.cwd().as_uri()}", "drain_seconds": "0"}
    found = {_variable(name): value for name, value in beside.items()} | os.environ
    return found | {_variable(name): str(value) for name, value in given.items() if value is not None}


def _environment_of(first: Settings, all_pods: dict[str, str], pod: int, num_pods: int) -> dict[str, str]:
    host = f"[{first.host}]" if ":" in first.host else first.host
    host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
    urls = {
        "pod_urls": ("https" if first.tls_cert else "http", first.port),
        "peer_urls": ("https" if first.peer_tls_cert else "http", first.peer_port),
    }
    own = {
        name: ",".join(f"{scheme}://{host}:{port + _BETWEEN_PORTS * each}" for each in range(num_pods))
        for name, (scheme, port) in urls.items()
    }
    own["ordinal"] = str(pod)
    for name in _PORTS:
        if port := getattr(first, name):
            own[name] = str(port + _BETWEEN_PORTS * pod)
    for name in _OF_ONE_POD:
        if path := getattr(first, name):
            own[name] = f"{path}-{pod}"
    return all_pods | {_variable(name): value for name, value in own.items()}


def _check_ports(first: Settings, pod: int) -> None:
    """Whoever listens there already would be taken for a pod of these."""
    for port in (getattr(first, name) for name in _PORTS):
        if not port:
            continue
        try:
            kind, _, _, _, address = socket.getaddrinfo(first.host, port + _BETWEEN_PORTS * pod, type=_STREAM)[0]
            with socket.socket(kind, _STREAM) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind(address)
        except OSError as error:
            said = cant_listen(first.host, port + _BETWEEN_PORTS * pod, error)
            raise InvalidInput(f"pod {pod} {said}") from error


def _start(pod: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    process = start_process(["serve"], environment, subprocess.PIPE)
    assert process.stdout is not None
    threading.Thread(target=_pass_on, args=(pod, process.stdout), daemon=True).start()
    return process


def _pass_on(pod: int, lines: IO[bytes]) -> None:
    for line in lines:
        if pod and _OPEN in line:  # as the first one, which has said so
            continue
        sys.stderr.write(f"pod {pod} | {line.decode(errors='replace')}")
        sys.stderr.flush()


def _watch(processes: list[subprocess.Popen[bytes]], urls: list[str], first: Settings) -> int:
    said = False
    while all(process.poll() is None for process in processes):
        if not said and all(map(_is_ready, urls)):
            said = True
            folders = ", ".join(first.dataset_urls)
            print(f"{len(urls)} pods are ready, with datasets in {folders}: {' '.join(urls)}", flush=True)
        time.sleep(_LOOK_SECONDS)
    pod = next(pod for pod, process in enumerate(processes) if process.poll() is not None)
    print(f"refill: pod {pod} has ended, and so do the others", file=sys.stderr)
    return processes[pod].returncode or 1


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5, verify=False, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
