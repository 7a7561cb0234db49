"""Settings of a job: what is refused, and that JSON brings them back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill.errors import InvalidInput
from refill.protocol.job_spec import JobSpec

specs = st.builds(
    JobSpec,
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True),
    # Patterns of WebDataset's shards are refused.
    dataset=st.text(st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="*{"), max_size=50).filter(
        lambda url: not url.endswith(".tar")
    ),
    world_size=st.integers(1, 2**20),
    seed=st.integers(-(2**63), 2**63 - 1),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    order=st.sampled_from(["keyed", "explicit"]),
    chunk_size=st.integers(1, 2**16),
    refill=st.sampled_from(["best", "random"]),
)


@given(specs)
def test_json_brings_a_job_back(spec: JobSpec) -> None:
    assert JobSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert spec.differences(spec) == []


@given(specs, specs)
def test_differences_are_empty_only_for_equal_jobs(one: JobSpec, other: JobSpec) -> None:
    assert (one.differences(other) == []) == (one == other)
    assert len(one.differences(other)) == len(other.differences(one))


def test_a_difference_says_whose_value_is_which() -> None:
    of_the_job, of_the_client = JobSpec("run", "s3://b/d", seed=0), JobSpec("run", "s3://b/d", seed=7)
    assert of_the_job.differences(of_the_client) == ["seed: yours is 7, the job's 0"]


def test_what_is_left_to_the_pods_is_no_number() -> None:
    of_the_job = JobSpec("run", "s3://b/d", policy="planned")
    of_the_client = JobSpec("run", "s3://b/d", policy="planned", chunk_size=64, policy_settings={"shares": 8})
    chunks, shares = of_the_job.differences(of_the_client)
    assert chunks == "chunk_size: yours is 64, the job's chosen by refill"
    assert shares == "policy_settings shares: yours is 8, the job's not given"
    assert of_the_client.differences(of_the_job)[0] == "chunk_size: yours is chosen by refill, the job's 64"


@given(specs, st.sampled_from([("64MiB", 64 << 20), ("1.5k", 1500), ("7", 7), (" 2 gb", 2 * 10**9)]))
def test_sizes_may_have_units(spec: JobSpec, written: tuple[str, int]) -> None:
    said, size = written
    given = spec.to_dict() | {"memory_bytes": said, "policy_settings": {"plan_bytes": said}}
    found = JobSpec.from_dict(given)
    assert (found.memory_bytes, found.policy_settings) == (size, {"plan_bytes": size})
    assert given["policy_settings"] == {"plan_bytes": said}, "what a caller gave stays as it is"


@pytest.mark.parametrize("given", [{"memory_bytes": "lots"}, {"policy_settings": {"plan_bytes": "lots"}}])
def test_what_is_no_size_is_named(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"job setting \w+_bytes: 'lots' is not a number of bytes; .*2GiB"):
        JobSpec.from_dict({"name": "run", "dataset": "s3://b/d"} | given)


@pytest.mark.parametrize("shards", ["{000..009}.tar", "{a,b}/*.tar", "000.tar"])
def test_shards_in_place_of_their_folder_are_answered_by_it(shards: str) -> None:
    with pytest.raises(InvalidInput, match=r"names tars; give the folder that holds them: s3://b/wds$"):
        JobSpec("run", f"s3://b/wds/{shards}")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"name": "a/b"}, "job name"),
        ({"name": ""}, "job name"),
        ({"name": "a\n"}, "job name"),
        ({"name": "a" * 129}, "job name"),
        ({"name": ".a"}, "job name"),
        ({"name": 3}, "name"),
        ({"world_size": 0}, "world_size"),
        ({"world_size": True}, "world_size"),
        ({"world_size": 2.0}, "world_size"),
        ({"seed": 2**63}, "seed"),
        ({"seed": None}, "seed"),
        ({"shuffle": 1}, "shuffle"),
        ({"chunk_size": -1}, "chunk_size"),
        ({"prefetch_window": -1}, "prefetch_window"),
        ({"memory_bytes": -1}, "memory_bytes"),
        ({"order": "random"}, "order"),
        ({"policy": "magic"}, "policy"),
        ({"chunksize": 3}, "chunksize"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInput, match=named) as caught:
        JobSpec.from_dict({"name": "job", "dataset": "s3://b/p", **settings})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given_settings", [{"name": "a"}, {"dataset": "s3://b/p"}, {}, [], None, "job"])
def test_what_is_no_object_with_name_and_dataset_is_refused(given_settings: Any) -> None:
    with pytest.raises(InvalidInput):
        JobSpec.from_dict(given_settings)


def test_a_read_seed_is_a_number_or_none() -> None:
    alone, swept = JobSpec("run", "s3://b/d"), JobSpec("run", "s3://b/d", read_seed=0)
    assert JobSpec.from_dict(alone.to_dict()) == alone
    assert JobSpec.from_dict(swept.to_dict()) == swept
    assert alone.differences(swept) == ["read_seed: yours is 0, the job's not given"]
    with pytest.raises(InvalidInput, match="job setting read_seed must be int, got '7'"):
        JobSpec.from_dict(swept.to_dict() | {"read_seed": "7"})
