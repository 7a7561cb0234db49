"""Settings as users have them: numbers of numpy, 0 and 1 as torch takes them, and what no setting can be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

import refill
from refill.errors import InvalidInput
from refill.pods.batch_groups import batch_groups
from refill.protocol.sample_cut import SampleCut


def settings_of(**given: Any) -> dict[str, Any]:
    """Of the job, which were checked as they were given."""
    dataset = refill.CacheDataset("http://127.0.0.1:1", dataset="file:///d", job="j", **given)
    found: dict[str, Any] = vars(dataset)["_settings"]
    return found


@pytest.mark.parametrize(
    "name", ["seed", "read_seed", "chunk_size", "world_size", "memory_bytes", "num_epochs", "prefetch_window"]
)
def test_whole_numbers_of_numpy_are_whole_numbers(name: str) -> None:
    found = settings_of(**{name: np.int64(1)})[name]
    assert (type(found), found) == (int, 1)


def test_so_they_are_among_settings_of_a_policy_and_elsewhere() -> None:
    assert settings_of(policy_settings={"shares": np.int32(4)})["policy_settings"] == {"shares": 4}
    assert batch_groups(np.int64(2)).size == 2
    mixture = refill.Mixture(
        "http://127.0.0.1:1", {"a": "file:///a"}, job="m", epoch_size=np.int64(5), memory_bytes=np.int64(1 << 24)
    )
    assert mixture.job == "m"


@pytest.mark.parametrize("name", ["shuffle", "drop_last"])
@pytest.mark.parametrize("given", [np.True_, 1, np.False_, 0])
def test_what_torch_takes_for_true_and_false(name: str, given: Any) -> None:
    assert settings_of(**{name: given})[name] is bool(given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"shuffle": 2}, "shuffle must be bool, got 2"),
        ({"seed": np.float64(1.5)}, "seed must be int, got 1.5"),
        ({"seed": True}, "seed must be int, got True"),
        ({"members": 5}, r"members must be names, as \['json', 'cls'\], got 5"),
        ({"members": "cls"}, "members must be names"),
    ],
)
def test_what_is_none_is_one_line(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        settings_of(**given)


def test_names_of_members_may_come_one_by_one() -> None:
    assert SampleCut.of((name for name in ("json", "cls")), None).members == ("json", "cls")  # type: ignore[arg-type]


def dataset_of(job: str) -> refill.CacheDataset:
    return refill.CacheDataset("http://127.0.0.1:1", dataset="file:///d", job=job)


def test_a_loader_and_a_dataset_of_other_jobs_do_not_go_together() -> None:
    """Else the state of the one would be taken for that of the other."""
    one, other = dataset_of("one"), dataset_of("other")
    loader: DataLoader[Any] = DataLoader(one, batch_size=4)
    with pytest.raises(InvalidInput, match="the loader reads job one, and the dataset beside it is of job other"):
        refill.timed(loader, other)
    refill.timed(loader, one)
