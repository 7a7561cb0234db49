"""Does torchdata's StatefulDataLoader go on from a state of rank 0 on every rank?"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from tests.trainers.launching import SCRIPTS, Place, check_exact, ids_of
from torchdata.stateful_dataloader import StatefulDataLoader

import refill
from refill.errors import InvalidInput


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("processes", "workers"),
    [
        (2, 1),
        pytest.param(1, 2, marks=pytest.mark.every_number),
        pytest.param(4, 1, marks=pytest.mark.every_number),
    ],
)
def test_a_killed_run_goes_on_with_what_it_has_not_had(
    place: Place, tmp_path: Path, processes: int, workers: int
) -> None:
    job, state = place.new_job(), tmp_path / "state.pt"
    kill_at = 40 // processes
    arguments = (job, state, workers, kill_at)
    killed = place.launch(SCRIPTS / "stateful_job.py", *arguments, processes=processes)
    assert killed.returncode != 0
    resumed = place.launch(SCRIPTS / "stateful_job.py", *arguments, processes=processes).checked()
    before = [line for line in killed.lines if line["step"] <= kill_at - 3]
    check_exact(place, job, 0, ids_of(before, epoch=0) + ids_of(resumed.lines, epoch=0))
    check_exact(place, job, 1, ids_of(resumed.lines, epoch=1))


@pytest.mark.parametrize(("every", "is_refused"), [(1, False), (3, True)])
def test_other_ranks_go_on_unless_batches_since_a_snapshot_would_be_passed_over(
    place: Place, every: int, is_refused: bool
) -> None:
    """Of one rank's batches some would come to two ranks again, or never."""
    job = place.new_job()

    def loader(ranks: int, rank: int) -> StatefulDataLoader:
        dataset = refill.CacheDataset(place.url, dataset=place.dataset, job=job, world_size=ranks, rank=rank)
        sampler = refill.EpochSampler(dataset)
        return StatefulDataLoader(
            dataset, 8, sampler=sampler, num_workers=1, collate_fn=list, snapshot_every_n_steps=every
        )

    alone = loader(1, 0)
    had = [sample["__id__"] for batch in islice(alone, 5) for sample in batch]
    state = alone.state_dict()
    for rank in range(2):
        more = loader(2, rank)
        more.load_state_dict(state)
        if is_refused:
            with pytest.raises(
                InvalidInput, match=r"with world_size 1 .*, and this job has 2 .* pass over 2 of each rank"
            ):
                next(iter(more))
        else:
            had += [sample["__id__"] for batch in more for sample in batch]
    if not is_refused:
        check_exact(place, job, 0, had)
