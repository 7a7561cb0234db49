"""Mixtures on real pods: which samples a loop gets of each dataset, also where pods die and ranks change."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import socket
import threading
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch.utils.data
from tests.forked_processes import run_refill
from tests.integration.job_ranks import cluster_of
from tests.pod_fixtures import write_files
from tests.waiting import until

import refill
from refill.errors import InvalidInput, RefillError
from refill.protocol.wire_format import MAX_TOGETHER
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster

BATCH = 16
SIZES = {"web": 600, "code": 200, "books": 90}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found = {}
    for name, size in SIZES.items():
        source, store = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("store")
        write_files(source, size, most=1000, seed=size)
        asyncio.run(pack(str(source), store.as_uri(), blob_bytes=50_000))
        found[name] = store.as_uri()
    return found


@pytest.fixture
def job() -> str:
    return f"mix-{uuid.uuid4().hex[:8]}"


class Loop:
    """A rank's loop, as a training script makes it."""

    def __init__(
        self,
        cluster: LocalCluster,
        datasets: dict[str, str],
        job: str,
        workers: int = 0,
        *,
        they_stay: bool = False,
        **how: Any,
    ) -> None:
        given = {"memory_bytes": 900_000, "chunk_size": 8, "timeout_seconds": 60, "seed": 3, **how}
        self.mixture = refill.Mixture(cluster.pod_urls[0], datasets, job=job, **given)
        self.sampler = refill.EpochSampler(self.mixture)
        loader = torch.utils.data.DataLoader(
            self.mixture,
            batch_size=BATCH,
            sampler=self.sampler,
            num_workers=workers,
            persistent_workers=they_stay,
            collate_fn=names_of,
        )
        self.loader = refill.timed(loader, self.mixture)

    def epoch(self) -> list[tuple[str, int]]:
        return [sample for batch in self.loader for sample in batch]


def names_of(batch: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(sample["__dataset__"], sample["__id__"]) for sample in batch]


def counted(samples: list[tuple[str, int]]) -> dict[str, int]:
    return dict(Counter(name for name, _ in samples))


def receipt(cluster: LocalCluster, job: str, name: str, number: int) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{cluster.pod_urls[0]}/v1/jobs/{job}.{name}/epochs/{number}/receipt").json()
    return found


def test_repeats_are_passes_and_each_has_an_exact_receipt(
    three_pods: LocalCluster, datasets: dict[str, str], job: str
) -> None:
    loop = Loop(three_pods, datasets, job, workers=2, repeat={"code": 2.5, "books": 0.5})
    epochs = [loop.epoch() for _ in range(2)]
    for number, samples in enumerate(epochs):
        assert counted(samples) == loop.mixture.counts(number) == {"web": 600, "code": 500, "books": 45}
        times = {name: Counter(sample for of, sample in samples if of == name) for name in SIZES}
        assert set(times["web"].values()) == {1}
        assert len(times["web"]) == 600
        assert set(times["code"].values()) == {2, 3}
        assert set(times["books"].values()) == {1}
    halves = [{sample for of, sample in samples if of == "books"} for samples in epochs]
    assert not halves[0] & halves[1], "the second half of a pass comes in the next epoch"
    assert [loop.mixture.passes(epoch) for epoch in range(2)] == [
        {"web": [0], "code": [0, 1, 2], "books": [0]},
        {"web": [1], "code": [3, 4, 5], "books": [0]},
    ]
    for name, number in (("web", 0), ("web", 1), ("code", 0), ("code", 1), ("code", 3), ("books", 0)):
        until(lambda of=(name, number): receipt(three_pods, job, *of)["exact"], "an exact receipt")  # type: ignore[misc]
    half = receipt(three_pods, job, "code", 2)
    assert (half["planned"], half["received"]) == (200, 100), half
    counts = loop.mixture.epoch_counts(0)
    assert counts["total"]["takes"] >= 600 + 500 + 45
    assert counts["datasets"]["web"][0]["total"]["exact_reads"] == 0
    loop.mixture.end_job()
    assert job not in httpx.get(f"{three_pods.pod_urls[0]}/v1/jobs").text


def test_each_batch_has_each_dataset_in_its_proportion_to_one_sample(
    three_pods: LocalCluster, datasets: dict[str, str], job: str
) -> None:
    weights = {"web": 0.5, "code": 0.3, "books": 0.2}
    loop = Loop(three_pods, datasets, job, weights=weights, epoch_size=400, stratified=BATCH)
    for batch in loop.loader:
        found = counted(batch)
        assert len(batch) == BATCH
        assert all(abs(found.get(name, 0) - BATCH * part) <= 1 for name, part in weights.items()), found


def test_top_and_metrics_name_each_dataset(three_pods: LocalCluster, datasets: dict[str, str], job: str) -> None:
    loop = Loop(three_pods, datasets, job, weights={"web": 0.5, "code": 0.3, "books": 0.2}, epoch_size=400)
    assert len(loop.epoch()) == 400
    url = three_pods.pod_urls[0]
    metrics = httpx.get(f"{url}/metrics").text
    lines = run_refill(["top", url, "--once", "--interval", "0.2"]).stdout.splitlines()
    for name in SIZES:
        assert any(line.split()[:1] == [f"{job}.{name}"] for line in lines), lines
        assert f'training_job="{job}.{name}"' in metrics


@pytest.mark.parametrize("after", [*(pytest.param(after, marks=pytest.mark.variant) for after in (1, 2)), 3])
def test_a_run_that_was_killed_goes_on_with_other_ranks_exactly_though_a_pod_dies(
    datasets: dict[str, str], job: str, after: int, tmp_path: Path
) -> None:
    """Nothing comes twice and nothing is left out, but for what fills up the last step."""
    weights = {"web": 0.5, "code": 0.5}
    with cluster_of(tmp_path, 3) as cluster:
        first = [
            Loop(cluster, datasets, job, 1, weights=weights, epoch_size=800, rank=rank, world_size=2)
            for rank in range(2)
        ]
        iterators = [iter(loop.loader) for loop in first]
        had: list[tuple[str, int]] = []
        for step in range(9):
            if step == 4:
                cluster.kill(1)
            for batches in iterators:
                had += next(batches)
        state = first[0].loader.state_dict()
        del iterators, first
        cluster.restart(1)
        again = [
            Loop(cluster, datasets, job, 1, weights=weights, epoch_size=800, rank=rank, world_size=after, resume=state)
            for rank in range(after)
        ]
        for loop in again:
            loop.loader.load_state_dict(state)
        rest = [loop.epoch() for loop in again]
        assert len({len(samples) for samples in rest}) == 1
        left = 800 - len(had)
        came = Counter(had) + Counter(sample for samples in rest for sample in samples)
        repeated = sum(map(len, rest)) - left
        assert 0 <= repeated < after
        assert sum(came.values()) == 800 + repeated
        code = Counter({sample: count for sample, count in came.items() if sample[0] == "code"})
        assert set(code.values()) <= {2, 3}
        assert len(code) == 200
        assert sum(code.values()) - 400 <= repeated
        web = Counter({sample: count for sample, count in came.items() if sample[0] == "web"})
        assert len(web) == 400
        for number in range(2):
            until(lambda number=number: receipt(cluster, job, "code", number)["exact"], "an exact receipt")  # type: ignore[misc]


def test_a_rank_that_was_killed_alone_goes_on_while_the_other_lives(
    three_pods: LocalCluster, datasets: dict[str, str], job: str
) -> None:
    def loop_of(rank: int, state: Any = None) -> Loop:
        how = {"weights": {"web": 0.5, "code": 0.5}, "epoch_size": 400}
        return Loop(three_pods, datasets, job, rank=rank, world_size=2, resume=state, **how)

    loops = [loop_of(rank) for rank in range(2)]
    had = [loops[0].epoch(), loops[1].epoch()]
    for each in loops:
        each.sampler.set_epoch(1)
    lives, killed = iter(loops[0].loader), iter(loops[1].loader)
    second = [sample for _ in range(3) for of_rank in (lives, killed) for sample in next(of_rank)]
    state = loops[1].loader.state_dict()
    del killed, loops[1]
    again = loop_of(1, state)
    again.loader.load_state_dict(state)
    rest = again.epoch()
    second += [*rest, *(sample for batch in lives for sample in batch)]
    assert len(set(second)) == len(second) == 400
    assert not {sample for of_rank in had for sample in of_rank if sample[0] == "web"} & set(second)
    until(lambda: receipt(three_pods, job, "code", 0)["exact"], "an exact receipt")
    until(lambda: receipt(three_pods, job, "web", 0)["received"] == 400, "a receipt of all that came")


@pytest.mark.variants("1")
@pytest.mark.parametrize("after", [1, 2])
def test_receipts_do_not_count_what_drop_last_left_out_of_a_pass_before_ranks_were_killed(
    three_pods: LocalCluster, datasets: dict[str, str], job: str, after: int
) -> None:
    """Of two epochs of 299 a pass of 600: the first one leaves out a position, and with two ranks again the second."""

    def loop_of(rank: int, world_size: int, state: Any = None) -> Loop:
        how = {"weights": {"web": 1}, "epoch_size": 299, "drop_last": True}
        return Loop(three_pods, web, job, rank=rank, world_size=world_size, resume=state, **how)

    web = {"web": datasets["web"]}
    loops = [loop_of(rank, 2) for rank in range(2)]
    had = [sample for loop in loops for sample in loop.epoch()]
    for loop in loops:
        loop.sampler.set_epoch(1)
    iterators = [iter(loop.loader) for loop in loops]
    had += [sample for _ in range(3) for of_rank in iterators for sample in next(of_rank)]
    state = loops[0].loader.state_dict()
    del iterators, loops
    again = [loop_of(rank, after, state) for rank in range(after)]
    for loop in again:
        loop.loader.load_state_dict(state)
        had += loop.epoch()
    assert len(set(had)) == len(had) == 298 + 300 - after
    until(lambda: receipt(three_pods, job, "web", 0)["received"] == len(had), "a receipt of all that came, and no more")
    again[0].mixture.end_job()
    found = receipt(three_pods, job, "web", 0)  # when nobody has more to report
    assert (found["received"], found["exact"]) == (len(had), False)


def test_ranks_agree_on_memory_that_nobody_named_though_pods_come_back_with_less(
    datasets: dict[str, str], job: str, tmp_path: Path
) -> None:
    """One rank goes on from a state; the other had nothing yet, comes first, and divides what there is now."""
    with cluster_of(tmp_path, 1) as cluster:

        def loop_of(rank: int, state: Any = None) -> Loop:
            how: dict[str, Any] = {"weights": {"web": 0.5, "code": 0.5}, "epoch_size": 400, "memory_bytes": None}
            return Loop(cluster, datasets, job, rank=rank, world_size=2, resume=state, **how)

        first = loop_of(0)
        batches = iter(first.loader)
        had = [sample for _ in range(3) for sample in next(batches)]
        state = first.loader.state_dict()
        del batches, first
        cluster.kill(0)
        cluster.restart(0, settings={"memory_bytes": "2MiB"})
        new, again = loop_of(1), loop_of(0, state)
        again.loader.load_state_dict(state)
        samples = had + again.epoch() + new.epoch()
        assert len(set(samples)) == len(samples) == 400
        until(lambda: receipt(cluster, job, "web", 0)["received"] == 200, "a receipt of all that came")


def test_weights_and_datasets_change_where_an_epoch_has_ended_and_the_others_go_on(
    three_pods: LocalCluster, datasets: dict[str, str], job: str
) -> None:
    two = {name: datasets[name] for name in ("web", "code")}
    loop = Loop(three_pods, two, job, weights={"web": 0.5, "code": 0.5}, epoch_size=200)
    before = loop.epoch()
    state = loop.loader.state_dict()
    with pytest.raises(RefillError, match=r"memory_bytes.* change with an epoch's end all have .*resume=state"):
        Loop(three_pods, two, job, weights={"web": 0.1, "code": 0.9}, epoch_size=200)
    now = Loop(three_pods, datasets, job, weights={"web": 0.6, "books": 0.4}, epoch_size=200, resume=state)
    now.loader.load_state_dict(state)
    assert now.sampler.epoch == 1
    samples = now.epoch()
    assert counted(samples) == {"web": 120, "books": 80}
    assert not set(before) & set(samples), "web goes on in its pass"
    assert now.mixture.passes(1) == {"web": [0], "code": [], "books": [0]}
    midway = Loop(three_pods, two, f"{job}-2", weights={"web": 0.5, "code": 0.5}, epoch_size=200)
    next(iter(midway.loader))
    state = midway.loader.state_dict()
    with pytest.raises(InvalidInput, match=r"200 of web, 0 of code.* within an epoch|within an epoch it stays"):
        Loop(three_pods, two, f"{job}-2", weights={"web": 1}, epoch_size=200, resume=state)
    damaged = state | {"plan": state["plan"] | {"from": [0, [[1 << 70, 0], [0, 0]]]}}
    with pytest.raises(InvalidInput, match="the state of the mixture is damaged: its parts do not fit"):
        midway.loader.load_state_dict(damaged)


def test_workers_that_stay_have_other_weights_from_where_the_epoch_before_has_ended(
    three_pods: LocalCluster, datasets: dict[str, str], job: str
) -> None:
    two = {name: datasets[name] for name in ("web", "code")}
    loop = Loop(three_pods, two, job, weights={"web": 0.9, "code": 0.1}, epoch_size=100, memory_bytes=None)
    before = loop.epoch()
    state = loop.loader.state_dict()
    weights = {"web": 0.5, "code": 0.5}
    now = Loop(three_pods, two, job, 1, they_stay=True, weights=weights, epoch_size=100, memory_bytes=None)
    next(iter(now.loader))  # its worker is there before the state
    now.loader.load_state_dict(state)
    samples = now.epoch()
    assert counted(samples) == {"web": 50, "code": 50}
    assert not set(before) & set(samples)


def test_an_iterable_mixture_goes_back_though_its_workers_stay(
    three_pods: LocalCluster, datasets: dict[str, str], job: str
) -> None:
    def loop() -> tuple[refill.CacheIterableDataset, Any]:
        mixture = refill.Mixture(three_pods.pod_urls[0], {"books": datasets["books"]}, job=job, memory_bytes=900_000)
        dataset = refill.CacheIterableDataset(mixture, batch_size=BATCH)
        loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            dataset, BATCH, num_workers=1, persistent_workers=True, collate_fn=names_of
        )
        return dataset, refill.timed(loader, dataset)

    dataset, loader = loop()
    states, epochs = [], []
    for epoch in range(2):
        dataset.set_epoch(epoch)
        states.append(loader.state_dict())
        epochs.append(list(loader))
    loader = loop()[1]
    for epoch in (1, 0):
        loader.load_state_dict(states[epoch])
        assert list(loader) == epochs[epoch]


def test_ranks_with_other_weights_are_refused(three_pods: LocalCluster, datasets: dict[str, str], job: str) -> None:
    """Also where memory, which follows from the first ones, is the same."""
    said = [{"web": 0.5, "code": 0.5}, {0: {"web": 0.5, "code": 0.5}, 7: {"web": 1}}, {"web": 0.4, "code": 0.6}]
    ranks = [
        Loop(three_pods, datasets, job, weights=weights, rank=rank, world_size=2, timeout_seconds=3)
        for rank, weights in enumerate(said[:2])
    ]
    iterators = [iter(loop.loader) for loop in ranks]
    with pytest.raises(RefillError, match="same datasets, weights and seed"):  # noqa: PT012  # whichever notices
        for _ in range(6):
            for batches in iterators:
                next(batches)
    with pytest.raises(RefillError, match=r"memory_bytes.*same datasets, weights and seed"):
        Loop(three_pods, datasets, job, weights=said[2], rank=1, world_size=2, timeout_seconds=3)


def test_an_interrupt_is_not_held_up_by_pods_that_do_not_answer(datasets: dict[str, str]) -> None:
    """^C comes while threads ask for the datasets; they are left to themselves."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        service = f"http://127.0.0.1:{silent.getsockname()[1]}"
        mixture = refill.Mixture(service, datasets, job="none", timeout_seconds=30)

        def interrupts() -> None:
            silent.accept()
            os.kill(os.getpid(), signal.SIGINT)

        pressing = threading.Thread(target=interrupts)
        pressing.start()
        with pytest.raises(KeyboardInterrupt):
            mixture.counts(0)
        pressing.join()
        waiting = [thread for thread in threading.enumerate() if thread.name.startswith("refill-mixture")]
        assert waiting, "they wait for an answer still"


def test_a_small_dataset_takes_no_more_memory_than_it_can_use(datasets: dict[str, str], tmp_path: Path) -> None:
    """So several mixtures run side by side that name no memory, and the large dataset of one has the rest."""
    with cluster_of(tmp_path, 2, memory_bytes="64MiB") as cluster:
        loops = [Loop(cluster, datasets, f"small-{number}", memory_bytes=None) for number in range(4)]
        assert [len(loop.epoch()) for loop in loops] == [sum(SIZES.values())] * 4


def test_the_iterable_form_and_groups_that_share_batches(
    three_pods: LocalCluster, datasets: dict[str, str], job: str
) -> None:
    def samples_of(rank: int) -> list[tuple[str, int]]:
        mixture = refill.Mixture(
            three_pods.pod_urls[0], datasets, job=job, rank=rank, world_size=4, batch_group=2, memory_bytes=900_000
        )
        each = refill.CacheIterableDataset(mixture, batch_size=4 * BATCH)
        loader = torch.utils.data.DataLoader(each, batch_size=4 * BATCH, num_workers=1, collate_fn=names_of)
        return [sample for batch in loader for sample in batch]

    of_ranks = [samples_of(rank) for rank in range(4)]
    assert of_ranks[0] == of_ranks[1]
    assert of_ranks[2] == of_ranks[3]
    assert len(set(of_ranks[0]) | set(of_ranks[2])) == sum(SIZES.values())


def test_samples_by_their_numbers_and_what_a_mixture_is_not(
    three_pods: LocalCluster, datasets: dict[str, str], job: str
) -> None:
    mixture = refill.Mixture(three_pods.pod_urls[0], datasets, job=job, memory_bytes=900_000)
    assert len(mixture) == sum(SIZES.values())
    found = [(sample["__dataset__"], sample["__id__"]) for sample in (mixture[0], mixture[600], mixture[-1])]
    assert found == [("web", 0), ("code", 0), ("books", 89)]
    copied = copy.copy(mixture)
    copied.transform = lambda _: "copied"
    assert (mixture[0]["__id__"], copied[0]) == (0, "copied")
    with pytest.raises(InvalidInput, match="order of its own"):
        refill.TraceSampler(mixture, range(10))
    with pytest.raises(InvalidInput, match="no parts"):
        refill.EpochSampler(torch.utils.data.Subset(mixture, range(10)))
    with pytest.raises(InvalidInput, match="no parts"):
        mixture.where(fraction=0.1)
    with pytest.raises(InvalidInput, match="policy='planned'"):
        refill.Mixture(three_pods.pod_urls[0], datasets, job=job, policy="exact")
    with pytest.raises(InvalidInput, match="weights name 'news'"):
        refill.Mixture(three_pods.pod_urls[0], datasets, job=job, weights={"news": 1})


def test_an_epoch_that_was_a_while_ago_is_known_again(
    three_pods: LocalCluster, datasets: dict[str, str], job: str
) -> None:
    loop = Loop(three_pods, datasets, job)
    epochs = []
    for epoch in range(4):
        loop.sampler.set_epoch(epoch)
        epochs.append(loop.epoch())
    assert loop.mixture.passes(0) == {name: [0] for name in SIZES}
    assert loop.mixture.epoch_counts(0)["total"]["takes"] == sum(SIZES.values())
    for epoch in (0, 2):
        loop.sampler.set_epoch(epoch)
        assert loop.epoch() == epochs[epoch]


def test_a_batch_of_more_passes_than_one_request_has(
    three_pods: LocalCluster, datasets: dict[str, str], job: str, tmp_path: Path
) -> None:
    """A dataset of one sample, over and over."""
    one = (tmp_path / "one").as_uri()
    refill.pack([{"bin": b"one"}], one, quiet=True)
    mixture = refill.Mixture(
        three_pods.pod_urls[0],
        {"one": one, "books": datasets["books"]},
        job=job,
        repeat={"one": MAX_TOGETHER + 60},
        memory_bytes=900_000,
        chunk_size=1,
    )
    loader = torch.utils.data.DataLoader(
        mixture, batch_size=1000, sampler=refill.EpochSampler(mixture), collate_fn=names_of
    )
    found = [sample for batch in loader for sample in batch]
    assert counted(found) == {"one": MAX_TOGETHER + 60, "books": SIZES["books"]}
    mixture.end_job()
