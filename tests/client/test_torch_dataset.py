"""CacheDataset under DataLoader: exactly once, one request a batch, whatever the workers are."""

from __future__ import annotations

import copy
import io
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.client.conftest import NUM_SAMPLES
from tests.client.fake_pod import FakePod, serving, tar_range
from tests.client.loops import fails_in_a_worker
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset

import refill
from refill import CacheDataset, CacheIterableDataset, EpochSampler, Position
from refill.errors import DatasetNotFound, InvalidInput, SampleDamaged

DatasetOf = Callable[..., CacheDataset]


def ids_of(batches: Any) -> list[int]:
    return [sample["__id__"] for batch in batches for sample in batch]


def loader_of(dataset: CacheDataset, **settings: Any) -> DataLoader[Any]:
    settings = {"batch_size": 8, "sampler": EpochSampler(dataset), "collate_fn": list, **settings}
    return DataLoader(dataset, **settings)


@pytest.mark.parametrize(
    "workers",
    [
        pytest.param({"num_workers": 0}, id="in process"),
        pytest.param({"num_workers": 2, "multiprocessing_context": "fork"}, id="forked"),
        pytest.param(
            {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True}, id="forked, persistent"
        ),
        pytest.param(
            {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True},
            id="spawned, persistent",
            marks=pytest.mark.variant,  # end_to_end/test_as_a_user.py has it
        ),
    ],
)
def test_epochs_are_served_exactly_once_by_one_request_a_batch(
    pod: FakePod, dataset_of: DatasetOf, workers: dict[str, Any]
) -> None:
    dataset = dataset_of(decode=True)
    loader = loader_of(dataset, **workers)
    orders = []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        orders.append(ids_of(loader))
        assert sorted(orders[-1]) == list(range(NUM_SAMPLES))
    assert len({tuple(order) for order in orders}) == 3
    assert Counter(batch.epoch for batch in pod.batches) == dict.fromkeys(range(3), NUM_SAMPLES // 8)
    assert all(len(batch.positions) == 8 for batch in pod.batches)
    assert pod.count("PUT job") == 1, "workers inherit the registration"
    assert dataset.fetched() == (3 * NUM_SAMPLES, 3 * sum(map(len, pod.samples)))


def test_a_sample_is_as_webdataset_has_it(dataset_of: DatasetOf) -> None:
    raw = dataset_of()[Position(0, 3)]
    number = raw["__id__"]
    text = b"sample %d" % number
    assert raw == {"__key__": f"d/{number:05}", "__id__": number, "txt": text, "cls": b"%d" % (number % 10)}
    decoded = dataset_of(decode=True)[Position(0, 3)]
    assert decoded == {"__key__": raw["__key__"], "__id__": number, "txt": text.decode(), "cls": number % 10}


def test_two_ranks_share_an_epoch(pod: FakePod, dataset_of: DatasetOf) -> None:
    ids = []
    for rank in range(2):
        dataset = dataset_of()
        ids += ids_of(loader_of(dataset, sampler=EpochSampler(dataset, num_replicas=2, rank=rank)))
    assert sorted(ids) == list(range(NUM_SAMPLES))
    assert {batch.rank for batch in pod.batches} == {0, 1}


def test_images_and_classes_are_collated_and_pinned() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 6)).save(buffer, "png")
    samples = [tar_range([(f"{i}.png", buffer.getvalue()), (f"{i}.cls", b"%d" % i)]) for i in range(8)]
    with serving(FakePod(samples)) as pod, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*pin_memory.*")  # there is no accelerator
        dataset = CacheDataset(pod.url, dataset="file:///data", job="job", policy="redox", decode=True, shuffle=False)
        loader = DataLoader(dataset, batch_size=4, sampler=EpochSampler(dataset), num_workers=1, pin_memory=True)
        batches = list(loader)
    assert [batch["png"].shape for batch in batches] == [(4, 6, 4, 3)] * 2
    assert torch.cat([batch["cls"] for batch in batches]).tolist() == list(range(8))
    assert batches[0]["__key__"] == ["0", "1", "2", "3"]


def test_a_transform_makes_the_sample_and_its_errors_name_it(dataset_of: DatasetOf) -> None:
    assert dataset_of(decode=True, transform=lambda sample: sample["cls"])[Position(0, 0)] in range(10)
    with pytest.raises(KeyError) as caught:
        dataset_of(transform=lambda sample: sample["jpg"])[7]
    assert caught.value.__notes__ == ["in the transform of sample 7 ('d/00007'), which has cls, txt"]


def test_errors_in_a_worker_reach_the_loop_as_what_they_are(pod: FakePod, dataset_of: DatasetOf) -> None:
    pod.samples[5] = tar_range([("d/5.cls", b"cat")])
    with pytest.raises(SampleDamaged, match=r"sample 5 \('d/5'\): its member 'cls' of 3 bytes can't be decoded"):
        ids_of(loader_of(dataset_of(decode=True), num_workers=1))


def test_a_lost_answer_changes_nothing(pod: FakePod, dataset_of: DatasetOf) -> None:
    pod.faults.extend(["drop", None, "cut", "reset"])
    assert sorted(ids_of(loader_of(dataset_of(), num_workers=2))) == list(range(NUM_SAMPLES))
    assert pod.count("POST batch") == NUM_SAMPLES // 8 + 3


def test_plain_integers_are_exactly_those_samples(pod: FakePod, dataset_of: DatasetOf) -> None:
    dataset = dataset_of()
    assert [dataset[i]["__id__"] for i in (0, 39, -1, np.int64(7))] == [0, 39, 39, 7]  # type: ignore[index]
    with pytest.raises(IndexError, match="there is no sample 40"):
        dataset[40]
    assert len(list(Subset(dataset, [3, 5]))) == 2  # type: ignore[call-overload]
    assert pod.batches == []


def test_without_a_batch_size_each_sample_is_a_request_which_is_warned_of_once(
    pod: FakePod, dataset_of: DatasetOf
) -> None:
    dataset = dataset_of()
    loader = DataLoader(dataset, batch_size=None, sampler=EpochSampler(dataset))
    with pytest.warns(UserWarning, match="a request of its own, .* give the DataLoader a batch_size") as warned:
        assert len(list(loader)) == NUM_SAMPLES
    warnings = [str(each.message) for each in warned]  # others may be of what other tests left behind
    assert sum("a request of its own" in text for text in warnings) == 1, warnings
    assert len(pod.batches) == NUM_SAMPLES


def test_members_that_torch_does_not_put_into_one_batch_are_named_before_its_key_error() -> None:
    samples = [tar_range([(f"{i}.{'jpeg' if i % 4 == 3 else 'jpg'}", b"picture")]) for i in range(8)]
    with serving(FakePod(samples)) as pod:
        dataset = CacheDataset(pod.url, dataset="file:///data", job="job", policy="redox", shuffle=False)
        says = r"sample 0 \('0'\) has jpg, and sample 3 \('3'\) has jpeg\..* transform=function"
        with pytest.warns(UserWarning, match=says) as warned, pytest.raises(KeyError):
            list(DataLoader(dataset, batch_size=4, sampler=EpochSampler(dataset)))
        assert sum("different members" in str(each.message) for each in warned) == 1


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("form", [CacheDataset, CacheIterableDataset])
def test_photos_of_several_sizes_are_an_error_that_names_two(photos: FakePod, form: Any, workers: int) -> None:
    """torch's own says "Trying to resize storage that is not resizable", and in one process which tensors differ."""
    dataset = form(photos.url, dataset="file:///data", job="job", policy="redox", shuffle=False, decode=True)
    says = (
        r"jpg of sample 0 \('0'\) is \(6, 8, 3\), and jpg of sample 3 \('3'\) is \(8, 6, 3\)\. .*transform=function.*"
        "collate_fn"
    )
    batches = iter(torchs_own(dataset, batch_size=4, num_workers=workers))
    with fails_in_a_worker(says):
        next(batches)


@pytest.mark.variants("CacheIterableDataset-2")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("form", [CacheDataset, CacheIterableDataset])
def test_photos_of_several_sizes_are_for_a_transform_or_a_collate_fn(photos: FakePod, form: Any, workers: int) -> None:
    def loaded(transform: Any = None, **more: Any) -> list[Any]:
        dataset = form(
            photos.url,
            dataset="file:///data",
            job="job",
            policy="redox",
            shuffle=False,
            decode=True,
            transform=transform,
        )
        return list(torchs_own(dataset, **({"batch_size": 8, "num_workers": workers} | more)))

    def alike(sample: dict[str, Any]) -> Any:
        return np.array(Image.fromarray(sample["jpg"]).resize((5, 5)))

    assert [batch.shape for batch in loaded(alike)] == [(8, 5, 5, 3)]
    assert {sample["jpg"].shape for batch in loaded(collate_fn=list) for sample in batch} == {(6, 8, 3), (8, 6, 3)}
    assert len(loaded(batch_size=1)) == 8


def test_shapes_are_told_of_whatever_a_transform_makes(photos: FakePod) -> None:
    def pair(sample: dict[str, Any]) -> Any:
        return torch.from_numpy(sample["jpg"]), sample["__id__"]

    dataset = CacheDataset(
        photos.url, dataset="file:///data", job="job", policy="redox", shuffle=False, decode=True, transform=pair
    )
    with pytest.raises(InvalidInput, match=r"item 0 is \(6, 8, 3\), and item 0 is \(8, 6, 3\)"):
        list(DataLoader(Subset(dataset, range(8)), batch_size=8))


def torchs_own(dataset: Any, **settings: Any) -> DataLoader[Any]:
    """A loader of either form, with torch's own way to make a batch."""
    sampler = None if isinstance(dataset, CacheIterableDataset) else EpochSampler(dataset)
    return DataLoader(dataset, sampler=sampler, **settings)


@pytest.fixture
def photos() -> Iterator[FakePod]:
    """Each fourth one stands upright."""

    def photo(number: int) -> bytes:
        buffer = io.BytesIO()
        Image.new("RGB", (6, 8) if number % 4 == 3 else (8, 6)).save(buffer, "jpeg")
        return buffer.getvalue()

    with serving(FakePod([tar_range([(f"{number}.jpg", photo(number))]) for number in range(8)])) as pod:
        yield pod


def test_batches_of_plain_integers_are_warned_of_once(pod: FakePod, dataset_of: DatasetOf) -> None:
    dataset = dataset_of()
    loader = DataLoader(dataset, batch_size=8, sampler=RandomSampler(dataset), collate_fn=list)
    with pytest.warns(UserWarning, match=r"refill\.EpochSampler\(dataset\)") as caught:
        assert sorted(ids_of(loader)) == list(range(NUM_SAMPLES))
    # Others may come between, of sockets that an earlier test left and that are collected only now.
    assert sum("each sample on its own" in str(each.message) for each in caught) == 1
    assert pod.count("POST samples") == NUM_SAMPLES // 8


def test_samples_that_are_read_one_by_one_are_warned_of_in_each_process_and_a_look_is_not(
    dataset_of: DatasetOf,
) -> None:
    dataset = dataset_of()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        dataset[0]
        assert said_of_one_by_one(caught) == [], "a look"
        for index in range(1, 10):
            dataset[index]
        assert said_of_one_by_one(caught) == [os.getpid()]
        with multiprocessing.get_context("fork").Pool(1, initializer=warnings.resetwarnings) as pool:
            process, said = pool.apply(read_one_by_one, (dataset,))
        assert said == [process] != [os.getpid()]


def read_one_by_one(dataset: CacheDataset) -> tuple[int, list[int]]:
    """In a worker. Returns its number, and which processes it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        for index in range(10):
            dataset[index]
    return os.getpid(), said_of_one_by_one(caught)


def said_of_one_by_one(caught: list[warnings.WarningMessage]) -> list[int]:
    """The processes that the warnings name."""
    text = r"read one by one, .* slow: .*sampler=refill\.EpochSampler\(dataset\)\) \(process (\d+)\)"
    return [int(found[1]) for each in caught if (found := re.search(text, str(each.message)))]


AS_TUPLES = [
    tar_range([(f"{i}.{'png' if i % 2 else 'jpg'}", b"picture %d" % i), (f"{i}.cls", b"%d" % i)]) for i in range(8)
]


@pytest.mark.parametrize("form", ["map-style", "iterable"])
def test_samples_as_tuples_of_members_of_which_one_may_have_several_names(form: str) -> None:
    """What timm and much else want: WebDataset's ``to_tuple``."""
    arguments: dict[str, Any] = {
        "dataset": "file:///data",
        "job": "job",
        "policy": "redox",
        "decode": {"png": bytes, "jpg": bytes},
    }
    with serving(FakePod(AS_TUPLES)) as pod:
        if form == "iterable":
            loader = DataLoader(CacheIterableDataset(pod.url, as_tuple=("jpg;png", "cls"), **arguments), batch_size=4)
        else:
            dataset = CacheDataset(pod.url, as_tuple=("jpg;png", "cls"), **arguments)
            loader = DataLoader(dataset, batch_size=4, sampler=EpochSampler(dataset))
        batches = [(pictures, numbers.tolist()) for pictures, numbers in loader]
    assert sorted(n for _, numbers in batches for n in numbers) == list(range(8))
    assert all(list(pictures) == [b"picture %d" % n for n in numbers] for pictures, numbers in batches)


def test_a_tuple_is_of_what_the_transform_makes_and_names_of_refill_may_be_in_it() -> None:
    with serving(FakePod(AS_TUPLES)) as pod:
        dataset = CacheDataset(
            pod.url,
            dataset="file:///data",
            job="job",
            policy="redox",
            transform=lambda sample: sample | {"twice": 2 * int(sample["cls"])},
            as_tuple=["__key__", "twice", "__id__"],
        )
        assert dataset[3] == ("3", 6, 3)


@pytest.mark.parametrize("form", [CacheDataset, CacheIterableDataset])
def test_a_transform_that_is_set_later_is_called_with_the_first_item_as_timm_means_it(form: type[Any]) -> None:
    """Its ``create_loader`` sets ``dataset.transform`` to a function of the picture."""
    with serving(FakePod(AS_TUPLES)) as pod:
        arguments = {"dataset": "file:///data", "job": "job", "policy": "redox", "shuffle": False}
        tuples = form(pod.url, as_tuple=("jpg;png", "cls"), **arguments)
        tuples.transform = len
        dicts = form(pod.url, **arguments)
        dicts.transform = sorted
        for dataset, expected in ((tuples, (9, b"0")), (dicts, ["__id__", "__key__", "cls", "jpg"])):
            loader = iter(dataset) if form is CacheIterableDataset else iter([dataset[0]])
            assert next(loader) == expected


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"as_tuple": ("jpg", "cls")}, r"sample 1 \('1'\) has no 'jpg' for as_tuple: it has '__id__', .*'cls', 'png'$"),
        ({"as_tuple": ("bmp;tif",)}, r"sample 1 \('1'\) has no 'bmp' or 'tif' for as_tuple"),
        (
            {"as_tuple": ("cls",), "transform": len},
            r"sample 1 \('1'\) is of type int, as its transform returns it, .* a dict",
        ),
    ],
)
def test_a_member_that_a_sample_does_not_have_is_an_error_that_names_both(arguments: dict[str, Any], says: str) -> None:
    with serving(FakePod(AS_TUPLES)) as pod:
        dataset = CacheDataset(
            pod.url, dataset="file:///data", job="job", policy="redox", on_damaged="skip", **arguments
        )
        with pytest.raises(InvalidInput, match=says):
            dataset[1]


@pytest.mark.parametrize("wrong", ["jpg cls", "jpg", (), [3], ("jpg", ";"), {"jpg", "cls"}])
def test_what_names_no_members_is_refused_at_once(dataset_of: DatasetOf, wrong: Any) -> None:
    with pytest.raises(InvalidInput, match=r'as_tuple must be names of members, as \("jpg(;png)?", "cls"\)'):
        dataset_of(as_tuple=wrong)


def test_a_batch_sampler_as_the_sampler_makes_one_request_a_batch(pod: FakePod, dataset_of: DatasetOf) -> None:
    dataset = dataset_of()
    batches = BatchSampler(EpochSampler(dataset), 10, drop_last=False)
    loader = DataLoader(dataset, batch_size=None, sampler=batches, collate_fn=list)
    assert sorted(ids_of(loader)) == list(range(NUM_SAMPLES))
    assert pod.count("POST batch") == 4


@pytest.mark.parametrize(
    ("batch", "why"),
    [([Position(0, 1), Position(1, 2)], "mixes epochs 0 and 1"), ([Position(0, 1), 2], "mixes positions and plain")],
)
def test_mixed_batches_are_refused(dataset_of: DatasetOf, batch: list[Any], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        dataset_of().__getitems__(batch)


def test_nothing_is_asked_before_the_first_use_and_settings_are_checked_at_once(
    pod: FakePod, dataset_of: DatasetOf
) -> None:
    dataset = dataset_of()
    assert pod.requests == []
    assert len(dataset) == NUM_SAMPLES
    assert dataset.metadata == {"classes": ["cat", "dog"]}
    for wrong in ({"job": "a/b"}, {"chunk_sise": 3}, {"chunk_size": -1}, {"rank": 1}, {"home": "x"}, {"decode": "pil"}):
        with pytest.raises(InvalidInput):
            dataset_of(**wrong)


def test_errors_of_the_pod_are_raised_where_the_job_is_registered(
    pod: FakePod, dataset_of: DatasetOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_index(spec: object, incarnation: object) -> dict[str, Any]:
        raise DatasetNotFound("there is no index at file:///data")

    monkeypatch.setattr(pod, "register", no_index)
    with pytest.raises(DatasetNotFound, match="there is no index at"):
        EpochSampler(dataset_of())


def test_a_dataset_without_a_sampler_refuses_what_is_no_epoch(dataset_of: DatasetOf) -> None:
    for epoch in (-1, 1.5, "3", None, 2**31):
        with pytest.raises(InvalidInput, match="epoch must be"):
            dataset_of().set_epoch(epoch)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="epoch must be"):
            dataset_of().epoch_counts(epoch)  # type: ignore[arg-type]
    dataset_of().set_epoch(3)


def test_a_dataset_tells_its_rank_and_world_size(dataset_of: DatasetOf) -> None:
    dataset = dataset_of(rank=2, world_size=3)
    assert (dataset.rank, dataset.world_size) == (2, 3)
    EpochSampler(dataset)
    assert (dataset.rank, dataset.world_size) == (2, 3)


def test_rank_and_world_size_are_those_of_the_launcher(dataset_of: DatasetOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    dataset = dataset_of()
    assert (dataset.rank, dataset.samples_per_rank) == (2, 10)
    monkeypatch.setenv("RANK", "two")
    with pytest.raises(InvalidInput, match="RANK='two'"):
        dataset_of()


@pytest.mark.parametrize(("ranks", "missing"), [(4, "2 of 4 parts"), (2, None), (1, None)])
def test_more_ranks_than_processes(
    dataset_of: DatasetOf, monkeypatch: pytest.MonkeyPatch, ranks: int, missing: str | None
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        EpochSampler(dataset_of(), num_replicas=ranks, rank=0)
    texts = [str(each.message) for each in said if issubclass(each.category, UserWarning)]
    assert [f"{missing} of each epoch never come" in text for text in texts] == ([True] if missing else [])


def test_a_dataset_is_pickled_and_copied_without_its_connections(pod: FakePod, dataset_of: DatasetOf) -> None:
    dataset = dataset_of()
    before = dataset[Position(0, 0)]
    for twin in (pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)):
        assert twin[Position(0, 0)] == before
    assert pod.count("PUT job") == 1


def test_a_sample_does_not_keep_its_batch_in_memory(dataset_of: DatasetOf) -> None:
    assert all(type(value) in (str, int, bytes) for value in dataset_of()[Position(0, 0)].values())


def test_importing_refill_needs_no_torch() -> None:
    code = "import sys, refill, refill.pods.pod_connection; assert 'torch' not in sys.modules; refill.nothing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert "module 'refill' has no attribute 'nothing'" in done.stderr
    assert refill.__version__


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"name": "other"}, "CacheDataset has no setting 'name': job='job' is the job's name"),
        ({"holder": "x"}, "CacheDataset has no setting 'holder': pods take it from the token"),
        ({"zzz": 8}, r"unknown job setting 'zzz'; there are: batch_group, chunk_size, (?!.*\b(name|holder)\b)"),
        ({"chunk": 8}, r"has no argument 'chunk' \(is chunk_size meant\?\)"),
        ({"on_damagd": "skip"}, r"has no argument 'on_damagd' \(is on_damaged meant\?\)"),
    ],
    ids=["another job's name", "the holder", "unknown", "misspelt setting", "misspelt argument"],
)
def test_what_is_no_setting_is_refused(dataset_of: DatasetOf, setting: dict[str, Any], message: str) -> None:
    """A name among the settings would have registered another job."""
    with pytest.raises(InvalidInput, match=message):
        dataset_of(**setting)


@pytest.mark.parametrize("called", [CacheDataset, CacheIterableDataset], ids=lambda called: called.__name__)
def test_what_every_dataset_needs_is_named_by_the_name_that_was_called(called: type[Any]) -> None:
    url = "http://refill:8000"
    with pytest.raises(InvalidInput, match=r"^CacheDataset needs job=, as job='run-1'$"):
        called(url, dataset="s3://bucket/images")
    with pytest.raises(InvalidInput, match=r"^CacheDataset needs dataset=, as dataset='s3://bucket/images'$"):
        called(url, job="run-1")


def test_a_dataset_and_its_sampler_show_what_they_are_of_and_no_secret(
    pod: FakePod, dataset_of: DatasetOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFILL_TOKEN", "secret")
    dataset = CacheDataset("http://me:secret@refill:8000", dataset="https://me:secret@web/a?sig=secret", job="run-1")
    assert repr(dataset) == (
        "CacheDataset('http://refill:8000', dataset='https://web/a', job='run-1', rank=0, world_size=1)"
    )
    dataset = dataset_of()
    repr(dataset)
    assert pod.requests == []
    assert len(dataset) == NUM_SAMPLES
    assert f"num_samples={NUM_SAMPLES})" in repr(dataset)
    assert repr(EpochSampler(dataset)) == f"EpochSampler({dataset!r}, epoch=0)"
    assert repr(CacheIterableDataset(dataset, batch_size=8)) == (
        f"CacheIterableDataset({dataset!r}, batch_size=8, epoch=0)"
    )
