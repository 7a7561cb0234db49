"""All of refill on a cluster in one command: ``make demo-cluster``, or ``python -m tests.cluster.demo``.

In a namespace of its own, which is removed at the end: an S3 server, a Job that packs a dataset into it, the chart with
two pods, ``helm test``, a Job that trains through them (helm/examples/demo.yaml), the receipt of each epoch, and the
figures that the dashboards are drawn of. KUBECONFIG names the cluster: kind, minikube or any other whose nodes have the
image of the pods, or can pull it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import helm_python
import yaml
from tests.cluster.cluster import CHART, RELEASE, Cluster, Failed

from refill_service.interrupts import interrupts_after

__all__ = ["FIGURES", "demo_objects", "demo_values", "figures_of", "main"]

EPOCHS = 3
_JOB = "digits-1"
_LONGEST_SECONDS = 600

FIGURES = {
    "refill_bytes_delivered_total": "bytes of samples sent to training",
    "refill_store_bytes_total": "bytes read from the store",
    "refill_store_requests_total": "requests to the store",
    "refill_takes_total": "requests for samples",
    "refill_misses_total": "of these, found nothing in memory",
    "refill_damaged_samples_total": "damaged samples",
}
"""Counters of the dashboards, summed over pods, and what they are."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.demo", description=__doc__.partition("\n")[0])
    parser.add_argument("--image", default="refill:0.1.0", help="of the pods, as the cluster knows it (%(default)s)")
    parser.add_argument("--store-image", default="minio/minio:latest", help="of an S3 server (%(default)s)")
    parser.add_argument("--namespace", default="refill-demo", help="made, and removed at the end (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="leave all of it there, to look at")
    given = parser.parse_args(arguments)
    if shutil.which("kubectl") is None:
        parser.error("kubectl is not installed")
    if "KUBECONFIG" not in os.environ and not (Path.home() / ".kube" / "config").exists():
        parser.error("KUBECONFIG is not set: it names the cluster to try")
    cluster = Cluster(given.namespace, demo_values(given.image))
    try:
        if cluster.has_namespace():
            parser.error(f"there is a namespace {given.namespace} already: --namespace names another one")
    except Failed as failure:
        parser.error(str(failure).splitlines()[-1])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        _run(cluster, given)
    except (Failed, helm_python.HelmError) as failure:
        print(f"failed: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        if given.keep:
            print(f"\nleft there: kubectl get all -n {given.namespace}; kubectl delete namespace {given.namespace}")
        else:
            with interrupts_after():
                cluster.kubectl("delete", "namespace", given.namespace, "--ignore-not-found")
                print(f"namespace {given.namespace} is removed")
    return 0


def demo_objects(part: str, image: str, store_image: str, service: str) -> list[dict[str, Any]]:
    """A part of helm/examples/demo.yaml, with these images, and the URL of the release."""
    text = (CHART.parent / "examples" / "demo.yaml").read_text()
    found = [each for each in yaml.safe_load_all(text) if each["metadata"]["labels"]["part"] == part]
    for each in found:
        for container in each.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
            container["image"] = store_image if container["name"] == "store" else image
            for variable in container["env"]:
                if variable["name"] == "CACHE":
                    variable["value"] = service
    return found


def demo_values(image: str) -> dict[str, Any]:
    """Of the chart: those for kind, with the store and the dataset of the demo."""
    values: dict[str, Any] = yaml.safe_load((CHART / "ci" / "kind-values.yaml").read_text())
    repository, _, tag = image.rpartition(":")
    values["image"] = {"repository": repository, "tag": tag, "pullPolicy": "IfNotPresent"}
    values["store"] = {"endpoint_url": "http://store:9000"}
    values["dataset"] = {"url": "s3://demo/digits"}
    return values


def figures_of(pods: Iterable[str]) -> list[str]:
    """Lines of a table, of what pods' ``/metrics`` say."""
    sums = dict.fromkeys(FIGURES, 0.0)
    for text in pods:
        for name, value in re.findall(r"^(refill_\w+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE):
            if name in sums:
                sums[name] += float(value)
    width = max(map(len, FIGURES.values()))
    return [f"  {says:<{width}}  {sums[name]:>14,.0f}  {name}" for name, says in FIGURES.items()]


def _run(cluster: Cluster, given: argparse.Namespace) -> None:
    def apply(part: str) -> None:
        cluster.apply(*demo_objects(part, given.image, given.store_image, cluster.service_url))

    def step(what: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {what}", flush=True)

    began = time.monotonic()
    cluster.kubectl("create", "namespace", given.namespace)
    step("an S3 server, and a Job that packs 20,000 digits into it")
    apply("store")
    apply("pack")
    _until_complete(cluster, "pack")
    print(_indented(cluster.kubectl("logs", "job/pack", "--tail=3")))
    step(f"the chart, as release {RELEASE}")
    cluster.install()
    step("helm test")
    print(_indented(cluster.helm_test()))
    step(f"a Job that trains for {EPOCHS} epochs")
    apply("train")
    _until_complete(cluster, "train-digits")
    print(_indented(cluster.kubectl("logs", "job/train-digits")))
    step("what the pods say of it")
    for epoch in range(EPOCHS):
        asked = ("exec", f"{RELEASE}-0", "--", "refill", "receipt", _JOB, str(epoch), "--url", "http://localhost:8000")
        print(_indented(cluster.kubectl(*asked)))
    read = "import urllib.request as u; print(u.urlopen('http://localhost:8002/metrics').read().decode())"
    print(*figures_of(cluster.kubectl("exec", pod, "--", "python", "-c", read) for pod in cluster.pods()), sep="\n")


def _until_complete(cluster: Cluster, job: str) -> None:
    def has_ended() -> bool:
        conditions = cluster.found("job", job)["status"].get("conditions", [])
        types = {condition["type"] for condition in conditions if condition["status"] == "True"}
        if "Failed" in types:
            raise Failed(f"job {job}: {cluster.kubectl('logs', f'job/{job}', '--tail=3', check=False).strip()[-500:]}")
        return "Complete" in types

    cluster.until(has_ended, f"job {job} completes", seconds=_LONGEST_SECONDS)


def _indented(text: str) -> str:
    return "\n".join(f"          {line}" for line in text.strip().splitlines())


def _stop(number: int, frame: FrameType | None) -> None:
    """The demo ends with all that it started, and nothing ends that half-way."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
