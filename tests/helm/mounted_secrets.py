"""What is in the Secrets that a release names, and in the volumes of a container that mounts them?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trustme
import yaml
from tests.helm.rendering import CHART

__all__ = ["TOKENS", "Secrets", "certificate_names", "certificate_objects", "mount", "secrets_of"]

Secrets = Mapping[str, Mapping[str, str]]
"""Contents by key, by the Secret's name."""

TOKENS = {"speech": "speech-0123456789abcdef", "vision": "vision-0123456789abcdef"}
_OF_PODS = "pods-0123456789abcdef"


def certificate_objects() -> list[dict[str, Any]]:
    """That docs/INSTALL.md shows, for cert-manager and a release ``refill`` in ``ml``."""
    text = (CHART.parents[1] / "docs" / "INSTALL.md").read_text()
    (shown,) = (
        block.split("```")[0] for block in text.split("```yaml\n") if block.startswith("apiVersion: cert-manager")
    )
    return list(yaml.safe_load_all(shown))


def certificate_names() -> list[str]:
    """Those of the first one, that for clients."""
    spec = certificate_objects()[0]["spec"]
    assert spec["usages"] == ["server auth", "client auth"]
    return list(spec["dnsNames"])


def secrets_of(values: dict[str, Any]) -> dict[str, dict[str, str]]:
    """As `kubectl create secret` and cert-manager make them; certificates are for this machine as well."""
    access, tls = values.get("access", {}), values.get("tls", {})
    found = {access.get("clientTokens"): TOKENS, access.get("peerToken"): {"token": _OF_PODS}}
    for name in (tls.get("secret"), tls.get("peerSecret")):
        authority = trustme.CA()
        made = authority.issue_cert(*certificate_names(), "127.0.0.1", "::1")
        found[name] = {
            "tls.crt": "".join(each.bytes().decode() for each in made.cert_chain_pems),
            "tls.key": made.private_key_pem.bytes().decode(),
            "ca.crt": authority.cert_pem.bytes().decode(),
        }
    return {name: dict(files) for name, files in found.items() if name}


def mount(spec: dict[str, Any], root: Path, secrets: Secrets) -> None:
    """Make the volumes of a pod's first container as folders below ``root``, with what its Secrets hold."""
    container = spec["containers"][0]
    volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
    for mounted in container.get("volumeMounts", []):
        folder = root / mounted["mountPath"].lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        # Volumes of a StatefulSet's volumeClaimTemplates are in no list.
        secret = volumes.get(mounted["name"], {}).get("secret")
        if secret is not None:
            content = secrets[secret["secretName"]]
            paths = {item["key"]: item["path"] for item in secret.get("items", [])} or {key: key for key in content}
            for key, path in paths.items():
                if key in content or not secret.get("optional"):
                    (folder / path).write_text(content[key])
