"""The papers' caches reach the answers that are known for them: CoorDL, DELI, SHADE."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.papers.epochs import main
from benchmarks.papers.loop_clock import FetchService
from benchmarks.papers.ordered_reads import OrderedRun, simulate_orders
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests.draws import draws

from refill_service.cache_core.epoch_order import KeyedTraces

VARIANT = pytest.mark.variant


def simulated(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["--json", *map(str, arguments)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def column(found: dict[str, Any], name: str) -> list[int]:
    return [epoch[name] for epoch in found["epochs"]]


def written(path: Path, *orders: np.ndarray) -> Path:
    path.write_text("\n".join(str(sample) for order in orders for sample in order.tolist()) + "\n")
    return path


def test_one_rank_reads_from_several_pods() -> None:
    orders = [KeyedTraces(600, 1, seed=1, epoch=epoch) for epoch in range(3)]
    run = OrderedRun(600, memory_samples=40, num_pods=3, batch_size=16, eviction="never")
    first, second = simulate_orders(run, orders, 2)
    assert (first.gets, second.gets) == (600, 600 - 3 * 40), "each pod has memory for 40"
    assert (second.hits, second.misses) == (3 * 40, 600 - 3 * 40)


def test_importance_by_the_losses_of_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """SHADE's Algorithm 1 with two places: insert insert past; evict past hit; evict past past; evict past hit."""
    trace = written(tmp_path / "trace.txt", np.array([1, 2, 3, 3, 4, 1, 4, 2, 5, 5, 3, 4]))
    losses = tmp_path / "losses.txt"
    losses.write_text("\n".join(["0.9", "0.2", "0.6", "0.1", "0.8", "0.5", "0.7", "0.3", "0.4", "0.2", "0.9", "0.6"]))
    options = ("--eviction", "importance", "--trace", trace, "--pods", 1, "--memory-samples", 2, "--batch", 3)
    found = simulated(capsys, *options, "--losses", losses)
    assert (column(found, "hits"), column(found, "gets"), found["chunk_size"]) == ([2], [10], 1)
    several = simulated(capsys, *options, "--losses", losses, "--samples", 6, "--epochs", 2)
    assert sum(column(several, "hits")) == 2, "memory and scores outlive epochs"
    assert sum(column(simulated(capsys, *options), "hits")) == 2, "without scores it keeps what came first"


def algorithm_1(batches: list[list[int]], losses: dict[int, float], capacity: int) -> int:
    """Hits of SHADE's cache, by lists and nothing of ours: each batch is fetched, and has its scores after that."""
    held: list[int] = []
    ghost: dict[int, float] = {}
    hits = 0
    for batch in batches:
        for sample in batch:
            if sample in held:
                hits += 1
            elif len(held) < capacity:
                held.append(sample)
            elif sample in ghost and (scored := [each for each in held if each in ghost]):
                least = min(scored, key=lambda each: (ghost[each], each))
                if ghost[sample] >= ghost[least]:
                    held[held.index(least)] = sample
        of_batch = [losses[sample] for sample in batch]
        ghost |= {each: math.log(sum(other < losses[each] for other in of_batch) + 10) for each in batch}
    return hits


@draws(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asked=st.lists(st.integers(0, 9), min_size=8, max_size=60),
    batch=st.integers(1, 5),
    capacity=st.integers(1, 6),
    seed=st.integers(0, 999),
)
def test_scores_are_known_before_the_next_batch_is_fetched(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, asked: list[int], batch: int, capacity: int, seed: int
) -> None:
    of_samples = dict(enumerate(np.random.default_rng(seed).permutation(10).tolist()))
    losses = tmp_path / "losses.txt"
    losses.write_text("\n".join(str(of_samples[sample]) for sample in asked))
    trace = written(tmp_path / "trace.txt", np.array(asked))
    options = ("--trace", trace, "--samples", 10, "--epochs", 1, "--pods", 1)
    of_cache = ("--memory-samples", capacity, "--batch", batch, "--losses", losses)
    found = simulated(capsys, "--eviction", "importance", *options, *of_cache)
    batches = [asked[first : first + batch] for first in range(0, len(asked), batch)]
    assert column(found, "hits") == [algorithm_1(batches, of_samples, capacity)]


def test_importance_by_the_losses_of_samples(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The most important stay, and each of them hits once an epoch."""
    generator, losses = np.random.default_rng(1), tmp_path / "losses.txt"
    losses.write_text("\n".join(map(str, generator.random(1000))))
    options = ("--samples", 1000, "--memory-samples", 100, "--pods", 2, "--epochs", 4, "--batch", 20)
    found = simulated(capsys, "--eviction", "importance", *options, "--losses", losses)
    assert column(found, "hits")[0] == 0
    assert 50 < column(found, "hits")[1] <= 200
    assert [epoch["hits"] + epoch["misses"] for epoch in found["epochs"]] == [1000] * 4


@pytest.mark.parametrize(
    ("num_samples", "options", "first", "hit", "distinct"),
    [
        (2000, ("--memory-samples", 400, "--repetition", 2.5, "--epochs", 12), 4, 0.681, 0.42),
        pytest.param(2000, ("--memory-samples", 400, "--repetition", 1, "--epochs", 8), 4, 0.325, 0.62, marks=VARIANT),
        (500, ("--memory-samples", 250, "--repetition", 2, "--epochs", 3), 1, 1.0, None),
        # Each of 8 processes takes an eighth of its own drawing: 81 to 93 % of the samples are not seen.
        (500, ("--pods", 8, "--memory-samples", 13, "--repetition", 1, "--improving", "--epochs", 3), 1, None, 0.13),
    ],
)
def test_epochs_are_drawn_by_importance(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    num_samples: int,
    options: tuple[object, ...],
    first: int,
    hit: float | None,
    distinct: float | None,
) -> None:
    """SHADE's known answers for 20,000 samples; here there are fewer, and the same within a few hundredths."""
    epochs = int(str(options[-1]))
    generator = np.random.default_rng(1)
    base, of_epochs = generator.standard_normal(num_samples), generator.standard_normal((epochs, num_samples))
    losses = tmp_path / "losses.txt"
    losses.write_text("\n".join(map(str, np.exp(base + 0.5 * of_epochs).ravel())))
    of_run = ("--eviction", "importance", "--losses", losses, "--samples", num_samples, "--batch", 64)
    found = simulated(capsys, *of_run, "--pods", 1, *options)
    positions = -(-num_samples // found["pods"]) * found["pods"]
    assert [epoch["hits"] + epoch["misses"] for epoch in found["epochs"]] == [positions] * epochs
    if hit is not None:
        assert np.mean(column(found, "hits")[first:]) / positions == pytest.approx(hit, abs=0.035)
    if distinct is not None:
        assert np.mean(column(found, "distinct")[first:]) / num_samples == pytest.approx(distinct, abs=0.05)
    drawn_equal = found["epochs"][0]["distinct"] / num_samples
    assert found["improving"] or drawn_equal == pytest.approx(0.632, abs=0.04), "nothing is known at first"


def test_pods_are_one_cache_and_nodes_of_papers_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    """CoorDL: of all accesses, a node's own cache has C / n, all caches together N C / n."""
    options = ("--eviction", "never", "--samples", 6000, "--memory-samples", 600, "--pods", 3, "--epochs", 2)
    together = simulated(capsys, *options, "--caches", "shared")
    alone = simulated(capsys, *options, "--caches", "private")
    assert column(together, "hits") == [0, 1800]
    assert column(alone, "hits")[1] / 6000 == pytest.approx(0.1, abs=0.015)


@pytest.mark.parametrize(
    ("part", "missed"),
    [
        pytest.param(0.25, 0.9890, marks=pytest.mark.variant),
        (0.5, 0.9530),
        pytest.param(0.75, 0.8870, marks=pytest.mark.variant),
        (3, 0.6667),
    ],
)
def test_cache_only_of_three_nodes(capsys: pytest.CaptureFixture[str], part: float, missed: float) -> None:
    """DELI without its sampler: the second epoch."""
    of_node = 1500
    options = ("--samples", 3 * of_node, "--memory-samples", int(part * of_node), "--pods", 3, "--epochs", 2)
    found = simulated(capsys, "--eviction", "fifo", *options)
    assert found["caches"] == "private"
    assert column(found, "misses")[1] / (3 * of_node) == pytest.approx(missed, abs=0.012)


CLOCK = {"batch": 200, "g": 0.05, "h": 0.002, "comp": 0.5, "svc": {"fixed": 1.5, "per": 0.003}}


def clock_of(folder: Path, **times: object) -> Path:
    path = folder / "clock.json"
    path.write_text(json.dumps(CLOCK | times))
    return path


@pytest.mark.parametrize(
    ("size", "threshold", "memory", "comp", "misses", "seconds", "gets"),
    [
        ("400", "0", 12_000, 0.5, 520, 44.0, 4520),
        ("400", "0", 200, 0.5, 2000, 118.0, 6000),
        ("800", "0", 800, 0.5, 378, 36.9, 4378),
        ("50/50", "50/50", 800, 0.5, 125, 24.25, 4125),
        ("400", "400", 800, 4, 52, 90.6, 4052),
    ],
)
def test_an_epoch_of_deli_by_the_clock(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    size: str,
    threshold: str,
    memory: int,
    comp: float,
    misses: int,
    seconds: float,
    gets: int,
) -> None:
    """The known answers of one of three nodes, in whatever order they ask."""
    options = ("--samples", 12_000, "--pods", 3, "--memory-samples", memory, "--epochs", 1)
    fetching = ("--fetch-size", size, "--fetch-threshold", threshold, "--clock", clock_of(tmp_path, comp=comp))
    found = simulated(capsys, "--eviction", "fifo", *options, *fetching)
    (epoch,) = found["epochs"]
    assert found["batch_size"] == 200
    assert (epoch["misses"], epoch["gets"], epoch["hits"]) == (3 * misses, 3 * gets, 3 * (4000 - misses))
    assert epoch["run_seconds"] == pytest.approx(seconds)
    assert epoch["load_seconds"] == pytest.approx(seconds - 20 * comp)


def test_what_a_fetch_leaves_out_is_renewed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Room for 3: 1, 2 and 3 are there when the second epoch fetches 1 and 0. 1 is the oldest, and 2 leaves for 0."""
    trace = written(tmp_path / "trace.txt", np.array([0, 1, 2, 3]), np.array([1, 0, 2, 3]))
    options = ("--trace", trace, "--pods", 1, "--memory-samples", 3, "--fetch-size", 2, "--batch", 1)
    found = simulated(capsys, "--eviction", "fifo", *options)
    assert column(found, "misses") == [0, 0]
    assert column(found, "gets") == [4, 2]


def test_the_clock_of_other_caches(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Each rank looks up all of its samples and pays for its misses: with one sample each, as in the paper's table."""
    options = ("--samples", 4000, "--pods", 2, "--memory-samples", 1000, "--epochs", 2)
    found = simulated(capsys, "--eviction", "never", *options, "--clock", clock_of(tmp_path))
    first, second = found["epochs"]
    assert first["load_seconds"] == pytest.approx(2000 * 0.052)
    assert first["run_seconds"] == pytest.approx(2000 * 0.052 + 10 * 0.5)
    assert second["misses"] == 2000
    assert second["load_seconds"] == pytest.approx(2000 * 0.002 + 1000 * 0.05, rel=0.1)
    without = simulated(capsys, "--eviction", "never", *options)
    assert "load_seconds" not in without["epochs"][0]
    assert column(without, "misses") == column(found, "misses")


def test_what_a_fetch_takes() -> None:
    by_samples, of_store = FetchService(1.5, 0.003), FetchService(1, parallel=8, latency=0.1, size=1e5, bandwidth=1e7)
    assert by_samples.seconds(0) == of_store.seconds(0) == 0, "nothing to fetch"
    assert by_samples.seconds(400) == pytest.approx(2.7)
    assert of_store.seconds(16) == pytest.approx(1 + 0.1 + 16 * 0.01), "as long as the bytes take"
    assert of_store.seconds(1) == pytest.approx(1.11)
    slow = FetchService(0, parallel=2, latency=0.1, size=10, bandwidth=1e9)
    assert slow.seconds(9) == pytest.approx(5 * 0.1), "as long as the round trips take"


@pytest.mark.parametrize(
    ("clock", "message"),
    [
        (None, "can't read clock clock.json: No such file or directory"),
        ("{", "clock clock.json is no JSON"),
        ("[]", "clock clock.json must be an object of names and numbers"),
        ('{"gg": 1}', "clock clock.json has no 'gg'; there are: ahead, batch, comp, g, h, in_step, link, svc"),
        ('{"g": "1"}', "clock clock.json: g must be a number of at least 0, got '1'"),
        ('{"h": -1}', "clock clock.json: h must be a number of at least 0, got -1"),
        ('{"h": NaN}', "clock clock.json: h must be a number of at least 0, got nan"),
        ('{"batch": 1.5}', "clock clock.json: batch must be a whole number of at least 1, got 1.5"),
        ('{"svc": 3}', "svc of clock clock.json must be an object of names and numbers"),
        ('{"svc": {"latency": 1}}', "svc of clock clock.json lacks parallel, size, bandwidth"),
        ('{"svc": {"per": 1, "latency": 1}}', "svc of clock clock.json has per, and latency: use one form"),
        ('{"svc": {"workers": 1.4, "size": 1}}', "svc of clock clock.json has workers, and size: use one form"),
        ('{"svc": {"workers": 0}}', "svc of clock clock.json: workers must be more than 0"),
        ('{"in_step": 1}', "clock clock.json: in_step must be true or false, got 1"),
        (
            '{"svc": {"parallel": 0, "latency": 1, "size": 1, "bandwidth": 1}}',
            "svc of clock clock.json: parallel must be a whole number of at least 1, got 0",
        ),
        (
            '{"svc": {"parallel": 1, "latency": 1, "size": 1, "bandwidth": 0}}',
            "svc of clock clock.json: bandwidth must be more than 0",
        ),
    ],
)
def test_a_clock_that_is_wrong_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    clock: str | None,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if clock is not None:
        (tmp_path / "clock.json").write_text(clock)
    assert main(["--clock", "clock.json"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1, error


BY_LOSSES = ("--eviction", "importance", "--losses", "large.txt", "--samples", "3")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--memory-samples", "0"), "--memory-samples must be at least 1, got 0"),
        (("--samples", "10", "--chunk-size", "11"), "chunk size 11 is larger than every blob"),
        (("--epochs", "0"), "epochs must be at least 1, got 0"),
        (("--fetch-size", "4"), "--fetch-size goes with --eviction fifo"),
        (("--eviction", "fifo", "--fetch-size", "0"), "--fetch-size must be at least 1, got 0"),
        (("--eviction", "fifo", "--fetch-threshold", "4"), "--fetch-threshold goes with --fetch-size"),
        (
            ("--eviction", "fifo", "--fetch-size", "70000", "--caches", "shared"),
            "setting fetch_size of policy exact must be at most 65536, got 70000",
        ),
        (("--losses", "words.txt"), "--losses goes with --eviction importance"),
        (("--eviction", "importance", "--losses", "nowhere.txt"), "can't read losses nowhere.txt: No such file"),
        (("--eviction", "importance", "--losses", "words.txt"), "can't read losses words.txt: one loss a line, a"),
        (("--eviction", "importance", "--losses", "nan.txt"), "losses nan.txt line 2: nan is no loss"),
        (
            ("--eviction", "importance", "--losses", "large.txt", "--samples", "5", "--epochs", "2"),
            "losses large.txt has 3 lines; there are 5 samples, and 2 epochs",
        ),
        (
            ("--eviction", "importance", "--losses", "large.txt", "--trace", "two.txt"),
            "losses large.txt has 3 lines, and the trace 2",
        ),
        (("--eviction", "importance", "--repetition", "2"), "--repetition goes with --losses"),
        (("--eviction", "importance", "--improving"), "--improving goes with --repetition"),
        ((*BY_LOSSES, "--repetition", "0.5"), "repetition must be at least 1 and less than 1000, got 0.5"),
        ((*BY_LOSSES, "--repetition", "nan"), "repetition must be at least 1 and less than 1000, got nan"),
        ((*BY_LOSSES, "--repetition", "2", "--epochs", "0"), "epochs must be at least 1, got 0"),
        ((*BY_LOSSES, "--repetition", "2", "--samples", "4"), "losses large.txt has 3 lines; there are 4 samples"),
        (
            (*BY_LOSSES, "--repetition", "2", "--trace", "two.txt"),
            "--repetition draws the order, and does not go with --trace",
        ),
        ((*BY_LOSSES, "--repetition", "2", "--caches", "private"), "--repetition does not go with --caches private"),
        (("--policy", "redox", "--repetition", "2"), "--repetition is an option of --policy exact"),
        (("--policy", "redox", "--clock", "clock.json"), "can't read clock clock.json"),
        (("--policy", "redox", "--epochs", "0"), "epochs must be at least 1, got 0"),
        (("--policy", "redox", "--eviction", "lru"), "--eviction is an option of --policy exact"),
        (("--policy", "redox", "--epochs", "2", "--trace", "large.txt"), "--trace is an option of --policy exact"),
        (("--policy", "redox", "--memory-samples", "63"), "memory for 63 samples holds no chunk of 64"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (
        ("words", "1\none\n"),
        ("large", "1\n2\n5\n"),
        ("empty", "\n"),
        ("nan", "1\nnan\n"),
        ("two", "1\n0\n"),
    ):
        (tmp_path / f"{name}.txt").write_text(text)
    assert main(list(arguments)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1, error
