"""Does the example training Job run on the cluster? helm/examples/train.yaml, with the user's image and dataset.

Under a name of its own: a user who followed docs/INSTALL.md has a Job of the example's name in the namespace.
"""

from __future__ import annotations

import copy
import re
import time
from typing import Any, NamedTuple

import yaml
from tests.cluster.cluster import CHART, RELEASE, Cluster, Failed

__all__ = ["Example", "example", "run_example"]

_EPOCHS = 2
_NAME = f"{RELEASE}-train"
_RENAMED = {"train": _NAME, "train-0.train": f"{_NAME}-0.{_NAME}"}


class Example(NamedTuple):
    jobs: list[dict[str, Any]]
    others: list[dict[str, Any]]
    """What the jobs need."""


def example(image: str, policy: str, variables: dict[str, str], *, indexed: bool) -> Example:
    """The objects of the example.

    :param policy: of pulling the image.
    :param variables: of the environment, in place of the example's.
    :param indexed: whether the cluster's Jobs have an index (Kubernetes 1.24). Else there is a Job for each rank.
    """
    objects = _renamed(list(yaml.safe_load_all((CHART.parent / "examples" / "train.yaml").read_text())))
    (job,) = (found for found in objects if found["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    container["image"], container["imagePullPolicy"] = image, policy
    container["env"] = [
        *(variable for variable in container["env"] if variable["name"] not in variables),
        *({"name": key, "value": value} for key, value in variables.items()),
    ]
    jobs = [job] if indexed else [_of_rank(job, rank) for rank in range(job["spec"]["completions"])]
    return Example(jobs, [found for found in objects if found["kind"] != "Job"])


def run_example(cluster: Cluster, image: str, dataset: str) -> str:
    """What the ranks printed last. Raises Failed unless each epoch's receipt is exact."""
    name = f"example-{int(time.time())}"
    given = {"CACHE": f"http://{RELEASE}:8000", "DATASET": dataset, "JOB": name, "EPOCHS": str(_EPOCHS)}
    jobs, others = example(image, cluster.image[1], given, indexed=cluster.version >= (1, 24))
    try:
        cluster.apply(*others, *jobs)
        for each in jobs:
            _until_complete(cluster, each["metadata"]["name"])
        told = "".join(cluster.kubectl("logs", f"job/{each['metadata']['name']}", "--all-containers") for each in jobs)
        for epoch in range(_EPOCHS):
            cluster.kubectl(
                *("exec", f"{RELEASE}-0", "--", "refill", "receipt", name, str(epoch)),
                *("--url", "http://localhost:8000"),
            )
    finally:
        for found in (*jobs, *others):
            cluster.kubectl("delete", found["kind"], found["metadata"]["name"], "--ignore-not-found")
    samples = [int(count) for count in re.findall(rf"epoch {_EPOCHS - 1}: (\d+) samples", told)]
    if not samples:
        raise Failed(f"no rank told of epoch {_EPOCHS - 1}: {told[-300:]}")
    return f"{len(samples)} lines, {sum(samples):,} samples in the last epoch"


def _until_complete(cluster: Cluster, job: str) -> None:
    def has_ended() -> bool:
        conditions = cluster.found("job", job)["status"].get("conditions", [])
        types = {condition["type"] for condition in conditions if condition["status"] == "True"}
        if "Failed" in types:
            raise Failed(f"job {job}: {cluster.kubectl('logs', f'job/{job}', '--tail=3', check=False).strip()[-300:]}")
        return "Complete" in types

    cluster.until(has_ended, f"job {job} completes", seconds=500)


def _renamed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _renamed(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_renamed(each) for each in value]
    return _RENAMED.get(value, value) if isinstance(value, str) else value


def _of_rank(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Before Kubernetes 1.24 Jobs have no index: a Job for each rank, with the host name that an index would give."""
    one = copy.deepcopy(job)
    name = f"{job['metadata']['name']}-{rank}"
    one["metadata"]["name"] = name
    for key in ("completionMode", "completions", "parallelism"):
        del one["spec"][key]
    pod = one["spec"]["template"]["spec"]
    pod["hostname"] = name
    (variable,) = (found for found in pod["containers"][0]["env"] if found["name"] == "RANK")
    del variable["valueFrom"]
    variable["value"] = str(rank)
    return one
