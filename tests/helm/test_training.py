"""What users copy works: the lines that are shown after installation, and the example of a training Job."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.conftest import free_port
from tests.forked_processes import RANKS, run_refill, start
from tests.helm.conftest import Secured
from tests.helm.mounted_secrets import Secrets, mount
from tests.helm.pod_security import violations
from tests.helm.rendering import CHART, release, values_in
from tests.helm.training_example import EXAMPLE, TEXT, variables

from refill_service.datasets.pack import pack
from refill_service.demo.digits import NUM_TEST, write_digits
from refill_service.demo.local_cluster import LocalCluster


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = (document for document in EXAMPLE if document["kind"] == kind)
    return dict(found)


def python_lines(notes: str) -> str:
    """The indented block that begins with an import."""
    block = re.search(r"^(    import refill\n(?:    .*\n|\n)+)", notes, re.MULTILINE)
    assert block is not None
    return textwrap.dedent(block[1])


def test_the_url_shown_is_that_of_the_service() -> None:
    found = release({"service": {"port": 80}, "fullnameOverride": "cache"}, namespace="vision")
    service = found.service("clients")
    (port,) = service["spec"]["ports"]
    assert f"http://{service['metadata']['name']}.vision.svc:{port['port']}" in python_lines(found.notes)
    assert service["spec"]["selector"].items() <= found.pod_template["metadata"]["labels"].items()


def test_the_lines_shown_train_on_pods_with_tokens_and_tls(secured_pods: Secured, tmp_path: Path) -> None:
    """In a training pod with the Secret and the spec that are shown. What is shown last then tells of the epoch."""
    notes, url = secured_pods.release.notes, secured_pods.running.pod_urls[0]
    lines = python_lines(notes)
    for shown, here in (
        ("https://refill.ml.svc:8000", url),
        ("range(90)", "range(2)"),
        ("num_workers=4", "num_workers=1"),
        ("...", "print(len(batch['bin']))"),
    ):
        assert lines.count(shown) == 1
        lines = lines.replace(shown, here)
    script = tmp_path / "train.py"
    script.write_text(lines)
    spec = yaml_lines(notes)
    mount(spec, tmp_path, {"refill-client": secret_shown(notes, secured_pods.secrets)})
    given = {each["name"]: f"{tmp_path}{each['value']}" for each in spec["containers"][0]["env"]}
    assert set(given) == {"REFILL_TOKEN_FILE", "REFILL_CA_FILE"}
    said = tmp_path / "said.log"
    with said.open("wb") as output:
        assert start(RANKS, [str(script)], os.environ | {"OMP_NUM_THREADS": "1"} | given, output).wait(120) == 0
    assert sum(map(int, said.read_text().split())) == 2 * 1000

    command = receipt_command(notes)
    assert command[command.index("--url") + 1] == "https://refill-0.refill-peers.ml.svc:8000"
    command[command.index("--url") + 1] = url
    in_a_cache_pod = secured_pods.mounts_of(secured_pods.release.pod_template["spec"], tmp_path / "cache")
    typed = [f"{in_a_cache_pod}{word}" if word.startswith("/var/run/secrets/") else word for word in command]
    assert typed[0] == "refill"
    receipt = run_refill(typed[1:])
    assert receipt.returncode == 0, receipt.stderr
    assert ": exact" in receipt.stdout


def yaml_lines(notes: str) -> dict[str, Any]:
    """The part of a pod's spec that is shown."""
    block = re.search(r"^(    containers:\n(?:    .*\n)+)", notes, re.MULTILINE)
    assert block is not None
    return dict(yaml.safe_load(textwrap.dedent(block[1])))


def secret_shown(notes: str, secrets: Secrets, team: str = "vision") -> dict[str, str]:
    """What the `kubectl` commands that are shown put into the Secret of training pods."""
    shown = re.findall(r"kubectl get secret (\S+) -n ml -o 'go-template={{index .data \"(\S+)\" \|.*> (\S+)\n", notes)
    files = {file: secrets[secret][key.replace("TEAM", team)] for secret, key, file in shown}
    (made,) = re.findall(r"kubectl create secret generic refill-client -n NAMESPACE(.*)\n", notes)
    return {file: files[file] for file in re.findall(r"--from-file=(\S+)", made)}


def receipt_command(notes: str, team: str = "vision") -> list[str]:
    """As it runs within the pod."""
    (shown,) = re.findall(r"kubectl exec .* -- (.*)\n", notes)
    return shlex.split(str(shown).replace("TEAM", team))


@pytest.mark.parametrize(
    ("values", "variables"),
    [
        ({}, set()),
        ({"access": {"clientTokens": "t", "peerToken": "p"}}, {"REFILL_TOKEN_FILE"}),
        ({"tls": {"secret": "c"}}, {"REFILL_CA_FILE"}),
        ({"tls": {"secret": "c", "publicAuthority": True}}, set()),
        ({"access": {"peerToken": "p"}, "tls": {"peerSecret": "p"}}, set()),
    ],
)
def test_training_pods_are_told_to_have_what_the_pods_want_and_no_more(
    values: dict[str, Any], variables: set[str]
) -> None:
    notes = release(values).notes
    assert {name for name in ("REFILL_TOKEN_FILE", "REFILL_CA_FILE") if name in notes} == variables
    wanted = {"REFILL_TOKEN_FILE": "--token-file", "REFILL_CA_FILE": "--ca-file"}
    options = {word for word in receipt_command(notes) if word.endswith("-file")}
    assert options == {wanted[name] for name in variables}
    if variables:
        secret = {"t": {"vision": "a token"}, "c": {"ca.crt": "a certificate"}}
        (mounted,) = yaml_lines(notes)["containers"][0]["volumeMounts"]
        files = {f"{mounted['mountPath']}/{file}" for file in secret_shown(notes, secret)}
        assert files == {variable["value"] for variable in yaml_lines(notes)["containers"][0]["env"]}


def test_the_docs_make_the_secret_of_training_pods_as_the_notes_do() -> None:
    values = {"access": {"clientTokens": "refill-tokens", "peerToken": "p"}, "tls": {"secret": "refill-tls"}}
    notes = release(values).notes.replace("TEAM", "vision")
    made = re.findall(
        r"^ *(kubectl (?:get secret .* > .*|create secret generic refill-client .*))$", notes, re.MULTILINE
    )
    assert len(made) == 3
    docs = (CHART.parents[1] / "docs" / "INSTALL.md").read_text()
    assert "\n".join(["```console", *made, "```"]) in docs


def test_the_receipt_command_shown_names_a_pod_that_exists() -> None:
    found = release({"fullnameOverride": "cache", "ports": {"clients": 9000}})
    assert "kubectl exec -n ml cache-0 -- refill receipt run-1 0 --url http://localhost:9000\n" in found.notes


@pytest.mark.parametrize("version", ["1.25", "1.31", "1.37"])
def test_kubernetes_takes_the_example(version: str) -> None:
    for document in [*EXAMPLE, secured_job()]:
        kubernetes_validate.validate(document, version, strict=True)


def test_the_example_passes_the_restricted_standard_and_finds_its_parts() -> None:
    template = of_kind("Job")["spec"]["template"]
    assert violations(template) == []
    assert of_kind("Service")["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert template["spec"]["subdomain"] == of_kind("Service")["metadata"]["name"]
    environment = variables(template)
    assert environment["CACHE"] == f"http://{release().service('clients')['metadata']['name']}:8000"
    assert environment["MASTER_ADDR"] == f"{of_kind('Job')['metadata']['name']}-0.{template['spec']['subdomain']}"
    assert environment["WORLD_SIZE"] == str(of_kind("Job")["spec"]["completions"])


def test_the_example_fits_beside_small_pods_on_a_node_of_two_cores_and_4_gib() -> None:
    pods = release(values_in(CHART / "ci" / "kind-values.yaml"))
    (rank,) = of_kind("Job")["spec"]["template"]["spec"]["containers"]
    many = [
        (pods.the("StatefulSet")["spec"]["replicas"], pods.container),
        (of_kind("Job")["spec"]["parallelism"], rank),
    ]
    requests = [(count, container["resources"]["requests"]) for count, container in many]
    assert sum(count * float(asked["cpu"].removesuffix("m")) for count, asked in requests) <= 1800
    sizes = {"Mi": 1, "Gi": 1024}
    assert sum(count * int(asked["memory"][:-2]) * sizes[asked["memory"][-2:]] for count, asked in requests) <= 3500


def secured_job() -> dict[str, Any]:
    """The Job, with what is commented out for a release with tokens and TLS."""
    (job,) = (text for text in TEXT.split("---\n") if "kind: Job\n" in text)
    return dict(yaml.safe_load(re.sub(r"^( +)# (- name: |  )", r"\1\2", job, flags=re.MULTILINE)))


def test_the_example_has_as_comments_what_the_notes_show() -> None:
    shown = yaml_lines(release({"access": {"clientTokens": "t", "peerToken": "p"}, "tls": {"secret": "c"}}).notes)
    spec, without = (each["spec"]["template"]["spec"] for each in (secured_job(), of_kind("Job")))
    for part in ("env", "volumeMounts"):
        in_comments = [each for each in spec["containers"][0][part] if each not in without["containers"][0][part]]
        assert in_comments == shown["containers"][0][part]
    assert [each for each in spec["volumes"] if each not in without["volumes"]] == shown["volumes"]


def test_the_example_trains_on_two_ranks(three_pods: LocalCluster, tmp_path: Path) -> None:
    """As the Job's two pods: every sample reaches one of them."""
    dataset = (tmp_path / "packed").as_uri()
    _, digits = write_digits(tmp_path / "files")
    asyncio.run(pack(str(digits), dataset))
    script = tmp_path / "train.py"
    script.write_text(of_kind("ConfigMap")["data"]["train.py"])
    given = {"CACHE": three_pods.pod_urls[0], "DATASET": dataset, "EPOCHS": "2", "OMP_NUM_THREADS": "1"}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = os.environ | variables(of_kind("Job")["spec"]["template"]) | given
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(2)]
    with contextlib.ExitStack() as stack:
        ranks = []
        for number, log in enumerate(logs):
            output = stack.enter_context(log.open("wb"))
            ranks.append(start(RANKS, [str(script)], environment | {"RANK": str(number)}, output))
            stack.callback(ranks[-1].kill)
        statuses = [rank.wait(150) for rank in ranks]
    lines = "".join(log.read_text() for log in logs)
    assert statuses == [0, 0], lines
    counts = re.findall(r"rank (\d) epoch (\d): (\d+) samples", lines)
    assert sorted(counts) == [(rank, epoch, str(-(-NUM_TEST // 2))) for rank in "01" for epoch in "01"]
