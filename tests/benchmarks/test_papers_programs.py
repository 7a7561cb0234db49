"""Each program of `make papers` in small: what it says has the shape that the papers show."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from benchmarks.papers import (
    accuracy,
    deepio_pipeline,
    deli_sweeps,
    end_to_end,
    redox_bound,
    redox_sweeps,
    shade_caches,
)
from benchmarks.papers.__main__ import write_page
from benchmarks.papers.lfu import LfuCache
from benchmarks.papers.page import Curve, Part, Row
from tests.cache_core.portable_order import PortableRandom


def test_chunks_are_loaded_more_often_the_larger_they_are() -> None:
    loads = [redox_sweeps.swept(size, 1.0, 400).loads for size in (2, 8, 32)]
    assert 1 <= loads[0] < loads[1] < loads[2]


def test_remote_memory_is_used_up_to_its_limit_and_saves_requests() -> None:
    little, much = (redox_sweeps.swept(16, limit, 400) for limit in (0.05, 1.0))
    samples_of_limit = round(0.05 / redox_sweeps.SAMPLE_GB / 400)
    assert little.remote_peak * (redox_sweeps.NUM_SAMPLES // 400) <= samples_of_limit
    assert little.remote_peak < much.remote_peak
    assert much.remote_requests < little.remote_requests


def test_redirection_pays_where_requests_bind_and_not_where_bytes_do() -> None:
    requests = {
        each: end_to_end.epoch_hours(each, end_to_end.REQUESTS, math.inf, 400)
        for each in ("PyTorch", "CoorDL", "redox")
    }
    assert end_to_end.COMPUTE_HOURS * 0.99 < requests["redox"] < requests["CoorDL"] < requests["PyTorch"]
    of_bytes = {
        each: end_to_end.epoch_hours(each, end_to_end.BYTES, end_to_end.LINK, 400) for each in ("PyTorch", "redox")
    }
    assert of_bytes["redox"] > of_bytes["PyTorch"]


def test_orders_left_by_redirection() -> None:
    """Theorem 2: at most (P!)^K orders become one."""
    left, most = redox_bound.orders_left(2, 2)
    assert left >= 24 // 4
    assert most <= 4
    assert left * most >= 24


def test_delis_50_50() -> None:
    """The paper's first epoch is .0213, that of an outside simulation .0232 (CIFAR-10)."""
    half = deli_sweeps.missed(deli_sweeps.WORKLOADS["CIFAR-10"], "50/50", "50/50", 2048)
    full = deli_sweeps.missed(deli_sweeps.WORKLOADS["CIFAR-10"], 2048, 0, 2048)
    assert half[0] == pytest.approx(0.0232, abs=0.001)
    assert half[0] / full[0] - 1 == pytest.approx(-0.83, abs=0.02)
    assert half[1] > half[0], "what a fetch left out was evicted before its use"


@pytest.mark.parametrize(("capacity", "hits"), [(50, 6280), (150, 12764)])
def test_lfu_reaches_its_known_answers(capacity: int, hits: int) -> None:
    cache = LfuCache(capacity)
    assert sum(cache.asked(sample) for sample in PortableRandom(5).skewed(500, 20_000).tolist()) == hits


def test_only_who_knows_the_draws_beats_the_cache_s_size() -> None:
    asked, losses = shade_caches.drawn_trace(400, 6)
    hits = {each: shade_caches.hits_of(each, asked, losses, 80, 400)[800:].mean() for each in shade_caches.CACHES}
    assert hits["MIN"] > 0.4
    for each in ("LRU", "LFU", "CoorDL", "batch loss"):
        assert hits[each] == pytest.approx(0.2, abs=0.06)


@pytest.mark.parametrize("training", [0.01, 0.2])
def test_deepios_pipeline(training: float) -> None:
    read, steps = deepio_pipeline.READ, deepio_pipeline.STEPS
    assert deepio_pipeline.epoch_seconds("R = 1", training) == pytest.approx(steps * training)
    assert deepio_pipeline.epoch_seconds("R < 1", training) == pytest.approx(steps * max(training, read), rel=0.05)


def test_what_networks_learn_depends_on_blocks() -> None:
    found = accuracy.accuracies_of(2048, 2, (0,))
    assert found["exact"] > found["constant"] + 5
    assert np.isfinite(list(found.values())).all()


def test_the_page(tmp_path: Path) -> None:
    curve = Curve("some", "size", "misses", {"ours": [(1, 0.5), (2, 0.25)], "paper": [(2, 0.2)]})
    parts = [
        Part("DELI", "python -m one", [Row("misses", "0.95", "0.953", "Fig. 5")], [curve]),
        Part("DELI", "two", []),
    ]
    write_page(parts, tmp_path)
    page = (tmp_path / "PAPERS.md").read_text()
    assert page.count("## DELI") == 1
    assert "| Fig. 5 | misses | 0.95 | 0.953 |" in page
    assert "(papers/some.svg)" in page
    plot = ElementTree.parse(tmp_path / "papers" / "some.svg").getroot()
    assert [each.tag.rpartition("}")[2] for each in plot].count("polyline") == 1
    assert [each.tag.rpartition("}")[2] for each in plot].count("circle") == 1
