"""What the clock predicts where reads take time, beside sums done by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.papers.epochs import main

STORE = {"parallel": 8, "latency": 0.01, "size": 1000, "bandwidth": 1e6}
"""1000 samples a second."""


def timed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: object, svc: Any = STORE, **clock: Any
) -> list[dict[str, Any]]:
    path = tmp_path / "clock.json"
    path.write_text(json.dumps({"batch": 20, "svc": svc} | clock))
    assert main(["--json", "--clock", str(path), *map(str, arguments)]) == 0
    epochs: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["epochs"]
    return epochs


EXACT = ("--policy", "exact", "--samples", 1000, "--chunk-size", 10, "--memory-samples", 200, "--pods", 1)


def test_epochs_take_as_long_as_their_bytes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for epoch in timed(capsys, tmp_path, *EXACT, "--epochs", 3):
        # Reads that begin together are over together: beside the transfers of each eight comes a latency, and each
        # of the 50 batches may have fewer.
        bytes_take = epoch["samples_read"] * 1e-3
        assert bytes_take <= epoch["run_seconds"] <= bytes_take + (epoch["gets"] / 8 + 50) * 0.01
        assert epoch["load_seconds"] == epoch["run_seconds"], "nothing is computed"
        assert epoch["hits"] + epoch["misses"] == 1000


def test_a_loader_that_asks_ahead_hides_reads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A batch of 20 takes 0.06 s to read, and 0.4 s to compute."""
    times = {"comp": 0.4, "h": 0.001}
    alone = timed(capsys, tmp_path, *EXACT, "--epochs", 2, **times)
    ahead = timed(capsys, tmp_path, *EXACT, "--epochs", 2, ahead=2, **times)
    for epoch in alone:
        assert epoch["run_seconds"] >= 50 * (0.4 + 20 * 0.001) + 0.8 * epoch["samples_read"] * 1e-3
    for epoch in ahead:
        assert 50 * 0.4 <= epoch["run_seconds"] <= 50 * 0.4 + 0.3, "little but the first batch is waited for"


def test_reads_that_nobody_ordered_ahead(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One GET after another for each miss, and a look-up for each sample."""
    options = ("--policy", "exact", "--eviction", "never", "--read-ahead", 0, "--pods", 1, "--batch", 1)
    first, second = timed(
        capsys, tmp_path, *options, "--samples", 300, "--memory-samples", 100, "--epochs", 2, h=0.001, g=9.0
    )
    assert (first["gets"], second["gets"]) == (300, 200)
    assert first["run_seconds"] == pytest.approx(300 * (0.01 + 0.001 + 0.001))
    assert second["run_seconds"] == pytest.approx(200 * 0.011 + 300 * 0.001)


def test_gets_at_once_bound_what_a_pod_reads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    slow = STORE | {"parallel": 1, "latency": 0.09}
    for epoch in timed(capsys, tmp_path, *EXACT, "--epochs", 2, svc=slow):
        assert epoch["run_seconds"] == pytest.approx(epoch["gets"] * 0.1), "one GET after another"


@pytest.mark.parametrize("pods", [1, 2, 4, 8])
@pytest.mark.parametrize("bound", ["bandwidth", "link"])
def test_several_pods_read_as_fast_as_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, pods: int, bound: str
) -> None:
    """Everything at once, 400 samples a second apart: a latency of 5 ms and all bytes, however many pods share them."""
    all_bytes = {"bandwidth": 1e6 / pods} if bound == "bandwidth" else {"bandwidth": 1e9}
    link = {} if bound == "bandwidth" else {"link": 1e6}
    svc = {"parallel": 400, "latency": 0.005, "size": 1000} | all_bytes
    options = ("--eviction", "never", "--read-ahead", 0, "--samples", 400, "--memory-samples", 400, "--pods", pods)
    (epoch,) = timed(capsys, tmp_path, *options, "--batch", 400 // pods, "--epochs", 1, svc=svc, **link)
    assert epoch["run_seconds"] == pytest.approx(0.405)


def test_ranks_in_step_wait_for_the_slowest(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two ranks of two samples a step; each has memory for its samples of the first step, and finds one or the other.

    The second epoch: a step costs 2 misses of one rank and none of the other, and then the reverse."""
    trace = tmp_path / "trace.txt"
    first = [(0, 1), (2, 3), (4, 5), (6, 7)]
    second = [(0, 5), (2, 7), (4, 1), (6, 3)]
    trace.write_text("".join(f"{a}\n{b}\n" for a, b in first + second))
    options = ("--eviction", "never", "--caches", "private", "--trace", trace, "--samples", 8, "--pods", 2)
    of_run = (*options, "--memory-samples", 2, "--batch", 2, "--read-ahead", 0)
    store = {"parallel": 1, "latency": 0.1, "size": 0, "bandwidth": 1}
    for svc, g in ((store, 0.0), ({}, 0.1)):
        in_step = timed(capsys, tmp_path, *of_run, svc=svc, g=g, comp=0.05)[1]
        apart = timed(capsys, tmp_path, *of_run, svc=svc, g=g, comp=0.05, in_step=False)[1]
        # Rank 0 has 0 and 2, and asks for 0 2, then 4 6: none and two are missing. Rank 1 has 1 and 3, and asks for
        # 5 7, then 1 3. Alone each waits .2 s; in step both wait .2 s twice.
        assert in_step["run_seconds"] == pytest.approx(2 * (0.2 + 0.05))
        assert apart["run_seconds"] == pytest.approx(0.2 + 2 * 0.05)
        assert in_step["load_seconds"] == apart["load_seconds"] == pytest.approx(0.2)


def test_nodes_of_deli_are_in_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of three nodes that fetch, each step takes what its slowest takes, so that an epoch is no shorter."""
    options = ("--eviction", "fifo", "--fetch-size", 40, "--samples", 1200, "--memory-samples", 80, "--pods", 3)
    times = {"svc": {"fixed": 0.5, "per": 0.01, "workers": 1.4}, "g": 0.1, "comp": 0.2}
    for together, apart in zip(
        timed(capsys, tmp_path, *options, **times),
        timed(capsys, tmp_path, *options, in_step=False, **times),
        strict=True,
    ):
        assert together["run_seconds"] >= apart["run_seconds"]
        assert together["run_seconds"] >= together["load_seconds"] + 20 * 0.2 - 1e-9


@pytest.mark.variant
def test_pods_share_their_link(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ("--policy", "exact", "--chunk-size", 10, "--samples", 4000, "--memory-samples", 200, "--pods", 4)
    for alone, together in zip(
        timed(capsys, tmp_path, *options, ahead=4), timed(capsys, tmp_path, *options, ahead=4, link=1e6), strict=True
    ):
        # Nobody waits for a link of his own but when he has most to read; all together fill theirs.
        assert alone["samples_read"] * 1e-3 / 4 <= alone["run_seconds"] <= alone["samples_read"] * 1e-3 / 2
        bytes_take = together["samples_read"] * 1e-3
        assert bytes_take - 0.1 <= together["run_seconds"] <= bytes_take * 1.1


@pytest.mark.variants("renewal", "fifo", "lru", "importance")
@pytest.mark.parametrize("eviction", ["rolling", "renewal", "earliest", "fifo", "lru", "importance"])
def test_every_eviction_has_a_clock(capsys: pytest.CaptureFixture[str], tmp_path: Path, eviction: str) -> None:
    options = ("--policy", "exact", "--samples", 600, "--memory-samples", 60, "--chunk-size", 8, "--pods", 2)
    for epoch in timed(capsys, tmp_path, *options, "--eviction", eviction, "--caches", "shared", link=1e6, comp=0.001):
        # No less than its bytes take on the link, but for what a 32nd of memory has read ahead. And no more than if all
        # waited for each of the 15 steps: two batches are at most 40 reads, which a pod makes in 5 rounds of 8, each
        # with its latency, and then they are computed.
        on_the_link = epoch["samples_read"] * 1e-3
        assert on_the_link - 120 / 32 * 1e-3 <= epoch["run_seconds"] <= on_the_link + 15 * (5 * 0.01 + 0.001)
        assert epoch["hits"] + epoch["misses"] == 600


def test_what_training_finds_comes_when_it_has_computed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    losses = tmp_path / "losses.txt"
    losses.write_text("".join(f"{sample % 7}\n" for sample in range(600)))
    options = ("--policy", "exact", "--eviction", "importance", "--losses", losses, "--samples", 600, "--pods", 2)
    known = timed(capsys, tmp_path, *options, "--memory-samples", 60, "--epochs", 3, comp=0.001)
    assert all(480 <= epoch["gets"] < 600 for epoch in known[1:])
    assert all(epoch["hits"] + epoch["misses"] == 600 for epoch in known)
    unknown = timed(capsys, tmp_path, *options[:4], *options[6:], "--memory-samples", 60, "--epochs", 3, comp=0.001)
    assert all(480 <= epoch["gets"] <= 484 for epoch in unknown[1:]), "what came first stays"


def test_redox_waits_for_its_refills(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    redox = timed(capsys, tmp_path, "--policy", "redox", *EXACT[2:], "--epochs", 2)
    for epoch in redox:
        assert epoch["samples_read"] > 1000
        # No less than its bytes take; and no more than if its GETs came one after another.
        assert epoch["samples_read"] * 1e-3 <= epoch["run_seconds"] <= epoch["gets"] * (0.01 + 0.01)


def test_a_store_that_is_not_modelled_costs_each_miss(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    first, _ = timed(capsys, tmp_path, *EXACT, "--epochs", 2, svc={}, g=0.5, h=0.002, comp=0.1)
    assert first["load_seconds"] == pytest.approx(1000 * 0.002 + first["misses"] * 0.5)
    assert first["run_seconds"] == pytest.approx(first["load_seconds"] + 50 * 0.1)
