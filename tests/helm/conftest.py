"""What do the tests of the chart share? Pods of a release with tokens and TLS."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kubernetes_validate.utils
import pytest
from tests.helm.mounted_secrets import Secrets, mount, secrets_of
from tests.helm.rendering import Release, release
from tests.helm.stateful_pods import StatefulPods

# It reads its files for each object anew.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)


@dataclass
class Secured:
    """Three of them, with what the release was made of."""

    values: dict[str, Any]
    release: Release
    secrets: Secrets
    running: StatefulPods

    def mounts_of(self, spec: dict[str, Any], folder: Path) -> Path:
        """Of another pod in its namespace, below ``folder``."""
        mount(spec, folder, self.secrets)
        return folder


@pytest.fixture(scope="session")
def secured_pods(packed: tuple[str, dict[str, bytes]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    values = {
        "dataset": {"url": packed[0]},
        "memory": "4Mi",
        "settings": {"pinned_fraction": 0, "wait_seconds": 1, "dataset_urls": [packed[0]], "drain_seconds": 0},
        "access": {"clientTokens": "refill-tokens", "peerToken": "refill-peer-token"},
        "tls": {"secret": "refill-tls", "peerSecret": "refill-peer-tls"},
    }
    secrets, made = secrets_of(values), release(values)
    with StatefulPods(made, tmp_path_factory.mktemp("secured"), 3, secrets) as running:
        yield Secured(values, made, secrets, running)
