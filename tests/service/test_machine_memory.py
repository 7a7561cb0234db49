"""Pods are warned of memory that their machine, or container, does not have."""

from __future__ import annotations

from pathlib import Path

from refill_service.machine_memory import machine_memory, too_much


def test_a_container_may_have_less_than_its_machine(tmp_path: Path) -> None:
    whole = machine_memory(tmp_path / "none")
    (tmp_path / "limit").write_text("1048576\n")
    (tmp_path / "unlimited").write_text("max\n")
    assert machine_memory(tmp_path / "limit") == 2**20 < machine_memory(tmp_path / "unlimited") == whole


def test_pods_that_have_more_are_named_with_both() -> None:
    assert too_much(2**40, 2**40) is None
    said = too_much(2**42, 2**34)
    assert said is not None
    assert "memory_bytes is 4096.0 GiB, and this machine, or container, has 16.0 GiB: the pod would be killed" in said


def test_pods_on_one_machine_share_its_memory() -> None:
    assert too_much(2**32, 2**34, num_pods=4) is None
    said = too_much(2**32, 2**34, num_pods=5)
    assert said is not None
    assert (
        "memory_bytes is 4.0 GiB for each of 5 pods, and this machine, or container, has 16.0 GiB: pods would" in said
    )
