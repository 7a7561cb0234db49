"""The example of training as a JobSet and as a TrainJob of Kubeflow: taken by their own types, and the same run."""

from __future__ import annotations

import copy
import re
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.helm.pod_security import violations
from tests.helm.rendering import CHART

EXAMPLES = CHART.parent / "examples"


def shown(name: str, *, secured: bool = False) -> dict[str, dict[str, Any]]:
    """Objects of an example by their kind. ``secured``: with what is commented out for tokens and TLS."""
    text = (EXAMPLES / name).read_text()
    if secured:
        text = re.sub(r"^( +)# (- name: |  )", r"\1\2", text, flags=re.MULTILINE)
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    return dict(job["spec"]["template"]["spec"])


def replicated_job(jobset: dict[str, Any]) -> dict[str, Any]:
    (found,) = jobset["spec"]["replicatedJobs"]
    return dict(found)


def pod_of_trainjob(trainjob: dict[str, Any]) -> dict[str, Any]:
    """What the runtime's one container and its pod become."""
    (patch,) = trainjob["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = copy.deepcopy(job["template"]["spec"]["template"]["spec"])
    (container,) = pod["containers"]
    assert job["name"] == container["name"] == "node", "the names that the runtime torch-distributed has"
    trainer = trainjob["spec"]["trainer"]
    container |= {name: trainer[name] for name in ("image", "command", "env")}
    container["resources"] = trainer["resourcesPerNode"]
    return dict(pod)


@pytest.mark.parametrize("secured", [False, True], ids=["open", "secured"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("train-jobset.yaml", "JobsetV1alpha2JobSet"), ("train-trainjob.yaml", "TrainerV1alpha1TrainJob")],
)
def test_its_own_types_take_it(name: str, kind: str, secured: bool) -> None:
    """Of the project that makes the resource. They drop what they do not know, so all has to come back."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    (given,) = shown(name, secured=secured).values()
    assert getattr(models, kind).from_dict(given).to_dict() == given
    misspelt = given | {"spec": given["spec"] | {"replicatedJob": []}}
    assert getattr(models, kind).from_dict(misspelt).to_dict() != misspelt


def test_pods_of_the_jobset_are_those_of_the_job() -> None:
    for secured in (False, True):
        job, jobset = shown("train.yaml", secured=secured)["Job"], shown("train-jobset.yaml", secured=secured)["JobSet"]
        of_jobset = replicated_job(jobset)["template"]
        kubernetes_validate.validate({**job, "spec": of_jobset["spec"]}, "1.37", strict=True)
        pod, same = pod_of(job), pod_of(of_jobset)
        assert pod.pop("subdomain"), "JobSet sets its own"
        (address,) = (each for each in same["containers"][0]["env"] if each["name"] == "MASTER_ADDR")
        name = jobset["metadata"]["name"]
        # JOBSET-REPLICATEDJOB-JOB-POD.SUBDOMAIN; the subdomain is the JobSet's name.
        assert address["value"] == f"{name}-{replicated_job(jobset)['name']}-0-0.{name}"
        address["value"] = "train-0.train"
        assert same == pod
        counts = ("completionMode", "completions", "parallelism", "backoffLimit")
        assert [of_jobset["spec"][each] for each in counts] == [job["spec"][each] for each in counts]


def test_pods_of_the_trainjob_are_those_of_the_job() -> None:
    """But for what torchrun gives: ranks and the address of the first."""
    for secured in (False, True):
        job = shown("train.yaml", secured=secured)["Job"]
        trainjob = shown("train-trainjob.yaml", secured=secured)["TrainJob"]
        pod, same = pod_of(job), pod_of_trainjob(trainjob)
        assert trainjob["spec"]["trainer"]["numNodes"] == job["spec"]["completions"]
        (container,), (other,) = pod["containers"], same["containers"]
        given = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")
        container["env"] = [each for each in container["env"] if each["name"] not in given]
        assert other["command"] == ["torchrun", container["command"][-1]]
        assert container | {"name": "node", "command": other["command"]} == other
        assert (pod["volumes"], pod["securityContext"]) == (same["volumes"], same["securityContext"])
        assert violations({"metadata": {}, "spec": same}) == []


def test_the_script_alone_is_chosen_by_its_label() -> None:
    command = "kubectl apply -f helm/examples/train.yaml -l part=script"
    chosen = [each for each in shown("train.yaml").values() if each["metadata"].get("labels") == {"part": "script"}]
    assert [each["kind"] for each in chosen] == ["ConfigMap"]
    for name in ("train-jobset.yaml", "train-trainjob.yaml"):
        assert command in (EXAMPLES / name).read_text()
