"""What does the chart make of values? Rendered by Helm's own engine."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

__all__ = ["CHART", "VALUES_FILES", "Release", "merged", "release", "release_as_given", "values_in"]

CHART = Path(__file__).parents[2] / "helm" / "refill"
VALUES_FILES = sorted((CHART / "ci").glob("*-values.yaml"))


class _NoKeyTwice(yaml.CSafeLoader):
    """Of two equal keys YAML takes the last, and Helm's server-side apply none."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(set(keys)) == len(keys), f"a key stands twice: {sorted(keys)}"
        return dict(super().construct_mapping(node, deep))


class Release:
    """The objects of one release, and what its user is told."""

    def __init__(self, manifests: dict[str, str]) -> None:
        self.notes = manifests.pop("refill/templates/NOTES.txt")
        self.objects: list[dict[str, Any]] = [
            document for text in manifests.values() for document in yaml.load_all(text, _NoKeyTwice) if document
        ]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [found for found in self.objects if found["kind"] == kind]

    def the(self, kind: str) -> dict[str, Any]:
        (found,) = self.of_kind(kind)
        return found

    def service(self, component: str) -> dict[str, Any]:
        """``clients`` or ``peers``."""
        (found,) = (
            service
            for service in self.of_kind("Service")
            if service["metadata"]["labels"]["app.kubernetes.io/component"] == component
        )
        return found

    @property
    def pod_template(self) -> dict[str, Any]:
        return dict(self.the("StatefulSet")["spec"]["template"])

    @property
    def container(self) -> dict[str, Any]:
        """That of refill; there may be sidecars."""
        (found,) = (each for each in self.pod_template["spec"]["containers"] if each["name"] == "refill")
        return dict(found)

    @property
    def environment(self) -> dict[str, str]:
        """Of the container, variables that have a plain value."""
        return {variable["name"]: variable["value"] for variable in self.container["env"] if "value" in variable}

    @property
    def pods(self) -> Iterable[dict[str, Any]]:
        """Every pod that the release makes, as it would be sent to Kubernetes."""
        return [{"metadata": t["metadata"], "spec": t["spec"]} for t in (self.pod_template, self.the("Pod"))]


@cache
def _chart(kubernetes: str) -> helm_python.Chart:
    """For a cluster of that version, such as v1.31.5-eks-abc; empty: the engine's own, a new one."""
    if not kubernetes:
        return helm_python.Chart.load(CHART)
    with tempfile.TemporaryDirectory() as folder:
        copied = shutil.copytree(CHART, Path(folder) / "refill")
        versions = copied / "templates" / "_versions.tpl"
        asked = "{{ .Capabilities.KubeVersion.Version }}"
        assert asked in versions.read_text()
        versions.write_text(versions.read_text().replace(asked, kubernetes))
        return helm_python.Chart.load(copied)


def release(
    values: dict[str, Any] | None = None, name: str = "refill", namespace: str = "ml", kubernetes: str = ""
) -> Release:
    """Open to everybody where the values say nothing of it. Raises helm_python.HelmError, as ``helm install`` fails."""
    given = values or {}
    return release_as_given(
        given if given.get("access", {}).get("clientTokens") else {"insecure": True} | given,
        name,
        namespace,
        kubernetes,
    )


def release_as_given(
    values: dict[str, Any], name: str = "refill", namespace: str = "ml", kubernetes: str = ""
) -> Release:
    """Of these values alone."""
    return Release(_chart(kubernetes).render(values, name=name, namespace=namespace))


def values_in(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text()) or {}


def merged(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """As Helm merges what is given later."""
    both = {
        name: merged(values[name], more[name]) for name in values.keys() & more.keys() if isinstance(more[name], dict)
    }
    return values | more | both
