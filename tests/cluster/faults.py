"""What goes wrong around pods? Memory, Secrets, DNS and the API server, each as it was before when it is over.

Beside each stands what docs/RUNBOOK.md or docs/INSTALL.md tells a person to do, and that is what is done here.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.cluster.cluster import RELEASE, Cluster, Skipped, is_ready, replaced
from tests.cluster.memory import memory_of
from tests.cluster.options import Options, run_command

from refill_service.interrupts import interrupts_after

__all__ = ["api_away", "dns_away", "dns_away_from_a_new_pod", "evicted", "out_of_memory", "rotated", "stopped"]

_POD = f"{RELEASE}-1"
_AWAY_SECONDS = 60
_SERVED = "import ssl, sys; print(ssl.get_server_certificate(('localhost', int(sys.argv[1]))))"


def out_of_memory(cluster: Cluster, options: Options) -> str:
    """A limit below what a pod has, which somebody sets past the chart; then what was there is set again."""
    last = max(cluster.pods())
    uid = cluster.uids()[last]
    if (memory := memory_of(cluster, last)) is None:
        raise Skipped("the pod's cgroup tells nothing")
    (container,) = cluster.found("statefulset", RELEASE)["spec"]["template"]["spec"]["containers"]
    _limit_memory(cluster, f"{memory.anonymous_bytes * 6 // 10 >> 20}Mi")
    try:
        cluster.until(lambda: "OOMKilled" in _ends_of(cluster, last), f"{last} is killed for its memory")
        ends = _ends_of(cluster, last)
    finally:
        _limit_memory(cluster, container["resources"]["limits"]["memory"])
    cluster.until(lambda: replaced(cluster, last, uid)() and cluster.is_as_wanted(), "all pods have their memory again")
    return f"`kubectl describe pod`: {ends}"


def _limit_memory(cluster: Cluster, size: str) -> None:
    how = f"--limits=memory={size}", f"--requests=memory={size}"
    cluster.kubectl("set", "resources", f"statefulset/{RELEASE}", "--containers=refill", *how)


def _ends_of(cluster: Cluster, name: str) -> str:
    """Why containers of the pod ended, and with which exit status."""
    return ", ".join(
        f"{ended['reason']} {ended['exitCode']}"
        for status in cluster.pods().get(name, {}).get("status", {}).get("containerStatuses", [])
        for state in (status["lastState"], status["state"])
        if (ended := state.get("terminated")) is not None
    )


def evicted(cluster: Cluster, options: Options) -> str:
    """A pod's temporary folder becomes larger than its emptyDir may be. Kubernetes does the rest by itself."""
    uid = cluster.uids()[_POD]
    volumes = cluster.found("statefulset", RELEASE)["spec"]["template"]["spec"]["volumes"]
    (most,) = (volume["emptyDir"]["sizeLimit"] for volume in volumes if volume["name"] == "tmp")
    megabytes = int(most.removesuffix("Mi")) * 12 // 10
    cluster.kubectl("exec", _POD, "--", "dd", "if=/dev/zero", "of=/tmp/filler", "bs=1M", f"count={megabytes}")
    memory = memory_of(cluster, _POD)
    cluster.until(replaced(cluster, _POD, uid), f"{_POD} is evicted and replaced")
    cluster.until(cluster.is_as_wanted, "all pods are ready")
    return f"its cgroup: {memory}" if memory else ""


def stopped(cluster: Cluster, options: Options) -> None:
    """A pod stands still until its liveness probe has failed for long enough, and its container is restarted."""
    if not options.stop_pod:
        raise Skipped("--stop-pod was not given")
    before = _restarts_of(cluster, _POD)
    run_command(options.stop_pod, _POD)
    cluster.until(
        lambda: _restarts_of(cluster, _POD) > before and is_ready(cluster.pods()[_POD]), f"{_POD} is restarted"
    )


def _restarts_of(cluster: Cluster, name: str) -> int:
    return sum(status["restartCount"] for status in cluster.pods()[name]["status"]["containerStatuses"])


def rotated(cluster: Cluster, options: Options) -> None:
    """Tokens and certificates, by a command; until each pod serves its new certificate."""
    if not cluster.has_tls:
        raise Skipped("the values have no tls.secret")
    if not options.rotate:
        raise Skipped("--rotate was not given")
    before = _served(cluster)
    run_command(options.rotate)
    cluster.until(
        lambda: all(served != before.get(pod) for pod, served in _served(cluster).items()),
        "every pod serves another certificate",
    )
    cluster.until(cluster.is_as_wanted, "all pods are ready")


def _served(cluster: Cluster) -> dict[str, str]:
    return {pod: cluster.kubectl("exec", pod, "--", "python", "-c", _SERVED, "8000") for pod in cluster.pods()}


def dns_away(cluster: Cluster, options: Options) -> None:
    _away(options.dns, "dns")


def dns_away_from_a_new_pod(cluster: Cluster, options: Options) -> None:
    """Nobody finds it before DNS is back; then it goes on by itself."""
    uid = cluster.uids()[_POD]
    _away(options.dns, "dns", lambda: cluster.kubectl("delete", "pod", _POD, "--wait=false"))
    cluster.until(replaced(cluster, _POD, uid), f"{_POD} is replaced")


def api_away(cluster: Cluster, options: Options) -> None:
    """Nothing that runs needs it. Nodes that it has not heard of may be NotReady for a moment afterwards."""
    _away(options.api, "api")
    cluster.until(cluster.is_as_wanted, "the API server is back, and all pods are ready")


def _away(commands: tuple[str, str], option: str, meanwhile: Callable[[], object] = lambda: None) -> None:
    """For a minute, at whose beginning something else is done."""
    if not all(commands):
        raise Skipped(f"--{option}-off and --{option}-on were not given")
    off, on = commands
    try:
        run_command(off)
        meanwhile()
        time.sleep(_AWAY_SECONDS)
    finally:  # also when the first one fails half-way
        with interrupts_after():
            run_command(on)
