"""What torchtitan's and Megatron's loops ask of a dataloader, on real pods: batches without end, saved and loaded.

torchtitan itself needs GPUs; its loop and its loader are written down here as far as they touch data. What its
``ParallelAwareDataloader`` does (torchtitan/components/dataloader.py, September 2025): a StatefulDataLoader whose state
is pickled under the name of its rank, beside the number of ranks, and that loads nothing where its name is missing.
"""

from __future__ import annotations

import pickle
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tests.integration.job_ranks import Packed
from tests.waiting import until
from torchdata.stateful_dataloader import StatefulDataLoader

import refill
from refill.errors import InvalidInput
from refill_service.demo.local_cluster import LocalCluster

LENGTH, BATCH = 4097, 6


def tokens_of(sample: dict[str, Any]) -> Any:
    return np.frombuffer(sample["bin"], dtype=np.uint8)


@pytest.fixture(scope="module")
def lengths(three_pods: LocalCluster, packed: Packed) -> list[int]:
    """Tokens of each document, by id."""
    job = f"lengths-{uuid.uuid4().hex[:8]}"
    reader = refill.iterate(three_pods.pod_urls[0], dataset=packed[0], job=job, memory_bytes=600_000)
    found = {sample["__id__"]: len(sample["bin"]) for sample in reader}
    reader.end_job()
    return [found[each] for each in range(len(found))]


def sequences_of(
    cluster: LocalCluster, packed: Packed, lengths: list[int], job: str, **place: Any
) -> refill.PackedSequences:
    mixture = refill.Mixture(cluster.pod_urls[0], {"docs": packed[0]}, job=job, memory_bytes=900_000, **place)
    return refill.PackedSequences(
        mixture, LENGTH, batch_size=BATCH, window=100, tokens=tokens_of, lengths={"docs": lengths}
    )


class ParallelAware(StatefulDataLoader):
    """As torchtitan's."""

    def __init__(self, dataset: Any, dp_rank: int, dp_world_size: int, **arguments: Any) -> None:
        self.dp_rank, self.dp_world_size = dp_rank, dp_world_size
        super().__init__(dataset, **arguments)
        self.name = f"dp_rank_{dp_rank}"

    def state_dict(self) -> dict[str, Any]:
        return {self.name: pickle.dumps(super().state_dict()), "world_size": self.dp_world_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state or self.name not in state:
            return
        assert self.dp_world_size == state["world_size"]
        super().load_state_dict(pickle.loads(state[self.name]))


def batches_of(loader: Any) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """As torchtitan's loop takes them."""
    batches = iter(loader)
    while True:
        given, labels = next(batches)
        assert labels.numel() == given["input"].numel()
        yield given, labels


def documents_of(given: dict[str, torch.Tensor], labels: torch.Tensor) -> list[bytes]:
    """All that there are in a batch, from inputs and labels."""
    found = []
    for tokens, segments, wanted in zip(given["input"], given["segments"], labels, strict=True):
        for segment in range(1, int(segments.max()) + 1):
            (places,) = torch.nonzero(segments == segment, as_tuple=True)
            assert given["positions"].dtype == torch.int64
            last = int(places[-1])
            assert wanted[places[:-1]].tolist() == tokens[places[1:]].tolist(), "labels are the tokens behind"
            behind = [int(wanted[last])] if int(wanted[last]) >= 0 else []
            found.append(bytes(tokens[places].tolist() + behind))
    return found


@pytest.mark.variants("packed-2")
@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        ("blocks", 0),
        ("packed", 2),
        pytest.param("blocks", 2, marks=pytest.mark.variant),
        pytest.param("packed", 0, marks=pytest.mark.variant),
    ],
)
def test_its_own_loader_goes_on_in_mid_epoch_with_each_sample_once(
    three_pods: LocalCluster, packed: Packed, lengths: list[int], kind: str, workers: int
) -> None:
    job, batch = f"titan-{uuid.uuid4().hex[:8]}", BATCH if kind == "packed" else 10

    def loader_of(rank: int) -> ParallelAware:
        place: Any = {"rank": rank, "world_size": 2}
        dataset: Any
        if kind == "packed":
            dataset = sequences_of(three_pods, packed, lengths, job, **place)
        else:
            dataset = refill.CacheIterableDataset(
                three_pods.pod_urls[0], dataset=packed[0], job=job, batch_size=batch, memory_bytes=900_000, **place
            )
        collate = None if kind == "packed" else list
        return ParallelAware(dataset, rank, 2, batch_size=batch, num_workers=workers, collate_fn=collate)

    def had_in(batch: Any) -> list[Any]:
        if kind == "packed":
            return [bytes(tokens.tolist()) for tokens in batch["tokens"]]
        return [sample["__id__"] for sample in batch]

    whole = [[each for batch in loader_of(rank) for each in had_in(batch)] for rank in range(2)]
    states: dict[str, Any] = {}
    before = []
    for rank in range(2):
        loader = loader_of(rank)
        batches = iter(loader)
        before.append([each for _ in range(5) for each in had_in(next(batches))])
        states |= loader.state_dict()
    after = []
    for rank in range(2):
        loader = loader_of(rank)
        loader.load_state_dict({})
        loader.load_state_dict(states)
        after.append([each for batch in loader for each in had_in(batch)])
    for rank in range(2):
        assert before[rank] + after[rank] == whole[rank]


@pytest.mark.variants("0-3")
@pytest.mark.parametrize(
    ("workers", "after"),
    [
        (0, 3),
        (1, 1),
        pytest.param(0, 1, marks=pytest.mark.variant),
        pytest.param(1, 3, marks=pytest.mark.variant),
    ],
)
def test_a_checkpoint_of_one_rank_goes_on_with_any_number_each_document_once(
    three_pods: LocalCluster, packed: Packed, lengths: list[int], tmp_path: Path, workers: int, after: int
) -> None:
    import torch.distributed.checkpoint as dcp  # slow to import
    from torch.distributed.checkpoint.stateful import Stateful

    job = f"titan-{uuid.uuid4().hex[:8]}"

    sequences = []

    def loader_of(rank: int, ranks: int) -> refill.TitanBatches:
        sequences.append(sequences_of(three_pods, packed, lengths, job, rank=rank, world_size=ranks))
        loader = refill.TitanBatches(sequences[-1], num_workers=workers)
        assert isinstance(loader, Stateful)
        return loader

    loaders = [loader_of(rank, 2) for rank in range(2)]
    ranks = [batches_of(loader) for loader in loaders]
    had = Counter(each for _ in range(7) for batches in ranks for each in documents_of(*next(batches)))
    states = [loader.state_dict() for loader in loaders]
    assert set(states[0]) == set(states[1]) == {"refill"}
    dcp.save({"dataloader": loaders[0]}, checkpoint_id=tmp_path / "step-7", no_dist=True)  # type: ignore[attr-defined]
    del ranks, loaders

    again = [loader_of(rank, after) for rank in range(after)]
    for loader in again:
        dcp.load({"dataloader": loader}, checkpoint_id=tmp_path / "step-7", no_dist=True)  # type: ignore[attr-defined]
    batches = [batches_of(loader) for loader in again]
    num_sequences = sequences[-1].packed(0).num_sequences
    left = num_sequences - 7 * 2 * BATCH
    steps = -(-left // (after * BATCH))
    for _ in range(steps):
        for each in batches:
            had.update(documents_of(*next(each)))
    assert set(had) == set(packed[1].values())
    assert sum(had.values()) - len(had) <= after * 40, "more than what fills up the last step came again"
    url = f"{three_pods.pod_urls[0]}/v1/jobs/{job}.docs/epochs/0/receipt"
    next_epoch = [documents_of(*next(each)) for each in batches]
    assert all(next_epoch), "the second epoch begins without a word"
    until(lambda: httpx.get(url).json()["exact"], "an exact receipt")


def test_a_state_that_is_none_is_refused(three_pods: LocalCluster, packed: Packed, lengths: list[int]) -> None:
    job = f"titan-{uuid.uuid4().hex[:8]}"
    loader = refill.TitanBatches(sequences_of(three_pods, packed, lengths, job))
    loader.load_state_dict({})
    loader.load_state_dict(loader.state_dict())
    for wrong in ({"dp_rank_0": b"x", "world_size": 1}, {"refill": 3}, {"refill": "{"}):
        with pytest.raises(InvalidInput, match="the state is not of TitanBatches: it has"):
            loader.load_state_dict(wrong)
    given, labels = next(iter(loader))
    assert given["input"].shape == labels.shape == (BATCH, LENGTH - 1)


def test_batches_for_megatron_are_those_for_torchtitan_by_other_names(
    three_pods: LocalCluster, packed: Packed, lengths: list[int]
) -> None:
    job = f"megatron-{uuid.uuid4().hex[:8]}"

    def batches_for_megatron(state: dict[str, Any]) -> refill.MegatronBatches:
        sequences = sequences_of(three_pods, packed, lengths, job)
        batches = refill.MegatronBatches(sequences, attention_mask=True, num_workers=1)
        batches.load_state_dict(state)
        return batches

    titan = batches_of(refill.TitanBatches(sequences_of(three_pods, packed, lengths, f"{job}-titan", seed=0)))
    batches = batches_for_megatron({})
    assert iter(batches) is batches, "its iterator can be asked for its state"
    state: dict[str, Any] = {}
    for step in range(8):
        if step == 4:
            state = batches.save_state()
            batches = batches_for_megatron(state)
        (given, labels), batch = next(titan), next(batches)
        assert set(batch) == {"tokens", "labels", "loss_mask", "position_ids", "attention_mask"}
        assert torch.equal(batch["tokens"], given["input"])
        assert torch.equal(batch["position_ids"], given["positions"])
        assert torch.equal(batch["loss_mask"], (labels >= 0).float())
        assert torch.equal(batch["labels"], labels.clamp(min=0))
        segments, mask = given["segments"][0], batch["attention_mask"]
        assert mask.shape == (BATCH, 1, LENGTH - 1, LENGTH - 1)
        for place in (0, 100, LENGTH - 2):
            looks_at = torch.nonzero(~mask[0, 0, place]).flatten().tolist()
            assert looks_at == [each for each in range(place + 1) if segments[each] == segments[place]]
    with pytest.raises(InvalidInput, match="the state is not of MegatronBatches"):
        batches.load_state_dict({"consumed_samples": 3})


def test_epochs_without_a_batch_are_an_error(three_pods: LocalCluster, packed: Packed, lengths: list[int]) -> None:
    sequences = sequences_of(three_pods, packed, lengths, f"titan-{uuid.uuid4().hex[:8]}")
    sequences.batch_size = len(sequences) + 1
    with pytest.raises(InvalidInput, match=r"has \d+ sequences for a rank, which make no batch of \d+"):
        next(iter(refill.TitanBatches(sequences, drop_last=True)))
