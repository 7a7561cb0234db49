"""How does a test talk to a cluster? By kubectl, and by Helm's own engine, with KUBECONFIG as both find it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import helm_python

__all__ = ["CHART", "Cluster", "Failed", "NoAnswer", "Skipped", "is_ready", "replaced", "steps_of"]

CHART = Path(__file__).parents[2] / "helm" / "refill"
RELEASE = "refill-try"
"""Its objects' names, too, since "refill" is in it."""
_LONGEST_SECONDS = 600
_NO_ANSWER = ("Unable to connect to the server", "The connection to the server", "net/http:", "EOF")


class Failed(Exception):
    """What was tried did not come out as it should."""


class NoAnswer(Failed):
    """The API server can't be reached, or is slow."""


class Skipped(Exception):
    """What this cluster can't do, or was not told how to."""


class Cluster:
    """A namespace of a cluster, and one release in it."""

    def __init__(self, namespace: str, values: dict[str, Any]) -> None:
        self.namespace = namespace
        self._values = values
        self._changed: dict[str, Any] = {}
        self._helm = helm_python.Config(namespace=namespace)

    def kubectl(
        self, *arguments: str, given: str | None = None, check: bool = True, seconds: float = _LONGEST_SECONDS
    ) -> str:
        """Raises Failed for what takes longer than so many seconds, too."""
        try:
            done = subprocess.run(
                ["kubectl", "-n", self.namespace, *arguments],
                input=given,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
                start_new_session=True,  # Ctrl-C is for who runs this
            )
        except subprocess.TimeoutExpired:
            raise NoAnswer(f"kubectl {' '.join(arguments)}: not within {seconds:.0f} s") from None
        if check and done.returncode:
            kind = NoAnswer if any(words in done.stderr for words in _NO_ANSWER) else Failed
            raise kind(f"kubectl {' '.join(arguments)}: {(done.stderr or done.stdout).strip()[-500:]}")
        return done.stdout + ("" if check else done.stderr)

    def found(self, *arguments: str) -> dict[str, Any]:
        """Objects as kubectl shows them."""
        shown: dict[str, Any] = json.loads(self.kubectl("get", *arguments, "-o", "json"))
        return shown

    @property
    def version(self) -> tuple[int, int]:
        found = json.loads(self.kubectl("version", "-o", "json"))["serverVersion"]
        return int(found["major"]), int(found["minor"].rstrip("+"))

    def nodes(self) -> list[str]:
        """Those that take pods."""
        return [
            node["metadata"]["name"]
            for node in self.found("nodes")["items"]
            if is_ready(node) and not node["spec"].get("unschedulable")
        ]

    def apply(self, *objects: dict[str, Any]) -> None:
        whole = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "--validate=false", "-f", "-", given=json.dumps(whole))

    # --- the release ---------------------------------------------------------------------------------------------

    def has_namespace(self) -> bool:
        return bool(self.kubectl("get", "namespace", self.namespace, "--ignore-not-found", "-o", "name"))

    def is_installed(self) -> bool:
        return bool(self.kubectl("get", "statefulset", RELEASE, "--ignore-not-found", "-o", "name"))

    def install(self, **changed: Any) -> None:
        self._changed = changed
        chart = helm_python.Chart.load(CHART)
        self._helm.install(chart, RELEASE, self._values | changed, namespace=self.namespace)
        self.until(self.is_as_wanted, "all pods of the release are ready")

    def would_install(self, values: dict[str, Any]) -> None:
        """The API server looks at every object, and keeps none."""
        chart = helm_python.Chart.load(CHART)
        self._helm.install(chart, f"{RELEASE}-dry", values, namespace=self.namespace, dry_run="server")

    def upgrade(self, **changed: Any) -> None:
        """Returns at once: who asked waits."""
        self._changed |= changed
        chart = helm_python.Chart.load(CHART)
        self._helm.upgrade(chart, RELEASE, self._values | self._changed, namespace=self.namespace)

    def revisions(self) -> int:
        return len(self._helm.history(RELEASE))

    def rollback(self) -> None:
        self._helm.rollback(RELEASE)
        self._changed = dict(self._helm.get_values(RELEASE))  # what the next upgrade starts from

    def helm_test(self) -> str:
        return str(self._helm.test(RELEASE, timeout=180, logs=True)["logs"])

    def uninstall(self) -> None:
        self._helm.uninstall(RELEASE, ignore_not_found=True)
        self.until(lambda: not self.pods(), "no pod of the release is left")

    def left_over(self) -> list[str]:
        """Of the release's objects and of Helm's own, without volumes, which are to stay."""
        kinds = "statefulset,service,pod,serviceaccount,configmap,secret,poddisruptionbudget,networkpolicy"
        found = self.kubectl("get", kinds, "-l", f"app.kubernetes.io/instance={RELEASE}", "-o", "name")
        return [
            *found.split(),
            *self.kubectl("get", "secret", "-l", f"owner=helm,name={RELEASE}", "-o", "name").split(),
        ]

    @property
    def image(self) -> tuple[str, str]:
        """Of the pods, and its pull policy."""
        (container,) = self.found("statefulset", RELEASE)["spec"]["template"]["spec"]["containers"]
        return container["image"], container["imagePullPolicy"]

    @property
    def has_tls(self) -> bool:
        """On the clients' port."""
        return bool((self._values.get("tls") or {}).get("secret"))

    @property
    def service_url(self) -> str:
        return f"http{'s' if self.has_tls else ''}://{RELEASE}.{self.namespace}.svc:8000"

    def pods(self) -> dict[str, dict[str, Any]]:
        selector = f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/component=cache"
        return {pod["metadata"]["name"]: pod for pod in self.found("pods", "-l", selector)["items"]}

    def uids(self) -> dict[str, str]:
        return {name: pod["metadata"]["uid"] for name, pod in self.pods().items()}

    def is_as_wanted(self) -> bool:
        """Whether there are as many pods as the StatefulSet wants, of its newest template, all of them ready."""
        stateful = self.found("statefulset", RELEASE)
        status, replicas = stateful["status"], stateful["spec"]["replicas"]
        if status.get("observedGeneration") != stateful["metadata"]["generation"]:
            return False
        pods = self.pods().values()
        return len(pods) == replicas and all(
            is_ready(pod) and pod["metadata"]["labels"]["controller-revision-hash"] == status["updateRevision"]
            for pod in pods
        )

    def warnings(self, since: float) -> str:
        """The reasons of Kubernetes' warnings about the release's objects."""
        begin = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(since))
        found = self.found("events", "--field-selector", "type=Warning")["items"]
        return ", ".join(
            sorted(
                {
                    event["reason"]
                    for event in found
                    if event["involvedObject"].get("name", "").startswith(RELEASE)
                    and (event.get("lastTimestamp") or event["metadata"]["creationTimestamp"]) >= begin
                }
            )
        )

    def logged(self, since: float) -> list[str]:
        """The last warning or error in the log of each pod that is there, if one came since then. What a pod says of
        its settings when it starts is left out."""
        found = []
        for pod in self.pods():
            log = self.kubectl("logs", pod, f"--since={time.time() - since:.0f}s", check=False).splitlines()
            warned = [line for line in log if " WARNING " in line or " ERROR " in line]
            if warned := [line for line in warned if " open: " not in line]:
                found.append(f"{pod}: {warned[-1].split(' ', 2)[-1]}")  # without date and time
        return found

    def until(self, is_true: Callable[[], bool], what: str, seconds: float = 300) -> float:
        """Returns the seconds that it took. An API server that gives no answer is asked again."""
        began, why = time.monotonic(), ""
        while True:
            try:
                if is_true():
                    return time.monotonic() - began
            except NoAnswer as failure:
                why = f"; {failure}"
            if time.monotonic() - began > seconds:
                raise Failed(f"not within {seconds:.0f} s: {what}{why}")
            time.sleep(0.3)


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = {condition["type"]: condition["status"] for condition in pod["status"].get("conditions", [])}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


def replaced(cluster: Cluster, name: str, uid: str) -> Callable[[], bool]:
    """Another pod of that name is ready."""

    def is_replaced() -> bool:
        pod = cluster.pods().get(name)
        return pod is not None and pod["metadata"]["uid"] != uid and is_ready(pod)

    return is_replaced


def steps_of(cluster: Cluster, name: str, since: float) -> str:
    """When the pod that has this name now was made, when its container started, and when it was ready: in seconds after
    ``since``, by the cluster's clock and in whole seconds, as Kubernetes tells it."""
    pod = cluster.pods()[name]
    (container,) = pod["status"]["containerStatuses"]
    (ready,) = (each for each in pod["status"]["conditions"] if each["type"] == "Ready")
    times = {
        "the next pod was made": pod["metadata"]["creationTimestamp"],
        "its container started": container["state"]["running"]["startedAt"],
        "it was ready": ready["lastTransitionTime"],
    }
    after = {step: round(datetime.fromisoformat(at).timestamp() - since) for step, at in times.items()}
    return ", ".join(f"{step} after {max(0, seconds)} s" for step, seconds in after.items())
