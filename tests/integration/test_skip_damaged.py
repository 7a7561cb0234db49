"""on_damaged="skip": damaged samples end no run. All others come exactly once, ranks stay in step, receipts tell."""

from __future__ import annotations

import asyncio
import pickle
import random
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tests.pod_fixtures import metric
from tests.waiting import until
from torch.utils.data import DataLoader

import refill
from refill import CacheDataset, CacheIterableDataset, EpochSampler, TraceSampler, timed
from refill.errors import InvalidInput, SampleDamaged
from refill_service.cli import main
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.inspect_dataset import find_damage
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster

NUM_SAMPLES, BATCH = 300, 16


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, set[int]]:
    """A dataset with a blob that is cut in the middle and a flipped byte in another: its URL, and what is damaged."""
    files, store = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("store")
    generator = random.Random(5)
    for i in range(NUM_SAMPLES):
        (files / f"s{i:04}.bin").write_bytes(generator.randbytes(generator.randint(2000, 4000)))
        (files / f"s{i:04}.cls").write_text(str(i % 7))
    asyncio.run(pack(str(files), store.as_uri(), blob_bytes=60_000))
    blobs = sorted(store.rglob("*.tar"))
    with blobs[3].open("r+b") as file:
        file.truncate(blobs[3].stat().st_size // 2)
    data = bytearray(blobs[8].read_bytes())
    data[1000] ^= 0xFF
    blobs[8].write_bytes(data)
    damaged = asyncio.run(all_damage(store.as_uri()))
    assert 3 < len(damaged) < 20, damaged
    return store.as_uri(), damaged


async def all_damage(url: str) -> set[int]:
    dataset = await Dataset.open(url)
    try:
        return {error.details["sample"] async for error in find_damage(dataset, lambda num_bytes: None)}
    finally:
        await dataset.close()


@pytest.fixture
def dataset_of(three_pods: LocalCluster, broken: tuple[str, set[int]]) -> Iterator[Callable[..., CacheDataset]]:
    name = f"job-{uuid.uuid4().hex[:8]}"

    def new(rank: int = 0, form: Any = CacheDataset, **settings: Any) -> Any:
        said = {"on_damaged": "skip", "chunk_size": 8, "memory_bytes": 300_000, "timeout_seconds": 30} | settings
        return form(three_pods.pod_urls[0], dataset=broken[0], job=name, rank=rank, **said)

    yield new
    httpx.delete(f"{three_pods.pod_urls[0]}/v1/jobs/{name}")


def ids_of(samples: list[Any]) -> list[int]:
    return [sample["__id__"] for sample in samples]


def receipt_of(dataset: CacheDataset, epoch: int = 0) -> dict[str, Any]:
    return httpx.get(f"{dataset.connection.home}/v1/jobs/{dataset.connection.spec.name}/epochs/{epoch}/receipt").json()


def exact_receipt_of(dataset: CacheDataset, epoch: int = 0) -> dict[str, Any]:
    """Of a planned job, ranks report what has come a moment later."""
    until(lambda: bool(receipt_of(dataset, epoch)["exact"]), f"an exact receipt of epoch {epoch}")
    return receipt_of(dataset, epoch)


@pytest.mark.variants("redox")
@pytest.mark.parametrize("policy", ["redox", "planned"])
def test_two_ranks_take_as_many_steps_and_the_rest_comes_once(
    dataset_of: Callable[..., CacheDataset],
    broken: tuple[str, set[int]],
    three_pods: LocalCluster,
    policy: str,
    capsys: Any,
) -> None:
    damaged = broken[1]

    def train(rank: int) -> tuple[list[list[int]], int]:
        dataset = dataset_of(rank, world_size=2, policy=policy)
        loader: DataLoader[Any] = DataLoader(dataset, BATCH, sampler=EpochSampler(dataset), collate_fn=list)
        batches = [ids_of(batch) for batch in loader]
        batches += [ids_of(batch) for batch in loader]  # another epoch: the same are damaged
        return batches, dataset.num_damaged

    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(train, range(2)))
    steps = [len(batches) for batches, _ in ranks]
    assert steps[0] == steps[1] == 2 * -(-NUM_SAMPLES // 2 // BATCH), f"ranks took {steps} steps"
    came = Counter(sample for batches, _ in ranks for batch in batches for sample in batch)
    assert set(came) == set(range(NUM_SAMPLES)) - damaged, "not all that is intact came, or more"
    assert set(came.values()) == {2}, "not each once an epoch"
    assert sum(count for _, count in ranks) == 2 * len(damaged)
    look = dataset_of(world_size=2, policy=policy)
    for epoch in (0, 1):
        found = exact_receipt_of(look, epoch)
        assert (found["damaged"], found["damaged_samples"]) == (len(damaged), sorted(damaged)), found
        counted = (found["received"] - found["damaged"]) if policy == "planned" else found["delivered"]
        assert counted == NUM_SAMPLES - len(damaged), found
        assert sum(found["ranks"].values()) == (NUM_SAMPLES if policy == "planned" else counted), found
    name = look.connection.spec.name
    counted = sum(metric(url, "refill_damaged_samples_total", training_job=name) for url in three_pods.pod_urls)
    assert counted == 2 * len(damaged)
    assert main(["receipt", name, "0", "--url", three_pods.pod_urls[0]]) == 0, "all but damaged samples came"
    shown = capsys.readouterr().out
    assert f"exact but for {len(damaged)} damaged" in shown
    assert ", ".join(map(str, sorted(damaged))) in shown


def test_a_batch_is_collated_without_them(
    dataset_of: Callable[..., CacheDataset], broken: tuple[str, set[int]]
) -> None:
    dataset = dataset_of(decode={"bin": len})
    batches = list(DataLoader(dataset, BATCH, sampler=EpochSampler(dataset), num_workers=2))
    assert len(batches) == -(-NUM_SAMPLES // BATCH)
    assert all(isinstance(batch["cls"], torch.Tensor) and len(batch["cls"]) == len(batch["bin"]) for batch in batches)
    assert sum(len(batch["cls"]) for batch in batches) == NUM_SAMPLES - len(broken[1])
    assert dataset.num_damaged == len(broken[1]), "what workers skip is not counted"


def test_the_iterable_form_yields_as_many_samples_and_its_state_is_right(
    dataset_of: Callable[..., CacheDataset], broken: tuple[str, set[int]]
) -> None:
    dataset: Any = dataset_of(form=CacheIterableDataset, batch_size=BATCH)
    loader = timed(DataLoader(dataset, BATCH, collate_fn=list), dataset)
    before, state = [], None
    for step, batch in enumerate(loader):
        before += ids_of(batch)
        if step == 9:
            state = loader.state_dict()
            break
    again: Any = dataset_of(form=CacheIterableDataset, batch_size=BATCH)
    rest = timed(DataLoader(again, BATCH, collate_fn=list), again)
    rest.load_state_dict(state)
    came = Counter(before + [sample for batch in rest for sample in ids_of(batch)])
    assert sum(came.values()) == NUM_SAMPLES, "ranks would not end together"
    assert set(came) == set(range(NUM_SAMPLES)) - broken[1], "a sample was lost, or a damaged one came"
    assert sum(came.values()) - len(came) == len(broken[1]), "more came twice than stand for damaged ones"


def test_a_batch_of_which_nothing_is_left_has_another_sample(
    dataset_of: Callable[..., CacheDataset], broken: tuple[str, set[int]]
) -> None:
    """With batches of one, from the first on."""
    dataset = dataset_of(policy="exact", shuffle=False)
    batches = [ids_of(batch) for batch in DataLoader(dataset, 1, sampler=EpochSampler(dataset), collate_fn=list)]
    assert [len(batch) for batch in batches] == [1] * NUM_SAMPLES, "a step is missing"
    assert not broken[1] & {sample for batch in batches for sample in batch}
    first_damaged = min(broken[1])
    one = dataset_of(policy="exact", shuffle=False)
    (stand_in,) = one.samples_of(0, torch.tensor([first_damaged]).numpy())
    assert stand_in["__id__"] not in broken[1], "there was none before, and one that can be read is there"


def test_what_can_t_be_decoded_is_skipped_and_reported(dataset_of: Callable[..., CacheDataset]) -> None:
    dataset = dataset_of(decode={"bin": refuse_odd_lengths})
    ids = [
        i for batch in DataLoader(dataset, BATCH, sampler=EpochSampler(dataset), collate_fn=list) for i in ids_of(batch)
    ]
    found = exact_receipt_of(dataset)
    assert len(ids) == len(set(ids)) == NUM_SAMPLES - found["damaged"]
    assert found["damaged"] == dataset.num_damaged > 50
    assert set(found["damaged_samples"]).isdisjoint(ids)
    assert found["exact"], found


def refuse_odd_lengths(data: bytes) -> int:
    if len(data) % 2:
        raise ValueError("odd")
    return len(data)


def test_it_is_said_and_exactly_asked_samples_raise(
    dataset_of: Callable[..., CacheDataset], broken: tuple[str, set[int]], caplog: pytest.LogCaptureFixture
) -> None:
    dataset = dataset_of()
    list(DataLoader(dataset, BATCH, sampler=EpochSampler(dataset), collate_fn=list))
    said = [line for line in caplog.messages if "goes on without a sample" in line]
    assert len(said) == len(broken[1]), "not each damaged sample is named"
    with pytest.raises(SampleDamaged):
        dataset[min(broken[1])]
    strict = dataset_of(on_damaged="raise")
    with pytest.raises(SampleDamaged):  # also after another process of the rank has skipped it
        list(DataLoader(strict, BATCH, sampler=EpochSampler(strict), collate_fn=list))
    with pytest.raises(InvalidInput, match="on_damaged must be 'raise' or 'skip', got 'ignore'"):
        dataset_of(on_damaged="ignore")


def test_a_run_that_stopped_at_one_goes_on_without_it(
    dataset_of: Callable[..., CacheDataset], broken: tuple[str, set[int]]
) -> None:
    """Whoever meets the first damaged sample starts again from the checkpoint, and says skip: the job is the same."""
    dataset = dataset_of(on_damaged="raise")
    loader = timed(DataLoader(dataset, BATCH, sampler=EpochSampler(dataset), collate_fn=list), dataset)
    came: list[int] = []
    with pytest.raises(SampleDamaged):
        came.extend(sample for batch in loader for sample in ids_of(batch))
    state = loader.state_dict()
    again = dataset_of()
    rest = timed(DataLoader(again, BATCH, sampler=EpochSampler(again), collate_fn=list), again)
    rest.load_state_dict(state)
    came += [sample for batch in rest for sample in ids_of(batch)]
    assert sorted(came) == sorted(set(range(NUM_SAMPLES)) - broken[1])
    assert exact_receipt_of(again)["exact"]


@pytest.mark.parametrize("policy", ["redox", "planned"])
def test_repeats_of_a_damaged_sample_are_left_out_too(
    dataset_of: Callable[..., CacheDataset], broken: tuple[str, set[int]], policy: str
) -> None:
    """Receipts of planned jobs count positions, as those of all that was received do."""
    bad, good = min(broken[1]), min(set(range(NUM_SAMPLES)) - broken[1])
    dataset = dataset_of(order="explicit", policy=policy)
    asked = [good, bad, good, bad, bad, good, *range(50, NUM_SAMPLES)]  # of all pods' shares
    sampler = TraceSampler(dataset, asked, any_order=True)
    came = [i for batch in DataLoader(dataset, 50, sampler=sampler, collate_fn=list) for i in ids_of(batch)]
    assert sorted(came) == sorted(sample for sample in asked if sample not in broken[1])
    found = exact_receipt_of(dataset)
    names = sorted(broken[1] & set(asked))
    without = len(asked) - len(came) if policy == "planned" else len(names)
    assert (found["damaged"], found["damaged_samples"]) == (without, names), found
    assert found["exact"], found


def test_labels_come_without_samples(dataset_of: Callable[..., CacheDataset]) -> None:
    """Damaged samples have theirs, too."""
    dataset = dataset_of(decode={"cls": int})
    labels = dataset.labels
    assert labels is not None
    assert len(labels) == NUM_SAMPLES
    assert dataset.classes is None, "the labels are in files of their own"
    for batch in DataLoader(dataset, BATCH, sampler=EpochSampler(dataset), collate_fn=list):
        assert [labels[sample["__id__"]] for sample in batch] == [sample["cls"] for sample in batch]
    again = pickle.loads(pickle.dumps(dataset))
    assert again.labels.tolist() == labels.tolist()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_places_of_damaged_documents_stay_empty_in_packed_sequences(
    three_pods: LocalCluster, broken: tuple[str, set[int]], tmp_path: Path, num_ranks: int
) -> None:
    """Of the second of two datasets, whose samples have other numbers in the mixture."""
    url, damaged = broken
    other, job = (tmp_path / "other").as_uri(), f"packed-{uuid.uuid4().hex[:8]}"
    refill.pack([{"bin": bytes([number]) * 1500} for number in range(50)], other, quiet=True)
    lengths = {"other": [1500] * 50, "broken": [1500] * NUM_SAMPLES}
    came: Counter[bytes] = Counter()
    mixtures = [
        refill.Mixture(
            three_pods.pod_urls[0],
            {"other": other, "broken": url},
            job=job,
            rank=rank,
            world_size=num_ranks,
            memory_bytes=900_000,
            on_damaged="skip",
        )
        for rank in range(num_ranks)
    ]
    for mixture in mixtures:
        sequences = refill.PackedSequences(
            mixture, 3000, batch_size=4, window=50, tokens=lambda sample: list(sample["bin"][:1500]), lengths=lengths
        )
        for sequence in (each for batch in DataLoader(sequences, 4, collate_fn=list) for each in batch):
            tokens, segments = sequence["tokens"].numpy(), sequence["segments"].numpy()
            came.update(tokens[segments == each].astype("u1").tobytes() for each in set(segments.tolist()) - {0})
    assert len(came) == 50 + NUM_SAMPLES - len(damaged)
    assert sum(mixture.num_damaged for mixture in mixtures) == len(damaged)
    path = f"{three_pods.pod_urls[0]}/v1/jobs/{job}.broken/epochs/0/receipt"
    until(lambda: httpx.get(path).json()["damaged_samples"] == sorted(damaged), "a receipt that names what is damaged")
    mixtures[0].end_job()
