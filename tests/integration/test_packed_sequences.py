"""Documents packed into sequences on real pods: each token once, also where ranks change and a pod dies."""

from __future__ import annotations

import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch.utils.data
from tests.client.loops import fails_in_a_worker
from tests.integration.job_ranks import Packed, cluster_of
from tests.waiting import until

import refill
from refill.errors import InvalidInput
from refill_service.demo.local_cluster import LocalCluster

LENGTH, BATCH = 4096, 8


def tokens_of(sample: dict[str, Any]) -> Any:
    return np.frombuffer(sample["bin"], dtype=np.uint8)


@pytest.fixture(scope="module")
def lengths(three_pods: LocalCluster, packed: Packed) -> list[int]:
    """Tokens of each document, by id."""
    dataset = refill.CacheDataset(
        three_pods.pod_urls[0], dataset=packed[0], job=f"lengths-{uuid.uuid4().hex[:8]}", memory_bytes=600_000
    )
    loader = torch.utils.data.DataLoader(dataset, batch_size=50, sampler=refill.EpochSampler(dataset), collate_fn=list)
    found = {sample["__id__"]: len(sample["bin"]) for batch in loader for sample in batch}
    dataset.end_job()
    return [found[each] for each in range(len(found))]


def loop_of(
    cluster: LocalCluster,
    packed: Packed,
    lengths: list[int],
    job: str,
    resume: Any = None,
    method: str = "best_fit",
    **how: Any,
) -> tuple[Any, Any]:
    mixture = refill.Mixture(
        cluster.pod_urls[0], {"docs": packed[0]}, job=job, memory_bytes=900_000, resume=resume, **how
    )
    sequences = refill.PackedSequences(
        mixture, LENGTH, batch_size=BATCH, window=100, method=method, tokens=tokens_of, lengths={"docs": lengths}
    )
    loader = torch.utils.data.DataLoader(sequences, batch_size=BATCH, num_workers=1)
    loop = refill.timed(loader, sequences)
    if resume is not None:
        loop.load_state_dict(resume)
    return sequences, loop


def documents_of(batch: dict[str, torch.Tensor]) -> list[bytes]:
    """All that there are in a batch, whole or in part."""
    found = []
    for tokens, segments in zip(batch["tokens"].numpy(), batch["segments"].numpy(), strict=True):
        for segment in range(1, int(segments.max()) + 1):
            found.append(tokens[segments == segment].astype(np.uint8).tobytes())
    return found


@pytest.mark.parametrize("after", [1, pytest.param(3, marks=pytest.mark.variant)])
def test_each_document_comes_once_though_a_pod_dies_and_other_ranks_go_on(
    packed: Packed, lengths: list[int], tmp_path: Path, after: int
) -> None:
    job = f"packed-{uuid.uuid4().hex[:8]}"
    with cluster_of(tmp_path, 3) as cluster:
        loops = [loop_of(cluster, packed, lengths, job, rank=rank, world_size=2) for rank in range(2)]
        iterators = [iter(loop) for _, loop in loops]
        had: list[bytes] = []
        for step in range(14):
            if step == 7:
                cluster.kill(2)
            for batches in iterators:
                had += documents_of(next(batches))
        states = [loop.state_dict() for _, loop in loops]
        assert states[0]["sampler"] == states[1]["sampler"], "ranks differ in nothing that they go on from"
        del iterators, loops
        cluster.restart(2)
        again = [
            loop_of(cluster, packed, lengths, job, states[0], rank=rank, world_size=after, drop_last=False)
            for rank in range(after)
        ]
        rest = [[each for batch in loop for each in documents_of(batch)] for _, loop in again]
        came = Counter(had) + Counter(each for of_rank in rest for each in of_rank)
        assert set(came) == set(packed[1].values())
        sequences, loop = again[0]
        repeats = -(sequences.packed(0).num_sequences - states[0]["sampler"]["sequence"]) % after
        if repeats == 0:
            assert set(came.values()) == {1}
        assert sequences.fill_rate(0) > 0.9
        url = f"{cluster.pod_urls[0]}/v1/jobs/{job}.docs/epochs/0/receipt"
        until(lambda: httpx.get(url).json()["exact"], "an exact receipt")
        following = loop_of(cluster, packed, lengths, job, loop.state_dict(), rank=0, world_size=after)[0]
        assert following.epoch == 1


def test_tokens_in_a_row_fill_every_sequence_but_the_last(
    three_pods: LocalCluster, packed: Packed, lengths: list[int]
) -> None:
    sequences, loop = loop_of(three_pods, packed, lengths, f"packed-{uuid.uuid4().hex[:8]}", method="contiguous")
    batches = list(loop)
    segments = torch.cat([batch["segments"] for batch in batches])
    assert len(segments) == len(sequences) == -(-sum(map(len, packed[1].values())) // LENGTH)
    assert (segments[:-1] > 0).all()
    assert int((segments > 0).sum()) == sum(map(len, packed[1].values()))
    positions = torch.cat([batch["positions"] for batch in batches])
    starts = (positions == 0) & (segments > 0)
    assert int(starts.sum()) >= len(packed[1]), "each document begins somewhere"


def test_workers_that_stay_have_each_epoch(three_pods: LocalCluster, packed: Packed, lengths: list[int]) -> None:
    sequences, _ = loop_of(three_pods, packed, lengths, f"packed-{uuid.uuid4().hex[:8]}", method="contiguous")
    loader = torch.utils.data.DataLoader(sequences, BATCH, num_workers=2, persistent_workers=True)
    epochs = []
    for epoch in range(3):
        sequences.set_epoch(epoch)
        epochs.append(torch.cat([batch["tokens"] for batch in refill.timed(loader, sequences)]))
        alone = torch.utils.data.DataLoader(sequences, BATCH)
        sequences.set_epoch(epoch)  # once more
        assert torch.equal(epochs[-1], torch.cat([batch["tokens"] for batch in alone])), f"epoch {epoch}"
    assert not torch.equal(epochs[0], epochs[1])


def test_back_from_within_an_epoch_to_the_end_of_the_one_before(
    three_pods: LocalCluster, packed: Packed, lengths: list[int]
) -> None:
    job = f"packed-{uuid.uuid4().hex[:8]}"

    def loop() -> tuple[refill.PackedSequences, Any]:
        sequences = loop_of(three_pods, packed, lengths, job, method="contiguous")[0]
        return sequences, refill.timed(torch.utils.data.DataLoader(sequences, BATCH), sequences)

    sequences, loader = loop()
    list(loader)
    at_end, within, had = loader.state_dict(), None, []
    sequences.set_epoch(1)
    for batch in loader:
        within = within or loader.state_dict()
        had.append(batch["tokens"])
    sequences, loader = loop()
    loader.load_state_dict(within)
    loader.load_state_dict(at_end)
    assert torch.equal(torch.cat([batch["tokens"] for batch in loader]), torch.cat(had))


def test_an_epoch_set_once_workers_are_started_is_the_next_one(
    three_pods: LocalCluster, packed: Packed, lengths: list[int]
) -> None:
    sequences, loop = loop_of(three_pods, packed, lengths, f"packed-{uuid.uuid4().hex[:8]}")
    of_epochs = []
    for epoch in range(2):
        batches = iter(torch.utils.data.DataLoader(sequences, batch_size=BATCH, num_workers=2))
        sequences.set_epoch(epoch + 1)
        of_epochs.append([piece for batch in batches for piece in documents_of(batch)])
        assert sum(map(len, of_epochs[-1])) == sum(lengths), f"epoch {epoch} is whole"
    sequences.set_epoch(1)
    assert of_epochs[0] != of_epochs[1]
    assert sorted(piece for batch in loop for piece in documents_of(batch)) == sorted(of_epochs[1])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_that_catches_an_error_goes_on_with_the_next_batch(
    three_pods: LocalCluster, packed: Packed, lengths: list[int], workers: int
) -> None:
    def tokens_but_of_one(sample: dict[str, Any]) -> Any:
        if sample["__id__"] == 7:
            raise ValueError("no tokens")
        return tokens_of(sample)

    job = f"packed-{uuid.uuid4().hex[:8]}"
    mixture = refill.Mixture(three_pods.pod_urls[0], {"docs": packed[0]}, job=job, memory_bytes=900_000)
    sequences = refill.PackedSequences(
        mixture, LENGTH, batch_size=BATCH, window=100, tokens=tokens_but_of_one, lengths={"docs": lengths}
    )
    batches = iter(torch.utils.data.DataLoader(sequences, batch_size=BATCH, num_workers=workers))
    had: list[int] = []

    def loop() -> None:
        for batch in batches:
            had.append(len(batch["tokens"]))

    with pytest.raises(ValueError, match="no tokens"):
        loop()
    loop()
    assert sum(had) == len(sequences) - BATCH


def test_an_epoch_that_comes_again_is_said(three_pods: LocalCluster, packed: Packed, lengths: list[int]) -> None:
    sequences = loop_of(three_pods, packed, lengths, f"packed-{uuid.uuid4().hex[:8]}")[0]
    loader = torch.utils.data.DataLoader(sequences, BATCH)
    list(loader)
    with pytest.warns(UserWarning, match="epoch 0 of job packed-.* comes again.* of the PackedSequences before each"):
        list(loader)


def test_a_state_is_of_whole_batches_where_ranks_share_an_epoch(
    three_pods: LocalCluster, packed: Packed, lengths: list[int]
) -> None:
    """Within one, ranks have had every other run of it: no number of sequences says which."""
    sequences, _ = loop_of(three_pods, packed, lengths, f"packed-{uuid.uuid4().hex[:8]}", rank=0, world_size=2)
    one_by_one = refill.timed(torch.utils.data.DataLoader(sequences, batch_size=None), sequences)
    for number, _ in enumerate(one_by_one, 1):
        if number == BATCH:
            assert one_by_one.state_dict()["sampler"]["sequence"] == 2 * BATCH
        elif number > BATCH:
            break
    with pytest.raises(InvalidInput, match=f"between batches of {BATCH}, and the loop has had {BATCH + 1} sequences"):
        one_by_one.state_dict()


def test_what_packing_does_not_know_is_one_line(three_pods: LocalCluster, packed: Packed) -> None:
    mixture = refill.Mixture(
        three_pods.pod_urls[0], {"docs": packed[0]}, job=f"packed-{uuid.uuid4().hex[:8]}", memory_bytes=900_000
    )
    with pytest.raises(InvalidInput, match="does not say how many tokens"):
        len(refill.PackedSequences(mixture, 64, batch_size=2))
    for said in (10_000, 1):  # fewer would leave tokens out without a word
        wrong = refill.PackedSequences(
            mixture, 64, batch_size=2, tokens=tokens_of, lengths={"docs": [said] * len(packed[1])}
        )
        with pytest.raises(InvalidInput, match=rf"has [0-9,]+ tokens, and lengths say {said:,}: give lengths of what"):
            next(iter(wrong))
    for workers in (0, 1):
        loader = torch.utils.data.DataLoader(wrong, batch_size=4, num_workers=workers)
        with fails_in_a_worker(r"makes batches of 4, and PackedSequences deals 2 .* same batch_size"):
            next(iter(loader))
    with pytest.raises(InvalidInput, match="reads a refill"):
        refill.PackedSequences(packed[0], 64, batch_size=2)  # type: ignore[arg-type]
