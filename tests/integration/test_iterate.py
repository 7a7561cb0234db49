"""refill.iterate on real pods: a rank's epochs in NumPy arrays, each sample once, in a process that has no torch."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.integration.job_ranks import Packed, cluster_of
from tests.pod_fixtures import NUM_SAMPLES
from tests.waiting import until

import refill
from refill.epoch_reader import EpochReader
from refill.errors import EpochEnded, InvalidInput, SampleDamaged
from refill_service.demo.local_cluster import LocalCluster

ReaderOf = Callable[..., EpochReader]


@pytest.fixture
def reader_of(three_pods: LocalCluster, job: dict[str, Any]) -> ReaderOf:
    def make(**more: Any) -> EpochReader:
        arguments = {"job": job["name"]} | {name: job[name] for name in job if name != "name"}
        return refill.iterate(three_pods.pod_urls[0], **(arguments | more))

    return make


@pytest.fixture
def receipt_of(three_pods: LocalCluster, job: dict[str, Any]) -> Callable[[int], dict[str, Any]]:
    def get(epoch: int) -> dict[str, Any]:
        path = f"/v1/jobs/{job['name']}/epochs/{epoch}/receipt"
        found: dict[str, Any] = httpx.get(f"{three_pods.pod_urls[0]}{path}").raise_for_status().json()
        return found

    return get


def ids_of(batches: Any) -> list[int]:
    return np.concatenate([np.empty(0, np.int64), *(batch["__id__"] for batch in batches)]).tolist()


WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None  # importing it fails
import refill
reader = refill.iterate(**json.loads(sys.argv[1]))
epochs = [[sample for batch in reader for sample in batch["__id__"].tolist()] for _ in range(2)]
state = reader.state_dict()
reader.end_job()
print(json.dumps([epochs, state["epoch"], [name for name in sys.modules if name.partition(".")[0] == "torch"]]))
"""


def test_a_process_without_torch_reads_whole_epochs(three_pods: LocalCluster, job: dict[str, Any]) -> None:
    given = {"service_url": three_pods.pod_urls[0], "job": job["name"], "dataset": job["dataset"], "batch_size": 48}
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps(given)], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    epochs, epoch, of_torch = json.loads(ran.stdout)
    assert [sorted(ids) for ids in epochs] == [list(range(NUM_SAMPLES))] * 2
    assert epochs[0] != epochs[1]
    assert (epoch, of_torch) == (1, ["torch"])
    assert ran.stderr == ""


@pytest.mark.parametrize("policy", ["redox", "planned"])
def test_ranks_divide_epochs_and_receipts_are_exact(
    reader_of: ReaderOf, receipt_of: Callable[[int], dict[str, Any]], policy: str
) -> None:
    def run(rank: int) -> list[list[int]]:
        reader = reader_of(rank=rank, world_size=2, batch_size=48, policy=policy)
        assert len(reader) == 11
        return [ids_of(reader) for _ in range(2)]

    with ThreadPoolExecutor(2) as pool:
        of_ranks = list(pool.map(run, range(2)))
    for first, second in zip(*of_ranks, strict=True):
        assert sorted(first + second) == list(range(NUM_SAMPLES))
    if policy != "planned":  # those report what came after it came
        assert receipt_of(0)["exact"], receipt_of(0)


def test_without_a_batch_size_samples_come_one_by_one_and_are_asked_for_in_batches(reader_of: ReaderOf) -> None:
    reader = reader_of(as_tuple=("__id__", "bin"))
    samples = list(reader)
    assert sorted(number for number, _ in samples) == list(range(NUM_SAMPLES))
    assert all(type(content) is bytes for _, content in samples)
    assert len(reader) == NUM_SAMPLES
    batches = -(-NUM_SAMPLES // 64)
    assert batches <= reader.epoch_counts(0)["total"]["batches"] <= 3 * batches, "more than one at each of three pods"
    assert reader.fetched()[0] == NUM_SAMPLES, "by several threads"


def test_views_come_as_lists_whatever_their_lengths(reader_of: ReaderOf) -> None:
    expected = {sample["__id__"]: sample["bin"] for sample in reader_of()}
    came: dict[int, bytes] = {}
    for batch in reader_of(decode="views", batch_size=48, job="views"):
        assert type(batch["bin"]) is list
        assert all(view.dtype == np.uint8 and not view.flags.owndata for view in batch["bin"])
        came |= zip(batch["__id__"].tolist(), (view.tobytes() for view in batch["bin"]), strict=True)
    assert came == expected


@pytest.mark.variants("48")
@pytest.mark.parametrize("batch_size", [48, None])
def test_a_loop_that_is_left_goes_on_from_its_state_with_what_it_has_not_had(
    reader_of: ReaderOf, batch_size: int | None
) -> None:
    def taken(reader: EpochReader, count: int | None = None) -> list[int]:
        found = list(islice(reader, count))
        return [item["__id__"] for item in found] if batch_size is None else ids_of(found)

    reader = reader_of(batch_size=batch_size)
    whole = taken(reader)
    reader.set_epoch(1)
    before = taken(reader, 7)
    state = json.loads(json.dumps(reader.state_dict()))  # plain values
    resumed = reader_of(batch_size=batch_size)
    resumed.load_state_dict(state)
    resumed.set_epoch(resumed.epoch)
    assert resumed.epoch == 1
    assert sorted(before + taken(resumed)) == sorted(whole) == list(range(NUM_SAMPLES))
    assert resumed.state_dict()["epoch"] == 1
    assert sorted(taken(resumed)) == list(range(NUM_SAMPLES)), "the next epoch, without a word"
    assert resumed.epoch == 2


@pytest.mark.variants("0-False-redox")
@pytest.mark.parametrize(
    ("epoch", "served", "policy"),
    [
        (0, False, "redox"),
        (8, True, "planned"),
        pytest.param(0, True, "planned", marks=pytest.mark.variant),
        pytest.param(3, True, "planned", marks=pytest.mark.variant),
    ],
)
def test_another_epoch_than_the_states_is_served_from_its_start_unless_it_has_ended(
    reader_of: ReaderOf, epoch: int, served: bool, policy: str
) -> None:
    """Of planned jobs none ends."""
    # Several threads might have asked for all of epoch 3 when the loop is left: then a live job is over.
    reader = reader_of(batch_size=100, policy=policy, threads=1)
    for before in range(3):
        assert len(ids_of(reader)) == NUM_SAMPLES, before
    reader.set_epoch(3)
    had = ids_of(islice(reader, 3))
    state = reader.state_dict()
    resumed = reader_of(batch_size=100, policy=policy)
    resumed.load_state_dict(state)
    resumed.set_epoch(epoch)
    if served:
        ids = ids_of(resumed)
        assert sorted(ids + had if epoch == 3 else ids) == list(range(NUM_SAMPLES))
    else:
        with pytest.raises(EpochEnded):
            ids_of(resumed)


def test_other_ranks_go_on_within_an_epoch(reader_of: ReaderOf) -> None:
    reader = reader_of(batch_size=50)
    before = ids_of(islice(reader, 4))
    state = reader.state_dict()

    def run(rank: int) -> list[int]:
        resumed = reader_of(rank=rank, world_size=2, batch_size=50, resume=state)
        resumed.load_state_dict(state)
        return ids_of(resumed)

    del reader
    with ThreadPoolExecutor(2) as pool:
        rest = list(chain(*pool.map(run, range(2))))
    assert sorted(before + rest) == list(range(NUM_SAMPLES))


def test_leaving_an_iteration_leaves_no_thread_and_the_epoch_begins_again(reader_of: ReaderOf) -> None:
    reader = reader_of(batch_size=50)
    first = ids_of(islice(reader, 2))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("refill-reader")]
    assert ids_of(islice(reader, 2)) == first
    assert sorted(ids_of(reader)) == list(range(NUM_SAMPLES))


def test_a_loop_that_is_left_does_not_wait_for_pods_that_do_not_answer(packed: Packed, tmp_path: Path) -> None:
    """^C comes while a thread asks."""
    with cluster_of(tmp_path, 1) as cluster:
        reader = refill.iterate(cluster.pod_urls[0], dataset=packed[0], job="left", batch_size=50, timeout_seconds=60)
        asking = [thread for thread in threading.enumerate() if thread.name == "refill-reader"]
        assert not asking
        cluster.pause(0)

        def interrupts() -> None:
            until(lambda: any(thread.name == "refill-reader" for thread in threading.enumerate()), "a thread asks")
            os.kill(os.getpid(), signal.SIGINT)

        pressing = threading.Thread(target=interrupts)
        pressing.start()
        with pytest.raises(KeyboardInterrupt):
            next(iter(reader))
        pressing.join()
        asking = [thread for thread in threading.enumerate() if thread.name == "refill-reader"]
        assert asking, "it waits for an answer still"
        assert all(thread.daemon for thread in asking), "and the process may end"
        cluster.resume(0)
        for thread in asking:
            thread.join()
        assert sorted(ids_of(reader)) == list(range(NUM_SAMPLES))


def as_arrays(sample: dict[str, Any]) -> dict[str, Any]:
    length = len(sample["bin"])
    return {
        "name": sample["__key__"],
        "length": length,
        "half": length / 2,
        "pair": (np.full((2, 3), length, np.float32), b"x"),
        "tags": {"long": length > 2000},
    }


def test_arrays_and_numbers_of_a_batch_are_stacked_and_all_else_is_listed(reader_of: ReaderOf) -> None:
    batch = next(iter(reader_of(batch_size=50, transform=as_arrays)))
    lengths = batch["length"]
    assert (lengths.shape, lengths.dtype) == ((50,), np.int64)
    assert (batch["half"] == lengths / 2).all()
    arrays, letters = batch["pair"]
    assert (arrays.shape, arrays.dtype) == ((50, 2, 3), np.float32)
    assert letters == [b"x"] * 50
    assert (batch["tags"]["long"] == (lengths > 2000)).all()
    assert isinstance(batch["name"], list)


def of_several_shapes(sample: dict[str, Any]) -> dict[str, Any]:
    return {"__id__": sample["__id__"], "x": np.zeros(2 + sample["__id__"] % 2)}


def of_several_members(sample: dict[str, Any]) -> dict[str, Any]:
    return {"__id__": sample["__id__"], "ab"[sample["__id__"] % 2]: 0}


def fails_for_three(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["__id__"] == 3:
        raise SampleDamaged("sample 3 is no good")
    return sample


@pytest.mark.parametrize(
    ("transform", "says"),
    [
        (
            of_several_shapes,
            r"samples of several shapes: x of sample \d+ is \(\d,\), and .*transform=function of iterate",
        ),
        (of_several_members, r"different members: sample \d+ .* has [ab], and .*transform=function of iterate"),
        (fails_for_three, "sample 3 is no good"),
    ],
)
def test_what_makes_no_batch_is_an_error_of_the_loop(
    reader_of: ReaderOf, transform: Callable[[Any], Any], says: str
) -> None:
    with pytest.raises((InvalidInput, SampleDamaged), match=says):
        list(reader_of(batch_size=50, transform=transform))


@pytest.mark.parametrize("batch_size", [50, None])
def test_a_loop_that_catches_an_error_goes_on_behind_it(reader_of: ReaderOf, batch_size: int | None) -> None:
    reader = reader_of(batch_size=batch_size, transform=fails_for_three)
    samples, failed = iter(reader), ""
    ids: list[int] = []
    while (came := len(ids)) < NUM_SAMPLES:
        try:
            ids += np.atleast_1d(next(samples)["__id__"]).tolist()
        except SampleDamaged as error:
            assert reader.state_dict()["position"] == came, "a loop that stops there may want it again"
            (failed,) = [note for note in error.__notes__ if "does without" in note]
        except StopIteration:
            break
    said = re.fullmatch(r"a loop that goes on does without positions (\d+) to (\d+) of epoch 0", failed)
    assert said is not None
    start, last = map(int, said.groups())
    assert start % (batch_size or 64) == 0
    assert len(ids) == len(set(ids)) == NUM_SAMPLES - (last + 1 - start)
    assert reader.state_dict()["position"] == NUM_SAMPLES
    assert next(samples, None) is None


def test_a_look_or_a_pass_within_a_loop_leaves_its_place(reader_of: ReaderOf) -> None:
    reader, ids = reader_of(batch_size=50), list[int]()
    for number, batch in enumerate(reader):
        ids += batch["__id__"].tolist()
        if number == 1:
            next(iter(reader))
        if number == 2:
            list(reader)
        assert reader.state_dict()["position"] == len(ids)
    assert sorted(ids) == list(range(NUM_SAMPLES))
    assert ids_of(reader) != ids, "the next epoch"


def test_a_damaged_sample_is_left_out_where_that_is_asked_for(reader_of: ReaderOf) -> None:
    reader = reader_of(batch_size=50, transform=fails_for_three, on_damaged="skip")
    sizes, ids = [], []
    for batch in reader:
        sizes.append(len(batch["__id__"]))
        ids += batch["__id__"].tolist()
    assert sorted(sizes) == [49] + [50] * 19
    assert sorted([*ids, 3]) == list(range(NUM_SAMPLES))
    assert reader.num_damaged == 1


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"threads": 0}, "threads must be at least 1, got 0"),
        ({"chunk_sise": 3}, "iterate has no argument 'chunk_sise' (is chunk_size meant?)"),
        ({"order": "explicit"}, "order='keyed' contradicts"),
    ],
)
def test_what_is_wrong_is_said_at_once(reader_of: ReaderOf, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        reader_of(**wrong)
    assert says in str(refused.value)


def test_a_state_of_another_job_is_refused(reader_of: ReaderOf) -> None:
    reader = reader_of(batch_size=50)
    with pytest.raises(InvalidInput, match="the state is of job 'other'"):
        reader.load_state_dict(reader.state_dict() | {"job": "other"})
