"""How a job's memory is divided: parts and what Python needs beside their samples stay within it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill.errors import MemoryTooSmall
from refill_service.cache_core.job_memory import JobMemory, check_tables, memory_for_chunks

fractions = st.floats(0, 0.3)
memories = st.builds(JobMemory, st.integers(1 << 20, 1 << 42), fractions, fractions, st.floats(1, 1e8, allow_nan=False))


@given(memories)
def test_samples_and_what_is_beside_them_fit(memory: JobMemory) -> None:
    resident, sent = (1 + beside / memory.sample_bytes for beside in (250, 400))
    in_flight = memory.memory_bytes * memory.in_flight_fraction
    taken = memory.abstract_bytes * resident + (memory.remote_bytes + memory.recent_bytes) * sent + in_flight
    assert taken <= memory.memory_bytes * (1 + 1e-9)


@given(memories, st.integers(1 << 16, 1 << 40))
def test_what_chunks_need_is_what_they_get(of: JobMemory, wanted: int) -> None:
    needed = memory_for_chunks(wanted, of)
    got = JobMemory(needed, of.remote_fraction, of.in_flight_fraction, of.sample_bytes)
    assert abs(got.abstract_bytes - wanted) <= 1 + wanted * 1e-6


def test_large_samples_get_nearly_all_of_it_and_small_ones_half() -> None:
    large, small = (JobMemory(1_000_000, 0, 0, sample_bytes) for sample_bytes in (100_000, 250))
    assert (large.abstract_bytes, small.abstract_bytes) == (947_630, 475_000)


def test_who_has_no_memory_for_tables_hears_of_larger_chunks_only_where_they_help() -> None:
    with pytest.raises(MemoryTooSmall, match="take 195,000,000; give it more memory_bytes, or a larger chunk_size"):
        check_tables(60_000_000, 195_000_000, 50_000_000, "job", 250_000, 1)
    with pytest.raises(MemoryTooSmall, match="memory_bytes; with any chunk_size they take 120,000,300 and more"):
        check_tables(60_000_000, 195_000_000, 120_000_300, "job", 250_000, 1)
    check_tables(195_000_000, 195_000_000, 120_000_300, "job", 250_000, 1)
