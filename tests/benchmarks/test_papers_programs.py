"""Each program of `make papers` in small: what it says has the shape that the papers show."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from benchmarks.papers import (
    accuracy,
    deepio_pipeline,
    deli_sweeps,
    deli_workloads,
    end_to_end,
    redox_bound,
    redox_sweeps,
    shade,
    shade_accuracy,
    shade_caches,
    share_bound,
)
from benchmarks.papers.__main__ import parts_of_page, write_page
from benchmarks.papers.kept_parts import MadePart, about_now, keep, kept
from benchmarks.papers.lfu import LfuCache
from benchmarks.papers.page import Curve, Part, Row, svg_of
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


@pytest.mark.variant
def test_redirection_pays_where_requests_bind_and_not_where_bytes_do() -> None:
    requests = {
        each: end_to_end.epoch_hours(each, end_to_end.REQUESTS, math.inf, 400)
        for each in ("PyTorch", "CoorDL", "redox")
    }
    assert end_to_end.RESNET50.compute_hours * 0.99 < requests["redox"] < requests["CoorDL"] < requests["PyTorch"]
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


@pytest.mark.variant
def test_by_the_clock_it_depends_on_the_model_and_on_memory() -> None:
    """SqueezeNet computes least, and gains most; so does who has more memory."""
    speedups = []
    for memory, model in ((0.08, end_to_end.RESNET50), (0.08, end_to_end.SQUEEZENET), (0.35, end_to_end.SQUEEZENET)):
        setup = end_to_end.Setup(3, memory, model)
        alone, redox = (
            end_to_end.epoch_hours(each, end_to_end.REQUESTS, math.inf, 400, setup) for each in ("PyTorch", "redox")
        )
        speedups.append(alone / redox)
    assert 1 < speedups[0] < speedups[1] < speedups[2]


def test_larger_chunks_are_read_faster_and_not_always_sooner() -> None:
    small, large = (redox_sweeps.timed(size, 1.0, 400) for size in (1, 8))
    assert large.mb_per_second > 2 * small.mb_per_second
    assert large.hours < small.hours


def test_delis_50_50() -> None:
    """The paper's first epoch is .0213, that of an outside simulation .0232 (CIFAR-10)."""
    cifar = deli_workloads.WORKLOADS["CIFAR-10"]
    half, full = (deli_workloads.missed(cifar, *setting, 2048) for setting in (("50/50", "50/50"), (2048, 0)))
    assert half[0] == pytest.approx(0.0232, abs=0.001)
    assert half[0] / full[0] - 1 == pytest.approx(-0.83, abs=0.02)
    assert half[1] > half[0], "what a fetch left out was evicted before its use"


def test_delis_published_cells() -> None:
    """Fetches under way share the service's workers, or it would fetch much that it did not."""
    all_cells = list(deli_workloads.cells())
    assert 2 * len(all_cells) == 148
    small = [each for each in all_cells if (each.workload, each.figure, each.fetch_size) == ("MNIST", "6", 256)]
    workload = deli_workloads.WORKLOADS["MNIST"]
    alone = replace(workload.clock, svc=replace(workload.clock.svc, workers=math.inf))
    assert deli_sweeps.rms_of(deli_sweeps.missed_in(small, workload)) < 0.01
    assert deli_sweeps.rms_of(deli_sweeps.missed_in(small, replace(workload, clock=alone))) > 0.05


def test_shades_hits_and_how_many_samples_come() -> None:
    """Of 2,000 samples; an outside simulation drew 20,000."""
    once, thrice = (shade.hits_and_distinct(1000, 0.2, repetition) for repetition in (1.0, 3.0))
    assert once == (pytest.approx(0.325, abs=0.04), pytest.approx(0.62, abs=0.03))
    assert thrice == (pytest.approx(0.843, abs=0.06), pytest.approx(0.30, abs=0.05))
    ranks = next(iter(shade.rows(50)))
    assert ranks.got == ranks.expected


def test_shade_loads_less_and_learns_no_sooner() -> None:
    uniform, drawn = (shade_accuracy.learned(2048, 0.2, repetition, 4, 1) for repetition in (None, 3.0))
    assert uniform.loaded[-1] > 2 * drawn.loaded[-1]
    assert uniform.accuracy[-1] > drawn.accuracy[-1]
    assert uniform.when(uniform.accuracy[0]) == (1, uniform.loaded[0])
    assert drawn.when(101.0) == (5, math.inf)


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


def test_shades_draws_beside_a_cache_that_knows_a_uniform_order() -> None:
    """At half of the samples a hit takes 1 and a miss 11: 6 in the mean, and SHADE finds nearly all."""
    shade = shade_caches.epoch_seconds(400, 0.5, "importance", 3.0)
    assert shade_caches.epoch_seconds(400, 0.5, "never") / shade == pytest.approx(6, abs=0.3)


@pytest.mark.variants("0.01")
@pytest.mark.parametrize("training", [0.01, 0.2])
def test_deepios_pipeline(training: float) -> None:
    read, steps = deepio_pipeline.READ, deepio_pipeline.STEPS
    assert deepio_pipeline.epoch_seconds("R = 1", training) == pytest.approx(steps * training)
    assert deepio_pipeline.epoch_seconds("R < 1", training) == pytest.approx(steps * max(training, read), rel=0.06)


def test_what_networks_learn_does_not_depend_on_redirection() -> None:
    found = {name: after[-1] for name, after in accuracy.accuracies_of(4096, 3).items()}
    assert found["a perfect shuffle"] > found["a constant order"] + 20
    for part in accuracy.MEMORIES:
        assert found[f"redox, memory {part:.0%}"] == pytest.approx(found["a perfect shuffle"], abs=3), part
    assert found["R = 0.5"] > found["a constant order"] + 20


def test_deepios_rounds() -> None:
    """Each has whole files, which are drawn, and its samples in any order."""
    order = accuracy.rounds(1024, 0.25, 0)(0)
    assert sorted(order.tolist()) == list(range(1024))
    for first in range(0, 1024, 256):
        files = order[first : first + 256] // accuracy.FILE
        assert len(set(files.tolist())) == 4
        assert len(set(files[:64].tolist())) > 1
    assert accuracy.rounds(1024, 0.25, 0)(1).tolist() != order.tolist()


@pytest.mark.parametrize("num_pods", [1, 2])
def test_nobody_reads_less_than_the_bound(num_pods: int) -> None:
    orders = share_bound.random_orders(512)
    bound = share_bound.bound_of_pods(orders, 8, 64, num_pods, 40)
    exact = share_bound.gets_of("exact", orders, 8, 64, num_pods, batch=16)
    listed = share_bound.gets_of("planned", orders, 8, 64, num_pods, batch=16)
    assert 3 * 512 / 8 < bound < min(exact, listed)
    assert exact < 1.35 * bound


def test_the_bound_where_it_is_known() -> None:
    """With memory for all each chunk is read once; with hardly any, each sample is, but for the last one."""
    orders = share_bound.random_orders(64, 1)
    uses = share_bound.ChunkUses.of(orders, 8)
    assert share_bound.bound_of(uses, 64, 1) == pytest.approx(8, abs=0.2)
    assert 8 * 7 < share_bound.bound_of(uses, 0.01, 1) <= 64


@pytest.mark.parametrize("num_pods", [1, 2, 5])
def test_a_planned_order_is_read_once_by_any_number_of_pods(num_pods: int) -> None:
    orders = share_bound.random_orders(2048)
    gets = share_bound.gets_of("planned", orders, 8, 400, num_pods, batch=16, is_listed=False)
    assert gets == 3 * 2048 // 8


def test_each_line_of_a_plot_has_a_colour_of_its_own() -> None:
    lines = {f"line {number}": [(1.0, float(number))] for number in range(8)}
    drawn = svg_of(Curve("some", "x", "y", lines))
    colours = re.findall(r'fill="(#\w+)">line', drawn)
    assert len(colours) == len(set(colours)) == 8
    with pytest.raises(ValueError, match="9 lines, and there are 8 colours"):
        svg_of(Curve("some", "x", "y", lines | {"one more": [(1.0, 1.0)]}))


def test_the_page(tmp_path: Path) -> None:
    curve = Curve("some", "size", "misses", {"ours": [(1, 0.5), (2, 0.25)], "paper": [(2, 0.2)]})
    parts = [
        Part("DELI", "python -m one", [Row("misses", "0.95", "0.953", "Fig. 5")], [curve]),
        Part("DELI", "two", []),
    ]
    for name, part in zip("ab", parts, strict=True):
        keep(tmp_path / "kept", name, MadePart(part, about_now(), 90.0))
    made = [kept(tmp_path / "kept", name) for name in "ab"]
    assert kept(tmp_path / "kept", "c") is None
    write_page([each for each in made if each is not None], tmp_path)
    page = (tmp_path / "PAPERS.md").read_text()
    assert page.count("## DELI") == 1
    assert "`make papers` in 3 minutes" in page
    assert re.search(r"`python -m one` \(\d{4}-\d\d-\d\d, (no )?commit.*, \d+ cores, Python 3", page)
    assert "| Fig. 5 | misses | 0.95 | 0.953 |" in page
    assert "(papers/some.svg)" in page
    plot = ElementTree.parse(tmp_path / "papers" / "some.svg").getroot()
    assert [each.tag.rpartition("}")[2] for each in plot].count("polyline") == 1
    assert [each.tag.rpartition("}")[2] for each in plot].count("circle") == 1


@pytest.mark.variants("shade_caches", "deli_sweeps")
@pytest.mark.parametrize(
    ("program", "small", "num_curves"),
    [
        pytest.param(redox_sweeps, 150, 5, marks=pytest.mark.variant),
        pytest.param(end_to_end, 400, 0, marks=pytest.mark.variant),
        pytest.param(accuracy, 2048, 2, marks=pytest.mark.variant),
        (deli_sweeps, 20, 6),
        (shade_caches, 200, 1),
        (shade_accuracy, 512, 2),
    ],
    ids=lambda each: each.__name__.rpartition(".")[2] if isinstance(each, ModuleType) else None,
)
def test_each_part_of_the_page_in_small(program: ModuleType, small: int, num_curves: int) -> None:
    part = program.part_of_page(small)
    assert part.command == f"python -m {program.__name__} {part.command.split(maxsplit=3)[3]}"
    assert all(row.where and row.expected and row.got for row in part.rows)
    assert len({curve.name for curve in part.curves}) == num_curves
    for curve in part.curves:
        ElementTree.fromstring(svg_of(curve))


def test_each_part_of_the_page_has_a_program_of_its_name() -> None:
    programs = Path(accuracy.__file__).parent
    for name in parts_of_page(16):
        assert f"python -m benchmarks.papers.{name}" in (programs / f"{name}.py").read_text()
