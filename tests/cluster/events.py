"""What is done to a cluster on which a job runs? Each event is begun, and waited for until it is over."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import NamedTuple

from tests.cluster.cluster import RELEASE, Cluster, Skipped, replaced, steps_of
from tests.cluster.faults import (
    api_away,
    dns_away,
    dns_away_from_a_new_pod,
    evicted,
    out_of_memory,
    rotated,
    stopped,
)
from tests.cluster.options import Options, run_command

from refill_service.interrupts import interrupts_after

__all__ = ["EVENTS", "Event"]


class Event(NamedTuple):
    name: str
    says: str
    """As the table has it."""
    run: Callable[[Cluster, Options], str | None]
    """Returns what is to be said of it beside Kubernetes' warnings."""
    needs: str = ""
    """Of the cluster, the values or the options; without it the event is skipped."""
    to_do: str = "nothing"
    """What a person does about it, and where the docs say so. ``run`` does the same."""


def delete(cluster: Cluster, options: Options, *how: str) -> str:
    name = f"{RELEASE}-1"
    uid, since = cluster.uids()[name], time.time()
    cluster.kubectl("delete", "pod", name, "--wait=false", *how)
    cluster.until(replaced(cluster, name, uid), f"{name} is replaced")
    return steps_of(cluster, name, since)


def forced(cluster: Cluster, options: Options) -> str:
    return delete(cluster, options, "--force", "--grace-period=0")


def all_deleted(cluster: Cluster, options: Options) -> None:
    before = cluster.uids()
    cluster.kubectl("delete", "pod", *before, "--wait=false", "--force", "--grace-period=0")
    for name, uid in before.items():
        cluster.until(replaced(cluster, name, uid), f"{name} is replaced")


def rolling(cluster: Cluster, options: Options) -> None:
    """By a value that changes nothing but the pods' template."""
    before = cluster.uids()
    cluster.upgrade(podAnnotations={"tried": str(time.time_ns())})  # another one each time
    cluster.until(lambda: cluster.is_as_wanted() and not _same(before, cluster.uids()), "the rolling update ends")


def rolled_back(cluster: Cluster, options: Options) -> None:
    if cluster.revisions() < 2:
        raise Skipped("there is no earlier revision")
    before = cluster.uids()
    cluster.rollback()
    cluster.until(lambda: cluster.is_as_wanted() and not _same(before, cluster.uids()), "the rollback ends")


def _same(one: dict[str, str], other: dict[str, str]) -> bool:
    return any(other.get(name) == uid for name, uid in one.items())


def _to(replicas: int, *, at_once: bool = False) -> Callable[[Cluster, Options], None]:
    """:param at_once: the old pods are deleted together, since they work with no new one anyway."""

    def scaled(cluster: Cluster, options: Options) -> None:
        before = cluster.uids()
        if len(before) == replicas:
            raise Skipped(f"there are {replicas} pods")
        cluster.upgrade(replicas=replicas)
        if at_once:
            cluster.kubectl("delete", "pod", *before, "--wait=false")
        cluster.until(
            lambda: cluster.is_as_wanted() and len(after := cluster.uids()) == replicas and not _same(before, after),
            f"{replicas} pods are ready",
        )

    return scaled


def kubectl_scale(cluster: Cluster, options: Options) -> str:
    """What the docs say not to do: pods that the others know nothing of don't start, and nobody is hurt."""
    replicas = cluster.found("statefulset", RELEASE)["spec"]["replicas"]
    cluster.kubectl("scale", f"statefulset/{RELEASE}", f"--replicas={replicas + 1}")
    added = f"{RELEASE}-{replicas}"

    def refusals() -> list[str]:
        # A container that was started again has said nothing yet, and the one before it has.
        logs = [cluster.kubectl("logs", added, "--tail=2", *which, check=False) for which in ([], ["--previous"])]
        return re.findall(rf"ordinal is {replicas} but.*", "\n".join(logs))

    try:
        cluster.until(lambda: bool(refusals()), f"{added} says why it refuses to start", seconds=120)
        said = f"{added}: {(refusals() or ['it was started again just now'])[0]}"
    finally:
        cluster.kubectl("scale", f"statefulset/{RELEASE}", f"--replicas={replicas}")
    cluster.until(cluster.is_as_wanted, f"{added} is gone")
    return said


def drain(cluster: Cluster, options: Options) -> None:
    """Of the node of a cache pod, as far as pods of the release go; the budget lets one go at a time."""
    if len(cluster.nodes()) < 2:
        raise Skipped("there is one node alone")
    before = cluster.pods()
    node = before[f"{RELEASE}-0"]["spec"]["nodeName"]
    was_cordoned = node not in cluster.nodes()
    selector = f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/component=cache"
    try:
        cluster.kubectl(
            *("drain", node, f"--pod-selector={selector}", "--ignore-daemonsets", "--force"),
            *("--delete-emptydir-data", "--timeout=300s"),
        )
        for name, pod in before.items():
            if pod["spec"]["nodeName"] == node:
                cluster.until(replaced(cluster, name, pod["metadata"]["uid"]), f"{name} is replaced elsewhere")
    finally:
        if not was_cordoned:
            with interrupts_after():
                cluster.kubectl("uncordon", node)


def node_lost(cluster: Cluster, options: Options) -> None:
    """No replacement is made while the node may still be alive: somebody says that it is not (docs/RUNBOOK.md)."""
    if not options.cut_node:
        raise Skipped("--cut-node was not given")
    pods = cluster.pods()
    with_ranks = {pod["spec"]["nodeName"] for pod in cluster.found("pods", "-l", f"app={RELEASE}-rank")["items"]}
    free = [(name, pod) for name, pod in pods.items() if pod["spec"]["nodeName"] not in with_ranks]
    if not free:
        raise Skipped("ranks run on every node that has a cache pod")
    node = free[0][1]["spec"]["nodeName"]
    lost = {name: pod["metadata"]["uid"] for name, pod in free if pod["spec"]["nodeName"] == node}
    run_command(options.cut_node, node)
    # Until then Kubernetes would put the replacement there.
    cluster.until(lambda: node not in cluster.nodes(), f"{node} is not ready any more")
    cluster.kubectl("delete", "pod", *lost, "--force", "--grace-period=0")
    for name, uid in lost.items():
        cluster.until(replaced(cluster, name, uid), f"{name} is replaced")


_LOST = "RUNBOOK.md#refillrequestswaitforpod"

EVENTS = [
    Event("delete", "`kubectl delete pod`", delete),
    Event("forced", "`kubectl delete pod --force --grace-period=0`", forced),
    Event("rolling", "rolling update by a changed value", rolling),
    Event("rollback", "`helm rollback`", rolled_back),
    Event("scale", "`kubectl scale` by one more, and back", kubectl_scale, to_do="[scale by Helm](INSTALL.md#scaling)"),
    Event("grow", "`helm upgrade --set replicas=5`", _to(5)),
    Event("shrink", "`helm upgrade --set replicas=2`", _to(2)),
    Event(
        "grow-at-once",
        "`helm upgrade --set replicas=5`, and `kubectl delete pod` of all at once",
        _to(5, at_once=True),
    ),
    Event("again", "`helm upgrade --set replicas=3`, and `kubectl delete pod` of all at once", _to(3, at_once=True)),
    Event("drain", "`kubectl drain` of a node", drain, "two nodes"),
    Event("all", "all pods deleted at once by force", all_deleted),
    Event("stopped", "a pod stands still (SIGSTOP) until its liveness probe ends it", stopped, "--stop-pod"),
    Event(
        "memory",
        "a memory limit set too low, and what it was",
        out_of_memory,
        to_do=f"[set the chart's limit again]({_LOST})",
    ),
    Event("evicted", "eviction: a temporary folder too large for its emptyDir", evicted),
    Event(
        "rotate", "tokens and certificates rotated", rotated, "TLS, --rotate", "[as said](INSTALL.md#tokens-and-tls)"
    ),
    Event("dns", "no DNS for a minute", dns_away, "--dns-off, --dns-on"),
    Event("dns-delete", "no DNS for a minute, and a pod deleted", dns_away_from_a_new_pod, "--dns-off, --dns-on"),
    Event("api", "no API server for a minute", api_away, "--api-off, --api-on"),
    Event(
        "node",
        "power cut of a node, its pods deleted by force",
        node_lost,
        "--cut-node",
        f"[delete its pods by force]({_LOST})",
    ),
]
