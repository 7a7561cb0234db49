"""The container's limit is what a pod promises to stay under: memory_bytes + 15 % + 200 MB."""

from __future__ import annotations

import pytest
from tests.helm.rendering import release

from refill_service.settings import parse_bytes

MI = 2**20


def limit_bytes(memory: str | int, extra: str | int = 0) -> int:
    resources = release({"memory": memory, "extraMemory": extra}).container["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"], "memory is not lent to others"
    assert resources["limits"]["memory"].endswith("Mi")
    return int(resources["limits"]["memory"].removesuffix("Mi")) * MI


@pytest.mark.parametrize("memory", ["1Mi", "256Mi", "1500M", "4Gi", "1.5Gi", "64G", "2Ti", 4294967296, 123456789])
@pytest.mark.parametrize("extra", [0, "1Gi", "500M"])
def test_the_limit_is_the_promise_rounded_up_to_mebibytes(memory: str | int, extra: str | int) -> None:
    promised = parse_bytes(memory) * 1.15 + 200_000_000 + parse_bytes(extra)
    assert promised <= limit_bytes(memory, extra) < promised + MI


@pytest.mark.parametrize("memory", ["512Mi", "1500M", "1.5Gi", "2Ti", 4294967296, 123456789])
def test_the_pod_is_told_the_memory_that_was_asked_for(memory: str | int) -> None:
    assert release({"memory": memory}).environment["REFILL_MEMORY_BYTES"] == str(parse_bytes(memory))


def test_the_pinned_tier_leaves_the_file_system_a_tenth_of_its_disk() -> None:
    environment = release({"pinnedDisk": {"enabled": True, "size": "100Gi"}}).environment
    assert int(environment["REFILL_PINNED_DIR_BYTES"]) == 90 * 2**30
